"""`python -m rlcore eval PATH`: evaluate a model on data, with the engines and rewards of a run.

    rlcore eval models/Qwen3-8B --data.val gsm8k.jsonl --reward math --eval.samples_per_prompt 16
    rlcore eval ORG/NAME --data.val a.jsonl b.parquet --reward my_pkg.fn --rollout.engine sglang
    rlcore eval runs/NAME                             # its newest checkpoint, data and reward
    rlcore eval runs/NAME --step 40 --eval.greedy --json FILE
    rlcore eval runs/NAME --step 0                    # the model that it started from
    torchrun --nproc-per-node 8 -m rlcore eval ...    # 8 engines share the prompts

PATH is a Hugging Face folder, a model on the hub, a run, or a checkpoint of a run. The further
keys are those of `rlcore train`. A run brings its own settings of data, sampling and reward. The
table has the mean score of all samples with its standard error over prompts, pass@k, and maj@k
(the score of the most frequent answer) where the reward finds answers.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

if TYPE_CHECKING:  # importing torch would slow down the command line
    from torch import Tensor, device

    from rlcore.cli.export import Source
    from rlcore.cli.world import World
    from rlcore.config.schema import Config
    from rlcore.hf.config import HFConfig
    from rlcore.protocols import Learner
    from rlcore.records import Shard

SECTIONS = "model", "data", "rollout", "reward", "env", "eval"
"""Sections of a run's config.json that its evaluation starts from."""
TRAINING = (
    "data.train",
    "data.weights",
    "data.drop_duplicates",
    "data.demonstrations",
    "data.demonstration_share",
    "data.teacher_prompt_field",
    "rollout.samples_per_prompt",
    "rollout.routing",
    "rollout.draft",
    "rollout.adaptive_tp",
    "rollout.max_tp",
)
"""Keys of these sections that only training uses."""


@dataclass(frozen=True)
class Weights:
    """Source of the weights of a Hugging Face folder or a checkpoint; stands in for a learner."""

    hf: "HFConfig"
    folder: Path
    source: "Source | None"
    """The checkpoint of which these are the weights; None: those of `folder`."""
    dtype: str
    device: "device"

    def export(self) -> "Iterator[tuple[str, Tensor]]":
        """Yield all tensors under their Hugging Face names, on the device."""
        import torch

        from rlcore.hf.names import dtype_of, expected
        from rlcore.hf.weights import read_folder
        from rlcore.mcore import export

        kind = getattr(torch, self.dtype)
        if source := self.source:
            names, base = expected(self.hf).keys(), source.base(self.hf)
            learner = source.checkpoint / "learner"
            found = export.read(learner, self.hf, kind, names, source.lora, base)
        else:
            found = read_folder(self.folder, self.hf)
        for name, tensor in found:
            yield name, tensor.to(self.device, dtype_of(name, kind))

    def shards(self) -> "Iterator[tuple[Shard, Tensor]]":
        """Yield nothing: the tensors are read when they are exported."""
        return iter(())


