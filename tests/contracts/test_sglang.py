"""The contract of `engine_contract.py` for SGLang in a child process on the CPU, and what only
SGLang can do wrong."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rlcore.hf.config import HFConfig
from rlcore.ops.reshard import checksum
from rlcore.protocols import Engine
from rlcore.records import Bucket, Down, Partial, Request, Sampling
from rlcore.rollout.child import ChildEngine
from rlcore.rollout.sglang_engine import server
from rlcore.rollout.sglang_engine.server import sweep
from rlcore.rollout.torch_engine.engine import TorchEngine
from rlcore.sync.pack import load_weights, pack
from rlcore.utils.buckets import SharedRoom
from rlcore.utils.listen import open_store
from tests import kit
from tests.contracts import engine_contract
from tests.contracts.engine_contract import *  # noqa: F403
from tests.contracts.engine_contract import (
    CONFIG,
    DEADLINE_S,
    HF,
    MAX_MODEL_TOKENS,
    Lab,
    assert_same,
    collect,
    ended,
    full_logits,
    prompts,
    requests,
    run,
    samples,
    some_tokens,
    weights,
)

pytestmark = [
    pytest.mark.ranks(1),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]

SIZES = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CONFIGS = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_scaling": YARN | {"attention_factor": 1.4},
        **SIZES,
    },
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": 60,
        **SIZES,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        **SIZES,
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        **SIZES,
    },
}
CONFIGS["deepseek_v3"] = {
    key: value
    for key, value in CONFIGS["glm4_moe"].items()
    if key not in ("partial_rotary_factor", "attention_bias", "use_qk_norm", "head_dim")
} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FACTORY = "rlcore.rollout.sglang_engine.engine:build"
OPTIONS = {
    "config": CONFIG,
    "max_model_tokens": MAX_MODEL_TOKENS,
    "dtype": "float32",
    "seed": 7,
    "progress_s": 0.001,
    "stream_interval": 4,
    "device": "cpu",
    "deadline_s": 110.0,
}
TOLERANCE = 1e-5
ROUNDS = 10
BUCKET_BYTES = 32 * 2**20


NARROW = {"max_running": 3, "cache_tokens": 128, "sglang": {"chunked_prefill_size": 16}}
"""Also for tests that want one place: with three, requests of one length end as they started."""


def start(**options) -> ChildEngine:
    """A child that is on its way up, without weights."""
    return ChildEngine(FACTORY, OPTIONS | options, start_s=280.0)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On busy cores two ranks wait for each other at every layer."""
    monkeypatch.setattr(engine_contract, "DEADLINE_S", 240.0)


@pytest.fixture(scope="module")
def children():
    """One child per set of options, used by all tests: starting one takes many seconds."""
    made: dict[bool, ChildEngine] = {}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        yield made
        for engine in made.values():
            engine.close()


def lab_of(made: dict[bool, ChildEngine], **always) -> Lab:
    """Engines with these settings beside what a test asks for."""

    def child(**options) -> Engine:
        narrow = bool(options)
        if narrow not in made:
            made[narrow] = start(**always, **(NARROW if narrow else {}))
        engine = made[narrow]
        engine.pause("abort")
        engine.sleep(("weights", "kv_cache"))
        engine.wake(("weights", "kv_cache"))
        engine.resume()
        engine.poll(0.0)
        load_weights(engine, weights(HF, 0).items(), 0)
        return engine

    return Lab(make=child, exact=False, tolerance=TOLERANCE, draws=1000)


@pytest.fixture
def lab(children):
    return lab_of(children)


# ---- the other engine


def torch_engine() -> TorchEngine:
    engine = TorchEngine(HF, max_model_tokens=MAX_MODEL_TOKENS, dtype="float32", seed=7)
    load_weights(engine, weights(HF, 0).items(), 0)
    return engine


def test_greedy_tokens_are_the_torch_engines(lab):
    todo = requests(12, group=1, temperature=0.0, tag="gr")
    ours, theirs = run(lab.make(), todo), run(torch_engine(), todo)
    for i, sample in theirs.items():
        assert ours[i].tokens.tolist() == sample.tokens.tolist()
        assert ours[i].finish == sample.finish


@pytest.mark.parametrize("settings", [{}, {"top_k": 8, "top_p": 0.8, "temperature": 1.5}])
def test_sampled_tokens_and_log_probs_are_the_torch_engines(lab, settings):
    todo = requests(8, tag="ag", **settings)
    assert_same(lab, run(lab.make(), todo), run(torch_engine(), todo), todo)


