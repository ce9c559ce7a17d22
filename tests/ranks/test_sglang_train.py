"""The whole program with SGLang: one engine over two ranks, and a scheduler that is killed."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import faults, kit, runs

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]

SHORT = (
    *("--run.steps", 2, "--eval.no_at_start", "--eval.no_at_end"),
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--rollout.max_tokens", 60),
)
SGLANG = *SHORT, "--rollout.engine", "sglang", "--cluster.timeout_s", 300  # it starts slowly
SPREAD = (
    *("--rollout.tp", 2, "--train.tp", 2, "--sync.route", "intranode"),
    *("--rollout.max_running_requests", 16),
)
SCORES = ("critic/score/mean", "critic/score/std_err", "response_length/mean")


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Names of two network namespaces; none where we may not make them."""
    with ExitStack() as stack:
        names: list[str] = []
        with suppress(OSError, subprocess.CalledProcessError):
            names = stack.enter_context(faults.two_nodes(f"sg{os.getpid()}"))
        yield names


@contextmanager
def scheduler_killed(metrics: str) -> Iterator[None]:
    """In the second step, once tokens of a response are known."""
    from rlcore.records import LengthReport
    from rlcore.rollout.child import ChildEngine

    note, file, killed = ChildEngine._note, Path(metrics), []

    def kill(engine: ChildEngine, event: Any) -> Any:
        is_time = isinstance(event, LengthReport) and any(len(tail.tokens) for tail in event.tails)
        if is_time and not killed and file.is_file() and '"step": 1' in file.read_text():
            killed.extend(
                process
                for process in psutil.Process(engine.pid).children(recursive=True)
                if "sglang::scheduler" in " ".join(process.cmdline())
            )
            assert len(killed) == 1
            killed[0].kill()
        return note(engine, event)

    ChildEngine._note = kill  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChildEngine._note = note  # type: ignore[method-assign]


class Runs:
    """The same two steps with the torch engine, with SGLang whose scheduler is killed in the
    second, and with one SGLang engine and one learner over two ranks."""

    def __init__(self, folder: Path):
        self.folder = folder / "runs"
        self.model = runs.tiny_model(folder / "model")

        def job(name: str, ranks: int, *keys: object, **more: object) -> runs.Job:
            argv = runs.arguments(self.model, self.folder, name, *keys)
            return {"name": name, "argv": argv, "ranks": ranks, **more}

        slow = "--rollout.max_running_requests", 4, "--rollout.progress_interval_s", 0.02
        metrics = str(self.folder / "killed" / "metrics.jsonl")
        within = ["tests.ranks.test_sglang_train:scheduler_killed", metrics]
        jobs = [
            job("killed", 1, *SGLANG, *slow, within=within),
            job("torch", 1, *SHORT),
            job("spread", 2, *SGLANG, *SPREAD),
        ]
        self.listening: set[str] = set()
        """Addresses that the ranks and their engines listen on."""
        self.gang = self._run("gang", jobs)
        self.apart = self.gang

    def on_two_nodes(self) -> None:
        """Run what `spread` runs, with each rank on a node of its own."""
        with two_nodes() as nodes:
            within = ["tests.faults:on_nodes", *nodes] if nodes else ["tests.faults:one_rank_each"]
            network = ("--cluster.interface", "rl0") if nodes else ()
            argv = runs.arguments(self.model, self.folder, "nodes", *SGLANG, *SPREAD, *network)
            jobs: list[runs.Job] = [{"name": "nodes", "argv": argv, "ranks": 2, "within": within}]
            self.apart = self._run("apart", jobs)

    def _run(self, name: str, jobs: list[runs.Job]) -> runs.Gang:
        gang = runs.Running(2, jobs, self.folder.parent / name)
        end = time.monotonic() + 540
        while (ended := gang.poll()) is None and time.monotonic() < end:
            for process in gang.processes:
                self.listening |= kit.listening(process.pid)
            time.sleep(2)
        return ended or gang.wait(0)

    def rows(self, name: str, ranks: int = 1) -> dict[int, dict[str, float]]:
        (self.apart if name == "nodes" else self.gang).check(name, ranks)
        return runs.rows(self.folder / name)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sglang"))


