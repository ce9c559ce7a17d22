"""Rules on combinations of settings, checked before anything starts. Each error names the key, its
value, what is allowed and what to do. The range of a single key is stated at its field
(`utils/bounds.py`).
"""

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from rlcore import algos
from rlcore.algos import advantage, fused
from rlcore.config import sglang_args
from rlcore.config.schema import (
    PROJECTIONS,
    AsyncConfig,
    Config,
    DataConfig,
    DraftConfig,
    EnvConfig,
    LoraConfig,
    MuxConfig,
    StreamConfig,
    TailConfig,
    TeacherConfig,
    TrainConfig,
    reward_sections,
)
from rlcore.utils import bounds
from rlcore.utils.errors import ConfigError

_NAME_BYTES = 200
"""Maximum size of --run.name; the names of its lock and older copies are longer."""


def broken(cfg: Config) -> list[str]:
    """Return an error for every rule that the configuration breaks. Without errors, it is valid."""
    return [
        *_name(cfg),
        *of_batch(cfg),
        *_data(cfg),
        *_reward(cfg),
        *_replay(cfg),
        *_stream(cfg),
        *_algo(cfg),
        *_rollout(cfg),
        *_draft(cfg),
        *_train(cfg),
        *_true_on_policy(cfg),
        *_lora(cfg),
        *_teacher(cfg),
        *_routing(cfg),
        *_balance(cfg),
        *_roles(cfg),
        *_async(cfg),
        *_mux(cfg),
        *_env(cfg),
    ]


def of_batch(cfg: Config) -> list[str]:
    """Return an error for every broken rule on key ranges, batch sizes and schedule."""
    return [*ranges(cfg), *_batch(cfg), *_schedule(cfg)]


def of_world(cfg: Config, world_size: int, ranks_per_node: int) -> list[str]:
    """Return an error for every broken rule on the number of ranks, which `broken` leaves out."""
    out, site = [], cfg.sync.ranks_per_site
    sizes = [("rollout.tp", cfg.rollout.tp), ("rollout.max_tp", cfg.rollout.max_tp or 1)]
    for key, tp in [*sizes, *(("debug.rollout_tp", tp) for tp in cfg.debug.rollout_tp)]:
        if tp > 1 and (world_size % tp or (ranks_per_node % tp and tp % ranks_per_node)):
            out.append(
                f"--{key} {tp}: must divide the {world_size} ranks, and an engine is within one "
                f"node or has whole nodes, so it must also divide the {ranks_per_node} ranks of a "
                "node or be a multiple of them"
            )
    if cfg.mux.url and cfg.rollout.tp > ranks_per_node:
        out.append(
            f"--rollout.tp {cfg.rollout.tp}: with --mux.url an engine must be within the "
            f"{ranks_per_node} ranks of a node, whose host memory keeps its weights; use fewer"
        )
    if problem := of_roles(cfg.cluster.rollout_ranks, world_size):
        return [problem]
    apart, tp = cfg.cluster.rollout_ranks, cfg.rollout.tp
    if apart and (apart % tp or (world_size - apart) % tp):
        out.append(
            f"--rollout.tp {tp}: must divide the {apart} rollout ranks and the "
            f"{world_size - apart} train ranks before them, since the first rank of an engine "
            "must be a multiple of its size; use a divisor of both"
        )
    if cfg.rollout.routing == "histopipe" and apart < 2 * tp:
        out.append(
            f"--rollout.routing histopipe: needs two engines, and {apart} rollout ranks make only "
            "one; raise --cluster.rollout_ranks, or use --rollout.routing group"
        )
    if site and world_size % site:
        out.append(
            f"--sync.ranks_per_site {site}: must divide the {world_size} ranks; use a divisor, or "
            "0 for the ranks of a node"
        )
    return out


def of_roles(rollout_ranks: int, world_size: int) -> str:
    """Return an error if no rank would be left to train, "" otherwise."""
    if not rollout_ranks or rollout_ranks < world_size:
        return ""
    return (
        f"--cluster.rollout_ranks {rollout_ranks}: leaves none of the {world_size} ranks to train; "
        f"start more ranks, or set at most {world_size - 1}, or 0 to sample and train on every rank"
    )


def route(cfg: Config) -> Literal["gather", "intranode", "two_stage"]:
    """Return the route of weight updates: --sync.route, with `auto` resolved."""
    if cfg.sync.route != "auto":
        return cfg.sync.route
    return "two_stage" if cfg.cluster.rollout_ranks else "gather"


def engine_dtype(cfg: Config) -> Literal["float32", "bfloat16", "float64"]:
    """Return the data type of the engines: --rollout.dtype, with `auto` resolved."""
    return cfg.model.dtype if cfg.rollout.dtype == "auto" else cfg.rollout.dtype


def saves_async(cfg: Config, *, cuda: bool) -> bool:
    """Return whether training continues while a checkpoint is written: --checkpoint.async_save,
    with None resolved for learners on a GPU (`cuda`) or on the CPU."""
    return cuda if cfg.checkpoint.async_save is None else cfg.checkpoint.async_save


def shares_prefix(train: TrainConfig, dtype: str, head_dim: int, *, cuda: bool) -> bool:
    """Return whether the learner computes common prefixes of a micro-batch's samples once:
    --train.share_prefix, with `auto` resolved for learners on a GPU (`cuda`) or on the CPU."""
    if train.share_prefix == "auto":
        # Without flash attention the masks of a GPU would take memory by the square of the length.
        fits = not cuda or has_flash_attention(dtype, head_dim)
        return fits and train.transformer_impl == "local"
    return train.share_prefix == "true"


