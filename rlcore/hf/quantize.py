"""Simulate quantisation: round weights to a format of few bits, and keep their dtype.

    scale = max |x| / largest,  q(x) = scale * round(x / scale)

The grid is symmetric; each output channel, or the whole tensor, has one scale. Matrix products use
the rounded values in the engine's dtype, so the engine samples from the quantised model's
distribution. This saves neither time nor memory.

The projections of attention and MLP are quantised, experts included. Embedding, lm_head, the router
of experts, norms and biases keep their values, as in 8-bit rollouts (FlashRL) and 8-bit
checkpoints. Integer kernels sum in int32 and scale the sum, but this engine sums in its dtype. In
bfloat16 the quantised value is rounded once more.

Formats below eight bits are for experiments on small models, where eight bits cause hardly any
mismatch of sampler and learner. `tools/studies/exp_tis.py --formats FOLDER` measures the mismatch.

Own code instead of torchao: a few lines of torch save the dependency.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rlcore.utils.errors import ConfigError

Quantize = Literal["none", "int8", "int8_tensor", "int8_w8a8", "int4", "int3", "fp8", "fp4", "fp3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Number format of simulated quantisation: grid of numbers, and scope of a scale."""

    largest: int
    mantissa_bits: int | None = None
    """Mantissa bits of a floating-point grid; None: the grid is the integers."""
    min_exponent: int = 0
    """Exponent of the smallest normal number of a floating-point grid."""
    per_tensor: bool = False
    """Whether a weight tensor has one scale, instead of one scale per output channel."""
    activations: bool = False
    """Whether the inputs of quantised projections are quantised too, with one scale per token."""


FORMATS: dict[str, Format | None] = {
    "none": None,
    "int8": Format(largest=127),
    "int8_tensor": Format(largest=127, per_tensor=True),
    "int8_w8a8": Format(largest=127, activations=True),
    "int4": Format(largest=7),
    "int3": Format(largest=3),
    "fp8": Format(largest=448, mantissa_bits=3, min_exponent=-6),  # e4m3
    "fp4": Format(largest=6, mantissa_bits=1),  # e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6
    "fp3": Format(largest=4, mantissa_bits=0),  # e2m0: 0, 1, 2, 4
}
assert FORMATS.keys() == set(get_args(Quantize))


def format_of(name: str) -> Format | None:
    """Return the format called `name`, or None for `none`. Raise ConfigError for other names."""
    if name not in FORMATS:
        raise ConfigError(f"--rollout.quantize {name}: unknown; give one of {', '.join(FORMATS)}")
    return FORMATS[name]


def is_quantized(name: str) -> bool:
    """Return whether the tensor called `name` is quantised."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


def quantize_weight(weight: Tensor, form: Format) -> Tensor:
    """Round a weight [out, in] to the values of `form`, in the weight's dtype."""
    wide = _wide(weight)
    top = wide.abs().amax() if form.per_tensor else wide.abs().amax(-1, keepdim=True)
    return _on_grid(wide, top, form).to(weight.dtype)


def quantize_tokens(x: Tensor, form: Format) -> Tensor:
    """Round activations [..., in] with a separate scale for each token."""
    wide = _wide(x)
    return _on_grid(wide, wide.abs().amax(-1, keepdim=True), form).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _on_grid(x: Tensor, top: Tensor, form: Format) -> Tensor:
    """Round `x` to the grid whose largest number is `top`, ties to even."""
    scale = torch.where(top == 0, 1, top / form.largest)
    y = x / scale
    if form.mantissa_bits is None:
        return y.round_().mul_(scale)
    exponent = torch.frexp(y).exponent - 1  # |y| is in [2^exponent, 2^(exponent + 1))
    exponent = exponent.clamp_(min=form.min_exponent) - form.mantissa_bits
    step = torch.ldexp(torch.ones_like(y), exponent)
    return (y / step).round_().mul_(step).mul_(scale)
