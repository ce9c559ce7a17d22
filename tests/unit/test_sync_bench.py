"""tools/bench_sync.py: small runs of it, and what it says where it cannot run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import bench_sync  # noqa: E402


def rows(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """By name."""
    file = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "tools" / "bench_sync.py", "--json", file, "--rounds", "1"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in json.loads(file.read_text())}


@pytest.mark.ranks(4)
def test_two_stage_takes_one_copy_over_a_slow_link_and_flat_one_for_every_receiver(
    tmp_path: Path,
) -> None:
    if reason := bench_sync.unavailable():
        pytest.skip(reason)
    before = set(os.listdir("/sys/class/net"))
    plot = tmp_path / "rows.png"
    found = rows(
        tmp_path, *("--part", "link", "--pairs", "2", "--mib", "2", "--mbit", "80"), "--plot", plot
    )
    assert found["2:2 two_stage slow_bytes"]["value"] == 1
    assert 1 < found["2:2 two_stage over the link"]["value"] < 1.15  # headers, acknowledgements
    assert 2 < found["2:2 flat over the link"]["value"] < 2.3
    assert found["2:2 flat time"]["baseline"] == "two_stage"
    assert plot.stat().st_size > 0
    assert set(os.listdir("/sys/class/net")) == before


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_both_routes_carry_the_same_bytes_in_a_node(tmp_path: Path) -> None:
    found = rows(tmp_path, *("--part", "node", "--hidden", "128", "--layers", "2"))
    assert found["node gather bytes"]["value"] == found["node intranode bytes"]["value"] > 0
    assert found["node intranode time"]["baseline"] == "gather"


def test_a_push_makes_one_call_for_each_of_250_buckets_and_has_three_under_way(
    tmp_path: Path,
) -> None:
    found = rows(tmp_path, *("--part", "engine", "--bucket-mib", "0.01", "--copy-ms", "0.1"))
    for name in ("250 x 0.01 MiB", "250 x 0.1 ms"):
        assert found[f"{name} calls"]["value"] == 250
        assert found[f"{name} buckets under way"]["value"] == 3
        assert found[f"{name} push"]["baseline"] == "copies"


def test_what_is_missing_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sync.shutil, "which", lambda tool: None)
    assert bench_sync.unavailable() == ("ip and tc not found; install the Debian package iproute2")
    monkeypatch.setattr(bench_sync.shutil, "which", lambda tool: "/bin/" + tool)
    monkeypatch.setattr(bench_sync.os, "geteuid", lambda: 1000)
    assert "need root" in bench_sync.unavailable()


def test_a_namespace_that_is_refused_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(mbit: float) -> Any:
        raise RuntimeError("unshare: Operation not permitted")

    monkeypatch.setattr(bench_sync.shutil, "which", lambda tool: "/bin/" + tool)
    monkeypatch.setattr(bench_sync.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bench_sync, "clusters", refused)
    assert "Operation not permitted" in bench_sync.unavailable()
