"""Many jobs on the same nodes, phase by phase: README.md."""
