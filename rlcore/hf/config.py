"""Read a model's config.json into a frozen dataclass, without transformers.

The key names of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`, `num_experts`) and 5
(`rope_parameters`, `dtype`, `num_local_experts`) are supported. Unsupported settings raise an
error.

Own code instead of AutoConfig: importing transformers takes seconds (`hf/tokenizer.py`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcore.hf.architectures import ARCHITECTURES, BY_TYPE, Architecture, Switch
from rlcore.hf.rope_settings import Rope, read_rope
from rlcore.utils.bounds import Range, above, at_least
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import fault, folder_fault, read_json

# Allowed numbers by key. The limits are far above those of published models; beyond them, lists of
# tensor names would fill the memory before the weights are compared.
_WHOLE: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "num_hidden_layers": (1, 1024),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (2, 1 << 16),
    "max_position_embeddings": (1, 1 << 31),
    "sliding_window": (1, 1 << 31),
    "num_experts": (0, 1 << 14),
    "num_local_experts": (0, 1 << 14),
    "n_routed_experts": (0, 1 << 14),
    "n_shared_experts": (0, 1 << 14),
    "n_group": (1, 1 << 14),
    "topk_group": (1, 1 << 14),
    "first_k_dense_replace": (0, 1024),
    "num_experts_per_tok": (1, 1 << 14),
    "moe_intermediate_size": (1, 1 << 24),
    "decoder_sparse_step": (1, 1024),
    "q_lora_rank": (1, 1 << 20),
    "kv_lora_rank": (1, 1 << 20),
    "qk_nope_head_dim": (1, 1 << 16),
    "qk_rope_head_dim": (2, 1 << 16),
    "v_head_dim": (1, 1 << 16),
    "num_nextn_predict_layers": (0, 1024),
    "bos_token_id": (-1, 1 << 31),
    "pad_token_id": (-1, 1 << 31),
    "original_max_position_embeddings": (1, 1 << 31),
}
_REAL: Mapping[str, Range] = {
    "rms_norm_eps": above(0, at_most=1),
    "initializer_range": at_least(0, at_most=100),
    "rope_theta": above(1, at_most=1e15),
    "partial_rotary_factor": above(0, at_most=1),
    "routed_scaling_factor": above(0, at_most=1e6),
    "factor": at_least(1, at_most=1e6),
    "low_freq_factor": above(0, at_most=1e6),
    "high_freq_factor": above(0, at_most=1e6),
    "beta_fast": above(0, at_most=1e6),
    "beta_slow": above(0, at_most=1e6),
    "attention_factor": above(0, at_most=1e6),
    "attn_factor": above(0, at_most=1e6),
    "mscale": above(0, at_most=1e6),
    "mscale_all_dim": above(0, at_most=1e6),
}
_SWITCHES = (
    "tie_word_embeddings",
    "norm_topk_prob",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "rope_interleave",
    "truncate",
)
LATENT_EPS = 1e-6
"""Epsilon of the norms of MLA's latents in transformers, whatever `rms_norm_eps` is."""
_SIGMOID_KEYS = (
    "first_k_dense_replace",
    "n_group",
    "n_shared_experts",
    "routed_scaling_factor",
    "topk_group",
)
"""Keys that a model with sigmoid routers must have, since the defaults of its classes differ."""
_WINDOW = 4096
"""Sliding window of transformers if config.json lacks the key; null stands for none."""
_MOST_EXPERTS = 1 << 18
"""Maximum number of experts of all layers together."""
# Keys in config.json of each HFConfig field that `with_` may change.
_KEYS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rms_norm_eps": ("rms_norm_eps",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "max_positions": ("max_position_embeddings",),
    "num_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "norm_topk_prob": ("norm_topk_prob",),
    "initializer_range": ("initializer_range",),
    "dtype": ("dtype", "torch_dtype"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention (MLA, arXiv:2405.04434): keys and values of all heads
    are projections of one latent per token, and RoPE rotates a part that all keys share."""

    q_rank: int | None
    """Size of the queries' latent; None: queries are projected from the hidden state."""
    kv_rank: int
    """Size of the latent of keys and values."""
    nope_dim: int
    """Number of dimensions of a query and key that RoPE does not rotate; they come first."""
    rope_dim: int
    """Number of dimensions of a query and key that RoPE rotates."""
    value_dim: int
    """Size of a head's value."""
    is_interleaved: bool
    """Whether RoPE rotates dimensions 2i and 2i + 1 together, not i and i + rope_dim / 2."""


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """Sizes and switches of one decoder-only model."""

    path: Path | None
    """Folder of the config.json; None for a config made in memory."""
    arch: str
    """Architecture, by its `model_type`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of a dense MLP; experts have `moe_intermediate_size`."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Size of a head's query and key."""
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    """Length of the longest sequence, with RoPE scaling. At most `sliding_window`, because longer
    sequences would need another attention mask."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to at most, itself included; None: all before it."""
    mla: LatentSizes | None = None
    """Sizes of multi-head latent attention; None: attention with keys and values per head."""
    num_experts: int = 0
    """Number of experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    dense_layers: frozenset[int] = frozenset()
    """Layers of an MoE model that have a dense MLP instead of experts."""
    has_expert_bias: bool = False
    """Whether routers score experts by sigmoids and choose by score plus a bias; else by softmax.
    The scores of the chosen experts are then divided by their sum."""
    routing_scale: float = 1.0
    """Factor of the scores of the chosen experts."""
    expert_groups: int = 1
    """Number of equal groups of a layer's experts. A token chooses among the experts of its
    `groups_per_token` best groups, by the sum of their two best experts."""
    groups_per_token: int = 1
    shared_intermediate_size: int = 0
    """Width of the MLP that all tokens use beside a layer's experts; 0: none."""
    initializer_range: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = ""
    """Dtype of the tensors on disk according to config.json, without `torch.`; "" if missing."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """Unchanged contents of config.json."""

    @classmethod
    def from_folder(cls, path: str | Path, key: str = "--model.path") -> "HFConfig":
        """Read `<path>/config.json`; `key` is the setting that names the folder. Raise ConfigError
        if the file is missing, not JSON, or unsupported."""
        path = Path(path)
        if why := folder_fault(path):
            raise ConfigError(
                f"{key} {path}: {why}; give the folder of a Hugging Face model"
                " (config.json, *.safetensors, tokenizer), or its name on the hub (ORG/NAME)"
            )
        file = path / "config.json"
        if why := fault(file):
            what = "has no config.json" if why == "no such file" else f"config.json: {why}"
            raise ConfigError(f"{key} {path}: {what}; give the folder of a Hugging Face model")
        return cls.from_dict(read_json(file), path)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], path: Path | None = None) -> "HFConfig":
        """Convert a parsed config.json. Raise ConfigError if a setting is unsupported."""
        where = str(path / "config.json") if path is not None else "model config"
        _check_types(raw, where)
        arch = _arch(raw, where)
        _refuse_unsupported(raw, arch, where)

        def need(key: str) -> Any:
            if raw.get(key) is None:
                raise ConfigError(f"{where}: `{key}` is missing; take the model's config.json")
            return raw[key]

        heads, hidden = need("num_attention_heads"), need("hidden_size")
        rope = read_rope(raw, where, arch.partial_rotary_factor)
        positions = rope.max_positions(raw.get("max_position_embeddings") or arch.max_positions)
        window = None
        if _has(arch.sliding_window, raw, "use_sliding_window"):
            window = raw.get("sliding_window", _WINDOW)
        num_layers = need("num_hidden_layers")
        experts = next((raw[key] for key in _KEYS["num_experts"] if raw.get(key)), 0)
        if arch.router and not experts:
            raise ConfigError(f"{where}: `num_experts` is missing; take the model's config.json")
        dense_layers = _dense_layers(raw, num_layers) if arch.router else frozenset()
        moe = arch.router is not None and len(dense_layers) < num_layers
        mla = _mla(need, raw) if arch.has_mla else None
        head_dim = raw.get("head_dim") or arch.head_dim or hidden // heads
        config = cls(
            path=path,
            arch=arch.model_type,
            vocab_size=need("vocab_size"),
            hidden_size=hidden,
            intermediate_size=need("intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=mla.nope_dim + mla.rope_dim if mla else head_dim,
            rms_norm_eps=float(_or(raw, "rms_norm_eps", 1e-6)),
            rope=rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=_has(arch.qkv_bias, raw, "attention_bias"),
            qk_norm=_has(arch.qk_norm, raw, "use_qk_norm"),
            max_positions=min(positions, window or positions),
            sliding_window=window,
            mla=mla,
            num_experts=experts if moe else 0,
            experts_per_token=need("num_experts_per_tok") if moe else 0,
            moe_intermediate_size=need("moe_intermediate_size") if moe else 0,
            dense_layers=dense_layers if moe else frozenset(),
            **(_router(raw, arch, where) if moe else {}),
            initializer_range=float(_or(raw, "initializer_range", 0.02)),
            bos_id=raw.get("bos_token_id"),
            eos_ids=as_ids(raw.get("eos_token_id"), where),
            pad_id=raw.get("pad_token_id"),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
            raw=raw,
        )
        config._check(where)
        return config

    def with_(self, **changes: Any) -> "HFConfig":
        """Return a copy with some sizes replaced, such as `num_layers`; `to_dict` returns the new
        sizes. Raise ConfigError for a field that `to_dict` cannot express."""
        allowed = [name for name in _KEYS if not (self.mla and name == "head_dim")]
        unknown = sorted(set(changes) - set(allowed))
        if unknown:
            raise ConfigError(
                f"model config: cannot change {unknown[0]}, only {', '.join(allowed)}"
            )
        config = replace(self, **changes)
        config._check("model config")
        if "max_positions" in changes:
            kept = HFConfig.from_dict(config.to_dict()).max_positions
            if kept != config.max_positions:
                raise ConfigError(
                    f"model config: cannot change max_positions to {config.max_positions}: RoPE "
                    f"scaling or the sliding window makes it {kept}; use a model without"
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of a config.json: the original contents with the changed sizes."""
        raw, before = dict(self.raw), HFConfig.from_dict(self.raw)
        for name, keys in _KEYS.items():
            value = getattr(self, name)
            if value != getattr(before, name):
                raw[next((key for key in keys if key in raw), keys[0])] = value
        # transformers finds the class by `model_type` and `architectures`; a file may lack one.
        raw.setdefault("model_type", self.arch)
        raw.setdefault("architectures", [BY_TYPE[self.arch].class_name])
        if raw.get("num_nextn_predict_layers"):
            raw["num_nextn_predict_layers"] = 0  # `names.expected` has no tensors of these layers
        if types := raw.get("layer_types"):
            raw["layer_types"] = (types * self.num_layers)[: self.num_layers]
        return raw

    @property
    def rope_dim(self) -> int:
        """Number of dimensions of a head's query and key of which `rope` rotates a share."""
        return self.mla.rope_dim if self.mla else self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's value."""
        return self.mla.value_dim if self.mla else self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of the dot products of queries and keys."""
        return (self.rope.latent_factor if self.mla else 1.0) / math.sqrt(self.head_dim)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Shape of a token's entry in a layer of a KV cache: key and value (2), or with MLA one
        vector that has both (1), heads, and size of a head."""
        if self.mla:
            return 1, 1, self.mla.kv_rank + self.mla.rope_dim
        return 2, self.num_kv_heads, self.head_dim

    @property
    def num_mtp_layers(self) -> int:
        """Number of layers for multi-token prediction, which are neither loaded nor exported."""
        return self.raw.get("num_nextn_predict_layers") or 0

    def has_experts(self, layer: int) -> bool:
        """Return whether the MLP of this layer is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts."""
        return tuple(i for i in range(self.num_layers) if self.has_experts(i))

    @property
    def forms(self) -> dict[bool, int]:
        """First layer with experts (key True) and first layer without (key False), if any."""
        layers = reversed(range(self.num_layers))
        return {self.has_experts(i): i for i in layers}

    def _check(self, where: str) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}: {name} {getattr(self, name)}: must be at least 1")
        rotating = self.rope.dims(self.rope_dim)
        name = "qk_rope_head_dim" if self.mla else "head_dim"
        fewest = 4 if self.rope.kind == "dynamic" else 2
        if rotating < fewest or rotating % 2 or self.rope_dim % rotating:
            raise ConfigError(
                f"{where}: {name} {self.rope_dim}, of which {rotating} rotate: the latter must "
                f"be even, at least {fewest} and divide {name}; take the model's config.json"
            )
        if self.mla:
            self._check_mla(self.mla, where)
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"{where}: num_experts_per_tok {self.experts_per_token}: must be from 1 to the "
                f"{self.num_experts} experts; take the model's config.json"
            )
        size, rest = divmod(self.num_experts, self.expert_groups)
        if self.expert_groups > 1 and (
            rest
            or size < 2
            or self.groups_per_token > self.expert_groups
            or self.experts_per_token > self.groups_per_token * size
        ):
            raise ConfigError(
                f"{where}: n_group {self.expert_groups} with topk_group {self.groups_per_token}: "
                f"n_group must divide the {self.num_experts} experts into groups of 2 or more, and "
                f"topk_group groups, at most n_group, must have {self.experts_per_token} experts; "
                "take the model's config.json"
            )
        if self.num_experts * self.num_layers > _MOST_EXPERTS:
            raise ConfigError(
                f"{where}: num_experts {self.num_experts} in each of {self.num_layers} layers: must"
                f" be at most {_MOST_EXPERTS} in total; take the model's config.json"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{where}: num_attention_heads {self.num_heads}: must be a multiple of"
                f" num_key_value_heads {self.num_kv_heads}"
            )

    def _check_mla(self, mla: LatentSizes, where: str) -> None:
        if mla.value_dim > self.head_dim:
            raise ConfigError(
                f"{where}: v_head_dim {mla.value_dim}: must be at most {self.head_dim}, the sum of"
                " qk_nope_head_dim and qk_rope_head_dim; use another model"
            )
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"{where}: num_key_value_heads {self.num_kv_heads}: must be {self.num_heads} as "
                "num_attention_heads, since each head has its own key; take the model's config.json"
            )


