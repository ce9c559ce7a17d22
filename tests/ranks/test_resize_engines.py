"""The whole program while its SGLang engines change their size: two engines over a rank each, one
over both, two again."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks(2),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]

SCORES = ("critic/score/mean", "critic/score/std_err", "response_length/mean")


def test_engines_that_change_their_size_sample_the_same(tmp_path: Path) -> None:
    model = runs.tiny_model(tmp_path / "model")
    common = (
        *("--run.steps", 3, "--eval.no_at_start", "--eval.no_at_end", "--sync.route", "intranode"),
        *("--checkpoint.every", 1, "--checkpoint.keep", 0, "--checkpoint.no_export_hf"),
        *("--rollout.max_tokens", 60, "--rollout.max_running_requests", 8),
    )
    sizes = (
        *("--rollout.engine", "sglang", "--debug.rollout_tp", 1, 2, 1),
        *("--cluster.timeout_s", 300),
        # Two engines may train early, one over both ranks may not.
        *("--mode", "stream", "--rollout.kv_cache_tokens", 2048),
    )
    jobs = [
        {"name": name, "argv": runs.arguments(model, tmp_path, name, *common, *more)}
        for name, more in (("changes", sizes), ("stays", ()))
    ]
    gang = runs.run(2, jobs, tmp_path / "gang", timeout_s=540)
    for job in jobs:
        gang.check(job["name"], 2)
    changes, stays = (runs.rows(tmp_path / job["name"]) for job in jobs)
    assert [changes[n]["sched/rollout_tp"] for n in (1, 2, 3)] == [1, 2, 1]
    for step in (1, 2, 3):
        for name in SCORES:
            assert changes[step][name] == pytest.approx(stays[step][name], rel=1e-9), (step, name)
        assert changes[step]["actor/loss"] == pytest.approx(stays[step]["actor/loss"], rel=1e-3)
        assert "sched/engines_down" not in changes[step]
    assert "sched/stream_at" not in changes[2]
    assert changes[1]["timing_s/resize_engines"] > 0 and changes[2]["timing_s/resize_engines"] > 0
    assert "timing_s/resize_engines" not in changes[3]  # nothing comes after it
    said = gang.text("changes")
    assert "rollout engines: tp 1 -> 2" in said and "rollout engines: tp 2 -> 1" in said
    assert "Traceback" not in said
    state = tmp_path / "changes" / "checkpoints" / "step_000002" / "state.json"
    assert json.loads(state.read_text())["sizes"] == {"FixedSizes": {"rounds": 2}}
