"""tools/bench_endpoint.py, in small."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--episodes", "3", "--turns", "2", "--words", "3", "--every-s", "0.01"]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_endpoint.py"
    spec = importlib.util.spec_from_file_location("bench_endpoint", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_endpoint"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_endpoint"]


def test_every_server_and_load_has_its_rows(tool, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert tool.main([*SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {f"{kind} {load} {what}" for kind in ("whole", "stream") for load in ("full", "paced")
            for what in ("cpu", "p50", "p99", "rate")} | {"body"} == rows.keys()  # fmt: skip
    assert all(row["value"] >= 0 for row in found["rows"])
    assert rows["whole full p50"]["value"] <= rows["whole full p99"]["value"]
    assert found["settings"] == {"episodes": 3, "turns": 2, "words": 3, "every_s": 0.01, "seed": 0}
    assert "whole full p99" in capsys.readouterr().out


def test_a_seed_has_its_texts_and_requests_grow(tool):
    def texts(seed: str) -> list[bytes]:
        return tool.bodies(tool.parse([*SMALL, "--seed", seed]), stream=False)

    assert texts("1") == texts("1") != texts("2")
    first, second = (json.loads(body)["messages"] for body in texts("1"))
    assert len(first) == 2 and second[:2] == first and len(second) == 4
