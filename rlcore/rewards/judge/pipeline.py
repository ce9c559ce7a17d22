"""The layers of a model in order, of which only some stay on the device: RollPacker's layer-wise
pipeline (arXiv 2509.21009, PAPERS.md A4).

    device    [0][1] . [3][4] . [6]     resident layers, in place
    slots           2       5           streamed ones take turns in two buffers
    time       0  1  2  3  4  5  6  0   computing
               2..|     5..|     2..|   being copied meanwhile: the next one that streams

A streamed layer is copied while earlier ones compute; the first one of the next forward comes while
the last layers of this one compute. The buffers have the same form everywhere, so a forward gives
the same bits however many layers are resident.

On CUDA streamed layers wait in pinned host memory and are copied by a stream of their own; on the
CPU a thread reads them from the mapped safetensors, and gives the pages back.

Own code instead of accelerate's offloading: with no layer resident a batch takes .80 of its time,
and layers may stay (`tools/results/judge_pipeline.json`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlcore.hf.config import HFConfig
from rlcore.hf.model import Flat, Layer, layer_numel, make_layer, place
from rlcore.hf.names import layer_prefix
from rlcore.hf.weights import WeightReader, drop_pages
from rlcore.rewards.judge.residency import SLOTS, spread

OnRead = Callable[[int], None]
"""Told how many bytes were read from files; it may take its time."""


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for one layer. Its matrices lie as on disk, so that filling it is plain copying."""

    flat: Tensor
    layer: Layer
    views: dict[str, Tensor]


