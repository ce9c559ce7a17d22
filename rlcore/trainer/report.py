"""Report to the user: step metrics, the step line, rollouts, and the run's summary."""

import itertools
import json
import math
import os
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from rlcore.algos import advantage, mismatch
from rlcore.config.schema import Config
from rlcore.envs.turn_tree import sampled_stretches, turns_of
from rlcore.hf.size import size_of
from rlcore.metrics import stats
from rlcore.metrics.jsonl import dumps
from rlcore.records import Group, Sample
from rlcore.sched.reward_timeout import reasons_of
from rlcore.sync.memory import highest_bytes
from rlcore.trainer.plan import StepPlan
from rlcore.trainer.run import Run, Training
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError
from rlcore.utils.gpus import gpu_named
from rlcore.utils.log import log


def add_update(run: Training, metrics: dict[str, float], model: str) -> None:
    """Add the metrics of one update of `model` (actor or critic) to the current step. A step
    reports means over its updates, the last learning rate, and the number of skipped updates."""
    so_far = run.progress.metrics
    n = so_far.get(f"{model}/updates", 0.0)
    for name, value in metrics.items():
        old = so_far.get(name, 0.0)
        if name == f"{model}/lr":
            so_far[name] = value
        elif name == f"{model}/skipped":
            so_far[name] = old + value
        else:
            so_far[name] = (old * n + value) / (n + 1)
    so_far[f"{model}/updates"] = n + 1
    count_skips(run, metrics, model)


def count_skips(run: Training, metrics: dict[str, float], model: str) -> None:
    """Count consecutive updates of `model` whose loss or gradient was not finite.

    Raises:
        RuntimeError: the count reaches `train.max_skipped_updates`; raised on every rank.
    """
    in_a_row = run.progress.skipped(model, bool(metrics[f"{model}/skipped"]))
    most = run.cfg.train.max_skipped_updates
    if most and in_a_row >= most:
        raise RuntimeError(
            f"the {model}'s loss or gradient was not finite in {most} updates in a row, the last "
            f"in step {run.step}; these updates were skipped. Lower --train.lr or check the "
            "rewards; --train.max_skipped_updates 0 removes this limit"
        )


def skip_update(run: Run, model: str) -> None:
    """Count an update that was skipped without metrics, since all its tokens were rejected."""
    name = f"{model}/skipped"
    run.progress.add({name: run.progress.metrics.get(name, 0.0) + 1})


def of_groups(run: Run, groups: tuple[Group, ...], plan: StepPlan) -> dict[str, float]:
    """Return metrics of scores, lengths and rewards of a step's samples."""
    cfg = run.cfg
    scores = [s for g in groups for s in g.scores]
    lengths = [n for g in groups for n in g.lengths]
    prompts = [g.prompt_length for g in groups]
    finishes = [f for g in groups for f in g.finishes]
    observed = sum(n for g in groups for n in g.observed)
    errors = [e for g in groups for e in g.errors if e]
    reasons = Counter(reason for e in errors for reason in reasons_of(e))
    clusters = [g.id for g in groups for _ in g.scores]
    rows = [r for update in plan.updates for part in update for r in part]
    loads = plan.loads(len(run.ranks.model_parallel_groups))
    return {
        **stats.summary("critic/score", scores),
        "critic/score/std_err": stats.standard_error(scores, clusters),
        **stats.summary("critic/rewards", [r.reward for r in rows]),
        **stats.summary("response_length", lengths),
        "response/aborted_ratio": lengths.count(0) / len(lengths),
        "response_length/clip_ratio": finishes.count("length") / len(finishes),
        **stats.summary("prompt_length", prompts),
        "prompt_length/clip_ratio": sum(n >= cfg.data.max_prompt_tokens for n in prompts)
        / len(prompts),
        "training/equal_reward_groups": plan.num_equal_groups / len(groups),
        "training/trained_rows": float(len(rows)),
        "global_seqlen/minmax_diff": float(max(loads) - min(loads)),
        "reward/errors": float(len(errors)),
        "reward/timeouts": float(reasons["timeout"]),
        **{f"reward/failures/{reason}": float(n) for reason, n in reasons.items()},
        "perf/total_num_tokens": float(
            sum(lengths) + sum(g.prompt_length * len(g.lengths) for g in groups)
        ),
        "sched/response_tokens": float(sum(lengths) - observed),
        "sched/kept_samples": float(len(lengths)),
        **({"env/observed_tokens": observed / max(sum(lengths), 1)} if observed else {}),
        **(
            {"training/excluded_samples": float(sum(sum(g.excluded) for g in groups))}
            if cfg.run.callbacks
            else {}
        ),
    } | trained(plan, cfg.train.epochs)