def test_a_new_request_finds_no_keys_of_old_weights_after_a_push_in_place(lab):
    """The prompt of the request in flight is in SGLang's prefix cache, computed by version 0."""
    engine, prompt = lab.make(), np.arange(2, 22, dtype=np.int32)
    old, new = (
        Request(id=i, prompt=prompt, sampling=Sampling(max_tokens=60)) for i in ("o.0", "n.0")
    )
    engine.submit([old])
    some_tokens(engine, {old.id}, 2)
    engine.pause("in_place")
    load_weights(engine, weights(HF, 1).items(), 1)
    engine.submit([new])
    engine.resume()
    got = samples(collect(engine, ended(2)))
    assert set(got[old.id].versions.tolist()) == {0, 1}
    sample = got[new.id]
    assert set(sample.versions.tolist()) == {1}
    logits = full_logits(prompt, sample.tokens, 1)
    tokens = torch.from_numpy(sample.tokens).long()
    want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    np.testing.assert_allclose(sample.logps, want, rtol=2e-6, atol=1e-6 + TOLERANCE)


def test_a_pause_in_mid_prefill_loses_no_log_prob(lab):
    """The prompt takes several steps; the first tokens come after the pause."""
    engine = lab.make(**NARROW)
    prompt = np.arange(60, dtype=np.int32) % 27 + 2
    todo = [Request(id=f"mid{k}.0", prompt=prompt, sampling=Sampling(max_tokens=6)) for k in "ab"]
    for request in todo:  # the second finds the prompt in the cache, but for its last token
        engine.submit([request])
        engine.pause("in_place")
        engine.resume()
    for sample in samples(collect(engine, ended(2))).values():
        logits = full_logits(prompt, sample.tokens)
        tokens = torch.from_numpy(sample.tokens).long()
        want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        np.testing.assert_allclose(sample.logps, want, rtol=2e-6, atol=1e-6 + TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("arch", CONFIGS)
def test_every_architecture_samples_what_the_torch_engine_does(arch):
    config = CONFIGS[arch]
    hf = HFConfig.from_dict(config)
    todo = [
        Request(id=f"a{n}.0", prompt=p, sampling=Sampling(max_tokens=30))
        for n, p in enumerate(prompts(8))
    ]
    theirs = TorchEngine(hf, max_model_tokens=60, dtype="float32", seed=7)
    load_weights(theirs, weights(hf, 0, 0.15).items(), 0)
    engine = start(config=config, max_model_tokens=60)
    try:
        # Many buckets, which divide what SGLang joins.
        load_weights(engine, weights(hf, 0, 0.15).items(), 0, max_bytes=2000)
        lab = Lab(make=start, exact=False, tolerance=TOLERANCE)
        model = engine_contract.oracle(config, 0, 0.15)
        assert_same(lab, run(engine, todo), run(theirs, todo), todo, model)
    finally:
        engine.close()


@pytest.mark.slow
def test_with_overlap_the_token_in_work_at_a_pause_has_the_version_that_made_it():
    """As on a GPU, where SGLang's scheduler runs ahead of the results by a step."""
    engine = start(sglang={"disable_overlap_schedule": False})
    sampling = Sampling(max_tokens=60)
    todo = [Request(id=f"ov{n}.0", prompt=p, sampling=sampling) for n, p in enumerate(prompts(4))]
    try:
        load_weights(engine, weights(HF, 0).items(), 0)
        engine.submit(todo)
        some_tokens(engine, {r.id for r in todo}, 2)
        for _ in range(4):
            engine.pause("in_place")
            engine.resume()
        early = engine.poll(0.0)
        got = samples(early + collect(engine, lambda more: ended(4)(early + more)))
        lab = Lab(make=start, exact=False, tolerance=TOLERANCE)
        assert_same(lab, got, run(torch_engine(), todo), todo)

        engine.submit(todo)
        some_tokens(engine, {r.id for r in todo}, 3)
        engine.pause("in_place")
        load_weights(engine, weights(HF, 1).items(), 1)
        engine.resume()
        for sample in samples(collect(engine, ended(4))).values():
            switch = sample.versions.tolist().index(1)
            logits = full_logits(sample.prompt, sample.tokens, 0)[: switch + 1]
            tokens = torch.from_numpy(sample.tokens[: switch + 1]).long()
            old = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].float().numpy()
            np.testing.assert_allclose(sample.logps[:switch], old[:switch], atol=1e-6 + TOLERANCE)
            assert abs(sample.logps[switch] - old[switch]) > 1e-4  # the new weights made it
    finally:
        engine.close()


# ---- two ranks


def payloads(buffer: memoryview, ranks: int) -> list[bytes]:
    return [bytes(buffer)] * ranks


