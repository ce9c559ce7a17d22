"""Time-sharing of nodes between jobs, phase by phase: README.md."""
