"""AdamW in chunks, whose states stay in host memory, or whose moments are kept in bfloat16.

With states in host memory, each chunk is copied to the device, stepped there and copied back: three
chunks are under way at a time. The step is torch's AdamW on the same values, so the weights equal
those of torch's AdamW. Moments in bfloat16 are float32 within a step, and rounded after it.

Own code instead of Megatron's `optimizer_cpu_offload`. Without Transformer Engine that one leaves
the main parameters on the device as well. Its copies in host memory are out of a checkpoint's
reach, and its Adam on the CPU rounds differently.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from rlcore.mcore.side_stream import Event, SideStream, wait
from rlcore.utils.host_room import BLOCK

CHUNK_BYTES = BLOCK
"""Bytes of a chunk's main parameters, and of either moment: one allocation of pinned memory."""
UNDER_WAY = 3
"""Number of chunks on the device at a time: one comes, one is stepped, one leaves."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_ALIGN = 64
"""Slices begin at multiples of so many values, so that vector kernels see them aligned."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive values of a main parameter that are part of a chunk."""

    group: dict[str, Any]
    main: Tensor
    start: int
    size: int
    at: int
    """Index of the first value in the chunk."""

    @property
    def grad(self) -> Tensor:
        assert self.main.grad is not None
        return self.main.grad

    def of(self, chunk: Tensor) -> Tensor:
        """Return the slice's values in a tensor of the whole chunk, as a view [size]."""
        return chunk[self.at : self.at + self.size]

    def within(self, whole: Tensor) -> Tensor:
        """Return the slice's values in a tensor of the main parameter's size, as a view [size]."""
        return whole.view(-1)[self.start : self.start + self.size]


@dataclass(frozen=True, slots=True)
class _Chunk:
    slices: Sequence[Slice]
    kept: dict[str, Tensor]
    """What is kept between steps, in host memory or on the device, by kind of value."""


