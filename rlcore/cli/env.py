"""`python -m rlcore env`: show what is installed here, for a bug report."""

from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Print a report on this machine and this installation."""
    from rlcore.utils import env

    print("\n".join(env.describe()))
    return 0
