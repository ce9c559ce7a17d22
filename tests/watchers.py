"""Callbacks for tests of whole runs, named by dotted path."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.records import Prompt, RewardResult, Sample
from rlcore.trainer.callbacks import Callback


class Told(Callback):
    """Writes what it is told to `told.jsonl` in the run's folder."""

    def on_start(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.file = folder / "told.jsonl"
        self._write("start", 0, config["run.steps"])

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("step", step, metrics["critic/score/mean"])

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("eval", step, sorted(metrics)[0])

    def on_save(self, step: int, folder: Path) -> None:
        assert (folder / "manifest.json").exists()
        self._write("save", step, folder.name)

    def on_end(self, step: int) -> None:
        self._write("end", step, None)

    def _write(self, what: str, step: int, value: object) -> None:
        with self.file.open("a") as out:
            out.write(json.dumps([what, step, value]) + "\n")


class Even(Callback):
    """Keeps the responses of an even number of characters."""

    def keep_sample(self, sample: Sample, prompt: Prompt, text: str, result: RewardResult) -> bool:
        assert sample.group.startswith("t") and prompt.text and result.score is not None
        return len(text) % 2 == 0


class Stops(Callback):
    """Ends the run at step 2."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        return step == 2


class Raises(Callback):
    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        raise KeyError("what it looks for")


class Forgets(Callback):
    """Returns nothing where a decision is needed."""

    def keep_sample(self, *_: Any) -> bool:  # type: ignore[override]
        return None  # type: ignore[return-value]


class Counts(Callback):
    """Returns a number where a decision is needed."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        return step  # type: ignore[return-value]


class Unmade(Callback):
    def __init__(self, setting: int) -> None:
        """Require an argument, although callbacks are made without arguments."""
