"""`python -m rlcore train`: one rank of a training run."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line should not pay for torch
    from rlcore.cli.world import World
    from rlcore.config.schema import Config


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when the run is done, 1 when it failed, 2 when the command line cannot work."""
    from rlcore.config import resolve, rules

    words = list(argv)
    dry = "--dry-run" in words or "--dry_run" in words
    words = [w for w in words if w not in ("--dry-run", "--dry_run")]
    from rlcore.cli import settings

    try:
        if "--help" in words or "-h" in words:
            print(
                resolve.help_text(settings.parse([w for w in words if w not in ("--help", "-h")]))
            )
            return 0
        cfg = settings.parse(words)
        if dry:
            from rlcore.cli import dry_run

            return dry_run.show(cfg)
        rules.check(cfg)
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    return run(cfg)


def run(cfg: "Config") -> int:
    """Join the world, build, train, leave."""
    from rlcore.rewards.judge import mps
    from rlcore.utils import log

    log.setup(int(os.environ.get("RANK", 0)))
    try:
        daemon = mps.of_run(cfg.reward)  # CUDA looks for it once, when it starts in a process
    except ValueError as e:
        print(e, file=sys.stderr)
        return 2
    try:
        return _run(cfg)
    finally:
        if daemon is not None:
            daemon.stop()


def _run(cfg: "Config") -> int:
    from rlcore.cli import world
    from rlcore.cli.builders.folder import run_folder

    try:
        c = cfg.cluster
        world.pin(c.rollout_ranks, c.rollout_cores, c.train_cores)
        here = world.join(c.timeout_s, c.rollout_ranks, run_folder(cfg), c.interface)
    except ValueError as e:  # every rank finds it
        if os.environ.get("RANK", "0") == "0":
            print(e, file=sys.stderr)
        return 2
    except (RuntimeError, OSError) as e:
        print(str(e).partition("\n")[0], file=sys.stderr)
        return 1
    try:
        return _train(cfg, here)
    finally:
        if here.gang is not None:
            here.gang.close()


def _train(cfg: "Config", here: "World") -> int:
    from rlcore.cli import builders, world
    from rlcore.cli.builders.folder import open_folder
    from rlcore.trainer import async_loop, stream_loop, sync_loop
    from rlcore.utils import collective

    try:
        open_folder(cfg, here)
        built = builders.run(cfg, here)
    except ValueError as e:
        return failed(cfg, here, e, 2)
    except (RuntimeError, OSError) as e:
        return failed(cfg, here, e, 1)
    try:
        loops = {"sync": sync_loop, "stream": stream_loop, "async": async_loop}
        sync_loop.train(built, loops[cfg.select.mode].one_step)
        # an engine over several ranks is in use until its first has done
        collective.barrier(here.everyone)
    except (ValueError, RuntimeError, OSError) as e:  # a TimeoutError is an OSError
        return failed(cfg, here, e, 1)
    finally:
        built.close()
    world.leave(here)
    return 0


def failed(cfg: "Config", here: "World", error: Exception, code: int) -> int:
    """Say why the run ends, in one sentence and once: the rank that fails first knows the reason,
    the others see only that it has gone. Where it was raised goes to the rank's file. Returns
    `code`."""
    from rlcore.cli.builders.folder import run_folder
    from rlcore.utils.log import log

    reason = str(error) or type(error).__name__
    if code == 1:  # a library's error may go on for pages
        file = run_folder(cfg) / "logs" / f"rank{here.rank}.log"
        reason = f"{reason.splitlines()[0]} (where: {file})"
    if here.rank:
        reason = f"rank {here.rank}: {reason}"
    first = here.fails_first()
    log.log(logging.ERROR if first else logging.DEBUG, "%s", reason)
    log.debug("where it was raised", exc_info=error)
    if code == 1 and here.gang is not None:
        if first:
            here.gang.alarm(f"failed: {reason}")
        else:
            here.gang.hear()
    return code
