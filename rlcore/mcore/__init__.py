"""Learner on Megatron-Core; the only package that imports `megatron.core`.

Importing this package checks Megatron's version and, without CUDA, installs the CPU shim. A process
that unpickles an object of this package can therefore import `megatron.core` afterwards.
"""

from rlcore.mcore.shim import prepare

prepare()
