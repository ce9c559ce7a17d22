"""What of the SGLang engine needs no SGLang: its stand-ins, its counters, its pins, its files, and
parts of it beside stand-ins for SGLang's own."""

import asyncio
import concurrent.futures
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import deque
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlcore.config import sglang_args
from rlcore.hf.config import HFConfig
from rlcore.records import Request, Sampling
from rlcore.rollout.errors import EngineFailedError
from rlcore.rollout.sglang_engine import plugin, server
from rlcore.rollout.sglang_engine.engine import (
    SGLangEngine,
    _SGLangRequest,
    _signed,
    _Stay,
    check_room,
)
from rlcore.rollout.sglang_engine.server import Server
from rlcore.rollout.torch_engine.sampler import GOLDEN
from rlcore.utils.errors import ConfigError
from rlcore.utils.seed import derive
from tests import kit
from tests.contracts.engine_contract import HF

ROOT = Path(__file__).resolve().parents[2]
STAND_INS = ROOT / "rlcore/rollout/sglang_engine/cpu"

USE = """
import torchvision
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional
import triton, triton.language as tl
from triton.runtime.jit import JITFunction
assert triton.cdiv(7, 3) == 3 and triton.next_power_of_2(9) == 16
assert InterpolationMode.NEAREST != InterpolationMode.BILINEAR

@triton.autotune(configs=[triton.Config({"BLOCK": 8})], key=["n"])
@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    return x

assert kernel(3, 8) == 3
assert "cpu" not in triton.backends.backends and not isinstance(kernel, JITFunction)
import sgl_kernel
try:
    sgl_kernel.top_k(1)
except NotImplementedError as error:
    assert "sgl_kernel.top_k: has no CPU version" in str(error)
else:
    raise AssertionError
import torch
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
"""