def test_a_round_goes_on_when_its_scheduler_is_killed(done: Runs) -> None:
    killed, torch = done.rows("killed"), done.rows("torch")
    assert [killed[n].get("sched/engines_down", 0) for n in (1, 2)] == [0, 1]
    assert killed[2]["sched/repairs"] == 1 and killed[2]["sched/kept_tokens"] > 0
    for step in (1, 2):
        for name in SCORES:
            assert killed[step][name] == pytest.approx(torch[step][name], rel=1e-9), (step, name)
        assert killed[step]["actor/loss"] == pytest.approx(torch[step]["actor/loss"], rel=1e-3)
    assert done.listening == {"127.0.0.1"}  # SGLang's schedulers as well
    said = done.gang.text("killed")
    assert "restarting the engine" in said and "Traceback" not in said


def test_one_engine_over_two_ranks_samples_what_the_torch_engine_does(done: Runs) -> None:
    spread, torch = done.rows("spread", 2), done.rows("torch")
    for name in SCORES:
        assert spread[1][name] == pytest.approx(torch[1][name], rel=1e-9), name
    assert spread[1]["sync/bytes"] > 0


@pytest.mark.slow
def test_one_engine_over_two_nodes_samples_what_the_torch_engine_does(done: Runs) -> None:
    before = set(done.listening)
    done.on_two_nodes()
    assert done.listening - before <= {"10.77.0.1", "10.77.0.2"}  # no socket on every interface
    nodes, torch = done.rows("nodes", 2), done.rows("torch")
    for name in SCORES:
        assert nodes[1][name] == pytest.approx(torch[1][name], rel=1e-9), name
    assert nodes[2]["actor/loss"] == pytest.approx(
        done.rows("spread", 2)[2]["actor/loss"], rel=1e-3
    )


@pytest.mark.slow
def test_the_tiny_recipe_learns_as_with_the_torch_engine(tmp_path: Path) -> None:
    """A few steps of what a user starts, from a warm start that is probed less."""
    model = tmp_path / "models" / "label-s0"  # where the recipe looks for it
    warm = [sys.executable, "-m", "rlcore", "tiny", "--out", model]
    warm += ["--probe_from", "150", "--probe_every", "25", "--probe_prompts", "256"]
    subprocess.run(warm, cwd=runs.ROOT, check=True, timeout=400)
    ends = {}
    for engine in ("torch", "sglang"):
        command = ["bash", "recipes/grpo_tiny.sh", "--rollout.engine", engine]
        command += ["--run.dir", str(tmp_path), "--run.name", engine, "--run.steps", "10"]
        command += ["--data.num_val_prompts", "256", "--checkpoint.no_export_hf"]
        command += ["--checkpoint.no_at_end", "--log.no_plot"]
        env = os.environ | {"CI": "1", "GPUS_PER_NODE": "1"}
        subprocess.run(command, cwd=runs.ROOT, check=True, env=env, timeout=500)
        summary = json.loads((tmp_path / engine / "summary.json").read_text())
        ends[engine] = summary["val/accuracy_end"]
        assert ends[engine] - summary["val/accuracy_start"] > 0.05, engine
    assert abs(ends["sglang"] - ends["torch"]) < 0.08  # the standard error of one is .03


@pytest.mark.slow
def test_drafts_from_history_change_no_score(tmp_path: Path) -> None:
    """Three epochs of two steps with SGLang: what the first has sampled is drafted from later."""
    model = runs.tiny_model(tmp_path / "model")
    epochs = "--run.steps", 6, "--data.num_prompts", 8, "--rollout.max_running_requests", 16
    arms = {"none": (), "history": ("--rollout.draft", "history", "--draft.no_adaptive")}
    jobs = [
        {
            "name": name,
            "argv": runs.arguments(model, tmp_path, name, *SGLANG, *epochs, *keys),
            "ranks": 1,
        }
        for name, keys in arms.items()
    ]
    gang = runs.run(1, jobs, tmp_path / "gang", timeout_s=540)
    found = {}
    for name in arms:
        gang.check(name)
        found[name] = runs.rows(tmp_path / name)
    for step, row in found["none"].items():
        for name in SCORES:
            assert found["history"][step][name] == pytest.approx(row[name], rel=1e-9), (step, name)
    rows = list(found["history"].values())
    assert rows[-1]["spec/history_prompts"] >= 6  # of 8, of which some may be equal
    assert sum(row["spec/speculated_tokens"] for row in rows) > 0.01
    assert all(row["spec/gate"] == 1 for row in rows)
    assert max(row["spec/mean_accept_len"] for row in rows) > 1


