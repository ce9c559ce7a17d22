"""All teachers of a run: each scores the samples of its datasets.

The ranks of a model-parallel group have the same batches. They divide the rows among themselves,
and exchange the scores.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.teacher.scores import TeacherRow, TeacherScores, TokenScorer
from rlcore.tensors import Batch
from rlcore.utils import collective


class Teachers:
    """Teachers by dataset, on one rank."""

    def __init__(
        self, scorers: Mapping[str, TokenScorer], top_k: int, group: collective.Group = None
    ) -> None:
        """
        Args:
            scorers: teacher of each dataset; the key "" has the teacher of all others.
            top_k: number of likeliest tokens that the teachers return; 0: none.
            group: ranks that have the same batches; None: this rank alone.
        """
        self._scorers, self._top_k, self._group = dict(scorers), top_k, group

    def add(
        self,
        batches: Sequence[Batch],
        datasets: Mapping[str, str],
        alive: Callable[[], None] = lambda: None,
    ) -> list[Batch]:
        """Return the batches with the teachers' log-probs of the tokens in their masks. Each
        teacher is loaded once. Collective over the group.

        Args:
            datasets: dataset of each sample, by id.
            alive: called after each batch.

        Raises:
            ValueError: a dataset has no teacher, or a teacher returns an invalid score.
        """
        rank, size = collective.place(self._group) if self._group is not None else (0, 1)
        made = [_Scored(batch, self._top_k) for batch in batches]
        teacher_of = [[self._teacher_of(datasets[id]) for id in b.ids] for b in batches]
        for name, scorer in self._scorers.items():
            shares = [
                [i for i in scored.to_score() if names[i] == name][rank::size]
                for scored, names in zip(made, teacher_of, strict=True)
            ]
            if not any(shares):
                continue
            with scorer.loaded():
                for scored, share in zip(made, shares, strict=True):
                    found = scorer.score([scored.rows[row] for row in share])
                    for row, scores in zip(share, found, strict=True):
                        scored.fill(row, scores)
                    alive()
        return [scored.batch(self._group) for scored in made]

    def metrics(self) -> dict[str, float]:
        """Return the number of layers that the teachers streamed in their latest pass."""
        counts = [getattr(s, "streamed_layers", 0) for s in self._scorers.values()]
        return {"actor/teacher_streamed_layers": float(max(counts))}

    def _teacher_of(self, dataset: str) -> str:
        if dataset in self._scorers:
            return dataset
        if "" not in self._scorers:
            raise ValueError(
                f"--teacher.models: no teacher for the dataset {dataset!r}; add one, as "
                f"`{dataset}=MODEL`, or one for all others"
            )
        return ""


class _Scored:
    """Scores of one batch that are being collected."""

    def __init__(self, batch: Batch, top_k: int) -> None:
        self._batch = batch
        self._starts = batch.cu_seqlens.tolist()
        count = batch.num_tokens
        self._log_probs = torch.zeros(count)
        self._ids = torch.zeros(count, top_k, dtype=torch.int64)
        self._top = torch.zeros(count, top_k)
        self._own = [
            TeacherRow(batch.tokens[a:b], _without_first(batch.mask[a:b]))
            for a, b in zip(self._starts, self._starts[1:], strict=False)
        ]
        self.rows = self._own
        """Rows as the teacher reads them."""
        if batch.teacher_prompts:
            pairs = zip(self._own, batch.teacher_prompts, strict=True)
            self.rows = [_after(row, prompt) for row, prompt in pairs]

    def to_score(self) -> list[int]:
        """Return the indices of the rows with a token to score."""
        return [i for i, row in enumerate(self.rows) if row.mask.any()]

    def fill(self, row: int, scores: TeacherScores) -> None:
        """Enter the scores of a row."""
        place = self._starts[row] + self._own[row].mask.nonzero().flatten()
        self._log_probs[place] = scores.log_probs
        self._ids[place], self._top[place] = scores.top_ids, scores.top_log_probs

    def batch(self, group: collective.Group) -> Batch:
        """Return the batch with the scores of all ranks. Collective over the group."""
        for part in (self._log_probs, self._ids, self._top) if group is not None else ():
            if part.numel():
                dist.all_reduce(part, group=group)  # every token was scored by one rank
        changes: dict[str, Any] = {"teacher_log_probs": self._log_probs, "teacher_prompts": ()}
        if self._top.size(1):
            changes |= {"teacher_top_ids": self._ids, "teacher_top_log_probs": self._top}
        made = self._batch.with_(**changes)
        made.check()
        return made


def _after(row: TeacherRow, prompt: Tensor | None) -> TeacherRow:
    """Return a row with another prompt: all tokens before the first scored one are replaced."""
    if prompt is None or not row.mask.any():
        return row
    start = int(row.mask.nonzero()[0])
    tokens = torch.cat([prompt, row.tokens[start:]])
    return TeacherRow(tokens, torch.cat([torch.zeros(len(prompt)).bool(), row.mask[start:]]))


def _without_first(mask: Tensor) -> Tensor:
    """Return the mask without the first token, which nothing predicts."""
    found = mask.clone()
    found[:1] = False
    return found
