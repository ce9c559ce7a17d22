"""`python -m rlcore sft`: fine-tune a model on your conversations, with the learner of `train`.

    rlcore sft --model.path ORG/NAME --data.train rows.jsonl --data.prompt_field messages
    rlcore sft --model.path FOLDER --data.train a.jsonl --data.val b.jsonl --train.lr 1e-5
    torchrun --nproc-per-node 8 -m rlcore sft ... --train.tp 2 --epochs 3

A row has a question and an answer (--data.prompt_field, --data.answer_field), or under
--data.prompt_field a list of messages that ends with the assistant's. Only the assistant's messages
are learned. A step trains --data.prompts_per_step rows, packed without padding into micro-batches
of --train.tokens_per_micro_batch tokens. Layouts, checkpoints, resuming and export are those of
`rlcore train`, and so are the keys (`rlcore train --help`); the result is RUN/hf. --epochs (default
1) sets --run.steps where it is not given.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.cli.world import World
    from rlcore.config.schema import Config, DataConfig
    from rlcore.data.conversations import Demonstration
    from rlcore.hf.tokenizer import Tokenizer
    from rlcore.trainer.sft import Tuning

    Rows = tuple[list[list[Demonstration]], list[tuple[str, list[Demonstration]]]]

SECTIONS = "run", "model", "data", "train", "lora", "eval", "checkpoint", "cluster", "log"
"""Sections of keys that fine-tuning uses."""
UNUSED = {
    "data": ("demonstrations", "demonstration_share", "teacher_prompt_field"),
    "train": ("offload", "fused_loss", "samples_per_update"),
    "eval": ("samples_per_prompt", "greedy", "temperature"),
    "checkpoint": ("keep_best",),
    "cluster": ("rollout_ranks", "rollout_cores"),
    "log": ("rollouts", "rollout_tokens", "trace_steps"),
}
"""Keys of these sections that only sampling, or the change between sampling and training, uses."""
ALIVE_S = 10.0
"""Seconds after which ranks that wait for data hear from the rank that reads it."""


def main(argv: Sequence[str]) -> int:
    """Run one rank of a fine-tuning. Return 0 if it is done, 1 if it failed, 2 if its settings are
    refused."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore sft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--epochs", type=float, help="passes over the rows, in whole steps; default: 1"
    )
    args, words = parser.parse_known_args(list(argv))
    from rlcore.cli import settings, train
    from rlcore.config import rules

    names = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
    _check(names, args.epochs)
    cfg = settings.parse(words)
    if not cfg.data.val:
        cfg = replace(cfg, eval=replace(cfg.eval, every=0))
    rules.check(cfg)
    cfg = _tunes(cfg)
    epochs = 0.0 if "run.steps" in names else args.epochs or 1.0

    def work(cfg: "Config", here: "World", warnings: Sequence[str]) -> int:
        return _work(cfg, here, warnings, epochs)

    return train.run(cfg, work)


def _check(names: Sequence[str], epochs: float | None) -> None:
    """Raise ConfigError if fine-tuning has no use for a key."""
    for name in names:
        section, _, key = name.replace("-", "_").partition(".")
        if name == "train.epochs":
            raise ConfigError("rlcore sft --train.epochs: the passes over the rows are --epochs")
        if section not in SECTIONS:
            raise ConfigError(
                f"rlcore sft --{name}: fine-tuning has no use for it; the sections of its keys are "
                f"{', '.join(SECTIONS)}"
            )
        if key.removeprefix("no_") in UNUSED.get(section, ()):
            raise ConfigError(f"rlcore sft --{name}: fine-tuning has no use for it; leave it out")
    if epochs is not None and not (math.isfinite(epochs) and epochs > 0):
        raise ConfigError(f"--epochs {epochs:g}: must be above 0")
    if epochs is not None and "run.steps" in names:
        raise ConfigError("--epochs: is given beside --run.steps; give only one of them")


def _tunes(cfg: "Config") -> "Config":
    """Return the settings of training without sampling: a row is a prompt with one response."""
    from rlcore.data.prompts import TASKS

    for key, entries in (("train", cfg.data.train), ("val", cfg.data.val)):
        for entry in entries:
            if entry in TASKS:
                raise ConfigError(
                    f"--data.{key} {entry}: a generated task has no answers to learn; give files "
                    "(rlcore tiny trains a tiny model on a task)"
                )
    if not cfg.data.train:
        raise ConfigError("--data.train: is empty; give files with rows to learn")
    return replace(
        cfg,
        run=replace(cfg.run, name=cfg.run.name or "sft"),
        train=replace(cfg.train, offload=False, fused_loss=False, epochs=1, samples_per_update=0),
        rollout=replace(cfg.rollout, samples_per_prompt=1, temperature=1.0, max_tokens=1),
    )


def _work(cfg: "Config", here: "World", warnings: Sequence[str], epochs: float) -> int:
    """Fine-tune on one rank. Return the exit code."""
    from rlcore.cli import world
    from rlcore.cli.builders.folder import open_folder
    from rlcore.cli.train import failed
    from rlcore.trainer import sft
    from rlcore.utils.log import log

    try:
        open_folder(cfg, here)
        for line in warnings:
            log.warning("WARNING: %s", line)
        run = build(cfg, here, epochs)
    except Exception as e:
        return failed(cfg, here, e)
    try:
        sft.train(run)
    except Exception as e:
        return failed(cfg, here, e)
    finally:
        run.close()
    world.leave(here)
    return 0


