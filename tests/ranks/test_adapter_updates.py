"""`--lora.weight_update adapters`: ranks exchange A and B alone, and engines get the same weights
as if all had been sent."""

from pathlib import Path
from typing import Any

import pytest

from tests import kit, runs
from tests.ranks.adapter_ranks import ROUTES

pytestmark = pytest.mark.ranks(4)

LORA = {"rank": 2, "alpha": 6.0}
CASES: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"layout": {"tp": 2, "pp": 2}, "lora": LORA},
    "dp4": {"layout": {}, "lora": LORA | {"targets": ("q_proj", "down_proj"), "rs": True}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = kit.tiny_hf_folder(tmp_path_factory.mktemp("adapters") / "m", "qwen2")
    args = {"folder": str(folder), "cases": CASES}
    return kit.run_ranks(4, "tests.ranks.adapter_ranks:sent", args)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("route", ROUTES)
def test_engines_get_the_same_weights_from_fewer_bytes(
    found: list[dict[str, Any]], case: str, route: str
) -> None:
    for rank in found:
        merged, alone = (rank[f"{case} {route} {kind}"] for kind in ("merged", "adapters"))
        assert merged["apart"] == 0 and alone["apart"] < 1e-6
        assert 0 < alone["bytes"] < merged["bytes"] / 2  # matrices of this model are small
        if route == "two_stage" and case != "dp4":  # there each site has all weights
            assert 0 < alone["slow_bytes"] < merged["slow_bytes"] / 2


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_samples_the_same_with_adapters_alone(tmp_path: Path, apart: bool) -> None:
    """Rewards depend on what is sampled, so equal ones need equal weights."""
    model = runs.tiny_model(tmp_path / "model")
    kit.random_weights(model)
    keys: tuple[object, ...] = "--lora.rank", 4, "--train.lr", 1e-2, "--debug.deterministic_order"
    keys += "--eval.no_at_start", "--eval.no_at_end", "--checkpoint.no_export_hf"
    if apart:
        keys += "--cluster.rollout_ranks", 1
    jobs: list[runs.Job] = []
    for kind in ("merged", "adapters"):
        argv = runs.arguments(model, tmp_path / "runs", kind, *keys, "--lora.weight_update", kind)
        argv = [word for word in argv if word != "--model.random_init"]
        jobs.append({"name": kind, "argv": argv, "ranks": 2 if apart else 1})
    gang = runs.run(2 if apart else 1, jobs, tmp_path / "gang")
    for kind in ("merged", "adapters"):
        gang.check(kind, 2 if apart else 1)
    merged, alone = (runs.rows(tmp_path / "runs" / kind) for kind in ("merged", "adapters"))
    assert merged.keys() == alone.keys() == {1, 2, 3, 4}
    for step, row in merged.items():
        assert alone[step]["critic/score/mean"] == pytest.approx(row["critic/score/mean"])
        assert alone[step]["response_length/mean"] == row["response_length/mean"]
        assert alone[step]["sync/bytes"] < row["sync/bytes"]
