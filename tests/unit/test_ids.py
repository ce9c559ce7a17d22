"""Ids of groups and requests are made and read in `records.py` alone."""

import re
from pathlib import Path

import pytest

import rlcore
from rlcore import records

ROOT = Path(rlcore.__file__).parent
READS = (
    r"\b\w*(id|group|request|ref)\b(\[\"id\"\]\))?\.(r?partition|r?split|removeprefix|startswith)\("
)
MAKES = r"\bid=f\""
OTHERS = {
    "sched/phase_mux.py": "jobs of a cluster",
    "sched/cluster.py": "jobs of a cluster",
    "sim/rollmux.py": "jobs of a cluster",
    "rollout/sglang_engine/engine.py": "SGLang's own ids",
    "utils/nvidia.py": "GPUs, which CUDA_VISIBLE_DEVICES may name by a part of their ids",
}


def odd(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if re.search(f"{READS}|{MAKES}", line)]


def test_no_module_makes_or_parses_ids() -> None:
    found = {
        name: lines
        for path in sorted(ROOT.rglob("*.py"))
        if (name := str(path.relative_to(ROOT))) not in ("records.py", *OTHERS)
        and (lines := odd(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'group, _, k = request.id.rpartition(".")',
        'index = group_id.split(".")[1]',
        'base = greedy[g.id.removeprefix("b")]',
        'work = Work(id=f"t{n}", prompt=prompt)',
    ],
)
def test_it_would_be_found(line: str) -> None:
    assert odd(line)


def test_what_is_made_is_read_again() -> None:
    group = records.training_group(12)
    request = records.request_of(group, 3)
    assert (records.group_of(request), records.response_of(request)) == ("t12", 3)
    greedy = records.baseline_of(group)
    assert records.is_baseline(greedy) and not records.is_baseline(group)
    assert records.without_baseline(greedy) == group
    assert records.issue_of(group) == records.issue_of(greedy) == 12
    one = records.eval_group("e40", 1, 7)
    assert records.eval_set_of(one) == 1 and records.group_of(records.request_of(one, 0)) == one
    assert records.turn_of(request, 0) == request != records.turn_of(request, 2)
