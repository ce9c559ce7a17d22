"""Megatron-Core as a learner: the only package that imports `megatron.core`.

Importing it prepares Megatron for this machine (exact version, and without CUDA the CPU shim), so
that every process that unpickles something of ours can import `megatron.core` afterwards.
"""

from rlcore.mcore.shim import prepare

prepare()
