"""Weights from the trainer's shards to engines, over every route, in gangs of ranks on the CPU."""

from typing import Any

import pytest

from rlcore.records import Shard
from rlcore.sync import layout
from tests import kit
from tests.ranks.sync_ranks import LAYOUTS, MAX_BYTES, SITES, digest

RANKS = "tests.ranks.sync_ranks"
ALL = [(arch, name) for arch in LAYOUTS for name in LAYOUTS[arch]]
ROUTES = ("gather", *SITES, "nodes of two, in one exchange")


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """Digests of what a single rank exports, by dtype."""
    return kit.run_ranks(1, f"{RANKS}:exported")[0]


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("sync"))
    return kit.run_ranks(4, f"{RANKS}:learners", {"folder": folder}, timeout_s=280)


# ---- shards


@pytest.fixture(scope="module")
def shards(learners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["shards"] for rank in learners]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("arch", "name"), ALL)
def test_every_shard_is_its_slice_of_the_exported_tensor_and_a_view(
    shards: list[dict[str, Any]], arch: str, name: str
) -> None:
    for rank in shards:
        found = rank[f"{arch} {name}"]
        assert found["rows"] and not found["wrong"] and not found["copies"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("arch", "name"), ALL)
def test_the_shards_of_all_ranks_tile_every_tensor(
    shards: list[dict[str, Any]], arch: str, name: str
) -> None:
    """The plan refuses gaps, overlaps and a shard that a rank gives twice."""
    found = [rank[f"{arch} {name}"] for rank in shards]
    sizes = LAYOUTS[arch][name]
    experts = sizes.get("ep", 1) * sizes.get("etp", 1) > 1  # then no replica has all experts
    groups = {tuple(range(4)) if experts else tuple(f["replica"]) for f in found}
    for ranks in groups:
        holdings = {rank: [shard(row) for row in found[rank]["rows"]] for rank in ranks}
        plan = layout.plan(holdings, [ranks], ranks, MAX_BYTES)
        names = [meta.name for load in plan.loads for meta in load.tensors]
        assert sorted(names) == sorted(found[0]["names"])


def shard(row: list[Any]) -> Shard:
    name, shape, dim, start, stop = row
    return Shard(name=name, dtype="float32", shape=tuple(shape), dim=dim, start=start, stop=stop)


# ---- routes


@pytest.fixture(scope="module")
def colocated(learners: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank["colocated"] for rank in learners]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("route", ROUTES)
def test_engines_beside_a_tp2_pp2_trainer_get_the_export_of_one_rank_bit_by_bit(
    alone: dict[str, str], colocated: list[dict[str, Any]], route: str
) -> None:
    for rank in colocated:
        found = rank[route]
        assert found["digest"] == alone["bfloat16"] and found["version"] == 3
        assert len(found["buckets"]) > 3 and max(found["buckets"]) <= MAX_BYTES
        assert found["figures"]["bytes"] == sum(found["buckets"])
        assert found["figures"]["time_s"] > 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("route", ("gather", *SITES))
def test_engines_of_two_ranks_beside_a_tp4_trainer_get_the_same_bits(
    alone: dict[str, str], colocated: list[dict[str, Any]], route: str
) -> None:
    """The leader takes them, a payload for each of its ranks; the engine slices for itself."""
    for rank, found in enumerate(colocated):
        came, payloads = found["engines of two ranks"][route]
        if rank % 2:
            assert came == digest({}) and not payloads
        else:
            assert came == alone["bfloat16"]
            assert len(payloads) > 3 and set(payloads) == {2}


@pytest.mark.ranks(4)
def test_biases_of_routers_arrive_in_float32(colocated: list[dict[str, Any]]) -> None:
    for rank in colocated:
        for route in ("gather", "intranode"):
            assert rank["biases"][route] == [["torch.float32"] * 3, [0.0] * 3], route


def test_a_second_push_carries_the_weights_that_have_moved(
    alone: dict[str, str], colocated: list[dict[str, Any]]
) -> None:
    again = [rank[f"{route} again"] for rank in colocated for route in ROUTES]
    assert len({found["digest"] for found in again}) == 1
    assert again[0]["digest"] != alone["bfloat16"]
    assert {found["version"] for found in again} == {4}


