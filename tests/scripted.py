"""Engine whose turns are given texts, for runs in which every trained token is known.

    job = {..., "within": ["tests.scripted:run", tokenizer, scripts, folder]}

The requests of an episode get the turns of one script, in order, as the tokens of their text.
`asked` and `trained` read from `folder` what the engine was asked and what the learner was given.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.mcore.learner import MegatronLearner
from rlcore.protocols import InProcess
from rlcore.records import AnyEvent, Finished, Request, Sample
from rlcore.tensors import Batch

Scripts = Mapping[str, Sequence[str]]
"""Texts of an episode's turns, by the request id of the episode. The last one stands for further
turns."""


class AskedTurn(NamedTuple):
    """A request to the engine, and its answer."""

    id: str
    context: list[int]
    tokens: list[int]


class TrainedRow(NamedTuple):
    """A sequence that the learner was given."""

    id: str
    tokens: list[int]
    mask: list[bool]
    logps: list[float]
    advantage: list[float]


class ScriptedEngine(InProcess):
    """`protocols.Engine` without a model. The log-prob of token i of a turn is -(i + 1) / 1024."""

    def __init__(self, tokenizer: Tokenizer, scripts: Scripts, folder: Path) -> None:
        self._tokenizer, self._scripts, self._folder = tokenizer, scripts, folder
        self._events: list[AnyEvent] = []
        self._version = 0

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            tokens = np.array(self._tokenizer.encode(self._text(request)), np.int32)
            assert len(tokens) <= request.sampling.max_tokens
            sample = Sample(
                id=request.id,
                prompt=request.prompt,
                tokens=tokens,
                logps=logps(len(tokens)),
                versions=np.full(len(tokens), self._version, np.int32),
                finish="stop",
            )
            event = Finished(
                id=request.id, num_tokens=len(tokens), finish="stop", sample=sample, num_observed=0
            )
            self._events.append(event)
            turn = AskedTurn(request.id, request.prompt.tolist(), tokens.tolist())
            _append(self._folder / "asked.jsonl", turn._asdict())

    def _text(self, request: Request) -> str:
        group, response, *turn = request.id.split(".")
        script = self._scripts[f"{group}.{response}"]
        return script[min(int(turn[0]) if turn else 0, len(script) - 1)]

    def poll(self, timeout_s: float) -> list[AnyEvent]:
        found, self._events = self._events, []
        return found

    def begin_load(self, version: int) -> None:
        self._version = version

    def load_bucket(self, bucket: Any, payloads: Any) -> None: ...
    def end_load(self) -> None: ...
    def abort(self, ids: Collection[str]) -> None: ...
    def pause(self, mode: str) -> None: ...
    def resume(self) -> None: ...
    def sleep(self, tags: Collection[str]) -> None: ...
    def wake(self, tags: Collection[str]) -> None: ...
    def remember(self, histories: Any) -> None: ...
    def close(self) -> None: ...


def logps(count: int) -> np.ndarray:
    """The log-probs of a turn."""
    return -np.arange(1, count + 1, dtype=np.float32) / 1024


@contextmanager
def run(tokenizer: str, scripts: Scripts, folder: str) -> Iterator[None]:
    """Let a run sample the turns of `scripts`, and write down what its learner is given."""
    engine = ScriptedEngine(load_tokenizer(Path(tokenizer)), scripts, Path(folder))
    accumulate = MegatronLearner.accumulate

    def written(self: MegatronLearner, batch: Batch, loss: Any) -> None:
        for row in _rows(batch):
            _append(Path(folder) / "trained.jsonl", row._asdict())
        accumulate(self, batch, loss)

    with (
        mock.patch("rlcore.cli.builders.engine.TorchEngine", lambda hf, **settings: engine),
        mock.patch.object(MegatronLearner, "accumulate", written),
    ):
        yield


def _rows(batch: Batch) -> Iterator[TrainedRow]:
    for i, id in enumerate(batch.ids):
        here = slice(*batch.cu_seqlens[i : i + 2].tolist())
        fields = (batch.tokens, batch.mask, batch.rollout_log_probs, batch.advantage)
        yield TrainedRow(id, *(values[here].tolist() for values in fields))


def asked(folder: Path) -> list[AskedTurn]:
    """The turns that the engine was asked for, in order."""
    return [AskedTurn(**line) for line in _lines(folder / "asked.jsonl")]


def trained(folder: Path) -> list[TrainedRow]:
    """The rows that the learner was given."""
    return [TrainedRow(**line) for line in _lines(folder / "trained.jsonl")]


def check_rows(rows: Sequence[TrainedRow], turns: Sequence[AskedTurn]) -> None:
    """Check that each turn is trained once, behind the tokens from which it was sampled, with the
    log-probs of the engine, and that nothing else is trained."""
    left = list(turns)
    for row in rows:
        at = 0
        for is_trained, group in groupby(row.mask):
            end = at + len(list(group))
            if is_trained:
                (turn,) = [turn for turn in left if turn.context == row.tokens[:at]]
                left.remove(turn)
                assert row.tokens[at:end] == turn.tokens
                assert row.logps[at:end] == logps(end - at).tolist()
            else:
                assert not any(row.logps[at:end])
            at = end
    assert not left


def _append(file: Path, line: dict[str, Any]) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(line) + "\n")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