def has_flash_attention(dtype: str, head_dim: int) -> bool:
    """Return whether flash attention on a GPU supports the data type and the size of a head."""
    return dtype in ("float16", "bfloat16") and head_dim % 8 == 0 and head_dim <= 256


def has_own_attention(train: TrainConfig) -> bool:
    """Return whether the core attention is rlcore's own, also in Transformer Engine's layers."""
    return train.transformer_impl == "local" or train.share_prefix == "true"


def has_fp32_lm_head(cfg: Config, *, cuda: bool) -> bool:
    """Return whether the engines compute their output layer in fp32: --rollout.fp32_lm_head, with
    None resolved for engines on a GPU (`cuda`) or on the CPU."""
    wanted = cuda if cfg.rollout.fp32_lm_head is None else cfg.rollout.fp32_lm_head
    return wanted and engine_dtype(cfg) == "bfloat16"


def warnings(cfg: Config) -> list[str]:
    """Return warnings about settings with no effect or an unexpected effect."""
    a, r, out = cfg.algo, cfg.rollout, []
    cut = [k for k, off in (("top_k", 0), ("top_p", 1), ("min_p", 0)) if getattr(r, k) != off]
    if cut and (a.rollout_is != "none" or a.rollout_rs or a.bypass_mode):
        out.append(
            f"--rollout.{cut[0]} {getattr(r, cut[0])}: the sampler's log-probs are normalised "
            "over the kept tokens, the learner's over all, so every weight p_old / p_sampler is "
            "too small; unset it, or set --algo.rollout_is none"
        )
    default = type(a)()
    unweighted = a.rollout_is == "none" or (a.bypass_mode and a.has_ratio)
    idle = {
        "gamma": a.adv_estimator not in ("gae", "reinforce_plus_plus"),
        "lam": a.adv_estimator != "gae",
        "norm_adv_by_std": a.adv_estimator not in ("grpo", "grpo_passk", "gdpo"),
        "kl_type": not a.kl_coef,
        "kl_unbiased": not a.kl_coef,
        "kl_reward_type": not a.kl_reward_coef,
        "kl_horizon": not a.kl_target,
        "overlong_penalty": not a.overlong_share,
        "rollout_is_threshold": unweighted,
        "rollout_is_batch_normalize": unweighted,
    }
    for key, useless in idle.items():
        value = getattr(a, key)
        if useless and value != getattr(default, key):
            out.append(f"--algo.{key} {value}: has no effect with the other settings of algo")
    train = cfg.train
    for key in ("min_lr", "lr_decay_updates"):
        value = getattr(train, key)
        if train.lr_schedule == "constant" and value != getattr(TrainConfig(), key):
            out.append(
                f"--train.{key} {value:g}: has no effect with train.lr_schedule constant; set "
                "linear or cosine"
            )
    if cfg.debug.decode_floor_ms and r.engine == "sglang":
        out.append(
            f"--debug.decode_floor_ms {cfg.debug.decode_floor_ms:g}: has no effect with "
            "rollout.engine sglang"
        )
    task = cfg.env.TASK or ("label" if "label" in cfg.data.train else "")
    if r.draft in FROM_HISTORY and task and not cfg.data.num_prompts:
        out.append(
            f"--rollout.draft {r.draft}: the task {task} is endless and repeats no prompt, so "
            "drafts come only from a request's own text; set --data.num_prompts"
        )
    if r.routing == "histopipe" and "label" in cfg.data.train and not cfg.data.num_prompts:
        out.append(
            "--rollout.routing histopipe: the task label is endless and repeats no prompt, so no "
            "lengths of earlier epochs are known; set --data.num_prompts"
        )
    if r.sglang_args and r.engine != "sglang":
        out.append(
            f"--rollout.sglang_args {r.sglang_args[0]}: has no effect with rollout.engine "
            f"{r.engine}"
        )
    for name, reward in reward_sections(cfg.reward).items():
        for key in ("timeout_factor", "min_timeout_s", "correct_score"):
            value, usual = getattr(reward, key), getattr(type(reward)(), key)
            if not reward.adaptive_timeout and value != usual:
                out.append(
                    f"--{name}.{key} {value:g}: has no effect without --{name}.adaptive_timeout"
                )
    if cfg.sync.ranks_per_site and route(cfg) == "gather":
        out.append(
            f"--sync.ranks_per_site {cfg.sync.ranks_per_site}: has no effect with sync.route gather"
        )
    stale = cfg.select.mode == "async" and cfg.async_.alpha > 0
    weighs = a.bypass_mode or a.rollout_rs or getattr(a, "behave", "none") != "none"
    if stale and a.rollout_is == "none" and not weighs:
        out.append(
            "--algo.rollout_is none: with --mode async samples are of earlier policy versions, "
            "and nothing corrects for that; set --algo.rollout_is token, or --algo.bypass_mode"
        )
    if cfg.train.offload and cfg.cluster.rollout_ranks:
        out.append(
            "--train.offload: has no effect with cluster.rollout_ranks, where engine and learner "
            "use different devices"
        )
    if r.fp32_lm_head and engine_dtype(cfg) != "bfloat16":
        out.append("--rollout.fp32_lm_head: has no effect, the engine computes in full precision")
    if cfg.train.fp32_lm_head and cfg.model.dtype in ("float32", "float64"):
        out.append("--train.fp32_lm_head: has no effect, the learner computes in full precision")
    return out


