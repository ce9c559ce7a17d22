"""Environments: episodes of several turns in the place of responses. README.md has the whole."""
