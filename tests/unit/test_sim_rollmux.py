"""RollMux's experiments: what must hold in every one, whatever was published."""

import json
import math
import statistics
from pathlib import Path

import pytest

from rlcore.cli import sim
from rlcore.sched.cluster import Cluster, MuxJob, NodePool
from rlcore.sched.phase_mux import Member
from rlcore.sim import mux_drift, mux_trace, published_rollmux, rollmux
from rlcore.sim.cost import EngineCost
from rlcore.sim.mux_group import ROLLOUT, TRAIN, Iteration, MuxSimulation, VirtualJob
from rlcore.sim.mux_trace import Arrival, run_trace

POOLS = NodePool(price=14.8), NodePool(price=42.24)


def job(name: str, slo: float = 2.0) -> MuxJob:
    return MuxJob(id=name, rollout_nodes=1, train_nodes=1, rollout_s=100, train_s=100, slo=slo)


def rows_of(experiment: str, path: Path, *more: str) -> dict[str, float]:
    argv = ["rollmux", "--experiment", experiment, "--json", str(path), *more]
    assert sim.main(argv) == 0
    rows = json.loads(path.read_text())["rows"]
    assert all({"cell", "published", "simulated", "error", "kind"} <= set(r) for r in rows)
    return {r["cell"]: r["simulated"] for r in rows}


def test_two_jobs_that_fit_cost_as_much_as_one():
    """100 s + 100 s, twice: both take 200 s, on nodes that are never idle."""
    day = 24 * 3600.0
    arrivals = [Arrival(job("A"), 0.0, day), Arrival(job("B"), 0.0, day)]
    o = run_trace(Cluster(*POOLS), arrivals)
    assert (o.seconds, o.peak, o.kept, o.promised) == (day, (1, 1), 1.0, 1.0)
    assert o.bill == pytest.approx(57.04 * 24)
    assert o.idle == (pytest.approx(0), pytest.approx(0))
    apart = run_trace(Cluster(*POOLS, most_jobs=1), arrivals)
    assert apart.bill == pytest.approx(2 * o.bill)
    assert apart.idle == (pytest.approx(0.5), pytest.approx(0.5))


def test_a_job_that_comes_later_makes_the_first_one_slower_only_while_both_are_there():
    """With a switch of 10 s to each phase an iteration takes 220 s instead of 200."""
    pools = [NodePool(price=1, switch_s=10.0)] * 2
    arrivals = [Arrival(job("A"), 0.0, 2000.0), Arrival(job("B"), 1000.0, 500.0)]
    o = run_trace(Cluster(*pools), arrivals)
    both = 500.0 * 220 / 200
    assert o.seconds == pytest.approx(1000 + both + (1000 - both * 200 / 220))
    assert o.points[-1][1] == 0.0


def test_a_tail_that_moves_lets_the_next_job_start_once_all_of_its_nodes_are_free():
    """A samples 100 s on two nodes, and its tail of 40 s may move to r0. B samples 100 s on r1 and
    starts after 60 s then. If B needs r0 too, nothing is gained."""
    took = Iteration(rollout_s=100, train_s=1, tail_s=60, moved_s=40)

    def period(keep: int, *nodes: str) -> float:
        jobs = []
        for name, mine, kept in (("A", ("r0", "r1"), keep), ("B", nodes, 0)):
            member = Member(job=name, slots={ROLLOUT: mine, TRAIN: (f"t{name}",)}, keep=kept)
            jobs.append(VirtualJob(member=member, iteration=lambda _: took))
        return MuxSimulation(jobs).run(20).period("A", 5)

    assert period(0, "r1") == pytest.approx(200)
    assert period(1, "r1") == pytest.approx(160)
    assert period(1, "r0", "r1") == pytest.approx(200)


def test_jobs_on_one_node_cannot_migrate(tmp_path: Path):
    found = rows_of("migration", tmp_path / "a.json", "--rounds", "3")
    one = [gain for cell, gain in found.items() if cell.startswith("two jobs on one node")]
    assert len(one) == 4 and set(one) == {1.0}
    assert found["2 nodes, and a job on one, 14B/8k, tail keeps 1"] > 1


def test_a_shorter_iteration_loses_more_to_cold_starts():
    found = {r["cell"]: r["simulated"] for r in rollmux._group_sweeps(3, 0)[0]}
    for group in ("A+A", "D+D+E", "C+D+D"):
        lost = [
            found[f"{group}, {seconds:g} s an iteration alone: lost, cold"]
            for seconds in rollmux.SOLO_SWEEP
        ]
        assert lost == sorted(lost, reverse=True)


