"""What the ranks of test_learner.py and test_checkpoint.py run."""

import errno
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rlcore.algos import grpo
from rlcore.config.schema import LoraConfig, ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.weights import save_folder
from rlcore.mcore import checkpoint
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput, cumulative
from rlcore.utils import disk
from rlcore.utils.errors import ConfigError
from tests import kit
from tests.ranks.sizes import LENGTHS

# A large eps: where a gradient is next to nothing, Adam would turn its rounding into a whole step.
TRAIN = {
    "lr": 1e-2,
    "clip_grad": 0.5,
    "adam_eps": 1e-3,
    "tokens_per_micro_batch": 64,
    "share_prefix": "true",  # also on a GPU in float32, without flash attention
}


LEFT_OUT = -1.0
"""Tokens with this score or less are rejected: about one in six."""


class Loss:
    """GRPO with an entropy bonus, a term of whole sequences and tokens that it rejects, so that
    every input has an effect."""

    needs_entropy_grad = True

    def __call__(self, x: LossInputs) -> LossOutput:
        # A sequence-level term: it needs all tokens of a sequence on one rank.
        sums = x.log_probs.new_zeros(x.num_sequences).index_add(0, x.sequence, x.log_probs * x.mask)
        out = grpo.loss(x, grpo.GRPOConfig())
        more = 0.001 * sums[x.sequence].square() - 0.01 * x.entropy
        return LossOutput(
            per_token=out.per_token + more, metrics=out.metrics, mask=x.score > LEFT_OUT
        )


PROMPTS = {0: 10, 4: 10, 8: 10, 2: 12, 6: 27, 9: 13}
"""Tokens of the prompts that are not of 3 tokens."""
COMMON = {4: (0, 10), 8: (0, 10), 6: (2, 25), 9: (11, 12)}
"""Sequences that begin as another does, and for how many tokens: three samples of a prompt, and two
turns, a long and a short one, whose history has trained tokens of another."""


def rows(step: int, lengths: list[int] = LENGTHS, vocab: int = 53) -> Batch:
    """The samples of one update, the same on every rank."""
    g = torch.Generator().manual_seed(100 + step)
    total = sum(lengths)
    prompts = [min(PROMPTS.get(i, 3), n - 1) for i, n in enumerate(lengths)]
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    tokens = torch.randint(0, vocab, (total,), generator=g)
    each = tokens.split(lengths)
    for row, (other, count) in COMMON.items() if lengths == LENGTHS else ():
        each[row][:count] = each[other][:count]
    return Batch(
        tokens=tokens,
        cu_seqlens=cumulative(lengths),
        mask=mask,
        old_log_probs=-3 - torch.rand(total, generator=g),
        advantage=torch.randn(total, generator=g),
        weight=0.5 + torch.rand(total, generator=g),
        correction=0.5 + torch.rand(total, generator=g),
        score=torch.randn(total, generator=g),
        ids=tuple(f"t{step}.{i}" for i in range(len(lengths))),
    )


def to_keep(batch: Batch) -> list[int]:
    """Tokens and sequences that `Loss` leaves, counted here."""
    left = batch.mask & (batch.score > LEFT_OUT)
    return [int(left.sum()), len(set(batch.sequence_index[left].tolist()))]


def make(
    layout: Mapping[str, Any],
    folder: str = "",
    arch: str = "qwen3",
    dtype: str = "float32",
    temperature: float = 0.8,
    sizes: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    **options: Any,
) -> MegatronLearner:
    """A learner of the tiny model: of a folder, or with random weights."""
    train = TrainConfig(**(TRAIN | {"distributed_optimizer": False} | dict(layout)))
    model = ModelConfig(path=folder, dtype=dtype, random_init=not folder)
    hf = (
        HFConfig.from_folder(folder)
        if folder
        else HFConfig.from_dict(kit.tiny_config(arch, **(sizes or {})))
    )
    adapters = LoraConfig(**(lora or {}))
    return MegatronLearner(
        hf, model, train, lora=adapters, temperature=temperature, seed=3, **options
    )


def mine(learner: MegatronLearner, batch: Batch) -> Batch:
    """This data-parallel rank's share."""
    return batch.select(range(learner.layout.dp_rank, batch.num_sequences, learner.layout.dp))


def step(learner: MegatronLearner, number: int) -> dict[str, float]:
    """One update on the rows of this number."""
    batch = rows(number)
    learner.accumulate(mine(learner, batch), Loss())
    return apply(learner, batch)


def apply(learner: MegatronLearner, batch: Batch) -> dict[str, float]:
    """The metrics of an update, without what depends on where its memory is."""
    metrics = learner.apply(float(batch.mask.sum()))
    return {name: value for name, value in metrics.items() if "offloaded_gb" not in name}


def observe(learner: MegatronLearner, steps: int = 3) -> dict[str, Any]:
    """Log-probs of this rank's rows, what the loss kept and the metrics of some updates, and the
    weights after them."""
    batch = rows(0)
    found: dict[str, Any] = {"rows": list(range(learner.layout.dp_rank, 12, learner.layout.dp))}
    found["logp"] = learner.logprobs(mine(learner, batch))
    for number in range(steps):
        batch = rows(number)
        learner.accumulate(mine(learner, batch), Loss())
        found[f"kept {number}"] = list(learner.kept())
        found[f"to keep {number}"] = to_keep(batch)
        metrics = apply(learner, batch)
        found |= {f"{k} {number}": v for k, v in metrics.items()}
    found["weights"] = kit.state(learner.export())
    if learner.lora.rank:
        found["adapters"] = kit.state(learner.export_adapters())
    return found


