"""Teacher behind a URL: a server that returns log-probs of the tokens of a prompt.

    URL             server    request
    .../generate    SGLang    input_ids, return_logprob, logprob_start_len 0, top_logprobs_num K
    .../v1          vLLM      completions of a list of token ids, with prompt_logprobs K

OpenAI's own interface has no log-probs of prompts. Servers give them at temperature 1. A server
must have the policy's tokenizer, because it gets and returns token ids.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from rlcore.config.schema import TeacherConfig
from rlcore.teacher.scores import TeacherRow, TeacherScores
from rlcore.utils.children import sentence
from rlcore.utils.errors import ConfigError

_AGAIN = (408, 425, 429)
"""Status codes below 500 after which a request is sent again."""
_SHOWN_CHARS = 200


class TeacherServer:
    """`TokenScorer` that sends a request for each row, several at a time."""

    def __init__(self, url: str, cfg: TeacherConfig, *, top_k: int, seed: int = 0) -> None:
        """Raise ConfigError if the variable `teacher.api_key_env` is not set."""
        self._url, self._cfg, self._top_k = url.rstrip("/"), cfg, top_k
        self._random = random.Random(seed)
        self._is_sglang = self._url.endswith("/generate")
        headers = {}
        if cfg.api_key_env:
            key = os.environ.get(cfg.api_key_env, "")
            if not key:
                raise ConfigError(
                    f"--teacher.api_key_env {cfg.api_key_env}: is not set in the environment; set "
                    "it, or leave the key out"
                )
            headers["authorization"] = f"Bearer {key}"
        limits = httpx.Limits(max_connections=cfg.workers)
        self._client = httpx.Client(timeout=cfg.timeout_s, limits=limits, headers=headers)
        self._threads = ThreadPoolExecutor(cfg.workers, thread_name_prefix="teacher")

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Do nothing: the server holds the model (`TokenScorer.loaded`)."""
        yield

    def score(self, rows: Sequence[TeacherRow]) -> list[TeacherScores]:
        """Return the scores of each row (`TokenScorer.score`).

        Raises:
            RuntimeError: a request failed, also when it was sent again.
            ValueError: a reply has no log-probs, or not those of the tokens that were sent.
        """
        return list(self._threads.map(self._one, rows))

    def close(self) -> None:
        """Cancel waiting requests and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _one(self, row: TeacherRow) -> TeacherScores:
        ids = row.tokens.tolist()
        reply = self._posted(*self._request(ids))
        try:
            logps, tops = self._sglang(reply) if self._is_sglang else _vllm(reply, ids)
            return self._scores(row, logps, tops)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--teacher.models {self._url}: the reply lacks log-probs of the prompt "
                f"({sentence(error)}); see rlcore/teacher/README.md for the servers that give them"
            ) from error

    def _request(self, ids: list[int]) -> tuple[str, dict[str, Any]]:
        """Return address and body of the request for a row."""
        if self._is_sglang:
            return self._url, {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": self._top_k,
            }
        return f"{self._url}/completions", {
            "model": self._cfg.served_name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k,
        }

    def _posted(self, url: str, body: dict[str, Any]) -> Any:
        """Send a request, again after errors that may pass, and return the decoded reply."""
        cfg, pause_s, last = self._cfg, self._cfg.backoff_s, ""
        for k in range(cfg.retries + 1):
            if k:
                time.sleep(pause_s * (1 - self._random.random() / 2))
                pause_s *= 2
            try:
                answer = self._client.post(url, json=body)
            except httpx.HTTPError as error:
                last = sentence(error) or type(error).__name__
                continue
            if answer.status_code == 200:
                try:
                    return answer.json()
                except ValueError as error:
                    raise ValueError(
                        f"--teacher.models {self._url}: the reply is not JSON; give the address "
                        "of a server of language models"
                    ) from error
            last = f"status {answer.status_code}: {answer.text[:_SHOWN_CHARS]}"
            if answer.status_code < 500 and answer.status_code not in _AGAIN:
                break
        raise RuntimeError(
            f"--teacher.models {self._url}: no log-probs after {k + 1} tries ({last}); check that "
            "the server is up, or raise --teacher.timeout_s"
        )

    def _sglang(self, reply: Any) -> tuple[list[Any], list[Any]]:
        """Return log-probs and likeliest tokens of every token; None for the first."""
        meta = reply["meta_info"]
        logps = [entry[0] for entry in meta["input_token_logprobs"]]
        tops: list[Any] = [None] * len(logps)
        if self._top_k:
            tops = [
                None if entries is None else [(entry[1], entry[0]) for entry in entries]
                for entries in meta["input_top_logprobs"]
            ]
        return logps, tops

    def _scores(self, row: TeacherRow, logps: Sequence[Any], tops: Sequence[Any]) -> TeacherScores:
        if len(logps) != len(row.tokens) or len(tops) != len(row.tokens):
            raise ValueError(
                f"--teacher.models {self._url}: returned log-probs of {len(logps)} tokens for "
                f"{len(row.tokens)}; the server must have the policy's tokenizer"
            )
        where = row.mask.nonzero().flatten().tolist()
        found = [sorted(tops[t] or (), key=_falling)[: self._top_k] for t in where]
        if any(len(entries) != self._top_k for entries in found):
            raise ValueError(
                f"--teacher.models {self._url}: returned fewer than --teacher.top_k "
                f"{self._top_k} likeliest tokens; lower it to what the server allows"
            )
        shape = (len(where), self._top_k)
        return TeacherScores(
            torch.tensor([float(logps[t]) for t in where], dtype=torch.float32),
            torch.tensor([[id for id, _ in e] for e in found], dtype=torch.int64).view(shape),
            torch.tensor([[p for _, p in e] for e in found], dtype=torch.float32).view(shape),
        )


def _falling(entry: tuple[int, float]) -> float:
    return -entry[1]


def _vllm(reply: Any, ids: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return log-probs and likeliest tokens of every token; None for the first."""
    entries: Sequence[Mapping[str, Any] | None] = reply["choices"][0]["prompt_logprobs"]
    logps: list[Any] = [None] * len(entries)
    tops: list[Any] = [None] * len(entries)
    for t, entry in enumerate(entries):
        if entry is not None:
            tops[t] = [(int(id), float(found["logprob"])) for id, found in entry.items()]
            logps[t] = dict(tops[t])[ids[t]]
    return logps, tops
