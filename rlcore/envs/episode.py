"""One episode: an environment and a policy in turns, as a coroutine. ROLL Flash's EnvManager.

    prompt, [what reset shows], turn, observation, turn, observation, ..., turn

Tokens are only ever appended. What the policy sampled has its log-prob and policy version, what the
environment showed has the version -1 and is not trained.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from rlcore.envs.dialogue import Dialogue
from rlcore.envs.pool import Place
from rlcore.records import Finish, Prompt, Request, RequestId, Sample, Sampling, turn_of

Policy = Callable[[Request], Awaitable[Sample]]
"""Samples one turn."""


class Limits(NamedTuple):
    """Of an episode; `EnvConfig` says what each is."""

    max_turns: int
    turn_tokens: int


@dataclass(slots=True)
class Transcript:
    """The tokens of an episode so far, and what it has come to."""

    id: RequestId
    prompt: np.ndarray  # [P] int32
    tokens: list[int] = field(default_factory=list)  # [R]
    logps: list[float] = field(default_factory=list)  # [R]
    versions: list[int] = field(default_factory=list)  # [R], -1: the environment
    num_turns: int = 0
    score: float = 0.0
    text: str = ""
    """Of the last turn."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the environment's last info."""
    env_s: float = 0.0
    num_calls: int = 0

    @property
    def last(self) -> int:
        """The newest token."""
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    @property
    def num_sampled(self) -> int:
        return sum(v >= 0 for v in self.versions)

    def sampled(self, turn: Sample) -> None:
        """The policy had a turn."""
        self.tokens += turn.tokens.tolist()
        self.logps += turn.logps.tolist()
        self.versions += turn.versions.tolist()
        self.num_turns += 1

    def observed(self, tokens: list[int]) -> None:
        """The environment showed this."""
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def context(self) -> np.ndarray:
        """[P + R] all that the policy reads."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def sample(self, finish: Finish) -> Sample:
        """The episode as one response."""
        return Sample(
            id=self.id,
            prompt=self.prompt,
            tokens=np.array(self.tokens, np.int32),
            logps=np.array(self.logps, np.float32),
            versions=np.array(self.versions, np.int32),
            finish=finish,
        )


async def play(
    so_far: Transcript,
    place: Place,
    policy: Policy,
    dialogue: Dialogue,
    decode: Callable[[list[int]], str],
    sampling: Sampling,
    limits: Limits,
    *,
    prompt: Prompt,
    seed: int,
    name: RequestId,
) -> Finish:
    """Play an episode to its end, which `so_far` then has. `name` is that of its first turn: the
    sampler's random numbers hang on it. Returns `length` where a limit cut it. Raises EnvError."""

    def room() -> int:
        return sampling.max_tokens - len(so_far.tokens)

    step = await place.reset(seed, prompt, so_far.id)
    note(so_far, step.seconds, step.numbers)
    seen = dialogue.observation(step.seen, so_far.last)
    while so_far.num_turns < limits.max_turns:
        if room() <= len(seen):  # not even one token would follow
            return "length"
        so_far.observed(seen)
        most = min(limits.turn_tokens or room(), room())
        turn = await policy(
            Request(
                id=turn_of(name, so_far.num_turns),
                prompt=so_far.context(),
                sampling=structs.replace(sampling, max_tokens=most),
            )
        )
        so_far.sampled(turn)
        tokens = turn.tokens.tolist()
        so_far.text = decode(tokens)
        step = await place.step(so_far.text, tuple(tokens))
        note(so_far, step.seconds, step.numbers)
        so_far.score += step.reward
        if step.is_over:
            return "length" if turn.finish == "length" and not room() else "stop"
        seen = dialogue.observation(step.seen, so_far.last)
    return "length"


def note(so_far: Transcript, seconds: float, numbers: dict[str, float]) -> None:
    """The environment has answered."""
    so_far.env_s += seconds
    so_far.num_calls += 1
    if numbers:
        so_far.numbers = numbers
