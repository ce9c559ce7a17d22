"""Learner on Megatron-Core; only this package imports `megatron.core`.

Importing this package checks Megatron's version and, without CUDA, installs a shim for the CPU.
Unpickling an object of this package triggers this import first, so `megatron.core` is usable.
"""

from rlcore.mcore.shim import prepare

prepare()