def check(cfg: Config) -> None:
    """If rules are broken, raise a ConfigError that lists them, one per line."""
    found = broken(cfg)
    if found:
        raise ConfigError("\n".join(found))


def ranges(cfg: Config) -> list[str]:
    """Return an error for every key that is out of the range stated at its field."""
    sections = {f.name.rstrip("_"): getattr(cfg, f.name) for f in fields(cfg) if f.name != "reward"}
    sections |= reward_sections(cfg.reward)
    return [line for key, section in sections.items() for line in bounds.broken(section, key)]


def _idle(section: Any, usual: Any, key: str, needed: str) -> list[str]:
    """Return an error for every key of a section that is set but has no effect without `needed`."""
    return [
        f"--{key}.{f.name}: has no effect without {needed}"
        for f in fields(section)
        if getattr(section, f.name) != getattr(usual, f.name)
    ]


def _data(cfg: Config) -> list[str]:
    out = []
    if not cfg.model.path:
        out.append("--model.path: is empty; give the Hugging Face folder of the start model")
    if cfg.run.steps and not cfg.data.train and not cfg.env.TASK:
        out.append("--data.train: is empty; give prompt files (.jsonl, .parquet) or the task label")
    if name := cfg.data.teacher_prompt_field:
        key = f"--data.teacher_prompt_field {name}"
        if not cfg.algo.needs_teacher:
            out.append(f"{key}: has no effect without a teacher (--algo opd or gkd); leave it out")
        elif cfg.select.env:
            out.append(f"{key}: has no effect with --env, whose prompts are its own; leave it out")
    out += _demonstrations(cfg)
    weights, entries = cfg.data.weights, len(cfg.data.train)
    if weights and len(weights) != entries:
        out.append(
            f"--data.weights {' '.join(map(bounds.show, weights))}: must be one number for each "
            f"entry of data.train, which has {entries}"
        )
    if not (cfg.run.steps or cfg.data.val or cfg.env.TASK):
        out.append("--data.val: is empty; give the prompts to evaluate on")
    elif cfg.eval.every and not cfg.data.val and not cfg.env.TASK:
        out.append("--data.val: is empty; give validation prompts, or --eval.every 0 for none")
    return out


def _demonstrations(cfg: Config) -> list[str]:
    """Check the keys of demonstrations, which are trained beside the samples."""
    data, usual = cfg.data, DataConfig()
    if not data.demonstrations:
        if data.demonstration_share == usual.demonstration_share:
            return []
        return [
            f"--data.demonstration_share {data.demonstration_share:g}: has no effect without "
            "--data.demonstrations; give files, or leave it out"
        ]
    key, out = f"--data.demonstrations {' '.join(data.demonstrations)}", []
    if not cfg.algo.takes_demonstrations:
        out.append(
            f"{key}: --algo {cfg.select.algo} trains only on what the policy has sampled; use "
            "--algo gkd, or train on them before with rlcore sft"
        )
    unknown = {
        f"--algo.rollout_rs {' '.join(cfg.algo.rollout_rs)}": cfg.algo.rollout_rs,
        "--algo.bypass_mode": cfg.algo.bypass_mode,
        f"--algo.kl_coef {cfg.algo.kl_coef:g}": cfg.algo.kl_coef,
    }
    out += [
        f"{other}: needs log-probs of the sampler or the reference, which demonstrations "
        "(--data.demonstrations) do not have; unset one of the two"
        for other, is_on in unknown.items()
        if is_on
    ]
    if data.teacher_prompt_field:
        out.append(
            f"{key}: have no prompt of the teacher's own (--data.teacher_prompt_field "
            f"{data.teacher_prompt_field}); leave one of them out"
        )
    return out


def _routing(cfg: Config) -> list[str]:
    """Check that routing replay `old` has a pass of old log-probs and later updates."""
    if cfg.algo.routing_replay != "old":
        return []
    key = "--algo.routing_replay old"
    if cfg.algo.bypass_mode:
        return [f"{key}: --algo.bypass_mode computes no old log-probs; use one of them"]
    if cfg.train.epochs == 1 and not cfg.train.samples_per_update:
        return [
            f"{key}: has no effect with one update per step, which trains with the old weights; "
            "set --train.samples_per_update or --train.epochs, or leave it at none"
        ]
    return []


def _router_losses(cfg: Config) -> list[str]:
    """Return the keys of the losses of routers that are set, with their values."""
    keys = ("moe_aux_loss_coef", "moe_z_loss_coef")
    return [f"--train.{key} {getattr(cfg.train, key):g}" for key in keys if getattr(cfg.train, key)]


def _balance(cfg: Config) -> list[str]:
    """Check that losses of routers know the divisor of the policy loss before the gradients."""
    if not (cfg.algo.rollout_rs or cfg.algo.drops_tokens):
        return []
    reason = f"--algo {cfg.select.algo}"
    if cfg.algo.rollout_rs:
        reason = f"--algo.rollout_rs {' '.join(cfg.algo.rollout_rs)}"
    return [
        f"{key}: {reason} rejects tokens, so that the divisor of the policy loss is known only "
        "after the gradients; leave the coefficient at 0, or reject no tokens"
        for key in _router_losses(cfg)
    ]