def test_stand_ins_let_kernels_be_declared_and_nothing_be_run():
    env = os.environ | {"PYTHONPATH": str(STAND_INS)}
    done = subprocess.run([sys.executable, "-c", USE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_stand_ins_are_not_seen_by_the_trainer():
    """A torchvision that does nothing would break the model classes of transformers."""
    assert str(STAND_INS) not in sys.path
    for name in ("torchvision", "sgl_kernel", "triton"):  # a GPU's set-up has real ones
        spec = importlib.util.find_spec(name)
        assert spec is None or not Path(spec.origin or "").is_relative_to(STAND_INS), name


def test_a_seed_and_a_position_give_the_torch_engines_counter():
    for prompt in (1, 7, 40):
        key = derive(3, "sample", f"t1.{prompt}")
        seed = _signed(key + (1 - prompt) * GOLDEN)
        assert -(2**63) <= seed < 2**63
        for count in (0, 1, 1000):
            position = prompt + count - 1  # of the last known token
            assert _signed(seed + position * GOLDEN) == _signed(key + count * GOLDEN)


def test_pins_of_sglang_and_of_torch_are_the_same_for_cuda_and_cpu():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sglang, _ = project["project"]["optional-dependencies"]["sglang"]
    assert sglang in project["tool"]["rlcore"]["sglang-cpu-alone"]
    plugins = project["project"]["entry-points"]["sglang.srt.plugins"]
    module, _, function = plugins["rlcore"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"tp": 4, "shares": 3, "dist_init_addr": "127.0.0.1:1"}, "shares 3: must divide"),
        ({"tp": 2, "shares": 2}, "needs dist_init_addr"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings, word):
    with pytest.raises(ValueError, match=word):
        SGLangEngine(HF, max_model_tokens=64, **settings)


# ---- SGLang's arguments

MOE = HFConfig.from_dict(kit.tiny_config("qwen3_moe"))
USERS = {"attention_backend", "disable_overlap_schedule", "log_level", "sleep_on_idle"}
"""Arguments with a value of ours that a user may change."""


@pytest.fixture
def arguments_of(monkeypatch):
    """Arguments with which an engine of these settings would start SGLang."""
    started = bare_server([])
    started.manager = None
    given: dict[str, Any] = {}

    def server(arguments: dict[str, Any], *_: Any) -> Server:
        given.update(arguments)
        return started

    monkeypatch.setattr("rlcore.rollout.sglang_engine.engine.set_environment", lambda *_: None)
    monkeypatch.setattr("rlcore.rollout.sglang_engine.engine.Server", server)

    def of(hf: HFConfig, **settings: Any) -> dict[str, Any]:
        given.clear()
        SGLangEngine(hf, max_model_tokens=64, **settings)
        return dict(given)

    return of


def test_experts_on_a_gpu_are_kept_as_they_are_sent(arguments_of):
    """SGLang's own choice on Blackwell rearranges them at the first load."""
    assert arguments_of(MOE, device="cuda:1")["moe_runner_backend"] == "triton"
    given = arguments_of(MOE, device="cuda", sglang={"moe_runner_backend": "flashinfer_cutlass"})
    assert given["moe_runner_backend"] == "flashinfer_cutlass"
    for hf, device in ((HF, "cuda"), (MOE, "cpu")):
        assert "moe_runner_backend" not in arguments_of(hf, device=device)


def test_a_user_can_change_none_of_our_arguments_but_those_named_here(arguments_of):
    given = arguments_of(MOE, device="cuda", cache_tokens=64) | arguments_of(HF, draft="ngram")
    refused = {name for name in given if sglang_args.problems((f"{name}=1",))}
    assert given.keys() - refused == USERS


def test_the_ranks_of_an_engine_meet_at_a_store_that_has_its_port(arguments_of, monkeypatch):
    stores: list[str] = []
    monkeypatch.setattr(
        "rlcore.rollout.sglang_engine.engine.set_environment",
        lambda _device, _tp, store, _nodes, _drafts: stores.append(store),
    )
    for address in ("", "127.0.0.1:4"):
        given = arguments_of(HF, dist_init_addr=address)
        assert given["dist_init_addr"] == stores[-1] and "nccl_port" not in given
    assert stores[0].startswith("127.0.0.1:") and stores[1] == "127.0.0.1:4"


# ---- what waits for SGLang


def bare_server(processes: list[Any]) -> Server:
    """A `Server` over `processes` that has started nothing."""
    made = object.__new__(Server)
    made._failed, made._watched, made._processes, made._deadline_s = "", 0.0, processes, 60.0
    made.cache_tokens, made._monitors = 64, []
    return made


class Late(concurrent.futures.Future):
    """Ends between the end of a wait and the look at it."""

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError:
            if not self.done():
                self.set_result("done")
            raise


def test_work_that_ends_at_the_end_of_a_wait_is_done():
    assert bare_server([])._wait(Late(), "load_bucket", 60.0) == "done"


def test_a_scheduler_that_stays_stopped_is_named():
    server = bare_server([])
    server._monitors = [SimpleNamespace(pid=7, is_stuck=lambda: True)]
    with pytest.raises(EngineFailedError, match="process 7 of SGLang was stopped by a signal"):
        server.check(now=True)


def test_an_error_of_a_call_is_the_death_of_a_process_where_one_is_dead():
    dead = SimpleNamespace(pid=7, exitcode=-9, is_alive=lambda: False)

    async def fail():
        raise RuntimeError("connection closed by peer")

    loop = asyncio.new_event_loop()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        running = thread.submit(loop.run_forever)
        try:
            for processes, error in (([dead], EngineFailedError), ([], RuntimeError)):
                made = bare_server(processes)
                made._watched, made.loop = time.monotonic(), loop  # it was looked at just now
                with pytest.raises(RuntimeError) as raised:
                    made.call(fail(), "load_bucket")
                assert type(raised.value) is error
        finally:
            loop.call_soon_threadsafe(loop.stop)
            running.result(10)
            loop.close()


class Requests(ModuleType):
    """SGLang's messages: a name with arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda **fields: SimpleNamespace(name=name, **fields)


class Manager:
    """SGLang's side of the adapter; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def continue_generation(self, request: Any) -> None:
        self.asked.append(request.name)

    async def generate_request(self, request: Any, _: None):
        self.asked.append(request.name)
        yield {"meta_info": {"output_token_logprobs": []}, "output_ids": []}


@pytest.fixture
def adapter(monkeypatch):
    """An engine without its start: what it has said is in `engine._server`."""
    names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct")
    for name in names:
        monkeypatch.setitem(sys.modules, name, Requests(name))
    monkeypatch.setattr("rlcore.rollout.sglang_engine.engine.set_environment", lambda *_: None)
    started = bare_server([])
    started.manager = None
    monkeypatch.setattr("rlcore.rollout.sglang_engine.engine.Server", lambda *_: started)
    engine = SGLangEngine(HF, max_model_tokens=64)
    started.manager = Manager()
    return engine


def test_an_engine_paused_in_place_as_its_last_flight_ends_goes_on_to_sleep(adapter):
    """Paused, SGLang does not put its last batch away and never gets idle."""
    adapter._still = True
    asyncio.run(adapter._land([]))
    assert adapter._manager.asked == ["ContinueGenerationReqInput"] and not adapter._still


def test_aborting_what_waits_does_not_wake_what_is_held(adapter):
    adapter._still = True
    adapter._jobs = {"w.0": job("w.0")}
    asyncio.run(adapter._abort(["w.0"]))
    assert not adapter._manager.asked and adapter._still
    (aborted, *_) = adapter.poll(0.0)
    assert aborted.id == "w.0"


def job(id: str) -> _SGLangRequest:
    request = Request(id=id, prompt=np.array([3], np.int32), sampling=Sampling(max_tokens=4))
    return _SGLangRequest(
        request, arrival=0, seed=1, prompt=[3], prompt_key=0, tokens=[], logps=[], versions=[]
    )


def test_whatever_goes_wrong_behind_a_request_fails_the_engine(adapter, monkeypatch):
    """Its task would end unheard, and the request never."""

    def lost(*_):
        raise KeyError("a flight")

    monkeypatch.setattr(adapter, "_landed", lost)
    asyncio.run(adapter._fly(job("f.0"), _Stay(rid="0", base=0, version=0)))
    with pytest.raises(EngineFailedError, match="request f.0: KeyError: 'a flight'"):
        adapter.poll(0.0)


# ---- the plug-in


def waiting(tokens: int, interval: int = 4, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        output_ids=[5] * tokens,
        finished=lambda: finished,
        sampling_params=SimpleNamespace(stream_interval=interval),
    )


class Scheduler(SimpleNamespace):
    """What `_tell` touches of SGLang's."""

    def __init__(self, **fields: Any) -> None:
        self.told: list[Any] = []
        self.output_streamer = SimpleNamespace(stream_output=self.tell)
        self.cur_batch_for_debug = "batch"
        more = {"enable_overlap": False, "last_batch": None, "running": [], "waiting_queue": []}
        super().__init__(**(more | {"result_queue": deque()} | fields))

    def tell(self, reqs: list[Any], logprobs: bool) -> None:
        assert logprobs and all(req.sampling_params.stream_interval == 1 for req in reqs)
        self.told += reqs

    def collect_inflight_reqs(self) -> set[int]:
        return self.running

    def process_batch_result(self, batch: Any, result: Any) -> None:
        plugin._once(lambda _, batch, result: batch.output_ids.append(result), self, batch, result)


def test_a_pause_tells_every_token_and_nothing_of_requests_without_one():
    """SGLang counts a log-prob for a request without a token, such as one in mid-prefill, and
    leaves it out when the token comes."""
    new, old, done, preempted = waiting(0), waiting(3), waiting(4, finished=True), waiting(2)
    scheduler = Scheduler(running=[new, old, done], waiting_queue=[waiting(0), preempted])
    plugin._tell(None, scheduler, None)
    assert scheduler.told == [old, preempted]
    assert old.sampling_params.stream_interval == 4
    assert scheduler.cur_batch_for_debug is None  # or a long pause would be a stuck batch


def test_a_pause_takes_in_the_token_in_work_once():
    req = waiting(0)
    scheduler = Scheduler(enable_overlap=True, last_batch=req, running=[req])
    scheduler.result_queue.append((req, 9))
    for _ in range(2):
        plugin._tell(None, scheduler, None)
        assert req.output_ids == [9] and scheduler.told[-1] is req
    scheduler.process_batch_result(*scheduler.result_queue.popleft())  # as SGLang goes on
    assert req.output_ids == [9] and not scheduler.result_queue


# ---- files


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Base of the engines' folders, and where their shared memory is."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(server, "_LOADS", shm)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path, shm


OWNER = """
import sys, tempfile
from pathlib import Path
from rlcore.rollout.sglang_engine import server
folder, lock = server.make_folder({})
shm = Path(sys.argv[1])
(shm / f"sglang_loads_{Path(folder).name}_0f.shm").touch()
print(folder, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_engine_has_left_goes_and_what_a_living_one_has_stays(folders):
    base, shm = folders
    command = [sys.executable, "-c", OWNER, str(shm)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        server.sweep(base)
        assert (theirs / "config.json").is_file() and len(list(shm.iterdir())) == 1
        other.kill()
        other.wait(20)
    folder, lock = server.make_folder({})
    assert not theirs.exists() and not list(shm.iterdir())
    assert (Path(folder) / "config.json").is_file() and tempfile.gettempdir() == folder
    server._remove(Path(folder))
    os.close(lock)
    assert not list(base.glob("*rlcore*"))


def test_a_cache_of_compiled_code_that_others_can_write_to_is_not_used(folders):
    base, _ = folders
    assert server._is_ours(base / "made") and (base / "made").stat().st_mode & 0o077 == 0
    assert server._is_ours(base / "made")
    (base / "link").symlink_to(base / "made")
    (base / "file").touch()
    (base / "open").mkdir()
    (base / "open").chmod(0o777)
    assert not any(server._is_ours(base / name) for name in ("link", "file", "open"))


def test_a_folder_too_long_for_sockets_is_refused_before_anything_starts(folders, monkeypatch):
    base = folders[0] / ("x" * 80)
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    with pytest.raises(ValueError, match="TMPDIR .*x: must have at most 72"):
        server.make_folder({})


def test_a_flight_gives_no_routes_to_tokens_of_other_versions() -> None:
    """Tokens of versions 0, 0 and 1 whose routes are lost; under version 1 all are computed again,
    and a fourth one is sampled."""
    asked = job("r.0")
    prompt = len(asked.prompt)
    asked.grow([5, 6], [-1.0] * 2, 0)
    asked.grow([7, 8], [-1.0] * 2, 1)
    asked.take_routes(np.full((prompt + 3, 2), 3, np.int8), 3, 1)
    assert asked.routes is not None
    # A row's experts are those with which the next token was sampled.
    assert asked.routes[:, 0].tolist() == [-1] * prompt + [-1, 3, 3, -1]
    first = job("r.1")
    first.grow([5, 6], [-1.0] * 2, 4)
    first.take_routes(np.full((prompt + 1, 2), 3, np.int8), 0, 4)
    assert first.routes is not None
    assert first.routes[:, 0].tolist() == [3] * (prompt + 1) + [-1]


def test_a_cache_smaller_than_a_sequence_is_refused_at_the_start() -> None:
    check_room(100, 100)
    with pytest.raises(ConfigError, match="SGLang room for 99 tokens of KV cache, but one sequ"):
        check_room(99, 100)
