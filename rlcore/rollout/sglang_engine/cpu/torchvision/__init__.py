"""Stand-in for torchvision: SGLang imports it for image models; its wheels are built for CUDA."""

from rlcore_hollow import hollow

__version__ = "0.0.0"

hollow(__name__)