def build(cfg: "Config", here: "World", epochs: float) -> "Tuning":
    """Build one rank's parts, and restore them if --run.resume selects a checkpoint. `epochs`: sets
    the number of steps, if above 0.

    Raises:
        ConfigError: the settings or the data cannot work.
    """
    import time
    from contextlib import ExitStack

    from rlcore.algos.kl import AdaptiveController
    from rlcore.cli.builders import devices, folder, learner, model, observers
    from rlcore.cli.builders.start import BuildContext
    from rlcore.config import rules
    from rlcore.hf.tokenizer import load_tokenizer
    from rlcore.metrics.screen import Screen
    from rlcore.trainer.callbacks import Callbacks
    from rlcore.trainer.policies import order_of
    from rlcore.trainer.progress import Data, Observers, Progress
    from rlcore.trainer.resume import Checkpoints
    from rlcore.trainer.sft import Tuning
    from rlcore.utils import collective
    from rlcore.utils.spans import Spans
    from rlcore.utils.waits import waiting

    began, closing = time.monotonic(), ExitStack()
    try:
        hf = model.model_config(cfg)
        tokenizer = load_tokenizer(cfg.model.tokenizer or cfg.model.path, hf.eos_ids)
        with waiting("reading data"):
            parts, held_out = _read_while_alive(model.with_room(cfg, hf), tokenizer, here)
        rows = [row for part in parts for row in part]
        num_rows = int(collective.reduce_floats([float(len(rows))], "max")[0])
        if epochs:
            steps = max(1, round(epochs * num_rows / cfg.data.prompts_per_step))
            cfg = replace(cfg, run=replace(cfg.run, steps=steps))
        start = BuildContext(
            cfg=cfg,
            world=here,
            hf=hf,
            folder=folder.run_folder(cfg),
            spans=Spans(),
            progress=Progress(),
            closing=closing,
            callbacks=Callbacks(cfg.run.callbacks) if cfg.run.callbacks else None,
        )
        devices.make_residency(cfg, hf, here, samples=False).before("build")
        with waiting("building the learner, loading its weights"):
            models = learner.make_models(start)
        assert models.learner is not None
        ranks = models.ranks(here)
        order = order_of(cfg, list(map(len, parts))) if start.is_first else None
        data = Data(order=order)
        checkpoints = Checkpoints(
            cfg=cfg,
            folder=start.folder,
            ranks=ranks,
            learner=models.learner,
            kind="sft",
            kl=AdaptiveController(cfg.algo.kl_target, cfg.algo.kl_horizon),
            data=data,
            async_save=rules.saves_async(cfg, cuda=here.device.type == "cuda"),
        )
        start.on_close(checkpoints.close)
        with waiting("checking the newest checkpoint"):
            checkpoint = checkpoints.choose()
        if checkpoint is not None:
            with waiting(f"loading {checkpoint}"):
                checkpoints.load(checkpoint, start.progress)
        seen = Observers()
        screen = None
        if start.is_first:
            screen = Screen(cfg.run.steps, progress=cfg.log.progress)
            start.on_close(screen.close)
            goes_on = checkpoint is not None and checkpoint.is_relative_to(start.folder)
            folder.save_settings(cfg, start.folder, goes_on=goes_on)
            seen = observers.make_observers(start, screen, tokenizer, ())
        start.spans.listen(observers.watch(start, screen))
        stop_requested, on_done = observers.signals(start)
        start.spans.add("start", time.monotonic() - began)
    except BaseException:
        closing.close()
        raise
    return Tuning(
        cfg=cfg,
        hf=hf,
        folder=start.folder,
        ranks=ranks,
        data=data,
        progress=start.progress,
        spans=start.spans,
        observers=seen,
        checkpoints=checkpoints,
        stop_requested=stop_requested,
        on_done=on_done,
        close=closing.close,
        learner=models.learner,
        rows=rows,
        order=order,
        held_out=held_out,
    )


def _read_while_alive(cfg: "Config", tokenizer: "Tokenizer", here: "World") -> "Rows":
    """Read the rows on rank 0; the other ranks wait for it as long as it is alive. Collective."""
    from concurrent.futures import ThreadPoolExecutor, wait

    from rlcore.utils import collective

    is_first, alive_s = here.rank == 0, min(ALIVE_S, cfg.cluster.timeout_s / 3)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, cfg.data, tokenizer, is_first)
        reads = True
        while reads:
            if is_first:
                wait([reading], alive_s)
                if reading.done():
                    reading.result()  # raises its error before the other ranks go on
            reads = bool(collective.reduce_floats([float(not reading.done())], "max")[0])
    return reading.result()


def read(data: "DataConfig", tokenizer: "Tokenizer", is_first: bool) -> "Rows":
    """Return the rows of each entry of data.train, and the validation sets by name; without rows if
    not `is_first`.

    Raises:
        ConfigError: an entry cannot be read, or has no usable row.
    """
    from rlcore.data import conversations, prompts

    seen = set[bytes]() if data.drop_duplicates else None

    def rows(entry: str, cap: int, seen: set[bytes] | None = None) -> "list[Demonstration]":
        return conversations.read(Path(entry), data, tokenizer, cap, seen) if is_first else []

    val = prompts.entries(data, "val")
    learned = [rows(entry, data.num_prompts, seen) for entry in prompts.entries(data, "train")]
    sets = zip(prompts.names_of(val), val, strict=True)
    return learned, [(name, rows(entry, data.num_val_prompts)) for name, entry in sets]
