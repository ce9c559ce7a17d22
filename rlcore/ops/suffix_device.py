"""Draft from a suffix forest on a GPU: one launch per batch, and token ids stay on the GPU.

`DeviceForest` gives the same drafts as `rlcore.ops.suffix.Forest`, from a copy of its memory. Each
request has a record and a fixed capacity for its own stream. Requests with longer streams draft
only from the history. `device="cpu"` runs the same code on the host.

All calls use the CUDA stream that is current when the forest is made. The allocator reuses freed
memory in the order of this stream, so a launch on another stream could read overwritten histories.
A CUDA graph may record `step` on its own stream; replay it on the forest's stream.
"""

import warnings
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
        room = 1 << (stream * 4 // 3).bit_length()
        self._records = torch.full((requests, 8), -1, dtype=torch.int64, device=device)
        self.device = self._records.device  # includes the device index
        self._text = torch.empty((requests, stream, 2), dtype=torch.int32, device=self.device)
        self._slots = torch.empty((requests, room, 2), dtype=torch.int32, device=self.device)
        self._stream = native.stream(self.device)
        self._nothing = torch.from_numpy(_NOTHING).to(self.device)
        self._none = torch.empty(0, dtype=torch.int32, device=self.device)
        self._current: _Block | None = None
        self._free = list(range(requests - 1, -1, -1))
        self._generation = np.zeros(requests, np.int64)
        self._open: dict[int, _Block | None] = {}  # histories that each handle uses

    def upload(self, forest: Forest) -> None:
        """Copy the current histories of `forest` to the device, for requests opened from now on.

        Raises:
            ValueError: `forest` has no histories yet, or is the Python reference.
        """
        self._check_stream()
        block = forest.arena()
        count = int(block[:8].view(np.uint64)[0])
        table = block[_HEADER_BYTES : _HEADER_BYTES + count * _PROMPT.itemsize]
        memory = torch.empty(block.size, dtype=torch.uint8, device=self.device)
        with warnings.catch_warnings():
            # torch warns about read-only arrays, but this code only reads the array.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            memory.copy_(torch.from_numpy(block))
        self._current = _Block(memory, table.view(_PROMPT).copy())

    def open(self, keys: Longs) -> Tensor:
        """Open a request for each prompt key [B] (numpy int64); return handles [B] on the device.

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
        where = torch.from_numpy(indices).to(self.device)
        made = torch.from_numpy(records).to(self.device)
        self._records[where] = made
        self._slots[where] = 0
        handles = made[:, 0].contiguous()
        # Remove the slots from the free list last, so that a failed call removes none.
        del self._free[len(self._free) - len(keys) :]
        self._open.update(dict.fromkeys(records[:, 0].tolist(), self._current))
        return handles

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

    def close(self, handles: Tensor) -> None:
        """Close requests [B] and wait for the device. Raise ValueError if a handle is not open."""
        self._check_stream()
        self._check("handles", handles, torch.int64)
        given = self._check_open(handles)
        indices = handles.cpu().numpy() & 0xFFFFFFFF
        self._records[torch.from_numpy(indices).to(self.device), 0] = -1
        self._generation[indices] = (self._generation[indices] + 1) & 0x7FFFFFFF
        self._free += indices.tolist()
        for handle in given:
            del self._open[handle]

    def _check_open(self, handles: Tensor) -> list[int]:
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
        offsets: Tensor,
        windows: Tensor | None = None,
        *,
        running: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Accept, advance and draft (see `Forest`) in one launch, without waiting for the device.

        Args:
            handles: [B] int64, distinct.
            accepted: [B] int32, accepted length of each last draft; None: keep all windows.
            tokens: [N] int32 to append.
            offsets: [B + 1] int64: tokens[offsets[i] : offsets[i + 1]] go to handles[i].
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
        stream = self._check_stream(records=True)
        batch, o = self._check("handles", handles, torch.int64), self.options
        for name, given, dtype, size in (
            ("accepted", accepted, torch.int32, batch),
            ("tokens", tokens, torch.int32, None),
            ("offsets", offsets, torch.int64, batch + 1),
            ("windows", windows, torch.int32, batch),
        ):
            if given is not None:
                self._check(name, given, dtype, size)
        running = suffix.check_running(running) or batch
        if self.device.type == "cpu":
            self._check_values(handles, accepted, tokens, offsets, windows)
        width = o.max_window
        if windows is None and o.knee > 0 and batch > 0:
            width = max(1, min(o.knee // running - 1, o.max_window))
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
            offsets,
            self._none if windows is None else windows,
            out,
            lengths,
            claims,
            [float(value) for value in asdict(o).values()],
            running,
            stream,
        )
        return out, lengths

    def _check_values(
        self,
        handles: Tensor,
        accepted: Tensor | None,
        tokens: Tensor,
        offsets: Tensor,
        windows: Tensor | None,
    ) -> None:
        given = self._check_open(handles)
        suffix.check_offsets("offsets", offsets.numpy(), len(given), tokens.numel())
        suffix.check_tokens(tokens.numpy())
        if windows is not None:
            suffix.check_windows(windows.numpy(), len(given), self.options.max_window)
        if accepted is not None:
            proposed = self._records.view(torch.int32)[handles & 0xFFFFFFFF, _PROPOSED_AT]
            suffix.check_accepted(accepted.numpy(), proposed.tolist())

    def _check_stream(self, records: bool = False) -> int:
        """Return the current stream: the forest's, or with `records` one that a graph records."""
        current = native.stream(self.device)
        is_good = current == self._stream or (records and torch.cuda.is_current_stream_capturing())
        assert is_good, (
            f"DeviceForest on stream {current:#x}: it was made on stream {self._stream:#x}"
        )
        return current

    def _check(self, name: str, given: Tensor, dtype: torch.dtype, size: int | None = None) -> int:
        if not isinstance(given, Tensor):
            raise ValueError(f"{name}: must be a tensor, not {type(given).__name__}")
        if given.dtype != dtype:
            raise ValueError(f"{name}: must be {dtype}, not {given.dtype}")
        if given.device.type != self.device.type or given.device.index not in (
            self._records.device.index,
            None,
        ):
            raise ValueError(f"{name}: must be on {self._records.device}, not on {given.device}")
        if given.dim() != 1 or not given.is_contiguous():
            raise ValueError(f"{name}: must be contiguous and 1-D, got shape {given.shape}")
        if size is not None and given.numel() != size:
            raise ValueError(f"{name}: {size} entries are needed, got {given.numel()}")
        return given.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that this forest uses."""
        blocks = {id(b): b for b in [*self._open.values(), self._current] if b is not None}
        tensors = [self._records, self._text, self._slots]
        return sum(t.nbytes for t in tensors) + sum(b.memory.nbytes for b in blocks.values())
