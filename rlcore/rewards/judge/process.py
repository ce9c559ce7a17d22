"""Judge process: receives requests, runs batches through the model, and sends verdicts.

    python -m rlcore.rewards.judge.process CHANNEL_DESCRIPTOR PARENT_PID

`runner.ProcessBackend` starts this process, which exits with its parent. It inherits the parent's
environment and adds the MPS limits before CUDA starts.
"""

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rlcore.records import RewardResult
from rlcore.rewards.judge import mps
from rlcore.rewards.judge.config import JudgeRewardConfig
from rlcore.rewards.judge.residency import footprint, host_growth
from rlcore.rewards.judge.rubric import Rubric, of_probabilities, verdict_ids
from rlcore.rewards.judge.wire import (
    BatchDone,
    BatchStarted,
    CancelRequests,
    GradeRequest,
    JudgeReady,
    LoadJudge,
    ToJudge,
)
from rlcore.utils import net
from rlcore.utils.children import Channel, open_guarded_channel, sentence
from rlcore.utils.net import frame

_READ_CHARS = 1_000_000
"""Maximum number of characters tokenized between two batches; this takes 3 to 6 s."""
_STRETCH_CHARS = 20_000
"""Number of characters tokenized between two messages to the parent (a chunk). Each message
restarts the parent's time-out."""


def main() -> None:
    try:
        serve(open_guarded_channel("judge"))
    except EOFError:  # the parent has closed the channel
        sys.exit(0)


def serve(channel: Channel) -> None:
    """Load the judge and score requests. Raises EOFError when the parent closes the channel."""
    load = net.decode(channel.first(), LoadJudge)
    sys.path[:] = load.sys_path
    cfg = msgspec.convert(load.config, JudgeRewardConfig)
    device, _, number = load.device.partition(":")
    if device == "cuda":  # set the MPS limits before CUDA starts in this process
        os.environ.update(mps.limits(cfg.mps_percent, cfg.mps_gb, int(number)))
    try:
        judge = JudgeServer(cfg, load.device)
    except BaseException as error:
        traceback.print_exc()
        channel.send(frame(JudgeReady(error=sentence(error))))
        sys.exit(1)
    growth = host_growth(cfg, judge.model.hf, device, judge.model.layers.num_resident)
    channel.send(frame(JudgeReady(growth_bytes=growth)))
    while True:
        if not judge.num_waiting:
            judge.model.rest()
        while not judge.num_waiting:
            take(channel, judge, None)
        end = time.monotonic() + cfg.batch_wait_s
        while judge.num_waiting < cfg.batch_rows and (left := end - time.monotonic()) > 0:
            take(channel, judge, left)
        take(channel, judge, 0.0)
        batch = judge.next_batch(lambda key: channel.send(frame(BatchStarted((key,)))))
        if batch:
            channel.send(frame(BatchStarted(tuple(row.key for row in batch))))
            channel.send(frame(BatchDone(tuple(judge.score(batch)))))


def take(channel: Channel, judge: "JudgeServer", timeout_s: float | None) -> None:
    """Pass received messages to the judge. Wait up to `timeout_s` for the first message; None: wait
    without limit. Raises EOFError if the parent closes the channel."""
    for body in channel.receive(timeout_s):
        message = net.decode(body, ToJudge)
        if isinstance(message, CancelRequests):
            judge.drop(message.keys)
        else:
            judge.add(message)


@dataclass(eq=False, slots=True)
class JudgeRow:
    """Tokenized request to the judge."""

    key: int
    ids: list[int]
    is_cut: bool
    error: str = ""
    alone: bool = False


