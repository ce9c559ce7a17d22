"""What the ranks of test_true_on_policy.py run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlcore.data.packing import pack_samples
from rlcore.mcore.learner import MegatronLearner
from rlcore.records import Finished, Preempted, Request, Sample, Sampling
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from rlcore.tensors import LossInputs, LossOutput
from tests.ranks import learner_ranks as ranks


class LossOfGaps(ranks.Loss):
    """A loss that keeps how far the log-probs of its own pass are from the sampler's."""

    def __init__(self) -> None:
        self.gaps: list[torch.Tensor] = []

    def __call__(self, x: LossInputs) -> LossOutput:
        gaps = (x.log_probs.detach() - x.rollout_log_probs).abs()
        self.gaps.append(gaps[x.mask])
        return super().__call__(x)


def requests(name: str, vocab: int, groups: int = 6, **sampling: Any) -> list[Request]:
    """Four requests of each prompt; prompts are of 1 to 23 tokens."""
    rng = np.random.default_rng(0)
    settings = Sampling(**({"temperature": 0.8, "max_tokens": 24, "stop_ids": (1,)} | sampling))
    prompts = [rng.integers(2, vocab, rng.integers(1, 24)).astype(np.int32) for _ in range(groups)]
    return [
        Request(id=f"{name}{i // 4}.{i % 4}", prompt=prompts[i // 4], sampling=settings)
        for i in range(4 * groups)
    ]


def sample(engine: TorchEngine, wanted: list[Request]) -> tuple[list[Sample], int]:
    """Return the samples in the order of the requests, and the number of preemptions. Often
    all running requests are prefilled again, at once and with what they have sampled."""
    engine.submit(wanted)
    found: dict[str, Sample] = {}
    preempted = 0
    while len(found) < len(wanted):
        events = engine.poll(1.0)
        if any(isinstance(event, Finished) for event in events):
            engine.pause("recompute")
            engine.resume()
        for event in events:
            preempted += isinstance(event, Preempted)
            if isinstance(event, Finished):
                found[event.id] = event.sample
    return [found[request.id] for request in wanted], preempted


def observe(learner: MegatronLearner, engine: TorchEngine) -> dict[str, Any]:
    """Return the largest gap of a token between sampler and learner, in passes without and with a
    gradient, before and after an update; the number of gaps, drafted tokens and preemptions."""
    layout, vocab = learner.layout, learner.hf.vocab_size
    found = {"drafted": 0, "preempted": 0}
    gaps: list[torch.Tensor] = []
    for version in range(2):
        load_weights(engine, ((n, t.clone()) for n, t in learner.export()), version)
        mine, preempted = sample(engine, requests(f"{version}.{layout.dp_rank}.", vocab))
        drafts = (sample.drafted for sample in mine if sample.drafted is not None)
        found["drafted"] += sum(int(drafted.sum()) for drafted in drafts)
        found["preempted"] += preempted
        every: list[Any] = [mine]
        if layout.dp > 1:  # train what the next rank has sampled
            every *= layout.dp
            dist.all_gather_object(every, mine)
        batch = pack_samples(every[(layout.dp_rank + 1) % layout.dp])
        normaliser = sum(len(one.tokens) for samples in every for one in samples)
        batch = batch.with_(
            advantage=torch.ones(batch.num_tokens), score=torch.ones(batch.num_tokens)
        )
        gaps.append((learner.logprobs(batch) - batch.rollout_log_probs).abs()[batch.mask])
        loss = LossOfGaps()
        learner.accumulate(batch, loss)
        learner.apply(float(normaliser))
        gaps += loss.gaps
    every_gap = torch.cat(gaps)
    return found | {"tokens": len(every_gap), "largest": float(every_gap.max())}


def multiplies_by_row() -> bool:
    """Return whether a small product's row does not depend on the other rows."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(300, 128, generator=g), torch.randn(128, 384, generator=g)
    return torch.equal((a @ b)[:1], a[:1] @ b)


def compare(rank: int, cases: Mapping[str, Mapping[str, Any]], on: bool = True) -> dict[str, Any]:
    """Return what `observe` finds in every case."""
    found = {}
    for name, case in cases.items():
        train = {"true_on_policy": on, **case.get("train", {})}
        sizes = case.get("sizes", {})
        learner = ranks.make(train, arch=case.get("arch", "qwen3"), sizes=sizes)
        by_row = multiplies_by_row()  # before the engine, which is in another process in most runs
        options = {"max_model_tokens": 64, "max_running": 9, "seed": 3}
        options |= {"true_on_policy": on, **case.get("engine", {})}
        found[name] = observe(learner, TorchEngine(learner.hf, **options)) | {"by row": by_row}
        learner.close()
    return found


def with_filters(rank: int) -> dict[str, tuple[list[list[int]], torch.Tensor, bool]]:
    """Return tokens and log-probs of requests with several temperatures and filters in one batch,
    and `multiplies_by_row`, by whether the engine is true on-policy."""
    learner = ranks.make({})
    weights = [(name, tensor.clone()) for name, tensor in learner.export()]
    found = {}
    for on in (False, True):
        engine = TorchEngine(learner.hf, max_model_tokens=64, seed=3, true_on_policy=on)
        load_weights(engine, iter(weights), 0)
        wanted = [
            one
            for i, sampling in enumerate(
                [{"top_p": 0.7}, {"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 3}, {}]
            )
            for one in requests(f"{i}.", learner.hf.vocab_size, groups=2, **sampling)
        ]
        samples, _ = sample(engine, wanted)
        logps = torch.from_numpy(np.concatenate([s.logps for s in samples]))
        found[str(on)] = [s.tokens.tolist() for s in samples], logps, multiplies_by_row()
    learner.close()
    return found
