"""The memory plan: what it says of a model whose numbers are worked by hand, that Megatron holds
what is planned, and that a run is held to it."""

import dataclasses
import gc
import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rlcore.cli.settings import parse
from rlcore.config.schema import Config, ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.names import num_parameters
from rlcore.mcore import checkpoint
from rlcore.mcore.layout import layout_of
from rlcore.mcore.learner import MegatronLearner
from rlcore.ops.suffix_device import DeviceForest
from rlcore.trainer import memory
from rlcore.utils.host_room import room_bytes
from tests import kit
from tests.ranks import memory_ranks as ranks

GOOD = ["--model.path", "m", "--data.train", "label", "--data.val", "label"]
# One layer: norms 2 x 8, q and o 8 x 8, k and v 4 x 8, q and k norm 4, gate, up, down 8 x 16.
LAYER = 16 + 2 * 64 + 2 * 32 + 2 * 4 + 3 * 128
SMALL = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


def config(*argv: object) -> Config:
    return parse([*GOOD, *map(str, argv)])


def small(arch: str = "qwen3", **changes: Any) -> HFConfig:
    return HFConfig.from_dict(kit.tiny_config(arch, **SMALL | changes))


def test_the_parameters_of_a_rank_are_all_when_it_is_alone() -> None:
    for arch in ("qwen2", "qwen3", "qwen3_moe"):
        hf = HFConfig.from_dict(kit.tiny_config(arch))
        assert sum(memory.parameters(hf, layout_of(TrainConfig(), 1, 0))) == num_parameters(hf)