def trained(plan: StepPlan, epochs: int) -> dict[str, float]:
    """Return how much work update_actor is: tokens, and squared lengths of samples."""
    return {
        "sched/trained_tokens": float(epochs * plan.num_tokens()),
        "sched/trained_squares": float(epochs * plan.squares()),
    }


def check_rewards(run: Run, groups: Sequence[Group]) -> None:
    """End the run if the reward has failed on every response of the run's first step.

    Raises:
        ConfigError: names one of the failures; raised on every rank that knows the groups.
    """
    errors = [error for group in groups for error in group.errors]
    if run.step == 1 and errors and all(errors):
        raise ConfigError(
            f"--reward {run.cfg.select.reward}: failed on all {len(errors)} responses of the first "
            f"step, on the first with: {errors[0]}; mend the reward or its data, and start again"
        )


def notes(metrics: Mapping[str, float], cfg: Config) -> str:
    """Return what the step line says of problems of the step; "" if there is none."""
    found = [mismatch.unhealthy(dict(metrics))]
    # The sums are equal; gdpo compares their terms, which may differ.
    compares = cfg.algo.adv_estimator in set(advantage.BY_GROUP) - {"gdpo"}
    if compares and metrics.get("training/equal_reward_groups") == 1:
        found.append("rewards are equal in every group, so no response is preferred")
    return "; ".join(filter(None, found))


def of_drafts(run: Run, totals: dict[str, float]) -> dict[str, float]:
    """If engines draft, return the `spec/*` metrics from the counters of all engines."""
    if run.cfg.rollout.draft == "none" or not totals["decode_steps"]:
        return {}
    t = totals
    gained = sum(n for name, n in t.items() if name.startswith("tokens/"))
    out = {
        "spec/gate": t["verify_steps"] / t["decode_steps"],
        # `decode_tokens` would miss first tokens, which SGLang samples in the prefill.
        "spec/tokens_per_forward": gained / t["decode_steps"],
        "spec/speculated_tokens": t["accepted_tokens"] / max(t["decode_tokens"], 1),
        "spec/drafted_tokens": t["drafted_tokens"],
        "spec/draft_s": t["draft_s"],
        "spec/verify_s": t["verify_s"],
    }
    if t["drafted_tokens"]:
        out["spec/acceptance_rate"] = t["accepted_tokens"] / t["drafted_tokens"]
    if t["verify_rows"]:
        out["spec/mean_accept_len"] = t["verify_tokens"] / t["verify_rows"]
        out["spec/verify_width"] = t["verify_inputs"] / t["verify_rows"]
    for name, rows in t.items():
        what, _, size = name.partition("/")
        if what == "rows" and rows:
            out[f"spec/rows/{size}"] = rows
            out[f"spec/tokens_per_row/{size}"] = t[f"tokens/{size}"] / rows
            out[f"spec/gate/{size}"] = t[f"on/{size}"] / rows
    if run.rollout.library is not None:
        out["spec/history_prompts"] = float(len(run.rollout.library))
        out["spec/history_tokens"] = float(run.rollout.library.num_tokens)
    return out


