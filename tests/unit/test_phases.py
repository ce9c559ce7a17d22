"""The turns of engine and learner on shared memory."""

from types import SimpleNamespace

from rlcore.trainer import phases


class Part:
    """An engine or a learner that writes down what it is asked for."""

    def __init__(self, name: str, said: list[str], down: str = "") -> None:
        self._name, self._said, self.down = name, said, down

    def restart(self) -> None:
        raise AssertionError("nobody asked for a restart")

    def __getattr__(self, what: str):
        return lambda tags=(): self._said.append(" ".join([self._name, what, *tags]))


def run_of(
    said: list[str], *, offload: bool, down: str = "", models: tuple[str, ...] = ("learner",)
) -> SimpleNamespace:
    return SimpleNamespace(
        cfg=SimpleNamespace(train=SimpleNamespace(offload=offload)),
        engine=Part("engine", said, down),
        learners=[Part(name, said) for name in models],
    )


def test_the_learner_comes_back_while_something_of_it_is_written() -> None:
    said: list[str] = []
    with phases.learner_here(run_of(said, offload=True)):
        said.append("write")
    assert said == [
        "engine sleep kv_cache",
        "learner onload",
        "write",
        "learner offload",
        "engine wake kv_cache",
    ]


def test_a_critic_comes_and_goes_with_the_learner() -> None:
    said: list[str] = []
    run = run_of(said, offload=True, models=("learner", "critic"))
    phases.engine_sleeps(run)
    phases.engine_wakes(run)
    assert said == [
        "engine sleep weights kv_cache",
        "learner onload",
        "critic onload",
        "learner offload",
        "critic offload",
        "engine wake kv_cache",
    ]


def test_without_offload_nobody_moves() -> None:
    said: list[str] = []
    with phases.learner_here(run_of(said, offload=False)):
        said.append("write")
    assert said == ["write"]


def test_a_dead_engine_is_asked_for_nothing() -> None:
    said: list[str] = []
    run = run_of(said, offload=True, down="was killed")
    phases.engine_sleeps(run)
    phases.engine_wakes(run)
    with phases.learner_here(run):
        pass
    assert said == ["learner onload", "learner offload"] * 2
