"""Read the settings of RoPE (rotary position embedding) from config.json.

Keys of transformers 4 (`rope_theta`, `rope_scaling` with `type`) and 5 (`rope_parameters` with
`rope_type`) are supported. `rope.py` computes the frequencies.

`dynamic` (NTK) is computed as in SGLang and vLLM, with the frequencies of the longest sequence.
In transformers they depend on the current length, so keys in a cache would disagree with those
that the learner computes for the whole sequence.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.utils.errors import ConfigError

Scaling = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# Kinds of scaling with the keys that they need.
_NEEDED: dict[Scaling, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = ("beta_fast", "beta_slow", "truncate")  # of yarn
# Keys that change the frequencies in SGLang or transformers, but not here.
_REFUSED = ("alpha", "extrapolation_factor", "full_attention", "sliding_attention")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Settings of RoPE: which dimensions of a head rotate, and how fast."""

    theta: float
    partial: float = 1.0
    """Share of a head's dimensions that rotate, the first ones."""
    kind: Scaling = "default"
    factor: float = 1.0
    """Longest sequence with scaling, divided by the longest sequence without (all scalings)."""
    original_max_position_embeddings: int = 0
    """Longest sequence without scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """Dimensions with more turns than this in the original positions are not scaled (yarn)."""
    beta_slow: float = 1.0
    """Dimensions with fewer turns than this in the original positions are divided by `factor`
    (yarn)."""
    truncate: bool = True
    """Whether these two limits are rounded to whole dimensions (yarn)."""
    attention_factor: float = 1.0
    """Factor of cos and sin, so of queries and keys (yarn)."""
    latent_factor: float = 1.0
    """Factor of the dot products in multi-head latent attention (yarn with `mscale_all_dim`)."""

    def dims(self, head_dim: int) -> int:
        """Return the number of dimensions of a head that rotate."""
        return int(head_dim * self.partial)

    def max_positions(self, positions: int) -> int:
        """Return the length of the longest sequence if `max_position_embeddings` is `positions`.

        With linear and dynamic scaling, published models give the length without scaling there;
        with llama3 the length with scaling; with yarn sometimes this and sometimes that. SGLang
        and vLLM multiply likewise.
        """
        if self.kind == "yarn":
            return int(self.factor * self.original_max_position_embeddings)
        return int(self.factor * positions) if self.kind in ("linear", "dynamic") else positions


def read_rope(raw: Mapping[str, Any], where: str, partial: float | None = None) -> Rope:
    """Convert the RoPE settings of a parsed config.json, whose types are checked.

    Args:
        raw: contents of the file.
        where: name of the file for errors.
        partial: the architecture's default of `partial_rotary_factor`; None if its class in
            transformers ignores this key.

    Raises:
        ConfigError: a setting is missing or not supported.
    """
    given = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key)]
    if len(given) == 2:
        raise ConfigError(f"{where}: has `rope_parameters` and `rope_scaling`; keep only one")
    rope: Mapping[str, Any] = raw[given[0]] if given else {}

    def find(key: str, *default: Any) -> Any:
        """Return the value in the object of RoPE, else at the top of the file, else `default`."""
        return next(v for v in (rope.get(key), raw.get(key), *default) if v is not None)

    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in tuple(_NEEDED):
        raise ConfigError(
            f"{where}: RoPE scaling {kind!r} is not supported, only {', '.join(_NEEDED)}; use "
            f"another model, or set `rope_type` in `{given[0]}` to default for the original "
            "context length"
        )
    for key in _REFUSED:
        if rope.get(key) is not None:
            raise ConfigError(f"{where}: `{key}` of RoPE is not supported; use another model")
    for key in _NEEDED[kind]:
        if rope.get(key) is None:
            raise ConfigError(f"{where}: RoPE scaling {kind} needs `{key}`; add it")
    wanted = find("partial_rotary_factor", partial, 1.0)
    if partial is None and wanted != 1.0:
        raise ConfigError(
            f"{where}: `partial_rotary_factor` {wanted}: is not supported for this architecture, "
            "whose class in transformers ignores it; use another model"
        )
    made: dict[str, Any] = {key: rope[key] for key in _NEEDED[kind]}
    made |= {"theta": float(find("rope_theta", 10000.0)), "partial": float(wanted), "kind": kind}
    original = made.get("original_max_position_embeddings")
    top = raw.get("original_max_position_embeddings")
    if None not in (original, top) and original != top:
        raise ConfigError(
            f"{where}: `original_max_position_embeddings` is {top} and, in `{given[0]}`, "
            f"{original}; keep only one of both values"
        )
    if kind == "llama3" and made["low_freq_factor"] >= made["high_freq_factor"]:
        raise ConfigError(
            f"{where}: `low_freq_factor` {made['low_freq_factor']}: must be below "
            f"high_freq_factor {made['high_freq_factor']}; take the model's config.json"
        )
    if kind == "yarn":
        made |= {key: rope[key] for key in _OPTIONAL if rope.get(key) is not None}
        made["attention_factor"] = _attention_factor(rope)
        if under := rope.get("mscale_all_dim"):
            made["latent_factor"] = _mscale(rope, under) ** 2
    return Rope(**made)


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor of cos and sin. `attention_factor` (transformers) is its value, and
    `attn_factor` (SGLang, vLLM) multiplies the default, which `mscale` and `mscale_all_dim` set."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    default = _mscale(rope, 1.0)
    if over and under:
        default = _mscale(rope, over) / _mscale(rope, under)
    return default * (rope.get("attn_factor") or 1.0)


def _mscale(rope: Mapping[str, Any], weight: float) -> float:
    return 0.1 * weight * math.log(rope["factor"]) + 1.0
