"""What is refused, moved aside or said before a run starts."""

import logging
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlcore.cli import builders, exits, train, world
from rlcore.cli.builders import engine, model, sharing, weights
from rlcore.cli.builders import folder as open_run
from rlcore.cli.world import World
from rlcore.config import resolve
from rlcore.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DraftConfig,
    RolloutConfig,
    RunConfig,
    TrainConfig,
)
from rlcore.hf.config import HFConfig
from rlcore.trainer import resume, sync_loop
from rlcore.utils import lock
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import log
from tests import kit, runs

ALONE = World(0, 1, 0, torch.device("cpu"), None)


def config(folder: Path, **run: object) -> Config:
    return Config(run=RunConfig(dir=str(folder), name="r", **run))


def heard(do, *args: object) -> list[str]:
    """The warnings of a call."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        do(*args)
    finally:
        log.removeHandler(handler)
    return said


def test_a_run_that_died_before_its_first_checkpoint_is_moved_aside_not_cut(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1}\n')
    open_run.open_folder(config(tmp_path), ALONE)
    assert (tmp_path / "r.old1" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_run_with_a_checkpoint_stays_where_it_is(tmp_path: Path) -> None:
    step = tmp_path / "r" / "checkpoints" / "step_000002"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (tmp_path / "r" / "metrics.jsonl").write_text('{"step": 1}\n')
    open_run.open_folder(config(tmp_path), ALONE)
    assert (tmp_path / "r" / "metrics.jsonl").exists()


def test_a_run_whose_export_would_delete_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r/hf").mkdir(parents=True)
    (tmp_path / "r/hf/notes.txt").touch()
    with pytest.raises(ValueError, match=r"r/hf: has notes\.txt, which is not of an earlier"):
        open_run.open_folder(config(tmp_path), ALONE)


def test_a_resumed_run_says_which_settings_have_changed(tmp_path: Path) -> None:
    old, file = config(tmp_path), tmp_path / "config.json"
    resolve.save(old, file)
    new = replace(old, train=TrainConfig(lr=1e-4), run=replace(old.run, steps=400, resume=""))
    (said,) = heard(open_run.tell_changes, new, file)
    assert said.endswith("--train.lr 1e-06 -> 0.0001")
    assert not heard(open_run.tell_changes, old, file)
    falling = replace(old.train, lr_schedule="cosine")
    (said,) = heard(open_run.tell_changes, replace(new, train=falling), file)
    assert "--run.steps 200 -> 400 (the learning rate decays until then)" in said
    known = replace(falling, lr_decay_updates=50)
    (said,) = heard(open_run.tell_changes, replace(new, train=known), file)
    assert "--run.steps" not in said
    assert not heard(open_run.tell_changes, new, tmp_path / "nothing.json")


def test_prompts_that_leave_no_room_for_an_answer_are_too_long(tmp_path: Path) -> None:
    """The engine would refuse them one by one, in the middle of the run."""
    hf = HFConfig.from_folder(runs.tiny_model(tmp_path / "model"))  # 256 positions
    cfg = Config(data=DataConfig(max_prompt_tokens=200), rollout=RolloutConfig(max_tokens=100))
    assert model.with_room(cfg, hf).data.max_prompt_tokens == 156
    short = replace(cfg, data=DataConfig(max_prompt_tokens=156))
    assert model.with_room(short, hf) is short
    cfg = replace(cfg, rollout=RolloutConfig(max_tokens=256))
    with pytest.raises(ValueError, match="--rollout.max_tokens 256: .* 256 positions; lower it"):
        model.with_room(cfg, hf)
    windowed = replace(hf, sliding_window=256)
    with pytest.raises(ValueError, match=r"256 positions \(its sliding window\); lower it"):
        model.with_room(cfg, windowed)


def test_a_value_that_is_refused_in_the_middle_of_a_run_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(run: object, one_step: object) -> None:
        raise ValueError("row 3 of a.jsonl cannot be sent to the reward")

    closed: list[bool] = []
    built = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(world, "join", lambda *given: ALONE)
    monkeypatch.setattr(builders, "run", lambda cfg, here: built)
    monkeypatch.setattr(sync_loop, "train", refuse)
    assert train.run(config(tmp_path)) == 1
    folder, said = capsys.readouterr().out.split("\n", 1)
    assert folder.startswith("run folder: ")
    assert said.count("\n") == 1 and said.startswith("row 3 of a.jsonl cannot be sent")
    assert closed == [True]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("--x 1: no"), 2, "--x 1: no"),
        (ValueError("of a library\nat length"), 1, "of a library (traceback: {file})"),
        (KeyError("w"), 1, "KeyError: 'w' (traceback: {file})"),
    ],
)
def test_only_a_config_error_is_refused_and_any_other_names_its_traceback(
    tmp_path: Path, monkeypatch, capsys, error: Exception, code: int, said: str
) -> None:
    def fail(cfg: Config, here: World) -> None:
        raise error

    monkeypatch.setattr(world, "join", lambda *given: ALONE)
    monkeypatch.setattr(builders, "run", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cfg = config(tmp_path)
    assert train.run(cfg) == code
    file = open_run.run_folder(cfg) / "logs" / "rank0.log"
    folder, found = capsys.readouterr().out.split("\n", 1)
    assert folder.startswith("run folder: ") and found == said.format(file=file) + "\n"
    assert "in fail\n" in file.read_text()
    assert exits.guard(lambda: fail(cfg, ALONE)) == code
    alone = capsys.readouterr().err
    assert alone.startswith(said.partition("(")[0]) and (code == 2 or "rlcore-" in alone)


def test_nodes_are_told_apart_by_the_names_that_ranks_say(monkeypatch, tmp_path: Path) -> None:
    """Profiles count them the same way; cores are nodes only where there are no GPUs."""
    cores = ClusterConfig(rollout_cores=(2, 3))
    cfg = Config(run=RunConfig(dir=str(tmp_path), name="r"), cluster=cores)
    monkeypatch.setenv(sharing.NODE, "h")
    there = World(1, 2, 1, torch.device("cpu"), None, rollout_ranks=1)
    assert sharing.node_name(cfg, there) == "h core 2+3"
    assert sharing.node_name(cfg, replace(there, device=torch.device("cuda", 1))) == "h"
    names = ["t0", "t0", "r1", "r0", "r0"]
    found = sharing.make_profiler(cfg, names, 3)
    assert found._nodes == {"rollout_nodes": 2, "train_nodes": 1}
    found = sharing.make_profiler(cfg, names, 0)
    assert found._nodes == {"rollout_nodes": 1, "train_nodes": 2}
    profile = SimpleNamespace(train_nodes=2)
    assert sharing.nodes_by_pool(names, 3, profile) == {"rollout": ["r1", "r0"], "train": ["t0"]}
    either = {"rollout": ["t0"], "train": ["r0", "r1"]}  # whatever the order of the ranks
    assert sharing.nodes_by_pool(names, 0, profile) == either
    assert sharing.nodes_by_pool(names[::-1], 0, profile) == either


def test_two_runs_of_one_name_do_not_share_a_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lock.hold, "__defaults__", (0.5,))
    script = (
        "import sys, time; from pathlib import Path; from rlcore.utils import lock\n"
        "assert not lock.hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    path = tmp_path / ".run.lock"
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdout=subprocess.PIPE, cwd=runs.ROOT
    ) as other:
        assert other.stdout.readline() == b"held\n"
        cfg = Config(run=RunConfig(dir=str(tmp_path), name="run"))
        with pytest.raises(ValueError, match=f"--run.name run: process {other.pid} on .* uses"):
            open_run.open_folder(cfg, ALONE)
        other.kill()
    open_run.open_folder(cfg, ALONE)  # its end frees the folder
    open_run.open_folder(cfg, ALONE)


def test_fresh_and_a_path_are_of_the_first_start_alone(tmp_path: Path, monkeypatch) -> None:
    """Slurm starts the same command again, and it goes on with what was saved since."""
    folder = tmp_path / "run"
    fresh = Config(run=RunConfig(dir=str(tmp_path), name="run", resume="fresh"))
    elsewhere = Config(run=RunConfig(dir=str(tmp_path), name="run", resume="/other/step_000004"))
    for name in resume.RESTARTS:
        monkeypatch.delenv(name, raising=False)
    assert resume.wanted_by(fresh, folder) == "fresh"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert resume.wanted_by(fresh, folder) == "fresh"  # nothing was saved
    assert resume.wanted_by(elsewhere, folder) == "/other/step_000004"
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    assert resume.wanted_by(fresh, folder) == resume.wanted_by(elsewhere, folder) == "auto"
    open_run.open_folder(fresh, ALONE)
    assert (folder / "checkpoints" / "step_000003").is_dir()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert resume.wanted_by(fresh, folder) == "fresh"


def test_the_address_of_a_cluster_may_come_from_the_environment(monkeypatch) -> None:
    """Its password is not for everybody who can call `ps`."""
    monkeypatch.setenv("MUX_URL", "redis://job:secret@h:1")
    assert sharing.address_of("env:MUX_URL") == "redis://job:secret@h:1"
    assert sharing.address_of("redis://h:1") == "redis://h:1"
    with pytest.raises(ValueError, match="--mux.url env:NONE: the environment variable is not set"):
        sharing.address_of("env:NONE")


# ---- the engine


def kit_model() -> HFConfig:
    return HFConfig.from_dict(kit.tiny_config("qwen2"))


def test_ranks_of_an_engine_meet_at_a_store_that_its_first_rank_holds(monkeypatch) -> None:
    """A port that was only looked up could go to another engine that starts meanwhile."""
    monkeypatch.setattr(engine, "ChildEngine", lambda _, settings, **__: settings)
    monkeypatch.setattr(engine, "check_engine", lambda *_: None)
    cfg, shared = Config(rollout=RolloutConfig(engine="sglang", tp=2)), dist.HashStore()
    ranks: list[Any] = [
        engine.make_engine(
            cfg, kit_model(), replace(ALONE, rank=rank, size=4, store=shared, secret=b"s" * 32)
        )
        for rank in range(4)
    ]
    for _ in range(2):  # at the start, and when the engines start again
        addresses = [settings()["dist_init_addr"] for settings in ranks]
        assert addresses[0] == addresses[1] != addresses[2] == addresses[3]
        for address in addresses:
            host, _, port = address.partition(":")
            soon = timedelta(seconds=20)
            dist.TCPStore(host, int(port), timeout=soon, wait_for_workers=False).set("is", "there")


def test_an_engine_over_two_nodes_has_its_store_where_both_reach_it(monkeypatch) -> None:
    monkeypatch.setattr(engine, "ChildEngine", lambda _, settings, **__: settings)
    monkeypatch.setattr(engine, "check_engine", lambda *_: None)
    monkeypatch.setattr(engine, "host_of", lambda world, interface: f"127.0.0.{world.rank + 1}")
    for per_node, hosts, nodes in ((4, ["127.0.0.1"] * 4, 1), (2, ["127.0.0.1"] * 4, 2)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
        cfg, store = Config(rollout=RolloutConfig(engine="sglang", tp=4)), dist.HashStore()
        started = [
            engine.make_engine(
                cfg, kit_model(), replace(ALONE, rank=rank, size=8, store=store, secret=b"s" * 32)
            )
            for rank in (4, 5, 6, 7)
        ]
        found: list[Any] = [settings() for settings in started]
        if nodes > 1:
            hosts = ["127.0.0.5"] * 4  # where the first rank of the engine is
        assert [f["dist_init_addr"].partition(":")[0] for f in found] == hosts
        assert [(f["nodes"], f["share"]) for f in found] == [(nodes, i) for i in range(4)]


def test_experts_of_an_engine_are_divided_evenly() -> None:
    moe = HFConfig.from_dict(kit.tiny_config("qwen3_moe", num_experts=6, moe_intermediate_size=24))

    def check(hf: HFConfig, tp: int, ep: int) -> None:
        engine.check_experts(Config(rollout=RolloutConfig(engine="sglang", tp=tp, ep=ep)), hf)

    check(kit_model(), 8, 1)
    check(moe, 12, 6)
    with pytest.raises(ConfigError, match="rollout.ep 4: must divide the 6 experts"):
        check(moe, 4, 4)
    with pytest.raises(ConfigError, match="rollout.ep 2: the model has no experts; set 1"):
        check(kit_model(), 2, 2)
    with pytest.raises(ConfigError, match="cut into 16 slices, which must divide its width 24"):
        check(moe, 16, 1)


@pytest.mark.parametrize("kind", ["torch", "sglang"])
@pytest.mark.parametrize(
    "dtype, wanted, device, found",
    [
        ("bfloat16", None, "cuda", True),
        ("bfloat16", None, "cpu", False),
        ("bfloat16", True, "cpu", True),
        ("bfloat16", False, "cuda", False),
        ("float32", None, "cuda", False),
    ],
)
def test_logits_of_bfloat16_are_float32_on_a_gpu(
    kind, dtype, wanted, device, found, monkeypatch
) -> None:
    monkeypatch.setattr(engine, "check_engine", lambda *_: None)
    cfg = Config(rollout=RolloutConfig(engine=kind, dtype=dtype, fp32_lm_head=wanted))
    here = replace(ALONE, device=torch.device(device))
    assert engine.engine_settings(cfg, kit_model(), here)["fp32_head"] is found


@pytest.mark.parametrize(
    "matcher, device, why, found",
    [
        ("auto", "cpu", "", "host"),
        ("auto", "cuda", "", "device"),
        ("auto", "cuda", "no native build", "host"),
        ("host", "cuda", "", "host"),
        ("device", "cpu", "", "device"),
        ("device", "cuda", "", "device"),
        ("device", "cuda", "no native build", None),
    ],
)
def test_drafts_are_matched_on_a_gpu_with_kernels(matcher, device, why, found, monkeypatch) -> None:
    monkeypatch.setattr(engine.native, "obstacle", lambda _: why)
    cfg = Config(
        rollout=RolloutConfig(engine="sglang", draft="ngram"), draft=DraftConfig(matcher=matcher)
    )
    if found:
        assert engine.draft_matcher(cfg, device) == found
        return
    with pytest.raises(
        ConfigError, match="--draft.matcher device: .*no native build.*matcher host"
    ):
        engine.draft_matcher(cfg, device)


def test_expandable_segments_are_refused_where_an_engine_opens_the_learners_memory(
    monkeypatch,
) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    sglang, alone = (Config(rollout=RolloutConfig(engine=kind)) for kind in ("sglang", "torch"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    weights.check_allocator(sglang, gpu)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
            with pytest.raises(ConfigError, match=f"{name} max.*; remove this setting"):
                weights.check_allocator(sglang, gpu)
            weights.check_allocator(alone, gpu)
            weights.check_allocator(sglang, cpu)
            patch.setenv(name, "expandable_segments:False")
            weights.check_allocator(sglang, gpu)


def test_contexts_are_measured_while_the_engine_sleeps_before_anything_is_built(
    tmp_path: Path, monkeypatch
) -> None:
    order: list[object] = []

    class Stop(Exception):
        """Ends the start where the learner would be built."""

    def build(_: object) -> None:
        order.append("learner")
        raise Stop

    memory = SimpleNamespace(before=order.append)
    side = SimpleNamespace(engine=SimpleNamespace(sleep=lambda tags: order.append(set(tags))))
    cfg = replace(config(tmp_path), train=TrainConfig(offload=True))
    monkeypatch.setattr(model, "model_config", lambda _: kit_model())
    monkeypatch.setattr(builders.devices, "make_residency", lambda *_, **__: memory)
    monkeypatch.setattr(builders.sizes, "make_sizes", lambda *_: None)
    monkeypatch.setattr(builders.rollout, "make_side", lambda *_: side)
    monkeypatch.setattr(builders.learner, "make_models", build)
    monkeypatch.setattr(builders.collective, "barrier", lambda: order.append("barrier"))
    with pytest.raises(Stop):
        builders.run(cfg, replace(ALONE, rank=1, size=2))  # rank 0 would load data
    assert order == [{"weights", "kv_cache"}, "barrier", "build", "learner"]
