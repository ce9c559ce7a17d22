"""tools/baselines.py: what counts as a difference."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlcore.cli import settings
from tests.kit import ROOT


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    import baselines

    yield baselines
    del sys.modules["baselines"]


SAMPLES = [
    {"step": 1, "id": "t0.0", "prompt": "a", "response": "b", "score": 1.0, "num_tokens": 1},
    {"step": 1, "id": "t0.1", "prompt": "a", "response": "c", "score": 0.0, "num_tokens": 1},
]


def run_folder(folder: Path, **metrics: float) -> Path:
    """What a run of one step leaves."""
    (folder / "hf").mkdir(parents=True)
    row = {"step": 1, "actor/loss": 0.1, "timing_s/step": 3.0} | metrics
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    lines = [json.dumps(sample | {"finish": "stop"}) for sample in SAMPLES]
    (folder / "rollouts.jsonl").write_text("\n".join(lines))
    save_file({"w": torch.ones(3)}, folder / "hf" / "model.safetensors")
    return folder


def test_the_clock_ids_and_order_are_no_difference(tool: Any, tmp_path: Path) -> None:
    case = tool.Case("grpo_tiny")
    one = tool._facts(case, run_folder(tmp_path / "one"))
    folder = run_folder(tmp_path / "two", **{"timing_s/step": 9.0, "perf/new": 1.0})
    lines = [json.dumps(s | {"finish": "stop", "id": s["id"] + "x"}) for s in SAMPLES[::-1]]
    (folder / "rollouts.jsonl").write_text("\n".join(lines))
    assert tool.differences(case, {"a": one}, {"a": tool._facts(case, folder)}) == []


def test_the_last_bit_of_a_metric_a_sample_and_a_weight_are_differences(
    tool: Any, tmp_path: Path
) -> None:
    case = tool.Case("grpo_tiny")
    then = {"a": tool._facts(case, run_folder(tmp_path / "one"))}
    folder = run_folder(tmp_path / "two", **{"actor/loss": 0.1 + 2e-17})
    text = (folder / "rollouts.jsonl").read_text()
    (folder / "rollouts.jsonl").write_text(text.replace('"c"', '"d"'))
    save_file({"w": torch.tensor([1, 1, 1.0000001])}, folder / "hf" / "model.safetensors")
    now = {"a": tool._facts(case, folder)}
    assert tool.differences(case, then, now) == [
        "a: step 1: actor/loss is 0.10000000000000002, was 0.1",
        "a: step 1: samples differ",
        "a: weights: the checksum differs",
    ]
    loose = tool.Case("grpo_tiny", rtol=1e-5)
    assert tool.differences(loose, then, now) == ["a: step 1: samples differ"]
    loose = tool.Case("grpo_tiny", rtol=1e-5, samples=False)
    assert tool.differences(loose, then, now) == []
    now["a"]["metrics"]["actor/loss"] = [0.1001]
    assert len(tool.differences(loose, then, now)) == 1


def test_a_renamed_metric_is_found_and_a_lost_one_is_a_difference(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = tool.Case("grpo_tiny")
    then = {"a": tool._facts(case, run_folder(tmp_path / "one"))}
    now = copy.deepcopy(then)
    now["a"]["metrics"]["actor/pg"] = now["a"]["metrics"].pop("actor/loss")
    (said,) = tool.differences(case, then, now)
    assert "actor/loss is missing; if it was renamed, add it to RENAMED" in said
    for renamed in ("actor/pg", ""):
        monkeypatch.setitem(tool.RENAMED, "actor/loss", renamed)
        assert tool.differences(case, then, now) == []


def test_a_processor_without_baselines_is_told_what_to_record(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tool, "processor", lambda: "another one")
    command = ["compare", "main", "--dir", str(tmp_path)]
    assert tool.main(command) == 2
    said = capsys.readouterr().err
    assert "there is none of main for this processor (another one)" in said
    assert "python tools/baselines.py record --commit " in said


def test_every_case_has_a_recipe_keys_that_exist_and_a_baseline(tool: Any) -> None:
    for name, case in tool.CASES.items():
        assert (ROOT / "recipes" / f"{case.recipe}.sh").is_file()
        settings.parse([str(word) for word in case.keys])
        assert list(tool.BASELINES.glob(f"*/{name}.json")), name
