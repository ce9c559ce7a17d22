"""`python -m rlcore trace RUN`: merge the traces of all ranks into a file for ui.perfetto.dev."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Merge the traces of all ranks into `<run>/trace.json`, or into the file after `--out`."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.metrics import trace

    parser = argparse.ArgumentParser(prog="rlcore trace", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--out", type=Path, help="JSON file; default: <run>/trace.json")
    args = parser.parse_args(argv)
    try:
        path, ranks = trace.merge(args.run, args.out)
    except (ConfigError, OSError) as error:
        print(f"rlcore trace: {error}", file=sys.stderr)
        return 2
    size = path.stat().st_size / 1e6
    print(f"{path}: {ranks} ranks, {size:.1f} MB; open it in ui.perfetto.dev")
    return 0