def parity(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every case in turn: {name: {layout, arch, ...}}."""
    found = {}
    for name, case in cases.items():
        learner = make(**case)
        found[name] = observe(learner)
        learner.close()
    return found


def one_by_one() -> dict[str, Any]:
    """Every sequence alone against all packed; and a batch that is empty."""
    packed = make({})
    batch = rows(0)
    found = {"packed logp": packed.logprobs(batch)}
    found["single logp"] = torch.cat(
        [packed.logprobs(batch.select([i])) for i in range(batch.num_sequences)]
    )
    packed.accumulate(batch, Loss())
    found["packed"] = packed.apply(float(batch.mask.sum()))
    found["packed weights"] = kit.state(packed.export())
    packed.close()
    single = make({"tokens_per_micro_batch": 1})
    for i in range(batch.num_sequences):
        single.accumulate(batch.select([i]), Loss())
    single.accumulate(batch.select([]), Loss())
    found["empty logp"] = single.logprobs(batch.select([]))
    found["single"] = single.apply(float(batch.mask.sum()))
    found["single weights"] = kit.state(single.export())
    single.close()
    return found


def empty_shards() -> dict[str, Any]:
    """One sequence for all data-parallel ranks."""
    found = {}
    for name, layout in {"pp2": {"pp": 2}, "ep2": {"ep": 2}}.items():
        learner = make(layout, arch="qwen3_moe" if name == "ep2" else "qwen3")
        batch = rows(0).select([2] if learner.layout.dp_rank == 0 else [])
        found[f"{name} logp"] = learner.logprobs(batch)
        learner.accumulate(batch, Loss())
        found[name] = learner.apply(30.0)
        learner.close()
    return found


def gang(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that four ranks run for test_learner.py, in one start."""
    return {"parity": parity(cases), "empty": empty_shards()}


def alone(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same for one rank."""
    return {"parity": parity(cases), "one by one": one_by_one()}


# ---- checkpoints

SHARD_BYTES = 20_000
"""Several shards for each rank."""


def saved(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """For every case two updates, save, also as a Hugging Face folder, two more."""
    found = {}
    for name, case in cases.items():
        learner = make(**case)
        for number in range(2):
            step(learner, number)
        path, later = Path(folder) / name, Path(f"{folder}_later") / name
        learner.save(path)
        hf = Path(f"{folder}_hf") / name
        save_folder(learner.export(), learner.hf, None, hf, SHARD_BYTES, together=True)
        no_memory = mock.patch.object(checkpoint.AsyncWriter, "_stage", last_rank_has_no_memory)
        with no_memory, pytest.raises(MemoryError) as failed:
            learner.save_async(later)
        has_trained = threading.Event()
        with mock.patch.object(checkpoint, "_write", after(has_trained, checkpoint._write)):
            written = learner.save_async(later)
            found[name] = two_more(learner)
            has_trained.set()
            checksums = written.result().checksums
        found[name]["same files"] = {
            file: (path / file).read_bytes() == (later / file).read_bytes() for file in checksums
        }
        found[name]["no memory"] = str(failed.value)
        found[name]["checksums"] = checksums == {f: disk.checksum(later / f) for f in checksums}
        learner.close()
    return found


def last_rank_has_no_memory(*_: Any) -> list[Any]:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise RuntimeError("CUDA error: out of memory")
    return []


def after(event: threading.Event, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, begun once the event is set."""

    def waiting(*args: Any) -> Any:
        assert event.wait(120)
        return work(*args)

    return waiting


def cannot_export(rank: int, path: str) -> str:
    """The error of a folder that the first rank cannot make."""
    learner = make({"tp": 2})
    try:
        save_folder(learner.export(), learner.hf, None, path, together=True)
    except (OSError, ConfigError) as error:
        return str(error)
    return ""


def cannot_publish(rank: int, folder: str) -> list[Any]:
    """The error of a checkpoint that the first rank cannot rename, and what is left."""

    def over_quota(*_: Path) -> None:
        raise OSError(errno.EDQUOT, "over quota")

    no_rename = mock.patch.object(disk, "rename", over_quota)
    with closing(make({})) as learner, no_rename, pytest.raises(OSError) as failed:
        learner.save(Path(folder) / "c")
    dist.barrier()  # rank 0 removes what was written
    return [str(failed.value), [path.name for path in Path(folder).iterdir()]]


def other_vocabularies(rank: int, folder: str) -> dict[str, str]:
    """What loading says of a checkpoint of 53 tokens and a row of padding, by the model's size."""
    path, found = Path(folder) / "c", dict[str, str]()
    with closing(make({"tp": 2})) as learner:
        learner.save(path)
    for size in (50, 53, 54, 64):
        with closing(make({}, sizes={"vocab_size": size})) as learner:
            found[str(size)] = error_of_load(learner, path)
    dist.barrier()
    if rank == 0:
        index = json.loads((path / checkpoint.INDEX).read_text())
        index["state"].pop("vocab_size", None)
        (path / checkpoint.INDEX).write_text(json.dumps(index))
    dist.barrier()
    with closing(make({})) as learner:
        found["older"] = error_of_load(learner, path)
    return found


def error_of_load(learner: MegatronLearner, path: Path) -> str:
    try:
        learner.load(path)
    except ConfigError as error:
        return str(error)
    return ""


def resumed(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Load `case["of"]` into a model that has gone elsewhere, then two more updates."""
    found = {}
    for name, case in cases.items():
        case = dict(case)
        path = Path(folder) / case.pop("of")
        learner = make(**case)
        step(learner, 7)
        learner.load(path)
        found[name] = {"version at load": learner.version} | two_more(learner)
        learner.close()
    return found


def two_more(learner: MegatronLearner) -> dict[str, Any]:
    return {
        "metrics": {f"{k} {n}": v for n in (2, 3) for k, v in step(learner, n).items()},
        "weights": kit.state(learner.export()),
        "version": learner.version,
    }
