"""A judge behind a URL: any server that speaks OpenAI's chat completions, such as SGLang or vLLM.

With `prefill` the server is asked for one token and the log-probs of the likeliest ones; with
`generate` for its text. What fails in passing (no connection, 408, 429, 5xx) is asked again after a
pause that doubles, until the sample's time is over.
"""

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec

from rlcore.records import RewardResult
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.rubric import Rubric, of_probabilities
from rlcore.rewards.kind import Host, sentence
from rlcore.rewards.wire import Job

_TOP = 20
"""Likeliest tokens that are asked for: the most that OpenAI's interface gives."""
_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
_AGAIN = (408, 429)
_LARGEST_REPLY = 1 << 22


class EngineBackend:
    """A `runner.Backend`: `workers` requests at a time, each in a thread."""

    def __init__(self, cfg: JudgeRewardConfig, host: Host, settle: Any) -> None:
        """ValueError where the key for the server is asked for and not there."""
        self._cfg, self._host, self._settle = cfg, host, settle
        self._rubric = Rubric(cfg)
        self._headers = {"Content-Type": "application/json"}
        if cfg.api_key_env:
            key = os.environ.get(cfg.api_key_env, "")
            if not key:
                raise ValueError(
                    f"--reward.api_key_env {cfg.api_key_env}: is not set in the environment"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._futures: dict[int, Future[None]] = {}
        self._threads = ThreadPoolExecutor(cfg.workers, thread_name_prefix="judge requests")

    def ask(self, job: Job) -> None:
        """See `Backend`."""
        future = self._threads.submit(self._score, job)
        with self._lock:
            self._futures[job.key] = future
        future.add_done_callback(lambda _: self._forget(job.key))

    def drop(self, keys: Collection[int]) -> None:
        """See `Backend`. A request that is under way goes on."""
        with self._lock:
            found = [self._futures[key] for key in keys if key in self._futures]
        for future in found:
            future.cancel()

    def close(self) -> None:
        """Wait for no request: each has its own time-out."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, key: int) -> None:
        with self._lock:
            self._futures.pop(key, None)

    def _score(self, job: Job) -> None:
        begin = time.monotonic()
        try:
            result = self._verdict(job, begin)
        except Exception as error:  # a thread's end must not cost the sample its answer
            result = RewardResult(score=0.0, error=f"judge: {sentence(error)}")
        seconds = time.monotonic() - begin
        self._settle(job.key, msgspec.structs.replace(result, latency_s=seconds), "")

    def _verdict(self, job: Job, begin: float) -> RewardResult:
        """ValueError for a reply without a verdict."""
        prompt = job.prompt
        text = self._rubric.render(prompt.text, prompt.answer, job.text, prompt.fields)
        limit = self._host.timeout_s(job)
        try:
            reply = self._request(self._body(text), begin + limit)
        except TimeoutError as error:
            return RewardResult(score=0.0, error=f"timeout after {limit:g} s: {error}")
        except OSError as error:
            return RewardResult(score=0.0, error=f"http: {error}")
        details = {"judge_cached": 0.0}
        try:
            choice = reply["choices"][0]
            if self._cfg.method == "generate":
                score = self._rubric.read(choice["message"]["content"])
            else:
                good, bad = self._shares(choice["logprobs"]["content"][0]["top_logprobs"])
                score = of_probabilities(good, bad)
                details["judge_mass"] = good + bad
        except (KeyError, IndexError, TypeError) as error:
            return RewardResult(
                score=0.0, error=f"http: the reply lacks {error}; does the server give logprobs?"
            )
        except ValueError as error:
            return RewardResult(score=0.0, error=f"verdict: {error}")
        return RewardResult(score=score, details=details)

    def _body(self, text: str) -> bytes:
        cfg = self._cfg
        body: dict[str, Any] = {
            "model": cfg.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": cfg.max_new_tokens if cfg.method == "generate" else 1,
        }
        if cfg.method == "prefill":
            body |= {"logprobs": True, "top_logprobs": _TOP}
        return json.dumps(body).encode()

    def _shares(self, top: list[dict[str, Any]]) -> tuple[float, float]:
        """Probabilities of the good and of the bad words among the likeliest tokens; white space
        around a token does not count."""
        shares = {True: 0.0, False: 0.0}
        for entry in top:
            word = entry["token"].strip()
            if word in self._cfg.good or word in self._cfg.bad:
                shares[word in self._cfg.good] += math.exp(entry["logprob"])
        return shares[True], shares[False]

    def _request(self, body: bytes, end: float) -> dict[str, Any]:
        """The reply as JSON. TimeoutError when the time is over, naming the last failure; OSError
        for a refusal that would come again."""
        url = self._cfg.url.rstrip("/") + "/chat/completions"
        request = urllib.request.Request(url, body, self._headers)
        pause, last = _PAUSE_S, "no reply"
        while (left := end - time.monotonic()) > 0 and not self._closing.is_set():
            try:
                with urllib.request.urlopen(request, timeout=left) as reply:
                    return json.loads(reply.read(_LARGEST_REPLY))
            except urllib.error.HTTPError as error:
                last = f"status {error.code} from {url}"
                if error.code < 500 and error.code not in _AGAIN:
                    raise OSError(f"{last}: {error.read(300).decode(errors='replace')}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                last = f"{url}: {sentence(error)}"
            self._closing.wait(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise TimeoutError(last)
