"""The agent of a replica whose engine has died."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rlcore.records import AnyEvent, Down, EndRound, Prompt, Ready, Request, Sampling, Submit
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.replica import Agent
from rlcore.rollout.transport import LocalHub


class Idle:
    """A reward service that nobody asks for anything."""

    num_pending = 0

    def submit(self, id, sample, prompt, text) -> None:
        raise AssertionError(f"{id} was scored")

    def poll(self, timeout_s: float) -> list:
        return []

    def cancel(self, ids) -> None:
        assert not ids

    def learn(self, anchors) -> None:
        self.learned = anchors


def submit(id: str) -> Submit:
    tokens = np.array([3, 4], np.int32)
    prompt = Prompt(index=0, source="s", tokens=tokens)
    request = Request(id=id, prompt=tokens, sampling=Sampling())
    return Submit(rank=0, requests=(request,), prompts={request.group: prompt})


def until_down(hub: LocalHub) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    while not any(isinstance(e, Down) for e in events):
        more = hub.receive("controller", list[AnyEvent], 20.0)
        assert more is not None, events
        events += more
    return events


def test_a_dead_engine_is_down_in_this_round_and_the_next_and_ends_no_rank() -> None:
    """It dies in an evaluation, and no push of weights brings it back before the next step. What
    the controller submits before it has heard of the death is not an error either."""
    hub, end = LocalHub(), EndRound(rank=0, groups=())
    engine = ChildEngine("tests.contracts.odd_engines:stuck", {})
    agent = Agent(hub, engine, Idle(), str, 20.0)
    with ThreadPoolExecutor(1) as pool:
        try:
            for id in ("e0.0", "t0.0"):
                future = pool.submit(agent.run_round)
                hub.send(0, "agent", submit(id))
                ready = hub.receive("controller", list[AnyEvent], 20.0)
                assert ready and isinstance(ready[0], Ready)
                if engine.pid:
                    os.kill(engine.pid, signal.SIGKILL)
                events = ready[1:] or until_down(hub)
                (down,) = [e for e in events if isinstance(e, Down)]
                assert "was killed by signal 9" in down.reason
                hub.send(0, "agent", submit(f"late.{id}"))
                hub.send(0, "agent", end)
                assert future.result(20) is end
        finally:
            engine.close()


def test_the_end_of_a_round_tells_the_reward_service_what_right_answers_took() -> None:
    hub, scorer = LocalHub(), Idle()
    agent = Agent(hub, None, scorer, str, 20.0)
    hub.send(0, "agent", EndRound(rank=0, groups=(), anchors={"s/0": 3.0}))
    agent.run_round()
    assert scorer.learned == {"s/0": 3.0}