def test_two_stages_send_one_copy_over_the_slow_link():
    """10 GB at 2.5 GB/s take 4 s; 8 copies 32 s; a ring of 16 ranks carries 15/16 of 20 GB."""
    assert rollmux.weight_update_s("flat", 10, 8, 100) == 32
    assert rollmux.weight_update_s("ring", 10, 8, 100) == pytest.approx(7.5)
    assert rollmux.weight_update_s("two_stage", 10, 8, 100) == pytest.approx(4 + 0.0875)
    assert rollmux.weight_update_s("two_stage", 10, 16, 100) == pytest.approx(4 + 0.1 + 0.0875)


def test_finish_times_are_those_of_decoding_side_by_side():
    cost = EngineCost(step_s=1.0, sequence_s=0.5)
    assert rollmux.finish_times([4, 2], 10, cost) == pytest.approx([2 * 2.0, 2 * 2.0 + 2 * 1.5])


def test_the_price_of_the_published_groups_and_the_ceiling(tmp_path: Path):
    picture, turns = tmp_path / "a.png", tmp_path / "b.png"
    files = ["--picture", str(picture), "--timeline", str(turns)]
    found = rows_of("micro", tmp_path / "a.json", "--rounds", "6", *files)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (picture, turns))
    for group, price in (("A+A", 2.0), ("D+D+E", 1.975), ("C+D+D", 2.0)):
        assert found[f"{group}, bills alone / group"] == price
        assert 1.5 < found[f"{group}, over solo (v1)"] < price
        for pool in ("rollout", "train"):
            assert -1e-9 <= found[f"{group}, idle {pool}, group"] <= 1
    assert found["A+A, idle train, group"] < found["A+A, idle train, alone"] / 2


def test_the_bill_is_within_the_published_ratio_of_the_optimum(tmp_path: Path):
    """40 instances of each workload are in tools/results; three here."""
    found = rows_of("optimum", tmp_path / "a.json", "--rounds", "3")
    assert 1 <= found["bill / optimum, with moves, most of the workloads"] <= 1.12
    for arm in ("RollMux", "with moves"):
        assert found[f"SLO kept, {arm}, least"] == 1
        assert found[f"bill / optimum, {arm}, least of the workloads"] >= 1
    assert found["SLO kept, greedy, most"] < 1


def test_a_trace_keeps_every_promise_and_bills_every_job_once():
    trace = mux_trace.JobTrace(40, 60, {"S": 1.0, "M": 1.0})
    arrivals = mux_trace.draw_trace(trace, 0)
    hours = statistics.fmean(a.alone_s for a in arrivals) / 3600
    assert hours == pytest.approx(27.9)
    arms = rollmux._arms(arrivals, 0)
    for arm in ("RollMux", "with moves", "solo"):
        assert arms[arm].promised == arms[arm].kept == 1.0
        assert all(0 <= i <= 1 for i in arms[arm].idle)
    assert arms["RollMux"].bill < arms["solo"].bill
    bill = sum(
        a.alone_s / 3600 * (a.job.rollout_nodes * POOLS[0].price + a.job.train_nodes * 42.24)
        for a in arrivals
    )
    assert arms["solo"].bill == pytest.approx(bill)
    assert math.isclose(arms["solo"].kept, 1.0)


def test_a_cluster_of_jobs_that_drift():
    arrivals = mux_trace.draw_trace(mux_trace.JobTrace(25, 40, {"S": 1.0, "M": 1.0}), 0)
    none = mux_drift.run(rollmux.POOLS, arrivals, 0.0, 0)
    whole = run_trace(Cluster(*rollmux.POOLS), arrivals)
    assert none.kept == 1 and none.bill == pytest.approx(whole.bill, rel=0.03)
    arms = [mux_drift.run(rollmux.POOLS, arrivals, share, 0) for share in (0.2, 0.8)]
    assert arms[1].kept < arms[0].kept <= 1
    again = mux_drift.run(rollmux.POOLS, arrivals, 0.8, 0, placed_again=True)
    assert again.bill < arms[1].bill


def test_profiles_that_are_never_replaced_keep_fewer_slos(monkeypatch: pytest.MonkeyPatch):
    arrivals = mux_trace.draw_trace(published_rollmux.TRACE_200, 0)
    shipped = mux_drift.run(rollmux.POOLS, arrivals, 0.8, 0)
    monkeypatch.setattr(mux_drift.drift, "drifted", lambda *_: None)
    blind = mux_drift.run(rollmux.POOLS, arrivals, 0.8, 0)
    assert blind.kept < shipped.kept


def test_a_bad_option_is_one_sentence(tmp_path: Path, capsys):
    argv = ["rollmux", "--experiment", "slo"]
    assert sim.main([*argv, "--timeline", str(tmp_path / "a.png")]) == 2
    assert "works only with --experiment micro" in capsys.readouterr().err
    assert sim.main([*argv, "--rounds", "0"]) == 2
    assert "--rounds 0: must be at least 1" in capsys.readouterr().err
