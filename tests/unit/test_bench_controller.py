"""tools/bench_controller.py, in small."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(
        "bench_controller", ROOT / "tools" / "bench_controller.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_controller"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_controller"]


def test_rounds_end_and_every_event_has_its_time_beside_the_empty_loop(tool, tmp_path, capsys):
    file = tmp_path / "out.json"
    sizes = {"replicas": 4, "prompts": 8, "samples": 4, "rounds": 6, "median": 200}
    small = [word for key, n in sizes.items() for word in (f"--{key}", str(n))]
    assert tool.main([*small, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["live requests"]["value"] == 10 * 5
    assert rows["events"]["value"] > 6 * 10 * 5
    for kind in ("event", "ready", "lengthreport", "stats", "finished", "rewarded", "aborted"):
        row = rows[f"{kind} p50"]
        assert row["value"] > 0 and row["baseline"] > 0
        assert row["ratio"] == row["value"] / row["baseline"]
    assert rows["memory by request"]["value"] > 50
    assert found["settings"]["seed"] == 0
    assert "median event" in capsys.readouterr().out


def test_the_same_seed_has_the_same_events(tool):
    def events(seed: int) -> list[str]:
        a = tool.parse(["--replicas", "3", "--prompts", "4", "--samples", "2"])
        die = tool.random.Random(seed)
        found = tool.one_round(a, tool.source(a), die, tool.Timed())
        return [f"{type(e).__name__} {e.rank} {getattr(e, 'id', '')}" for e in found]

    assert events(1) == events(1)
    assert events(1) != events(2)
