"""Rewards for tests of whole runs, named by dotted path."""

import os
import random
import time


def variety(sample, prompt, text):
    """Share of distinct characters: even a model that knows nothing gets different scores."""
    return len(set(text)) / 34


def unsteady(sample, prompt, text):
    """The same after a time that no seed decides."""
    time.sleep(random.SystemRandom().uniform(0.0, 0.03))
    return variety(sample, prompt, text)


def zero(sample, prompt, text):
    """The same for all."""
    return 0.0


def slow(sample, prompt, text):
    """The same after a second."""
    time.sleep(1.0)
    return variety(sample, prompt, text)


def half(sample, prompt, text):
    """The same for rows of even number; the others all score 0."""
    return 0.0 if prompt.index % 2 else variety(sample, prompt, text)


def broken(sample, prompt, text):
    """Has a fault that every response shows."""
    return prompt.fields["no such column"]


def hangs(sample, prompt, text):
    """Of every group the first is right at once, the last never ends."""
    k = int(sample.id.rpartition(".")[2])
    if k == 3:
        time.sleep(3600)
    return 1.0 if k == 0 else 0.25


def odd(sample, prompt, text):
    """Misbehaves in as many ways as a group has samples."""
    k = int(sample.id.rpartition(".")[2])
    if k == 0:
        print("much to say\n" * 2000)
    if k == 1:
        raise KeyError("no such answer")
    if k == 2 and prompt.index == 0:
        time.sleep(3600)
    if k == 3 and prompt.index == 0:
        os._exit(7)
    return 1.0


class Votes:
    """A response that begins with a letter is right; its answer is its first character."""

    def __init__(self, config):
        """No settings."""

    def score(self, sample, prompt, text):
        return float(text[:1].isalpha())

    def answer(self, text):
        return text[:1]
