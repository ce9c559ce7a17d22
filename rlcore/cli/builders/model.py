"""Architecture, sampling parameters and maximum lengths of the model in training."""

from dataclasses import fields, replace
from typing import Any

from rlcore.config import rules
from rlcore.config.schema import Config, RewardSum
from rlcore.hf import hub
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import Tokenizer
from rlcore.records import Sampling
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce


def with_downloads(cfg: Config, *, weights: bool = True) -> Config:
    """Download the models that are named as on the hub (`hub.folder_of`), and put their folders in
    the place of their names.

    Args:
        weights: whether to download weights, or only settings and tokenizers.

    Raises:
        ConfigError: a model cannot be downloaded.
    """
    m, c = cfg.model, cfg.critic
    tokenizer = hub.folder_of(m.tokenizer, "--model.tokenizer", weights=False)
    path = hub.folder_of(m.path, "--model.path", weights=weights and not m.random_init)
    critic = hub.folder_of(c.path, "--critic.path", weights=weights)
    teachers = tuple(_with_teacher(text, weights) for text in cfg.teacher.models)
    return replace(
        cfg,
        teacher=replace(cfg.teacher, models=teachers),
        model=replace(m, path=path, tokenizer=tokenizer),
        critic=replace(c, path=critic),
        reward=_with_judges(cfg.reward, "reward", weights),
    )


def _with_teacher(text: str, weights: bool) -> str:
    """Put a folder in the place of the name of a teacher, in an entry of --teacher.models."""
    dataset, model = rules.teacher_of(text)
    if rules.is_server(model):
        return text
    folder = hub.folder_of(model, "--teacher.models", weights=weights)
    return f"{dataset}={folder}" if dataset else folder


def _with_judges(reward: Any, key: str, weights: bool) -> Any:
    """Put folders in the place of the names of judges that run on the run's own devices."""
    if isinstance(reward, RewardSum):
        parts = {f.name: getattr(reward, f.name) for f in fields(reward)}
        return replace(
            reward, **{n: _with_judges(part, f"{key}.{n}", weights) for n, part in parts.items()}
        )
    if isinstance(reward, JudgeRewardConfig) and not reward.url:
        return replace(reward, model=hub.folder_of(reward.model, f"--{key}.model", weights=weights))
    return reward


def model_config(cfg: Config) -> HFConfig:
    """Read the architecture of --model.path, with --model.num_layers applied."""
    return with_layers(cfg, HFConfig.from_folder(cfg.model.path))


def with_layers(cfg: Config, hf: HFConfig) -> HFConfig:
    """Apply --model.num_layers to the architecture.

    Raises:
        ConfigError: the key is set although weights are loaded.
    """
    if cfg.model.num_layers:
        if not cfg.model.random_init:
            raise ConfigError(
                f"--model.num_layers {cfg.model.num_layers}: works only with --model.random_init, "
                "since the folder has weights for all layers"
            )
        hf = hf.with_(num_layers=cfg.model.num_layers)
    return hf


def with_room(cfg: Config, hf: HFConfig) -> Config:
    """Lower data.max_prompt_tokens, if needed, so that prompt and response fit the model's
    positions. Otherwise the engine would refuse a long prompt in the middle of the run.

    Raises:
        ConfigError: a response of maximum length alone fills all positions.
    """
    room = hf.max_positions - cfg.rollout.max_tokens
    window = " (its sliding window)" if hf.max_positions == hf.sliding_window else ""
    if room < 1:
        raise ConfigError(
            f"--rollout.max_tokens {cfg.rollout.max_tokens}: leaves no room for a prompt in the "
            f"model's {hf.max_positions} positions{window}; lower it"
        )
    if cfg.data.max_prompt_tokens <= room:
        return cfg
    announce(
        "prompts", f"at most {room} tokens, so that prompt and response fit the model's positions"
    )
    return replace(cfg, data=replace(cfg.data, max_prompt_tokens=room))


def sampling_of(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    """Return the sampling parameters of training."""
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
    """Return the maximum number of tokens of prompt and response together."""
    return min(hf.max_positions, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)