def make_buffer(
    hf: HFConfig, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Buffer:
    """A buffer with undefined contents."""
    flat = torch.empty(layer_numel(hf, dtype), dtype=dtype, device=device, pin_memory=pinned)
    return Buffer(flat, *make_layer(hf, Flat(flat), rows_first=True))


class Ticket(Protocol):
    """A layer that is on its way."""

    def wait(self) -> None:
        """Return when the layer may be used by what is computed from now on."""


class Carrier(Protocol):
    """Brings layers to buffers on the device."""

    def bring(self, number: int, buffer: Buffer, stays: bool = False) -> Ticket:
        """Start to fill the buffer, when what was computed with it so far is done. `stays`: it will
        not be asked for again soon."""

    def close(self) -> None:
        """Let go of all."""


class FileCarrier:
    """From mapped safetensors, by one thread: for the CPU, where device and host are one."""

    def __init__(self, reader: WeightReader, on_read: OnRead | None = None) -> None:
        self._reader, self._on_read = reader, on_read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge layers")

    def bring(self, number: int, buffer: Buffer, stays: bool = False) -> Ticket:
        """See `Carrier`. What the CPU was asked to compute is done when the call returns."""
        return _Read(self._thread.submit(read_layer, self._reader, number, buffer, self._on_read))

    def close(self) -> None:
        """Wait for what is on its way."""
        self._thread.shutdown()


@dataclass(slots=True)
class _Read:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()


class PinnedCarrier:
    """From pinned host memory by a stream of its own. A layer is read into it when it is first
    needed, and is kept there while it streams."""

    def __init__(
        self, hf: HFConfig, dtype: torch.dtype, reader: WeightReader, device: torch.device
    ) -> None:
        self._hf, self._dtype, self._reader, self._device = hf, dtype, reader, device
        self._stream = torch.cuda.Stream(device)
        self._host: dict[int, Buffer] = {}

    def bring(self, number: int, buffer: Buffer, stays: bool = False) -> Ticket:
        """See `Carrier`. The copy is queued, not awaited."""
        host = self._host.pop(number, None)
        if host is None:
            host = make_buffer(self._hf, self._dtype, torch.device("cpu"), pinned=True)
            read_layer(self._reader, number, host)
        if not stays:
            self._host[number] = host  # else torch keeps it until it has been copied
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer.flat.copy_(host.flat, non_blocking=True)
        buffer.flat.record_stream(self._stream)
        return _Copy(self._stream.record_event(), self._device)

    def close(self) -> None:
        """Wait for what is on its way and give the host memory back."""
        self._stream.synchronize()
        self._host.clear()


@dataclass(slots=True)
class _Copy:
    event: torch.cuda.Event
    device: torch.device

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


def read_layer(
    reader: WeightReader, number: int, buffer: Buffer, on_read: OnRead | None = None
) -> None:
    """Fill a buffer in host memory from the files; the pages that were read are given back."""
    prefix = layer_prefix(number)
    for name, view in buffer.views.items():
        tensor = reader.get(prefix + name)
        place(view, tensor)
        num_bytes = tensor.nbytes
        drop_pages(tensor)
        if on_read is not None:
            on_read(num_bytes)


class Pipeline:
    """The layers in order: iterate once for every forward. Asking for the next layer says that the
    work of the one before has been queued, and its slot may be filled again behind it."""

    def __init__(
        self,
        hf: HFConfig,
        dtype: torch.dtype,
        device: torch.device,
        carrier: Carrier,
        overlap: bool = True,
    ) -> None:
        """No layer is resident yet. Without `overlap` a layer is fetched when it is needed: the
        plain twin, to compare with."""
        self._hf, self._dtype, self._device = hf, dtype, device
        self._carrier, self._overlap = carrier, overlap
        self._leaving = spread(hf.num_layers)
        self._resident: dict[int, Buffer] = {}
        self._streamed: list[int] = sorted(self._leaving)
        self._slots: list[Buffer] = []
        self._ahead: deque[tuple[int, Buffer, Ticket]] = deque()
        """What comes next, in the order in which it is needed."""

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_streamed(self) -> int:
        return self._hf.num_layers - len(self._resident)

    @property
    def num_buffers(self) -> int:
        """Buffers on the device, slots included."""
        return len(self._resident) + len(self._slots)

    def set_resident(self, number: int) -> None:
        """Keep so many layers on the device, between two forwards. What leaves goes first."""
        num_streamed = self._hf.num_layers - number
        assert 0 <= num_streamed <= self._hf.num_layers, number
        wanted = sorted(self._leaving[:num_streamed])
        is_so = wanted == self._streamed and num_streamed == self.num_streamed
        if is_so and len(self._slots) == min(SLOTS, num_streamed):
            return  # else, or where memory ended in the middle of a change:
        self._stop()
        self._streamed = wanted
        for leaving in self._resident.keys() & set(self._streamed):
            del self._resident[leaving]
        del self._slots[min(SLOTS, num_streamed) :]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what left is for the processes beside us
        coming = [n for n in range(self._hf.num_layers) if n not in self._streamed]
        for number in coming:
            if number not in self._resident:
                buffer = make_buffer(self._hf, self._dtype, self._device)
                self._carrier.bring(number, buffer, stays=True).wait()
                self._resident[number] = buffer
        while len(self._slots) < min(SLOTS, num_streamed):
            self._slots.append(make_buffer(self._hf, self._dtype, self._device))

    def __iter__(self) -> Iterator[Layer]:
        self._align()
        done = False
        try:
            for number in range(self._hf.num_layers):
                if number in self._resident:
                    yield self._resident[number].layer
                    continue
                if not self._overlap:
                    self._fetch(number, self._slots[0])
                found, slot, ticket = self._ahead.popleft()
                assert found == number, (found, number)
                ticket.wait()
                yield slot.layer
                if self._overlap:
                    after = self._ahead[-1][0] if self._ahead else number
                    self._fetch(self._following(after), slot)
            done = True
        finally:
            if not done:  # the forward was given up: the slot in use is in no queue
                self._stop()

    def close(self) -> None:
        """Let go of all layers."""
        self._stop()
        self._resident.clear()
        self._slots.clear()
        self._carrier.close()

    def _align(self) -> None:
        """The first streamed layers are on their way."""
        if self._overlap and not self._ahead:
            number = self._streamed[-1] if self._streamed else 0
            for slot in self._slots:
                number = self._following(number)
                self._fetch(number, slot)

    def _following(self, number: int) -> int:
        """The streamed layer after this one; after the last comes the first of the next forward."""
        return next((n for n in self._streamed if n > number), self._streamed[0])

    def _fetch(self, number: int, slot: Buffer) -> None:
        self._ahead.append((number, slot, self._carrier.bring(number, slot)))

    def _stop(self) -> None:
        """Nothing is on its way any more."""
        while self._ahead:
            self._ahead.popleft()[2].wait()
