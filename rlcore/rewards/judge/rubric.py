"""Rubric: renders the judge's prompt and converts the judge's answer to a score."""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_text

RUBRIC = Path(__file__).with_name("rubric.jinja")
_LONGEST = 20_000
"""Number of last characters of the judge's text that are searched for a verdict; `pattern` may take
quadratic time."""


class Rubric:
    """Jinja template of the judge's prompt, with the variables `prompt`, `answer`, `response`,
    `fields`, `method`, `good`, `bad` and `mark`. `mark` is a hash of the task and the response. A
    response cannot contain its own hash, so it cannot write the line that ends the response."""

    def __init__(self, cfg: JudgeRewardConfig) -> None:
        """Load the template. Raises ValueError if the file cannot be read or is not a valid
        template, or if `pattern` is invalid."""
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._cfg = cfg
        file = Path(cfg.rubric) if cfg.rubric else RUBRIC
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=False
        )
        try:
            self.source = read_text(file)
            self._template = environment.from_string(self.source)
        except (ConfigError, TemplateError, RecursionError) as error:
            raise ConfigError(
                f"--reward.rubric {file}: cannot be used ({error}); give a Jinja template with the "
                "names prompt, answer, response"
            ) from error
        try:
            self._pattern = re.compile(cfg.pattern)
        except re.error as error:
            raise ConfigError(f"--reward.pattern {cfg.pattern}: not a regex: {error}") from error
        if self._pattern.groups != 1:
            raise ConfigError(f"--reward.pattern {cfg.pattern}: must have one group: the verdict")

    def render(
        self, prompt: str, answer: str, response: str, fields: Mapping[str, Any] | None = None
    ) -> str:
        """Render the judge's prompt. Raises ValueError if the template uses an undefined name or
        fails on the row's fields."""
        cfg = self._cfg
        shown = "\0".join((prompt, answer, response)).encode("utf-8", "replace")
        try:
            return self._template.render(
                prompt=prompt,
                answer=answer,
                response=response,
                fields=fields or {},
                method=cfg.method,
                good=cfg.good,
                bad=cfg.bad,
                mark=hashlib.blake2b(shown, digest_size=6).hexdigest(),
            )
        except Exception as error:  # the template's use of a row's fields may raise anything
            raise ValueError(f"--reward.rubric: {type(error).__name__}: {error}") from error

    def read(self, text: str) -> float:
        """Extract the score from the judge's text. Raises ValueError if there is no verdict."""
        found = self._pattern.findall(text[-_LONGEST:])
        if not found:
            raise ValueError(f"no verdict in {text[-80:]!r}")
        return self.of_word(found[-1])

    def of_word(self, word: str) -> float:
        """Convert a verdict (word or points) to a score. Raises ValueError if it is invalid."""
        cfg, bare = self._cfg, word.strip().strip(".,;:!*`\"'()[]")
        if bare in cfg.good or bare in cfg.bad:
            return float(bare in cfg.good)
        try:
            points = float(bare.partition("/")[0])
        except ValueError:
            points = math.nan
        if not math.isfinite(points):
            raise ValueError(f"the verdict {word[:80]!r} is neither good, bad nor a number")
        return min(max(points / cfg.max_points, 0.0), 1.0)


def of_probabilities(good: float, bad: float) -> float:
    """Compute the score P(good) / (P(good) + P(bad)). Raises ValueError if both are 0."""
    if not 0 < good + bad < math.inf:
        raise ValueError("the judge gives none of the verdict tokens a probability")
    return good / (good + bad)


def verdict_ids(words: tuple[str, ...], encode: Callable[[str], list[int]], key: str) -> list[int]:
    """Encode the verdict words as tokens. Raises ValueError if a word is not one token."""
    ids = []
    for word in words:
        found = encode(word)
        if len(found) != 1:
            raise ConfigError(
                f"--reward.{key} {word}: is {len(found)} tokens of the judge's tokenizer; give "
                "words of one token, or use --reward.method generate"
            )
        ids += found
    return ids
