"""Weight updates that exchange LoRA adapters alone (`--lora.weight_update adapters`).

Every rank with an engine reads the base from its folder, adds the adapters one weight at a time,
and hands the sums to its engine: engines load what they always load. Only A and B go between ranks.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.names import dtype_of, expected
from rlcore.hf.weights import WeightReader


class BaseWeights:
    """Weights of the base model, in files that are mapped into memory."""

    def __init__(
        self,
        folder: str | Path,
        hf: HFConfig,
        lora: peft.LoraSettings,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Open the files; tensors are read in each update.

        Args:
            dtype: data type of the learner's weights.
            device: device on which the adapters are added.
        """
        self._shapes, self._adapted = expected(hf), peft.adapted(hf, lora)
        self._factor = peft.scale(lora)
        self._reader = WeightReader(folder)
        self._reader.check(self._shapes)
        self._dtype, self._device = dtype, device

    def merged(self, adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights W + s B A under Hugging Face names, in the order of `Learner.export`.
        `adapters` has every A and B by PEFT's name."""
        for name in self._shapes:
            weight = self._reader.stored(name).to(self._device, dtype_of(name, self._dtype))
            if name in self._adapted:
                a, b = (adapters[matrix].to(self._device) for matrix in peft.matrices(name))
                weight = peft.merged(weight, a, b, self._factor)
            yield name, weight
