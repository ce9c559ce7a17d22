"""Judge backend that uses a server with OpenAI's chat completions, such as SGLang or vLLM.

With `--reward.method prefill`, the backend requests one token and the log-probs of the likeliest
tokens; with `generate`, it requests text. `rewards/http.py` handles requests, retries and
deadlines.

Own code instead of the package openai, so that requests share retries and deadlines with http.py.
"""

import json
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from rlcore.records import RewardResult
from rlcore.rewards.http import HttpReward
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.rubric import Rubric, of_probabilities
from rlcore.rewards.kind import RunnerHost
from rlcore.rewards.wire import ScoreJob
from rlcore.utils.errors import ConfigError

_MARKS = re.compile(r"<(?=[|\uff5c]|/?s>|(?:start|end)_of_turn>|(?:bos|eos|pad)>)|\[(?=/?INST\])")
"""Beginnings of the special tokens of well-known chat templates. The tokenizer of the server is not
known here, so others are not found."""
_ROUNDING = 0.01
_TOP = 20
"""Number of likeliest tokens whose log-probs are requested: the maximum of OpenAI's interface."""


def key_of(cfg: JudgeRewardConfig) -> str:
    """Read the API key for the server; "" if none is configured. Raises ConfigError (a ValueError)
    if `api_key_env` names an environment variable that is not set."""
    key = os.environ.get(cfg.api_key_env, "") if cfg.api_key_env else ""
    if cfg.api_key_env and not key:
        raise ConfigError(f"--reward.api_key_env {cfg.api_key_env}: is not set in the environment")
    return key


class EngineBackend:
    """`runner.Backend` that sends HTTP requests, at most `workers` at a time."""

    def __init__(
        self,
        cfg: JudgeRewardConfig,
        host: RunnerHost,
        settle: Callable[[int, RewardResult, str], None],
    ) -> None:
        """Start the HTTP client. Raises ValueError if the variable `api_key_env` is not set."""
        self._cfg, self._settle, self._rubric = cfg, settle, Rubric(cfg)
        headers = {}
        if key := key_of(cfg):
            headers["authorization"] = f"Bearer {key}"
        self._requests = HttpReward(
            cfg.url.rstrip("/") + "/chat/completions",
            cfg,
            host._replace(done=lambda job, result, printed: settle(job.key, result, printed)),
            write=self._body,
            read=self._verdict,
            headers=headers,
        )

    def ask(self, job: ScoreJob) -> None:
        """Send the request for a verdict (`Backend.ask`)."""
        sample = msgspec.structs.replace(job.sample, id=str(job.key))  # `drop` cancels by this id
        try:
            self._requests.submit(msgspec.structs.replace(job, sample=sample))
        except ValueError as error:
            self._settle(job.key, RewardResult(score=0.0, error=f"rubric: {error}"), "")

    def drop(self, keys: Collection[int]) -> None:
        """Cancel the requests with these keys (`Backend.drop`)."""
        self._requests.cancel([str(key) for key in keys])

    def close(self) -> None:
        """Cancel all requests and stop."""
        self._requests.close()

    def _body(self, job: ScoreJob) -> bytes:
        """Encode the body of a request. Raises ValueError if the rubric cannot be rendered."""
        cfg, prompt = self._cfg, job.prompt
        task, answer, response = (
            _MARKS.sub(r"\g<0> ", text) for text in (prompt.text, prompt.answer, job.text)
        )
        text = self._rubric.render(task, answer, response, prompt.fields)
        body: dict[str, Any] = {
            "model": cfg.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": cfg.max_new_tokens if cfg.method == "generate" else 1,
        }
        if cfg.method == "prefill":
            body |= {"logprobs": True, "top_logprobs": _TOP}
        return json.dumps(body).encode()

    def _verdict(self, text: bytes) -> RewardResult:
        """Decode a reply. Raises ValueError if the reply's form is unexpected. If a reply has no
        verdict, the result carries an error."""
        try:
            choice = json.loads(text)["choices"][0]
            if self._cfg.method == "generate":
                wrote, top = str(choice["message"]["content"]), []
            else:
                wrote, top = "", choice["logprobs"]["content"][0]["top_logprobs"]
            shares = self._shares(top)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"reply lacks {error}; the server must return log-probs") from error
        details = {"judge_cached": 0.0}
        try:
            if self._cfg.method == "generate":
                score = self._rubric.read(wrote)
            else:
                score = of_probabilities(*shares)
                details["judge_mass"] = sum(shares)
        except ValueError as error:
            return RewardResult(score=0.0, error=f"verdict: {error}")
        return RewardResult(score=score, details=details)

    def _shares(self, top: list[dict[str, Any]]) -> tuple[float, float]:
        """Sum the probabilities of the good verdicts and of the bad verdicts among the likeliest
        tokens. White space around a token is ignored."""
        shares = {True: 0.0, False: 0.0}
        for entry in top:
            word = entry["token"].strip()
            if word in self._cfg.good or word in self._cfg.bad:
                if not entry["logprob"] <= _ROUNDING:
                    raise ValueError(f"log-prob {entry['logprob']}: must be at most 0")
                shares[word in self._cfg.good] += math.exp(entry["logprob"])
        return shares[True], shares[False]
