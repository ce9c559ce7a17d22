"""The torch engine on a GPU against itself on the CPU."""

from typing import Any

import pytest
import torch

from rlcore.hf.cache import Cache
from rlcore.hf.config import HFConfig
from rlcore.hf.model import CausalLM, ForwardInputs
from rlcore.records import Sample, Stats
from rlcore.rollout.histospec import history_of
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights
from tests import kit
from tests.contracts.engine_contract import (
    HF,
    assert_tie,
    collect,
    ended,
    full_logits,
    requests,
    run,
    samples,
    weights,
)
from tests.gpu import side

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
MIXTURES = ["qwen3_moe", "glm4_moe", "deepseek_v3"]
ARCHS = ["qwen2", "qwen3", "llama", "mistral", *MIXTURES]
ROWS, LENGTH, PREFIX = 3, 40, 25


# ---- the forward


def logits_of(hf: HFConfig, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Logits of a whole prefill, of a prefill behind a prefix and of single decode steps."""
    model = CausalLM(hf, dtype=dtype, device=device, max_tokens=64)
    model.allocate()
    for name, tensor in weights(hf, 3, 0.15).items():
        model.load(name, tensor)
    sizes = {"max_slots": 8, "max_columns": 64, "budget": 512}
    cache = Cache(hf.num_layers, hf.cache_shape, dtype=dtype, device=device, **sizes)
    cache.reserve(5, LENGTH, 0)
    tokens = torch.randint(53, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(start: int, stop: int, slot: int) -> ForwardInputs:
        positions = torch.arange(start, stop).expand(ROWS, -1)
        part = tokens[:, start:stop]
        return ForwardInputs(
            part.to(device), positions.to(device), slot, [(0, ROWS, stop)], causal=start == 0
        )

    found = {}
    with torch.inference_mode():
        found["whole"] = model.logits(model.forward(step(0, LENGTH, 0), cache))
        model.fill(step(0, PREFIX, 2), cache)
        found["part"] = model.logits(model.forward(step(PREFIX, LENGTH - 3, 2), cache))
        for at in range(LENGTH - 3, LENGTH):
            one = step(at, at + 1, 2)
            one.spans = [(0, 2, at + 1), (2, 3, at + 1)]
            found[f"token {at}"] = model.logits(model.forward(one, cache))
    return {name: value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_the_cpu(arch: str, dtype: torch.dtype) -> None:
    hf = HFConfig.from_dict(kit.tiny_config(arch))
    found = logits_of(hf, side.DEVICE, dtype)
    if dtype is torch.bfloat16:
        want = logits_of(hf, CPU, torch.float32)
        for name, logits in found.items():
            error = (logits - want[name]).norm(dim=-1) / want[name].norm(dim=-1)
            assert error.median() < 0.03, name  # a few tokens may take another expert
            assert error.max() < 0.1 or arch in MIXTURES, name
        return
    limit = 1e-9 if dtype is torch.float64 else 2e-4
    kit.assert_close_named(found, logits_of(hf, CPU, dtype), rtol=limit, atol=limit)


# ---- samples


def engine(device: torch.device, dtype: str, **options: Any) -> TorchEngine:
    made = TorchEngine(HF, max_model_tokens=96, dtype=dtype, device=device, seed=7, **options)
    load_weights(made, weights(HF, 0).items(), 0)
    return made


def both(dtype: str, todo: list, **options: Any) -> tuple[dict[str, Sample], dict[str, Sample]]:
    ours = run(engine(side.DEVICE, dtype, **options), todo)
    return ours, run(engine(CPU, dtype, **options), todo)


def parted(ours: dict[str, Sample], theirs: dict[str, Sample]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [i for i in theirs if ours[i].tokens.tolist() != theirs[i].tokens.tolist()]


def logp_distance(ours: dict[str, Sample], theirs: dict[str, Sample], skip: list[str]) -> float:
    return max(abs(ours[i].logps - theirs[i].logps).max() for i in theirs.keys() - set(skip))


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "filtered": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_in_float64_samples_are_those_of_the_cpu(name: str) -> None:
    ours, theirs = both("float64", requests(16, group=4, **SETTINGS[name]))
    assert not parted(ours, theirs)
    assert logp_distance(ours, theirs, []) < 1e-6
    assert len({tuple(s.tokens) for s in ours.values()}) > 12


def test_in_float32_greedy_tokens_are_those_of_the_cpu_but_for_ties() -> None:
    ours, theirs = both("float32", requests(24, group=1, temperature=0.0))
    for i in parted(ours, theirs):
        a, b = ours[i].tokens.tolist(), theirs[i].tokens.tolist()
        at = next(k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        best = full_logits(theirs[i].prompt, b)[at].topk(2).values
        assert best[0] - best[1] < 1e-4, (i, at)


@pytest.mark.parametrize("name", ["sampled", "filtered"])
def test_in_float32_samples_are_those_of_the_cpu_but_for_ties(name: str) -> None:
    todo = requests(32, group=4, **SETTINGS[name])
    ours, theirs = both("float32", todo)
    different = parted(ours, theirs)
    assert len(different) <= max(1, len(todo) // 50), different
    asked = {r.id: r for r in todo}
    for i in different:
        a, b = ours[i].tokens.tolist(), theirs[i].tokens.tolist()
        at = next(k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        assert_tie(asked[i], at, a[at], b[at], full_logits(theirs[i].prompt, b)[at])
    assert logp_distance(ours, theirs, different) < 1e-3


def test_a_small_cache_preempts_and_changes_no_token() -> None:
    todo = requests(8, group=4)
    roomy = run(engine(side.DEVICE, "float64"), todo)
    tight = run(engine(side.DEVICE, "float64", cache_tokens=400, max_running=16), todo)
    assert not parted(tight, roomy)


def test_drafts_change_no_token() -> None:
    """Verified in forwards of many widths, with histories that are half right."""
    todo = requests(16, group=4)
    plain = run(engine(side.DEVICE, "float64"), todo)
    settings = {"adaptive": False, "wait": True}
    drafting = engine(side.DEVICE, "float64", draft="history", draft_settings=settings)
    told = [history_of(s.id, s.prompt, s.tokens[: len(s.tokens) // 2], 1.0) for s in plain.values()]
    drafting.submit(todo)
    drafting.remember(told)
    events = collect(drafting, ended(len(todo)))
    assert not parted(samples(events), plain)
    assert sum(e.accepted_tokens for e in events if isinstance(e, Stats)) > len(todo)


def test_bfloat16_log_probs_are_near_those_of_float64() -> None:
    """A token sampled in bfloat16 has about the probability that float64 gives it."""
    distances = []
    for sample in run(engine(side.DEVICE, "bfloat16"), requests(16, group=2)).values():
        logps = full_logits(sample.prompt, sample.tokens).log_softmax(-1)
        tokens = torch.from_numpy(sample.tokens).long()
        want = logps.gather(-1, tokens[:, None])[:, 0]
        distances.append((torch.from_numpy(sample.logps).double() - want).abs())
    distance = torch.cat(distances)
    assert distance.mean() < 0.05
    assert distance.mean() > 1e-5  # it is bfloat16


def test_two_engines_draw_the_same_samples() -> None:
    todo = requests(16, group=4)
    first, again = (run(engine(side.DEVICE, "bfloat16"), todo) for _ in range(2))
    assert not parted(again, first)
    assert logp_distance(again, first, []) == 0
