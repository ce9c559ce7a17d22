"""Layouts, micro-batches, learning rates and refusals: what is decided without process groups."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.rope_settings import Rope
from rlcore.mcore import build, microbatch
from rlcore.mcore.check import check
from rlcore.mcore.layout import check_model, layout_of, model_parallel_groups
from rlcore.mcore.schedule import learning_rate
from rlcore.tensors import Batch, cumulative
from tests import kit

HF = HFConfig.from_dict(kit.tiny_config("qwen3"))
MOE = HFConfig.from_dict(kit.tiny_config("qwen3_moe"))
HEADS = HF.with_(num_heads=12, num_kv_heads=6)
ODD = replace(HF, num_kv_heads=1, head_dim=1)


# ---- layouts


def test_ranks_stand_in_megatrons_order() -> None:
    train = TrainConfig(tp=2, cp=2, pp=2)
    at = [layout_of(train, 16, rank) for rank in range(16)]
    assert [x.tp_rank for x in at[:4]] == [0, 1, 0, 1]
    assert [x.cp_rank for x in at[:4]] == [0, 0, 1, 1]
    assert [x.dp_rank for x in at] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert [x.pp_rank for x in at] == [0] * 8 + [1] * 8
    assert at[5].replica_ranks == (4, 5, 6, 7, 12, 13, 14, 15)
    assert [x.rank for x in at if x.is_leader] == [0, 4]


@pytest.mark.parametrize(
    ("tp", "pp", "cp", "ep", "etp"), list(product([1, 2], [1, 2], [1, 2], [1, 2, 4], [1, 2]))
)
def test_replicas_partition_the_world_and_lockstep_is_closed(
    tp: int, pp: int, cp: int, ep: int, etp: int
) -> None:
    train = TrainConfig(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    world = 16
    found = model_parallel_groups(train, world)
    assert sorted(rank for ranks in found for rank in ranks) == list(range(world))
    stage = world // pp
    for rank in range(world):
        here = layout_of(train, world, rank)
        assert rank in found[here.dp_rank]
        assert here.replica_ranks == found[here.dp_rank]
        lockstep = set(here.lockstep_ranks)
        for other in here.lockstep_ranks:
            there = layout_of(train, world, other)
            assert set(there.replica_ranks) <= lockstep
            size = ep * etp
            first = other // stage * stage + other % stage // size * size
            assert set(range(first, first + size)) <= lockstep


def test_ranks_that_divide_an_expert_are_adjacent() -> None:
    at = [layout_of(TrainConfig(tp=1, ep=2, etp=2), 8, rank) for rank in range(8)]
    assert [(x.etp_rank, x.ep_rank, x.edp_rank) for x in at[:5]] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 0, 1),
    ]
    assert at[2].experts(4) == range(2, 4) and at[2].edp == 2


def test_layers_of_interleaved_stages_alternate() -> None:
    train = TrainConfig(pp=2, vpp=2)
    stages = [[list(layout_of(train, 2, r).layers(8, v)) for v in (0, 1)] for r in (0, 1)]
    assert stages == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_stages_have_the_layers_that_are_set() -> None:
    train = TrainConfig(pp=3, pp_layers=(2, 4, 1))
    at = [layout_of(train, 3, rank) for rank in range(3)]
    assert [x.layers(7) for x in at] == [range(0, 2), range(2, 6), range(6, 7)]
    assert [x.stage_layers(7) for x in at] == [(0, 1), (2, 3, 4, 5), (6,)]
    assert [at[0].stage_of(layer, 7) for layer in range(7)] == [0, 0, 1, 1, 1, 1, 2]


def test_numbers_of_layers_are_those_of_chunks_in_the_order_of_the_model() -> None:
    train = TrainConfig(pp=2, vpp=2, pp_layers=(1, 3, 2, 1))
    at = [layout_of(train, 2, rank) for rank in range(2)]
    assert [[x.layers(7, v) for v in (0, 1)] for x in at] == [
        [range(0, 1), range(4, 6)],
        [range(1, 4), range(6, 7)],
    ]
    assert [x.stage_layers(7) for x in at] == [(0, 4, 5), (1, 2, 3, 6)]
    assert [at[1].stage_of(layer, 7) for layer in range(7)] == [0, 1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"tp": 2}, 3, "must divide the 3 train ranks"),
        ({"ep": 3}, 4, "--train.ep 3 --train.etp 1: their product 3 must divide the 4 ranks"),
        ({"ep": 2, "etp": 4}, 4, "--train.etp 4: their product 8 must divide the 4 ranks"),
        ({"vpp": 2}, 2, "--train.vpp 2: interleaving needs pipeline stages"),
        (
            {"pp_layers": (3, 1)},
            2,
            "--train.pp_layers 3 1: must have one number for each .*, 1 .*, not 2",
        ),
        (
            {"pp": 2, "vpp": 2, "pp_layers": (3, 1)},
            2,
            "each model chunk, 4 .--train.pp 2 x --train.vpp 2., not 2",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_world_is_refused(
    changes: dict, world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(TrainConfig(**changes), world, 0)


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (HF, {"tp": 3}, "--train.tp 3: must divide the model's 4 attention heads"),
        (HEADS, {"tp": 4}, "--train.tp 4: must be a divisor or a multiple of the model's 6 key-"),
        (ODD, {"tp": 4}, "--train.tp 4: must divide the 2 rows"),
        (HF, {"pp": 3}, "must divide the model's 4 layers; lower one of them, or set --train.pp_l"),
        (HF, {"pp": 2, "pp_layers": (3, 2)}, "pp_layers 3 2: the sum 5 must be the model's 4 lay"),
        (HF, {"pp": 2, "vpp": 4}, "their product 8 must divide"),
        (HF, {"ep": 2}, "--train.ep 2: the model has no experts"),
        (HF, {"etp": 2}, "--train.etp 2: the model has no experts"),
        (MOE.with_(moe_intermediate_size=21), {"etp": 2}, "must divide the width 21"),
        (MOE, {"ep": 3}, "--train.ep 3: must divide the model's 4 experts"),
        (MOE, {"tp": 2, "ep": 2, "sp": False}, "needs sequence parallel"),
        (HF.with_(intermediate_size=49), {"tp": 2}, "MLP width 49"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    hf: HFConfig, changes: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_model(hf, TrainConfig(**changes))


def test_ranks_may_share_heads_and_stages_may_differ() -> None:
    check_model(HF, TrainConfig(tp=4))
    check_model(HF, TrainConfig(pp=3, pp_layers=(1, 2, 1)))


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        ({"dtype": "float64"}, {}, "--model.dtype float64"),
        (
            {},
            {"transformer_impl": "te"},
            "--train.transformer_impl te: Transformer Engine is not installed",
        ),
        ({}, {"apex": True}, "--train.apex True: Apex' extension"),
    ],
)
def test_settings_that_cannot_work_here_are_refused(model: dict, train: dict, message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("with CUDA these may be installed")
    with pytest.raises(ValueError, match=message):
        check(HF, ModelConfig(**model), TrainConfig(**train))


GLM = HFConfig.from_dict(kit.tiny_config("glm4_moe"))
MLA = HFConfig.from_dict(kit.tiny_config("deepseek_v3_dense"))


@pytest.mark.parametrize(
    ("hf", "dtype", "message"),
    [
        (MOE, "float32", "dense models, and this one has experts"),
        (MLA, "float32", "dense models, and this one has latent attention"),
        (HF, "bfloat16", "--model.dtype bfloat16: on a CPU train.true_on_policy"),
        (replace(HF, rope=Rope(theta=1e4, partial=0.5)), "float32", "RoPE of only a part"),
    ],
)
def test_models_without_batch_invariant_operations_are_refused(
    monkeypatch: pytest.MonkeyPatch, hf: HFConfig, dtype: Any, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, train = ModelConfig(dtype=dtype), TrainConfig(true_on_policy=True)
    with pytest.raises(ValueError, match=message):
        check(hf, model, train)


def test_true_on_policy_needs_native_code_or_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train, float32 = TrainConfig(true_on_policy=True), ModelConfig(dtype="float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="only on a CPU; use --train.transformer_impl te"):
        check(HF, float32, train)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    check(HF, ModelConfig(), replace(train, transformer_impl="te"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("rlcore.ops.native.torch_ops", lambda *_: None)
    with pytest.raises(ValueError, match="native code, which does not run here; run bash tools"):
        check(HF, float32, train)


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (MOE, {"moe_shared_expert_overlap": True}, "the model has no shared experts; leave it off"),
        (MOE, {"moe_bias_update_rate": 0.1}, "moe_bias_update_rate 0.1: the model's routers have"),
        (GLM, {"tp": 5, "ep": 5}, "must divide"),
        (GLM.with_(experts_per_token=1), {}, "num_experts_per_tok 1: Megatron does not divide"),
        (GLM.with_(experts_per_token=3), {}, "num_experts_per_tok 3 with topk_group 2: the model"),
    ],
)
def test_what_a_mixture_cannot_do_is_refused(hf: HFConfig, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(hf, ModelConfig(), TrainConfig(**changes))
    check(GLM, ModelConfig(), TrainConfig(tp=2, ep=2, moe_shared_expert_overlap=True))


def test_deepep_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = TrainConfig(moe_dispatcher="flex")
    for has_cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        with pytest.raises(ValueError, match="--train.moe_dispatcher flex: needs CUDA and DeepEP"):
            check(MOE, ModelConfig(), flex)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    check(MOE, ModelConfig(), flex)


def test_megatrons_own_rope_takes_no_scaling_but_llamas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    own, te = (TrainConfig(transformer_impl="te", share_prefix=x) for x in ("true", "false"))
    llama = Rope(theta=1e4, kind="llama3", factor=8.0, original_max_position_embeddings=8192)
    for rope in (Rope(theta=1e4, partial=0.5), llama):
        check(replace(HF, rope=rope), ModelConfig(), te)
    for rope in (
        Rope(theta=1e4, kind="yarn", factor=4.0, original_max_position_embeddings=8192),
        replace(llama, original_max_position_embeddings=4096),
        replace(llama, high_freq_factor=8.0),
    ):
        check(replace(HF, rope=rope), ModelConfig(), own)
        message = f"--train.transformer_impl te: Megatron has no RoPE scaling {rope.kind} with"
        with pytest.raises(ValueError, match=message):
            check(replace(HF, rope=rope), ModelConfig(), te)


def test_the_vocabulary_is_padded_to_the_tensor_parallel_size() -> None:
    assert [build.padded_vocab(53, tp) for tp in (1, 2, 4)] == [53, 54, 56]


# ---- micro-batches


def test_groups_hold_the_budget_and_every_row_once() -> None:
    lengths = [5, 40, 7, 7, 100, 3]
    found = microbatch.groups(lengths, 50)
    assert found == [[4], [1, 2, 5], [3, 0]]
    assert microbatch.groups([], 50) == []


@pytest.mark.parametrize(
    ("pp", "vpp", "count", "want"), [(1, 1, 0, 1), (1, 1, 3, 3), (4, 1, 2, 4), (2, 2, 3, 4)]
)
def test_schedules_get_the_micro_batches_that_they_need(
    pp: int, vpp: int, count: int, want: int
) -> None:
    layout = replace(layout_of(TrainConfig(pp=pp), pp, 0), vpp=vpp)
    assert microbatch.rounded_count(count, layout) == want


def cutter(train: TrainConfig, rank: int = 0, budget: int = 64) -> microbatch.Cutter:
    return microbatch.Cutter(
        layout_of(train, train.tp * train.cp, rank),
        sequence_parallel=train.tp > 1,
        head_dim=8,
        rope=Rope(theta=1e4),
        dtype=torch.float32,
        device=torch.device("cpu"),
        budget=budget,
    )


def batch_of(lengths: list[int]) -> Batch:
    total = sum(lengths)
    return Batch(
        tokens=torch.arange(1, total + 1),
        cu_seqlens=cumulative(lengths),
        mask=torch.ones(total, dtype=torch.bool),
        advantage=torch.arange(total).float(),
    )


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_rows_of_all_context_parallel_ranks_predict_every_token_but_the_first(
    tp: int, cp: int
) -> None:
    train = TrainConfig(tp=tp, cp=cp)
    lengths = [5, 9, 2, 7]
    batch = batch_of(lengths)
    cuts = [
        cutter(train, rank=cp_rank * tp).cut(batch, [[1, 3], [0, 2]], count=3)
        for cp_rank in range(cp)
    ]
    assert [cut.count for cut in cuts] == [3] * cp
    made = [list(cut.micro_batches) for cut in cuts]
    for micros in zip(*made, strict=True):
        assert all(micro.tokens.size(1) % tp == 0 for micro in micros)
        inputs = torch.cat([micro.tokens[0] for micro in micros])
        targets = torch.cat([micro.targets for micro in micros])
        gathered = micros[0].packed.plan.gathered
        if gathered is not None:
            inputs, targets = inputs[gathered], targets[gathered]
        tokens = micros[0].batch.tokens
        predicted = micros[0].predicted
        assert torch.equal(targets[micros[0].take][predicted], tokens[predicted])
        assert torch.equal(inputs[micros[0].take][predicted], tokens[predicted] - 1)
        assert int((~predicted).sum()) == micros[0].batch.num_sequences
    order = cuts[0].order
    seen = torch.cat([micro.batch.tokens for micro in made[0]])
    assert torch.equal(batch.tokens[order], seen)
    assert torch.equal(seen - 1, torch.cat([micro.batch.advantage for micro in made[0]]))
    assert len(made[0]) == 3 and made[0][2].batch.num_tokens == 0


def test_positions_start_again_with_every_sequence() -> None:
    (micro,) = cutter(TrainConfig()).cut(batch_of([3, 2]), [[0, 1]], 1).micro_batches
    assert micro.positions.tolist() == [[0, 1, 2, 0, 1]]
    assert micro.sequence.tolist() == [0, 0, 0, 1, 1]


# ---- learning rates


def test_the_learning_rate_warms_up_then_falls_to_its_floor() -> None:
    train = TrainConfig(
        lr=1.0, min_lr=0.2, lr_schedule="linear", lr_warmup_updates=2, lr_decay_updates=6
    )
    rates = [learning_rate(train, u) for u in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle_and_ends_with_the_run() -> None:
    train = TrainConfig(lr=1.0, lr_schedule="cosine")
    rates = [learning_rate(train, u, total_updates=4) for u in range(5)]
    assert rates[0] == 1.0
    assert rates[2] == pytest.approx(0.5)
    assert rates[4] == pytest.approx(0.0)
    assert rates[1] - rates[2] == pytest.approx(rates[2] - rates[3])


def test_constant_needs_no_end_and_a_schedule_without_one_is_refused() -> None:
    assert learning_rate(TrainConfig(lr=0.3), 10**6) == 0.3
    with pytest.raises(ValueError, match="--train.lr_schedule linear: needs an end"):
        learning_rate(TrainConfig(lr_schedule="linear"), 0)