@pytest.mark.ranks(4)
def test_what_a_node_lacks_enters_it_once(colocated: list[dict[str, Any]]) -> None:
    """Stage 0 is on node 0 and stage 1 on node 1, so each lacks the other's half."""
    one, two = (colocated[0][name]["figures"] for name in ("one node", "nodes of two"))
    assert one["slow_bytes"] == 0
    assert two["slow_bytes"] == pytest.approx(two["bytes"], rel=0.01)
    for rank in colocated:
        for name in ROUTES[1:]:
            assert 0 < rank[name]["figures"]["transient_gb"] <= 2.1 * MAX_BYTES / 1e9


@pytest.mark.ranks(4)
def test_rollout_ranks_in_another_cluster_get_one_copy_and_the_same_bits(
    alone: dict[str, str], learners: list[dict[str, Any]]
) -> None:
    found = [rank["disjoint"] for rank in learners]
    assert [f.get("digest") for f in found] == [None, None, alone["float32"], alone["float32"]]
    assert [f.get("version") for f in found] == [None, None, 2, 2]
    for f in found:
        assert f["figures"]["slow_bytes"] == pytest.approx(f["figures"]["bytes"], rel=0.01)
        assert f["figures"]["transient_gb"] <= 2.1 * MAX_BYTES / 1e9


# ---- engines of two ranks


@pytest.mark.ranks(4)
def test_the_leader_of_an_engine_of_two_ranks_takes_a_payload_for_each() -> None:
    found = kit.run_ranks(4, f"{RANKS}:mixed")
    for rank, f in enumerate(found):
        if rank % 2:
            assert f["came"] == "nothing" and not f["payloads"]
            assert not f["relay handles"] and not f["gather handles"]
            assert f["two_stage files"] == f["gather files"] == [[False, False], []]
            continue
        assert f["came"] is True and set(f["payloads"]) == {2} and f["same file"]
        pair = [f"rank {r}, 1024 bytes".encode() for r in (rank, rank + 1)]
        assert f["relay handles"] == f["gather handles"] == [pair] * 6
        assert f["two_stage files"] == f["gather files"] == [[True, True], [2]]


# ---- failures


@pytest.fixture(scope="module")
def trouble() -> list[dict[str, Any]]:
    return kit.run_ranks(3, f"{RANKS}:trouble")


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("stage", "who"),
    [(0, "data received by rank 1 from rank 0"), (1, "data received by rank 2 from rank 1")],
)
def test_damage_on_the_way_is_named_on_every_rank_and_a_whole_push_repairs_it(
    trouble: list[dict[str, Any]], stage: int, who: str
) -> None:
    for rank, found in enumerate(trouble):
        assert found[f"damage {stage} before"][0] == found[f"damage {stage} after"][0] == ""
        error, _, usable, _ = found[f"damage {stage}"]
        assert error == trouble[0][f"damage {stage}"][0]
        assert (
            error.startswith("WeightUpdateError: weight update 2: bucket 1 of 6 (w2 ...)")
            and who in error
        )
        assert rank == 0 or not usable
        assert rank == 0 or found[f"damage {stage} after"][2:] == [True, True]


@pytest.mark.ranks(3)
def test_a_rank_that_comes_late_is_named_and_leaves_no_engine_usable(
    trouble: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(trouble):
        error, _, usable, _ = found["late"]
        assert error.startswith("WeightUpdateTimeoutError: weight update 2: rank ")
        assert "waited 2 s for rank 2 to enter" in error
        assert error == trouble[0]["late"][0]
        assert rank == 0 or not usable
        assert found["late after"][0] == ""
        assert rank == 0 or found["late after"][2:] == [True, True]


@pytest.mark.ranks(3)
def test_a_rank_that_stops_in_the_middle_is_named_with_the_bucket(
    trouble: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(trouble):
        error, _, usable, _ = found["stuck"]
        assert error.startswith("WeightUpdateTimeoutError: weight update 2: bucket ")
        assert "waited 3 s for rank 1" in error and error == trouble[0]["stuck"][0]
        assert rank == 0 or not usable
        assert found["stuck after"][0] == ""
        assert rank == 0 or found["stuck after"][2:] == [True, True]


@pytest.mark.ranks(3)
def test_a_rank_that_dies_in_the_middle_is_named(trouble: list[dict[str, Any]]) -> None:
    one, two, three = [found["death"] for found in trouble]
    assert three == "died"
    for error, _, _, _ in (one, two):
        assert (
            error.startswith("WeightUpdateError: weight update 2: bucket ")
            and "rank 2 has exited" in error
        )
        assert error == one[0]
    assert not two[2]