def as_ids(value: Any, where: str) -> tuple[int, ...]:
    """Convert the `eos_token_id` of a file (None, an id or a list of ids) to a tuple. Raise
    ConfigError, which names the file (`where`), if the value is none of these."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(_is_whole(i) and 0 <= i < 1 << 31 for i in ids):
        raise ConfigError(
            f"{where}: `eos_token_id` {_shown(value)}: must be a token id or a list of token ids; "
            "take the model's file"
        )
    return ids


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _or(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    return default if raw.get(key) is None else raw[key]


def _check_types(raw: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for the first setting of a wrong type or out of range."""
    _check_numbers(raw, where)
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key) is None:
            continue
        if not isinstance(raw[key], dict):
            raise _wrong(where, key, raw[key], "must be a JSON object")
        _check_numbers(raw[key], where)
    for key in ("architectures", "layer_types"):
        value = raw.get(key)
        is_texts = isinstance(value, list) and all(isinstance(v, str) for v in value)
        if value is not None and not is_texts:
            raise _wrong(where, key, value, "must be a list of texts")
    dense = raw.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(map(_is_whole, dense))):
        raise _wrong(where, "mlp_only_layers", dense, "must be a list of numbers of layers")
    for key in ("model_type", "dtype", "torch_dtype"):
        if not isinstance(raw.get(key), str | None):
            raise _wrong(where, key, raw[key], "must be a text")


