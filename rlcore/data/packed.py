"""Hold prompts in compressed blocks: a million prompts take a few hundred bytes each."""

import zlib
from collections.abc import Sequence
from typing import overload

import msgspec

from rlcore.records import Prompt
from rlcore.utils import net

BLOCK_ROWS = 32
"""Number of prompts in a block: more compress better, fewer are faster to read."""
_LEVEL = 1


class PackedPrompts(Sequence[Prompt]):
    """Sequence of prompts that are numbered by their place. A prompt is a new object whenever it is
    read, with the values that another rank would receive."""

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._last: list[bytes] = []
        """Rows after the last whole block."""
        self._read: tuple[int, list[msgspec.Raw]] = (-1, [])
        """Number and rows of the block that was read most recently."""

    def append(self, prompt: Prompt) -> None:
        """Add a prompt. Raise TypeError, OverflowError or ValueError if it cannot be sent."""
        self._last.append(net.encode(prompt))
        if len(self._last) == BLOCK_ROWS:
            rows = net.encode([msgspec.Raw(row) for row in self._last])
            self._blocks.append(zlib.compress(rows, _LEVEL))
            self._last = []

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK_ROWS + len(self._last)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        prompt = net.decode(self._row(index), Prompt)
        return msgspec.structs.replace(prompt, index=index)

    def _row(self, index: int) -> bytes | memoryview:
        number, place = divmod(index, BLOCK_ROWS)
        if number == len(self._blocks):
            return self._last[place]
        if number != self._read[0]:
            rows = zlib.decompress(self._blocks[number])
            self._read = number, net.decode(rows, list[msgspec.Raw])
        return memoryview(self._read[1][place])
