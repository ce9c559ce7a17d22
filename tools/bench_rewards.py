"""The math reward against labelled answers, and its speed against plain math-verify.

    .venv/bin/python tools/bench_rewards.py --judge-set FILE --json OUT     # about two minutes

FILE has a JSON object per line: id, source, response, gold, label (1 right, 0 wrong), and perhaps
`options` of math-verify (precision, strict). The labels of graders are not always right: VERDICTS
names rows that were read by hand, with what is right about them and why. Rows of the JSON:

    source, rows, agree (with the labels), accuracy (with the verdicts), disputed (rows with one)
    name, value, unit, baseline (plain math-verify in the same run), ratio, wall, baseline_wall,
    algebra (share of answers about which math-verify was asked)

Speed is in answers per second of CPU time of one process, which other jobs on the machine change
little, and by the wall clock (`wall`): every pair of gold and answer once, after a warm-up over
other rows. `all`: of every kind. `number`: gold and final answer are plain numbers.
`latex`: one of them has a backslash. `unmarked`: nothing marks the final answer.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import Prompt  # noqa: E402
from rlcore.rewards import answers  # noqa: E402
from rlcore.rewards.math import MathReward, MathRewardConfig  # noqa: E402

VERDICTS = Path(__file__).with_name("judge_verdicts.jsonl")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--judge-set", type=Path, required=True, metavar="FILE")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--speed-rows", type=int, default=200, help="of each class; 0: no speed")
    a = parser.parse_args()
    rows = [json.loads(line) for line in a.judge_set.read_text().splitlines()]
    verdicts = {v["id"]: v for v in map(json.loads, a.verdicts.read_text().splitlines())}
    out: list[Row] = accuracy(rows, verdicts)
    if a.speed_rows:
        out += speed(rows, a.speed_rows, random.Random(a.seed))
    if a.json:
        write_atomic(a.json, json.dumps(out, indent=1) + "\n")


# ---- accuracy


def accuracy(rows: list[Row], verdicts: dict[str, Row]) -> list[Row]:
    """Print disagreements and one line per source."""
    score = scorer()
    agree, right, judged, disputed = (defaultdict[str, int](int) for _ in range(4))
    for row in rows:
        source, ours = row["source"], score(row)
        agree[source] += ours == row["label"]
        verdict = verdicts.get(row["id"], {"right": row["label"], "why": "not read yet"})
        disputed[source] += row["id"] in verdicts
        if verdict["right"] is not None:
            judged[source] += 1
            right[source] += ours == verdict["right"]
        if ours != row["label"]:
            answer = answers.boxed(row["response"]) or answers.labelled(row["response"])
            print(
                f"{row['id']}: label {row['label']}, ours {ours}, verdict {verdict['right']} "
                f"({verdict['why']})\n    gold {row['gold'][:80]!r}  answer {str(answer)[:80]!r}"
            )
    out: list[Row] = []
    for source in agree:
        n = sum(r["source"] == source for r in rows)
        share = right[source] / judged[source]
        out.append(
            {
                "source": source,
                "rows": n,
                "agree": agree[source] / n,
                "accuracy": share,
                "disputed": disputed[source],
            }
        )
        print(f"{source:60s} {n:5d} rows  agree {agree[source] / n:.4f}  accuracy {share:.4f}")
    return out


class CountingReward(MathReward):
    """Counts the answers about which math-verify is asked."""

    asked = 0

    def _algebra(self, *args: Any) -> bool:
        CountingReward.asked += 1
        return super()._algebra(*args)


def scorer() -> Callable[[Row], int]:
    """The verdict of our reward on a row, with the row's options."""
    made: dict[tuple[int, bool], MathReward] = {}

    def score(row: Row) -> int:
        options = row.get("options") or {}
        key = options.get("precision", 6), options.get("strict", True)
        if key not in made:
            made[key] = CountingReward(MathRewardConfig(decimals=key[0]), strict=key[1])
        return int(made[key].score(None, _prompt(row["gold"]), row["response"]))

    return score


def _prompt(gold: str) -> Prompt:
    return Prompt(index=0, dataset="judge", tokens=np.zeros(0, np.int32), answer=gold)


# ---- speed


def speed(rows: list[Row], count: int, rng: random.Random) -> list[Row]:
    """Answers per second of CPU time, ours and plain math-verify's, by class."""
    classes: dict[str, dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in rows:
        for name in (_class_of(row), "all"):
            classes[name].setdefault((row["gold"], _answer(row)), row)
    out: list[Row] = []
    for name in ("all", "number", "latex", "unmarked"):
        chosen = list(classes[name].values())
        rng.shuffle(chosen)
        chosen = chosen[: 2 * count]
        half = len(chosen) // 2
        warm, timed = chosen[:half], chosen[half:]
        (ours, wall), asked = _rates(warm, timed, scorer()), CountingReward.asked
        plain, plain_wall = _rates(warm, timed, _plain())
        print(
            f"{name:10s} {half} answers: {ours:9.0f} answers/s of CPU, plain math-verify "
            f"{plain:7.0f}, ratio {ours / plain:.1f}; {wall:.0f} and {plain_wall:.0f} by the wall "
            f"clock; {asked / len(timed):.2f} of them by algebra"
        )
        out.append(
            {
                "name": f"math_{name}",
                "value": ours,
                "unit": "answers/s of CPU time",
                "baseline": plain,
                "ratio": ours / plain,
                "wall": wall,
                "baseline_wall": plain_wall,
                "algebra": asked / len(timed),
            }
        )
    return out


def _answer(row: Row) -> str:
    text = row["response"]
    return answers.boxed(text) or answers.labelled(text) or text


def _class_of(row: Row) -> str:
    text, gold = row["response"], row["gold"]
    answer = answers.boxed(text) or answers.labelled(text)
    if answer is None:
        return "unmarked"
    if "\\" in gold or "\\" in answer:
        return "latex"
    numbers = (answers.number_of(answers.normalise(t)) for t in (gold, answer))
    return "number" if all(n is not None for n in numbers) else "text"


def _rates(
    warm: Iterable[Row], timed: list[Row], score: Callable[[Row], int]
) -> tuple[float, float]:
    """Answers per second of CPU time, and of the wall clock."""
    for row in warm:
        score(row)
    CountingReward.asked = 0
    cpu, wall = time.process_time(), time.monotonic()
    for row in timed:
        score(row)
    return (
        len(timed) / (time.process_time() - cpu),
        len(timed) / (time.monotonic() - wall),
    )


def _plain() -> Callable[[Row], int]:
    """math-verify as its README calls it, gold in a box."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse, verify = math_verify.parse, math_verify.verify
    return lambda row: int(verify(parse("\\boxed{" + row["gold"] + "}"), parse(row["response"])))


if __name__ == "__main__":
    main()