def test_stages_and_shards_hold_their_part() -> None:
    hf = small(tie_word_embeddings=False)
    norms = 16 + 8  # of a layer, and nobody shards them
    train = TrainConfig(tp=1, pp=2)
    first, last = (memory.parameters(hf, layout_of(train, 2, r))[0] for r in (0, 1))
    assert first == 2 * LAYER + 80
    assert last == 2 * LAYER + 80 + 8
    hf = dataclasses.replace(hf, num_kv_heads=2, vocab_size=9)  # padded to 10
    found, _ = memory.parameters(hf, layout_of(TrainConfig(tp=2), 2, 0))
    assert found == 4 * ((LAYER + 64 - norms) // 2 + norms) + 2 * 40 + 8


def test_stages_hold_the_layers_that_are_set() -> None:
    hf, model = small(tie_word_embeddings=False), ModelConfig(dtype="float32")
    even, uneven = TrainConfig(pp=2), TrainConfig(pp=2, pp_layers=(3, 1))
    first, last = (memory.parameters(hf, layout_of(uneven, 2, r))[0] for r in (0, 1))
    assert (first, last) == (3 * LAYER + 80, LAYER + 80 + 8)
    kept = [
        [memory.kept_bytes(hf, model, train, layout_of(train, 2, r), 10)[0] for r in (0, 1)]
        for train in (even, uneven)
    ]
    assert [2 * bytes_ for bytes_ in kept[1]] == [3 * kept[0][0], kept[0][1]]


def test_ranks_that_share_a_key_value_head_each_keep_it() -> None:
    """Two ranks, 2 query heads, 1 key-value head: each rank keeps 1 query head, a key and a value.
    A running layer also holds all 4 of them twice, as gathered and as joined."""
    norms, heads, mlp = 4 * 8 // 2, 2 * (4 + 2 * 4) + 4, 3 * 16 // 2
    kept, gathered = norms + heads + mlp, 2 * (2 + 2) * 4
    found = memory.layer_activations(small(), TrainConfig(tp=2), 10)
    assert found == (10 * kept, 10 * (2 * kept + gathered), 10 * (kept + gathered))


def test_a_tied_model_has_its_embedding_twice_only_over_stages() -> None:
    hf = small(tie_word_embeddings=True)
    alone, _ = memory.parameters(hf, layout_of(TrainConfig(), 1, 0))
    last, _ = memory.parameters(hf, layout_of(TrainConfig(pp=2), 2, 1))
    assert (alone, last) == (4 * LAYER + 80 + 8, 2 * LAYER + 80 + 8)


def test_bfloat16_takes_eighteen_bytes_a_parameter_and_owners_share_the_twelve() -> None:
    hf, model = small(), ModelConfig(dtype="bfloat16")
    count, _ = memory.parameters(hf, layout_of(TrainConfig(), 1, 0))
    for world, train, states in [
        (1, TrainConfig(), 12 * count),
        (4, TrainConfig(), 3 * count),
        (4, TrainConfig(cp=2), 3 * count),  # context parallel ranks share them too
        (4, TrainConfig(distributed_optimizer=False), 12 * count),
    ]:
        found = memory.state_bytes(hf, model, train, layout_of(train, world, 0))
        assert found == {"weights": 2 * count, "gradients": 4 * count, "optimizer": states}


@pytest.mark.parametrize("dtype, kinds, size", [("bfloat16", 3, 4), ("float32", 2, 4)])
def test_an_offloaded_optimizer_is_in_host_memory_and_three_chunks_on_the_gpu(
    dtype: str, kinds: int, size: int
) -> None:
    for vocab, layers in ((10, 4), (16_000_000, 4)):
        keys = "--train.offload_optimizer", "--train.offload", "--model.dtype", dtype
        sizes = SMALL | {"vocab_size": vocab, "num_hidden_layers": layers, "hidden_size": 64}
        found = plan(*keys, **sizes)
        count, _ = memory.parameters(small(**sizes), layout_of(TrainConfig(), 8, 0))
        kept = kinds * size * (count // 8)
        host = {i.part: i.num_bytes for i in found.host}
        assert host["learner optimizer"] == kept
        assert host["learner parked"] == memory.ITEMSIZE[dtype] * count  # weights alone
        assert size_of(found, "optimizer_step", "optimizer chunks") == min(
            kept, kinds * 3 * 64 * 2**20
        )
        assert not any("learner optimizer" in parts(found, phase) for phase in found.phases)
    assert kept > kinds * 3 * 64 * 2**20  # the larger model needs all chunks
    plain = plan("--train.offload", "--model.dtype", dtype, **sizes)
    assert size_of(plain, "update_actor", "learner optimizer") == kept


@pytest.mark.parametrize("dtype, main", [("bfloat16", 4), ("float32", 0)])
def test_moments_in_bfloat16_take_half_and_float32_copies_of_a_chunk(dtype: str, main: int) -> None:
    sizes = SMALL | {"vocab_size": 16_000_000, "hidden_size": 64}
    keys = "--train.offload", "--model.dtype", dtype, "--train.moments_dtype", "bfloat16"
    count, _ = memory.parameters(small(**sizes), layout_of(TrainConfig(), 8, 0))
    kept, chunk = (main + 4) * (count // 8), 64 * 2**20
    found = plan(*keys, **sizes)
    assert size_of(found, "update_actor", "learner optimizer") == kept
    assert size_of(found, "optimizer_step", "optimizer chunks") == 2 * chunk
    away = plan(*keys, "--train.offload_optimizer", **sizes)
    assert {i.part: i.num_bytes for i in away.host}["learner optimizer"] == kept
    lanes = 3 * chunk * (1 + main // 4)
    assert size_of(away, "optimizer_step", "optimizer chunks") == 2 * chunk + lanes


OFFLOADED = "--train.recompute", "full", "--train.offload_activations"


@pytest.mark.parametrize(
    "keys, rank, here, away",
    [
        ((), 0, 2, 8),  # 8 layers: backward has the inputs of two
        (("--train.pp", 2), 0, 4, 8),  # 4 layers of two micro-batches, two of each
        (("--train.pp", 2), 1, 4, 3),  # 4 layers of one; the first one's input was received
        (("--train.pp", 2, "--train.vpp", 2), 1, 9, 5),  # of 10 in flight, 5 were received
    ],
)
def test_inputs_of_layers_are_on_the_gpu_in_twos_and_else_in_host_memory(
    keys: tuple[object, ...], rank: int, here: int, away: int
) -> None:
    """An input is 64 KiB, and has a page of 8 MiB."""
    cfg = config(*OFFLOADED, *keys, "--train.tokens_per_micro_batch", 4096)
    hf = small(num_hidden_layers=8)
    layout = layout_of(cfg.train, 2 * cfg.train.pp, rank * 2)
    found = memory.make(cfg, hf, layout, gpu_bytes=8e10)
    one = 2 * 4096 * 8
    assert size_of(found, "update_actor", "activations") == here * one
    host = {i.part: i.num_bytes for i in found.host}
    assert host["activations"] == room_bytes(away * 8 * 2**20)


def test_main_parameters_that_leave_the_gpu_are_there_once_they_are_made() -> None:
    keys = "--train.offload_optimizer", "--train.no_distributed_optimizer"
    count, _ = memory.parameters(small(), layout_of(TrainConfig(), 8, 0))
    assert building(*keys, **SMALL)["main parameters"] == 4 * count
    critic = building(*keys, "--algo.adv_estimator", "gae", **SMALL)
    other, _ = memory.parameters(small(), layout_of(TrainConfig(), 8, 0), head="value")
    assert critic["main parameters"] == 4 * other and "learner optimizer" not in critic


def test_experts_are_shared_by_their_copies_alone() -> None:
    hf = HFConfig.from_dict(kit.tiny_config("qwen3_moe"))
    alone, together = (
        memory.parameters(hf, layout_of(train, world, 0))
        for world, train in ((1, TrainConfig()), (4, TrainConfig(ep=2)))
    )
    assert together == (alone[0], alone[1] // 2)
    model, train = ModelConfig(dtype="float32"), TrainConfig(ep=2)
    found = memory.state_bytes(hf, model, train, layout_of(train, 4, 0))
    assert found["optimizer"] == 8 * (together[0] // 4 + together[1] // 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["qwen2", "qwen3_moe"])
def test_megatron_holds_what_is_planned(arch: str, dtype: str) -> None:
    layouts: list[dict[str, Any]] = [{}, {"offload_optimizer": True}]
    found = ranks.held_and_planned(0, arch=arch, layouts=layouts, dtype=dtype)
    for held, planned in found:
        for part, count in planned.items():
            assert 0.97 * count <= held[part] <= 1.02 * count, part
    assert found[0][1]["optimizer"] > found[1][1]["optimizer"] == 0


# ---- the phases


def plan(*argv: object, gpu_gb: float = 80.0, **changes: Any) -> memory.MemoryPlan:
    cfg, hf = config(*argv), HFConfig.from_dict(kit.tiny_config("qwen3", **changes))
    return memory.make(cfg, hf, layout_of(cfg.train, 8, 0), gpu_bytes=gpu_gb * 1e9)


def parts(found: memory.MemoryPlan, phase: str) -> set[str]:
    return {item.part for item in found.phases[phase]} - {"contexts"}


def test_with_offload_engine_and_learner_meet_in_the_push_and_in_a_save_alone() -> None:
    found = plan("--train.offload")
    every = {f"learner {part}" for part in ("weights", "gradients", "optimizer")}
    assert parts(found, "gen") == {"engine weights", "KV cache", "engine's work"}
    assert parts(found, "load_learner") == every
    assert parts(found, "update_actor") == every | {"activations", "running layer"}
    assert parts(found, "update_weights") == {"learner weights", "engine weights", "buckets"}
    assert parts(found, "save_checkpoint") == {
        "learner weights",
        "learner optimizer",
        "engine weights",
    }
    assert found.learner["gen"] == 0
    assert [i.part for i in found.host] == ["learner parked", "checkpoint files", "buckets"]


def test_without_offload_everybody_is_always_there() -> None:
    found = plan()
    static = parts(found, "load_learner")
    assert {"engine weights", "KV cache", "learner gradients"} < static
    assert all(static <= parts(found, phase) for phase in found.phases if phase != "build")
    assert {"engine weights", "KV cache"} < parts(found, "build")


GPUS = {"gpu_bytes": 0, "cuda": True}


def building(*argv: object, **changes: Any) -> dict[str, int]:
    """Bytes of each part while the first of eight ranks builds its models."""
    return {i.part: i.num_bytes for i in plan("--train.offload", *argv, **changes).phases["build"]}


def test_weights_are_there_twice_while_they_move_into_megatrons_buffer() -> None:
    cfg = config()
    count, _ = memory.parameters(small(), layout_of(cfg.train, 8, 0))
    held = {"learner weights": 2 * count, "learner gradients": 4 * count, "contexts": 4_500_000_000}
    assert building(**SMALL) == held | {"copy of weights": 2 * count}
    plain = building("--train.distributed_optimizer", "false", **SMALL)
    assert plain == held | {"learner optimizer": 4 * count}  # main parameters, no moments yet
    alone = memory.make(cfg, small(), layout_of(cfg.train, 1, 0), **GPUS)
    assert size_of(alone, "build", "learner optimizer") == 4 * count
    assert "copy of weights" not in parts(alone, "build")  # the main parameters take more


def test_a_critic_is_built_beside_the_actor() -> None:
    found = building("--algo.adv_estimator", "gae", **SMALL)
    actor, _ = memory.parameters(small(), layout_of(TrainConfig(), 8, 0))
    critic, _ = memory.parameters(small(), layout_of(TrainConfig(), 8, 0), head="value")
    assert found["learner optimizer"] == 4 * (actor // 8)
    assert found["critic gradients"] == 4 * critic
    assert found["copy of weights"] == 2 * critic and "critic optimizer" not in found


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("arch, dtype", [("qwen2", "bfloat16"), ("qwen3_moe", "float32")])
def test_megatron_builds_within_the_plan(arch: str, dtype: str, distributed: bool) -> None:
    """Tensors of this process at their most, by torch's profiler; beside them, one tensor at a time
    is converted."""
    hf = HFConfig.from_dict(kit.tiny_config(arch, **ranks.SIZES))
    model = ModelConfig(dtype=dtype, random_init=True)
    train = TrainConfig(distributed_optimizer=distributed)
    gc.collect()  # else earlier learners are freed while this one is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        learner = MegatronLearner(hf, model, train, seed=3)
    events = measured.profiler.kineto_results.events()
    peak = max(itertools.accumulate(e.nbytes() for e in events if e.name() == "[memory]"))
    cfg = dataclasses.replace(config("--train.offload"), model=model, train=train)
    found = memory.make(cfg, hf, learner.layout, **GPUS, has_engine=False)
    learner.close()
    planned = sum(i.num_bytes for i in found.phases["build"] if i.part != "contexts")
    largest = hf.vocab_size * hf.hidden_size * memory.ITEMSIZE[dtype]
    assert 0.99 * planned <= peak <= 1.01 * planned + largest


def test_host_memory_holds_a_few_checkpoint_files_twice_or_all_of_them() -> None:
    assert 2 * checkpoint.WRITERS * checkpoint.FILE_BYTES == memory.CHECKPOINT_BYTES
    for dtype in ("bfloat16", "float32"):  # main parameter and two moments, 4 bytes each
        for key, share in (("--checkpoint.no_async_save", 2), ("--checkpoint.async_save", 1.4)):
            cfg = config("--model.dtype", dtype, key)
            found = memory.make(cfg, small(), layout_of(cfg.train, 1, 0), **GPUS)
            count, _ = memory.parameters(small(), layout_of(cfg.train, 1, 0))
            host = {i.part: i.num_bytes for i in found.host}
            assert host["checkpoint files"] == round(share * 12 * count)
    large = plan("--checkpoint.no_async_save", vocab_size=16_000_000, hidden_size=80)
    assert {i.part: i.num_bytes for i in large.host}["checkpoint files"] == 2 * 2**30


@pytest.mark.parametrize("hidden, wide, layers", [(4096, 12288, 36), (5120, 17408, 40)], ids=str)
def test_the_copy_of_a_save_takes_no_more_pinned_memory_than_is_planned(
    hidden: int, wide: int, layers: int
) -> None:
    """Models of 8B and 14B on one rank; torch allocates powers of two."""
    layer = [hidden * hidden, hidden * (hidden + 2048), *[hidden * wide] * 3]
    head = 151936 * hidden
    sizes = [4 * n for n in (head, *layer * layers, head) for _ in range(3)]
    files = [sum(sizes[i] for i in part) for part in checkpoint.in_files(sizes)]
    assert sum(files) == sum(sizes)
    pinned = sum(2 ** (size - 1).bit_length() for size in files)
    assert 0.9 * memory.STAGED < pinned / sum(sizes) <= memory.STAGED


@pytest.mark.parametrize("engine, cached", [("torch", 0), ("sglang", 1000)])
def test_routes_are_in_host_memory(engine: str, cached: int) -> None:
    """One byte for each of 2 experts in 4 layers, three times for the samples; SGLang's cache takes
    four bytes for each."""
    hf = small("qwen3_moe")
    width = hf.num_layers * hf.experts_per_token
    sizes = "--data.prompts_per_step", 3, "--rollout.samples_per_prompt", 5
    cfg = config(*sizes, "--rollout.engine", engine, "--algo.routing_replay", "rollout")
    cache = 1000 * memory.token_bytes(cfg, hf)
    found = {i.part: i.num_bytes for i in memory.route_items(cfg, hf, 2, cache)}
    assert found["routes of samples"] == 3 * width * 8 * memory.longest(cfg, hf)
    assert found.get("routes of the cache", 0) == 4 * width * cached
    assert memory.route_items(config(*sizes), hf, 2, cache) == []
    made = memory.make(cfg, hf, layout_of(cfg.train, 8, 0), gpu_bytes=80e9)
    assert "routes of samples" in {item.part for item in made.host}


def test_the_check_of_drafts_has_logits_of_each_of_their_tokens() -> None:
    size = {}
    for draft in ("none", "ngram"):
        keys = "--rollout.engine", "sglang", "--rollout.draft", draft
        items = plan(*keys, "--rollout.max_running_requests", "100").phases["gen"]
        size[draft] = {item.part: item.num_bytes for item in items}["engine's work"]
    vocab = HFConfig.from_dict(kit.tiny_config("qwen3")).vocab_size
    assert size["ngram"] - size["none"] == 4 * (8 + 3 * 8 - 2) * 100 * vocab


def test_drafts_matched_on_the_device_have_their_streams_and_histories_there() -> None:
    keys = "--rollout.engine", "sglang", "--rollout.max_running_requests", "100"
    found = {}
    for draft, matcher in (("ngram", "auto"), ("history", "device"), ("history", "host")):
        made = plan(*keys, "--rollout.draft", draft, "--draft.matcher", matcher)
        items = made.phases["update_actor"]
        found[draft, matcher] = {i.part: i.num_bytes for i in items}
        measured = made.with_measured(5).phases["update_actor"]
        assert memory.STREAMS not in {i.part for i in measured}  # in use while it is measured
    tokens = memory.longest(config(), HFConfig.from_dict(kit.tiny_config("qwen3"))) + 2 * 8
    streams = DeviceForest(requests=100, stream=tokens).nbytes
    assert found["ngram", "auto"][memory.STREAMS] == streams
    assert found["history", "device"][memory.STREAMS] == streams
    cfg = config()
    samples = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt * 3
    histories = 2 * 42 * samples * cfg.rollout.max_tokens // 8
    assert found["history", "device"]["histories"] == histories
    assert "histories" not in found["ngram", "auto"]
    assert not {memory.STREAMS, "histories"}.intersection(found["history", "host"])


def test_a_layer_of_experts_on_a_gpu_holds_a_copy_of_its_weights() -> None:
    hf, cfg = HFConfig.from_dict(kit.tiny_config("qwen3_moe")), config("--model.dtype", "bfloat16")
    layout = layout_of(cfg.train, 1, 0)
    found = {}
    for cuda in (True, False):
        made = memory.make(cfg, hf, layout, gpu_bytes=8e10, cuda=cuda)
        items = made.phases["update_actor"]
        found[cuda] = {item.part: item.num_bytes for item in items}["running layer"]
    experts = hf.num_experts * 2 * hf.moe_intermediate_size * hf.hidden_size
    assert found[True] - found[False] == 2 * experts


def test_a_critic_counts_in_its_turn_and_is_away_in_the_push() -> None:
    found = plan("--train.offload", "--algo.adv_estimator", "gae")
    assert "critic optimizer" in parts(found, "update_actor")
    assert parts(found, "update_weights") == parts(plan("--train.offload"), "update_weights")


def test_a_reference_waits_in_host_memory_and_is_a_second_copy_while_it_is_asked() -> None:
    found = plan("--train.offload", "--algo.kl_coef", "0.1")
    assert "reference weights" in parts(found, "old_log_prob") - parts(found, "update_actor")
    assert "reference weights" in [item.part for item in found.host]


def test_sglang_takes_its_share_of_the_gpu_and_the_cache_is_what_weights_leave() -> None:
    argv = ["--rollout.engine", "sglang", "--rollout.tp", 2, "--rollout.gpu_memory_utilization"]
    found = {i.part: i.num_bytes for i in plan(*argv, 0.5).phases["gen"]}
    assert found["engine weights"] + found["KV cache"] == 0.5 * 80e9
    torch_engine = plan("--rollout.kv_cache_tokens", 100, "--rollout.fp32_lm_head", "false")
    half = {i.part: i.num_bytes for i in torch_engine.phases["gen"]}
    assert found["engine weights"] == half["engine weights"] // 2


def size_of(found: memory.MemoryPlan, phase: str, part: str) -> int:
    return sum(item.num_bytes for item in found.phases[phase] if item.part == part)


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_a_tensor_larger_than_a_bucket_has_one_of_its_own(route: str) -> None:
    """Of every rank, however the engine is split: it is cut only when it is there."""
    argv = "--sync.route", route, "--sync.bucket_mb", 1, "--rollout.tp", 2
    small, large = plan(*argv), plan(*argv, vocab_size=10_000_000, hidden_size=16)
    embedding = 2 * 10_000_000 * 16
    assert size_of(small, "update_weights", "buckets") < size_of(large, "update_weights", "buckets")
    assert size_of(large, "update_weights", "buckets") >= 2 * embedding
    assert [i.num_bytes for i in large.host if i.part == "buckets"] == [embedding + 2 * 2**20]


@pytest.mark.parametrize("route", ["gather", "intranode"])
def test_buckets_under_way_to_an_engine_are_on_the_gpu_where_it_reads_them_there(
    route: str,
) -> None:
    """Three, as a rank keeps two until they are loaded; on the host for the torch engine."""
    argv = "--sync.route", route, "--sync.bucket_mb", 1000
    there = plan(*argv, "--rollout.engine", "sglang")
    here = plan(*argv)
    buckets = [size_of(found, "update_weights", "buckets") for found in (there, here)]
    assert buckets[0] - buckets[1] == 2 * 1000 * 2**20
    assert [i.num_bytes for i in here.host if i.part == "buckets"] == [3 * 1000 * 2**20]


def test_sglang_takes_buckets_and_logits_without_copies() -> None:
    argv = "--rollout.engine", "sglang", "--rollout.dtype", "bfloat16"
    plain, exact = plan(*argv), plan(*argv, "--rollout.fp32_lm_head")
    assert [item.part for item in plain.host] == ["checkpoint files"]
    weights = [size_of(found, "gen", "engine weights") for found in (plain, exact)]
    assert weights[0] == weights[1]
    torch_engine = plan("--rollout.dtype", "bfloat16")  # on a GPU, its head is float32
    assert size_of(torch_engine, "gen", "engine weights") > weights[0]


def test_a_cache_smaller_than_a_response_is_a_problem_whatever_fits() -> None:
    [line] = plan("--rollout.kv_cache_tokens", 100, "--rollout.max_tokens", 400).problems
    assert line.startswith("--rollout.kv_cache_tokens 100: beside")
    assert "room for 100 tokens" in line


@pytest.mark.parametrize(
    ("argv", "less"),
    [
        (["--train.recompute", "full"], "activations"),
        (["--train.cp", 2], "activations"),
        (["--train.tp", 2], "activations"),
        (["--train.head_chunk_tokens", 512], "logits"),
        (["--train.tp", 2], "learner gradients"),
        (["--train.pp", 2], "learner weights"),
        (["--rollout.kv_cache_tokens", 2000], "KV cache"),
    ],
)
def test_what_makes_a_part_smaller_makes_it_smaller(argv: list[object], less: str) -> None:
    def of(found: memory.MemoryPlan) -> int:
        return max(i.num_bytes for p in found.phases.values() for i in p if i.part == less)

    sizes = {"num_hidden_layers": 8, "num_key_value_heads": 2, "vocab_size": 20_000}
    assert of(plan("--train.offload", *argv, **sizes)) < of(plan("--train.offload", **sizes))


def test_a_plan_too_large_names_the_phase_its_largest_parts_and_what_to_change() -> None:
    found = plan("--train.offload", gpu_gb=80)
    assert memory.too_large(found, 80e9) == ""
    assert memory.too_large(found, 0) == ""
    items = [("engine weights", 70), ("learner weights", 20)]
    push = tuple(memory.Item(name, gb * 10**9) for name, gb in items)
    large = dataclasses.replace(found, phases=found.phases | {"update_weights": push})
    said = memory.too_large(large, 80e9)
    assert said == (
        "--cluster.gpu_memory_gb 80: phase update_weights needs 90.0 GB on rank 0, mostly "
        "engine weights 70.0, learner weights 20.0; raise rollout.tp, raise train.tp, train.pp "
        "or train.ep, or use more ranks"
    )
    assert "; set train.offload, " in memory.too_large(plan(), 1e9)


# ---- the check


def holding(**parts: int) -> Any:
    return SimpleNamespace(resident_bytes=lambda: parts)


def test_a_learner_that_stays_too_long_is_named_with_both_sizes() -> None:
    found = dataclasses.replace(
        plan("--train.offload"), learner={"gen": 0, "update_weights": 10**9}
    )
    guard = memory.Residency(found, torch.device("cpu"))
    guard.check("update_weights", [holding(weights=6 * 10**8), holding(weights=4 * 10**8)])
    assert guard.take() == {"memory/learner_gb/update_weights": 1.0}
    assert guard.take() == {}
    with pytest.raises(RuntimeError) as error:
        guard.check("gen", [holding(weights=0, gradients=5 * 10**8)])
    assert str(error.value).startswith(
        "memory: phase gen on rank 0: the learner holds 0.500 GB but the plan has 0.000 GB"
    )


def test_on_the_cpu_the_plan_keeps_what_an_offload_leaves() -> None:
    cfg, hf = config("--train.offload"), small()
    layout = layout_of(cfg.train, 1, 0)
    state = memory.state_bytes(hf, cfg.model, cfg.train, layout)
    found = memory.make(cfg, hf, layout, gpu_bytes=0, cuda=False)
    assert found.learner["gen"] == state["weights"] + state["optimizer"]
    assert found.learner["load_learner"] == sum(state.values())
    assert found.problems == ()


def gpu(
    monkeypatch: pytest.MonkeyPatch, taken_gb: float, idle_gb: float = 0.0, used_gb: float = 0.0
) -> None:
    """A GPU of 80 GB of which this much is taken, some of it by this process's tensors (`used_gb`)
    or idle in its allocator."""
    total = 80 * 10**9
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (total - int(taken_gb * 1e9), total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: int((idle_gb + used_gb) * 1e9))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: int(used_gb * 1e9))


def test_what_comes_must_have_room_beside_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = {
        "gen": (),
        "load_learner": (memory.Item("learner weights", 30 * 10**9),),
        "old_log_prob": (),
        "update_actor": (memory.Item("learner weights", 30 * 10**9), memory.Item("logits", 10**10)),
        "optimizer_step": (),
        "update_weights": (
            memory.Item("learner weights", 10**10),
            memory.Item("engine weights", 5 * 10**10),
        ),
    }
    found = dataclasses.replace(plan("--train.offload"), phases=phases)
    guard = memory.Residency(found, torch.device("cuda", 0))
    gpu(monkeypatch, 79)
    guard.before("update_weights", [holding(weights=10**10)])  # the engine started awake
    gpu(monkeypatch, 50, idle_gb=20)
    guard.before("load_learner", [])
    gpu(monkeypatch, 45)
    with pytest.raises(RuntimeError) as error:
        guard.before("load_learner", [])
    assert str(error.value).startswith(
        "memory: phase update_actor on rank 0 needs 85.0 GB by plan; 45.0 GB of the device's "
        "80.0 GB are in use and 40.0 GB more are needed"
    )
    gpu(monkeypatch, 25)
    guard.before("update_weights", [holding(weights=10**10)])
    guard.before("load_learner", [])
    gpu(monkeypatch, 35, used_gb=10)
    with pytest.raises(RuntimeError, match="phase update_weights on rank 0 needs 85.0 GB"):
        guard.before("update_weights", [holding(weights=10**10)])


def test_a_switch_is_measured_and_what_comes_later_must_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phases = {"update_weights": (memory.Item("buckets", 10**10, True, comes_later=True),)}
    found = dataclasses.replace(
        plan("--train.offload"), phases=phases, learner={"update_weights": 0}
    )
    guard = memory.Residency(found, torch.device("cuda", 0))
    gpu(monkeypatch, 60)
    guard.check("update_weights", [])
    assert guard.take() == {
        "memory/learner_gb/update_weights": 0.0,
        "memory/device_gb/update_weights": 60.0,
        "memory/planned_gb/update_weights": 10.0,
    }
    gpu(monkeypatch, 71)
    with pytest.raises(RuntimeError, match="71.0 GB of the device's 80.0 GB are in use and 10.0"):
        guard.check("update_weights", [])


def with_phases(**phases: tuple[memory.Item, ...]) -> memory.Residency:
    """The check of a plan that holds nothing but these items."""
    empty = plan("--train.offload")
    all_ = {name: phases.get(name, ()) for name in empty.phases}
    found = dataclasses.replace(empty, phases=all_, learner=dict.fromkeys(all_, 0))
    return memory.Residency(found, torch.device("cuda", 0))


def test_the_learner_is_not_built_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = memory.Item("copy of weights", 30 * 10**9, comes_later=True)
    guard = with_phases(build=(memory.Item("learner weights", 30 * 10**9), copy))
    gpu(monkeypatch, 20)
    guard.before("build")
    gpu(monkeypatch, 21)
    with pytest.raises(RuntimeError, match="phase build on rank 0 .* 60.0 GB more are needed"):
        guard.before("build")
    gpu(monkeypatch, 41)
    step = with_phases(update_actor=(memory.Item("activations", 40 * 10**9),))
    with pytest.raises(RuntimeError, match="phase update_actor on rank 0 needs"):
        step.before("build")  # not only after the first rollout


def test_memory_idle_in_the_trainer_is_not_free_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coming = (memory.Item("engine weights", 40 * 10**9, comes_later=True),)
    guard = with_phases(load_learner=coming, update_weights=coming, gen=coming)
    gpu(monkeypatch, 60, idle_gb=30)
    guard.before("load_learner", [])  # the learner takes it from its own allocator
    with pytest.raises(RuntimeError, match="update_weights .* 60.0 GB of the device's 80.0 GB"):
        guard.before("update_weights", [])
    with pytest.raises(RuntimeError, match="phase gen .* 60.0 GB of the device's 80.0 GB"):
        guard.check("gen", [])


def test_measured_contexts_take_the_place_of_the_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    estimate = (memory.Item("contexts", 3 * 10**9, True),)
    guard = with_phases(gen=(memory.Item("KV cache", 75 * 10**9), *estimate), build=estimate)
    gpu(monkeypatch, 7, idle_gb=1, used_gb=2.5)  # 0.5 GB are workspaces of libraries
    with caplog.at_level(logging.WARNING):
        guard.before("build", [holding(weights=2 * 10**9)])
    assert guard.take() == {"memory/contexts_gb": 4.0}
    assert [size_of(guard.plan, phase, "contexts") for phase in ("build", "gen")] == [4 * 10**9] * 2
    assert not caplog.messages  # 79 GB fit
    gpu(monkeypatch, 6)
    with caplog.at_level(logging.WARNING):
        guard.before("load_learner", [])
    assert "phase gen needs 81.0 GB on rank 0" in caplog.messages[0]
    gpu(monkeypatch, 9)
    guard.before("update_weights", [])  # the engine still sleeps
    assert guard.take() == {"memory/contexts_gb": 9.0}
    gpu(monkeypatch, 50)
    guard.before("update_weights", [])  # an engine that is awake tells nothing about contexts
    assert guard.take() == {}
    other = plan("--train.offload")
    guard.follow(other)
    assert size_of(guard.plan, "gen", "contexts") == 9 * 10**9


def test_contexts_beside_a_judge_that_may_still_load_are_at_least_the_estimate() -> None:
    judge = memory.OtherMemory(always=(memory.Item("judge", 10 * 10**9, True),))
    cfg, hf = config("--train.offload"), small()
    layout = layout_of(cfg.train, 1, 0)
    found = memory.make(cfg, hf, layout, gpu_bytes=80e9, beside=judge)
    assert size_of(found.with_measured(6 * 10**9), "gen", "contexts") == 4_500_000_000
    assert size_of(found.with_measured(16 * 10**9), "gen", "contexts") == 6 * 10**9
    alone = memory.make(cfg, hf, layout, gpu_bytes=80e9)
    assert size_of(alone.with_measured(10**9), "gen", "contexts") == 10**9