def quotas(cfg: Config) -> dict[str, int]:
    """Parse `--tail.dataset_quotas` into the number of prompts by dataset.

    Raises:
        ConfigError: a quota is not of the form `dataset=prompts`.
    """
    found = {}
    for text in cfg.tail.dataset_quotas:
        source, equals, number = text.rpartition("=")
        if not equals or not source or not number.isdigit() or source in found:
            raise ConfigError(
                f"--tail.dataset_quotas {text}: must be `dataset=prompts`, each dataset once, such "
                "as `math=96 code=32`"
            )
        found[source] = int(number)
    return found


def _schedule(cfg: Config) -> list[str]:
    out: list[str] = []
    tail = cfg.tail
    if cfg.select.schedule == "all":
        return _idle(tail, TailConfig(), "tail", "--schedule tail_batching")
    try:
        wanted = quotas(cfg)
    except ConfigError as error:
        return [*out, str(error)]
    total = cfg.data.prompts_per_step
    if wanted and (min(wanted.values()) < 1 or sum(wanted.values()) != total):
        out.append(
            f"--tail.dataset_quotas {' '.join(tail.dataset_quotas)}: each must be at least 1, and "
            f"their sum must be data.prompts_per_step {total}"
        )
    if cfg.algo.adv_estimator == "remax":
        out.append(
            "--algo.adv_estimator remax: --schedule tail_batching does not sample its greedy "
            "baseline; use --schedule all, or grpo"
        )
    return out


def _reward(cfg: Config) -> list[str]:
    out, sections = [], reward_sections(cfg.reward)
    for name, r in sections.items():
        out += r.problems(name)
        if r.adaptive_timeout and not r.min_timeout_s <= r.timeout_s:
            out.append(
                f"--{name}.min_timeout_s {r.min_timeout_s:g}: must be at most {name}.timeout_s "
                f"{r.timeout_s:g}"
            )
    adaptive = [name for name, r in sections.items() if r.adaptive_timeout]
    if len(adaptive) > 1:
        out.append(
            f"--{adaptive[1]}.adaptive_timeout: only one reward of a sum may have it, and "
            f"{adaptive[0]} has it already; turn one of them off"
        )
    return out


def _name(cfg: Config) -> list[str]:
    name = cfg.run.name
    is_plain = name.isprintable() and "/" not in name and name not in (".", "..")
    if is_plain and len(name.encode()) <= _NAME_BYTES:
        return []
    return [
        f"--run.name {ascii(name)[1:-1][:_NAME_BYTES]}: must be the name of one folder, printable, "
        f"without / and of at most {_NAME_BYTES} bytes; choose the parent folder with --run.dir"
    ]


def _replay(cfg: Config) -> list[str]:
    if not cfg.debug.replay:
        return []
    own = (Path(cfg.run.dir) / (cfg.run.name or "run")).resolve()
    path = Path(cfg.debug.replay).resolve()
    if path == own or path.parent == own:
        return [
            f"--debug.replay {cfg.debug.replay}: is the log that this run itself writes; set "
            "another --run.name"
        ]
    return []


STREAMABLE = ("grpo", "grpo_passk", "maxrl", "rloo", "opo", "none")
"""Advantage estimators that need only the samples of one group, not all samples of a step."""


def _stream(cfg: Config) -> list[str]:
    """Check settings that conflict with --mode stream because they need every sample of a step
    before the first gradient."""
    a, s, out = cfg.algo, cfg.stream, []
    if cfg.select.mode != "stream":
        return _idle(s, StreamConfig(), "stream", "--mode stream")
    if not s.earliest <= s.latest:
        out.append(f"--stream.earliest {s.earliest:g}: must be at most stream.latest {s.latest:g}")
    total = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    for key, is_one in (
        ("samples_per_update", cfg.train.samples_per_update in (0, total)),
        ("epochs", cfg.train.epochs == 1),
    ):
        if not is_one:
            out.append(
                f"--train.{key} {getattr(cfg.train, key)}: --mode stream accumulates one update "
                "over the whole step; set train.samples_per_update 0 and train.epochs 1, or use "
                "--mode sync"
            )
    estimator = algos.estimator(algos.module(cfg.select.algo), a)
    whole = {
        f"--algo.adv_estimator {estimator}": estimator not in STREAMABLE,
        "--algo.whiten_advantages": a.whiten_advantages,
        "--algo.rollout_is_batch_normalize": a.rollout_is_batch_normalize,
        f"--algo.kl_reward_coef {a.kl_reward_coef:g}": a.kl_reward_coef > 0,
        **dict.fromkeys(_router_losses(cfg), True),
        "--debug.shuffle_rewards": cfg.debug.shuffle_rewards,
    }
    out += [
        f"{key}: needs all samples of a step before the first gradient, but --mode stream trains "
        "on some while others are decoded; use --mode sync, or unset it (allowed estimators: "
        f"{', '.join(STREAMABLE)})"
        for key, is_on in whole.items()
        if is_on
    ]
    for key in ("deterministic_order", "replay"):
        if getattr(cfg.debug, key):
            out.append(
                f"--debug.{key}: with --mode stream timing decides which ranks train on which "
                "samples; use --mode sync, which samples the same responses"
            )
    if cfg.rollout.engine == "sglang" and not cfg.rollout.kv_cache_tokens:
        out.append(
            "--rollout.kv_cache_tokens 0: --mode stream needs the size of the KV caches to "
            "decide when ranks start to train; set the tokens that an engine's cache holds"
        )
    return out


def _batch(cfg: Config) -> list[str]:
    total = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    per_update = cfg.train.samples_per_update
    if per_update > 0 and total % per_update:
        return [
            f"--train.samples_per_update {per_update}: must divide the {total} samples of a step "
            f"(data.prompts_per_step {cfg.data.prompts_per_step} x rollout.samples_per_prompt "
            f"{cfg.rollout.samples_per_prompt}); 0 uses all of them"
        ]
    return []


