"""`rlcore.train`: the program `rlcore train` from Python, with the caller's functions and rows."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config import resolve
from rlcore.metrics.jsonl import read_lines, write_atomic
from rlcore.utils.errors import ConfigError


@dataclass(frozen=True)
class TrainResult:
    """A run that has ended: complete, or saved after a SIGTERM."""

    folder: Path
    """Folder of the run: metrics, checkpoints, logs."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of all steps, in their order. Step 0, if there is one, is the evaluation before
        the first step."""
        return list(read_lines(self.folder / "metrics.jsonl"))

    @property
    def model(self) -> Path | None:
        """Hugging Face folder of the trained model; None with `checkpoint.export_hf` False."""
        model = self.folder / "hf"
        return model if model.is_dir() else None


def train(
    keys: Mapping[str, Any],
    *,
    reward: Callable[..., Any] | str | None = None,
    dataset: Iterable[Mapping[str, Any]] | None = None,
) -> TrainResult:
    """Train as `rlcore train` does with these keys, and return when the run has ended.

    The run has one rank, in this process. In a script that torchrun starts, every process calls
    this function and is one rank. A run of the same name is resumed.

    Args:
        keys: keys of `rlcore train --help` without dashes, such as {"train.lr": 1e-6}.
        reward: function `reward(sample, prompt, text)` that returns a number or a `RewardResult`,
            or a value of `--reward`. A function runs in a thread of this process.
        dataset: rows with the columns of a prompt file, instead of `data.train`. They are written
            to a file in `run.dir`, since a resumed run reads them again.

    Raises:
        ConfigError: the settings are refused.
        RuntimeError: the run has failed; its log has said why.
    """
    from rlcore.cli import settings
    from rlcore.cli import train as program
    from rlcore.cli.builders.folder import run_folder
    from rlcore.config import rules
    from rlcore.rewards import inline

    for key in keys:
        if "." not in key and key not in resolve.SELECTORS:
            raise ConfigError(
                f"{key}: allowed without a section are {', '.join(resolve.SELECTORS)}; other keys "
                "have one, such as run.seed"
            )
    with inline.named(reward) if callable(reward) else nullcontext(reward) as name:
        given = dict(keys) if name is None else {**keys, "reward": name}
        if dataset is not None:
            if "data.train" in keys:
                raise ConfigError(
                    "data.train: is given beside the argument dataset; give only one of them"
                )
            given["data.train"] = _write(dataset, Path(keys.get("run.dir", "runs")))
        cfg = settings.parse(resolve.words(given))
        rules.check(cfg)
        code = program.run(cfg)
    log = run_folder(cfg) / "logs" / f"rank{os.environ.get('RANK', '0')}.log"
    if code == 2:
        raise ConfigError(f"the run is refused, as said above and in {log}")
    if code:
        raise RuntimeError(f"the run has failed, as said above and in {log}")
    return TrainResult(run_folder(cfg))


def _write(dataset: Iterable[Mapping[str, Any]], folder: Path) -> Path:
    """Write the rows to a JSONL file named by their hash, and return its path."""
    lines = []
    for i, row in enumerate(dataset):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {i} is a {type(row).__name__}; give dictionaries")
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"dataset: row {i} cannot be written as JSON: {error}") from error
    if not lines:
        raise ConfigError("dataset: has no rows; give at least one")
    text = "\n".join(lines) + "\n"
    file = folder / f"dataset-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not file.exists():
        write_atomic(file, text)
    return file