def of_envs(run: Run, totals: dict[str, float]) -> dict[str, float]:
    """If responses are episodes, return the `env/*` metrics from the counters of all ranks."""
    if not run.cfg.select.env:
        return {}
    return {
        "env/episodes": totals["episodes"],
        "env/call_s": totals["env_s"] / max(totals["env_calls"], 1.0),
        "env/failures/timeout": totals["env_timeouts"],
        "env/failures/crash": totals["env_crashes"],
        "env/failures/error": totals["env_errors"],
        "env/lost_tokens": totals["env_lost_tokens"],
    }


def write_rollouts(run: Run, groups: tuple[Group, ...]) -> None:
    """Write samples of the step to the rollout log: some of those whose texts rank 0 has, or with
    --log.rollouts -1 those of all ranks, if every rank samples and trains. Collective over the
    ranks that train."""
    cfg, is_first = run.cfg.log, run.ranks.rank == 0
    gathers = cfg.rollouts < 0 and run.ranks.everyone is None
    if cfg.rollouts == 0 or not (gathers or is_first):
        return
    rows = rollout_rows(run, groups)
    if gathers:
        parts = collective.gather_bytes(dumps(rows).encode())
        found = {row["id"]: row for part in parts for row in json.loads(part)}
        rows = [found[ref.id] for g in groups for ref in g.refs if ref.id in found]
    if run.observers.writer is not None:
        run.observers.writer.rollouts(run.step, rows)


def rollout_rows(run: Run, groups: tuple[Group, ...]) -> list[dict[str, Any]]:
    """Return what the rollout log has of the samples whose texts this rank has."""
    worker = run.rollout.worker
    rows: list[dict[str, Any]] = []
    limit, room = run.cfg.log.rollouts, run.cfg.log.rollout_tokens
    assert run.observers.tokenizer is not None
    room = sys.maxsize if room < 0 else room
    for g in groups:
        for k, (ref, score, error) in enumerate(zip(g.refs, g.scores, g.errors, strict=True)):
            read = ref.id in worker.texts
            if not read or (limit > 0 and k > 0) or 0 < limit <= len(rows):
                continue
            prompt = worker.prompts[g.id]
            row: dict[str, Any] = {
                "id": ref.id,
                "rank": run.ranks.rank,
                "dataset": g.dataset,
                "prompt": prompt.text,
                "answer": prompt.answer,
                "response": worker.texts[ref.id],
                "score": score,
                "error": error,
                "num_tokens": g.lengths[k],
                "finish": g.finishes[k],
            }
            if ref.id in run.progress.advantages:
                row["advantage"] = run.progress.advantages[ref.id]
            if run.cfg.select.env:
                turns = turns_of(worker.samples[ref.id], run.observers.tokenizer, prompt.tokens)
                row["turns"] = msgspec.to_builtins(turns)
            if room > 0:
                row["tokens"] = tokens = of_tokens(run, worker.samples[ref.id], room)
                room -= len(tokens["pieces"])
            rows.append(row)
    return rows


def of_tokens(run: Run, sample: Sample, most: int) -> dict[str, Any]:
    """Return texts, sampler log-probs and policy versions of the first `most` sampled tokens of a
    response, those of an episode turn by turn.

    Versions are run-length encoded as [version, number of tokens]. If the engine drafts, the result
    also has [1 if drafted else 0, number of tokens].
    """
    assert run.observers.tokenizer is not None
    pieces: list[str] = []
    logps: list[float] = []
    versions: list[int] = []
    for number, begin, end in sampled_stretches(sample):
        row, end = sample.rows[number], min(end, begin + most - len(pieces))
        pieces += run.observers.tokenizer.pieces(row.tokens[begin:end].tolist())
        logps += row.logps[begin:end].tolist()
        versions += row.versions[begin:end].tolist()
    drafted = {}
    if sample.drafted is not None:
        drafted["drafted"] = _stretches(sample.drafted[:most].astype(int).tolist())
    return drafted | {
        "pieces": pieces,
        "logps": [round(x, 3) for x in logps],
        "versions": _stretches(versions),
    }


