"""`--report DIR` of a recipe: its stages, what it refuses, and a whole one on two CPU cores."""

import json
import subprocess
import sys

import pytest

from tests import runs
from tests.recipes.conftest import RECIPES, Bench

TORCHRUN = {"LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "5000"}


def stages(bench: Bench, *words: str) -> list[list[str]]:
    """The words of each command of rlcore."""
    found = bench.commands("bash", bench.recipe(), *words)
    return [words[words.index("rlcore") + 1 :] for words in found if words]


def test_a_report_checks_trains_evaluates_twice_and_is_written(bench: Bench) -> None:
    keys = ["--run.name", "probe", "--run.steps", "7", "--algo.clip_high", "0.3"]
    found = stages(bench, "--report", "out", "--algo.clip_high", "0.3")
    samples = ["--eval.samples_per_prompt", "4"]
    assert found == [
        ["preflight", *keys, "--json", "out/preflight.json"],
        ["train", *keys],
        ["eval", "runs/probe", "--step", "0", *samples]
        + ["--run.name", "probe-before", "--json", "out/before.json"],
        ["eval", "runs/probe", *samples]
        + ["--run.name", "probe-after", "--json", "out/after.json"],
        ["report", "runs/probe", "--out", "out"],
    ]
    lines = (bench.folder / "out/stages.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in lines] == [
        "preflight",
        "train",
        "eval_before",
        "eval_after",
    ]
    said = (bench.folder / "out/command.txt").read_text()
    assert said == f"bash {bench.folder}/probe.sh --report out --algo.clip_high 0.3\n"


def test_the_keys_of_the_command_name_run_and_samples(bench: Bench) -> None:
    named = ["--run.name", "b", "--run.dir", "elsewhere", "--eval.samples_per_prompt", "16"]
    found = stages(bench, "--report=out", *named)
    assert [words[1] for words in found[2:]] == ["elsewhere/b"] * 3
    assert found[3][found[3].index("--eval.samples_per_prompt") + 1] == "16"


def test_the_same_command_starts_anew_and_another_one_is_refused(bench: Bench) -> None:
    assert len(stages(bench, "--report", "out")) == 5
    old = bench.folder / "out/before.json"
    old.touch()
    assert len(stages(bench, "--report", "out")) == 5 and not old.exists()
    rc, out = bench.run("bash", bench.recipe(), "--report", "out", "--run.seed", "1")
    assert rc == 2 and not bench.records("preflight")
    assert "--report out: has the report of another command; choose another folder" in out


@pytest.mark.parametrize(
    "words, env, sentence",
    [
        (["--report", "out"], TORCHRUN | {"GPUS_PER_NODE": "1"}, "--report out: works on one node"),
        (["--report", "out"], {"NODE_RANK": "0", "NODES": "2"}, "--report out: works on one node"),
        (["--report"], {}, "--report: give the folder of the report"),
        (["--report", "--run.seed", "1"], {}, "--report: give the folder of the report"),
    ],
)
def test_a_start_that_cannot_report_is_refused(bench: Bench, words, env, sentence) -> None:
    rc, out = bench.run("bash", bench.recipe(), *words, **env)
    assert rc == 2 and sentence in out and len(out.splitlines()) == 1
    assert not bench.records() and not bench.records("preflight")


def test_two_jobs_that_share_nodes_have_no_report(bench: Bench) -> None:
    rc, out = bench.run("bash", RECIPES / "mux_two_jobs.sh", "--report", "out")
    assert rc == 2 and "--report: reports one job; start it with ALONE=1" in out


@pytest.mark.ranks(2)
def test_nothing_is_trained_after_a_preflight_that_fails(bench: Bench) -> None:
    rc, out = bench.run("bash", bench.recipe(), "--report", "out", EXIT_0="1")
    assert rc == 2 and "--report out: the preflight has found what fails" in out
    assert bench.records("preflight") and not bench.records()


def test_a_dry_run_and_a_preflight_write_no_report(bench: Bench) -> None:
    assert len(stages(bench, "--report", "out", "--preflight")) == 1
    rc, out = bench.run("bash", bench.recipe(), "--report", "out", "--dry-run")
    assert rc == 0 and not (bench.folder / "out").exists(), out
    assert "--report" not in bench.records()[0]["argv"]


def test_the_recipe_for_one_gpu_chooses_its_model_for_a_report_too(bench: Bench) -> None:
    words = "--report", "out", "--dry-run", "--cluster.gpu_memory_gb", "80"
    rc, out = bench.run("bash", RECIPES / "grpo_1gpu.sh", *words, PYTHONPATH=str(runs.ROOT))
    assert rc == 0 and "rlcore: qwen2_5_3b, 4096 tokens per micro-batch" in out, out


@pytest.mark.ranks(2)
def test_a_whole_report_of_a_tiny_model(bench: Bench) -> None:
    model = runs.tiny_model(bench.folder / "model")
    make = (
        "import sys; from transformers import AutoConfig, AutoModelForCausalLM as A; "
        "A.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", make, model], check=True)
    (bench.folder / "scores.py").write_text(
        "def score(sample, prompt, text):\n    return float(len(text) % 2)\n"
    )
    argv = runs.arguments(model, bench.folder / "runs", "mine", "--run.steps", 2)
    argv.remove("--model.random_init")
    argv[argv.index("tests.scores.variety")] = "scores.score"
    words = ["bash", RECIPES / "grpo_gsm8k_0.5b.sh", "--report", "out", *argv]
    words += ["--train.samples_per_update", "0", "--data.suffix", ""]
    path = {"PYTHONPATH": f"{bench.folder}:{runs.ROOT}"}
    rc, said = bench.run(*words, **path, timeout_s=240)
    assert rc == 0, said[-3000:]
    assert said.endswith("out/report.md\nout/report.json\nout/curve.png\n")
    out = bench.folder / "out"
    found = json.loads((out / "report.json").read_text())
    assert found["steps"] == {"done": 2, "of": 2} and found["processes"] == 2
    assert list(found["stages"]["seconds"]) == ["preflight", "train", "eval_before", "eval_after"]
    assert found["before"]["model"] == str(model)
    assert found["after"]["model"].endswith("mine/checkpoints/step_000002")
    for which in ("before", "after"):
        assert found[which]["samples_per_prompt"] == 4
        assert 0 < found[which]["metrics"]["val-core/label/acc/pass@4"] <= 1
    assert found["settings"]["train.lr"] == "0.001" and found["summary"]["timing_s/gen"] > 0
    assert {row["state"] for row in found["preflight"]} == {"PASS", "SKIP", "WARN"}
    warned = [row["text"] for row in found["preflight"] if row["state"] == "WARN"]
    assert len(warned) == 1 and warned[0] in (out / "report.md").read_text()
    page = (out / "report.md").read_text()
    assert found["command"].startswith("bash ") and f"    {found['command']}\n" in page
    assert "two standard errors" in page and "| gen | " in page and "GB | not measured |" in page
    assert (out / "curve.png").is_file()
