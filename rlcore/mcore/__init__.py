"""Megatron-Core as a learner: the only package that imports `megatron.core`.

Importing it checks Megatron's version and, without CUDA, installs the CPU shim. A process that
unpickles an object of this package can therefore import `megatron.core` afterwards.
"""

from rlcore.mcore.shim import prepare

prepare()
