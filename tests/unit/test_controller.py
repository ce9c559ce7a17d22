"""The controller: events in, commands out, under a clock of numbers."""

import msgspec
import numpy as np

from rlcore.records import (
    Abort,
    Aborted,
    Alive,
    Down,
    DropEngine,
    EndRound,
    Fail,
    Finished,
    LengthReport,
    Partial,
    Preempted,
    Prompt,
    Ready,
    Release,
    Repair,
    Rewarded,
    RewardResult,
    Sampling,
    Stats,
    Submit,
    Work,
)
from rlcore.rollout.controller import MAX_REPAIRS, Controller
from rlcore.sched.roles import Cell, Verdict
from rlcore.sched.router import LeastLoaded
from rlcore.sched.stop import StopAtAll, StopAtFirst


def work(num_groups: int, num_samples: int) -> list[Work]:
    return [
        Work(
            id=f"t{g}",
            prompt=Prompt(index=g, dataset="s", tokens=np.arange(3, dtype=np.int32)),
            num_samples=num_samples,
            sampling=Sampling(),
        )
        for g in range(num_groups)
    ]


def controller(ranks, max_running=64, deadline_s=10.0, stop=None) -> Controller:
    return Controller(
        ranks=ranks, place=LeastLoaded(max_running), stop=stop or StopAtAll(), deadline_s=deadline_s
    )


def submitted(commands) -> dict[int, list[str]]:
    return {c.rank: [r.id for r in c.requests] for c in commands if isinstance(c, Submit)}


def finish(c: Controller, rank: int, id: str, score: float = 1.0, now: float = 1.0):
    out = c.handle(Finished(rank=rank, id=id, num_tokens=5, finish="stop"), now)
    return out + c.handle(Rewarded(rank=rank, id=id, result=RewardResult(score=score)), now)


def test_nothing_starts_before_every_replica_is_ready():
    c = controller([0, 1])
    c.start(work(2, 2), 0.0)
    assert submitted(c.handle(Ready(rank=1), 0.0)) == {}
    assert submitted(c.handle(Ready(rank=0), 0.0)) == {
        0: ["t0.0", "t0.1"],
        1: ["t1.0", "t1.1"],
    }


def test_placement_does_not_depend_on_who_was_ready_first():
    placed = []
    for order in ([0, 1, 2], [2, 0, 1]):
        c = controller([0, 1, 2])
        c.start(work(7, 3), 0.0)
        out = [c.handle(Ready(rank=r), 0.0) for r in order]
        placed.append(submitted(out[-1]))
    assert placed[0] == placed[1]


def test_a_group_goes_on_elsewhere_when_its_replica_is_full():
    c = controller([0, 1], max_running=2)
    c.start(work(1, 3), 0.0)
    c.handle(Ready(rank=0), 0.0)
    assert submitted(c.handle(Ready(rank=1), 0.0)) == {0: ["t0.0", "t0.1"], 1: ["t0.2"]}


def test_a_waiting_request_starts_when_one_finishes():
    c = controller([0], max_running=1)
    c.start(work(1, 2), 0.0)
    assert submitted(c.handle(Ready(rank=0), 0.0)) == {0: ["t0.0"]}
    assert submitted(finish(c, 0, "t0.0")) == {0: ["t0.1"]}


def test_the_round_ends_when_the_last_response_is_rewarded_not_when_it_is_finished():
    c = controller([0])
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    finish(c, 0, "t0.0", 0.25)
    assert c.handle(Finished(rank=0, id="t0.1", num_tokens=9, finish="length"), 1.0) == []
    (end,) = c.handle(Rewarded(rank=0, id="t0.1", result=RewardResult(score=0.5, error="x")), 1.0)
    assert isinstance(end, EndRound)
    (group,) = end.groups
    assert group.scores == (0.25, 0.5)
    assert group.lengths == (5, 9)
    assert group.finishes == ("stop", "length")
    assert group.errors == ("", "x")
    assert [r.owner for r in group.refs] == [0, 0]
    assert c.done


