"""Compare the shared tokens that the simulator counts with those of the engine and learner."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.algos.base import AlgoConfig
from rlcore.config.schema import TrainConfig
from rlcore.hf.rope_settings import Rope
from rlcore.mcore.layout import layout_of
from rlcore.mcore.microbatch import Cutter, MicroBatch
from rlcore.mcore.prefix_tree import LEAST
from rlcore.records import Finished, Group, Partial, Request, SampleRef, Sampling, Stats
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sim import ladder, rhymerl, roll_flash, rollpacker, user
from rlcore.sim.cluster import SimRun, simulate, summarize
from rlcore.sim.cost import EngineCost, model_named
from rlcore.sim.engine import SimRequest, VirtualEngine
from rlcore.sim.phases import Layout, TrainingCost, train_row, training_cost
from rlcore.sync.pack import load_weights
from rlcore.tensors import Batch, cumulative
from rlcore.trainer import plan
from rlcore.trainer.plan import StepPlan, TrainRow
from rlcore.utils.gpus import GPUS
from tests.contracts.engine_contract import HF, VOCAB, collect, weights

# ---- sampling


@pytest.fixture(scope="module")
def loaded() -> dict[str, np.ndarray]:
    return dict(weights(HF, 0).items())


def requests(seed: int) -> list[Request]:
    """Requests of several groups, in any order. Some go on from tokens of another engine."""
    dice = np.random.default_rng(seed)
    out = []
    for group, count in enumerate(dice.integers(1, 6, 7)):
        prompt = dice.integers(2, VOCAB, int(dice.choice([1, 2, 9, 40]))).astype(np.int32)
        for k in range(count):
            have = int(dice.choice([0, 0, 1, 12]))
            resume = Partial(
                tokens=dice.integers(2, VOCAB, have).astype(np.int32),
                logps=np.zeros(have, np.float32),
                versions=np.zeros(have, np.int32),
            )
            sampling = Sampling(max_tokens=have + int(dice.integers(1, 30)))
            out.append(
                Request(
                    id=f"t{group}.{k}",
                    prompt=prompt,
                    sampling=sampling,
                    resume=resume if have else None,
                )
            )
    return [out[i] for i in dice.permutation(len(out))]


def by_engine(todo: list[Request], max_running: int, loaded: dict[str, Any]) -> tuple[int, int]:
    engine = TorchEngine(
        HF, max_model_tokens=160, dtype="float64", device="cpu", max_running=max_running
    )
    load_weights(engine, loaded.items(), 0)
    engine.submit(todo)
    events = collect(
        engine,
        lambda found: (
            sum(isinstance(e, Finished) for e in found) == len(todo)
            and any(isinstance(e, Stats) and not e.running for e in found)
        ),
    )
    stats = [e for e in events if isinstance(e, Stats)]
    return sum(s.prefill_tokens for s in stats), sum(s.cached_tokens for s in stats)


def by_simulator(todo: list[Request], max_running: int) -> VirtualEngine:
    engine = VirtualEngine(EngineCost(step_s=1.0, prefill_s=0.5), max_running)
    jobs = [
        SimRequest(
            id=r.id,
            prompt=len(r.prompt),
            length=r.sampling.max_tokens,
            group=r.group,
            have=len(r.resume.tokens) if r.resume else 0,
        )
        for r in todo
    ]
    engine.submit(jobs, 0.0)
    while engine.next_event() is not None:
        engine.step_to_event()
    return engine


@pytest.mark.parametrize("max_running", [1, 2, 5, 64])
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_prefills_and_shares_the_tokens_that_a_real_one_does(
    loaded: dict[str, Any], seed: int, max_running: int
) -> None:
    todo = requests(seed)
    ours = by_simulator(todo, max_running)
    assert (ours.prefilled, ours.cached) == by_engine(todo, max_running, loaded)
    assert ours.busy_s == ours.steps + 0.5 * ours.prefilled


def test_a_group_is_prefilled_once_by_each_engine_that_has_members_of_it() -> None:
    """Eight groups of four, prompts of 10 tokens."""
    for routing, leaders in (("group", 8), ("response", 8 * 4)):
        base = user_job("--rollout.routing", routing, "--rollout.max_running_requests", "64")
        (step,) = SimRun(base).steps(1)
        stats = step.outcome.stats
        prompts = stats["sched/prefill_tokens"] + stats["sched/cached_tokens"]
        assert prompts == 8 * 4 * 9 and stats["sched/prefill_tokens"] <= leaders * 9
        assert (stats["sched/prefill_tokens"] == 8 * 9) == (routing == "group")
        assert summarize([step]).cached_tokens == stats["sched/cached_tokens"]


def user_job(*keys: str, **options: Any) -> Any:
    from tests.unit.test_sim_run import small

    return small(*keys, **options)


# ---- training


def groups_of(prompts: Sequence[int], lengths: Sequence[Sequence[int]]) -> list[Group]:
    return [
        Group(
            id=f"t{g}",
            prompt_index=g,
            dataset="s",
            refs=tuple(SampleRef(owner=0, id=f"t{g}.{k}") for k in range(len(row))),
            scores=tuple(map(float, range(len(row)))),
            lengths=tuple(row),
            finishes=("stop",) * len(row),
            errors=("",) * len(row),
            prompt_length=prompt,
        )
        for g, (prompt, row) in enumerate(zip(prompts, lengths, strict=True))
    ]


def micro_batches(part: Sequence[TrainRow], budget: int) -> list[MicroBatch]:
    """The learner's micro-batches of a rank's samples. Many responses begin alike, prompts of two
    groups never do."""
    tokens, mask = [], []
    for row in part:
        prompt = 1000 + 100 * int(row.group[1:]) + torch.arange(row.prompt_length)
        dice = torch.Generator().manual_seed(sum(map(ord, row.id)))
        tokens += [prompt, torch.randint(0, 2, (row.num_tokens,), generator=dice)]
        mask.append(torch.arange(row.prompt_length + row.num_tokens) >= row.prompt_length)
    if not part:
        return []
    lengths = [r.prompt_length + r.num_tokens for r in part]
    batch = Batch(
        tokens=torch.cat(tokens),
        cu_seqlens=cumulative(lengths),
        mask=torch.cat(mask),
        rollout_log_probs=torch.zeros(sum(lengths)),
        ids=tuple(r.id for r in part),
    )
    cutter = Cutter(
        layout_of(TrainConfig(), 1, 0),
        sequence_parallel=False,
        head_dim=8,
        rope=Rope(theta=1e4),
        dtype=torch.float32,
        device=torch.device("cpu"),
        budget=budget,
        share_prefix=True,
    )
    rows = cutter.groups(batch)
    return list(cutter.cut(batch, rows, len(rows)).micro_batches)


def by_learner(todo: StepPlan, budget: int) -> tuple[int, int]:
    """Tokens that the learner computes, and the pairs of a query and a key, twice."""
    tokens = squares = 0
    for part in (part for update in todo.updates for part in update):
        for micro in micro_batches(part, budget):
            tokens += micro.num_rows
            made = micro.packed.plan
            assert made is not None
            for queries, keys in zip(made.cu_query.diff(), made.cu_key.diff(), strict=True):
                squares += int(keys) ** 2 - int(keys - queries) ** 2
    return tokens, squares


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, LEAST, LEAST + 1, LEAST + 2, 40, 90]),
            st.lists(st.integers(1, 120), min_size=1, max_size=8),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([60, 200, 250, 16_384]),
)
def test_training_computes_the_tokens_that_the_learner_does(
    families: list[tuple[int, list[int]]], dp: int, updates: int, budget: int
) -> None:
    prompts, lengths = [p for p, _ in families], [n for _, n in families]
    made = groups_of(prompts, lengths)

    def planned(num_updates: int, num_ranks: int) -> StepPlan:
        return plan.make(
            made,
            AlgoConfig(),
            num_updates=num_updates,
            num_ranks=num_ranks,
            seed=3,
            shares_prefix=True,
        )

    ((rows,),) = planned(1, 1).updates
    rows = tuple(replace(train_row(r.group, r.prompt_length, r.num_tokens), id="") for r in rows)
    cost = TrainingCost(
        token_s=1.0,
        square_s=0.5,
        dp=dp,
        shares_prefix=True,
        micro_batch=budget,
        updates=updates,
    )
    work = cost.work(rows)
    assert (work.tokens, work.squares) == by_learner(planned(updates, dp), budget)
    longest = max(r.prompt_length + r.num_tokens for r in rows)
    least = dp * (longest + 0.5 * longest**2)
    assert cost.update_s(work) == max(work.tokens + 0.5 * work.squares, least)


def test_a_group_by_hand() -> None:
    """Eight responses of 100 tokens to a prompt of 300, of which 299 are computed once."""
    rows = [train_row("t0", 300, 100)] * 8
    plain, shared = (
        training_cost(model_named("7B"), GPUS["H100"], Layout(gpus=1), shares_prefix=shares)
        for shares in (False, True)
    )
    assert plain.work(rows).tokens == 8 * 400 and plain.work(rows).squares == 8 * 400**2
    work = shared.work(rows)
    assert work.tokens == 299 + 8 * 101
    assert work.squares == 299**2 + 8 * (400**2 - 299**2)
    # two fit into a micro-batch of 520 tokens, so the prompt is computed four times
    few = replace(shared, micro_batch=520)
    assert few.work(rows).tokens == 4 * 299 + 8 * 101
    # two ranks get four each
    assert replace(shared, dp=2).work(rows).tokens == 2 * 299 + 8 * 101
    # two updates of twelve samples: the middle one of three groups is divided
    three = [train_row(f"t{g}", 300, 100) for g in range(3) for _ in range(8)]
    assert replace(shared, updates=2).work(three).tokens == 4 * 299 + 24 * 101
    part = (299 + 8 * 101) / (8 * 400)
    assert shared.logprobs_s(work) == shared.forward_share * shared.update_s(work)
    assert shared.update_s(work) < 1.02 * part * plain.update_s(plain.work(rows))


def test_a_run_shares_what_its_key_says_and_published_systems_share_nothing() -> None:
    size = ladder.SIZES[0]
    assert ladder.job(size, 0).training.shares_prefix
    assert (
        not ladder.job(size, 0).with_("x", "--train.share_prefix", "false").training.shares_prefix
    )
    assert not ladder.job(size, 0).with_("x", "--model.dtype", "float32").training.shares_prefix
    verl = rollpacker.job_of("veRL", rollpacker.SYSTEMS["7B/8k"], 0)
    published = [
        *rollpacker.ladder(rollpacker.SYSTEMS["7B/8k"], 0).values(),
        *(verl, rhymerl.job("8B", "8k", 0), roll_flash.job(roll_flash.LAWS["3k"], 16, 0)),
        *(user.baseline(ladder.job(size, 0), name) for name in ("verl", "rlhfuse")),
    ]
    assert not any(job.training.shares_prefix for job in published)


def test_a_step_with_long_prompts_is_shorter_where_they_are_shared() -> None:
    def seconds(share: str) -> tuple[float, float, float]:
        workload = replace(ladder.GENERATORS["8k"], prompt_tokens=4000)
        job = ladder.job(ladder.SIZES[0], 0)
        keys = ("--train.share_prefix", share, "--train.tokens_per_micro_batch", "100000")
        found = simulate(job.with_("long", *keys, workload=workload), 1)
        return found.phases["update_actor"], found.phases["old_log_prob"], found.computed

    apart, shared = seconds("false"), seconds("true")
    tokens = 128 * 8 * 4000
    assert apart[2] - shared[2] == pytest.approx(7 / 8 * tokens, rel=0.1)
    assert shared[0] < 0.8 * apart[0] and shared[1] < 0.6 * apart[1]
