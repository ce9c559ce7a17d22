"""`python -m rlcore env`: what is installed here, to paste into a report."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print the report."""
    from rlcore.utils import env

    print("\n".join(env.describe()))
    return 0
