"""Make the job of `python -m rlcore sim run` and of other commands on a cluster of yours."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlcore.config import resolve
from rlcore.config.schema import (
    AsyncConfig,
    Config,
    DraftConfig,
    RewardConfig,
    StreamConfig,
    TailConfig,
)
from rlcore.hf.config import HFConfig
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sim import profile, published
from rlcore.sim.advise import SIZES, with_engines, with_layout
from rlcore.sim.cost import MODEL_FILES, hf_named, model_named
from rlcore.sim.job import RowOf, SimJob, config
from rlcore.sim.lengths import read_lengths
from rlcore.sim.phases import judge_bytes, judge_cost
from rlcore.sim.rewards import FixedScorer, JudgeScorer, Rewards, SandboxScorer, SimScorer
from rlcore.sim.workload import GENERATORS, Workload
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json
from rlcore.utils.gpus import GPUS, Gpu

REWARDS = ("none", "math", "code", "judge", "mix")
JUDGES = ("dedicated", "shared", "streamed")
SANDBOXED = ("code", "mix")
TIMEOUT_KEYS = ("adaptive_timeout", "timeout_factor", "min_timeout_s")
"""Keys of a reward that a simulated sandbox follows; its other numbers are published ones."""
ADAPTIVE = RewardConfig(adaptive_timeout=True)
"""Timeouts as in RollPacker."""
BASELINES = ("verl", "rlhfuse", "none")


def job(a: argparse.Namespace, keys: Sequence[str]) -> tuple[SimJob, list[str]]:
    """Return the job for the options of `sim run` and the `keys` of a run, and notes that say where
    its numbers come from.

    Raises:
        ConfigError: an option or key is invalid, or does not fit the cluster; the error names it.
    """
    _check_reward_keys(a.reward, keys)
    gpu, (hf, name) = gpu_of(a.gpu), read_model(a.model)
    workload, said = workload_of(a)
    has_judge = a.reward in ("judge", "mix")
    judge_gpus = round(published.JUDGE_GPUS * a.gpus) if a.judge == "dedicated" and has_judge else 0
    taken = judge_bytes(model_named("7B"), streamed=a.judge == "streamed")
    shared = has_judge and a.judge != "dedicated"
    cfg = _config(a.seed, workload, *keys)
    assert isinstance(cfg.reward, RewardConfig)
    notes = [f"lengths: {said}"]
    measured = profile.read(a.profile) if a.profile else {}
    if measured:
        notes.append(f"decoding: as measured ({a.profile})")
    else:
        notes.append("decoding: by the cost model (`rlcore sim calibrate` says how far off it is)")
    if a.reward != "none":
        notes.append(f"rewards ({a.reward}): from published shares and times, see published.py")
    made = SimJob(
        name=" + ".join(_systems(cfg)) or "sync",
        cfg=cfg,
        hf=hf,
        gpu=gpu,
        gpus=a.gpus - judge_gpus,
        workload=workload,
        rewards=partial(rewards, a.reward, gpu, a.judge, a.gpus, a.seed, reward=cfg.reward),
        judge_bytes=taken / cfg.rollout.tp if shared else 0.0,
        measured=measured,
    )
    engines = made.rollout_gpus // cfg.rollout.tp
    notes.insert(
        0,
        f"{name}, {a.gpus} x {gpu.name}: {engines} engines of {cfg.rollout.tp}"
        + (f", {judge_gpus} GPUs for the judge" if judge_gpus else ""),
    )
    return made, notes


def advised(
    a: argparse.Namespace, keys: Sequence[str], say: Callable[[str], None]
) -> tuple[SimJob, list[str]]:
    """Return the job of `sim advise`, with the best layout and engines, and notes on it.

    Raises:
        ConfigError: an option or key is invalid, or nothing fits the GPUs.
    """
    gpu, (hf, name) = gpu_of(a.gpu), read_model(a.model)
    workload, said = workload_of(a)
    usual = ("--train.offload", "--train.head_chunk_tokens", "2048")
    cfg = _config(a.seed, workload, "--rollout.routing", "response", *usual, *keys)
    sized: SimJob | None = None
    for tp in SIZES:  # the smallest engine that is possible, from which the search starts
        try:
            one = resolve.with_keys(cfg, ["--rollout.tp", str(tp)])
            sized = SimJob(name=name, cfg=one, hf=hf, gpu=gpu, gpus=a.gpus, workload=workload)
            break
        except ConfigError as error:
            why = error
    if sized is None:
        raise why
    made = with_layout(with_engines(sized, say))
    notes = [f"{name}, {a.gpus} x {gpu.name}; lengths: {said}"]
    return made, notes


def _config(seed: int, workload: Workload, *keys: str) -> Config:
    longest = workload.prompt_tokens + workload.cap
    return config(
        *("--run.seed", str(seed), "--data.prompts_per_step", "128"),
        *("--data.max_prompt_tokens", str(workload.prompt_tokens)),
        *("--rollout.max_tokens", str(workload.cap)),
        *("--train.tokens_per_micro_batch", str(max(16_384, longest))),
        *keys,
    )


def _systems(cfg: Config) -> list[str]:
    """Return a word for each system that the configuration switches on."""
    r = cfg.rollout
    mode: list[str] = [] if cfg.select.mode == "sync" else [cfg.select.mode]
    if cfg.select.mode == "async":
        mode = [f"async alpha {cfg.async_.alpha:g}"]
    switches = {
        "tail batching": cfg.select.schedule == "tail_batching",
        "planner": r.adaptive_tp,
        "drafts": r.draft != "none",
        "queue": r.queue,
        "histopipe": r.routing == "histopipe",
    }
    return mode + [name for name, is_on in switches.items() if is_on]


def baseline(ours: SimJob, name: str) -> SimJob:
    """Return a baseline for the cluster of `ours`. `verl`: wait for all responses, then score them,
    then train. `rlhfuse`: score each response when it ends, and compute log-probs on idle GPUs."""
    off = ["--mode", "sync", "--schedule", "all", "--cluster.rollout_ranks", "0"]
    off += ["--rollout.no_adaptive_tp", "--rollout.max_tp", "0", "--rollout.draft", "none"]
    off += ["--rollout.no_queue", "--rollout.routing", "response", "--train.share_prefix", "false"]
    cfg = ours.cfg
    cfg = replace(cfg, tail=TailConfig(), stream=StreamConfig(), async_=AsyncConfig())
    plain = replace(ours, name=name, cfg=resolve.with_keys(replace(cfg, draft=DraftConfig()), off))
    if name == "rlhfuse":
        return replace(plain, overlap_logprobs=True)
    return replace(plain, rewards=lambda row_of: ours.rewards(row_of).fixed_timeouts(after=True))


def _check_reward_keys(kind: str, keys: Sequence[str]) -> None:
    """Raise ConfigError if a key of a reward has no effect on the simulated reward `kind`."""
    used = TIMEOUT_KEYS if kind in SANDBOXED else ()
    for word in keys:
        name = word.partition("=")[0].removeprefix("--reward.").removeprefix("no_")
        if kind != "none" and word.startswith("--reward.") and name not in used:
            raise ConfigError(
                f"{word.partition('=')[0]}: has no effect on a simulated --reward {kind}, whose "
                "times and workers are published ones; remove the key"
            )


def rewards(
    kind: str,
    gpu: Gpu,
    judge: str,
    gpus: int,
    seed: int,
    row_of: RowOf,
    *,
    reward: RewardConfig = ADAPTIVE,
) -> Rewards:
    """Make the reward scorers of a run for the options of `sim run`. The timeouts of code follow
    the keys of `reward`."""
    math: SimScorer = FixedScorer(published.MATH_S, published.MATH_WORKERS)
    code: SimScorer = SandboxScorer(
        quantiles=published.SANDBOX_QUANTILES,
        looping=published.LOOPING,
        workers=published.SANDBOX_WORKERS,
        seed=seed,
        prompt_of=lambda request: str(row_of(request)),
        timeout=AdaptiveTimeout(
            reward.min_timeout_s, published.SANDBOX_TIMEOUT_S, reward.timeout_factor
        )
        if reward.adaptive_timeout
        else None,
    )
    dedicated = judge == "dedicated"
    judged = judge_cost(
        model_named("7B"),
        gpu,
        1,
        utilization=published.JUDGE_UTILIZATION,
        streamed=judge == "streamed",
    )
    workers = max(1, round(published.JUDGE_GPUS * gpus)) if dedicated else gpus
    judges: SimScorer = JudgeScorer(judged.seconds, workers)
    if kind == "none":
        return Rewards()
    one = {"math": math, "code": code, "judge": judges}
    if kind != "mix":
        return Rewards({"": one[kind]})
    names = list(one)
    return Rewards(one, lambda request: names[row_of(request) % 3])


def gpu_of(name: str) -> Gpu:
    """Return the data sheet of a GPU by name, such as h100. Raise ConfigError if it is unknown."""
    found = {g.lower(): gpu for g, gpu in GPUS.items()}
    if name.lower() not in found:
        raise ConfigError(f"--gpu {name}: unknown; choose from {', '.join(found)}")
    return found[name.lower()]


def read_model(name: str) -> tuple[HFConfig, str]:
    """Return the architecture called `name`, or of the config.json at that path, and its name."""
    found = {m.lower(): m for m in MODEL_FILES}
    if name.lower() in found:
        return hf_named(found[name.lower()]), found[name.lower()]
    path = Path(name)
    try:
        hf = HFConfig.from_dict(read_json(path))
    except ConfigError as error:
        known = f"choose from {', '.join(found)}, or the path of a config.json"
        raise ConfigError(f"--model {name}: unknown; {known} ({error})") from error
    return hf, path.parent.name or path.name


def workload_of(a: argparse.Namespace) -> tuple[Workload, str]:
    if a.lengths in GENERATORS:
        found = replace(GENERATORS[a.lengths], seed=a.seed)
        return found, f"generator {a.lengths}, fitted to a figure of RollPacker"
    path = Path(a.lengths)
    if not path.exists():
        raise ConfigError(
            f"--lengths {a.lengths}: no such file; give a generator ({', '.join(GENERATORS)}) or a "
            ".csv, .jsonl or .jsonl.gz file (rlcore/sim/README.md)"
        )
    where = {}
    for part in a.where:
        key, equals, value = part.partition("=")
        if not equals:
            raise ConfigError(f"--where {part}: must be COLUMN=VALUE")
        where[key] = value
    return read_lengths(path, where)
