"""Settings with which `rlcore eval RUN` evaluates a run of any recipe."""

from pathlib import Path

import pytest

from rlcore.cli.eval import _evaluates, _words
from rlcore.cli.settings import parse
from rlcore.config import resolve, rules

BASE = ("--model.path", "m", "--data.train", "a", "--data.val", "b")


@pytest.mark.parametrize(
    "words",
    [
        "--algo opd --teacher.models t --rollout.samples_per_prompt 1",
        "--algo opd --teacher.models t --data.teacher_prompt_field hint",
        "--algo gkd --teacher.models t --data.demonstrations d --data.demonstration_share 0.4",
        "--mode async --cluster.rollout_ranks 1 --rollout.draft history"
        " --rollout.routing histopipe",
        "--reward code",
    ],
)
def test_what_only_training_needs_does_not_refuse_an_evaluation(words: str, tmp_path: Path) -> None:
    cfg = parse([*BASE, *words.split(), "--data.answer_field", ""])
    resolve.save(cfg, tmp_path / "config.json")
    found = _evaluates(parse(_words(tmp_path)), str(tmp_path))
    assert rules.broken(found) == []
    assert found.data.answer_field == "" and found.data.val == ("b",)