def _check_numbers(raw: Mapping[str, Any], where: str) -> None:
    for key, (low, high) in _WHOLE.items():
        value = raw.get(key)
        if value is not None and not (_is_whole(value) and low <= value <= high):
            raise _wrong(where, key, value, f"must be a whole number from {low} to {high}")
    for key, allowed in _REAL.items():
        value = raw.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and allowed.allows(value)):
            raise _wrong(where, key, value, f"{allowed.why(1)}, a number")
    for key in _SWITCHES:
        if not isinstance(raw.get(key), bool | None):
            raise _wrong(where, key, raw[key], "must be true or false")


def _wrong(where: str, key: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"{where}: `{key}` {_shown(value)}: {wanted}; take the model's config.json")


def _arch(raw: dict[str, Any], where: str) -> Architecture:
    names = raw.get("architectures") or []
    kind = raw.get("model_type")
    found = ARCHITECTURES.get(names[0]) if names else BY_TYPE.get(kind or "")
    if found is None:
        raise ConfigError(
            f"{where}: architecture {names[0] if names else kind!r} is not supported;"
            f" use a model of {', '.join(ARCHITECTURES)}"
        )
    return found


def _has(switch: Switch, raw: Mapping[str, Any], key: str) -> bool:
    return switch == "always" or (switch == "key" and bool(raw.get(key)))


