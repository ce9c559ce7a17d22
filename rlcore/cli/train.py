"""`python -m rlcore train`: one rank of a training run."""

import sys
from collections.abc import Sequence


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


def run(cfg) -> int:
    """Join the world, build, train, leave."""
    from rlcore.cli import assemble, world
    from rlcore.trainer import sync_loop
    from rlcore.utils import log

    here = world.join(cfg.cluster.timeout_s)
    log.setup(here.rank, assemble.run_folder(cfg) / "logs")
    try:
        built = assemble.assemble(cfg, here)
    except ValueError as e:
        log.log.error("%s", e)
        log.log.debug("where it was found", exc_info=True)  # for the rank's file
        return 2
    try:
        sync_loop.train(built)
    except (RuntimeError, TimeoutError) as e:
        log.log.exception("rank %d: %s", here.rank, e)
        return 1
    finally:
        built.close()
    world.leave()
    return 0
