"""tools/fuzz_configs.py: what is not accepted is refused in a sentence, and the tool notices what
is not."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rlcore.cli import settings
from rlcore.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "fuzz_configs.py"
    spec = importlib.util.spec_from_file_location("fuzz_configs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_configs"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_configs"]


def check(report) -> None:
    told = "\n".join(f"{f['kind']}: {f['what']}\n  {f['about']}" for f in report.findings)
    assert not report.findings, told


def test_random_configurations_and_data_are_accepted_or_refused_in_a_sentence(tool, tmp_path):
    report = tool.fuzz(80, 0, 120, 1, tmp_path)
    check(report)
    for kind in ("configs", "data"):  # else the cases say little
        assert min(report.counts[f"{kind}: {word}"] for word in ("accepted", "refused")) > 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_of_each_and_twenty_runs(tool, tmp_path):
    check(tool.fuzz(10_000, 20, 10_000, 2, tmp_path))


def test_the_tool_notices_what_is_no_refusal(tool, monkeypatch, tmp_path):
    def broken(argv):
        raise KeyError("data")

    monkeypatch.setattr(settings, "parse", lambda argv: (_ for _ in ()).throw(ConfigError("")))
    report = tool.Report()
    report.case("configs", "x", lambda: tool.resolve_and_dry_run([]))
    monkeypatch.setattr(settings, "parse", broken)
    report.case("configs", "y", lambda: tool.resolve_and_dry_run([]))
    what = [f["what"] for f in report.findings]
    assert what[0] == "refused without a word" and what[1].startswith("KeyError('data') at")
    with pytest.raises(tool.Finding, match="a traceback"):
        tool.must_be_sentences('Traceback (most recent call last):\n  File "x"', "refused")