def test_a_second_reward_for_the_same_response_is_ignored():
    c = controller([0])
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    finish(c, 0, "t0.0", 1.0)
    assert c.handle(Rewarded(rank=0, id="t0.0", result=RewardResult(score=7.0)), 1.0) == []
    (end,) = finish(c, 0, "t0.1", 0.0)
    assert end.groups[0].scores == (1.0, 0.0)


def test_what_right_answers_took_is_told_to_all_ranks_by_prompt():
    c = controller([0, 1])
    c.start(work(2, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    for rank, id, reference_latency_s in ((0, "t0.0", 3.0), (0, "t0.1", 2.0), (1, "t1.0", 0.0)):
        c.handle(Finished(rank=rank, id=id, num_tokens=5, finish="stop"), 1.0)
        result = RewardResult(score=1.0, timeout_s=4.0, reference_latency_s=reference_latency_s)
        c.handle(Rewarded(rank=rank, id=id, result=result), 1.0)
    ends = finish(c, 1, "t1.1")
    assert [(e.rank, e.reference_latency) for e in ends] == [(0, {"s/0": 3.0}), (1, {"s/0": 3.0})]
    assert ends[0].stats["reward/timeout_s/mean"] == ends[0].stats["reward/timeout_s/min"] == 4.0


def test_requests_of_a_dead_engine_start_again_on_another():
    c = controller([0, 1])
    c.start(work(2, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    finish(c, 1, "t1.0")
    assert submitted(c.handle(Down(rank=1, reason="killed"), 2.0)) == {0: ["t1.1"]}
    finish(c, 0, "t0.0")
    finish(c, 0, "t0.1")
    out = finish(c, 0, "t1.1")
    assert {type(o) for o in out} == {EndRound}
    assert [r.owner for r in out[0].groups[1].refs] == [1, 0]


def partial(num_tokens: int) -> Partial:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return Partial(tokens=tokens, logps=-tokens.astype(np.float32), versions=0 * tokens)


def test_what_a_dead_engine_had_produced_goes_along():
    c = controller([0, 1])
    c.start(work(2, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    (order,) = c.handle(Down(rank=1, reason="killed", partials={"t1.0": partial(7)}), 2.0)
    assert {r.id: r.resume and len(r.resume.tokens) for r in order.requests} == {
        "t1.0": 7,
        "t1.1": None,
    }


def test_a_second_death_keeps_what_the_first_had_left_unless_more_is_known():
    c = controller([0, 1, 2])
    c.start(work(3, 1), 0.0)
    for rank in range(3):
        c.handle(Ready(rank=rank), 0.0)
    had = {"t2.0": partial(7)}
    (order,) = c.handle(Down(rank=2, reason="killed", partials=had), 2.0)
    rank = order.rank
    (order,) = c.handle(Down(rank=rank, reason="killed"), 3.0)
    assert {r.id: r.resume and len(r.resume.tokens) for r in order.requests}["t2.0"] == 7


def test_without_an_engine_left_all_ranks_repair_and_the_round_goes_on():
    c = controller([0, 1])
    c.start(work(2, 1), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    finish(c, 0, "t0.0")
    c.handle(Down(rank=0, reason="killed"), 2.0)
    repairs = c.handle(Down(rank=1, reason="killed", partials={"t1.0": partial(3)}), 2.0)
    assert [type(r) for r in repairs] == [Repair, Repair] and [r.rank for r in repairs] == [0, 1]
    assert c.handle(Ready(rank=1), 3.0) == []
    (order,) = c.handle(Ready(rank=0), 3.0)
    assert [(r.id, len(r.resume.tokens)) for r in order.requests] == [("t1.0", 3)]
    (end, _) = finish(c, order.rank, "t1.0")
    assert end.stats["sched/repairs"] == 1 and end.stats["sched/engines_down"] == 2
    assert end.stats["sched/kept_tokens"] == 3


def test_engines_that_die_again_and_again_end_the_round_with_the_reason():
    c = controller([0])
    c.start(work(1, 2), 0.0)
    for _ in range(MAX_REPAIRS):
        c.handle(Ready(rank=0), 0.0)
        (repair,) = c.handle(Down(rank=0, reason="signal 9"), 2.0)
        assert isinstance(repair, Repair)
    c.handle(Ready(rank=0), 0.0)
    (fail,) = c.handle(Down(rank=0, reason="signal 9"), 2.0)
    assert isinstance(fail, Fail)
    assert "signal 9" in fail.reason


def test_a_death_from_before_a_repair_is_over_with_it():
    """Of an engine that nobody decoded with, such as one that had stopped in order to train."""
    c = controller([0, 1])
    c.start(work(2, 1), 0.0)
    for rank in (0, 1):
        c.handle(Ready(rank=rank), 0.0)
    c.handle(Down(rank=1, reason="killed"), 1.0)
    assert len(c.handle(Down(rank=0, reason="killed"), 1.0)) == 2  # repairs
    assert c.handle(Down(rank=1, reason="killed"), 1.0) == []
    assert c.handle(Ready(rank=0), 2.0) == []
    assert submitted(c.handle(Ready(rank=1), 2.0)) == {0: ["t0.0"], 1: ["t1.0"]}


def test_a_replica_over_two_ranks_is_down_with_either():
    c = Controller(
        ranks=[0, 2],
        all_ranks=[0, 1, 2, 3],
        members={0: [1], 2: [3]},
        place=LeastLoaded(64),
        stop=StopAtAll(),
        deadline_s=10.0,
    )
    c.start(work(2, 1), 0.0)
    for rank in range(4):
        last = c.handle(Ready(rank=rank), 0.0)
    assert submitted(last) == {} and c.num_requests == 2
    (drop,) = c.handle(Down(rank=3, reason="killed"), 1.0)
    assert isinstance(drop, DropEngine) and (drop.rank, drop.reason) == (2, "killed")
    assert submitted(c.handle(Down(rank=2, reason="was stopped: killed"), 1.0)) == {0: ["t1.0"]}
    assert c.handle(Down(rank=3, reason="killed"), 1.0) == []


def test_a_silent_rank_is_named_with_what_it_owes():
    c = controller([0, 1], deadline_s=10.0)
    c.start(work(2, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    finish(c, 0, "t0.0", now=15.0)
    out = c.tick(15.0)
    assert [type(o) for o in out] == [Fail, Fail]
    assert "rank 1" in out[0].reason and "t1.0" in out[0].reason
    assert "rank 0:" not in out[0].reason


def test_reports_that_show_no_growth_are_no_sign_of_life():
    c = controller([0], deadline_s=10.0)
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(LengthReport(rank=0, ids=("t0.0", "t0.1"), lengths=(3, 1)), 4.0)
    for now in (8.0, 12.0):
        c.handle(LengthReport(rank=0, ids=("t0.0", "t0.1"), lengths=(3, 1)), now)
        c.handle(Stats(rank=0, busy_s=4.0, running=2), now)
        c.handle(Preempted(rank=0, id="t0.1"), now)
    assert all(isinstance(o, Alive) for o in c.tick(13.0))
    (fail,) = c.tick(15.0)
    assert isinstance(fail, Fail) and "rank 0: no new token for 11 s" in fail.reason


def test_a_prefill_and_a_longer_response_are_signs_of_life():
    c = controller([0], deadline_s=10.0)
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Stats(rank=0, prefill_tokens=512), 9.0)
    assert all(isinstance(o, Alive) for o in c.tick(18.0))
    c.handle(LengthReport(rank=0, ids=("t0.0", "t0.1"), lengths=(0, 1)), 18.0)
    assert all(isinstance(o, Alive) for o in c.tick(27.0))


def test_a_rank_that_never_came_is_named():
    c = controller([0, 1], deadline_s=10.0)
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=0), 9.0)
    (fail, _) = c.tick(11.0)
    assert "rank 1" in fail.reason and "never entered phase gen" in fail.reason


def test_a_rank_that_owes_nothing_may_be_silent():
    c = controller([0, 1], deadline_s=10.0)
    c.start(work(1, 2), 0.0)
    c.handle(Ready(rank=1), 0.0)
    c.handle(Ready(rank=0), 0.0)
    finish(c, 0, "t0.0", now=11.0)
    assert all(isinstance(o, Alive) for o in c.tick(11.0) + c.tick(12.0))


def test_waiting_ranks_are_reassured():
    c = controller([0, 1], deadline_s=100.0)
    c.start(work(1, 2), 0.0)
    assert c.tick(5.0) == []
    assert [o.rank for o in c.tick(21.0)] == [0, 1]


def test_an_empty_round_ends_at_once():
    c = controller([0, 1])
    out = c.start([], 0.0)
    assert [type(o) for o in out] == [EndRound, EndRound]


class FirstGroup:
    """Ends the round with the first complete group: surplus requests must be aborted."""

    def judge(self, groups, group):
        return Verdict(kept=[group.work.id])

    def num_wanted(self, groups):
        return 1


def test_live_requests_are_aborted_at_the_end_and_late_events_change_nothing():
    c = controller([0, 1], stop=FirstGroup())
    c.start(work(2, 1), 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    out = finish(c, 0, "t0.0")
    aborts = [o for o in out if isinstance(o, Abort)]
    assert [(a.rank, a.ids) for a in aborts] == [(1, ("t1.0",))]
    assert [type(o) for o in out].index(Abort) < [type(o) for o in out].index(EndRound)
    assert c.handle(Aborted(rank=1, id="t1.0", num_tokens=3), 2.0) == []


def test_the_same_events_give_the_same_commands():
    def play():
        c = controller([0, 1], max_running=3)
        out = list(c.start(work(4, 2), 0.0))
        events = [Ready(rank=0), Ready(rank=1)]
        log = []
        for e in events:
            log.append(submitted(c.handle(e, 0.0)))
        for rank, id in ((0, "t0.0"), (1, "t1.0"), (0, "t0.1"), (1, "t1.1")):
            log.append(submitted(finish(c, rank, id)))
        return out, log

    assert play() == play()


# ---- more started than is kept


def more_work(num_groups: int, num_samples: int, wanted: int) -> list[Work]:
    return [msgspec.structs.replace(w, wanted=wanted) for w in work(num_groups, num_samples)]


def racing(num_groups: int, first: int, num_samples: int, wanted: int, **options) -> Controller:
    todo = more_work(num_groups, num_samples, wanted)
    stop = StopAtFirst({"": first}, {w.id: "" for w in todo})
    c = Controller(ranks=[0], place=LeastLoaded(64), stop=stop, deadline_s=10.0, **options)
    c.start(todo, 0.0)
    c.handle(Ready(rank=0), 0.0)
    return c


def aborted(commands) -> list[str]:
    return [i for o in commands if isinstance(o, Abort) for i in o.ids]


def test_a_group_is_complete_with_its_first_rewarded_responses_and_the_others_are_aborted():
    c = racing(2, 1, 3, 2)
    assert c.num_requests == 2
    finish(c, 0, "t1.2", 0.5)
    finish(c, 0, "t0.0")
    out = finish(c, 0, "t1.0", 0.25)
    assert aborted(out) == ["t0.1", "t0.2", "t1.1"]
    end = out[-1]
    (group,) = end.groups
    assert [r.id for r in group.refs] == ["t1.0", "t1.2"] and group.scores == (0.25, 0.5)


def test_a_complete_group_gives_its_places_to_those_that_wait():
    todo = more_work(2, 3, 2)
    c = Controller(
        ranks=[0],
        place=LeastLoaded(3),
        stop=StopAtFirst({"": 2}, {w.id: "" for w in todo}),
        deadline_s=10.0,
    )
    c.start(todo, 0.0)
    assert submitted(c.handle(Ready(rank=0), 0.0)) == {0: ["t0.0", "t0.1", "t0.2"]}
    assert submitted(finish(c, 0, "t0.0")) == {0: ["t1.0"]}
    out = finish(c, 0, "t0.1")
    assert submitted(out) == {0: ["t1.1"]} and aborted(out) == ["t0.2"]
    assert submitted(c.handle(Aborted(rank=0, id="t0.2", num_tokens=9), 2.0)) == {0: ["t1.2"]}


def test_a_response_that_ends_while_its_abort_is_on_its_way_frees_its_place_and_counts_nothing():
    c = racing(2, 2, 2, 1)
    assert aborted(finish(c, 0, "t0.1")) == ["t0.0"]
    assert finish(c, 0, "t0.0") == []
    out = finish(c, 0, "t1.0")
    assert [[r.id for r in g.refs] for g in out[-1].groups] == [["t0.1"], ["t1.0"]]


def test_requests_of_a_closed_group_do_not_start_again_when_their_engine_dies():
    todo = more_work(2, 2, 1)
    c = Controller(
        ranks=[0, 1],
        place=LeastLoaded(64),
        stop=StopAtFirst({"": 2}, {w.id: "" for w in todo}),
        deadline_s=10.0,
    )
    c.start(todo, 0.0)
    c.handle(Ready(rank=0), 0.0)
    c.handle(Ready(rank=1), 0.0)
    finish(c, 1, "t1.0")
    assert submitted(c.handle(Down(rank=1, reason="killed"), 2.0)) == {}
    finish(c, 0, "t0.0", now=2.0)
    assert c.done


def test_by_tokens_the_shorter_response_came_first_whatever_the_clock_says():
    c = racing(3, 2, 1, 1, by_tokens=True)

    def ends(id: str, n: int):
        out = c.handle(Finished(rank=0, id=id, num_tokens=n, finish="stop"), 1.0)
        return out + c.handle(Rewarded(rank=0, id=id, result=RewardResult(score=1.0)), 1.0)

    assert ends("t2.0", 7) == [] and ends("t1.0", 9) == []
    (end,) = ends("t0.0", 7)  # nothing is aborted: all are waited for
    assert [g.id for g in end.groups] == ["t0", "t2"]


def test_what_was_started_and_not_kept_is_counted():
    c = racing(2, 1, 2, 1)
    c.handle(LengthReport(rank=0, ids=("t0.1", "t1.0"), lengths=(15, 5)), 1.0)
    out = finish(c, 0, "t0.0")  # 5 tokens of 25
    stats = out[-1].stats
    assert stats["sched/surplus_tokens"] == 0.8
    assert stats["sched/length_shift"] == 5 / 10 - 1


class Leaves:
    """An `Elastic` whose last two ranks leave at eight tenths."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def release(self, done, wanted, live, up):
        self.asked.append((done, wanted))
        return [Cell(ranks=(1, 2), leaders=(1, 2), dp_ranks=())] if done >= 0.8 * wanted else []

    def start(self) -> None:
        pass

    def finished(self, num_tokens) -> None:
        pass

    def left(self, rank) -> None:
        pass


def test_the_dead_of_a_node_that_is_given_away_are_told_as_well():
    c = Controller(
        ranks=range(3), place=LeastLoaded(9), stop=StopAtAll(), deadline_s=10.0, elastic=Leaves()
    )
    c.start(work(1, 10), 0.0)
    for rank in range(3):
        c.handle(Ready(rank=rank), 0.0)
    c.handle(Down(rank=2, reason="gone"), 0.5)
    for k in range(8):
        out = finish(c, 0, f"t0.{k}")
    assert [r.rank for r in out if isinstance(r, Release)] == [1, 2]


def test_responses_of_dropped_groups_are_not_done():
    """Others come in their place."""
    spare, leaves = iter(work(9, 2)[3:]), Leaves()
    stop = StopAtFirst({"s": 3}, dict.fromkeys(("t0", "t1", "t2"), "s"), lambda domain: next(spare))
    c = Controller(ranks=[0], place=LeastLoaded(99), stop=stop, deadline_s=10.0, elastic=leaves)
    c.start(work(3, 2), 0.0)
    c.handle(Ready(rank=0), 0.0)
    for g in range(2):  # equal rewards
        finish(c, 0, f"t{g}.0")
        finish(c, 0, f"t{g}.1")
    finish(c, 0, "t2.0")
    assert max(leaves.asked) == (1, 6)
    finish(c, 0, "t2.1", 0.0)
    assert max(leaves.asked) == (2, 6)