def _stretches(values: list[int]) -> list[list[int]]:
    """Run-length encode the values, as [value, number of repetitions]."""
    return [[v, len(list(same))] for v, same in itertools.groupby(values)]


def evaluation(run: Run) -> None:
    """Report the evaluation before the first step, as step 0."""
    pending = run.progress.take()
    timings = run.spans.take()
    if run.observers.writer is None or run.observers.screen is None:
        return
    shown = {k: v for k, v in timings.items() if k in ("start", "testing", "update_weights")}
    metrics = pending | {f"timing_s/{k}": v for k, v in shown.items()}
    run.observers.writer.write(run.step, metrics)
    run.observers.screen.evaluation(run.step, metrics)
    if run.observers.callbacks is not None:
        run.observers.callbacks.on_eval(run.step, metrics)


def started(run: Run) -> None:
    """Discard all timings from before the first step. Add only the start-up time to the first step,
    unless the metrics of step 0 (evaluation) already have it."""
    if seconds := run.spans.take().get("start"):
        run.progress.add({"timing_s/start": seconds})


def step(run: Run) -> None:
    """Write the metrics of the step and print the step line."""
    metrics = run.progress.take()
    timings = run.spans.take()
    if run.observers.writer is None or run.observers.screen is None:
        return
    metrics |= {f"timing_s/{name}": s for name, s in timings.items()}
    metrics["timing_s/gen"] -= metrics.get("timing_s/reward", 0.0)  # Span `gen` includes `reward`.
    for inner in ("offload_learner", "wake_engine"):
        if seconds := timings.get(inner):
            metrics["timing_s/update_weights"] -= seconds
    metrics |= speeds(run, metrics) | idle(run, metrics)
    if run.observers.balance is not None:
        metrics |= run.observers.balance.metrics(metrics)
    metrics["training/global_step"] = float(run.step)
    metrics["training/version"] = float(run.step)
    if run.data.order is not None:
        state = run.data.order.state()
        if state["num_rows"]:
            metrics["training/epoch"] = state["position"] / state["num_rows"]
    run.observers.writer.write(run.step, metrics)
    for hear in run.observers.on_step:
        hear(metrics)
    run.observers.screen.step(run.step, metrics, note=notes(metrics, run.cfg))
    if any(name.startswith("val-core/") for name in metrics):
        run.observers.screen.evaluation(run.step, metrics)
    if run.observers.callbacks is not None:
        run.observers.callbacks.on_step(run.step, metrics)
        run.observers.callbacks.on_eval(run.step, metrics)


def speeds(run: Run, m: dict[str, float]) -> dict[str, float]:
    """Return rates of the step: samples and tokens per second, and memory."""
    seconds, samples = m["timing_s/step"], m.pop("sched/kept_samples")
    sampled = m.pop("sched/response_tokens")
    tokens, squares = m.pop("sched/trained_tokens"), m.pop("sched/trained_squares")
    gen_s = (
        m["timing_s/gen"] if run.async_rollout is None else seconds
    )  # In async mode, engines sample during the whole step.
    out = {
        "perf/time_per_step": seconds,
        "perf/samples_per_s": samples / seconds,
        "perf/throughput": m["perf/total_num_tokens"] / seconds / run.ranks.size,
        "perf/gen_tokens_per_s": sampled / gen_s,
    }
    if sampled:  # none if every episode has failed
        out["timing_per_token_ms/gen"] = 1000 * gen_s / sampled
    if tokens and "timing_s/update_actor" in m:  # Critic-only steps lack `update_actor`.
        out["perf/train_tokens_per_s"] = tokens / m["timing_s/update_actor"]
        out["timing_per_token_ms/update_actor"] = 1000 * m["timing_s/update_actor"] / tokens
        computed = tokens * (1 - m.get("actor/shared_tokens", 0.0))
        out |= utilisation(run, computed, squares, m["timing_s/update_actor"])
    return out | memory()