class ChunkedAdamW:
    """Replacement for the inner optimizer of a Megatron optimizer."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        weights: Iterable[tuple[Tensor, Tensor]],
        *,
        offload: bool,
        moments: torch.dtype | None = None,
    ) -> None:
        """Allocate moments. With `offload`, move main parameters to host memory, too, and empty
        their storages. The tensors stay on the device without contents, since Megatron gives them
        their gradients.

        Args:
            groups: parameter groups of the optimizer that is replaced.
            weights: each main parameter that is not the weight itself, with the weight.
            moments: data type in which moments are kept; None: that of the main parameters.
        """
        self.param_groups = groups
        everything = [(group, main) for group in groups for main in group["params"]]
        self.state: dict[Tensor, dict[str, Any]] = {main: {"slices": []} for _, main in everything}
        self._weights = dict(weights) if offload else {}
        self.copied_bytes = 0
        """Bytes copied to host memory so far."""
        assert len(self._weights) in (0, len(everything)), "main parameters of some weights only"
        self._stepped: Event = None
        self._device, self._offload, self._moments = everything[0][1].device, offload, moments
        self._up, self._down = SideStream(self._device), SideStream(self._device)
        self._chunks = [self._keep(slices) for slices in divide(everything)]
        self._finish()
        for main in self._weights:
            main.untyped_storage().resize_(0)

    def _keep(self, slices: Sequence[Slice]) -> _Chunk:
        """Allocate what a chunk keeps. Main parameters are copied, moments are zero."""
        size, main = slices[-1].at + slices[-1].size, slices[0].main
        place: dict[str, Any] = {"device": self._device}
        if self._offload:
            place = {"pin_memory": self._device.type == "cuda"}
        dtypes = dict.fromkeys(MOMENTS, self._moments or main.dtype)
        if self._weights:
            dtypes["param"] = main.dtype
        kept = {kind: torch.zeros(size, dtype=dtype, **place) for kind, dtype in dtypes.items()}
        for piece in slices:
            if self._weights:
                piece.of(kept["param"]).copy_(piece.within(piece.main.detach()), non_blocking=True)
            self.state[piece.main]["slices"].append((piece, kept))
        return _Chunk(slices, kept)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of main parameters and moments in host memory."""
        return sum(kept.nbytes for kept in self._everything()) if self._offload else 0

    def on_device(self) -> list[Tensor]:
        """Return the moments that are kept on the device."""
        return [] if self._offload else self._everything()

    def _everything(self) -> list[Tensor]:
        return [kept for chunk in self._chunks for kept in chunk.kept.values()]

    def slices_of(self, main: Tensor) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Yield the parts of a main parameter as views: index of the first value, and main
        parameter and moments by kind. Wait for the last step first."""
        self._finish()
        for piece, kept in self.state[main]["slices"]:
            found = {kind: piece.of(values) for kind, values in kept.items()}
            if "param" not in found:
                found["param"] = piece.within(main.detach())
            yield piece.start, found

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """Round the main parameters to weights, as after loading a checkpoint."""
        for main, weight in self._weights.items():
            for start, found in self.slices_of(main):
                flat = weight.data.view(-1)[start : start + found["param"].numel()]
                flat.copy_(found["param"])

    @torch.no_grad()
    def step(self) -> None:
        """Step all main parameters. Those in host memory are rounded to weights as well."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        most = max(self._chunks, key=lambda chunk: chunk.kept["exp_avg"].numel()).kept
        wide = {}
        if self._moments is not None:
            wide = {kind: self._like(most[kind], torch.float32) for kind in MOMENTS}
        # Device memory of the chunks under way, and the event after which it is free.
        lanes = [
            {kind: self._like(kept) for kind, kept in most.items()}
            for _ in self._chunks[: UNDER_WAY * self._offload]
        ]
        free = [self._up.now() for _ in lanes]
        for number, chunk in enumerate(self._chunks):
            if not self._offload:
                self._step(chunk.slices, chunk.kept, wide)
                continue
            i = number % len(lanes)
            here = {kind: lanes[i][kind][: kept.numel()] for kind, kept in chunk.kept.items()}
            wait(self._up.run(partial(_copy, here, chunk.kept), free[i]))
            self._step(chunk.slices, here, wide)
            free[i] = self._down.run(partial(_copy, chunk.kept, here), self._down.now())
        for event in free:
            wait(event)
        self.copied_bytes += self.host_bytes
        self._stepped = self._down.now()

    def _like(self, kept: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(kept, dtype=dtype, device=self._device, pin_memory=False)

    def _step(
        self, slices: Sequence[Slice], here: dict[str, Tensor], wide: dict[str, Tensor]
    ) -> None:
        """Step the slices of one chunk.

        Args:
            here: main parameters and moments on the device.
            wide: memory for a chunk's moments in float32, if they are kept in bfloat16.
        """
        rounded = {kind: here[kind] for kind in wide}
        wide = {kind: wide[kind][: kept.numel()] for kind, kept in rounded.items()}
        _copy(wide, rounded)
        here = here | wide
        for group in self.param_groups:
            mine = [s for s in slices if s.group is group]
            if not mine:
                continue
            if "param" in here:
                params = [s.of(here["param"]) for s in mine]
            else:
                params = [s.within(s.main.detach()) for s in mine]
            moments = [[s.of(here[kind]) for s in mine] for kind in MOMENTS]
            before = torch.full((len(mine),), float(group["step"] - 1), device=self._device)
            adamw(
                params,
                [s.within(s.grad) for s in mine],
                moments[0],
                moments[1],
                [],
                list(before.unbind()),
                foreach=False,
                fused=self._device.type == "cuda",
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            if self._weights:
                torch._foreach_copy_([s.within(self._weights[s.main].data) for s in mine], params)
        _copy(rounded, wide)

    def _finish(self) -> None:
        """Let the host wait until the last copies to host memory are complete."""
        if self._stepped is not None:
            self._stepped.synchronize()
        elif self._device.type == "cuda":
            torch.cuda.synchronize()


def divide(everything: Sequence[tuple[dict[str, Any], Tensor]]) -> Iterator[list[Slice]]:
    """Divide main parameters, given with their groups, into chunks of up to `CHUNK_BYTES`."""
    chunk: list[Slice] = []
    filled = 0
    for group, main in everything:
        most, start = CHUNK_BYTES // main.itemsize, 0
        while start < main.numel():
            size = min(main.numel() - start, most - filled)
            chunk.append(Slice(group, main, start, size, filled))
            start += size
            filled += -(-size // _ALIGN) * _ALIGN
            if filled >= most:
                yield chunk
                chunk, filled = [], 0
    if chunk:
        yield chunk


def replace_inner(part: Any, *, offload: bool, moments: torch.dtype | None) -> None:
    """Replace the inner optimizer of one of Megatron's optimizers by `ChunkedAdamW`."""
    groups, mains = part.optimizer.param_groups, main_parameters(part)
    part.optimizer = ChunkedAdamW(groups, mains, offload=offload, moments=moments)
    if offload and hasattr(part, "_copy_main_params_to_model_params"):
        # Each chunk has rounded its main parameters; Megatron would copy from emptied tensors.
        part._copy_main_params_to_model_params = _nothing


def main_parameters(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the main parameters of a Megatron optimizer that are not the weights, each with its
    weight (or with the part of it that the rank owns)."""
    for mains, weights in (
        ("shard_fp32_from_float16_groups", "shard_float16_groups"),
        ("fp32_from_float16_groups", "float16_groups"),
    ):
        for pair in zip(getattr(part, mains, []), getattr(part, weights, []), strict=True):
            yield from zip(*pair, strict=True)


def _copy(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    for kind, target in targets.items():
        target.copy_(sources[kind], non_blocking=True)


def _nothing() -> None:
    """Do nothing."""
