"""A judge of random weights in the whole program, alone and in a sum; the tiny judge learns its
rule."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from rlcore.cli import judge
from rlcore.cli.builders import rollout
from rlcore.cli.builders.start import BuildContext
from rlcore.cli.settings import parse
from rlcore.cli.world import World
from rlcore.data import label_task
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import load_tokenizer, make_char_tokenizer
from rlcore.trainer.progress import Progress
from rlcore.utils.spans import Spans
from tests import runs
from tests.kit import tiny_hf_folder


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> runs.Gang:
    folder = tmp_path_factory.mktemp("judged")
    model = runs.tiny_model(folder / "model")
    path = tiny_hf_folder(folder / "judge", vocab_size=len(label_task.VOCAB), num_hidden_layers=5)
    make_char_tokenizer(path, label_task.CHARS)
    (path / "rubric.jinja").write_text(judge.RUBRIC)

    def job(name: str, reward: str, key: str) -> runs.Job:
        words = {"model": path, "rubric": path / "rubric.jinja", "good": "*", "bad": "-"}
        keys = [w for k, v in words.items() for w in (f"--{key}.{k}", v)]
        keys += [
            "--run.steps",
            2 if name == "alone" else 1,
            "--reward",
            reward,
            f"--{key}.dtype",
            "float32",
        ]
        return {"name": name, "argv": runs.arguments(model, folder / "runs", name, *keys)}

    jobs = [job("alone", "judge", "reward"), job("sum", "exact:2,judge:0.5", "reward.judge")]
    gang = runs.run(1, jobs, folder / "gang")
    for name in ("alone", "sum"):
        gang.check(name)
    return gang


def test_a_step_is_trained_on_the_judges_verdicts_and_shows_what_it_did(gang):
    rows = runs.rows(gang.folder.parent / "runs" / "alone")
    for step in (1, 2):
        row = rows[step]
        assert 0 < row["critic/score/min"] < row["critic/score/max"] < 1
        assert row["reward/errors"] == 0 and row["reward/judge_streamed_layers"] == 2
        assert row["reward/judge_batch_rows"] > 1 and row["reward/judge_prefill_tokens_per_s"] > 0
        assert 0 < row["reward/judge_mass"] < 1 and 0 <= row["reward/judge_cached"] < 1
    assert "judge: " in gang.text("alone") and "float32, prefill, on cpu" in gang.text("alone")


def test_in_a_sum_the_judge_has_its_weight(gang):
    row = runs.rows(gang.folder.parent / "runs" / "sum")[1]
    total = 2 * row["reward/exact"] + 0.5 * row["reward/judge"]
    assert row["critic/score/mean"] == pytest.approx(total, abs=1e-6)
    assert 0 < row["reward/judge"] < 1 and row["reward/judge/judge_streamed_layers"] == 2


def test_a_judge_starts_once_the_engine_has_taken_its_memory(tmp_path: Path):
    """An engine sizes its cache by free memory, so a judge must not load at the same time."""
    model = runs.tiny_model(tmp_path / "model")
    path = tiny_hf_folder(tmp_path / "judge", vocab_size=len(label_task.VOCAB))
    make_char_tokenizer(path, label_task.CHARS)
    keys = ("--rollout.process", "child", "--reward", "judge", "--reward.model", path)
    words = ("--reward.good", "*", "--reward.bad", "-")
    cfg = parse(runs.arguments(model, tmp_path, "run", *keys, *words))
    with ExitStack() as closing:
        start = BuildContext(
            cfg=cfg,
            world=World(0, 1, 0, torch.device("cpu"), None),
            hf=HFConfig.from_folder(model),
            folder=tmp_path,
            spans=Spans(),
            progress=Progress(),
            closing=closing,
        )
        scorer, engine, _ = rollout._make_sampler(start, load_tokenizer(model), None, lambda: None)
        closing.callback(scorer.close)
        closing.callback(engine.close)
        assert not engine.is_starting(0.0) and not engine.failure


@pytest.mark.slow
@pytest.mark.timeout(900)  # 45 s of CPU time, on a machine that others may use
def test_the_tiny_judge_learns_its_rule_and_says_it_of_responses(tmp_path: Path):
    from rlcore.rewards.judge.config import JudgeRewardConfig
    from rlcore.rewards.service import RewardService
    from tests.contracts.reward_contract import prompt_of, sample_of, score_all

    path = tmp_path / "judge"
    agreement, _ = judge.make(judge.JudgeConfig(out=path))
    assert agreement > 0.98
    cfg = JudgeRewardConfig(
        model=str(path),
        rubric=str(path / "rubric.jinja"),
        good=("*",),
        bad=("-",),
        dtype="float32",
    )
    rows = [label_task.make("val", 0, i) for i in range(100)]
    with RewardService("judge", config=cfg) as service:
        for i, row in enumerate(rows):
            wrong = row.demonstration[:-1] + str((int(row.demonstration[-1]) + 1) % 10)
            for name, text in (("right", row.demonstration), ("wrong", wrong)):
                service.submit(f"{name}.{i}", sample_of(name), prompt_of(row.answer), text)
        found = score_all(service)
    right = sum(found[f"right.{i}"].score > 0.5 for i in range(100))
    wrong = sum(found[f"wrong.{i}"].score < 0.5 for i in range(100))
    assert right + wrong >= 196
