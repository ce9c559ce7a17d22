"""`python -m rlcore train`: run one rank of a training run."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.cli.world import World
    from rlcore.config.schema import Config

    Work = Callable[[Config, World, Sequence[str]], int]


def main(argv: Sequence[str]) -> int:
    """Run one rank. Return 0 if the run is done, 1 if it failed, 2 if its settings are refused."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.cli import settings
    from rlcore.config import resolve, rules

    dry = [i for i, w in enumerate(argv) if w in ("--dry-run", "--dry_run")]
    every = [i + 1 for i in dry if argv[i + 1 : i + 2] == ["all"]]  # indices of `--dry-run all`
    words = [w for i, w in enumerate(argv) if i not in dry + every]
    if "--help" in words or "-h" in words:
        print(resolve.help_text(settings.parse([w for w in words if w not in ("--help", "-h")])))
        return 0
    if dry:
        from rlcore.cli import dry_run

        return dry_run.show(settings.parse(words), every=bool(every))
    cfg = settings.parse(words, _check_early)
    rules.check(cfg)
    return run(cfg)


def _check_early(cfg: "Config") -> None:
    """Check ranges of keys and the model folder before torch is imported, which is slow.

    Raises:
        ConfigError: a value is out of range, or the model folder cannot be read.
    """
    from rlcore.config import rules
    from rlcore.hf import hub
    from rlcore.hf.config import HFConfig

    if found := rules.ranges(cfg):
        raise ConfigError("\n".join(found))
    if cfg.model.path and not hub.is_name(cfg.model.path):
        HFConfig.from_folder(cfg.model.path)


def run(cfg: "Config", work: "Work | None" = None) -> int:
    """Join the other ranks, build the run, train, and disconnect. Return the exit code.

    `work` replaces the training: it gets the settings, the world and warnings to log, disconnects
    at its end, and returns the exit code.
    """
    from rlcore.cli import world
    from rlcore.cli.builders.folder import run_folder
    from rlcore.cli.builders.model import with_downloads
    from rlcore.cli.checks import start
    from rlcore.rewards.judge import mps
    from rlcore.utils import log
    from rlcore.utils.waits import waiting

    log.setup(int(os.environ.get("RANK", 0)))
    mps.of_run(cfg.reward)  # CUDA looks for this MPS daemon at its start
    rank, folder, c = os.environ.get("RANK", "0"), run_folder(cfg), cfg.cluster
    warnings: list[str] = []
    refusal = ""
    try:
        world.pin(c.rollout_ranks, c.rollout_cores, c.train_cores)
        cfg = with_downloads(cfg)
        warnings = start.check(cfg)
    except ConfigError as e:  # `join` raises it on every rank, so that none waits for this one
        refusal = str(e)
    try:
        with waiting(f"waiting for all {os.environ.get('WORLD_SIZE', '1')} ranks to join"):
            here = world.join(c.timeout_s, c.rollout_ranks, folder, c.interface, refusal)
    except ConfigError as e:
        if rank == "0":
            print(e, file=sys.stderr)
        return 2
    except Exception as e:
        if refusal:
            print(refusal, file=sys.stderr)
        return exits.fail(e, folder / "logs" / f"rank{rank}.log")
    try:
        return (work or _train)(cfg, here, warnings)
    finally:
        if here.health is not None:
            here.health.close()
        if here.size == 1:  # after a failure too: the process may start another run
            world.leave(here)


def _train(cfg: "Config", here: "World", warnings: Sequence[str]) -> int:
    from rlcore.cli import builders, world
    from rlcore.cli.builders.folder import open_folder
    from rlcore.ops import native
    from rlcore.trainer import async_loop, stream_loop, sync_loop
    from rlcore.utils import collective
    from rlcore.utils.log import log

    try:
        open_folder(cfg, here)
        for line in warnings:
            log.warning("WARNING: %s", line)
        if here.device.type == "cuda":
            native.warn_without_kernels()
        built = builders.run(cfg, here)
    except Exception as e:
        return failed(cfg, here, e)
    try:
        loops = {"sync": sync_loop, "stream": stream_loop, "async": async_loop}
        sync_loop.train(built, loops[cfg.select.mode].one_step)
        # An engine of several ranks needs all of its ranks until its first rank is done.
        collective.barrier(here.everyone)
    except Exception as e:
        return failed(cfg, here, e)
    finally:
        built.close()
    world.leave(here)
    return 0


def failed(cfg: "Config", here: "World", error: Exception) -> int:
    """Log why the run ends; the traceback goes only to the rank's log file.

    Only the rank that fails first prints the reason, since other ranks see only that a rank exited.
    The other ranks are told; after a `ConfigError` they make no report. Return the exit code: 2 for
    a `ConfigError`, else 1.
    """
    from rlcore.cli.builders.folder import run_folder
    from rlcore.utils.log import log

    refused = isinstance(error, ConfigError)
    file = run_folder(cfg) / "logs" / f"rank{here.rank}.log"
    reason = str(error) if refused else exits.sentence(error, file)
    if here.rank:
        reason = f"rank {here.rank}: {reason}"
    first = here.fails_first()
    log.log(logging.ERROR if first else logging.DEBUG, "%s", reason)
    log.debug("traceback", exc_info=error)
    if here.health is not None:
        if first and refused:
            here.health.refuse()
        elif first:
            here.health.alarm(f"failed: {reason}")
        elif not refused:
            here.health.wait_for_alarm()
    return 2 if refused else 1