@pytest.mark.slow
def test_weights_go_to_engines_of_two_sites_and_change_no_score(tmp_path: Path) -> None:
    """Two ranks, each a site with an SGLang of its own, and one learner over both."""
    model = runs.tiny_model(tmp_path / "model")
    two_stage = "--sync.route", "two_stage", "--sync.ranks_per_site", 1, "--train.tp", 2
    jobs = [
        {"name": "torch", "argv": runs.arguments(model, tmp_path, "torch", *SHORT), "ranks": 1},
        {
            "name": "sites",
            "argv": runs.arguments(model, tmp_path, "sites", *SGLANG, *two_stage),
            "ranks": 2,
        },
    ]
    gang = runs.run(2, jobs, tmp_path / "gang", timeout_s=540)
    gang.check("torch")
    gang.check("sites", 2)
    torch, sites = runs.rows(tmp_path / "torch"), runs.rows(tmp_path / "sites")
    for step in (1, 2):
        for name in SCORES:
            assert sites[step][name] == pytest.approx(torch[step][name], rel=1e-9), (step, name)
        assert sites[step]["sync/slow_bytes"] > 0


@pytest.mark.slow
def test_adapters_reach_sglang_merged_and_alone_as_they_reach_the_torch_engine(
    tmp_path: Path,
) -> None:
    """Rewards depend on what is sampled, so equal ones need equal weights."""
    model = runs.tiny_model(tmp_path / "model")
    kit.random_weights(model)
    lora = "--run.steps", 3, "--lora.rank", 4, "--train.lr", 1e-2
    arms: dict[str, tuple[object, ...]] = {
        "torch": (*SHORT, *lora),
        "merged": (*SGLANG, *lora),
        "adapters": (*SGLANG, *lora, "--lora.weight_update", "adapters"),
        "base": (*SHORT, *lora, "--train.lr", 1e-12),
    }
    jobs: list[runs.Job] = []
    for name, keys in arms.items():
        argv = runs.arguments(model, tmp_path, name, *keys)
        argv = [word for word in argv if word != "--model.random_init"]
        jobs.append({"name": name, "argv": argv, "ranks": 1})
    gang = runs.run(1, jobs, tmp_path / "gang", timeout_s=540)
    found = {}
    for name in arms:
        gang.check(name)
        found[name] = runs.rows(tmp_path / name)
    for step, row in found["torch"].items():
        for name in SCORES:
            for other in ("merged", "adapters"):
                assert found[other][step][name] == pytest.approx(row[name], rel=1e-9), (step, name)
    assert found["base"][3]["critic/score/mean"] != found["torch"][3]["critic/score/mean"]
    assert found["adapters"][3]["sync/bytes"] < found["merged"][3]["sync/bytes"]


@pytest.mark.slow
def test_routes_of_sglang_reach_the_learner(tmp_path: Path) -> None:
    model = runs.tiny_model(
        tmp_path / "model",
        **kit.ARCHS["qwen3_moe"],
        model_type="qwen3_moe",
        tie_word_embeddings=False,
    )
    keys = *SGLANG, "--algo.routing_replay", "rollout"
    argv = runs.arguments(model, tmp_path, "replay", *keys)
    gang = runs.run(1, [{"name": "replay", "argv": argv, "ranks": 1}], tmp_path / "gang")
    gang.check("replay")
    for row in runs.rows(tmp_path / "replay").values():
        assert row["actor/rerouted"] < 0.02  # both compute in float32
        assert row["rollout_corr/k3_kl"] < 1e-6
