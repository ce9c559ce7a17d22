"""Episodes in sampling that goes on across steps: `test_async_rollout.py` with environments.

All versions have the same weights and a turn hangs on the tokens before it alone, so every episode
has to be the one that nobody interrupts, also where it had to begin anew.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.envs import registry
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.engine import EpisodeEngine
from rlcore.envs.scorer import EnvScorer
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.records import HoldMode, Request
from tests import runs
from tests.contracts.engine_contract import collect, ended
from tests.unit.test_async_rollout import ALPHA, BATCH, SAMPLING, Doomed, World, world
from tests.unit.test_rollout import torch_engine

NAME = "tests.odd_envs.Sums"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.tiny_model(tmp_path_factory.mktemp("env_flow") / "model")


class Episodes:
    """Engines of ranks 1, 2, ... with environments."""

    def __init__(self, model: Path, inner: list[Any]) -> None:
        kind, tokenizer = registry.resolve(NAME), load_tokenizer(model)
        self.world: World | None = None
        self.engines = [
            EpisodeEngine(
                engine,
                NAME,
                kind,
                kind.config(max_turn_tokens=4, workers=1),
                dialogue=Dialogue(tokenizer, is_chat=False),
                decode=tokenizer.decode,
                prompt_of=lambda group, rank=rank: self.world.workers[rank].prompts[group],
            )
            for rank, engine in enumerate(inner, 1)
        ]

    def enter(self, here: World) -> None:
        self.world = here
        for worker, engine in zip(here.workers[1:], self.engines, strict=True):
            worker._scorer = EnvScorer(engine.outcomes, None)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


@pytest.fixture
def opened() -> Iterator[list[Episodes]]:
    made: list[Episodes] = []
    yield made
    for episodes in made:
        episodes.close()


def check(here: World, model: Path) -> None:
    """Every trained episode is the one of an engine that is never interrupted, none is too old,
    none is trained twice, and observations are of no version."""
    alone = Episodes(model, [torch_engine(model, 1)])
    alone.world = here  # for the prompts
    todo = {i: s for _, _, samples in here.batches for i, s in samples.items()}
    prompts = {i.rpartition(".")[0]: here.work(int(i.partition(".")[0][1:])).prompt for i in todo}
    (engine,) = alone.engines
    engine._prompt_of = prompts.__getitem__
    try:
        engine.submit([Request(id=i, prompt=s.prompt, sampling=SAMPLING) for i, s in todo.items()])
        wanted = {e.id: e.sample for e in collect(engine, ended(len(todo))) if hasattr(e, "finish")}
    finally:
        alone.close()
    seen: set[str] = set()
    for version, batch, samples in here.batches:
        assert len(batch.groups) == BATCH and not seen & samples.keys()
        seen |= samples.keys()
        for group in batch.groups:
            assert all(0 < n < 24 for n in group.observed), group
        for i, sample in samples.items():
            np.testing.assert_array_equal(sample.tokens, wanted[i].tokens)
            np.testing.assert_array_equal(sample.versions < 0, wanted[i].versions < 0)
            own = sample.versions[sample.versions >= 0]
            assert (np.diff(own) >= 0).all() and version - ALPHA <= own[0] <= own[-1] <= version


@pytest.mark.parametrize("mode", ["in_place", "recompute", "release"])
def test_episodes_outlive_pushes_or_begin_anew(
    model: Path, opened: list[Episodes], mode: HoldMode
) -> None:
    inner = [torch_engine(model, r, decode_floor_ms=4.0, progress_s=0.02) for r in (1, 2)]
    opened.append(Episodes(model, inner))
    with world(model, opened[0].engines) as three:
        opened[0].enter(three)
        for _ in range(5):
            three.step(mode)
        check(three, model)


def test_an_engine_that_dies_costs_no_episode(model: Path, opened: list[Episodes]) -> None:
    doomed = Doomed(model, 1)
    opened.append(Episodes(model, [doomed, torch_engine(model, 2, decode_floor_ms=4.0)]))
    with world(model, opened[0].engines) as three:
        opened[0].enter(three)
        three.step("recompute", lambda rank: doomed.die() if rank == 1 else None)
        for _ in range(3):
            three.step("recompute")
        assert not doomed.failure
        check(three, model)
