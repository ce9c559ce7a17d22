"""Architecture, tokenizer settings and lengths of the model in training."""

from dataclasses import replace

from rlcore.config.schema import Config
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer
from rlcore.records import Sampling
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def model_config(cfg: Config) -> HFConfig:
    """The start model's architecture, with --model.num_layers applied."""
    return with_layers(cfg, HFConfig.from_folder(cfg.model.path))


def with_layers(cfg: Config, hf: HFConfig) -> HFConfig:
    """The architecture with --model.num_layers applied. ConfigError where weights are loaded."""
    if cfg.model.num_layers:
        if not cfg.model.random_init:
            raise ConfigError(
                f"--model.num_layers {cfg.model.num_layers}: only with --model.random_init, the "
                "folder's weights have all their layers"
            )
        hf = hf.with_(num_layers=cfg.model.num_layers)
    return hf


def with_room(cfg: Config, hf: HFConfig) -> Config:
    """Prompts may be as long as the model's positions allow besides an answer: the engine would
    refuse longer ones in the middle of the run. ConfigError where an answer alone takes all."""
    room = hf.max_positions - cfg.rollout.max_tokens
    if room < 1:
        raise ConfigError(
            f"--rollout.max_tokens {cfg.rollout.max_tokens}: prompt and response share the model's "
            f"{hf.max_positions} positions; take fewer"
        )
    if cfg.data.max_prompt_tokens <= room:
        return cfg
    announce("prompts", f"at most {room} tokens, so that an answer fits the model's positions too")
    return replace(cfg, data=replace(cfg.data, max_prompt_tokens=room))


def sampling_of(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    """How training samples are drawn."""
    r = cfg.rollout
    stops = tuple(dict.fromkeys([*tokenizer.eos_ids, *r.stop_ids]))
    return Sampling(
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        max_tokens=r.max_tokens,
        stop_ids=() if cfg.debug.full_length else stops,
    )


def max_model_tokens(cfg: Config, hf: HFConfig) -> int:
    """The longest prompt with the longest response."""
    return min(hf.max_positions, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)
