"""One episode as a coroutine: an environment and a policy take turns, as in ROLL Flash's
EnvManager.

    prompt, [observation of reset], turn, observation, turn, observation, ..., turn

Tokens are only appended. Sampled tokens have a log-prob and a policy version. Observed tokens have
version -1 and are not trained on.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec import structs

from rlcore.envs.dialogue import Dialogue, tool_turn
from rlcore.envs.kind import EnvStep
from rlcore.envs.pool import EnvSlot
from rlcore.hf.tool_calls import ParsedTurn
from rlcore.records import (
    Finish,
    Prompt,
    Request,
    RequestId,
    Sample,
    Sampling,
    merge_routes,
    turn_of,
)

Policy = Callable[[Request], Awaitable[Sample]]
"""Function that samples one turn of the policy for a request."""


class PlayedEpisode(NamedTuple):
    """An episode that a host has played, and details of it for the metrics."""

    sample: Sample
    numbers: dict[str, float]


class EpisodeLimits(NamedTuple):
    """Limits of an episode; see `EnvConfig` for their meaning."""

    max_turns: int
    turn_tokens: int


@dataclass(slots=True)
class Transcript:
    """Tokens of an episode so far, with its score and statistics."""

    id: RequestId
    prompt: np.ndarray  # [P] int32
    tokens: list[int] = field(default_factory=list)  # [R]
    logps: list[float] = field(default_factory=list)  # [R]
    versions: list[int] = field(default_factory=list)  # [R], -1 if observed
    routes: np.ndarray | None = None
    """Routes of the tokens up to the policy's last turn, as in `Sample`."""
    num_turns: int = 0
    score: float = 0.0
    text: str = ""
    """Text of the policy's last turn."""
    finish: Finish | None = None
    """Finish of the last turn, in an episode of a harness; None in other episodes."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers in the environment's latest `info` that has numbers."""
    num_malformed: int = 0
    """Number of calls of tools that could not be made."""
    env_s: float = 0.0
    num_calls: int = 0

    @property
    def last(self) -> int:
        """Last token of the episode so far, or of the prompt if the episode has no token yet."""
        return self.tokens[-1] if self.tokens else int(self.prompt[-1])

    @property
    def num_sampled(self) -> int:
        return sum(v >= 0 for v in self.versions)

    def sampled(self, turn: Sample, text: str) -> None:
        """Append a turn of the policy; `text` is its decoded text."""
        self.tokens += turn.tokens.tolist()
        self.logps += turn.logps.tolist()
        self.versions += turn.versions.tolist()
        self.routes = merge_routes(self.routes, turn.routes)
        self.num_turns += 1
        self.text = text

    def took_turn(self, text: str, finish: Finish) -> None:
        """Count a turn of the policy whose tokens a harness's branches hold."""
        self.num_turns += 1
        self.text, self.finish = text, finish

    def rewarded(self, score: float, numbers: dict[str, float]) -> None:
        """Record the score and numbers of a harness."""
        self.score, self.numbers = score, numbers

    def called(self, turn: ParsedTurn) -> None:
        """Count the malformed calls of a turn."""
        self.num_malformed += len(turn.malformed)

    def observed(self, tokens: list[int]) -> None:
        """Append an observation of the environment."""
        self.tokens += tokens
        self.logps += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def answered(self, step: EnvStep) -> None:
        """Record the result of a call to the environment: reward, numbers and duration."""
        self.env_s += step.seconds
        self.num_calls += 1
        self.score += step.reward
        if step.numbers:
            self.numbers = step.numbers

    def context(self) -> np.ndarray:
        """Return the input of the policy: prompt tokens, then response tokens, [P + R]."""
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def sample(self, finish: Finish) -> Sample:
        """Return the episode as one `Sample`."""
        return Sample(
            id=self.id,
            prompt=self.prompt,
            tokens=np.array(self.tokens, np.int32),
            logps=np.array(self.logps, np.float32),
            versions=np.array(self.versions, np.int32),
            routes=self.routes,
            finish=finish,
        )


async def play(
    so_far: Transcript,
    place: EnvSlot,
    policy: Policy,
    dialogue: Dialogue,
    decode: Callable[[list[int]], str],
    sampling: Sampling,
    limits: EpisodeLimits,
    *,
    prompt: Prompt,
    seed: int,
    name: RequestId,
) -> Finish:
    """Play an episode to its end and record it in `so_far`. Turn ids, which seed the sampling, are
    derived from `name`. Returns `length` or `turns` if that limit was reached, else `stop`. Raises
    EnvError."""

    def room() -> int:
        return sampling.max_tokens - len(so_far.tokens)

    step = await place.reset(seed, prompt, so_far.id)
    so_far.answered(step)
    seen = dialogue.observation(step.seen, so_far.last)
    while so_far.num_turns < limits.max_turns:
        if room() <= len(seen):  # no space is left for a turn of one token
            return "length"
        so_far.observed(seen)
        most = min(limits.turn_tokens or room(), room())
        context = so_far.context()
        turn = await policy(
            Request(
                id=turn_of(name, so_far.num_turns),
                prompt=context,
                sampling=structs.replace(sampling, max_tokens=most),
            )
        )
        tokens = turn.tokens.tolist()
        so_far.sampled(turn, decode(tokens))
        parsed = dialogue.parsed(tokens, context)
        if parsed is None:
            step = await place.step(so_far.text, tuple(tokens))
        else:
            so_far.called(parsed)
            step = await place.step(so_far.text, tuple(tokens), tool_turn(parsed))
        so_far.answered(step)
        if step.is_over:
            return "length" if turn.finish == "length" and not room() else "stop"
        seen = dialogue.answer(parsed, step.seen, so_far.last)
    return "turns"
