"""`python -m rlcore plot RUN...`: the pictures of one run, or several runs over each other."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Draw the pictures. For one run write `<run>/curve.png` and `<run>/detail.png`, or `--out
    FILE.png` and `FILE-detail.png`. For several write `compare.png` beside the first, or `--out
    FILE`."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.metrics import plots

    words = list(argv)
    out = None
    if "--out" in words:
        i = words.index("--out")
        if i + 1 == len(words):
            print("--out: give a file name", file=sys.stderr)
            return 2
        out = Path(words[i + 1])
        del words[i : i + 2]
    runs = [Path(w) for w in words]
    missing = [str(r) for r in runs if not (r / "metrics.jsonl").is_file()]
    if not runs or missing:
        what = (
            f"no metrics.jsonl in {', '.join(missing)}; give folders of runs"
            if missing
            else "no run folder given; name one or more"
        )
        print(f"rlcore plot: {what}", file=sys.stderr)
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
