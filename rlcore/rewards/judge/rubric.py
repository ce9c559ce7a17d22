"""The judge's prompt, and how its answer becomes a score."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.utils.errors import ConfigError

RUBRIC = Path(__file__).with_name("rubric.jinja")


class Rubric:
    """One template with the names `prompt answer response fields method good bad`."""

    def __init__(self, cfg: JudgeRewardConfig) -> None:
        """ValueError where the file cannot be read or is no template, or `pattern` is none."""
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._cfg = cfg
        file = Path(cfg.rubric) if cfg.rubric else RUBRIC
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=False
        )
        try:
            self.source = file.read_text(encoding="utf-8")
            self._template = environment.from_string(self.source)
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ConfigError(
                f"--reward.rubric {file}: cannot be used ({error}); give a Jinja template with the "
                "names prompt, answer, response"
            ) from error
        try:
            self._pattern = re.compile(cfg.pattern)
        except re.error as error:
            raise ConfigError(f"--reward.pattern {cfg.pattern}: is no pattern: {error}") from error
        if self._pattern.groups != 1:
            raise ConfigError(f"--reward.pattern {cfg.pattern}: must have one group, the verdict")

    def render(
        self, prompt: str, answer: str, response: str, fields: Mapping[str, Any] | None = None
    ) -> str:
        """The prompt of the judge. ValueError where the template asks for what is not there, or
        cannot do with a row what it does."""
        cfg = self._cfg
        try:
            return self._template.render(
                prompt=prompt,
                answer=answer,
                response=response,
                fields=fields or {},
                method=cfg.method,
                good=cfg.good,
                bad=cfg.bad,
            )
        except Exception as error:  # what an expression on a row's fields raises, such as TypeError
            raise ValueError(f"--reward.rubric: {type(error).__name__}: {error}") from error

    def read(self, text: str) -> float:
        """The score in what the judge wrote. ValueError where there is no verdict in it."""
        found = self._pattern.findall(text)
        if not found:
            raise ValueError(f"no verdict in {text[-80:]!r}")
        return self.of_word(found[-1])

    def of_word(self, word: str) -> float:
        """The score of one verdict. ValueError where it is none."""
        cfg, bare = self._cfg, word.strip().strip(".,;:!*`\"'()[]")
        if bare in cfg.good or bare in cfg.bad:
            return float(bare in cfg.good)
        try:
            points = float(bare.partition("/")[0])
        except ValueError:
            raise ValueError(f"the verdict {word!r} is neither good, bad nor a number") from None
        return min(max(points / cfg.full_marks, 0.0), 1.0)


def of_probabilities(good: float, bad: float) -> float:
    """P(good) / (P(good) + P(bad)). ValueError where the judge expects neither."""
    if not good + bad > 0:
        raise ValueError("the judge gives none of the verdict tokens a probability")
    return good / (good + bad)


def verdict_ids(words: tuple[str, ...], encode: Callable[[str], list[int]], key: str) -> list[int]:
    """The tokens of verdict words. ValueError for a word that is not one token."""
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
