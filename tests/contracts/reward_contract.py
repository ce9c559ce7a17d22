"""What every reward must do, whatever it computes: point `check_reward` at a name.

check_reward("exact", [Case(answer="21", text="21", score=1.0), ...])
"""

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rlcore.config.schema import RewardConfig
from rlcore.records import Prompt, Sample
from rlcore.rewards.kind import to_result
from rlcore.rewards.registry import resolve
from rlcore.rewards.service import RewardService
from rlcore.rewards.wire import SampleInfo

DEADLINE_S = 60.0
ODD_TEXTS = [
    "",
    " ",
    "\n" * 100,
    "\x00",
    "\u00e9\u4e2d\U0001f600",
    "\\boxed{",
    "}" * 50,
    "9" * 5000,
]


@dataclass
class Case:
    answer: str
    text: str
    score: float
    settings: dict[str, Any] = field(default_factory=dict)


def prompt_of(answer: str, index: int = 0) -> Prompt:
    """A row with this answer."""
    return Prompt(
        index=index, dataset="test", tokens=np.arange(5, dtype=np.int32), answer=answer, text="q"
    )


def sample_of(id: str, num_tokens: int = 3) -> Sample:
    """A sample of which only the counts matter."""
    tokens = np.ones(num_tokens, np.int32)
    return Sample(
        id=id,
        prompt=np.ones(5, np.int32),
        tokens=tokens,
        logps=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        finish="stop",
    )


def score_all(service: RewardService, wait_s: float = DEADLINE_S) -> dict[str, Any]:
    """Everything that is pending, by id."""
    out: dict[str, Any] = {}
    while service.num_pending:
        got = service.poll(wait_s)
        assert got, f"nothing came within {wait_s} s, {service.num_pending} are pending"
        out.update(got)
    return out


def check_reward(name: str, cases: list[Case]) -> None:
    """The suite: config, the worked cases, odd texts, and the same scores through the service."""
    resolved = resolve(name)
    assert issubclass(resolved.config, RewardConfig)
    sent = msgspec.to_builtins(resolved.config())
    assert msgspec.convert(sent, resolved.config) == resolved.config(), "config must survive JSON"
    for case in cases:
        reward = resolved.score(resolved.config(**case.settings))
        assert _score(reward, case.answer, case.text).score == case.score, case
    plain = [c for c in cases if not c.settings]
    reward = resolved.score(resolved.config())
    direct = {}
    for i, text in enumerate([c.text for c in plain] + ODD_TEXTS):
        answer = plain[i].answer if i < len(plain) else "7"
        first, second = _score(reward, answer, text), _score(reward, answer, text)
        assert math.isfinite(first.score), (answer, text)
        assert first.score == second.score, "the same sample must score the same"
        direct[f"t{i}.0"] = (answer, text, first.score)
    with RewardService(name, config=resolved.config(timeout_s=DEADLINE_S)) as service:
        for id, (answer, text, _) in direct.items():
            service.submit(id, sample_of(id), prompt_of(answer), text)
        scored = score_all(service)
    assert {i: (r.score, r.error) for i, r in scored.items()} == {
        i: (score, "") for i, (_, _, score) in direct.items()
    }


def _score(reward: Any, answer: str, text: str) -> Any:
    info = SampleInfo(id="t0.0", num_tokens=3, num_prompt_tokens=5, finish="stop")
    return to_result(reward.score(info, prompt_of(answer), text))
