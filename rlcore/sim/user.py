"""Make a simulation plan from the options of `python -m rlcore sim run`."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlcore.config.schema import RewardConfig
from rlcore.sched.reward_timeout import AdaptiveTimeout
from rlcore.sched.tail_batching import check
from rlcore.sim import profile, published
from rlcore.sim.cluster import ClusterPlan, RowOf, StreamRule
from rlcore.sim.cost import GPUS, MODELS, EngineCost, Gpu, ModelSize, from_data_sheet, least_tp
from rlcore.sim.lengths import read_lengths
from rlcore.sim.phases import (
    judge_bytes,
    judge_from_data_sheet,
    training_from_data_sheet,
    weights_s,
)
from rlcore.sim.rewards import FixedScorer, JudgeScorer, Rewards, SandboxScorer, SimScorer
from rlcore.sim.workload import GENERATORS, Workload
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

REWARDS = ("none", "math", "code", "judge", "mix")
JUDGES = ("dedicated", "shared", "streamed")
BASELINES = ("verl", "rlhfuse", "none")


def plan(a: argparse.Namespace) -> tuple[ClusterPlan, list[str]]:
    """Return the plan for the options of `sim run`, and notes that say where its numbers come from.

    Raises:
        ConfigError: an option is invalid for the cluster; the error names the option.
    """
    gpu, model = _gpu(a.gpu), read_model(a.model)
    workload, said = _workload(a)
    check(a.prompts, a.samples, a.eta_prompts, a.eta_samples)
    if not 0 < a.mfu <= 1:
        raise ConfigError(f"--mfu {a.mfu:g}: must be above 0 and at most 1")
    has_judge = a.reward in ("judge", "mix")
    judge_gpus = round(published.JUDGE_GPUS * a.gpus) if a.judge == "dedicated" and has_judge else 0
    rollout_gpus = a.gpus - judge_gpus
    if rollout_gpus < a.tp or rollout_gpus % a.tp:
        raise ConfigError(
            f"--tp {a.tp}: the {rollout_gpus} rollout GPUs cannot be divided into engines of that "
            "size"
        )
    if a.max_tp and (a.max_tp > gpu.per_node or rollout_gpus % a.max_tp):
        raise ConfigError(
            f"--max-tp {a.max_tp}: must be at most the {gpu.per_node} GPUs of a node and divide "
            f"the {rollout_gpus} rollout GPUs"
        )
    taken = judge_bytes(MODELS["7B"], streamed=a.judge == "streamed")
    taken = taken if has_judge and a.judge != "dedicated" else 0.0
    notes = [
        f"{model.name}, {a.gpus} x {gpu.name}: {rollout_gpus // a.tp} engines of {a.tp}"
        + (f", {judge_gpus} GPUs for the judge" if judge_gpus else ""),
        f"lengths: {said}",
    ]
    reshard_s: Callable[[int], float] = partial(weights_s, model, gpu)
    if a.profile:
        layouts = profile.read(a.profile)
        sizes = [a.tp * 2**k for k in range(8) if a.tp * 2**k <= max(a.tp, a.max_tp)]
        if missing := [tp for tp in sizes if tp not in layouts]:
            raise ConfigError(
                f"--profile {a.profile}: has engines of {sorted(layouts)} GPUs but not of "
                f"{missing[0]}, which --tp and --max-tp need"
            )
        notes.append(f"decoding: as measured ({a.profile})")
        costs, reshard_s = _measured(layouts)
    else:
        notes.append("decoding: from the data sheet, at 60 % of bandwidth and arithmetic")

        def costs(tp: int) -> EngineCost:
            return from_data_sheet(model, gpu, tp, other_bytes=taken / tp)

    if a.stream and rollout_gpus // a.tp < 2:
        raise ConfigError(
            f"--stream: needs at least two engines, but --tp {a.tp} makes one engine of all GPUs; "
            "lower --tp"
        )
    first = costs(a.tp)
    longest = workload.prompt_tokens + workload.cap
    if first.cache_tokens < longest:
        raise ConfigError(
            f"--tp {a.tp}: the cache of an engine holds {first.cache_tokens:.0f} tokens but the "
            f"longest prompt and response have {longest}; raise --tp or use shorter lengths"
        )
    if a.reward != "none":
        notes.append(f"rewards ({a.reward}): from published shares and times, see published.py")
    notes.append(f"training: from the data sheet, at {a.mfu:.0%} of the arithmetic, no padding")
    made = ClusterPlan(
        name=a.schedule + (" + planner" if a.max_tp else "") + (" + stream" if a.stream else ""),
        gpus=rollout_gpus,
        tp=a.tp,
        costs=costs,
        training=training_from_data_sheet(model, gpu, a.gpus, mfu=a.mfu, reference=a.reference),
        workload=workload,
        num_prompts=a.prompts,
        num_samples=a.samples,
        schedule=a.schedule,
        eta_prompts=a.eta_prompts,
        eta_samples=a.eta_samples,
        rewards=partial(rewards, a.reward, gpu, a.judge, a.gpus, a.seed),
        max_tp=a.max_tp,
        min_tp=a.tp if a.profile else least_tp(costs, longest, a.tp),
        reshard_s=reshard_s,
        stream=StreamRule() if a.stream else None,
        max_running=a.max_running,
        seed=a.seed,
    )
    return made, notes


def _measured(
    layouts: Mapping[int, profile.EngineMeasurements],
) -> tuple[Callable[[int], EngineCost], Callable[[int], float]]:
    """Return two functions of `tp`: measured costs of an engine of `tp` GPUs, and seconds to start
    such engines."""
    return lambda tp: layouts[tp].cost, lambda tp: layouts[tp].start_s


def baseline(ours: ClusterPlan, name: str) -> ClusterPlan:
    """Return a baseline for the cluster of `ours`. `verl`: wait for all responses, then score them,
    then train. `rlhfuse`: score each response when it ends, and compute log-probs on idle GPUs."""
    plain = replace(ours, name=name, schedule="all", max_tp=0, stream=None)
    if name == "rlhfuse":
        return replace(plain, overlap_logprobs=True)
    return replace(plain, rewards=lambda row_of: ours.rewards(row_of).after_all())


def rewards(kind: str, gpu: Gpu, judge: str, gpus: int, seed: int, row_of: RowOf) -> Rewards:
    """Make the reward scorers of a run for the options of `sim run`."""
    math: SimScorer = FixedScorer(published.MATH_S, published.MATH_WORKERS)
    code: SimScorer = SandboxScorer(
        quantiles=published.SANDBOX_QUANTILES,
        looping=published.LOOPING,
        workers=published.SANDBOX_WORKERS,
        seed=seed,
        prompt_of=lambda request: str(row_of(request)),
        timeout=AdaptiveTimeout(
            RewardConfig.min_timeout_s, published.SANDBOX_TIMEOUT_S, RewardConfig.timeout_factor
        ),
    )
    dedicated = judge == "dedicated"
    judged = judge_from_data_sheet(
        MODELS["7B"],
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


def _gpu(name: str) -> Gpu:
    found = {g.lower(): gpu for g, gpu in GPUS.items()}
    if name.lower() not in found:
        raise ConfigError(f"--gpu {name}: unknown; choose from {', '.join(found)}")
    return found[name.lower()]


def read_model(name: str) -> ModelSize:
    """Return the model called `name`, or read it from the Hugging Face config.json at that path."""
    found = {m.lower(): model for m, model in MODELS.items()}
    if name.lower() in found:
        return found[name.lower()]
    path = Path(name)
    known = f"--model {name}: unknown; choose from {', '.join(found)}, or the path of a config.json"
    try:
        c = read_json(path)
        layers, hidden, heads = c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"]
        kv, inner, vocab = (
            c.get("num_key_value_heads", heads),
            c["intermediate_size"],
            c["vocab_size"],
        )
    except ConfigError as error:
        raise ConfigError(f"{known} ({error})") from error
    except KeyError as error:
        raise ConfigError(f"{known}; in this file {error!s} is missing or not a number") from error
    sizes = (layers, hidden, heads, kv, inner, vocab, c.get("head_dim") or 1)
    if wrong := [size for size in sizes if type(size) is not int or not 0 < size < 1 << 31]:
        raise ConfigError(f"{known}; in this file {str(wrong[0])[:40]!r} is not a model's size")
    head = c.get("head_dim") or hidden // heads
    embeddings = vocab * hidden * (1 if c.get("tie_word_embeddings") else 2)
    block = 2 * hidden * head * (heads + kv) + 3 * hidden * inner
    return ModelSize(
        name=path.parent.name or path.name,
        parameters=float(layers * block + embeddings),
        layers=layers,
        kv_bytes=4.0 * layers * kv * head,
        hidden=hidden,
    )


def _workload(a: argparse.Namespace) -> tuple[Workload, str]:
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
