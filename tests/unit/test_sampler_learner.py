"""The engine and the learner agree: log-probs of the same tokens, and samples in float32 whatever
decodes beside them."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config.schema import NO_ADAPTERS, LoraConfig, ModelConfig, TrainConfig
from rlcore.data.packing import pack_samples
from rlcore.envs.branches import Branches
from rlcore.envs.harness_env import sample_of
from rlcore.hf.config import HFConfig
from rlcore.hf.names import expected
from rlcore.hf.tokenizer import Tokenizer
from rlcore.records import Finished, Request, Sample, Sampling, turn_of
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests import kit
from tests.unit.test_envs_branches import make_tokenizer


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


def engine_with(hf: HFConfig, weights, max_running: int, max_tokens: int = 64) -> TorchEngine:
    engine = TorchEngine(hf, max_model_tokens=max_tokens, max_running=max_running, seed=3)
    load_weights(engine, iter(weights), 0)
    return engine


@pytest.mark.parametrize("lora", [NO_ADAPTERS, LoraConfig(rank=4)], ids=["all", "lora"])
@pytest.mark.parametrize("arch", list(kit.ARCHS))
def test_engine_log_probs_equal_the_learners_to_1e_5(tmp_path, arch, lora):
    """With adapters, the engine has their sums with the weights, and the learner has both."""
    from rlcore.mcore.learner import MegatronLearner
    from rlcore.mcore.lora import adapters_of

    hf = HFConfig.from_folder(kit.tiny_hf_folder(tmp_path / arch, arch))
    if hf.mla and lora.rank:
        pytest.skip("adapters do not support latent attention")
    learner = MegatronLearner(
        hf,
        ModelConfig(path=str(tmp_path / arch), dtype="float32"),
        TrainConfig(distributed_optimizer=False, tokens_per_micro_batch=128),
        lora=lora,
        temperature=0.8,
    )
    try:
        for adapter in adapters_of(learner._models):  # new ones would add nothing
            for matrix in adapter.B.values():
                torch.nn.init.normal_(matrix, std=0.03)
        engine = engine_with(hf, [(n, t.clone()) for n, t in learner.export()], 5)
        batch = pack_samples(list(sample(engine, requests(16, hf.vocab_size)).values()))
        logp = learner.logprobs(batch)
    finally:
        learner.close()
    assert int(batch.mask.sum()) > 100
    worst = (logp - batch.rollout_log_probs).abs()[batch.mask].max()
    assert worst <= 1e-5, f"{worst:.2e}"


def episode(engine: TorchEngine, tokenizer: Tokenizer, vocabulary: int, number: int) -> Sample:
    """An episode whose harness continues, edits and forks conversations at random."""
    die = random.Random(number)
    branches = Branches(tokenizer, family="qwen", num_tokens=vocabulary, max_tokens=400)
    known: list[list[dict[str, Any]]] = [[{"role": "user", "content": f"hello {number}"}]]
    for i in range(8):
        asked = list(die.choice(known[-3:]))
        if i and die.random() < 0.3:  # an edit, after which nothing earlier stands
            asked[0] = {"role": "user", "content": f"grow {i}"}
        turn = branches.begin(asked)
        sampling = Sampling(temperature=0.8, max_tokens=12, stop_ids=tokenizer.eos_ids)
        id = turn_of(f"t{number}.0", i)
        done = sample(engine, [Request(id=id, prompt=turn.context, sampling=sampling)])[id]
        answer = branches.end(turn, done)
        known.append([*asked, answer.message, {"role": "user", "content": f"ok {i}"}])
    found = sample_of(branches, f"t{number}.0")
    assert found.branches
    return found


def test_rows_of_a_branching_episode_have_the_learners_log_probs_to_1e_5(tmp_path):
    from rlcore.mcore.learner import MegatronLearner

    source = (kit.ROOT / "tests/contracts/templates/qwen2_5.jinja").read_text()
    tokenizer = make_tokenizer(tmp_path / "tokenizer", source)
    folder = kit.tiny_hf_folder(
        tmp_path / "m", "qwen3", vocab_size=384, max_position_embeddings=512
    )
    hf = HFConfig.from_folder(folder)
    learner = MegatronLearner(
        hf,
        ModelConfig(path=str(folder), dtype="float32"),
        TrainConfig(distributed_optimizer=False, tokens_per_micro_batch=512),
        temperature=0.8,
    )
    try:
        engine = engine_with(hf, [(n, t.clone()) for n, t in learner.export()], 5, 512)
        batch = pack_samples([episode(engine, tokenizer, 384, number) for number in range(6)])
        logp = learner.logprobs(batch)
    finally:
        learner.close()
    assert batch.num_sequences > 12 and int(batch.mask.sum()) > 200
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
