"""Score of one response in this process: what a reward child computes, without a service."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rlcore.config.schema import RewardConfig
from rlcore.records import Finish, Prompt, request_of, training_group
from rlcore.rewards.kind import RewardKind, to_result
from rlcore.rewards.registry import resolve
from rlcore.rewards.wire import SampleInfo
from rlcore.utils import bounds
from rlcore.utils.errors import ConfigError


def score(
    text: str,
    gold: str,
    kind: str = "math",
    *,
    finish: Finish = "stop",
    fields: Mapping[str, Any] | None = None,
    **keys: Any,
) -> float:
    """Return the score of a response, as the reward children of a run compute it.

        rewards.score("so \\\\boxed{1/2}", "0.5")                                   # 1.0
        rewards.score("The answer is 7.", "7", "math", require_boxed=True)        # 0.0
        rewards.score("21", "21", "my_pkg.my_reward", bonus=0.1)

    There is no time limit, no isolation and no `on_error`: if the reward raises, so does this
    function. A reward that is a class is built at every call. The numbers of tokens in `sample` are
    0, since the text is not tokenised, and `random` is not seeded.

    Args:
        text: the decoded response.
        gold: the row's answer (`prompt.answer`).
        kind: name or dotted path of one reward, as in `--reward`.
        finish: why the response ended; `length`: it was cut at rollout.max_tokens.
        fields: the row's other columns (`prompt.fields`).
        keys: keys of the reward, as in `--reward.KEY`.

    Raises:
        ConfigError: there is no such reward or key, a value has a wrong type or is out of range, or
            the reward needs processes of its own.
    """
    if "," in kind:
        raise ConfigError(f"kind {kind}: is a sum; score its rewards one at a time")
    found = resolve(kind)
    if found.score is None:
        raise ConfigError(
            f"kind {kind}: runs in processes of its own, which rewards.score does not start; use "
            "rewards.service.RewardService, or --reward in a run"
        )
    sample = SampleInfo(
        id=request_of(training_group(0), 0), num_tokens=0, num_prompt_tokens=0, finish=finish
    )
    prompt = Prompt(
        index=0, dataset="", tokens=np.zeros(0, np.int32), answer=gold, fields=dict(fields or {})
    )
    text = text.encode("utf-8", "replace").decode()  # as the service sends it
    return to_result(found.score(_section(found, keys)).score(sample, prompt, text)).score


def _section(found: RewardKind, keys: dict[str, Any]) -> RewardConfig:
    problems = bounds.mistyped(found.config, keys, "reward")
    if not problems:
        section = msgspec.convert(keys, found.config)
        problems = bounds.broken(section, "reward")
    if problems:
        raise ConfigError("\n".join(problems))
    return section
