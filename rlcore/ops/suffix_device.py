"""Draft from a suffix forest on a GPU: one launch per batch, and token ids stay on the GPU.

`DeviceForest` gives the same drafts as `rlcore.ops.suffix.Forest`, from a copy of its memory. Each
request has a record and a fixed capacity for its own stream. Requests with longer streams draft
only from the history. `device="cpu"` runs the same code on the host.

No call but `upload` waits for the device. All other calls use the CUDA stream that is current at
the first one. The allocator reuses freed memory in the order of this stream, so a launch on another
stream could read overwritten histories. A CUDA graph may record `step` on its own stream; replay it
on the forest's stream. `upload` has its own stream and may run in another thread.
"""

import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.ops import native, suffix
from rlcore.ops.suffix import Forest, Longs

# The memory of a forest begins with this header, then come the prompts (csrc/suffix/layout.h).
_HEADER_BYTES = 32
_PROMPT = np.dtype(
    [("key", "<i8"), ("states", "<u8"), ("edges", "<u8"), ("num_states", "<u4"), ("rest", "<u4")]
)
# Offset, in 32-bit words, of the last draft's length in a request's record.
_PROPOSED_AT = 9
# Columns of a request's record, in 64-bit words: histories, match and window; tokens matched.
_HISTORY, _MATCHED = slice(1, 6), 7
# Bytes that `upload` copies at a time, through pinned memory.
_CHUNK = 1 << 25
# Automaton with a single state, for prompts without history.
_NOTHING = np.array([-1, -1, -1, 0, -1, 0], np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceOptions:
    """Options of `DeviceForest`, as in `Forest`; their order is that of csrc/torch/suffix.cpp."""

    limit: int = 7
    min_match: int = 3
    min_prob: float = 0.3
    max_window: int = 32
    start_window: int = 2
    growth: int = 2
    knee: int = 0
    live: bool = True
    candidates: int = 16
    live_match: int = 3
    factor: float = 0.0


@dataclass(slots=True)
class _Block:
    """Copy of a forest's histories on the device, freed when no request uses it any more."""

    memory: Tensor
    prompts: np.ndarray


class DeviceForest:
    """Suffix forest on a device. B: number of requests in a call; W: width of the draft array."""

    def __init__(
        self,
        device: str | torch.device = "cpu",
        *,
        requests: int = 256,
        stream: int = 8192,
        **options: Any,
    ) -> None:
        """Allocate memory for all requests on the device.

        Args:
            device: device of all tensors.
            requests: maximum number of open requests.
            stream: capacity of a request's own stream in tokens (18.7 to 29.3 bytes each); use 0 if
                `live` is False.
            options: fields of `DeviceOptions`.

        Raises:
            ValueError: invalid options, as in `Forest`.
            ImportError: there is no native build for the device.
        """
        device = torch.device(device)
        self.options = DeviceOptions(**options)
        Forest(**options, threads=1)  # raises if an option is invalid
        for name, value in (("requests", requests), ("stream", stream)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise ValueError(f"{name} {value!r}: must be a whole number")
        if requests < 1:
            raise ValueError(f"requests {requests}: must be at least 1")
        if not 0 <= stream <= 1 << 24:
            raise ValueError(f"stream {stream}: must be 0 to {1 << 24}")
        ops = native.torch_ops("suffix forest", device.type)
        if ops is None:
            raise ImportError(f"DeviceForest needs the native build with kernels for {device}")
        self._ops = ops
        room = _slots(stream)
        self._records = torch.full((requests, 8), -1, dtype=torch.int64, device=device)
        self.device = self._records.device  # includes the device index
        self._text = torch.empty((requests, stream, 2), dtype=torch.int32, device=self.device)
        self._slots = torch.empty((requests, room, 2), dtype=torch.int32, device=self.device)
        self._stream: int | None = None  # the stream of the first call
        self._made_on: Any = None
        self._uploads: Any = None
        if self.device.type == "cuda":
            self._made_on = torch.cuda.current_stream(self.device)
            self._uploads = torch.cuda.Stream(self.device)
        self._nothing = torch.from_numpy(_NOTHING).to(self.device)
        self._none = torch.empty(0, dtype=torch.int32, device=self.device)
        self._no_offsets = torch.empty(0, dtype=torch.int64, device=self.device)
        self._staged: _Block | None = None
        self._current: _Block | None = None
        self._free = list(range(requests - 1, -1, -1))
        self._generation = np.zeros(requests, np.int64)
        self._open: dict[int, _Block | None] = {}  # histories that each handle uses

    def upload(self, forest: Forest) -> None:
        """Copy the current histories of `forest` to the device, for use after `swap`. Wait for the
        copy. This may run in another thread while requests draft.

        Raises:
            ValueError: `forest` has no histories yet, or is the Python reference.
            MemoryError: the device has no memory for the histories.
        """
        block = forest.arena()
        count = int(block[:8].view(np.uint64)[0])
        table = block[_HEADER_BYTES : _HEADER_BYTES + count * _PROMPT.itemsize]
        # A thread begins with GPU 0, where the end of `stream` would make a context.
        on_gpu = torch.cuda.device(self.device) if self._uploads is not None else nullcontext()
        with warnings.catch_warnings(), on_gpu, torch.cuda.stream(self._uploads):
            # torch warns about read-only arrays, but this code only reads the array.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            host = torch.from_numpy(block)
            try:
                memory = torch.empty(block.size, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error
            if self._uploads is None:
                memory.copy_(host)
            else:
                for to, part in zip(memory.split(_CHUNK), host.split(_CHUNK), strict=True):
                    to.copy_(part.pin_memory(), non_blocking=True)
                self._uploads.synchronize()
        self._staged = _Block(memory, table.view(_PROMPT).copy())

    def swap(self) -> None:
        """Use the histories of the last `upload` for requests opened or renewed from now on."""
        self._check_stream()
        self._current = self._staged
        if self._current is not None and self._uploads is not None:
            self._current.memory.record_stream(torch.cuda.current_stream(self.device))

    def open(self, keys: Longs) -> Longs:
        """Open a request for each prompt key [B] (int64); return handles [B]. `step` takes the
        handles as a tensor on the device.

        Raises:
            ValueError: more than the maximum number of requests would be open.
        """
        self._check_stream()
        suffix.check_array("keys", keys, np.int64)
        if len(keys) > len(self._free):
            raise ValueError(
                f"keys: {len(keys)} requests, but only {len(self._free)} slots are free; raise "
                "DeviceForest(requests=...)"
            )
        indices = np.array(self._free[len(self._free) - len(keys) :][::-1], np.int64)
        records = np.zeros((len(keys), 8), np.int64)
        records[:, 0] = self._generation[indices] << 32 | indices
        records[:, 1:3] = self._histories(keys)
        where, made = self.put(indices), self.put(records)
        self._records[where] = made
        self._slots[where] = 0
        handles = records[:, 0].copy()
        # Remove the slots from the free list last, so that a failed call removes none.
        del self._free[len(self._free) - len(keys) :]
        self._open.update(dict.fromkeys(handles.tolist(), self._current))
        return handles

    def renew(self, handles: Longs, keys: Longs) -> None:
        """Give open requests [B] the current histories of their prompt keys [B], as if each were
        closed, opened again and given its stream. The next call matches the whole stream again; a
        stream beyond its capacity begins a new match.

        Raises:
            ValueError: a handle is not open, or streams are not kept, because `live` is False.
        """
        self._check_stream()
        if not self.options.live:
            raise ValueError("renew: needs the requests' streams, so live must be True")
        given = self._check_open(handles)
        suffix.check_array("keys", keys, np.int64)
        made = np.zeros((len(handles), 5), np.int64)
        made[:, :2] = self._histories(keys)
        where = self.put(handles & 0xFFFFFFFF)
        self._records[:, _HISTORY][where] = self.put(made)
        self._records[:, _MATCHED][where] = 0
        self._open.update(dict.fromkeys(given, self._current))

    def put(self, array: np.ndarray) -> Tensor:
        """Return `array` as a tensor on the device, without waiting for the device."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def _histories(self, keys: Longs) -> np.ndarray:
        """Return the device addresses of the states and edges of each key's history, [B, 2]."""
        found = np.empty((len(keys), 2), np.int64)
        found[:] = self._nothing.data_ptr(), 0
        block = self._current
        if block is not None and len(block.prompts) > 0:
            at = np.searchsorted(block.prompts["key"], keys)
            at = np.minimum(at, len(block.prompts) - 1)
            known = block.prompts["key"][at] == keys
            base = block.memory.data_ptr()
            for column, name in enumerate(("states", "edges")):
                found[known, column] = base + block.prompts[name][at[known]].astype(np.int64)
        return found

    def close(self, handles: Longs) -> None:
        """Close requests [B]. Raise ValueError if a handle is not open."""
        self._check_stream()
        given = self._check_open(handles)
        indices = handles & 0xFFFFFFFF
        self._records[:, 0][self.put(indices)] = -1
        self._generation[indices] = (self._generation[indices] + 1) & 0x7FFFFFFF
        self._free += indices.tolist()
        for handle in given:
            del self._open[handle]

    def _check_open(self, handles: Longs) -> list[int]:
        suffix.check_array("handles", handles, np.int64)
        given, seen = handles.tolist(), set()
        for i, handle in enumerate(given):
            if handle not in self._open:
                raise ValueError(f"handles[{i}] {handle}: is not open (closed, or never opened)")
            if handle in seen:
                raise ValueError(f"handles[{i}] {handle}: is listed twice; list every handle once")
            seen.add(handle)
        return given

    def step(
        self,
        handles: Tensor,
        accepted: Tensor | None,
        tokens: Tensor,
        offsets: Tensor | None = None,
        windows: Tensor | None = None,
        *,
        counts: Tensor | None = None,
        running: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Accept, advance and draft (see `Forest`) in one launch, without waiting for the device.

        Args:
            handles: [B] int64, distinct.
            accepted: [B] int32, accepted length of each last draft; None: keep all windows.
            tokens: [N] int32 to append; with `counts` [B, T].
            offsets: [B + 1] int64: tokens[offsets[i] : offsets[i + 1]] go to handles[i].
            counts: [B] int32, instead of `offsets`: tokens[i, : counts[i]] go to handles[i].
            windows: [B] int32 maximum draft lengths; None: each request's window, cut by `knee`.
            running: number of requests that share the forward pass; 0: B.

        Returns:
            tokens [B, W], filled up with -1, and draft lengths [B]. W is max_window; if `windows`
            is None, the maximum length under `knee`.

            On a GPU values are not checked, because a check would wait for the device. A handle
            that is not open or occurs twice gets length -1; negative tokens match nothing; other
            invalid values are clamped. On the CPU such values raise the ValueErrors of `Forest`,
            and no request changes.
        """
        o, batch = self.options, handles.numel() if isinstance(handles, Tensor) else 0
        running = suffix.check_running(running) or batch
        width = o.max_window
        if windows is None and o.knee > 0 and batch > 0:
            width = max(1, min(o.knee // running - 1, o.max_window))
        return self._launch(handles, accepted, tokens, offsets, counts, windows, width, running)

    def advance(
        self,
        handles: Tensor,
        accepted: Tensor | None,
        tokens: Tensor,
        offsets: Tensor | None = None,
        *,
        counts: Tensor | None = None,
    ) -> None:
        """Accept and advance without a draft; see `step` for the arguments."""
        self._launch(handles, accepted, tokens, offsets, counts, None, 0, -1)

    def _launch(
        self,
        handles: Tensor,
        accepted: Tensor | None,
        tokens: Tensor,
        offsets: Tensor | None,
        counts: Tensor | None,
        windows: Tensor | None,
        width: int,
        running: int,
    ) -> tuple[Tensor, Tensor]:
        stream = self._check_stream(records=True)
        batch = self._check("handles", handles, torch.int64)
        if (offsets is None) == (counts is None):
            raise ValueError("offsets, counts: one of them is needed, and not both")
        for name, given, dtype, size in (
            ("accepted", accepted, torch.int32, batch),
            ("offsets", offsets, torch.int64, batch + 1),
            ("counts", counts, torch.int32, batch),
            ("windows", windows, torch.int32, batch),
        ):
            if given is not None:
                self._check(name, given, dtype, size)
        self._check("tokens", tokens, torch.int32, rows=None if counts is None else batch)
        if self.device.type == "cpu":
            self._check_values(handles, accepted, tokens, offsets, counts, windows)
        # One allocation holds the drafts and the marks that detect repeated handles.
        filled = torch.full(
            (batch * width + len(self._records),), -1, dtype=torch.int32, device=self.device
        )
        out, claims = filled[: batch * width].view(batch, width), filled[batch * width :]
        lengths = torch.empty(batch, dtype=torch.int32, device=self.device)
        self._ops.suffix_step(
            self._records,
            self._text,
            self._slots,
            handles,
            self._none if accepted is None else accepted,
            tokens,
            self._no_offsets if offsets is None else offsets,
            self._none if counts is None else counts,
            self._none if windows is None else windows,
            out,
            lengths,
            claims,
            [float(value) for value in asdict(self.options).values()],
            running,
            stream,
        )
        return out, lengths

    def _check_values(
        self,
        handles: Tensor,
        accepted: Tensor | None,
        tokens: Tensor,
        offsets: Tensor | None,
        counts: Tensor | None,
        windows: Tensor | None,
    ) -> None:
        given = self._check_open(handles.numpy())
        if offsets is not None:
            suffix.check_offsets("offsets", offsets.numpy(), len(given), tokens.numel())
            suffix.check_tokens(tokens.numpy())
        elif counts is not None:
            check_counts(counts.numpy(), tokens.size(1))
            for row, count in zip(tokens, counts.tolist(), strict=True):
                suffix.check_tokens(row[:count].numpy())
        if windows is not None:
            suffix.check_windows(windows.numpy(), len(given), self.options.max_window)
        if accepted is not None:
            proposed = self._records.view(torch.int32)[handles & 0xFFFFFFFF, _PROPOSED_AT]
            suffix.check_accepted(accepted.numpy(), proposed.tolist())

    def _check_stream(self, records: bool = False) -> int:
        """Return the current stream: the forest's, or with `records` one that a graph records. The
        first call decides the forest's stream."""
        current = native.stream(self.device)
        if self._stream is None:
            self._stream = current
            if self._made_on is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._made_on)
        is_good = current == self._stream or (records and torch.cuda.is_current_stream_capturing())
        assert is_good, (
            f"DeviceForest on stream {current:#x}: its first call was on {self._stream:#x}"
        )
        return current

    def _check(
        self,
        name: str,
        given: Tensor,
        dtype: torch.dtype,
        size: int | None = None,
        *,
        rows: int | None = None,
    ) -> int:
        """Raise ValueError unless `given` is a contiguous tensor on the forest's device: [size] or,
        with `rows`, [rows, any]. Return its number of entries."""
        if not isinstance(given, Tensor):
            raise ValueError(f"{name}: must be a tensor, not {type(given).__name__}")
        if given.dtype != dtype:
            raise ValueError(f"{name}: must be {dtype}, not {given.dtype}")
        if given.device.type != self.device.type or given.device.index not in (
            self._records.device.index,
            None,
        ):
            raise ValueError(f"{name}: must be on {self._records.device}, not on {given.device}")
        dims = 1 if rows is None else 2
        if given.dim() != dims or not given.is_contiguous():
            raise ValueError(f"{name}: must be contiguous and {dims}-D, got shape {given.shape}")
        if size is not None and given.numel() != size:
            raise ValueError(f"{name}: {size} entries are needed, got {given.numel()}")
        if rows is not None and given.size(0) != rows:
            raise ValueError(f"{name}: {rows} rows are needed, got {given.size(0)}")
        return given.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this forest uses."""
        blocks = {
            id(b): b for b in [*self._open.values(), self._current, self._staged] if b is not None
        }
        tensors = [self._records, self._text, self._slots]
        return sum(t.nbytes for t in tensors) + sum(b.memory.nbytes for b in blocks.values())


def _slots(stream: int) -> int:
    return 1 << (stream * 4 // 3).bit_length()


def stream_bytes(stream: int) -> int:
    """Return the bytes of a request's record and of its stream with a capacity of `stream`
    tokens."""
    return 64 + 8 * (stream + _slots(stream))


def check_counts(counts: np.ndarray, most: int) -> None:
    """Raise ValueError if a number of new tokens is negative or above `most`."""
    for i in np.flatnonzero((counts < 0) | (counts > most))[:1]:
        raise ValueError(f"counts[{i}] {counts[i]}: must be 0 to the tokens of a row, {most}")
