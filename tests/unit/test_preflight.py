"""The checks of `rlcore preflight` and of a start on GPUs.

The driver, nvidia-smi and CUDA are stand-ins, so that torch seems to find eight GPUs of CUDA 99; no
GPU has run these checks. Several ranks: tests/ranks/test_preflight.py.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlcore.cli import builders, preflight, settings, train
from rlcore.cli.builders import folder
from rlcore.cli.checks import CheckResult, disk, machine, ranks, start, task
from rlcore.cli.preflight import Report
from rlcore.cli.world import World
from rlcore.config.schema import Config, LoraConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.lora import num_adapter_parameters
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer
from rlcore.ops import native
from rlcore.sandbox import isolation
from rlcore.utils import nvidia
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from tests import kit, runs

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GPUS_PER_NODE", "NODES")
SGLANG = "--rollout.engine", "sglang"
SMI = """#!/bin/sh
case $1 in
  --query-compute-apps=*) echo 'GPU-bb, 4321, /usr/bin/python3' ;;
  *) echo '0, GPU-aa, NVIDIA H200, 4, 143771'
     echo '1, GPU-bb, NVIDIA H200, 40960, 143771'
     echo '2, GPU-cc, NVIDIA H200, 4, [N/A]' ;;
esac
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that no launcher has started."""
    for name in (*LAUNCHER, "CUDA_VISIBLE_DEVICES", "RLCORE_NATIVE", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs of CUDA 99, with all that they need but nvidia-smi and a toolkit."""
    monkeypatch.setattr(nvidia, "has_gpu", lambda: True)
    monkeypatch.setattr(nvidia, "driver_version", lambda: "999.1")
    monkeypatch.setattr(nvidia, "driver_cuda", lambda: (99, 1))
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(native, "obstacle", lambda device: "")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an nvidia-smi with this text on PATH."""

    def install(text: str) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return install


def refuse(reason: str) -> Callable[..., Any]:
    def raise_it(*_: object) -> None:
        raise RuntimeError(reason)

    return raise_it


# ---- the machine


def test_a_driver_that_torch_can_use_passes(gpus: None) -> None:
    assert machine.driver() == CheckResult(
        "driver", "PASS", "driver 999.1 supports CUDA up to 99.1; torch is built for CUDA 99.0"
    )


def test_a_machine_without_a_gpu_is_told_from_a_container_without_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvidia, "has_gpu", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert machine.driver().state == "SKIP"
    monkeypatch.setattr(torch.version, "cuda", "99.0")
    found = machine.driver()
    assert (
        found.state == "WARN" and "no NVIDIA GPU is visible, so the run uses the CPU" in found.text
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.driver().state == "SKIP"


def test_a_driver_that_torch_cannot_use_is_named_with_the_remedy(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "driver_cuda", lambda: (98, 6))
    found = machine.driver()
    assert found.state == "FAIL"
    assert "driver 999.1 supports CUDA up to 98.6, but torch is built for CUDA 99.0" in found.text
    assert "install a driver for CUDA 99, or a torch build for CUDA 98" in found.text
    monkeypatch.setattr(nvidia, "driver_cuda", refuse("libcuda.so.1: no such file"))
    found = machine.driver()
    assert found.state == "FAIL" and "does not load (libcuda.so.1: no such file)" in found.text


def test_gpus_that_torch_does_not_find_are_a_failure(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse("CUDA error 802: not initialized\nmore"))
    found = machine.driver()
    assert found.state == "FAIL"
    assert "torch finds no GPU (CUDA error 802: not initialized);" in found.text


def test_torch_for_the_cpu_on_a_machine_with_gpus_is_warned_of(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    found = machine.driver()
    assert found.state == "WARN" and found.text.endswith("run bash tools/setup.sh --cuda")


def test_the_newest_cuda_version_is_read_from_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 13010; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    load = nvidia.ctypes.CDLL
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: load(str(library)))
    assert nvidia.driver_cuda() == (13, 1)
    monkeypatch.setattr(nvidia.ctypes, "CDLL", lambda name: load("/no/libcuda.so.1"))
    with pytest.raises(RuntimeError, match=r"/no/libcuda\.so\.1"):
        nvidia.driver_cuda()


@pytest.mark.parametrize(
    ("variables", "state", "text"),
    [
        ({}, "PASS", "8 visible"),
        ({"LOCAL_WORLD_SIZE": "8"}, "PASS", "8 visible, 8 needed"),
        ({"GPUS_PER_NODE": "16"}, "FAIL", "8 visible, 16 needed; set GPUS_PER_NODE=8"),
        ({"LOCAL_WORLD_SIZE": "2", "GPUS_PER_NODE": "16"}, "WARN", "8 visible, 2 needed; to use"),
        (
            {"LOCAL_WORLD_SIZE": "9", "CUDA_VISIBLE_DEVICES": "0,1"},
            "FAIL",
            "8 visible (CUDA_VISIBLE_DEVICES=0,1), 9 needed",
        ),
    ],
)
def test_the_visible_gpus_are_compared_with_the_processes(
    gpus: None, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], state: str, text: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = machine.gpus()
    assert found.state == state and found.text.startswith(text)


def test_gpus_that_other_programs_use_are_named_with_them(
    gpus: None, smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(SMI)
    found = machine.memory()
    assert found.state == "WARN"
    assert found.text.startswith("in use are GPU 1: 42.9 of 151 GB by 4321 python3; end the other")
    for mask, indices in (("2,0", [2, 0]), ("GPU-b", [1]), ("", []), ("7", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert [gpu.index for gpu in nvidia.visible_gpus()] == indices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert machine.memory() == CheckResult(
        "memory", "PASS", "free on all GPUs: NVIDIA H200 with 151 GB"
    )


def test_memory_is_not_checked_without_an_answer_of_nvidia_smi(
    gpus: None, smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi("#!/bin/sh\necho 'Failed to initialize NVML: mismatch' >&2; exit 18\n")
    found = machine.memory()
    assert found.state == "SKIP" and "Failed to initialize NVML: mismatch" in found.text
    monkeypatch.setenv("PATH", "")
    assert "nvidia-smi is not on PATH" in machine.memory().text


def test_missing_kernels_are_a_failure_unless_they_are_switched_off(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.kernels().state == "PASS"
    monkeypatch.setattr(native, "obstacle", lambda device: f"no kernels for {device}")
    found = machine.kernels()
    assert found.state == "FAIL"
    assert found.text.startswith("no kernels for cuda; run bash tools/setup.sh where nvcc")
    monkeypatch.setenv("RLCORE_NATIVE", "0")
    assert machine.kernels().state == "WARN"


def test_what_sglang_compiles_with_is_checked_for_sglang_alone(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = machine.libcudart, machine.nvcc, machine.compiler
    env = {"PATH": os.environ["PATH"]}
    assert [check(Config(), env).state for check in checks] == ["SKIP"] * 3
    cfg = settings.parse(SGLANG)
    found = [check(cfg, env) for check in checks]
    assert [result.state for result in found] == ["FAIL", "FAIL", "PASS"]
    assert "cannot load libcudart.so.99" in found[0].text
    assert "needs the compiler nvcc of CUDA 99" in found[1].text
    assert found[2].text == shutil.which("c++")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.libcudart(cfg, env).state == "SKIP"


@pytest.mark.parametrize(
    ("library", "state"), [("glibc 2.31", "FAIL"), ("glibc 2.34", "PASS"), (None, "FAIL")]
)
def test_an_old_c_library_is_a_failure_for_sglang(
    gpus: None, monkeypatch: pytest.MonkeyPatch, library: str | None, state: str
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: library)
    assert machine.glibc(settings.parse(SGLANG)).state == state
    assert machine.glibc(Config()).state == "SKIP"


def test_the_grade_of_the_sandbox_is_compared_with_what_the_run_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weak = isolation.Grade("fallback", "WEAK, rlimits and no namespaces")
    monkeypatch.setattr(isolation, "grade", lambda required: weak)
    found = machine.sandbox(Config())
    assert found.state == "SKIP" and weak.sentence in found.text
    for keys in (("--reward", "code"), ("--reward", "exact:1,code:1"), ("--env", "tools")):
        found = machine.sandbox(settings.parse(keys))
        assert found.state == "WARN" and "install bubblewrap" in found.text
    monkeypatch.setattr(
        isolation, "grade", lambda required: weak if required == "fallback" else refuse("none")()
    )
    required = settings.parse(("--reward", "code", "--reward.require_isolation", "cgroup"))
    assert machine.sandbox(required) == CheckResult("sandbox", "FAIL", "none")
    monkeypatch.setattr(isolation, "grade", lambda required: isolation.Grade("cgroup", "all"))
    assert machine.sandbox(required) == CheckResult("sandbox", "PASS", "all")


# ---- the run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return runs.tiny_model(tmp_path / "model")


def config(model: Path, *more: object) -> Config:
    return settings.parse(runs.arguments(model, model.parent / "runs", "x", *more))


@pytest.mark.parametrize(
    ("free", "state"),
    [(0.9, "FAIL"), (1.1, "WARN"), (3.1, "WARN"), (3.5, "PASS")],  # 3 checkpoints, 1/3 exported
)
def test_the_free_space_is_compared_with_the_checkpoints(
    model: Path, monkeypatch: pytest.MonkeyPatch, free: float, state: str
) -> None:
    keys = "--checkpoint.every", 1, "--checkpoint.no_keep_best"
    cfg, hf = config(model, *keys), HFConfig.from_folder(model)
    folder = kit.tiny_hf_folder(model.parent / "weights", **hf.to_dict())
    one = 3 * (folder / "model.safetensors").stat().st_size
    usage = shutil.disk_usage("/")._replace(free=int(free * one))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = disk.check(cfg, hf)
    assert found.state == state, found.text
    assert (state == "PASS") != ("lower --checkpoint.keep" in found.text)


def test_a_checkpoint_of_adapters_is_small(model: Path) -> None:
    hf = HFConfig.from_folder(model)
    text = disk.check(config(model, "--lora.rank", 8, "--checkpoint.every", 1), hf).text
    assert "4 x 0.0 GB of checkpoints" in text
    size = disk.BYTES * num_adapter_parameters(hf, LoraConfig(rank=8))
    assert disk.checkpoint_bytes(config(model, "--lora.rank", 8), hf) == size


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ("--checkpoint.every 1", 4),  # of 4 steps two are kept, and the best, and one is written
        ("--checkpoint.every 1 --checkpoint.no_keep_best", 3),
        ("--checkpoint.every 1 --checkpoint.keep 0", 4),
        ("--checkpoint.every 3 --checkpoint.keep 0", 2),
        ("--checkpoint.every 3 --checkpoint.keep 0 --checkpoint.no_at_end", 1),
        ("", 1),
        ("--checkpoint.no_at_end", 0),
    ],
)
def test_checkpoints_on_disk_are_counted(model: Path, keys: str, number: int) -> None:
    assert disk.saves(config(model, *keys.split())) == number


def test_a_run_that_saves_nothing_needs_no_disk(model: Path) -> None:
    nothing = config(model, "--checkpoint.no_at_end", "--checkpoint.no_export_hf")
    assert disk.check(nothing, HFConfig.from_folder(model)).state == "SKIP"


def test_inputs_that_the_dry_run_refuses_are_failures_with_its_sentence(model: Path) -> None:
    found = task.check(config(model, "--data.train", "gone.jsonl", "--train.tp", 3), 2, 2)
    texts = [result.text for result in found if result.state == "FAIL"]
    assert any("data file gone.jsonl: no such file" in text for text in texts)
    assert any("--train.tp 3" in text for text in texts)
    assert found[-1] == CheckResult("data", "SKIP", "the settings are refused")
    (lost,) = task.check(config(model, "--model.path", "gone"), 1, 1)
    assert lost.check == "settings" and "no such folder" in lost.text


def scored(model: Path, *more: object) -> list[CheckResult]:
    """Results of data and reward, on ten rows of a task."""
    cfg = config(model, *more)
    found = task.check(cfg, 1, 1)
    assert not [result for result in found if result.check == "settings" and result.state != "PASS"]
    return [result for result in found if result.check in ("data", "reward")]


def test_a_reward_that_knows_the_reference_answers_passes(model: Path) -> None:
    *rows, reward = scored(model, "--reward", "exact", "--reward.answer_marker", ">")
    assert [row.text.partition(",")[0] for row in rows] == [
        "label: 10 rows",
        "label of --data.val: 10 rows",
    ]
    text = "exact: 20 rows, reference answers score 1, empty answers score 0"
    assert reward == CheckResult("reward", "PASS", text)


def test_a_reward_that_gives_reference_answers_nothing_is_warned_of_with_a_row(
    model: Path,
) -> None:
    reward = scored(model, "--reward", "tests.scores.half")[-1]
    assert reward.state == "WARN"
    assert "10 of 20 reference answers score no more than an empty answer" in reward.text
    assert "first row 1 of label: '" in reward.text and "scores 0" in reward.text
    assert "check --data.answer_field" in reward.text


def test_each_reward_of_a_sum_is_checked_by_itself(model: Path) -> None:
    cfg = config(model, "--reward", "exact:1,tests.scores.half:1,judge:1")
    tokens = load_tokenizer(model)
    rows = task.rows(cfg, HFConfig.from_folder(model), tokens)["label"]
    states = [
        (result.text.partition(":")[0], result.state) for result in task.rewards(cfg, rows, tokens)
    ]
    assert states == [("exact", "PASS"), ("tests.scores.half", "WARN"), ("judge", "SKIP")]


def test_a_reward_that_fails_is_named_with_its_error(model: Path) -> None:
    reward = scored(model, "--reward", "tests.scores.broken")[-1]
    assert reward.state == "FAIL"
    assert "fails for 40 of 40 responses, first row 0 of label: KeyError" in reward.text


def test_rows_without_answers_leave_the_empty_answer(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "a1b2="}\n' * 12)
    more = "--data.template", "none", "--data.answer_field", "", "--reward", "tests.scores.half"
    rows, reward = scored(model, "--data.train", file, *more, "--data.val")
    assert rows.text == "rows: 10 rows, prompts of 5 to 5 tokens"
    text = "tests.scores.half: 10 rows, no reference answers, empty answers score 0"
    assert reward == CheckResult("reward", "PASS", text)


@pytest.mark.parametrize("answer", ["12", "6 + 6 = 12\n#### 12", "the sum is \\boxed{12}", "x+1"])
def test_the_reference_of_the_math_reward_is_right(
    model: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    pytest.importorskip("math_verify")
    cfg = config(model, "--reward", "math", "--reward.require_boxed")
    tokens = load_tokenizer(model)
    row = task.rows(cfg, HFConfig.from_folder(model), tokens)["label"][0]
    row = msgspec.structs.replace(row, answer=answer)
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [2] * len(text))
    found = task.reward("math", cfg.reward, [row], tokens, 0)
    assert found.state == "PASS", found.text


def test_an_environment_that_scores_itself_needs_no_reward() -> None:
    cfg = settings.parse(("--env", "frozenlake"))
    (found,) = task.rewards(cfg, [], None)
    assert found.state == "SKIP" and "--env frozenlake" in found.text


# ---- the start of a run


def test_a_start_without_gpus_checks_nothing_else(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "has_gpu", lambda: False)
    monkeypatch.setattr(machine, "memory", refuse("asked"))
    assert start.check(config(model)) == []


def test_a_start_on_gpus_warns_of_memory_in_use_once_per_node(
    gpus: None, smi: Callable[[str], None], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(SMI)
    (warning,) = start.check(config(model))
    assert warning.startswith("memory: in use are GPU 1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert start.check(config(model)) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert start.check(config(model, "--mux.url", "redis://127.0.0.1:1")) == []


def test_a_start_on_gpus_that_cannot_work_is_refused_with_all_reasons(
    gpus: None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUS_PER_NODE", "9")
    usage = shutil.disk_usage("/")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError) as error:
        start.check(config(model, *SGLANG))
    needed, libcudart, space = str(error.value).splitlines()
    assert needed.startswith("8 visible, 9 needed") and "libcudart.so.99" in libcudart
    assert space.startswith("0.0 GB free")


def test_a_run_whose_driver_is_too_old_ends_with_the_reason(
    gpus: None, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Otherwise torch finds no GPU, and the run trains on the CPU."""
    monkeypatch.setattr(nvidia, "driver_cuda", lambda: (12, 4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv = runs.arguments(model, model.parent / "runs", "x", "--run.steps", 1)
    assert train.main(argv) == 2
    said = capsys.readouterr()
    assert "supports CUDA up to 12.4, but torch is built for CUDA 99.0" in said.err


def test_a_start_on_gpus_warns_before_anything_is_built(
    gpus: None, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg, here = config(model), World(0, 1, 0, torch.device("cuda", 0), None)

    def build(*_: object) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr(folder, "open_folder", lambda *_: None)
    monkeypatch.setattr(builders, "run", build)
    monkeypatch.setattr(native, "obstacle", lambda device: f"no kernels for {device}")
    monkeypatch.setattr(log, "propagate", True)
    native._warn.cache_clear()
    assert train._train(cfg, here, ["memory: in use"]) == 2
    memory, kernels, end = [record.getMessage() for record in caplog.records[:3]]
    assert memory == "WARNING: memory: in use" and end == "enough"
    assert kernels.startswith("WARNING: this GPU runs without rlcore's CUDA kernels\n")


# ---- the table


def result(text: str, state: Any = "PASS", check: str = "driver") -> CheckResult:
    return CheckResult(check, state, text)


def test_equal_results_are_one_line_and_others_stand_with_their_node_and_ranks() -> None:
    seen, fewer = result("8 visible", check="gpus"), result("1 visible", "FAIL", "gpus")
    reports = [
        Report(0, 0, "a", [result("new"), seen], [result("10 rows", check="data")]),
        Report(1, 0, "a", [seen], []),
        Report(2, 1, "b", [result("old", "FAIL"), seen], []),
        Report(3, 1, "b", [fewer], []),
    ]
    assert preflight.lines(reports) == [
        "node 0 (a):",
        "  PASS  driver     new",
        "  PASS  gpus       8 visible",
        "node 1 (b):",
        "  PASS  gpus       8 visible (rank 2)",
        "  FAIL  driver     old",
        "  FAIL  gpus       1 visible (rank 3)",
        "run:",
        "  PASS  data       10 rows",
        "preflight: 2 FAIL, 0 WARN, 3 PASS, 0 SKIP",
    ]
    reports = [Report(0, 0, "a", [seen], []), Report(1, 1, "b", [seen, result("lost")], [])]
    assert preflight.lines(reports)[:4] == [
        "all nodes:",
        "  PASS  gpus       8 visible",
        "node 1 (b):",
        "  PASS  driver     lost",
    ]
    new = [result("new")]
    same = [Report(r, r // 2, "ab"[r // 2], [] if r % 2 else new, []) for r in range(4)]
    assert preflight.lines(same)[:2] == ["all nodes:", "  PASS  driver     new"]


def test_the_table_as_json_has_hosts_and_ranks(capsys: pytest.CaptureFixture) -> None:
    reports = [Report(r, r, "ab"[r], [result("old", "FAIL")], []) for r in range(2)]
    assert preflight.show(reports, as_json=True) == 1
    row = {"check": "driver", "state": "FAIL", "text": "old", "hosts": ["a", "b"], "ranks": [0, 1]}
    assert preflight.table(reports) == [row]
    assert '"text": "old"' in capsys.readouterr().out


def test_the_table_is_printed_and_also_written_to_a_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    argv, file = runs.arguments(model, tmp_path / "runs", "x"), tmp_path / "found.json"
    assert preflight.main([*argv[:3], "--json", str(file), *argv[3:]]) == 0
    assert "  PASS  settings   keys, model" in capsys.readouterr().out
    assert {row["check"]: row["state"] for row in json.loads(file.read_text())}["data"] == "PASS"


def test_gpus_reduce_within_each_node_before_all_ranks() -> None:
    place = ranks.Place(rank=5, size=8, local_rank=1, local_size=4)
    groups = [(s.backend, list(s.group)) for s in ranks.stages(place, "cuda")]
    assert groups == [("gloo", [*range(8)]), ("nccl", [4, 5, 6, 7]), ("nccl", [*range(8)])]
    assert [s.backend for s in ranks.stages(place, "cpu")] == ["gloo"]
    node = ranks.Place(rank=1, size=2, local_rank=1, local_size=2)
    assert [(s.backend, list(s.group)) for s in ranks.stages(node, "cuda")][1:] == [
        ("nccl", [0, 1])
    ]


def test_nodes_with_and_without_gpus_are_named() -> None:
    known = {r: {"device": d, "host": h} for r, (d, h) in enumerate([("cuda", "a"), ("cpu", "b")])}
    assert ranks._mixed(known).startswith("rank 1 on b finds no GPU, but other ranks do")
    assert ranks._mixed({0: known[0]}) == ranks._mixed({1: known[1]}) == ""


def test_one_process_prints_its_table(model: Path, capsys: pytest.CaptureFixture) -> None:
    argv = runs.arguments(model, model.parent / "runs", "x")
    assert preflight.main(argv) == 0
    said = capsys.readouterr().out
    assert "PASS  settings" in said and "network" not in said
    assert preflight.main([*argv, "--data.train", "gone.jsonl"]) == 1
    assert preflight.main([*argv, "--no.such_key", "1"]) == 2
    assert preflight.main(["--help"]) == 0
