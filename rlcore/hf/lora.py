"""Name the LoRA adapters of a model, and read and write them as a PEFT folder.

A weight W [out, in] with an adapter computes W x + s B (A x), where A is [rank, in] and B is
[out, rank]. The scale s is alpha / rank, or alpha / sqrt(rank) if rank-stabilised
(arXiv:2312.03732). PEFT has one A and one B for each projection of a Hugging Face model:

    adapter_config.json           rank, alpha and target_modules
    adapter_model.safetensors     base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...

Own code instead of `peft`, which wraps modules of transformers: a learner has Megatron's.
"""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlcore.hf.config import HFConfig
from rlcore.hf.names import Shape, expected
from rlcore.hf.weights import Index, WeightReader, agreed, check_target, replace_folder
from rlcore.utils import collective, disk
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json
from rlcore.utils.seed import derive

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = CONFIG, WEIGHTS
"""Files that `save_adapters` writes."""
_PREFIX = "base_model.model."
_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian"),  # others change the base as well
    "use_dora": (),
    "lora_bias": (),
    "fan_in_fan_out": (),
    "modules_to_save": (),
    "rank_pattern": (),
    "alpha_pattern": (),
    "layer_replication": (),
    "trainable_token_indices": (),
}
"""Settings of a PEFT folder that must be off or have one of these values."""


class LoraSettings(Protocol):
    """Settings of the adapters, such as the section `lora` of a configuration."""

    @property
    def rank(self) -> int:
        """Rank of the adapters; 0: none."""

    @property
    def alpha(self) -> float:
        """Numerator of the scale."""

    @property
    def rs(self) -> bool:
        """Whether the scale is rank-stabilised."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the projections with an adapter, such as `q_proj`."""

    @property
    def experts(self) -> bool:
        """Whether experts have adapters."""


def scale(lora: LoraSettings) -> float:
    """Return the factor of B A."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rs else lora.rank)


def summary(lora: LoraSettings) -> str:
    """Return the settings that the adapters of a checkpoint depend on, as text; "": no adapters."""
    if not lora.rank:
        return ""
    experts = " and experts" if lora.experts else ""
    root = " rs" if lora.rs else ""
    return f"rank {lora.rank} alpha {lora.alpha:g}{root}, {' '.join(sorted(lora.targets))}{experts}"


def adapted(hf: HFConfig, lora: LoraSettings) -> dict[str, Shape]:
    """Return the shapes of the weights that have an adapter by name, in the order of export."""
    return {
        name: shape
        for name, shape in expected(hf).items()
        if name.endswith(".weight")
        and name.split(".")[-2] in lora.targets
        and (lora.experts or ".experts." not in name)
    }


def matrices(weight: str) -> tuple[str, str]:
    """Return PEFT's names of A and B for a weight.

    >>> matrices("model.layers.0.mlp.up_proj.weight")[1]
    'base_model.model.model.layers.0.mlp.up_proj.lora_B.weight'
    """
    module = _PREFIX + weight.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def shapes(hf: HFConfig, lora: LoraSettings) -> dict[str, Shape]:
    """Return the shapes of all A and B by PEFT's name, in the order of export."""
    found: dict[str, Shape] = {}
    for weight, (rows, columns) in adapted(hf, lora).items():
        a, b = matrices(weight)
        found |= {a: (lora.rank, columns), b: (rows, lora.rank)}
    return found


def num_adapter_parameters(hf: HFConfig, lora: LoraSettings) -> int:
    """Return the number of parameters of all adapters."""
    return sum(math.prod(shape) for shape in shapes(hf, lora).values())