class JudgeServer:
    """Judge inside its process: model, tokenizer, rubric and the waiting requests."""

    def __init__(self, cfg: JudgeRewardConfig, device: str) -> None:
        """Load the model with all layers, within the start's time-out instead of a batch's. Raises
        ValueError if settings, rubric and model are incompatible."""
        import torch

        from rlcore.hf.tokenizer import load_tokenizer
        from rlcore.rewards.judge.model import JudgeModel

        torch.set_num_threads(cfg.threads)
        self._cfg = cfg
        self._rubric = Rubric(cfg)
        place = torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        self._tokenizer = load_tokenizer(cfg.model, key="--reward.model")
        chat = cfg.template == "auto" and self._tokenizer.has_chat_template
        self._is_chat = chat or cfg.template == "chat"
        self._ids: list[int] = []
        if cfg.method == "prefill":
            encode = self._tokenizer.encode
            self._ids = verdict_ids(cfg.good, encode, "good")
            self._ids += verdict_ids(cfg.bad, encode, "bad")
        self.model = JudgeModel(
            cfg.model,
            dtype=cfg.dtype,
            device=place,
            resident_ratio=cfg.resident_ratio,
            memory_bytes=1e9 * min(filter(None, (cfg.device_memory_gb, cfg.mps_gb)), default=0.0),
        )
        self.model.load_layers(footprint(cfg, self.model.hf).work)
        new = cfg.max_new_tokens if cfg.method == "generate" else 0
        self._longest = min(cfg.max_tokens, self.model.hf.max_positions - new)
        self.waiting: list[JudgeRow] = []
        self._unread: deque[GradeRequest] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of received requests that are not scored yet."""
        return len(self.waiting) + len(self._unread)

    def add(self, ask: GradeRequest) -> None:
        """Queue a request."""
        self._unread.append(ask)

    def _read(self, begins: Callable[[int], None]) -> None:
        """Tokenize received requests, up to `_READ_CHARS` characters.

        Meanwhile nothing is scored, but the parent's time-out runs. After every `_STRETCH_CHARS`
        characters, `begins` therefore notifies the parent, given the next request's key. If a
        request cannot be rendered, its error is returned when its batch is scored.
        """
        num_chars = stretch = 0
        while self._unread and num_chars < _READ_CHARS:
            ask = self._unread.popleft()
            size = len(ask.text) + len(ask.prompt)
            num_chars, stretch = num_chars + size, stretch + size
            if stretch > _STRETCH_CHARS:
                begins(ask.key)
                stretch = size
            try:
                ids, is_cut = self.encode(ask)
                self.waiting.append(JudgeRow(ask.key, ids, is_cut, alone=ask.alone))
            except ValueError as error:
                self.waiting.append(JudgeRow(ask.key, [], False, error=f"rubric: {error}"))

    def drop(self, keys: Sequence[int]) -> None:
        """Drop waiting requests. Unknown keys are ignored."""
        self.waiting = [row for row in self.waiting if row.key not in keys]
        self._unread = deque(ask for ask in self._unread if ask.key not in keys)

    def encode(self, ask: GradeRequest) -> tuple[list[int], bool]:
        """Return the tokens of the judge's prompt, and whether the response was cut. Raises
        ValueError if the prompt cannot be built."""
        defused = self._tokenizer.defused
        prompt, response = defused(ask.prompt), defused(ask.text)
        ids = self._render(prompt, ask, response)
        over = len(ids) - self._longest
        if over <= 0:
            return ids, False
        words = self._tokenizer.encode(response)
        kept = words[over + 8 :]  # cut 8 tokens more: tokenizing the cut text may add tokens
        if kept:
            ids = self._render(prompt, ask, self._tokenizer.decode(kept))
        if not kept or len(ids) > self._longest:
            raise ValueError(
                f"the judge's prompt has {len(ids) - len(kept or words)} tokens besides the "
                f"response, but only {self._longest} are allowed; raise --reward.max_tokens"
            )
        return ids, True

    def _render(self, prompt: str, ask: GradeRequest, response: str) -> list[int]:
        answer = self._tokenizer.defused(ask.answer)
        text = self._rubric.render(prompt, answer, response, ask.fields)
        if self._is_chat:
            text = self._tokenizer.render_chat([{"role": "user", "content": text}])
        return self._tokenizer.encode(text)

    def next_batch(self, begins: Callable[[int], None] = lambda key: None) -> list[JudgeRow]:
        """Take the oldest request and further requests of similar length, to keep padding small.
        `begins` restarts the parent's time-out, given the key of a request (see `_read`)."""
        self._read(begins)
        if not self.waiting:
            return []
        first = self.waiting[0]
        batch = [first]
        if not first.alone and not first.error:
            others = [row for row in self.waiting[1:] if not row.alone and not row.error]
            others.sort(key=lambda row: abs(len(row.ids) - len(first.ids)))
            longest = len(first.ids)
            for row in others:
                longest = max(longest, len(row.ids))
                rows = len(batch) + 1
                if rows > self._cfg.batch_rows or rows * longest > self._cfg.batch_tokens:
                    break
                batch.append(row)
        taken = set(map(id, batch))
        self.waiting = [row for row in self.waiting if id(row) not in taken]
        return batch

    def score(self, batch: list[JudgeRow]) -> list[RewardResult]:
        """Score a batch and return the results in the batch's order. If device memory is too small,
        retry the batch in halves, without resident layers."""
        if batch[0].error:
            return [RewardResult(score=0.0, error=batch[0].error)]
        found = self._fit(batch)
        self.model.may_grow()
        return found

    def _fit(self, batch: list[JudgeRow]) -> list[RewardResult]:
        import torch

        try:
            return self._score(batch)
        except torch.OutOfMemoryError as error:
            why = sentence(error)  # keep no error object: it would hold the forward pass's tensors
        was_small = self.model.is_small
        self.model.shrink()
        if len(batch) == 1:
            if not was_small:
                return self._fit(batch)
            return [RewardResult(score=0.0, error=f"memory: {why}")]
        half = len(batch) // 2
        return self._fit(batch[:half]) + self._fit(batch[half:])

    def _score(self, batch: list[JudgeRow]) -> list[RewardResult]:
        cfg, rows = self._cfg, [row.ids for row in batch]
        mass: list[float] = []
        errors: dict[int, str] = {}
        if cfg.method == "prefill":
            ps = self.model.probabilities(rows, self._ids).tolist()
            pairs = [(sum(p[: len(cfg.good)]), sum(p[len(cfg.good) :])) for p in ps]
            mass = [good + bad for good, bad in pairs]
            scores = [_verdict(errors, i, of_probabilities, *p) for i, p in enumerate(pairs)]
        else:
            stop = self._tokenizer.eos_ids
            texts = self._tokenizer.decode_batch(
                self.model.generate(rows, cfg.max_new_tokens, stop)
            )
            scores = [_verdict(errors, i, self._rubric.read, t) for i, t in enumerate(texts)]
        last = self.model.last
        details = {
            "judge_batch_rows": float(last.rows),
            "judge_streamed_layers": float(last.streamed_layers),
            "judge_prefill_tokens_per_s": last.prefill_tokens / max(last.prefill_s, 1e-9),
            "judge_cached": 0.0,
        }
        return [
            RewardResult(
                score=scores[i],
                error=errors.get(i, ""),
                details=details
                | {"judge_cut": float(row.is_cut)}
                | ({"judge_mass": mass[i]} if mass else {}),
            )
            for i, row in enumerate(batch)
        ]


def _verdict(errors: dict[int, str], row: int, score: Callable[..., float], *args: Any) -> float:
    """Return a row's score. If the judge gave no verdict, record the error and return 0."""
    try:
        return score(*args)
    except ValueError as error:
        errors[row] = f"verdict: {error}"
        return 0.0


if __name__ == "__main__":
    main()
