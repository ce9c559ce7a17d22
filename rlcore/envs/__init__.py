"""Environments: multi-turn episodes instead of single responses. See README.md."""