def _gdpo(cfg: Config) -> list[str]:
    """Return what else gdpo cannot be combined with: it knows the terms of the reward, and no
    more."""
    name = "--algo.adv_estimator gdpo"
    if len(reward_sections(cfg.reward)) < 2:
        return [
            f"{name}: normalises each term of a sum of rewards, but --reward {cfg.select.reward} "
            "is no sum; give one, such as --reward math:1,my_pkg.my_reward:0.5, or use grpo"
        ]
    others = {
        f"--env {cfg.select.env}": cfg.select.env,
        "--debug.shuffle_rewards": cfg.debug.shuffle_rewards,
    }
    return [advantage.acts_on_sum(key) for key, is_on in others.items() if is_on]


def _algo(cfg: Config) -> list[str]:
    from rlcore.algos import correction  # imports torch, which is slow

    algo = cfg.algo
    out = [*algo.problems(), *advantage.problems(algo), *correction.problems(algo)]
    if algo.adv_estimator == "gdpo":
        out += _gdpo(cfg)
    if algo.adv_estimator in advantage.BY_GROUP and cfg.rollout.samples_per_prompt < 2:
        out.append(
            f"--rollout.samples_per_prompt {cfg.rollout.samples_per_prompt}: {algo.adv_estimator} "
            "needs at least 2, since a group of one has no baseline; raise it, or use "
            "--algo.adv_estimator reinforce_plus_plus"
        )
    if algo.overlong_share and getattr(cfg.env, "max_branches", 1) > 1:
        out.append(
            f"--algo.overlong_share {algo.overlong_share:g}: compares the length of a response "
            f"with rollout.max_tokens, but an episode of --env {cfg.select.env} has up to "
            "env.max_branches rows of that length; set it to 0"
        )
    if cfg.rollout.temperature == 0:
        out.append("--rollout.temperature 0: greedy samples of a prompt are all equal; set 1")
    if algo.equal_reward_groups == "replace" and cfg.rollout.samples_per_prompt < 2:
        out.append(
            f"--algo.equal_reward_groups replace: a group of rollout.samples_per_prompt "
            f"{cfg.rollout.samples_per_prompt} always has equal rewards; raise it, or set keep"
        )
    return out


def _rollout(cfg: Config) -> list[str]:
    r, out = cfg.rollout, sglang_args.problems(cfg.rollout.sglang_args)
    if r.engine == "torch" and r.tp > 1:
        out.append(
            f"--rollout.tp {r.tp}: a torch engine is one rank; set 1, or use --rollout.engine "
            "sglang"
        )
    if r.tp % r.ep:
        out.append(f"--rollout.ep {r.ep}: must divide rollout.tp {r.tp}; choose a divisor")
    if r.routing == "histopipe":
        out += _histopipe(cfg)
    out += _sizes(cfg)
    if r.engine == "sglang":
        if r.process == "inline":
            out.append(
                "--rollout.process inline: if SGLang fails, it kills the process that it runs "
                "in; set it to auto"
            )
        if r.quantize != "none":
            out.append(
                f"--rollout.quantize {r.quantize}: only the torch engine has it; use "
                "--rollout.engine torch, or set none"
            )
        if engine_dtype(cfg) == "float64":
            out.append(
                "--rollout.dtype float64: SGLang has only float32 and bfloat16; set one of them, "
                "or use --rollout.engine torch"
            )
    return out


def _histopipe(cfg: Config) -> list[str]:
    key, out = "--rollout.routing histopipe", []
    if cfg.select.mode != "async" or cfg.async_.alpha < 1:
        out.append(
            f"{key}: some engines start the next step while others finish this one; set --mode "
            "async and --async.alpha 1 or more"
        )
    if cfg.select.env:
        out.append(f"{key}: an episode of --env cannot move to another engine; unset one of them")
    if cfg.rollout.queue:
        out.append(f"{key}: assigns every request to an engine at once; unset --rollout.queue")
    return out


FROM_HISTORY = ("history", "history_reward")
"""Values of --rollout.draft that use responses of earlier epochs."""


MOST_RECORDED = 8192
"""Tokens of a step whose routes SGLang's buffer holds: those of a chunk of prefill."""


def _draft(cfg: Config) -> list[str]:
    d, kind, out = cfg.draft, cfg.rollout.draft, []
    if kind == "none":
        return _idle(d, DraftConfig(), "draft", "--rollout.draft")
    if cfg.rollout.engine != "sglang" and d.verify_tokens != DraftConfig().verify_tokens:
        out.append(
            f"--draft.verify_tokens {d.verify_tokens}: only SGLang uses it; unset it, or set "
            "--draft.max_length"
        )
    if cfg.rollout.engine != "sglang" and d.matcher != DraftConfig().matcher:
        out.append(f"--draft.matcher {d.matcher}: only SGLang uses it; unset it")
    is_set = d.max_length != DraftConfig().max_length
    if cfg.rollout.engine == "sglang" and is_set and d.max_length >= d.verify_tokens:
        out.append(
            f"--draft.max_length {d.max_length}: must be below draft.verify_tokens "
            f"{d.verify_tokens}, since SGLang verifies it with the last token; set both"
        )
    rows = cfg.rollout.max_running_requests * d.verify_tokens
    replays = cfg.algo.routing_replay == "rollout"
    if cfg.rollout.engine == "sglang" and replays and rows > MOST_RECORDED:
        out.append(
            f"--draft.verify_tokens {d.verify_tokens}: SGLang records the experts "
            f"(algo.routing_replay rollout) of at most {MOST_RECORDED} tokens in a step, and "
            f"verifies up to {rows} (rollout.max_running_requests "
            f"{cfg.rollout.max_running_requests} x verify_tokens); lower one of the two"
        )
    if d.initial_length > d.max_length:
        out.append(
            f"--draft.initial_length {d.initial_length}: must be at most draft.max_length "
            f"{d.max_length}"
        )
    if 0 < d.max_match < d.min_match:
        out.append(
            f"--draft.max_match {d.max_match}: must be at least draft.min_match {d.min_match}; 0 "
            "is no limit"
        )
    if kind == "ngram" and d.history_epochs != DraftConfig().history_epochs:
        out.append(
            f"--draft.history_epochs {d.history_epochs}: has no effect with --rollout.draft ngram"
        )
    return out


