"""Derive seeds from names, so that random choices depend on (seed, purpose), never on order."""

import hashlib
import random


def derive(seed: int, *names: object) -> int:
    """Derive a 63-bit seed from a seed and names, the same on every machine and in every
    process."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def rng(seed: int, *names: object) -> random.Random:
    """Return a random generator with the seed that `derive` makes from `seed` and `names`."""
    return random.Random(derive(seed, *names))
