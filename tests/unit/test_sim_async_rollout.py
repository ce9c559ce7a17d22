"""The asynchronous loop in the simulator: times that can be worked out by hand."""

import json
from dataclasses import replace

import pytest

from rlcore.cli import sim
from rlcore.records import group_of
from rlcore.sim import roll_flash, splits
from rlcore.sim.async_rollout import SimAsyncRollout, async_rollout
from rlcore.sim.cost import EngineCost
from rlcore.sim.roll_flash import EndlessPrompts

SAMPLES = 2


def flow(alpha: float, *, replicas: int = 2, train_s: float = 10.0, **more) -> SimAsyncRollout:
    """Two prompts a batch; group t<k> has responses of 10 and 10 + 10 (k % 2) tokens, a second
    each."""

    def length(request) -> int:
        group = group_of(request.id)
        return 10 + 10 * (int(group[1:]) % 2) * int(request.id.endswith(".1"))

    return async_rollout(
        [EngineCost(step_s=1.0)] * replicas,
        length,
        issue=EndlessPrompts(SAMPLES, prompt_tokens=1),
        batch=2,
        alpha=alpha,
        train_s=lambda lengths: train_s,
        **more,
    )


def test_alpha_0_takes_rollout_and_training_in_turn() -> None:
    updates = flow(0, sync_s=3.0).run(4)
    assert [u.seconds for u in updates] == [20.0] + [20.0 + 10.0 + 3.0] * 3
    assert [u.waited for u in updates] == [20.0] * 4
    assert all(set(u.ages) == {0} for u in updates)


def test_with_staleness_the_slower_side_decides() -> None:
    """A batch is 50 tokens on four places, 12.5 s though its longest response has 20; training
    takes 10 or 40."""
    for train_s, wanted in ((10.0, 12.5), (40.0, 40.0)):
        made = flow(4, train_s=train_s, max_running=2)
        made.run(8)
        updates = made.run(8)
        assert sum(u.seconds for u in updates) / 8 == pytest.approx(wanted, rel=0.1)
        assert sum(u.seconds for u in updates) / 8 < 20.0 + train_s
        assert all(max(u.ages) <= 4 for u in updates)


@pytest.mark.parametrize("mode", ["in_place", "recompute"])
def test_what_is_under_way_goes_on_after_a_push_and_prefills_unless_it_is_kept(mode) -> None:
    made = flow(2, mode=mode)
    updates = made.run(6)
    assert sorted(n for u in updates for n in u.lengths) == [10] * 18 + [20] * 6
    # the only token of a prompt goes through the decode step
    assert (made.prefilled > 0) == (mode == "recompute")


def test_a_simulation_repeats_itself() -> None:
    one, two = (flow(1.5, train_s=7.0).run(9) for _ in range(2))
    assert one == two


def test_proposition_2_bounds_a_small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_flash, "SAMPLES", 4)
    law = replace(roll_flash.LAWS["3k"], prompts=32)
    for alpha in (0, 2):
        ours = roll_flash.measured(law, 2, 2, alpha, 3, seed=0)
        assert ours.facts["holds"], ours


def test_whole_cycles_are_measured() -> None:
    """With alpha 2, the prompts of three steps start together, so every third update is slow."""
    assert [len(roll_flash._steady(flow(2), 2, steps)) for steps in (1, 3, 4)] == [3, 3, 6]
    assert len(roll_flash._steady(flow(0.5), 0.5, 3)) == 4


def test_the_planner_knows_the_lengths_and_costs_of_a_law() -> None:
    rates = splits.rates(roll_flash.job(roll_flash.LAWS["3k"], 16, 0))
    samples = roll_flash.PROMPTS * roll_flash.SAMPLES
    assert (rates.samples, rates.longest) == (samples, 32_768)
    assert rates.decode_s(1) == pytest.approx(rates.step_s)
    for gpus in (16, 128):
        assert gpus / 8 < roll_flash.planned(roll_flash.LAWS["3k"], gpus, 0) < gpus / 2


def test_proposition_1_bounds_list_scheduling_and_nears_its_limit() -> None:
    found = {alpha: roll_flash.list_scheduling(16, alpha, 6, seed=1) for alpha in (0, 1, 8)}
    assert all(seconds <= bound for seconds, bound in found.values()), found
    assert found[8][0] < found[1][0] < found[0][0]


def test_a_cell_above_its_bound_is_named() -> None:
    rows = [{"cell": "a", "holds": True}, {"cell": "b", "holds": False}, {"cell": "c"}]
    assert roll_flash.broken(rows) == ["b"]


def test_environments_each_by_itself_wait_for_sums_and_together_for_the_slowest() -> None:
    made = {row["cell"]: row["simulated"] for row in roll_flash.agentic(1, 0).rows}
    mean = roll_flash.TURNS * 10.83  # of a Gaussian (10, 10) that is never below 0
    assert mean < made["rollout, each by itself: s"] < 2 * mean
    assert made["rollout, together: s"] > 3 * mean


def test_the_command_prints_tables_and_adds_them_to_the_file(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(roll_flash, "QUEUE_ROUNDS", 1)
    monkeypatch.setattr(roll_flash, "REPLICATION_S", {(4, 4): (2, 1)})
    out, picture = tmp_path / "flash.json", tmp_path / "flash.png"
    common = ["--rounds", "1", "--json", str(out)]
    assert sim.main(["roll_flash", "queue", *common, "--seeds", "2"]) == 0
    (queue,) = json.loads(out.read_text())["tables"].values()
    assert queue["seeds"] == [0, 1] and sum(queue["summary"]["cells"].values()) == 6
    assert all(r["spread"]["min"] <= r["simulated"] <= r["spread"]["max"] for r in queue["rows"])
    assert "queue scheduling, 8 x 8" in capsys.readouterr().out
    assert sim.main(["roll_flash", "replication", *common, "--picture", str(picture)]) == 0
    assert list(json.loads(out.read_text())["tables"]) == ["queue", "replication"]
    assert picture.stat().st_size > 1000


def test_every_split_is_simulated_and_the_proposed_one_is_near_the_best(tmp_path, capsys) -> None:
    out = tmp_path / "splits.json"
    words = (
        "splits --gpus 8 --gpu h800 --model 8b --lengths 16k --data.prompts_per_step 16 "
        "--rollout.samples_per_prompt 4"
    )
    assert sim.main([*words.split(), "--steps", "12", "--json", str(out)]) == 0
    assert "beta*: " in capsys.readouterr().out
    rows = json.loads(out.read_text())["rows"]
    assert [row["cell"].split(",")[0] for row in rows] == [f"{8 - r} train" for r in range(1, 8)]
    (proposed,) = [row for row in rows if row["note"] == "proposed"]
    assert proposed["step_s"] <= 1.2 * min(row["step_s"] for row in rows)
    assert all(0.6 < row["step_s"] / row["planner_s"] < 1.2 for row in rows)
    assert sim.main([*words.split(), "--stream"]) == 2
