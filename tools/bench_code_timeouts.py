"""Measure what adaptive time-outs of rewards save and cost on real programs (arXiv:2509.21009).

    .venv/bin/python tools/bench_code_timeouts.py --data ../shared/data/code/mbpp.jsonl --json OUT

Rows of MBPP, `--samples` answers to each in `--epochs` passes, scored by `--reward code` in its
sandbox: once with the fixed deadline, once with --reward.adaptive_timeout. An answer is the
reference, the reference made slow (right, but it takes from a 600th of the deadline to all of it,
log-uniformly), made endless, or made wrong. Deadlines are the paper's: 30 s fixed, adaptive at
least 2 s and 1.5 times the slowest right answer; `--scale 10` divides all times by ten. Slow and
endless programs sleep, so that many slots fit on few cores and the machine's load does not decide.

Slow right answers that lose their score are counted: the policy takes what the slowest right answer
so far took, and cannot know that a slower right one follows. The second part replays the measured
times of the fixed run through the same policy (`sched.reward.AdaptiveTimeout`) with other settings.

Rows of the JSON: name, value, unit, baseline (the fixed deadline), ratio.
"""

import argparse
import ast
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import Prompt, RewardResult, Sample  # noqa: E402
from rlcore.rewards.code import CodeRewardConfig  # noqa: E402
from rlcore.rewards.service import RewardService  # noqa: E402
from rlcore.sandbox.judge import free_names  # noqa: E402
from rlcore.sched.reward_timeout import AdaptiveTimeout, key_of  # noqa: E402

FIXED_S, LEAST_S, FACTOR = 30.0, 2.0, 1.5
WAIT_S = 600.0
MIX = {"right": 0.5, "slow": 0.1, "endless": 0.1, "wrong": 0.3}
WRAPPER = """

def _wrapped(own):
    import time
    def {name}(*args, **by_name):
        {act}
        return own(*args, **by_name)
    return {name}

{name} = _wrapped({name})
"""
ACTS = {
    "slow": "time.sleep({seconds!r})",
    "endless": "while True: time.sleep(0.01)",
    "wrong": "return 'no answer'",
}


class Limits(NamedTuple):
    """Deadlines, as scaled."""

    fixed_s: float
    least_s: float


