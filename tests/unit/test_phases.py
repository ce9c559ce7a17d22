"""The turns of engine and learner on shared memory."""

from types import SimpleNamespace

import pytest

from rlcore.rollout.replica import Agent, NoScorer
from rlcore.rollout.transport import LocalHub
from rlcore.trainer import phases


class Part:
    """An engine or a learner that writes down what it is asked for."""

    def __init__(self, name: str, said: list[str], down: str = "") -> None:
        self._name, self._said, self.failure = name, said, down

    def restart(self) -> None:
        raise AssertionError("nobody asked for a restart")

    def __getattr__(self, what: str):
        return lambda tags=(): self._said.append(f"{self._name} {what} {_words(tags)}".strip())


def _words(tags: object) -> str:
    return " ".join(tags) if isinstance(tags, list | tuple) else str(tags)


def run_of(
    said: list[str], *, offload: bool, down: str = "", models: tuple[str, ...] = ("learner",)
) -> SimpleNamespace:
    learners = [Part(name, said) for name in models]
    return SimpleNamespace(
        cfg=SimpleNamespace(train=SimpleNamespace(offload=offload)),
        engine=Part("engine", said, down),
        learners=learners,
        learner=learners[0],
        rank=0,
        memory=None,
        gate=None,
        engine_ranks=(0,),
    )


def test_the_learner_comes_back_while_something_of_it_is_written() -> None:
    said: list[str] = []
    with phases.learner_here(run_of(said, offload=True), ["weights", "optimizer"]):
        said.append("write")
    assert said == [
        "engine sleep kv_cache",
        "learner onload weights optimizer",
        "write",
        "learner offload",
        "engine wake kv_cache",
    ]


def test_a_critic_comes_and_goes_with_the_learner() -> None:
    said: list[str] = []
    run = run_of(said, offload=True, models=("learner", "critic"))
    phases.engine_sleeps(run)
    phases.engine_takes_weights(run)
    said.append("push")
    phases.engine_wakes(run)
    assert said == [
        "engine sleep weights kv_cache",
        "learner onload",
        "critic onload",
        "learner offload optimizer gradients",
        "critic offload",
        "learner onload weights",
        "engine wake weights",
        "push",
        "learner offload",
        "critic offload",
        "engine wake kv_cache",
    ]


def test_without_offload_nobody_moves() -> None:
    said: list[str] = []
    with phases.learner_here(run_of(said, offload=False), ["weights"]):
        said.append("write")
    assert said == ["write"]


def test_a_dead_engine_is_asked_for_nothing() -> None:
    said: list[str] = []
    run = run_of(said, offload=True, down="was killed")
    phases.engine_sleeps(run)
    phases.engine_wakes(run)
    with phases.learner_here(run, ["weights"]):
        pass
    assert said == ["learner onload", "learner offload", "learner onload weights"] + [
        "learner offload"
    ]


class Returning(Part):
    """A dead engine that can be started again."""

    def restart(self) -> None:
        self._said.append("engine restart")
        self.failure = ""


def test_a_new_engine_starts_on_an_empty_device() -> None:
    said: list[str] = []
    run = run_of(said, offload=True)
    run.engine = Returning("engine", said, "was killed")
    agent = Agent(LocalHub(), run.engine, NoScorer(), str, deadline_s=1.0)
    run.rollout = SimpleNamespace(agent=agent)
    phases.engine_revives(run)
    phases.engine_takes_weights(run)
    assert said == [
        "learner offload",
        "engine restart",
        "engine poll 0.0",
        "engine sleep weights kv_cache",
        "learner offload optimizer gradients",
        "learner onload weights",
        "engine wake weights",
    ]


class Mortal(Part):
    """An engine that dies when it is asked for something."""

    def sleep(self, tags: list[str]) -> None:
        self.failure = "was killed by signal 9"
        raise RuntimeError("sleep: the engine was killed by signal 9")

    wake = sleep

    def fail(self, reason: str) -> None:
        self.failure = reason


def test_an_engine_that_dies_at_a_switch_is_left_to_the_round_that_follows() -> None:
    said: list[str] = []
    for turn in (phases.engine_sleeps, phases.engine_takes_weights, phases.engine_wakes):
        run = run_of(said, offload=True)
        run.engine = Mortal("engine", said)
        turn(run)
        assert run.engine.failure


def test_a_living_engine_that_refuses_a_switch_ends_the_run() -> None:
    class Refuses(Part):
        def wake(self, tags: list[str]) -> None:
            raise RuntimeError("no memory")

    run = run_of([], offload=True)
    run.engine = Refuses("engine", [])
    with pytest.raises(RuntimeError, match="no memory"):
        phases.engine_wakes(run)


def test_ranks_of_one_engine_wait_for_its_first_at_every_switch(monkeypatch) -> None:
    """Only the first speaks with it: the others have no memory before it has answered, and it asks
    for none before they have given theirs."""
    said: list[str] = []
    monkeypatch.setattr(phases.collective, "barrier", lambda: said.append("all"))
    run = run_of(said, offload=True)
    run.engine_ranks = (0, 1)
    phases.engine_sleeps(run)
    phases.engine_takes_weights(run)
    phases.engine_wakes(run)
    assert said == [
        *("all", "engine sleep weights kv_cache", "all", "learner onload"),
        *("learner offload optimizer gradients", "learner onload weights"),
        *("all", "engine wake weights", "all", "learner offload"),
        *("all", "engine wake kv_cache", "all"),
    ]


def test_ranks_whose_engine_lives_wait_while_another_starts_again(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(phases.collective, "barrier", lambda: said.append("all"))
    monkeypatch.setattr(phases.collective, "reduce_floats", lambda values: [0.0, 0.0, 1.0, 0.0])
    run = run_of(said, offload=True)
    run.engine_ranks, run.world_size = (0, 1), 4
    phases.engine_revives(run)
    assert said == ["all", "all"]
