"""Copy between device and host memory beside the computation, on a stream of its own."""

from collections.abc import Callable

import torch

Event = torch.cuda.Event | None
"""Point in the work of a stream; None: on the CPU, or nothing to wait for."""


class SideStream:
    """Stream for copies. On the CPU there is none, and every copy is complete when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, copies: Callable[[], None], *after: Event) -> Event:
        """Make copies on this stream after the events `after`. Return the event of their end."""
        if self._stream is None:
            copies()
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            copies()
            return self._stream.record_event()

    def now(self) -> Event:
        """Return the event of what the computation's stream has been given so far."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()


def wait(event: Event) -> None:
    """Let the computation's stream wait for an event."""
    if event is not None:
        torch.cuda.current_stream().wait_event(event)