def _mla(need: Callable[[str], Any], raw: Mapping[str, Any]) -> LatentSizes:
    return LatentSizes(
        q_rank=raw.get("q_lora_rank"),
        kv_rank=need("kv_lora_rank"),
        nope_dim=need("qk_nope_head_dim"),
        rope_dim=need("qk_rope_head_dim"),
        value_dim=need("v_head_dim"),
        is_interleaved=bool(_or(raw, "rope_interleave", True)),
    )


def _dense_layers(raw: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers of an MoE model that have no experts."""
    step, named = _or(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    first = _or(raw, "first_k_dense_replace", 0)
    return frozenset(i for i in range(num_layers) if i < first or i in named or (i + 1) % step)


def _router(raw: Mapping[str, Any], arch: Architecture, where: str) -> dict[str, Any]:
    """Return the fields of `HFConfig` for routers and shared experts."""
    if arch.router == "softmax":
        return {"norm_topk_prob": bool(raw.get("norm_topk_prob", False))}
    for key in _SIGMOID_KEYS:
        if key not in raw:
            raise ConfigError(f"{where}: `{key}` is missing; take the model's config.json")
    groups = _or(raw, "n_group", 1)
    return {
        "has_expert_bias": True,
        "norm_topk_prob": True,
        "routing_scale": float(_or(raw, "routed_scaling_factor", 1.0)),
        "expert_groups": groups,
        "groups_per_token": _or(raw, "topk_group", 1) if groups > 1 else 1,
        "shared_intermediate_size": _or(raw, "n_shared_experts", 0) * raw["moe_intermediate_size"],
    }


def _refuse_unsupported(raw: dict[str, Any], arch: Architecture, where: str) -> None:
    """Raise ConfigError for settings that learner or engine do not support."""
    window = _has(arch.sliding_window, raw, "use_sliding_window")
    kinds = {"full_attention"} | ({"sliding_attention"} if window else set())
    refused = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        # In Qwen2, query, key and value always have a bias, whatever `attention_bias` says.
        "attention_bias": arch.qkv_bias == "never" and bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "norm_topk_prob": arch.router == "sigmoid" and raw.get("norm_topk_prob") is False,
        "scoring_func": _or(raw, "scoring_func", arch.router) != arch.router,
        "moe_layer_freq": _or(raw, "moe_layer_freq", 1) != 1,
        "topk_method": _or(raw, "topk_method", "noaux_tc") != "noaux_tc",
        "layer_types": not kinds.issuperset(raw.get("layer_types") or ()),
        "quantization_config": raw.get("quantization_config") is not None,
    }
    for key, bad in refused.items():
        if bad:
            raise ConfigError(
                f"{where}: `{key}` {_shown(raw.get(key))} is not supported;"
                " use a model without it (dense bfloat16 or float32 weights, full attention, SiLU)"
            )
