"""What travels between the reward service and its children: length-prefixed msgpack, no pickle."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from rlcore.records import Finish, GroupId, Prompt, RequestId, RewardResult, group_of
from rlcore.utils import net

LENGTH_BYTES = 4
LARGEST_FRAME = 1 << 28
READY = -1
"""Key of the reply that says whether the child could build the reward."""


class SampleInfo(Struct, frozen=True, kw_only=True):
    """What a reward sees of a sample besides its text: the tokens themselves stay at the
    replica."""

    id: RequestId
    num_tokens: int
    num_prompt_tokens: int
    finish: Finish
    timeout_s: float = 0.0
    """What its score may take; 0 where that is not known. With adaptive deadlines another answer
    may shorten it."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)


class Start(Struct, frozen=True, kw_only=True):
    """The first frame to a child: what to build."""

    reward: str
    config: dict[str, Any]
    sys_path: tuple[str, ...]
    seed: int


class Job(Struct, frozen=True, array_like=True):
    key: int
    sample: SampleInfo
    prompt: Prompt
    text: str


class Reply(Struct, frozen=True, array_like=True):
    key: int
    result: RewardResult
    retire: bool = False
    """The child is in a bad state (out of memory) and wants to be replaced."""


def frame(message: Start | Job | Reply) -> bytes:
    """A message as it goes over the wire. ValueError, TypeError or OverflowError for what cannot
    travel."""
    body = net.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that `data` completes. ValueError where the stream is no frame."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= LENGTH_BYTES:
            size = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "little")
            if size > LARGEST_FRAME:
                raise ValueError(f"a frame of {size} bytes: at most {LARGEST_FRAME} are allowed")
            if end - start < LENGTH_BYTES + size:
                break
            start += LENGTH_BYTES
            yield bytes(self._buffer[start : start + size])
            start += size
        del self._buffer[:start]
