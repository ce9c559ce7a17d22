"""Callbacks on two ranks, in every mode: what they are told, and what they change."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import runs

pytestmark = pytest.mark.ranks(2)

SETTINGS = (
    *("--eval.no_at_start", "--checkpoint.no_export_hf", "--checkpoint.every", 2),
    *("--debug.decode_floor_ms", 5, "--rollout.progress_interval_s", 0.05),
)
EVEN = "--run.callbacks", "tests.watchers.Even"
SAME = "training/excluded_samples", "actor/loss", "actor/grad_norm", "critic/advantages/mean"


class Found:
    def __init__(self, folder: Path):
        self.runs = folder / "runs"
        model = runs.tiny_model(folder / "model")

        def job(name: str, *more: object) -> runs.Job:
            argv = runs.arguments(model, self.runs, name, *SETTINGS, *more)
            return {"name": name, "argv": argv}

        told = "--run.callbacks", "tests.watchers.Told"
        self.gang = runs.run(
            2,
            [
                job("plain"),
                job("even", *EVEN),
                job("stream", "--mode", "stream", *EVEN),
                job("async", "--mode", "async", "--cluster.rollout_ranks", 1, *EVEN),
                job("told", *told, "tests.watchers.Even"),
                job("stops", *told, "tests.watchers.Stops"),
            ],
            folder / "gang",
        )
        failing = {
            "raises": "Raises",
            "forgets": "Forgets",
            "counts": "Counts",
            "unmade": "Unmade",
            "no class": "json",
        }
        self.alone = runs.run(
            1,
            [job(name, "--run.callbacks", f"tests.watchers.{c}") for name, c in failing.items()],
            folder / "alone",
        )

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name, 2)
        return runs.rows(self.runs / name)

    def told(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.runs / name / "told.jsonl").open()]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("callbacks"))


def test_samples_that_are_not_kept_are_not_trained_and_count_in_the_baseline(found: Found) -> None:
    plain, even = found.rows("plain"), found.rows("even")
    excluded = [row["training/excluded_samples"] for row in even.values()]
    assert all(0 < n < 16 for n in excluded)
    assert [row["training/trained_rows"] for row in even.values()] == [16 - n for n in excluded]
    assert "training/excluded_samples" not in plain[1]
    assert even[1]["critic/score/mean"] == plain[1]["critic/score/mean"]
    assert even[1]["actor/grad_norm"] != plain[1]["actor/grad_norm"]
    lines = [json.loads(line) for line in (found.runs / "even" / "rollouts.jsonl").open()]
    assert any(len(line["response"]) % 2 for line in lines), "the log still has them"


def test_the_stream_loop_excludes_the_same_samples(found: Found) -> None:
    even, stream = found.rows("even"), found.rows("stream")
    for name in SAME:
        assert stream[1][name] == pytest.approx(even[1][name], rel=1e-4), name


def test_the_asynchronous_loop_excludes_samples_too(found: Found) -> None:
    for row in found.rows("async").values():
        assert row["training/trained_rows"] == 16 - row["training/excluded_samples"] < 16


def test_a_callback_is_told_of_steps_evaluations_and_checkpoints(found: Found) -> None:
    rows = found.rows("told")
    told = found.told("told")
    assert [t[:2] for t in told] == [
        *(["start", 0], ["step", 1], ["step", 2], ["save", 2]),
        *(["step", 3], ["step", 4], ["eval", 4], ["save", 4], ["end", 4]),
    ]
    assert told[1][2] == rows[1]["critic/score/mean"]
    assert told[3][2] == "step_000002" and told[6][2].startswith("val-")
    assert rows[1]["training/excluded_samples"] > 0, "the second callback is called too"


def test_a_callback_ends_the_run_which_is_complete(found: Found) -> None:
    assert list(found.rows("stops")) == [1, 2, 3]
    assert [t[:2] for t in found.told("stops")][-2:] == [["save", 3], ["end", 3]]
    assert "ended by SIGTERM" not in found.gang.text("stops")
    assert (found.runs / "stops" / "summary.json").exists()


@pytest.mark.parametrize(
    ("name", "code", "sentence"),
    [
        ("raises", 1, "Raises: on_step raised KeyError: 'what it looks for'"),
        ("forgets", 1, "Forgets: keep_sample returned None for sample t"),
        ("counts", 1, "Counts: on_step returned 1; return True or False"),
        ("unmade", 2, "Unmade: its constructor raised TypeError"),
        ("no class", 2, "json: is no subclass of rlcore.trainer.callbacks.Callback"),
    ],
)
def test_a_callback_that_fails_is_named(found: Found, name: str, code: int, sentence: str) -> None:
    assert f"--run.callbacks tests.watchers.{sentence}" in found.alone.text(name)
    assert found.alone.code(name) == code
