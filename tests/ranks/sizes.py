"""What rank scripts and their tests agree on. No torch here."""

LENGTHS = [19, 5, 33, 2, 27, 11, 40, 8, 21, 14, 3, 30]
"""Tokens of the sequences of one update."""
