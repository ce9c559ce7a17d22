"""Demonstrations: prompts with responses that the policy has not sampled, packed and distributed
for training, alone (`sft.py`) or beside the samples of a step (`--data.demonstrations`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlcore.data.conversations import Demonstration
from rlcore.data.data_order import ShuffledEpochs
from rlcore.data.packing import pack_samples
from rlcore.records import Sample, request_of
from rlcore.sched.seqlen_balancing import balanced_partitions
from rlcore.tensors import Batch
from rlcore.trainer.run import Run, Training
from rlcore.utils import collective, net
from rlcore.utils import seed as seeds


@dataclass(frozen=True, kw_only=True)
class DemonstrationBatch:
    """Demonstrations that one update trains."""

    batch: Batch
    """Rows of this data-parallel rank."""
    lengths: list[int]
    """Number of learned tokens of each row, over all ranks."""
    datasets: dict[str, str]
    """Dataset of each row of the batch, by id."""


def batch_of(rows: Sequence[Demonstration], group: str = "d") -> Batch:
    """Pack demonstrations into a batch, as if they had been sampled as one group."""
    samples = []
    for i, row in enumerate(rows):
        samples.append(
            Sample(
                id=request_of(group, i),
                prompt=row.prompt,
                tokens=row.response,
                logps=np.zeros(len(row.response), np.float32),
                versions=np.where(row.learn, 0, -1).astype(np.int32),
                finish="stop",
            )
        )
    return pack_samples(samples)


def distribute(
    run: Training, rows: Sequence[Demonstration]
) -> tuple[list[Demonstration], list[Demonstration]]:
    """Distribute rank 0's rows by length. Return the rows of this data-parallel rank, and all rows.
    Collective over the train ranks."""
    sent = collective.broadcast_bytes(net.encode(list(rows)))
    whole = net.decode(sent, list[Demonstration])
    parts = balanced_partitions(list(map(len, whole)), len(run.ranks.model_parallel_groups))
    return [whole[i] for i in parts[run.ranks.dp_rank]], whole


def of_step(run: Run) -> list[DemonstrationBatch]:
    """Return the demonstrations of each update of this step; an empty list without
    --data.demonstrations. The rows depend only on the number of the step, so a resumed run
    continues with the same rows. Collective over the train ranks."""
    cfg = run.cfg
    if not cfg.data.demonstrations:
        return []
    count = rows_per_update(
        cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt // run.num_updates,
        cfg.data.demonstration_share,
    )
    known, order = run.data.demonstrations, None
    if known:  # on rank 0
        seed = seeds.derive(cfg.run.seed, "demonstrations")
        order = ShuffledEpochs(len(known), seed, cfg.data.shuffle)
    found = []
    for update in range(run.num_updates):
        start = ((run.step - 1) * run.num_updates + update) * count
        chosen = order.rows(start, count) if order is not None else []
        rows = [known[row] for _, row in chosen]
        mine, whole = distribute(run, rows)
        batch = batch_of(mine, f"d{update}")
        found.append(
            DemonstrationBatch(
                batch=batch,
                lengths=[int(row.learn.sum()) for row in whole],
                datasets={id: row.dataset for id, row in zip(batch.ids, mine, strict=True)},
            )
        )
    total = sum(sum(part.lengths) for part in found)
    run.progress.add({"training/demonstration_tokens": float(total)})
    return found


def rows_per_update(num_samples: int, share: float) -> int:
    """Return the number of demonstrations in an update with `num_samples` samples, at least 1, such
    that `share` of all its rows are demonstrations."""
    return max(1, round(num_samples * share / (1 - share)))
