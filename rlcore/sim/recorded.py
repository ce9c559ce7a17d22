"""A run that was recorded, as a job for the simulator: its lengths, its seconds, its drafts.

Lengths come from the run's rounds.jsonl, seconds from its metrics.jsonl. So the cost model is not
needed, and the job may be of any model on any machine. What drafts would gain is found by replay:
the shipped drafter drafts the run's own responses from those of earlier epochs.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlcore import algos
from rlcore.config import resolve
from rlcore.config.schema import Config, DraftConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.metrics.jsonl import read_lines
from rlcore.metrics.sinks import num_ranks, read_metrics
from rlcore.records import GroupId, group_of
from rlcore.rollout.round_log import FILE, Log
from rlcore.sim.cluster import simulate
from rlcore.sim.cost import EngineCost
from rlcore.sim.job import SimJob
from rlcore.sim.ladder import DRAFTS
from rlcore.sim.phases import TrainingCost
from rlcore.sim.profile import EngineMeasurements, positive
from rlcore.sim.replay import gain
from rlcore.sim.rewards import FixedScorer, Rewards
from rlcore.sim.workload import Recorded
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json
from rlcore.utils.gpus import Gpu

SECTIONS = (
    "run",
    "model",
    "data",
    "rollout",
    "draft",
    "algo",
    "train",
    "teacher",
    "cluster",
    "async",
)
"""Sections of the configuration that a simulation reads. Those of systems are set per arm."""
IGNORED = ("run.callbacks", "run.resume", "data.val")
WARM_UP = 2
"""Steps at the start of the run that are not used: they contain compilation and the first
allocations."""
LEAST_STEPS = 5
VARIED = 0.2
"""Variation of the tokens of a step, relative to the mean, from which on a constant part of the
training can be told."""
LEAST_SHARE = 0.8
"""Least share of a step's responses that the log must have to judge drafts by it."""
PARTS = (
    "exchange",
    "old_log_prob",
    "ref",
    "teacher",
    "values",
    "adv",
    "update_critic",
    "update_actor",
)
"""Phases of a step that are training here; their seconds grow with the tokens of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A recorded run as a job with its own settings, and how well it is met."""

    job: SimJob
    measured_s: float
    """Mean seconds of the steps that were used."""
    steps: int
    drafts: tuple[str, ...]
    """Keys that switch drafts from history on, with the run's own section `draft`."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSettings:
    """Settings of a recorded run."""

    cfg: Config
    """What a simulation needs, with all systems switched off."""
    select: Mapping[str, str]
    """Selectors (`--mode`, `--schedule`, ...)."""
    draft: DraftConfig
    reward_workers: int
    """Number of responses per rank that are scored at a time."""


def read(folder: Path, last: int = 0) -> Recording:
    """Return the recorded run in `folder`. `last`: number of most recent steps to use; 0: all after
    the warm-up.

    Raises:
        ConfigError: the folder has no run that can be used; the error says why.
    """
    settings = settings_of(folder)
    cfg, select = settings.cfg, settings.select
    if select.get("mode") != "sync" or select.get("schedule") != "all":
        raise ConfigError(
            f"--run {folder}: was recorded with --mode {select.get('mode')} --schedule "
            f"{select.get('schedule')}; record some steps with --mode sync --schedule all"
        )
    rows = [r for r in read_metrics(folder) if "sched/decode_steps" in r][WARM_UP:][-last:]
    if len(rows) < LEAST_STEPS:
        raise ConfigError(
            f"--run {folder}: has {len(rows)} steps after the first {WARM_UP}; record at least "
            f"{LEAST_STEPS}"
        )
    ranks = num_ranks(rows[-1])
    # model.path is relative to the folder in which the run was started
    model = Path(cfg.model.path) if Path(cfg.model.path).is_dir() else folder / "hf"
    hf = HFConfig.from_folder(model)
    first = int(rows[0]["training/global_step"])
    rounds = Log(folder / FILE)
    row_of = {group.id: group.row for found in rounds.rounds for group in found.started}
    by_prompt = lengths(rounds, first, row_of)
    prompt = round(float(np.mean([row["prompt_length/mean"] for row in rows])))
    workload = Recorded(list(by_prompt.values()), prompt_tokens=max(1, prompt))
    cfg = resolve.with_keys(
        cfg, ["--data.num_prompts", str(len(workload.by_prompt)), "--data.no_shuffle"]
    )
    engine = engine_cost(rows, cfg, workload)
    notes = [
        f"{len(rows)} steps from step {first} on, {ranks} ranks; lengths of "
        f"{len(workload.by_prompt)} prompts",
        f"decode step: {1e3 * engine.step_s:.3g} ms + {1e6 * engine.sequence_s:.3g} us a request",
    ]
    job = SimJob(
        name="recorded",
        cfg=cfg,
        hf=hf,
        gpu=Gpu(name="recorded", memory_gb=0, bandwidth_gbs=1, tflops=1, link_gbs=1),
        gpus=ranks,
        workload=workload,
        rewards=lambda row_of: Rewards({"": scorer(rows, ranks * settings.reward_workers)}),
        measured={cfg.rollout.tp: EngineMeasurements(tp=cfg.rollout.tp, cost=engine)},
        measured_training=training_cost(rows),
    )
    place = {row: k for k, row in enumerate(by_prompt)}
    answered = [
        (int(row["step"]), place[row_of[group_of(row["id"])]], row["response"])
        for row in responses(folder, cfg)
        if row_of.get(group_of(row["id"])) in place
    ]
    found = None
    if answered:
        encode = load_tokenizer(cfg.model.tokenizer or model).encode
        texts = [(step, k, np.asarray(encode(text), np.int32)) for step, k, text in answered]
        found = gain(texts, settings.draft, job, first)
    if found is None:
        notes.append(
            "drafts: not known; they need a run whose prompts come again (--data.num_prompts) and "
            "that logs all responses (--log.rollouts -1)"
        )
    else:
        first_gain, last_gain = found.gains[0], found.gains[-1]
        notes.append(
            f"drafts: by replay, {first_gain:.1f} tokens of a request per forward at the start of "
            f"a response, {last_gain:.1f} from token {found.starts[-1]} on"
        )
    job = replace(job, gain=found)
    seconds = float(np.mean([row["timing_s/step"] for row in rows]))
    rest = seconds - simulate(job, len(rows)).seconds
    notes.append(f"step: {seconds:.3g} s, of which {rest:+.2g} s are of no phase and stay")
    # After a weight update, engines wait until the step is over (its metrics and logs).
    t = job.training
    training = replace(t, sync_s=max(0.0, t.sync_s + rest))
    return Recording(
        job=replace(job, measured_training=training),
        measured_s=seconds,
        steps=len(rows),
        drafts=draft_keys(settings.draft),
        notes=tuple(notes),
    )


def settings_of(folder: Path) -> RecordedSettings:
    """Return the settings of the run in `folder`. Raise ConfigError if it has none."""
    try:
        found = read_json(folder / "config.json")
    except ConfigError as error:
        raise ConfigError(f"--run {folder}: is not the folder of a run ({error})") from error
    parts = {name: found[name] for name in SECTIONS if isinstance(found.get(name), Mapping)}
    words = resolve.words(
        {
            name: {k: v for k, v in part.items() if v is not None and f"{name}.{k}" not in IGNORED}
            for name, part in parts.items()
        }
    )
    select = found.get("select", {})
    algo = str(select.get("algo", "grpo"))
    cfg = resolve.parse(["--algo", algo, *words], {"algo": algos.config_class})
    off = ["--rollout.draft", "none", "--eval.every", "0"]
    # The simulated run has neither environment nor sum of rewards, which these keys would need.
    if not cfg.data.train:
        off += ["--data.train", "data"]
    if cfg.algo.adv_estimator == "gdpo":
        off += ["--algo.adv_estimator", "grpo"]
    return RecordedSettings(
        cfg=replace(resolve.with_keys(cfg, off), draft=DraftConfig()),
        select=select,
        draft=cfg.draft,
        reward_workers=_reward_workers(found.get("reward")),
    )


def _reward_workers(section: Any) -> int:
    """Return the least `workers` in the recorded section `reward`, which for a sum has a section
    for each reward; 1 if there is none."""
    if not isinstance(section, Mapping):
        return 1
    parts = [section, *(part for part in section.values() if isinstance(part, Mapping))]
    return min((int(part["workers"]) for part in parts if "workers" in part), default=1)


def draft_keys(draft: DraftConfig) -> tuple[str, ...]:
    """Return the keys that switch drafts from history on, with the settings `draft`."""
    usual = resolve.keys(DraftConfig(), "draft.")
    own = {k: v for k, v in resolve.keys(draft, "draft.").items() if v != usual[k]}
    return (*DRAFTS, *resolve.words(own))


def lengths(log: Log, first: int, row_of: Mapping[GroupId, int]) -> dict[int, list[int]]:
    """Return the lengths of all responses from step `first` on, by the prompt's data set row."""
    by_prompt: dict[int, list[int]] = {}
    for found in (found for found in log.rounds if found.step >= first):
        for response in found.counted:
            row = row_of[group_of(response.id)]
            by_prompt.setdefault(row, []).append(max(1, response.num_tokens))
    return by_prompt


