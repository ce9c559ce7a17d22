"""What a step reports, worked by hand."""

from types import SimpleNamespace

import pytest

from rlcore.algos.grpo import GRPOConfig
from rlcore.hf.size import ModelSize
from rlcore.records import Group, SampleRef
from rlcore.trainer import plan, report
from rlcore.trainer.progress import Ranks
from rlcore.utils.gpus import GPUS


def group(id: str, scores: tuple[float, ...], lengths: tuple[int, ...], prompt: int) -> Group:
    return Group(
        id=id,
        prompt_index=0,
        dataset="s",
        refs=tuple(SampleRef(owner=0, id=f"{id}.{k}") for k in range(len(scores))),
        scores=scores,
        lengths=lengths,
        finishes=("stop",) * len(scores),
        errors=("",) * len(scores),
        prompt_length=prompt,
    )


def test_the_rate_of_training_counts_the_tokens_that_were_trained_as_often_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dropped group is the longer one: the mean of all samples would flatter."""
    size = ModelSize(
        name="m",
        parameters=1000.0,
        layers=3,
        hidden=8,
        attention=16,
        kv_heads=2,
        layer_kv_bytes=1.0,
        cache_heads=2,
        kv_bytes=1.0,
        embeddings=100.0,
        head=100.0,
    )
    monkeypatch.setattr(report, "size_of", lambda hf, lora: size)
    monkeypatch.setattr(report.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(report.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(report, "memory", dict)
    groups = (group("t0", (1.0, 0.0), (3, 5), 2), group("t1", (1.0, 1.0), (40, 60), 10))
    run = SimpleNamespace(
        cfg=SimpleNamespace(
            run=SimpleNamespace(callbacks=()),
            data=SimpleNamespace(prompts_per_step=2, max_prompt_tokens=10),
            rollout=SimpleNamespace(samples_per_prompt=2),
            train=SimpleNamespace(epochs=3),
            lora=None,
        ),
        hf=None,
        ranks=Ranks(rank=0, size=2, model_parallel_groups=[[0, 1]], dp_rank=0),
        async_rollout=None,
    )
    algo = GRPOConfig(equal_reward_groups="drop")
    todo = plan.make(groups, algo, num_updates=1, num_ranks=1, seed=0)
    metrics = report.of_groups(run, groups, todo)
    metrics |= {"timing_s/step": 8.0, "timing_s/gen": 4.0, "timing_s/update_actor": 2.0}
    speeds = report.speeds(run, metrics)
    assert metrics["training/trained_rows"] == 2
    assert speeds["perf/train_tokens_per_s"] == pytest.approx(3 * (3 + 5 + 2 * 2) / 2.0)
    flops = 3 * (6 * 900 * (5 + 7) + 6 * 3 * 16 * (5**2 + 7**2))
    peak = GPUS["H100"].tflops * 1e12
    assert speeds["perf/mfu/actor"] == pytest.approx(flops / 2.0 / (2 * peak))
    assert speeds["perf/gen_tokens_per_s"] == pytest.approx((3 + 5 + 40 + 60) / 4.0)
    assert speeds["perf/samples_per_s"] == 4 / 8.0
    assert not [name for name in metrics if name.startswith("sched/")]
    monkeypatch.setattr(report.torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert report.utilisation(run, 12.0, 74.0, 2.0) == {}


def test_a_step_whose_episodes_have_all_failed_has_rates() -> None:
    """As with an environment that is down; no token was sampled."""
    run = SimpleNamespace(
        cfg=SimpleNamespace(
            run=SimpleNamespace(callbacks=()), data=SimpleNamespace(max_prompt_tokens=9)
        ),
        ranks=Ranks(rank=0, size=1, model_parallel_groups=[[0]], dp_rank=0),
        async_rollout=None,
    )
    run.cfg.train = SimpleNamespace(epochs=1)
    groups = (group("t0", (0.0, 0.0), (0, 0), 2),)
    todo = plan.make((), GRPOConfig(), num_updates=1, num_ranks=1, seed=0)
    metrics = report.of_groups(run, groups, todo) | {"timing_s/step": 2.0, "timing_s/gen": 1.0}
    assert metrics["response/aborted_ratio"] == 1
    speeds = report.speeds(run, metrics)
    assert speeds["perf/gen_tokens_per_s"] == 0 and "timing_per_token_ms/gen" not in speeds
