"""Seeds derived from names: every random choice hangs on (seed, what it is for), never on order."""

import hashlib
import random


def derive(seed: int, *names: object) -> int:
    """A 63-bit seed from a seed and names, the same on every machine and in every process."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def rng(seed: int, *names: object) -> random.Random:
    """A generator of its own for one purpose."""
    return random.Random(derive(seed, *names))