def push_to(engine: Engine, ranks: int, std: float = 0.25) -> None:
    """As `push`, for an engine of tensor-parallel size `ranks`."""
    engine.begin_load(0)
    for bucket, buffer in pack(weights(HF, 0, std).items(), 2**20):
        engine.load_bucket(bucket, payloads(buffer, ranks))
    engine.end_load()


def start_two(**options: Any) -> list[ChildEngine]:
    """The shares of one engine, which meet again at another port when they are restarted."""
    stores = [open_store() for _ in range(2)]

    def settings(rank: int) -> Callable[[], dict[str, Any]]:
        places = iter(stores)
        share = {"tp": 2, "shares": 2, "share": rank, "rank": rank}
        return lambda: (
            OPTIONS | options | share | {"dist_init_addr": f"127.0.0.1:{next(places).port}"}
        )

    return [ChildEngine(FACTORY, settings(rank), rank=rank, start_s=280.0) for rank in (0, 1)]


@pytest.mark.slow
def test_the_death_of_one_of_two_ranks_is_its_down_and_both_start_again(lab):
    todo = requests(2, tag="two")
    alone = run(lab.make(), todo)
    leader, other = ranks = start_two()
    try:
        push_to(leader, 2)
        leader.submit(todo)
        (scheduler,) = schedulers(other)
        families = [psutil.Process(r.pid).children(recursive=True) for r in ranks]
        os.kill(scheduler.pid, signal.SIGKILL)
        (down,) = collect(other, lambda events: any(isinstance(e, Down) for e in events))
        assert f"process {scheduler.pid} of SGLang was killed by signal 9" in down.reason
        assert not down.lost and other.failure
        leader.fail(down.reason)  # as the controller's Drop
        events = collect(leader, lambda events: any(isinstance(e, Down) for e in events))
        lost = {i for e in events if isinstance(e, Down) for i in e.lost}
        assert lost | samples(events).keys() == {r.id for r in todo}
        for family in families:
            wait_for(gone(family))
        for rank in ranks:
            rank.restart()
        push_to(leader, 2)
        assert_same(lab, run(leader, todo), alone, todo)
        assert not other.failure
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.slow
def test_two_ranks_share_an_engine_and_sample_what_one_does(lab):
    todo = requests(2, tag="tp") + requests(2, group=1, temperature=0.0, tag="tpg")
    alone = run(lab.make(), todo)
    leader, other = ranks = start_two()
    try:
        push_to(leader, 2)
        assert_same(lab, run(leader, todo), alone, todo)
        other.submit(requests(1, tag="no"))  # its scheduler works, it takes nothing itself
        other.pause("recompute")
        assert not other.poll(0.1)
        leader.begin_load(1)
        bucket, buffer = next(pack(weights(HF, 0).items(), 2**20))
        bad = bytearray(buffer)
        bad[5] ^= 1
        with pytest.raises(ValueError, match="1 payloads.*tensor-parallel size 2"):
            leader.load_bucket(bucket, [bytes(buffer)])
        with pytest.raises(RuntimeError, match="rank 1 of the engine.*changed on its way"):
            leader.load_bucket(bucket, [bytes(buffer), bytes(bad)])
    finally:
        for rank in ranks:
            rank.close()


# ---- what of SGLang our arguments rely on


