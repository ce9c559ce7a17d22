"""Episodes of real harnesses over the torch engine: what an abort frees, and what starts again."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlcore.envs.chat_api import TurnRequest, TurnSampling
from rlcore.envs.dialogue import Dialogue
from rlcore.envs.engine import EpisodeEngine
from rlcore.envs.episode import Transcript
from rlcore.envs.harness_env import KIND, EndpointConfig, HarnessHost, sample_of
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.records import Aborted, AnyEvent, Finished, Prompt, Request, Sample, Sampling
from rlcore.rollout.torch_engine.engine import TorchEngine
from tests import logged_harness
from tests.contracts.engine_contract import collect, ended
from tests.unit.test_rollout import torch_engine
from tests.unit.test_train_endpoint import model

PROMPT = np.array([5, 6, 7], np.int32)
WANTED, STARTED, RUNNING, SLOTS = 2, 8, 5, 3
"""Numbers of episodes that are kept, are started, and run at a time; turns sampled at a time."""


class Episodes:
    """An engine with slots for three turns, which take a while, and the log of its harnesses."""

    def __init__(self, folder: Path, real_data: Path) -> None:
        qwen = model(folder / "qwen", real_data)
        tokenizer = load_tokenizer(qwen)
        self.log = folder / "log"
        self.inner: TorchEngine = torch_engine(
            qwen, 0, max_model_tokens=400, max_running=SLOTS, decode_floor_ms=100.0
        )
        config = EndpointConfig(
            function="tests.logged_harness.play", grace_s=1.0, max_running_episodes=RUNNING
        )
        self.host = HarnessHost(config, tokenizer, num_tokens=151_680, max_tokens=400)
        self.engine = EpisodeEngine(
            self.inner,
            "endpoint",
            KIND,
            config,
            dialogue=Dialogue(tokenizer, is_chat=True),
            decode=tokenizer.decode,
            prompt_of=self.prompt_of,
            host=self.host,
        )

    def prompt_of(self, group: str) -> Prompt:
        fields = {"log": str(self.log), "wanted": WANTED}
        return Prompt(index=0, dataset="s", tokens=PROMPT, text="Say 1.", fields=fields)

    def submit(self, *numbers: int) -> None:
        sampling = Sampling(max_tokens=200)
        self.engine.submit(
            [Request(id=f"t0.{k}", prompt=PROMPT, sampling=sampling) for k in numbers]
        )

    def lines(self, what: str) -> list[tuple[str, int]]:
        return [(id, pid) for kind, id, pid, _ in logged_harness.read(self.log) if kind == what]

    def poll_until(self, condition: Callable[[list[AnyEvent]], bool]) -> list[AnyEvent]:
        """Poll until a condition of the events holds, and return them."""
        end, events = time.monotonic() + 120.0, []
        while not condition(events):
            assert time.monotonic() < end, (events, logged_harness.read(self.log))
            events += self.engine.poll(0.02)
        return events


@pytest.fixture
def episodes(tmp_path: Path, real_data: Path) -> Iterator[Episodes]:
    made = Episodes(tmp_path, real_data)
    yield made
    made.engine.close()


def test_late_harnesses_are_aborted_and_free_slots_threads_and_processes(
    episodes: Episodes,
) -> None:
    """Six episodes are late: three are in a long turn, two do nothing, one has not started."""
    made = episodes
    made.submit(*range(STARTED))
    made.poll_until(
        lambda events: (
            sum(isinstance(e, Finished) for e in events) == WANTED
            and len(made.lines("helper")) == RUNNING
            and len(made.inner._jobs) == SLOTS
        )
    )
    late = [f"t0.{k}" for k in range(WANTED, STARTED)]
    made.engine.abort(late)
    gone = collect(made.engine, ended(len(late)))
    assert sorted(e.id for e in gone if isinstance(e, Aborted)) == late
    assert not made.inner._jobs and not made.inner.can_work
    pids = [pid for what in ("start", "helper") for _, pid in made.lines(what)]
    assert len(pids) == WANTED + 2 * RUNNING
    made.poll_until(lambda _: not any(map(logged_harness.is_running, pids)))
    assert not made.host._endpoint._open and not made.host._running
    made.submit(0, 1)  # the same ids, in the slots of those before
    again = collect(made.engine, ended(2))
    samples = [e.sample for e in again if isinstance(e, Finished)]
    assert len(samples) == 2 and all(len(s.branches) == 1 for s in samples if s is not None)
    starts = Counter(id for id, _ in made.lines("start"))
    assert starts["t0.0"] == starts["t0.1"] == 2


def test_an_episode_that_was_released_starts_again_with_another_harness(
    episodes: Episodes,
) -> None:
    made = episodes
    made.submit(0)
    made.poll_until(lambda _: bool(made.inner._jobs))
    made.engine.abort(["t0.0"])
    (gone,) = [e for e in collect(made.engine, ended(1)) if isinstance(e, Aborted)]
    assert gone.sample is not None and not len(gone.sample.tokens) and not gone.sample.branches
    made.submit(0)
    (event,) = [e for e in collect(made.engine, ended(1)) if isinstance(e, Finished)]
    assert event.sample is not None and event.num_tokens == event.sample.num_tokens
    (_, first), (_, second) = made.lines("start")
    assert first != second and made.lines("done") == [("t0.0", second)]
    made.poll_until(lambda _: not logged_harness.is_running(first))


def test_the_scored_text_has_its_own_finish(tmp_path: Path, real_data: Path) -> None:
    """The harness cuts a request of its own, and the answer after it is whole."""
    tokenizer = load_tokenizer(model(tmp_path / "qwen", real_data))
    config = EndpointConfig(function="tests.logged_harness.play")
    host = HarnessHost(config, tokenizer, num_tokens=151_680, max_tokens=400)
    so_far = Transcript("t0.0", PROMPT)

    async def policy(request: Request) -> Sample:
        is_cut = request.sampling.max_tokens == 2
        tokens = np.array(tokenizer.encode("Sums of" if is_cut else "It is 5."), np.int32)
        return Sample(
            id=request.id,
            prompt=request.prompt,
            tokens=tokens,
            logps=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int32),
            finish="length" if is_cut else "stop",
        )

    async def run() -> Sample:
        served = host.open(so_far, policy, Sampling(max_tokens=200), "t0.0")
        for text, most in (("Give a title.", 2), ("2 + 3?", None)):
            messages = [{"role": "user", "content": text}]
            sampling = TurnSampling(max_tokens=most)
            await served.complete(TurnRequest(messages=messages, sampling=sampling))
        return sample_of(served.branches, "t0.0")

    try:
        sample = asyncio.run(run())
    finally:
        host.close()
    assert (so_far.text, so_far.finish, sample.finish) == ("It is 5.", "stop", "length")