def matches_on_device(cfg: Config, cuda: bool) -> bool:
    """Return whether drafts are matched on the engine's device, if rlcore's kernels run on it.
    `cuda`: whether that is a GPU."""
    if cfg.rollout.engine != "sglang" or cfg.rollout.draft == "none":
        return False
    return cuda if cfg.draft.matcher == "auto" else cfg.draft.matcher == "device"


def changes_size(cfg: Config) -> bool:
    """Return whether the rollout engines may change their size between steps."""
    return cfg.rollout.adaptive_tp or bool(cfg.debug.rollout_tp)


def _sizes(cfg: Config) -> list[str]:
    r, listed, out = cfg.rollout, cfg.debug.rollout_tp, []
    if r.max_tp and not r.adaptive_tp:
        out.append(f"--rollout.max_tp {r.max_tp}: has no effect without --rollout.adaptive_tp")
    if not changes_size(cfg):
        return out
    key = f"--debug.rollout_tp {' '.join(map(str, listed))}" if listed else "--rollout.adaptive_tp"
    if listed and r.adaptive_tp:
        out.append(
            f"{key}: sets the sizes that rollout.adaptive_tp would choose; unset one of them"
        )
    if r.engine != "sglang":
        out.append(
            f"{key}: an engine of the kind {r.engine} is one rank; use --rollout.engine sglang"
        )
    if r.ep > 1:
        out.append(f"{key}: engines with rollout.ep {r.ep} keep their size; set rollout.ep 1")
    if r.adaptive_tp and (r.tp & (r.tp - 1) or r.max_tp & (r.max_tp - 1)):
        out.append(
            f"--rollout.tp {r.tp} --rollout.max_tp {r.max_tp}: with rollout.adaptive_tp both must "
            "be powers of two"
        )
    if r.adaptive_tp and 0 < r.max_tp < r.tp:
        out.append(f"--rollout.max_tp {r.max_tp}: must be at least rollout.tp {r.tp}")
    return out


def _lora(cfg: Config) -> list[str]:
    """Check the keys of adapters, and settings that conflict with them."""
    found, out = cfg.lora, []
    if not found.rank:
        return _idle(found, LoraConfig(), "lora", "--lora.rank")
    if unknown := [name for name in found.targets if name not in PROJECTIONS]:
        out.append(
            f"--lora.targets {unknown[0]}: must be among {', '.join(PROJECTIONS)}; other layers "
            "have no adapters"
        )
    if found.weight_update == "adapters" and cfg.model.random_init:
        out.append(
            "--lora.weight_update adapters: engines read the base from --model.path, but "
            "--model.random_init has no weights there; use merged"
        )
    if not found.targets:
        out.append("--lora.targets: is empty; name projections, or leave it out for all")
    if cfg.train.transformer_impl == "te":
        out.append(
            "--train.transformer_impl te: its layers fuse a norm with the next projection, so "
            "adapters would not get their input; with --lora.rank use local"
        )
    return out


def teachers_of(cfg: Config) -> dict[str, str]:
    """Return the models of --teacher.models by dataset; "" is the dataset of the one that scores
    all others.

    Raises:
        ConfigError: a dataset has two teachers.
    """
    found: dict[str, str] = {}
    for text in cfg.teacher.models:
        dataset, model = teacher_of(text)
        if dataset in found or not model:
            which = f"the dataset {dataset}" if dataset else "all other datasets"
            raise ConfigError(
                f"--teacher.models {text}: must be one model for {which}; write `dataset=model` "
                "for each further one"
            )
        found[dataset] = model
    return found


def teacher_of(text: str) -> tuple[str, str]:
    """Return dataset and model of an entry of --teacher.models; the dataset "" means all others."""
    dataset, equals, model = text.partition("=")
    if not equals or "/" in dataset:  # a path or a URL may contain an equals sign
        return "", text
    return dataset, model


def is_server(model: str) -> bool:
    """Return whether an entry of --teacher.models is the URL of a server."""
    return model.startswith(("http://", "https://"))


