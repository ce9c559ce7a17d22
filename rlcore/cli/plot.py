"""`python -m rlcore plot RUN...`: plot the metrics of one run, or compare several runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Draw the plots. For one run, write `<run>/curve.png` and `<run>/detail.png`; with `--out
    FILE.png`, write FILE.png and FILE-detail.png. For several runs, write `compare.png` beside the
    first run's folder, or `--out FILE.png`."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.metrics import plots

    parser = argparse.ArgumentParser(prog="rlcore plot", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--out", type=Path, help="PNG file; default: <run>/curve.png, or compare.png beside the run"
    )
    args = parser.parse_args(argv)
    runs, out = args.runs, args.out
    if missing := [str(r) for r in runs if not (r / "metrics.jsonl").is_file()]:
        print(
            f"rlcore plot: no metrics.jsonl in {', '.join(missing)}; give folders of runs",
            file=sys.stderr,
        )
        return 2
    if len(runs) == 1:
        print(plots.curve(runs[0], out))
        try:
            print(plots.detail(runs[0], out and out.with_stem(f"{out.stem}-detail")))
        except ConfigError as error:
            print(f"rlcore plot: {error}", file=sys.stderr)
    else:
        print(plots.compare(runs, out or runs[0].parent / "compare.png"))
    return 0
