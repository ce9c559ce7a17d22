"""Render chat templates, which come with downloaded models, in a child process with limits.

A template may loop without end or build a text of any size, and no limit inside the interpreter
stops a single operation of Python. The child has a limit on CPU time and memory per rendering. It
has jinja2's sandbox too, so that a template reaches no Python objects.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from rlcore.utils import net
from rlcore.utils.children import Child, exit_text, open_channel, sentence
from rlcore.utils.errors import ConfigError, LimitError
from rlcore.utils.log import log

CPU_S = 5
"""Maximum CPU time of a rendering, in seconds. Usual templates take less than a millisecond."""
MEMORY_BYTES = 1 << 30
"""Maximum memory of a rendering."""
TEXT_BYTES = 64 << 20
"""Maximum size of a rendered text."""
ANSWER_S = 300.0
"""Maximum time for an answer of the child, far above `CPU_S`, since other processes may be busy."""
MOST_STOPS = 3
"""Number of renderings of a template that may exceed a limit; after that, reading rows would take
seconds per row."""


class TemplateStart(msgspec.Struct):
    """First frame for the child: the template and the limits of each rendering."""

    source: str
    cpu_s: int
    memory_bytes: int
    text_bytes: int


class Rendered(msgspec.Struct):
    """Reply of the child: the rendered text, or the error."""

    text: str = ""
    error: str = ""


class Template:
    """A chat template. Its child process starts with the first rendering."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._child: Child | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._num_stops = 0

    def render(self, batch: Sequence[Mapping[str, Any]]) -> list[str | ConfigError]:
        """Render the template once per element, which are variables that JSON can express. A
        rendering that fails or exceeds a limit becomes a ConfigError in the list. One call for many
        renderings is faster than many calls, since two processes take turns.

        Raises:
            LimitError: limits were exceeded `MOST_STOPS` times, or the child does not answer.
        """
        found: list[str | ConfigError] = []
        with self._lock:
            while len(found) < len(batch):
                self._render(batch[len(found) :], found)
        return found

    def _render(self, batch: Sequence[Mapping[str, Any]], found: list[str | ConfigError]) -> None:
        """Append the results of `batch` to `found`, up to the first rendering that ends the
        child."""
        try:
            request = net.frame(batch)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            if len(batch) > 1:  # find the element
                self._render(batch[:1], found)
            else:
                found.append(ConfigError(f"chat template: cannot use the messages ({error})"))
            return
        if self._num_stops == MOST_STOPS:
            raise LimitError(
                f"chat template: {MOST_STOPS} renderings were stopped after {CPU_S} s or "
                f"{MEMORY_BYTES >> 30} GiB; use another template, or --data.template none"
            )
        child = self._started()
        try:
            child.channel.send(request, ANSWER_S)
            for _ in batch:
                reply = net.decode(_receive(child), Rendered)
                text = ConfigError(f"chat template: {reply.error}") if reply.error else reply.text
                found.append(text)
        except TimeoutError as error:
            self._child = None
            child.end()
            raise LimitError(
                f"chat template: process {child.process.pid}, which renders it, has not answered "
                f"for {ANSWER_S:g} s; it may have been stopped by a signal"
            ) from error
        except (EOFError, OSError, ValueError) as error:
            self._child = None
            self._num_stops += 1
            what = exit_text(child.end(exiting=True))
            log.debug("chat template", exc_info=error)
            found.append(
                ConfigError(
                    f"chat template: the rendering was stopped ({what}); it may take {CPU_S} s, "
                    f"{MEMORY_BYTES >> 30} GiB and {TEXT_BYTES >> 20} MiB of text"
                )
            )

    def _started(self) -> Child:
        """Return this process's child; after a fork, the parent's child is not this process's."""
        if self._child is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._child = Child("rlcore.hf.template", largest=TEXT_BYTES, stderr=subprocess.DEVNULL)
            weakref.finalize(self, _end, self._child, self._pid)
            start = TemplateStart(
                source=self._source,
                cpu_s=CPU_S,
                memory_bytes=MEMORY_BYTES,
                text_bytes=TEXT_BYTES,
            )
            self._child.channel.send(net.frame(start), ANSWER_S)
        return self._child


def _end(child: Child, pid: int) -> None:
    if pid == os.getpid():
        child.end()


def _receive(child: Child) -> bytes:
    """Return the child's next frame. Raise TimeoutError if it does not come within `ANSWER_S`."""
    end = time.monotonic() + ANSWER_S
    while (left := end - time.monotonic()) > 0:
        if (body := next(child.channel.receive(left), None)) is not None:
            return body
    raise TimeoutError


class JsonObject(dict[str, Any]):
    """Arguments of a tool call, as a dict that prints as the original JSON text. Some templates
    read arguments by key, others write them as text or with `tojson`."""

    def __init__(self, text: str) -> None:
        super().__init__(json.loads(text))
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _with_objects(variables: dict[str, Any]) -> dict[str, Any]:
    """Replace the text of arguments in the messages, which `hf/messages.py` writes, by objects."""
    for message in _list(variables.get("messages")):
        for call in _list(message.get("tool_calls") if isinstance(message, dict) else None):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = JsonObject(function["arguments"])
    return variables


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def compile_template(source: str) -> Any:
    """Compile a chat template in jinja2's sandbox, with the functions that transformers provides.
    Raise jinja2.TemplateError if it is invalid."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Parser that drops `{% generation %}` tags and keeps the assistant's text inside."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        if isinstance(value, JsonObject) and not ensure_ascii and not options:
            return str(value)
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def main() -> None:
    """Render requests until the parent closes the channel. Exceeding the CPU limit kills this
    process, whatever it does; exceeding the memory limit raises MemoryError or kills it too."""
    import jinja2

    channel = open_channel()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template = None
    try:
        start = net.decode(channel.first(), TemplateStart)
        memory = _address_space() + start.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        while True:
            for variables in net.decode(channel.first(), list[dict[str, Any]]):
                _limit_cpu(start.cpu_s)
                try:
                    if template is None:
                        template = compile_template(start.source)
                    reply = Rendered(text=template.render(_with_objects(variables)))
                except jinja2.TemplateError as error:
                    reply = Rendered(error=str(error))
                except Exception as error:  # a template may raise anything
                    reply = Rendered(error=sentence(error))
                channel.send(_frame(reply, start.text_bytes))
    except (EOFError, OSError):  # the parent has exited or closed the channel
        sys.exit(0)


def _frame(reply: Rendered, most_bytes: int) -> bytearray:
    try:
        found = net.frame(reply)
    except (ValueError, MemoryError) as error:  # a lone surrogate, or a text of a gigabyte
        return net.frame(Rendered(error=sentence(error)))
    if len(found) < most_bytes:
        return found
    return net.frame(Rendered(error=f"the text has more than {most_bytes >> 20} MiB"))


def _limit_cpu(seconds: int) -> None:
    """Allow this process `seconds` more of CPU time, rounded up."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, most))


def _address_space() -> int:
    """Return the size of this process's address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