def _teacher(cfg: Config) -> list[str]:
    """Check the teachers, and settings that conflict with them."""
    if not cfg.algo.needs_teacher:
        return _idle(cfg.teacher, TeacherConfig(), "teacher", "--algo opd, gkd or teacher_kl_coef")
    if not cfg.teacher.models:
        return [
            f"--teacher.models: is empty, and --algo {cfg.select.algo} learns from a teacher; give "
            "a Hugging Face folder, a name on the hub or the URL of a server"
        ]
    try:
        found = teachers_of(cfg)
    except ConfigError as error:
        return [str(error)]
    out = []
    for url in filter(is_server, found.values()):
        if not url.rstrip("/").endswith(("/generate", "/v1")):
            out.append(
                f"--teacher.models {url}: must end with /generate (SGLang) or /v1 (vLLM); give the "
                "address of one of them"
            )
        elif cfg.rollout.temperature != 1:
            out.append(
                f"--rollout.temperature {cfg.rollout.temperature:g}: servers give a teacher's "
                "log-probs at temperature 1; set it to 1, or use a teacher from a folder"
            )
    return out


def _roles(cfg: Config) -> list[str]:
    """Check settings that conflict with ranks that only sample (--cluster.rollout_ranks)."""
    if not cfg.cluster.rollout_ranks:
        return []
    key, out = f"--cluster.rollout_ranks {cfg.cluster.rollout_ranks}", []
    if cfg.select.mode == "stream":
        out.append(
            f"{key}: --mode stream lets sampling ranks train before the round ends, but these "
            "ranks never train; use --mode sync"
        )
    if cfg.sync.route == "gather":
        out.append(
            "--sync.route gather: updates only engines on train ranks, not those on "
            "cluster.rollout_ranks; use two_stage, or auto"
        )
    if changes_size(cfg):
        out.append(
            f"{key}: engines that change their size must share their ranks with the learner; "
            "unset rollout.adaptive_tp and debug.rollout_tp"
        )
    return out


def _async(cfg: Config) -> list[str]:
    """Check settings that --mode async needs or excludes."""
    if cfg.select.mode != "async":
        out = _idle(cfg.async_, AsyncConfig(), "async", "--mode async")
        if cfg.debug.record:
            out.append(
                "--debug.record: has no effect without --mode async; the rounds.jsonl of other "
                "modes, which --debug.replay reads, is always written"
            )
        return out
    out = []
    if cfg.debug.record and cfg.debug.replay:
        out.append("--debug.record: a replay has nothing new to record; unset it or debug.replay")
    if not cfg.cluster.rollout_ranks:
        out.append(
            "--cluster.rollout_ranks 0: --mode async needs ranks that only sample; set their "
            "number, such as half of all ranks"
        )
    if cfg.select.schedule != "all":
        out.append(
            f"--schedule {cfg.select.schedule}: --mode async has no rounds, so long responses "
            "delay no other prompt; use --schedule all"
        )
    if cfg.algo.adv_estimator == "remax":
        out.append(
            "--algo.adv_estimator remax: its greedy responses would be of other policy versions "
            "than the samples; use grpo, or --mode sync"
        )
    if cfg.debug.deterministic_order:
        out.append(
            "--debug.deterministic_order: needs --mode sync, where all samples of a step are of "
            "one policy version; use --mode sync, which is the same as --async.alpha 0"
        )
    return out


def _mux(cfg: Config) -> list[str]:
    """Check settings that a job on shared nodes (--mux.url) needs or excludes."""
    found, out = cfg.mux, []
    for key in ("rollout_cores", "train_cores"):
        cores = getattr(cfg.cluster, key)
        if cores and not cfg.cluster.rollout_ranks:
            out.append(
                f"--cluster.{key} {' '.join(map(str, cores))}: has no effect without "
                "cluster.rollout_ranks, since every rank samples and trains"
            )
    if not found.url:
        return out + _idle(found, MuxConfig(), "mux", "--mux.url")
    if cfg.select.mode != "sync":
        out.append(
            f"--mode {cfg.select.mode}: with --mux.url rollout and training alternate with those "
            "of other jobs and cannot overlap; use --mode sync"
        )
    if changes_size(cfg) and not cfg.cluster.rollout_ranks:  # else `_roles` reports the conflict
        out.append(
            "--mux.url: engines change their size between the phases of a job, while other jobs "
            "use its nodes; unset rollout.adaptive_tp and debug.rollout_tp"
        )
    if found.tail_nodes and not cfg.cluster.rollout_ranks:
        out.append(
            f"--mux.tail_nodes {found.tail_nodes}: only nodes that never train can be released "
            "early; set cluster.rollout_ranks"
        )
    if found.tail_nodes and cfg.rollout.tp > 1:
        out.append(
            f"--mux.tail_nodes {found.tail_nodes}: engines of several ranks cannot release a node "
            "during a round; use --rollout.tp 1"
        )
    for key, is_on, why in (
        ("env", bool(cfg.select.env), "an episode cannot move to another engine"),
        (
            "debug.deterministic_order",
            cfg.debug.deterministic_order,
            "responses count only at a round's end",
        ),
        ("debug.replay", bool(cfg.debug.replay), "responses count only at a round's end"),
    ):
        if found.tail_nodes and is_on:
            out.append(f"--mux.tail_nodes {found.tail_nodes}: with --{key} {why}; unset either")
    return out


