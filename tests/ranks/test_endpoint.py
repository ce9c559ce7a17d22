"""`--env endpoint` with asynchronous sampling and with redundant episodes, through the whole
program: versions, harnesses that are cancelled, episodes that start again."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import logged_harness, runs
from tests.unit.test_train_endpoint import BARE, model

pytestmark = [pytest.mark.ranks(2), pytest.mark.slow]

STEPS, PROMPTS, RESPONSES = 5, 2, 2
ALPHAS = 0, 1, 2
AGE = "training/off_policy/trajectory_staleness_worst/max"
LATE = 3
"""Row of the data whose episodes never end, in one run: more than async.extra_prompts of them at a
time would stop it."""


class Found:
    def __init__(self, folder: Path, real_data: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        qwen = model(folder / "qwen", real_data)

        def job(name: str, *keys: object, has_late: bool = False) -> runs.Job:
            rows = [
                {
                    "question": f"Say {i}.",
                    "answer": str(i),
                    "log": str(self.log(name)),
                    "wanted": RESPONSES,
                    "late": has_late and i == LATE,
                }
                for i in range(8)
            ]
            data = folder / f"{name}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            more = (
                *BARE,
                *("--env", "endpoint", "--env.function", "tests.logged_harness.play"),
                *("--env.grace_s", 2, "--rollout.max_tokens", 300, "--data.template", "chat"),
                *("--train.tokens_per_micro_batch", 2048, "--log.rollout_tokens", -1),
                *("--data.prompts_per_step", PROMPTS, "--data.num_val_prompts", 2),
                *("--rollout.samples_per_prompt", RESPONSES, "--run.steps", STEPS),
                *("--debug.decode_floor_ms", 20, "--rollout.progress_interval_s", 0.05),
                *("--data.train", data, "--data.val", data, "--data.no_shuffle", *keys),
            )
            return {"name": name, "argv": runs.arguments(qwen, self.runs, name, *more)}

        old = "--mode", "async", "--cluster.rollout_ranks", 1, "--eval.every", 2
        extra = "--async.extra_prompts", 1
        self.gang = runs.run(
            2,
            [
                *(job(f"alpha {a}", *old, "--async.alpha", a) for a in ALPHAS),
                job("late", *old, "--async.alpha", 1, *extra, has_late=True),
                job("more", "--env.num_groups", 3, "--env.group_size", 4, "--run.steps", 2),
            ],
            folder / "gang",
        )

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)

    def read(self, name: str) -> list[dict[str, Any]]:
        lines = (self.runs / name / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, real_data: Path) -> Found:
    return Found(tmp_path_factory.mktemp("endpoint"), real_data)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_token_of_any_row_is_older_than_alpha(found: Found, alpha: int) -> None:
    rows = found.rows(f"alpha {alpha}")
    trained = [row for step, row in rows.items() if step]
    assert len(trained) == STEPS
    assert all(row["training/trained_rows"] == PROMPTS * RESPONSES for row in trained)
    assert all(row["env/branches"] == 2 and row["env/turns"] == 3 for row in trained)
    if alpha == 0:
        assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in trained)
    samples = found.read(f"alpha {alpha}")
    assert len(samples) == STEPS * PROMPTS * RESPONSES
    oldest: dict[int, int] = {}
    for sample in samples:
        versions = [v for v, _ in sample["tokens"]["versions"]]
        counted = sum(n for _, n in sample["tokens"]["versions"])
        assert counted == sum(turn["num_tokens"] for turn in sample["turns"])
        assert [turn["row"] for turn in sample["turns"]] == [0, 0, 1]
        newest = sample["step"] - 1
        assert all(newest - alpha <= v <= newest for v in versions), sample
        oldest[sample["step"]] = min(oldest.get(sample["step"], newest), *versions)
    for step, version in oldest.items():
        assert rows[step][AGE] == step - 1 - version
    assert alpha == 0 or max(rows[step][AGE] for step in oldest) >= 1


def test_episodes_that_an_evaluation_releases_start_again(found: Found) -> None:
    found.rows("alpha 2")
    lines = logged_harness.read(found.log("alpha 2"))
    starts = Counter(id for what, id, *_ in lines if what == "start" and id.startswith("t"))
    again = [id for id, count in starts.items() if count > 1]
    assert again
    for id in again:
        kinds = [what for what, of, *_ in lines if of == id]
        assert kinds.count("ended") >= 1 or kinds.count("done") >= 1, kinds
    trained = {sample["id"] for sample in found.read("alpha 2")}
    done = {id for what, id, *_ in lines if what == "done"}
    assert trained <= done


def test_a_group_that_never_ends_is_dropped_with_its_harnesses(found: Found) -> None:
    rows = found.rows("late")
    assert sum(row.get("async/stale_groups", 0) for row in rows.values()) >= 1
    lines = logged_harness.read(found.log("late"))
    late = {id for what, id, *_ in lines if what == "helper"}
    assert late and not late & {sample["id"] for sample in found.read("late")}
    ended = {id for what, id, *_ in lines if what == "ended"}
    done = {id for what, id, *_ in lines if what == "done"}
    assert {id for id in late if id.endswith(".1")} <= ended - done
    assert late <= ended | done


def test_redundant_episodes_are_cancelled_at_the_end_of_their_round(found: Found) -> None:
    rows = found.rows("more")
    assert all(row["training/trained_rows"] == PROMPTS * RESPONSES for row in rows.values())
    lines = logged_harness.read(found.log("more"))
    done = sorted(at for what, *_, at in lines if what == "done")
    waits = {id: at for what, id, _, at in lines if what == "helper" and id.endswith(".3")}
    ended = {id: at for what, id, _, at in lines if what == "ended"}
    assert waits and waits.keys() <= ended.keys()
    of_first_round = [id for id, at in waits.items() if at < done[PROMPTS * RESPONSES - 1]]
    assert of_first_round and all(ended[id] < done[-1] for id in of_first_round)


@pytest.mark.parametrize("name", [*(f"alpha {a}" for a in ALPHAS), "late", "more"])
def test_no_process_of_a_harness_is_left(found: Found, name: str) -> None:
    found.rows(name)
    lines = logged_harness.read(found.log(name))
    assert len(lines) > 2 * PROMPTS * RESPONSES
    left = [line for line in lines if logged_harness.is_running(line[2])]
    assert not left