def utilisation(run: Training, tokens: float, squares: float, seconds: float) -> dict[str, float]:
    """Return the learner's model FLOPs utilisation, as a share of the peak of the data sheet.
    Recomputed activations do not count. Without a GPU whose data sheet is known there is none."""
    gpu = gpu_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if gpu is None:
        return {}
    ranks = sum(map(len, run.ranks.model_parallel_groups))
    work = size_of(run.hf, lora=run.cfg.lora).train_flops(tokens, squares)
    return {"perf/mfu/actor": work / seconds / ranks / (gpu.tflops * 1e12)}


def memory() -> dict[str, float]:
    """Return this rank's memory: host, and device if there is one."""
    out = {"perf/cpu_memory_gb": memory_gb()}
    if torch.cuda.is_available():
        out["perf/max_memory_allocated_gb"] = highest_bytes() / 1e9
        out["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return out


def idle(run: Run, m: dict[str, float]) -> dict[str, float]:
    """With separate train and rollout ranks, return each role's idle share of the step."""
    engines = run.cfg.cluster.rollout_ranks // run.cfg.rollout.tp
    if not engines:
        return {}
    seconds = m["timing_s/step"]
    return {
        "sched/trainer_idle": (m["timing_s/gen"] + m["timing_s/exchange"]) / seconds,
        "sched/rollout_idle": max(0.0, 1 - m["sched/busy_s"] / (engines * seconds)),
    }


def counts_nodes(cfg: Config) -> bool:
    """Return whether a run on unshared nodes reports memory per node: a run with rollout ranks,
    or a run profiled for sharing nodes later (--debug.full_length)."""
    return bool(cfg.cluster.rollout_ranks or cfg.debug.full_length)


def of_nodes(run: Run) -> dict[str, float]:
    """Return the largest host memory per node, separately for ranks that sample and ranks that
    train; {} if the run does not report it.

    A rank that samples and trains counts in both. Memory shared by several processes counts several
    times. Collective over all ranks.
    """
    if not (counts_nodes(run.cfg) or run.device.is_shared):
        return {}
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", run.ranks.size))
    nodes = math.ceil(run.ranks.size / per_node)
    sizes = [0.0] * (2 * nodes)  # two sums per node: ranks that sample, ranks that train
    found = memory_gb()
    if run.engine is not None:
        sizes[2 * (run.ranks.rank // per_node)] = found
    if run.ranks.trains:
        sizes[2 * (run.ranks.rank // per_node) + 1] = found
    sums = collective.reduce_floats(sizes, group=run.ranks.everyone)
    return {"perf/rollout_node_gb": max(sums[::2]), "perf/train_node_gb": max(sums[1::2])}


def memory_gb() -> float:
    """Return the resident memory of this process and its children in GB."""
    me = psutil.Process(os.getpid())
    total = me.memory_info().rss
    for child in me.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # The child has exited after the listing.
    return total / 1e9


UNFINISHED = "RLCORE_UNFINISHED"
"""Environment variable with the path of a file, by which job.sbatch requeues the run. The run
creates the file if it saves a checkpoint and exits with code 0 before its last step."""


def interrupted(run: Training) -> None:
    """Report that the run has saved a checkpoint and stopped before its last step."""
    if run.ranks.rank == 0:
        if file := os.environ.get(UNFINISHED):
            Path(file).touch()
        log.info(
            "ended by SIGTERM after step %d of %d, which is saved; the same command resumes the "
            "run",
            run.step,
            run.cfg.run.steps,
        )


def end(run: Training) -> None:
    """Write summary.json, draw curve.png, and print the final table."""
    if run.observers.writer is None or run.observers.screen is None:
        return
    further = {"perf/max_rss_gb_rank0": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    summary = run.observers.writer.summary(further)
    picture = None
    if run.cfg.log.plot:
        from rlcore.metrics import plots

        with run.observers.writer.writes.to(run.folder / "curve.png"):
            picture = plots.curve(run.folder)
    run.observers.screen.end(summary, run.folder, picture)