def _env(cfg: Config) -> list[str]:
    """Check settings that an environment (--env) needs or excludes."""
    env, out = cfg.env, []
    if not cfg.select.env:
        if cfg.debug.env_barrier:
            out.append("--debug.env_barrier: has no effect without --env")
        return out + _idle(env, EnvConfig(), "env", "--env")
    silence_s, keys = env.longest_silence()
    if not silence_s < cfg.rollout.stall_timeout_s:
        out.append(
            f"{keys} must be below rollout.stall_timeout_s {cfg.rollout.stall_timeout_s:g}, after "
            "which a round without a new token fails"
        )
    least = {
        "num_groups": ("data.prompts_per_step", cfg.data.prompts_per_step),
        "group_size": ("rollout.samples_per_prompt", cfg.rollout.samples_per_prompt),
    }
    for key, (name, number) in least.items():
        if 0 < getattr(env, key) < number:
            out.append(
                f"--env.{key} {getattr(env, key)}: must be at least {name} {number}, which count; "
                "0 starts exactly that many"
            )
    if env.num_groups and cfg.select.mode == "async":
        out.append(
            f"--env.num_groups {env.num_groups}: --mode async has no rounds; use "
            "async.extra_prompts"
        )
    if cfg.select.mode == "stream":
        out.append(
            "--mode stream: moves running responses to other ranks, and episodes of --env cannot "
            "move; use --mode sync or async"
        )
    for key in ("num_groups", "group_size") if cfg.select.schedule != "all" else ():
        if number := getattr(env, key):
            eta = "eta_prompts" if key == "num_groups" else "eta_samples"
            out.append(
                f"--env.{key} {number}: --schedule {cfg.select.schedule} starts more by itself; "
                f"use tail.{eta}, or --schedule all"
            )
    if cfg.algo.adv_estimator == "remax":
        out.append("--algo.adv_estimator remax: does not work with --env; use grpo")
    return out + env.problems()


def _true_on_policy(cfg: Config) -> list[str]:
    """Check settings under which sampler and learner would have log-probs of different bits."""
    t, r = cfg.train, cfg.rollout
    if not t.true_on_policy:
        return []
    te, dtype = t.transformer_impl == "te", engine_dtype(cfg)
    ranks = "partial sums of ranks are added in an order that the other side does not have; set 1"
    kept = "the learner's log-probs are over all tokens, not the kept ones; turn it off"
    found = [
        (t.tp > 1, f"train.tp {t.tp}", ranks),
        (r.tp > 1, f"rollout.tp {r.tp}", ranks),
        (te and t.cp > 1, f"train.cp {t.cp}", ranks),
        (te and r.engine != "sglang", f"rollout.engine {r.engine}",
         "Transformer Engine's kernels go with SGLang's; set sglang, or --train.transformer_impl "
         "local on a CPU"),
        (not te and r.engine != "torch", f"rollout.engine {r.engine}",
         "the local layers' operations are the torch engine's; set torch, or "
         "--train.transformer_impl te on a GPU"),
        (dtype != cfg.model.dtype, f"rollout.dtype {dtype}",
         f"the learner has model.dtype {cfg.model.dtype}; set auto"),
        (r.quantize != "none", f"rollout.quantize {r.quantize}",
         "the learner's weights are not rounded; set none"),
        (r.top_k > 0, f"rollout.top_k {r.top_k}", kept),
        (r.top_p < 1, f"rollout.top_p {r.top_p:g}", kept),
        (r.min_p > 0, f"rollout.min_p {r.min_p:g}", kept),
        (cfg.lora.rank > 0, f"lora.rank {cfg.lora.rank}",
         "the sampler has the adapters in its weights, the learner adds their products; set 0"),
        (t.fused_loss, "train.fused_loss", "it rounds log-probs otherwise; turn it off"),
        (t.head_chunk_tokens > 0, f"train.head_chunk_tokens {t.head_chunk_tokens}",
         "products of chunks are not batch-invariant; set 0"),
        (te and t.share_prefix == "true", "train.share_prefix true",
         "its attention is not Transformer Engine's; set auto"),
        (te and r.fp32_lm_head is not False, f"rollout.fp32_lm_head {r.fp32_lm_head}",
         "the learner's logits have model.dtype; set False"),
        (cfg.select.mode == "async", "mode async",
         "samples are of earlier weights than the learner's; use --mode sync or stream"),
    ]  # fmt: skip
    excluded = "train.true_on_policy excludes it, since"
    return [f"--{key}: {excluded} {why}" for is_set, key, why in found if is_set]


def _train(cfg: Config) -> list[str]:
    t, out = cfg.train, []
    if t.min_lr > t.lr:
        out.append(f"--train.min_lr {t.min_lr}: must not be above train.lr {t.lr}")
    if t.moments_dtype == "bfloat16" and max(t.beta1, t.beta2) > 1 - 2**-8:
        name = "beta1" if t.beta1 > t.beta2 else "beta2"
        out.append(
            f"--train.{name} {getattr(t, name)}: must be at most {1 - 2**-8:.3f} with "
            "train.moments_dtype bfloat16, or rounding would undo an update of the moment"
        )
    if t.moments_dtype == "bfloat16" and cfg.model.dtype == "float64":
        out.append("--train.moments_dtype bfloat16: needs a model.dtype other than float64")
    if t.fp32_lm_head and not t.head_chunk_tokens:
        out.append(
            "--train.fp32_lm_head True: needs train.head_chunk_tokens above 0, such as 2048, or "
            "all logits would be in memory in fp32"
        )
    if t.offload_activations and t.recompute != "full":
        out.append(
            f"--train.offload_activations: needs train.recompute full, not {t.recompute}, under "
            "which activations would take longer to copy than to recompute"
        )
    if t.fused_loss:
        out += fused.problems(cfg.select.algo, cfg.algo)
    if cfg.rollout.process == "inline" and cfg.train.tp * cfg.train.pp > 1:
        out.append(
            "--rollout.process inline: with train.tp or train.pp above 1 the engine must run in "
            "a child process; set it to auto"
        )
    return out
