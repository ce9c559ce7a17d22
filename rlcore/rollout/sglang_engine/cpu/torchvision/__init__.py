"""Stand-in for torchvision, whose wheels need CUDA. SGLang imports torchvision for image models."""

from rlcore_hollow import hollow

__version__ = "0.0.0"

hollow(__name__)