def main(argv: Sequence[str]) -> int:
    """Evaluate a model. Return 0 if the table was printed, 1 on a failure, 2 if the settings are
    refused."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("path", help="model folder, name on the hub, run, or checkpoint")
    parser.add_argument(
        "--step",
        type=int,
        help="step of the run's checkpoint, 0: the start model; default: the newest",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to a file")
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        raise ConfigError(f"rlcore eval {argv[0]}: give the model or run first, then the keys")
    args, words = parser.parse_known_args(list(argv))
    from rlcore.cli import settings, train
    from rlcore.config import rules

    model = words[words.index("--model.path") + 1] if "--model.path" in words[:-1] else ""
    source, base = _source(args.path, args.step, model)
    cfg = _evaluates(settings.parse([*base, *words]), args.path)
    rules.check(cfg)

    def work(cfg: "Config", here: "World", warnings: Sequence[str]) -> int:
        return _work(cfg, here, warnings, source, args.json)

    return train.run(cfg, work)


def _source(path: str, step: int | None, model: str) -> "tuple[Source | None, list[str]]":
    """Return the checkpoint, if `path` is a run or a checkpoint, and the words of its settings.
    `model`: folder of the run's start model, if it was moved; its config.json is read."""
    from rlcore.cli import export
    from rlcore.trainer import resume, seal

    folder = Path(path)
    if not ((folder / seal.MANIFEST).is_file() or resume.found(folder)):
        if step is not None:
            raise ConfigError(f"--step {step}: {path} is no run, and has no checkpoints")
        return None, ["--model.path", path]
    if step == 0 and resume.found(folder):
        words = _words(folder)
        if "--model.random_init" in words:
            raise ConfigError(f"--step 0: {path} started from random weights, which are not saved")
        return None, words
    try:
        source = export.source_of(folder, step, model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model ", "--model.path ")) from error
    if fault := seal.fault(source.checkpoint, None):
        raise ConfigError(f"{source.checkpoint}: {fault}; choose another checkpoint with --step")
    return source, _words(source.checkpoint.parents[1])


def _words(run: Path) -> list[str]:
    """Return the words of the settings with which a run is evaluated."""
    from rlcore.config import resolve
    from rlcore.config.schema import Config

    saved = read_json(run / "config.json")
    keys: dict[str, Any] = {"run.dir": str(run.parent), "run.seed": saved["run"]["seed"]}
    keys |= {f"select.{name}": saved["select"][name] for name in ("reward", "env")}
    for section in SECTIONS:
        keys |= {f"{section}.{name}": value for name, value in saved[section].items()}
    usual = resolve.keys(Config())
    keys = {
        key: value
        for key, value in keys.items()
        if key not in TRAINING and (value != "" or usual.get(key, "") != "")
    }
    return resolve.words(keys)


def _evaluates(cfg: "Config", path: str) -> "Config":
    """Return the settings of a run without steps, which evaluates once."""
    parts = [part.partition("@")[0] for part in Path(path).parts if part != "hf"]
    name = cfg.run.name or f"eval-{parts[-1] if parts else 'model'}"
    if not cfg.data.val and not cfg.env.TASK:
        raise ConfigError("--data.val: is empty; give the prompts to evaluate on")
    return replace(
        cfg,
        run=replace(cfg.run, name=name, steps=0, resume="fresh", callbacks=()),
        train=replace(cfg.train, offload=False),
        sync=replace(cfg.sync, route="gather"),  # every rank reads the files itself
        log=replace(cfg.log, tensorboard=False, plot=False),
    )


def _work(
    cfg: "Config",
    here: "World",
    warnings: Sequence[str],
    source: "Source | None",
    out: Path | None,
) -> int:
    """Evaluate on one rank. Return the exit code."""
    from rlcore.cli import world
    from rlcore.cli.builders.folder import open_folder
    from rlcore.cli.train import failed
    from rlcore.utils.log import log

    try:
        open_folder(cfg, here)
        for line in warnings:
            log.warning("WARNING: %s", line)
        found = _evaluate(cfg, here, source)
    except Exception as e:
        return failed(cfg, here, e)
    world.leave(here)
    if here.rank == 0:
        _report(cfg, found, source.checkpoint if source else None, out)
    return 0


def _evaluate(cfg: "Config", here: "World", source: "Source | None") -> dict[str, float]:
    """Start engines, send them the weights, and evaluate. Return the metrics on rank 0."""
    from rlcore.cli import builders
    from rlcore.cli.builders.learner import Models
    from rlcore.cli.builders.model import model_config
    from rlcore.trainer import evaluate
    from rlcore.utils import collective
    from rlcore.utils.waits import waiting

    hf, folder = model_config(cfg), Path(cfg.model.path)
    weights = Weights(hf, folder, source, cfg.model.dtype, here.device)
    models = Models(
        learner=cast("Learner", weights),
        model_parallel_groups=[[rank] for rank in range(here.size)],
        dp_rank=here.rank,
    )
    built = builders.run(cfg, here, models=models)
    try:
        with waiting("waiting for the engines to start"):
            built.device.wait_for_engines()
        with built.device.train(), waiting(f"sending {source} to the engines"):
            built.device.update_weights(0)
        with built.device.generate("testing"), built.spans.phase("testing"):
            found = evaluate.run(built)
        collective.barrier(here.everyone)
    finally:
        built.close()
    return found


def _report(cfg: "Config", found: dict[str, float], source: Path | None, out: Path | None) -> None:
    """Print the table, and write the metrics to files."""
    from rlcore.cli.builders.folder import run_folder
    from rlcore.metrics.jsonl import write_atomic
    from rlcore.metrics.screen import evaluation_table

    for line in evaluation_table(found):
        print(line)
    about = {
        "model": str(source or cfg.model.path),
        "data": list(cfg.data.val),
        "reward": cfg.select.reward,
        "samples_per_prompt": cfg.eval.samples_per_prompt,
        "temperature": cfg.eval.temperature,
        "max_tokens": cfg.rollout.max_tokens,
        "seed": cfg.run.seed,
        "metrics": found,
    }
    for file in filter(None, (run_folder(cfg) / "eval.json", out)):
        write_atomic(file, json.dumps(about, indent=1) + "\n")
        print(f"written: {file}", file=sys.stderr)