class Answer(NamedTuple):
    """One program."""

    id: str
    kind: str
    row: int
    text: str
    seconds: float
    """That it sleeps."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--data", type=Path, required=True, metavar="FILE", help="mbpp.jsonl")
    p.add_argument("--rows", type=int, default=40, help="number of rows")
    p.add_argument("--samples", type=int, default=8, help="responses per prompt")
    p.add_argument("--epochs", type=int, default=2, help="number of epochs")
    p.add_argument("--workers", type=int, default=16, help="parallel workers")
    p.add_argument("--scale", type=float, default=1.0, help="divisor of all times")
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    a = p.parse_args()
    rng = random.Random(a.seed)
    rows = [json.loads(line) for line in a.data.read_text(encoding="utf-8").splitlines()]
    rows = [r for r in rows if function_of(r)]
    rows = rng.sample(rows, a.rows)
    limits = Limits(FIXED_S / a.scale, LEAST_S / a.scale)
    answers = make(rows, a.epochs, a.samples, limits, rng)
    fixed = scored(rows, answers, a.workers, limits, adaptive=False)
    adaptive = scored(rows, answers, a.workers, limits, adaptive=True)
    out = measured(answers, fixed, adaptive, limits) + replayed(answers, fixed, limits)
    for row in out:
        print(json.dumps(row))
    if a.json:
        write_atomic(a.json, json.dumps(out, indent=1) + "\n")


def function_of(row: dict[str, Any]) -> str:
    """The one function that all tests of a row call; "" where there are several names."""
    names = {name for test in row["test_list"] for name in free_names(ast.parse(test))}
    name = names.pop() if len(names) == 1 else ""
    return name if f"def {name}" in row["code"] else ""


def make(
    rows: list[dict[str, Any]], epochs: int, samples: int, limits: Limits, rng: random.Random
) -> list[Answer]:
    """All answers of all epochs, in the order in which they are given."""
    out = []
    for epoch in range(epochs):
        order = list(range(len(rows)))
        rng.shuffle(order)
        for i in order:
            for k in range(samples):
                kind = rng.choices(list(MIX), list(MIX.values()))[0]
                seconds = limits.fixed_s * 600 ** (rng.random() - 1) if kind == "slow" else 0.0
                text = mutated(rows[i], kind, seconds / len(rows[i]["test_list"]))
                out.append(Answer(f"t{epoch * len(rows) + i}.{k}", kind, i, text, seconds))
    return out


def mutated(row: dict[str, Any], kind: str, seconds: float) -> str:
    """The reference answer, perhaps slow, endless or wrong in every call."""
    if kind == "right":
        return row["code"]
    act = ACTS[kind].format(seconds=seconds)
    return row["code"] + WRAPPER.format(name=function_of(row), act=act)


def scored(
    rows: list[dict[str, Any]], answers: list[Answer], workers: int, limits: Limits, adaptive: bool
) -> dict[str, RewardResult]:
    """Results by id. Group after group, as a rollout ends them."""
    config = CodeRewardConfig(
        workers=workers,
        timeout_s=limits.fixed_s,
        adaptive_timeout=adaptive,
        min_timeout_s=limits.least_s,
        timeout_factor=FACTOR,
    )
    deadlines = AdaptiveTimeout(limits.least_s, limits.fixed_s, FACTOR) if adaptive else None
    found: dict[str, RewardResult] = {}
    with RewardService("code", config=config, deadlines=deadlines) as service:
        for answer in answers:
            while service.num_pending >= 2 * workers:
                found |= dict(service.poll(WAIT_S))
            service.submit(answer.id, sample(answer.id), prompt(rows, answer.row), answer.text)
        end = time.monotonic() + WAIT_S
        while len(found) < len(answers):
            found |= dict(service.poll(WAIT_S))
            if time.monotonic() > end:
                raise SystemExit(f"{len(answers) - len(found)} scores are missing")
    return found


def sample(id: str) -> Sample:
    """Of which only the id matters."""
    one = np.ones(1, np.int32)
    return Sample(
        id=id, prompt=one, tokens=one, logps=np.zeros(1, np.float32), versions=one, finish="stop"
    )


def prompt(rows: list[dict[str, Any]], index: int) -> Prompt:
    """A row of MBPP."""
    return Prompt(index=index, dataset="mbpp", tokens=np.ones(1, np.int32), fields=rows[index])


def measured(
    answers: list[Answer],
    fixed: dict[str, RewardResult],
    adaptive: dict[str, RewardResult],
    limits: Limits,
) -> list[dict[str, Any]]:
    """Time and verdicts of the two runs."""
    before = sum(fixed[a.id].latency_s for a in answers)
    after = sum(adaptive[a.id].latency_s for a in answers)
    out = [row("answers", len(answers), "")]
    out.append(row("slot time", after, "s", before))
    for kind in MIX:
        mine = [a for a in answers if a.kind == kind]
        seconds = [sum(f[a.id].latency_s for a in mine) for f in (adaptive, fixed)]
        out.append(row(f"slot time, {kind}", seconds[0], "s", seconds[1]))
        right = [sum(f[a.id].score for a in mine) for f in (adaptive, fixed)]
        out.append(row(f"right, {kind} (of {len(mine)})", right[0], "answers", right[1]))
    lost = [a for a in answers if fixed[a.id].score > adaptive[a.id].score]
    won = [a for a in answers if fixed[a.id].score < adaptive[a.id].score]
    out.append(row("verdicts lost", len(lost), "answers"))
    early = [a for a in lost if a.seconds < 0.9 * limits.least_s]
    out.append(row(f"lost that sleep less than {limits.least_s:g} s", len(early), "answers"))
    out.append(row("verdicts won", len(won), "answers"))
    return out


def replayed(
    answers: list[Answer], fixed: dict[str, RewardResult], limits: Limits
) -> list[dict[str, Any]]:
    """The measured times under other settings of the policy, one answer after the other."""
    before = sum(fixed[a.id].latency_s for a in answers)
    out = []
    for least in (limits.least_s * k for k in (0.5, 1, 2.5, 5)):
        for factor in (FACTOR, 2.0, 4.0):
            policy = AdaptiveTimeout(least, limits.fixed_s, factor)
            after, lost = 0.0, 0
            for a in answers:
                result = fixed[a.id]
                key = key_of(Prompt(index=a.row, dataset="mbpp", tokens=np.ones(1, np.int32)))
                limit = policy.timeout_s(key)
                is_right = result.score == 1 and result.latency_s <= limit
                lost += result.score == 1 and not is_right
                after += min(result.latency_s, limit)
                policy.scored(key, result.latency_s, is_right)
            name = f"replay, least {least:g} s, factor {factor:g}"
            out.append(row(name, after, "s", before))
            out.append(row(f"{name}: lost", lost, "answers"))
    return out


def row(name: str, value: float, unit: str, baseline: float | None = None) -> dict[str, Any]:
    """A line of the result; the ratio is how many times less than the baseline."""
    ratio = round(baseline / value, 3) if baseline and value else None
    kept = None if baseline is None else round(baseline, 3)
    return {"name": name, "value": round(value, 3), "unit": unit, "baseline": kept, "ratio": ratio}


if __name__ == "__main__":
    main()
