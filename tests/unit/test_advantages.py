"""From rewards to advantages in the trainer, worked by hand on one rank."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs

from rlcore.algos import grpo
from rlcore.algos.base import AlgoConfig
from rlcore.algos.kl import AdaptiveController
from rlcore.tensors import Batch, cumulative
from rlcore.trainer import advantages, plan
from rlcore.trainer.progress import Progress, Ranks
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError
from tests.unit.test_plan import groups

LN2 = 0.6931471805599453


def setting(scores: list[list[float]], length: int = 2, **algo: Any):
    """A run, its plan with one update, and the batch of it: one prompt token, then the response."""
    cfg = AlgoConfig(**algo)
    made = [
        g.__class__(**{f: getattr(g, f) for f in g.__struct_fields__} | {"lengths": (length,) * 2})
        for g in groups(scores)
    ]
    todo = plan.make(made, cfg, num_updates=1, num_ranks=1, seed=0, max_tokens=10)
    rows = todo.updates[0][0]
    mask = torch.tensor([False, *[True] * length] * len(rows))
    batch = Batch(
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        cu_seqlens=cumulative([length + 1] * len(rows)),
        mask=mask,
        rollout_log_probs=torch.zeros(len(mask)),
        old_log_probs=torch.full((len(mask),), -1.0),
        ref_log_probs=torch.full((len(mask),), -1.0 - LN2),
        ids=tuple(r.id for r in rows),
    )
    run = SimpleNamespace(
        cfg=SimpleNamespace(algo=cfg),
        algo=grpo,
        ranks=Ranks(rank=0, size=1, model_parallel_groups=[[0]], dp_rank=0),
        trains_actor=True,
        progress=Progress(),
        kl=AdaptiveController(cfg.kl_target, cfg.kl_horizon),
    )
    return run, todo, batch


def of_responses(batch: Batch) -> dict[str, list[float]]:
    """Advantages of the trained tokens by id."""
    parts = zip(batch.advantage.split(batch.lengths), batch.mask.split(batch.lengths), strict=True)
    return {i: a[m].tolist() for i, (a, m) in zip(batch.ids, parts, strict=True)}


def test_a_group_is_centred_and_every_token_of_a_response_gets_the_same():
    run, todo, batch = setting([[1.0, 0.0]], norm_adv_by_std=False)
    (out,) = advantages.assign(run, todo, [batch], {})
    assert of_responses(out) == {"t0.0": [0.5, 0.5], "t0.1": [-0.5, -0.5]}
    assert run.progress.metrics["critic/advantages/max"] == 0.5
    assert run.progress.metrics["critic/advantages/mean"] == 0


def test_the_kl_of_all_tokens_of_a_response_is_taken_off_its_reward():
    """k1 is ln 2 a token; one response is nearer to the reference by half."""
    run, todo, batch = setting([[1.0, 0.0]], norm_adv_by_std=False, kl_reward_coef=0.1)
    ref = batch.ref_log_probs.clone()
    first = batch.ids.index("t0.0")
    ref[3 * first : 3 * first + 3] += LN2
    (out,) = advantages.assign(run, todo, [batch.with_(ref_log_probs=ref)], {})
    gap = (1.0 - 0.0) - (0.0 - 0.1 * 2 * LN2)
    assert of_responses(out)["t0.0"] == pytest.approx([gap / 2] * 2)
    assert run.progress.metrics["actor/reward_kl_penalty"] == pytest.approx(LN2 / 2)
    assert run.progress.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)


def test_the_controller_raises_the_coefficient_after_the_step_when_the_kl_is_too_high():
    run, todo, batch = setting([[1.0, 0.0]], kl_reward_coef=0.1, kl_target=LN2 / 2, kl_horizon=4)
    advantages.assign(run, todo, [batch], {})
    assert run.progress.metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    assert run.kl.scale == pytest.approx(1 + 0.2 * 2 / 4)


def test_remax_takes_off_the_reward_of_the_greedy_answer():
    run, todo, batch = setting([[1.0, 0.0]], adv_estimator="remax")
    (out,) = advantages.assign(run, todo, [batch], {"t0": 0.25})
    assert of_responses(out) == {"t0.0": [0.75] * 2, "t0.1": [-0.25] * 2}


def test_greedy_answers_are_not_trained_and_lose_for_their_length_too():
    run, _, _ = setting([[1.0, 0.0]], adv_estimator="remax", overlong_share=0.5)
    run.cfg.rollout = SimpleNamespace(max_tokens=10)
    made = groups([[1.0, 0.0], [1.0]], lengths=5)  # five tokens, and eight of the second group
    fields = {f: getattr(made[1], f) for f in made[1].__struct_fields__}
    greedy = made[1].__class__(**fields | {"id": "bt0"})
    kept, baselines = advantages.split_baselines(run, [made[0], greedy])
    assert [g.id for g in kept] == ["t0"]
    assert baselines == {"t0": pytest.approx(1.0 - 3 / 5)}


def test_returns_per_token_are_whitened_over_the_step():
    run, todo, batch = setting([[1.0, 0.0]], adv_estimator="reinforce_plus_plus")
    (out,) = advantages.assign(run, todo, [batch], {})
    found = of_responses(out)
    std = (4 * 0.25 / 3) ** 0.5  # four tokens, Bessel's correction
    assert found["t0.0"] == pytest.approx([0.5 / std] * 2, rel=1e-6)
    assert found["t0.1"] == pytest.approx([-0.5 / std] * 2, rel=1e-6)


def test_gae_without_discount_is_return_minus_value():
    run, todo, batch = setting([[1.0, 0.0]], adv_estimator="gae")
    values = torch.where(batch.mask, 0.5, 0.0)
    (out,) = advantages.assign(run, todo, [batch.with_(value_old=values)], {})
    assert out.returns[batch.mask].reshape(2, 2)[:, 0].tolist() == [
        1.0 if i == "t0.0" else 0.0 for i in batch.ids
    ]
    assert run.progress.metrics["critic/returns/max"] == 1


def test_a_long_answer_loses_reward_linearly():
    cfg = AlgoConfig(overlong_share=0.2, overlong_penalty=1.0)
    found = [plan.overlong(n, 100, cfg) for n in (10, 80, 85, 90, 100)]
    assert found == pytest.approx([0, 0, 0.25, 0.5, 1.0])
    assert plan.overlong(100, 100, AlgoConfig()) == 0


def test_whitening_counts_what_is_trained():
    """Two answers of a group were cut and left out; the other two have mean 0 and variance 1."""
    cfg = AlgoConfig(truncated_responses="drop", whiten_advantages=True)
    g = groups([[1.0, 0.0, 0.0, 0.0]])[0]
    fields = {f: getattr(g, f) for f in g.__struct_fields__}
    finishes = ("stop", "stop", "length", "length")
    cut = g.__class__(**fields | {"finishes": finishes, "lengths": (2, 2, 100, 100)})
    todo = plan.make([cut], cfg, num_updates=1, num_ranks=1, seed=0, max_tokens=100)
    run, _, batch = setting([[1.0, 0.0]], truncated_responses="drop", whiten_advantages=True)
    (out,) = advantages.assign(run, todo, [batch], {})
    found = [a for row in of_responses(out).values() for a in row]
    assert sum(found) == pytest.approx(0, abs=1e-6)
    assert sum(a * a for a in found) / 3 == pytest.approx(1, abs=1e-6)


def test_truncated_responses_leave_the_update_but_stay_in_the_baseline():
    cfg = AlgoConfig(truncated_responses="drop", norm_adv_by_std=False)
    g = groups([[1.0, 0.0, 0.0, 0.0]])[0]
    fields = {f: getattr(g, f) for f in g.__struct_fields__}
    cut = g.__class__(**fields | {"finishes": ("stop", "stop", "length", "length")})
    todo = plan.make([cut], cfg, num_updates=1, num_ranks=1, seed=0, max_tokens=9)
    assert sorted(todo.owners()) == ["t0.0", "t0.1"]
    assert [r.reward for r in todo.groups[0]] == [1.0, 0.0, 0.0, 0.0]


def test_gdpo_gets_the_terms_of_a_sum_with_their_weights():
    """Scores alone would prefer neither response. Of the first term the first is better, whose
    weight is the larger one."""
    run, _, batch = setting([[1.0, 1.0]], adv_estimator="gdpo")
    run.cfg.select = SimpleNamespace(reward="exact:1,tests.scores.variety:0.5")
    (group,) = groups([[1.0, 1.0]])
    made = structs.replace(group, lengths=(2, 2), terms=((1.0, 0.0), (0.0, 2.0)))
    todo = plan.make([made], run.cfg.algo, num_updates=1, num_ranks=1, seed=0)
    (out,) = advantages.assign(run, todo, [batch], {})
    found = of_responses(out)
    assert found["t0.0"][0] > 0.8 and found["t0.1"] == [-a for a in found["t0.0"]]


def weighed(batch: Batch, scores: dict[str, float]) -> Batch:
    """With old log-probs and squares that differ by response."""
    number = torch.tensor([sorted(scores).index(i) for i in batch.ids])[batch.sequence_index]
    p = 1 / (number + 2.0)
    return batch.with_(old_log_probs=p.log(), log_sum_pi_squared=(p / 2).log())


def test_token_baselines_are_the_same_for_rows_of_a_group_on_one_rank_and_on_two(monkeypatch):
    """Two ranks in two threads add their lists, as the group's all-reduce does."""
    scores = [[1.0, 0.0], [0.5, 0.25], [2.0, -1.0]]
    keys = {"adv_estimator": "optimal_token_baseline", "rollout_is": "none"}
    run, todo, batch = setting(scores, **keys)
    every = {r.id: r.reward for g in todo.groups for r in g}
    batch = weighed(batch, every)
    (whole,) = advantages.assign(run, todo, [batch], {})
    assert whole.log_sum_pi_squared is None
    want = of_responses(whole)
    assert any(abs(a - every[i]) > 0.1 for i, (a, _) in want.items())
    halves = [[i for i, id in enumerate(batch.ids) if id.endswith(str(d))] for d in (0, 1)]
    rows = todo.updates[0][0]
    split = plan.StepPlan((tuple(tuple(rows[i] for i in half) for half in halves),), 0, todo.groups)
    barrier, given, found = threading.Barrier(2, timeout=30), {}, {}
    here = threading.local()

    def reduce_floats(values, op="sum", group=None):
        given[here.rank] = values
        barrier.wait()
        total = [{"sum": sum, "max": max}[op](v) for v in zip(*given.values(), strict=True)]
        barrier.wait()
        return total

    def reduce_tensor(values, op="sum", group=None):
        return values.copy_(torch.tensor(reduce_floats(values.flatten().tolist())).view_as(values))

    monkeypatch.setattr(collective, "reduce_floats", reduce_floats)
    monkeypatch.setattr(collective, "reduce_tensor", reduce_tensor)

    def of_rank(d: int) -> None:
        here.rank = d
        ranks = Ranks(rank=d, size=2, model_parallel_groups=[[0], [1]], dp_rank=d)
        mine = SimpleNamespace(**vars(run) | {"ranks": ranks, "progress": Progress()})
        (out,) = advantages.assign(mine, split, [batch.select(halves[d])], {})
        found.update(of_responses(out))

    threads = [threading.Thread(target=of_rank, args=(d,)) for d in (0, 1)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found.keys() == want.keys()
    for id, values in want.items():
        assert found[id] == pytest.approx(values, rel=1e-6)


def test_token_baselines_refuse_what_a_callback_has_excluded():
    run, todo, batch = setting([[1.0, 0.0]], adv_estimator="optimal_token_baseline")
    kept = plan.StepPlan(((todo.updates[0][0][:1],),), 0, todo.groups)
    with pytest.raises(ConfigError, match=r"^--run.callbacks: keep_sample has excluded 1 resp"):
        advantages.assign(run, kept, [batch.select([0])], {})


def test_token_baselines_span_the_updates_of_a_step_and_are_whitened_only_if_asked():
    keys = {"adv_estimator": "tir_optimal_token_baseline"}
    run, todo, batch = setting([[1.0, 0.0]], **keys)
    batch = batch.with_(
        old_log_probs=torch.full_like(batch.rollout_log_probs, -LN2),
        log_sum_pi_squared=torch.full_like(batch.rollout_log_probs, -LN2),
    )
    cut = plan.StepPlan(tuple(((row,),) for row in todo.updates[0][0]), 0, todo.groups)
    parts = advantages.assign(run, cut, [batch.select([0]), batch.select([1])], {})
    found = of_responses(parts[0]) | of_responses(parts[1])
    assert found["t0.0"] == pytest.approx([0.5] * 2) and found["t0.1"] == pytest.approx([-0.5] * 2)
    run, todo, _ = setting([[1.0, 0.0]], whiten_advantages=True, **keys)
    (out,) = advantages.assign(run, todo, [batch], {})
    std = (4 * 0.25 / 3) ** 0.5
    assert of_responses(out)["t0.0"] == pytest.approx([0.5 / std] * 2, rel=1e-6)
