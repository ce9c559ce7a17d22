"""The engine and the learner agree: log-probs of the same tokens, and samples in float32 whatever
decodes beside them."""

import numpy as np
import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.data.packing import pack_samples
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.records import Finished, Request, Sample, Sampling
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests import kit


def requests(n: int, vocab: int) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=0.8, max_tokens=24, stop_ids=(1,))
    prompts = [rng.integers(2, vocab, rng.integers(1, 12)).astype(np.int32) for _ in range(n // 4)]
    return [
        Request(id=f"t{i // 4}.{i % 4}", prompt=prompts[i // 4], sampling=sampling)
        for i in range(n)
    ]


def sample(engine: TorchEngine, wanted: list[Request]) -> dict[str, Sample]:
    engine.submit(wanted)
    found: dict[str, Sample] = {}
    while len(found) < len(wanted):
        for event in engine.poll(1.0):
            if isinstance(event, Finished):
                found[event.id] = event.sample
    return found


def engine_with(hf: HFConfig, weights, max_running: int) -> TorchEngine:
    engine = TorchEngine(hf, max_model_tokens=64, max_running=max_running, seed=3)
    load_weights(engine, iter(weights), 0)
    return engine


@pytest.mark.parametrize("arch", list(kit.ARCHS))
def test_engine_log_probs_equal_the_learners_to_1e_5(tmp_path, arch):
    from rlcore.mcore.learner import MegatronLearner

    hf = HFConfig.from_folder(kit.tiny_hf_folder(tmp_path / arch, arch))
    learner = MegatronLearner(
        hf,
        ModelConfig(path=str(tmp_path / arch), dtype="float32"),
        TrainConfig(distributed_optimizer=False, tokens_per_micro_batch=128),
        temperature=0.8,
    )
    try:
        engine = engine_with(hf, [(n, t.clone()) for n, t in learner.export()], 5)
        batch = pack_samples(list(sample(engine, requests(16, hf.vocab_size)).values()))
        logp = learner.logprobs(batch)
    finally:
        learner.close()
    assert int(batch.mask.sum()) > 100
    worst = (logp - batch.rollout_log_probs).abs()[batch.mask].max()
    assert worst <= 1e-5, f"{worst:.2e}"


def test_in_float32_samples_differ_with_batch_mates_only_at_edges_of_the_distribution(tmp_path):
    """Two batch sizes: at the first token that differs, the random number lay at an edge, so the
    two tokens are neighbours of nearly equal cumulative probability. Such ties are counted."""
    hf = HFConfig.from_folder(kit.tiny_hf_folder(tmp_path / "m", "qwen3"))
    weights = [
        (name, torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.2)
        for i, (name, shape) in enumerate(expected(hf).items())
    ]
    wanted = requests(80, hf.vocab_size)
    few, many = (sample(engine_with(hf, weights, n), wanted) for n in (3, 64))
    ties = sum(few[r.id].tokens.tolist() != many[r.id].tokens.tolist() for r in wanted)
    assert ties <= 1, f"{ties} of {len(wanted)} samples differ"