def engine_cost(rows: Sequence[Mapping[str, float]], cfg: Config, workload: Recorded) -> EngineCost:
    """Return the costs of an engine that best explain how long all engines were busy: a decode step
    takes a constant and a part for every request."""
    terms = [[row["sched/decode_steps"], row["sched/decode_tokens"]] for row in rows]
    busy = [row["sched/busy_s"] for row in rows]
    step_s, sequence_s = positive(terms, busy)
    # least relative errors count a slow step little, but the sum must be right
    factor = sum(busy) / sum(step_s * steps + sequence_s * tokens for steps, tokens in terms)
    step_s, sequence_s = factor * step_s, factor * sequence_s
    r = cfg.rollout
    longest = workload.prompt_tokens + workload.cap
    room = r.kv_cache_tokens or r.max_running_requests * longest
    return EngineCost(step_s=step_s, sequence_s=sequence_s, cache_tokens=max(room, longest))


def training_cost(rows: Sequence[Mapping[str, float]]) -> TrainingCost:
    """Return the costs of training on all ranks that best explain the steps: a constant, and a part
    for every computed token. If the steps hardly differ in tokens, all is taken to grow with them.
    """
    trains = [sum(row.get(f"timing_s/{part}", 0.0) for part in PARTS) for row in rows]
    shared = [row.get("actor/shared_tokens", 0.0) for row in rows]
    tokens = [row["perf/total_num_tokens"] * (1 - s) for row, s in zip(rows, shared, strict=True)]
    step_s, token_s = 0.0, sum(trains) / sum(tokens)
    if statistics.stdev(tokens) > VARIED * statistics.fmean(tokens):
        step_s, token_s = positive([[1.0, n] for n in tokens], trains)
        factor = sum(trains) / sum(step_s + token_s * n for n in tokens)
        step_s, token_s = factor * step_s, factor * token_s
    pushes = [row.get("timing_s/update_weights", 0.0) for row in rows]
    return TrainingCost(
        token_s=token_s,
        step_s=step_s,
        forward_share=0.0,
        sync_s=float(np.mean(pushes)),
        dp=1,
        shares_prefix="actor/shared_tokens" in rows[-1],
    )


def scorer(rows: Sequence[Mapping[str, float]], workers: int) -> FixedScorer:
    """Return a scorer with the run's mean time of a response."""
    mean = float(np.mean([row.get("reward/latency_s/mean", 0.0) for row in rows]))
    return FixedScorer(mean, max(1, workers))


def responses(folder: Path, cfg: Config) -> list[Mapping[str, Any]]:
    """Return the rows of the logged responses, in the order of the log. If it lacks many of them,
    return no rows, because the history would be too short to replay drafts."""
    path = folder / "rollouts.jsonl"
    wanted = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    rows: list[Mapping[str, Any]] = list(read_lines(path)) if path.is_file() else []
    steps = {int(row["step"]) for row in rows}
    return rows if steps and len(rows) >= LEAST_SHARE * wanted * len(steps) else []
