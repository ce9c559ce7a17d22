"""The asynchronous loop in the simulator: times that can be worked out by hand."""

import math

import pytest

from rlcore.cli import sim
from rlcore.records import group_of
from rlcore.sim import roll_flash
from rlcore.sim.cost import Cost
from rlcore.sim.flow import Flow
from rlcore.sim.roll_flash import Source

SAMPLES = 2


def flow(alpha: float, *, replicas: int = 2, train_s: float = 10.0, **more) -> Flow:
    """Two prompts a batch; group t<k> has responses of 10 and 10 + 10 (k % 2) tokens, a second
    each."""

    def length(request) -> int:
        group = group_of(request.id)
        return 10 + 10 * (int(group[1:]) % 2) * int(request.id.endswith(".1"))

    return Flow(
        [Cost(step_s=1.0)] * replicas,
        length,
        issue=Source(SAMPLES, prompt_tokens=1),
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
    prefilled = sum(r.prefilled for r in made._replicas)
    started = 2 * SAMPLES * (6 + 2)  # one token of prompt each
    assert prefilled >= started - 2 * SAMPLES
    assert (prefilled > started) == (mode == "recompute")


def test_a_simulation_repeats_itself() -> None:
    one, two = (flow(1.5, train_s=7.0).run(9) for _ in range(2))
    assert one == two


def test_proposition_2_bounds_a_small_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_flash, "PROMPTS", 32)
    monkeypatch.setattr(roll_flash, "SAMPLES", 4)
    for alpha in (0, 2):
        made = roll_flash.flow(2, 2, alpha, seed=0)
        made.run(math.ceil(alpha) + 1)
        updates = made.run(3)
        lengths = [n for u in updates for n in u.lengths]
        bound = roll_flash.bound_2(made, lengths, 2, 2, alpha)
        assert sum(u.seconds for u in updates) / 3 <= bound


def test_the_command_prints_a_table_and_writes_it(tmp_path, capsys) -> None:
    out = tmp_path / "queue.json"
    assert sim.main(["roll_flash", "queue", "--rounds", "1", "--json", str(out)]) == 0
    assert "queue scheduling, 8 x 8" in capsys.readouterr().out
    assert out.stat().st_size > 100