def merged(weight: Tensor, a: Tensor, b: Tensor, factor: float) -> Tensor:
    """Return W + factor * B A in the weight's dtype; 16-bit values are added in float32."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=factor).to(weight.dtype)


class NewAdapters:
    """Initial adapters: A is uniform as torch.nn.Linear's weight and in PEFT, B is 0. A depends
    only on seed and name, so that all layouts get the same adapters."""

    def __init__(self, hf: HFConfig, lora: LoraSettings, seed: int) -> None:
        self._shapes, self._seed = shapes(hf, lora), seed

    def get(self, name: str, index: Index = ()) -> Tensor:
        """Return an A or B, or the part that `index` selects."""
        if name.endswith("lora_B.weight"):
            return torch.zeros(self._shapes[name])[index]
        generator = torch.Generator().manual_seed(derive(self._seed, name))
        matrix = torch.empty(self._shapes[name])
        bound = 1 / math.sqrt(matrix.size(1))
        return matrix.uniform_(-bound, bound, generator=generator)[index]


# ---- PEFT folders


def reader(folder: str | Path, hf: HFConfig, lora: LoraSettings) -> WeightReader:
    """Open the weights of a PEFT folder, and check that its adapters are those of `lora`.

    Raises:
        ConfigError: the folder cannot be read, or has other adapters.
    """
    folder = Path(folder)
    found = _config(folder)
    for key, allowed in _PLAIN.items():
        if found.get(key) and found[key] not in allowed:
            raise ConfigError(
                f"--lora.path {folder}: {key} is {found[key]!r} in {CONFIG}, but only plain LoRA "
                "is supported; give another folder"
            )
    for key, theirs, usual in (("rank", "r", 8), ("alpha", "lora_alpha", 8)):
        if found.get(theirs, usual) != getattr(lora, key):
            raise ConfigError(
                f"--lora.{key} {getattr(lora, key):g}: must be {found.get(theirs, usual)} as in "
                f"{folder / CONFIG}"
            )
    if bool(found.get("use_rslora")) != lora.rs:
        wanted = "lora.no_rs" if lora.rs else "lora.rs"
        raise ConfigError(f"{folder / CONFIG}: has another scale; set --{wanted}")
    weights = WeightReader(folder, WEIGHTS)
    needed = shapes(hf, lora)
    if others := sorted(set(weights.names()) ^ needed.keys()):
        which = "has no" if others[0] in needed else "also has"
        raise ConfigError(
            f"{folder}: {which} tensor {others[0]}; set --lora.targets (and --lora.experts) to the "
            "projections that the folder has"
        )
    weights.check(needed)
    return weights


def _config(folder: Path) -> dict[str, Any]:
    found = read_json(folder / CONFIG)
    if found.get("peft_type") != "LORA":
        raise ConfigError(f"{folder / CONFIG}: is not of a LoRA adapter; give a folder of PEFT")
    return found


def save_adapters(
    tensors: Iterable[tuple[str, Tensor]],
    hf: HFConfig,
    lora: LoraSettings,
    base: str,
    path: Path,
    *,
    together: bool = False,
) -> None:
    """Write a PEFT folder. The folder appears, or replaces an older one, only when it is complete
    and on disk. With `together`, all ranks of the default process group call this with all tensors,
    and the first one writes.

    Args:
        base: folder or name of the model without adapters, which PEFT loads first.

    Raises:
        ConfigError: the older folder is refused by `check_target`.
        OSError: the disk is full or not writable. With `together`, every rank raises an error.
    """
    # Copies, because tensors may be views of memory that is reused.
    found = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    part = path.with_name(path.name + ".part")
    with agreed(path, together):
        check_target(path, ADAPTER_FILES)
        if together and collective.place()[0]:
            return
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(found, part / WEIGHTS, {"format": "pt"})
        (part / CONFIG).write_text(json.dumps(peft_config(hf, lora, base), indent=2) + "\n")
        disk.sync_tree(part)
        replace_folder(part, path)


def peft_config(hf: HFConfig, lora: LoraSettings, base: str) -> dict[str, Any]:
    """Return the contents of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rs,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.split(".")[-2] for name in adapted(hf, lora)}),
    }
