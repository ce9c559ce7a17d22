"""Callbacks: user code that follows a run, with `--run.callbacks my_pkg.my_callbacks.MyCallback`.

A subclass of `Callback` overrides the methods that it needs. Rank 0 calls all of them. Other
ranks that sample call only `keep_sample`. An error in a callback ends the run; the
message names the callback.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config import dotted
from rlcore.records import Prompt, RewardResult, Sample, is_training
from rlcore.utils.errors import ConfigError

OPTION = "--run.callbacks"


class Callback:
    """Base class of callbacks. Every method does nothing."""

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called when the run starts or resumes. `folder`: the run's folder. `config`: every key
        with its value."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after each step, when its metrics are written. Return True to end the run: it
        takes one more step and saves a checkpoint."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after each evaluation, with its `val-*` metrics. Step 0 is the evaluation before
        the first step. Return True to end the run, as in `on_step`."""

    def on_save(self, step: int, folder: Path) -> None:
        """Called after each checkpoint, with its folder. Later checkpoints may remove the folder,
        so copy what is needed. With `--checkpoint.async_save`, a later step than `step` may have
        ended by then."""

    def keep_sample(self, sample: Sample, prompt: Prompt, text: str, result: RewardResult) -> bool:
        """Return whether to train on a scored response to a training prompt; `text` is the
        response's text. A response that is not kept still counts in the baseline of its group.
        Called on the rank that sampled the response."""
        return True

    def on_end(self, step: int) -> None:
        """Called once at the end of a complete run, with its last step."""


def find(names: Sequence[str]) -> list[type[Callback]]:
    """Return the classes at the dotted paths.

    Raises:
        ConfigError: a path has no class, or one that does not derive from `Callback`.
    """
    found = []
    for name in names:
        _, cls = dotted.find(OPTION, name)
        if not (isinstance(cls, type) and issubclass(cls, Callback)):
            raise ConfigError(
                f"{OPTION} {name}: is no subclass of rlcore.trainer.callbacks.Callback; give the "
                "dotted path of such a class"
            )
        found.append(cls)
    return found


class Callbacks:
    """The callbacks of a run on one rank, which are called one after another."""

    def __init__(self, names: Sequence[str]) -> None:
        """Make an object of each class. Raise ConfigError if that fails."""
        self._made: list[tuple[str, Callback]] = []
        self.stops = False
        """Whether a callback has asked for the end of the run."""
        for name, cls in zip(names, find(names), strict=True):
            try:
                self._made.append((name, cls()))
            except Exception as error:
                raise ConfigError(
                    f"{OPTION} {name}: {_sentence('its constructor', error)}"
                ) from error

    @property
    def keep_sample(self) -> Callable[[Sample, Prompt, str, RewardResult], bool] | None:
        """Function that returns whether every callback keeps a sample; None if none decides."""
        made = [(n, c) for n, c in self._made if type(c).keep_sample is not Callback.keep_sample]
        if not made:
            return None

        def keeps(sample: Sample, prompt: Prompt, text: str, result: RewardResult) -> bool:
            if not is_training(sample.group):
                return True
            kept = True
            for name, callback in made:
                found = _call(name, callback.keep_sample, sample, prompt, text, result)
                where = f"keep_sample returned {found!r} for sample {sample.id}"
                kept &= _decision(name, where, found)
            return kept

        return keeps

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Call `on_start` of all callbacks."""
        for name, callback in self._made:
            _call(name, callback.on_start, folder, config)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_step` of all callbacks."""
        for name, callback in self._made:
            found = _call(name, callback.on_step, step, dict(metrics))
            self.stops |= _decision(name, f"on_step returned {found!r}", found or False)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_eval` of all callbacks with the `val-*` metrics, if there are any."""
        scores = {k: v for k, v in metrics.items() if k.startswith("val-")}
        for name, callback in self._made if scores else []:
            found = _call(name, callback.on_eval, step, dict(scores))
            self.stops |= _decision(name, f"on_eval returned {found!r}", found or False)

    def on_save(self, step: int, folder: Path) -> None:
        """Call `on_save` of all callbacks."""
        for name, callback in self._made:
            _call(name, callback.on_save, step, folder)

    def on_end(self, step: int) -> None:
        """Call `on_end` of all callbacks."""
        for name, callback in self._made:
            _call(name, callback.on_end, step)


def _call(name: str, method: Callable[..., Any], *args: object) -> Any:
    try:
        return method(*args)
    except Exception as error:
        raise RuntimeError(f"{OPTION} {name}: {_sentence(method.__name__, error)}") from error


def _decision(name: str, what: str, found: object) -> bool:
    if not isinstance(found, bool | np.bool_):
        raise RuntimeError(f"{OPTION} {name}: {what}; return True or False")
    return bool(found)


def _sentence(what: str, error: Exception) -> str:
    return f"{what} raised {type(error).__name__}: {error}"
