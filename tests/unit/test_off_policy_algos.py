"""tools/studies/off_policy_algos.py with made-up runs: its arms, means, errors, table and picture.

Not covered: the runs themselves."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.cli import settings
from rlcore.config import rules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    path = ROOT / "tools/studies/off_policy_algos.py"
    spec = importlib.util.spec_from_file_location("off_policy_algos", path)
    assert spec and spec.loader
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


def row(arm: str, condition: str, seed: int, end: float, k3: float = 0.01) -> dict[str, Any]:
    names: dict[str, Any] = {"arm": arm, "condition": condition, "seed": seed}
    names["name"] = f"{arm}, {condition}, seed {seed}"
    return names | {"value": end, "baseline": 0.5, "staleness": 3.9, "k3": k3}


def test_the_configuration_takes_every_arm_under_every_condition(tool: Any) -> None:
    for algo, keys in tool.ARMS.values():
        for processes, where in tool.CONDITIONS.values():
            cfg = settings.parse(["--algo", algo, *tool.SIZES, *where, *keys])
            assert cfg.select.algo == algo and not rules._algo(cfg)
            assert (cfg.select.mode == "async") == (processes == 2)
    on_policy = settings.parse(tool.CONDITIONS["on-policy"][1])
    assert on_policy.rollout.quantize == "none"


def test_a_difference_is_paired_with_the_same_seeds_on_policy(tool: Any) -> None:
    rows = [row("a", "on-policy", s, end) for s, end in enumerate((0.7, 0.8, 0.9))]
    rows += [row("a", "int3", s, end) for s, end in enumerate((0.6, 0.6, 0.9))]
    rows += [row("b", "int3", 0, 0.5)]
    normal, int3, alone = tool.over_seeds(rows)
    assert normal["accuracy"] == pytest.approx(0.8) and normal["num_seeds"] == 3
    assert normal["std_err"] == pytest.approx(0.1 / math.sqrt(3))
    assert int3["accuracy"] == pytest.approx(0.7)
    assert int3["paired"] == pytest.approx(-0.1)  # of -.1, -.2 and 0
    assert int3["paired_std_err"] == pytest.approx(0.1 / math.sqrt(3))
    assert alone["std_err"] == pytest.approx(0.5 / 32)  # of 1,024 prompts
    assert math.isnan(alone["paired"])


def test_table_file_and_picture_have_every_arm_and_condition(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_up(folder: Path, arm: str, condition: str, seed: int, steps: int) -> dict[str, Any]:
        k3 = math.nan if condition == "on-policy" and seed else 0.01
        return row(arm, condition, seed, 0.7 if arm == "grpo" else 0.65, k3)

    monkeypatch.setattr(tool, "warm_start", lambda folder, seed: None)
    monkeypatch.setattr(tool, "row", made_up)
    words = ["x", "--arms", "grpo", "gpg", "--seeds", "0", "1", "--json", str(tmp_path / "o.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert tool.main() == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["rows"]) == 16 and len(found["cells"]) == 8
    lines = (tmp_path / "o.md").read_text().splitlines()
    assert lines[0] == "| algorithm | on-policy | alpha 4 | alpha 8 | int3 |"
    assert lines[2] == "| grpo |" + " 0.700 +- 0.000 (+0.000 +- 0.000; 2 seeds) |" * 4
    assert lines[3] == "| gpg |" + " 0.650 +- 0.000 (-0.050 +- 0.000; 2 seeds) |" * 4
    assert "Start: 0.500 (seed 0), 0.500 (seed 1)." in lines[5]
    assert lines[-1] == "- int3: staleness 3.90 versions, k3 1.0e-02 to 1.0e-02"
    assert (tmp_path / "o.png").stat().st_size > 10_000

    more = ["--conditions", "int3", "--earlier", str(tmp_path / "o.json"), "--seeds", "1", "2"]
    monkeypatch.setattr(sys, "argv", ["x", "--arms", "grpo", "gpg", *more, "--json", words[-1]])
    assert tool.main() == 0
    found = json.loads((tmp_path / "o.json").read_text())
    assert len(found["rows"]) == 18 and {c["num_seeds"] for c in found["cells"]} == {2, 3}
