"""Time-sharing of nodes between jobs, phase by phase; see README.md."""
