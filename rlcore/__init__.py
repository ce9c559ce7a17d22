"""rlcore: RL post-training of large language models in one SPMD torchrun program."""

__version__ = "0.1.0"
