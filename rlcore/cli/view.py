"""`python -m rlcore view RUN`: write the rollouts of a run as one HTML page."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Write the page to `<run>/rollouts.html`, or to `--out FILE`."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.metrics import view

    parser = argparse.ArgumentParser(prog="rlcore view", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="HTML file; default: <run>/rollouts.html")
    parser.add_argument("--last", type=int, default=0, help="show only the last N steps; 0: all")
    args = parser.parse_args(argv)
    try:
        if args.last < 0:
            raise ConfigError(f"--last {args.last}: must be 0 (all steps) or a number of steps")
        path, responses = view.write(args.run, args.out, args.last)
    except (ConfigError, OSError) as error:
        print(f"rlcore view: {error}", file=sys.stderr)
        return 2
    size = path.stat().st_size / 1e6
    print(f"{path}: {responses} responses, {size:.1f} MB; open it in a browser")
    return 0
