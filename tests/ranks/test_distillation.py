"""`--algo opd` and `--algo gkd` through the whole program: one rank, layouts, and every loop."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.data import label_task
from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

OPD = "--algo", "opd"
GKD = "--algo", "gkd", "--teacher.top_k", 6
ALONE = {
    "opd": OPD,
    "gkd": GKD,
    "streamed": (*OPD, "--teacher.resident_ratio", 0, "--teacher.batch_tokens", 64),
    "grpo": ("--algo", "grpo", "--algo.teacher_kl_coef", 0.5),
    "grpo0": ("--algo", "grpo"),
    "opd lora": (*OPD, "--lora.rank", 4),
    "gkd data": GKD,
    "gkd data epochs": (*GKD, "--train.epochs", 2, "--train.samples_per_update", 8),
}
DATA = "gkd data", "gkd data epochs", "gkd data dp2 pp1", "gkd data pp2", "gkd data stream"
"""Runs that also train demonstrations."""
APART = "--mode", "async", "--cluster.rollout_ranks", 1
BOTH = {
    "opd tp2": (*OPD, "--train.tp", 2),
    "gkd pp2": (*GKD, "--train.pp", 2),
    "gkd dp2": GKD,
    "gkd data dp2 pp1": GKD,
    "gkd data pp2": (*GKD, "--train.pp", 2),
    "gkd data stream": (*GKD, "--mode", "stream"),
    "opd stream": (*OPD, "--mode", "stream"),
    "opd async": (*OPD, *APART, "--async.alpha", 1),
}


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that all went well."""
    folder = tmp_path_factory.mktemp("distillation")
    model = runs.tiny_model(folder / "model")
    teacher = runs.tiny_model(folder / "teacher", num_hidden_layers=3)
    kit.random_weights(teacher, seed=3)
    demonstrations = folder / "worked.jsonl"
    made = (label_task.make("train", 1, i) for i in range(5))
    rows = [json.dumps({"question": r.prompt, "answer": r.demonstration}) for r in made]
    demonstrations.write_text("\n".join(rows))
    every = "--teacher.models", teacher, "--eval.no_at_start", "--eval.no_at_end"
    every += ("--checkpoint.no_export_hf", "--debug.deterministic_order")

    def jobs(found: dict[str, tuple[object, ...]], ranks: int) -> list[runs.Job]:
        made = []
        for name, keys in found.items():
            loop = "async" in name or "stream" in name  # there timing decides
            more = every[:-1] if loop else every
            more = more[2:] if name == "grpo0" else more
            if name in DATA:
                more += "--data.demonstrations", demonstrations, "--data.demonstration_share", 0.3
            argv = runs.arguments(model, folder / "runs", name, *more, *keys)
            made.append({"name": name, "argv": argv, "ranks": ranks})
        return made

    for ranks, found in ((1, ALONE), (2, BOTH)):
        ended = runs.run(ranks, jobs(found, ranks), folder / f"gang{ranks}")
        for name in found:
            ended.check(name, ranks)
    return folder / "runs"


def rows(gang: Path, name: str) -> dict[int, dict[str, Any]]:
    return runs.rows(gang / name)


@pytest.mark.parametrize(
    ("alone", "both"),
    [
        ("opd", "opd tp2"),
        ("gkd", "gkd pp2"),
        ("gkd", "gkd dp2"),
        ("gkd data", "gkd data pp2"),
        ("gkd data", "gkd data dp2 pp1"),
    ],
)
def test_the_ranks_of_a_group_divide_the_rows_and_get_the_scores_of_one(
    gang: Path, alone: str, both: str
) -> None:
    ours, theirs = rows(gang, both), rows(gang, alone)
    assert ours.keys() == theirs.keys() == {1, 2, 3, 4}
    for step, row in theirs.items():
        for name in ("actor/teacher_kl", "actor/loss", "actor/grad_norm"):
            assert ours[step][name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), (step, name)
    assert abs(theirs[1]["actor/teacher_kl"]) > 0.05


def test_layers_that_stream_and_smaller_batches_change_nothing(gang: Path) -> None:
    ours, theirs = rows(gang, "streamed"), rows(gang, "opd")
    for step, row in theirs.items():
        assert ours[step]["actor/teacher_kl"] == pytest.approx(row["actor/teacher_kl"], abs=1e-5)
        assert ours[step]["actor/teacher_streamed_layers"] == 3
        assert row["actor/teacher_streamed_layers"] == 0


def test_the_teacher_changes_what_a_reward_alone_teaches(gang: Path) -> None:
    with_it, without = rows(gang, "grpo"), rows(gang, "grpo0")
    assert with_it[1]["critic/score/mean"] == without[1]["critic/score/mean"]  # the same samples
    assert with_it[1]["actor/grad_norm"] != pytest.approx(without[1]["actor/grad_norm"], rel=1e-2)
    assert "actor/teacher_kl" not in without[1]


@pytest.mark.parametrize("name", ["opd stream", "opd async", "opd lora"])
def test_every_loop_asks_the_teacher(gang: Path, name: str) -> None:
    for row in rows(gang, name).values():
        assert abs(row["actor/teacher_kl"]) > 1e-3 and row["actor/skipped"] == 0


def test_the_divergence_falls(gang: Path) -> None:
    for name in ("opd", "gkd"):
        found = [row["actor/teacher_kl"] for row in rows(gang, name).values()]
        assert found[-1] < found[0], (name, found)


def test_demonstrations_are_a_share_of_every_update(gang: Path) -> None:
    """An update has 16 samples and 7 demonstrations (30 % of 23 rows). The file has 5 rows, which
    repeat in epochs."""
    ours, theirs = rows(gang, "gkd data"), rows(gang, "gkd")
    made = [label_task.make("train", 1, i) for i in range(5)]
    learned = sum(len(r.demonstration) + 1 for r in made)
    for step, row in ours.items():
        seven = row["training/demonstration_tokens"]
        assert learned < seven < 2 * learned, step
        assert row["actor/loss"] == pytest.approx(row["actor/pg_loss"], rel=1e-6)  # one mean
    total = sum(row["training/demonstration_tokens"] for row in ours.values())
    assert total == pytest.approx(28 / 5 * learned, rel=0.05)
    assert ours[1]["critic/score/mean"] == theirs[1]["critic/score/mean"]  # the same samples
    assert ours[1]["actor/grad_norm"] != pytest.approx(theirs[1]["actor/grad_norm"], rel=1e-2)
    assert ours[1]["rollout_corr/kl"] == pytest.approx(theirs[1]["rollout_corr/kl"], abs=1e-6)
    assert "training/demonstration_tokens" not in theirs[1]


@pytest.mark.parametrize("name", ["gkd data epochs", "gkd data stream"])
def test_every_loop_trains_demonstrations(gang: Path, name: str) -> None:
    for row in rows(gang, name).values():
        assert row["training/demonstration_tokens"] > 0 and row["actor/skipped"] == 0
