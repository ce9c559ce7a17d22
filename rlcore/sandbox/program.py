"""Run the untrusted program: as a script, or as functions that the tests (judge.py) call.

This module runs inside the sandbox, in a separate process without privileges, and imports only the
standard library. The program may do anything to this process.
"""

import atexit
import builtins
import sys
import threading
import traceback
from types import ModuleType
from typing import Any

from rlcore.sandbox import values

_MODULE = "solution"


def run_script(source: str) -> int:
    """Run the source as `python file.py` would, and return the exit status."""
    status = _execute("__main__", source)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return status


def _execute(name: str, source: str) -> int:
    module = ModuleType(name)
    vars(module)["__builtins__"] = builtins
    sys.modules[name] = module
    sys.set_int_max_str_digits(0)  # programs may print long integers; the deadline limits them
    try:
        exec(compile(source, f"<{name}>", "exec"), vars(module))
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(source: str, channel: values.Stream) -> int:
    """Run the source once, then answer the judge's questions about its definitions until the judge
    closes the channel. Returns the exit status."""
    status = _execute(_MODULE, source)
    values.send(channel, {"ready": status == 0})
    if status:
        return status
    names = vars(sys.modules[_MODULE])
    kept: list[Any] = []

    def refer(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def refer_again(value: Any) -> int:
        """Return the earlier number of an object that the judge may know."""
        known = next((number for number, one in enumerate(kept) if one is value), None)
        return refer(value) if known is None else known

    while True:
        try:
            question = values.receive(channel)
        except EOFError:
            return 0
        try:
            args, by_name = question["args"], question["by_name"]
            sent = [*args, *by_name.values()]
            given = [values.decode(data, kept.__getitem__) for data in sent]
            named = dict(zip(by_name, given[len(args) :], strict=True))
            found = _answer(question, given[: len(args)], named, names, kept)
            answer = {
                "value": values.encode(found, refer),
                "changed": values.changed(sent, given, refer_again),
            }
        except BaseException as error:
            answer = {"raised": type(error).__name__, "text": _text(error)}
        try:
            values.send(channel, answer)
        except ValueError as error:
            values.send(channel, {"raised": "ValueError", "text": str(error)})


def _answer(
    question: dict[str, Any],
    arguments: list[Any],
    by_name: dict[str, Any],
    names: dict[str, Any],
    kept: list[Any],
) -> Any:
    what, on = question["do"], question["on"]
    if what == "name":
        return names[on]
    value = kept[on]
    if what == "call":
        return value(*arguments, **by_name)
    if what == "attribute":
        return getattr(value, *arguments)
    if what == "item":
        return value[arguments[0]]
    if what == "list":
        return list(value)
    if what == "length":
        return len(value)
    if what == "truth":
        return bool(value)
    return str(value)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:300]
    except Exception:  # the exception's own __str__ may fail
        return ""