RELIED_ON = """
from types import SimpleNamespace
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.arg_groups.field_order import POSITIONAL_FIELD_ORDER
from sglang.srt.arg_groups.model_overrides import qwen3_moe
from sglang.srt.distributed import bootstrap
from sglang.srt.entrypoints import engine
from sglang.srt.environ import envs
from sglang.srt.layers import flashinfer_comm_fusion
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams
from rlcore.config import sglang_args
from rlcore.rollout.sglang_engine import server
from rlcore.rollout.torch_engine.sampler import MOST_KEPT

class Merging:
    def __init__(self, **_): pass
    def merge(self, _): pass

assert sglang_args.OWNED.keys() <= set(POSITIONAL_FIELD_ORDER)
assert set(sglang_args.RUNNERS) <= set(MOE_RUNNER_BACKEND_CHOICES)

qwen3_moe.get_platform = lambda: SimpleNamespace(is_sm100=True)
qwen3_moe.resolving_view = lambda arguments: arguments
model = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
for asked, chosen in (("auto", "flashinfer_trtllm"), (sglang_args.RUNNERS[0], None)):
    arguments = SimpleNamespace(
        quantization=None,
        _quantization_explicitly_unset=False,
        moe_runner_backend=asked,
        moe_a2a_backend="none",
    )
    found = qwen3_moe._qwen3_moe_family_overrides(arguments, model)
    assert found.get("moe_runner_backend") == chosen, (asked, found)

fuse = overrides._flashinfer_allreduce_fusion_auto_enable
overrides.model_config_of = lambda view: SimpleNamespace(hf_config=model)
hopper = SimpleNamespace(is_sm90=True, is_sm100=False, is_blackwell=False)
overrides.get_platform = flashinfer_comm_fusion.get_platform = lambda: hopper
for nodes, chosen in ((1, "auto"), (2, None)):
    view = SimpleNamespace(
        flashinfer_allreduce_fusion_backend=None,
        tp_size=2,
        nnodes=nodes,
        enable_dp_attention=False,
        disable_custom_all_reduce=False,
        moe_a2a_backend="none",
    )
    assert fuse(view).get("flashinfer_allreduce_fusion_backend") == chosen, nodes
assert flashinfer_comm_fusion._resolve_backend("auto", False) == "trtllm"

# What SGLang tells about top_k on the host is the bound of our sampler.
sampling_batch_info.get_exec = lambda: SimpleNamespace(
    deterministic=SimpleNamespace(enable_deterministic_inference=False),
    features=SimpleNamespace(enable_custom_logit_processor=False),
)
sampling_batch_info.penaltylib.BatchedPenalizerOrchestrator = Merging
def told(*top_ks):
    reqs = [
        SimpleNamespace(
            sampling_params=SamplingParams(top_k=top_k), return_sampling_mask=False, tokenizer=None
        )
        for top_k in top_ks
    ]
    batch = SimpleNamespace(reqs=reqs, device="cpu")
    return sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, 64)
assert told(20, MOST_KEPT).npu_top_k_top_p_eligible
assert not told(20, MOST_KEPT + 1).npu_top_k_top_p_eligible
assert not told(20, -1).npu_top_k_top_p_eligible
for others, few in (((5, 6), True), ((5, -1), False)):
    info = told(1, 2)
    info.merge_batch(told(*others))
    assert info.npu_top_k_top_p_eligible == few, others

# Two shares of 4 ranks have the ranks that SGLang would start on two nodes, but one node's devices.
parallel = get_parallel()
sizes = {"tp_size": 4, "pp_size": 1}
with parallel.override(nnodes=2, **sizes):
    want = [engine._calculate_rank_ranges(share) for share in range(2)]
server._start_share(2)
with parallel.override(nnodes=1, **sizes):
    assert [engine._calculate_rank_ranges(share) for share in range(2)] == want
assert want == [(range(1), range(2), 1, 2), (range(1), range(2, 4), 1, 2)]

with envs.SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE.override("env://"):
    assert bootstrap._resolve_dist_init_method(dist_port=1) == "env://"
"""


def run_python(program: str) -> None:
    """Run a program that imports SGLang for the CPU."""
    folder = Path(server.__file__).parent / "cpu"
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), kit.python_path()])
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_sglang_takes_our_arguments_as_they_are_meant():
    """Also for Blackwell, where its own choice for experts would make weight updates wrong."""
    run_python(RELIED_ON)


TABLES = """
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from transformers import AutoConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.rope import inverse_frequencies
from rlcore.mcore.rope import tables
from rlcore.rollout.sglang_engine.engine import sglang_config
from tests import kit
from tests.unit.test_hf_rope import SETTINGS

more = {"linear by 3": {"rope_type": "linear", "factor": 3}, "default": {"rope_type": "default"}}
for name, settings in (SETTINGS | more).items():
    settings = settings | {"rope_theta": 5000.0}
    hf = HFConfig.from_dict(kit.tiny_config(head_dim=32, rope_parameters=settings))
    made = AutoConfig.for_model(**sglang_config(hf))
    theta, scaling = get_rope_config(made)
    sizes = 32, 32, made.max_position_embeddings
    found = get_rope(*sizes, theta, rope_scaling=scaling, dtype=torch.float32).cos_sin_cache
    assert found.size(0) >= hf.max_positions, (name, len(found))
    positions, inverse = torch.arange(hf.max_positions), inverse_frequencies(32, hf.rope)
    ours = torch.cat(tables(inverse, positions, torch.float32, hf.rope.attention_factor), -1)
    apart = (found[: hf.max_positions] - ours[:, 0]).abs().max()
    assert apart < 2e-4, (name, apart)
"""


def test_sglang_rotates_by_the_learners_angles():
    """For every RoPE scaling, up to the longest sequence."""
    run_python(TABLES)


# ---- memory


def rss(pid: int) -> int:
    """Bytes of a process and those that it started."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(p.memory_full_info().uss for p in processes)


@pytest.mark.slow
def test_ten_rounds_of_sleep_wake_and_push_leave_memory_as_it_was(lab, record_property):
    """Each push brings 32 MiB in shared memory, most of it padding behind the tiny weights."""
    engine = lab.make()
    ((bucket, buffer),) = pack(weights(HF, 0).items(), BUCKET_BYTES)
    room = SharedRoom()
    flat = room.take(BUCKET_BYTES)
    flat.zero_()
    flat[: len(buffer)] = torch.frombuffer(buffer, dtype=torch.uint8)
    padded = Bucket(
        tensors=bucket.tensors, num_bytes=len(flat), checksum=checksum(flat), transport="shm"
    )
    todo = requests(4, max_tokens=20, tag="mem")
    sizes = []
    for number in range(2 + ROUNDS):
        run(engine, todo)
        engine.pause("recompute")
        engine.sleep(("weights", "kv_cache"))
        engine.wake(("weights",))
        engine.begin_load(number)
        engine.load_bucket(padded, [room.path.encode()])
        engine.end_load()
        engine.wake(("kv_cache",))
        engine.resume()
        sizes.append(rss(engine.pid))
    grown = (sizes[-1] - sizes[1]) / 2**20
    record_property("grown_mib", grown)
    print(f"memory of the engine's processes over {ROUNDS} rounds: {grown:+.1f} MiB")
    assert grown < 16, [f"{size / 2**20:.1f}" for size in sizes]
    run(engine, todo)


# ---- death


def schedulers(engine: ChildEngine) -> list[psutil.Process]:
    found = psutil.Process(engine.pid).children(recursive=True)
    return [p for p in found if "scheduler" in " ".join(p.cmdline())]


def gone(processes: list[psutil.Process]) -> Callable[[], bool]:
    return lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_scheduler_is_an_event_and_a_restarted_engine_goes_on(lab):
    todo = [  # none stops early
        Request(id=r.id, prompt=r.prompt, sampling=Sampling(max_tokens=60))
        for r in requests(4, group=2, tag="kill")
    ]
    whole = run(lab.make(), todo)
    engine = lab.make()
    engine.submit(todo)
    early = some_tokens(engine, {r.id for r in todo}, 2)
    family = psutil.Process(engine.pid).children(recursive=True)
    (scheduler,) = schedulers(engine)
    os.kill(scheduler.pid, signal.SIGKILL)
    events = early + collect(engine, lambda events: any(isinstance(e, Down) for e in events))
    (down,) = [e for e in events if isinstance(e, Down)]
    assert f"process {scheduler.pid} of SGLang was killed by signal 9" in down.reason
    finished = samples(events)
    assert {*down.lost, *finished} == {r.id for r in todo}
    wait_for(gone(family))
    engine.restart()
    load_weights(engine, weights(HF, 0).items(), 0)
    back = [
        Request(
            id=r.id, prompt=r.prompt, sampling=r.sampling, resume=down.partials.get(r.id, nothing())
        )
        for r in todo
        if r.id in down.lost
    ]
    assert any(len(r.resume.tokens) for r in back)
    engine.submit(back)
    finished |= samples(collect(engine, ended(len(back))))
    assert_same(lab, finished, whole, todo)


def nothing() -> Partial:
    return Partial(
        tokens=np.zeros(0, np.int32), logps=np.zeros(0, np.float32), versions=np.zeros(0, np.int32)
    )


TRAINER = """
import sys, time
from tests.contracts.test_sglang import start, schedulers
engine = start()
if sys.argv[1] == "loaded":
    engine.pause("in_place")
while not schedulers(engine):
    time.sleep(0.05)
print(engine.pid, *[p.pid for p in schedulers(engine)], flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "loaded"])
def test_nothing_survives_a_trainer_that_is_killed(when):
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, when], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        family = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(family) == 2
        trainer.kill()
        wait_for(gone(family))


def test_close_ends_every_process_of_the_engine_and_removes_its_files(children, lab):
    lab.make()
    families = [
        [psutil.Process(e.pid), *psutil.Process(e.pid).children(recursive=True)]
        for e in children.values()
    ]
    folder = Path(os.environ["TMPDIR"])
    sweep(folder)  # of engines that were killed above
    (cache,) = folder.glob("torchinductor_*")  # for the next engine of this user
    assert len(list(folder.iterdir())) == len(children) + 1
    for engine in children.values():
        engine.close()
    for family in families:
        wait_for(gone(family))
    children.clear()
    assert list(folder.iterdir()) == [cache]
