"""Every recipe is valid bash and valid Python and starts. shellcheck and shfmt: `tools/test.sh`."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from rlcore.cli import train
from rlcore.hf.config import HFConfig
from rlcore.hf.names import num_parameters
from tests import runs
from tests.recipes.conftest import QWEN

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*_*.sh"))
SHELL = sorted((ROOT / "recipes").rglob("*.sh")) + sorted((ROOT / "recipes").rglob("*.sbatch"))
TAIL = """: '''
import os, sys; os.environ["PYTHON"] = sys.executable
os.execvp("bash", ["bash", __file__, *sys.argv[1:]])
#'
"""
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)

ONE_GPU = ROOT / "recipes/grpo_1gpu.sh"

# on a machine without GPUs
WORLDS = {
    "grpo_gsm8k_0.5b": 2,
    "grpo_1gpu": 1,
    "grpo_7b": 16,
    "grpo_7b_1node": 8,
    "grpo_14b": 32,
    "grpo_32b": 64,
    "dapo_32b": 64,
    "grpo_30b_a3b": 32,
    "grpo_235b_a22b": 128,
    "grpo_glm45_air": 64,
    "grpo_moonlight_16b": 16,
    "async_8b": 40,
    "grpo_tiny": 2,
    "async_tiny": 2,
    "mux_two_jobs": 2,
    "algo_tiny": 1,
    "exp_tis_int8": 1,
    "judge_tiny": 1,
    "code_tiny": 1,
    "frozenlake_tiny": 1,
    "endpoint_tiny": 1,
    "agentic_frozenlake": 8,
    "code_14b": 32,
    "judge_7b": 16,
    "lora_tiny": 2,
    "lora_7b": 8,
    "distill_tiny": 1,
    "distill_7b_from_32b": 8,
    "self_distill_7b": 8,
}
# Billions of parameters, as the models' cards say them.
BILLIONS = {
    "qwen2_5_0_5b": 0.49,
    "qwen3_0_6b": 0.6,
    "qwen3_1_7b": 1.72,
    "qwen2_5_3b": 3.09,
    "qwen3_4b": 4.02,
    "qwen2_5_7b": 7.61,
    "qwen3_8b": 8.19,
    "qwen2_5_14b": 14.7,
    "qwen2_5_32b": 32.5,
    "qwen3_30b_a3b": 30.5,
    "qwen3_235b_a22b": 235,
    "glm4_5_air": 106,
    "moonlight_16b_a3b": 16,
}


def parts(recipe: Path) -> tuple[str, str, str]:
    """The doc, the body, and the Python lines at the end."""
    text = recipe.read_text()
    found = re.fullmatch(
        r"#!/usr/bin/env bash\n__doc__=r'''(.*?)\n'\n(.*\n)(: '''\n.*)", text, re.DOTALL
    )
    assert found, f"{recipe.name} has not the form of the other recipes"
    return found[1], found[2], found[3]


def test_every_recipe_is_known_here():
    assert {r.stem for r in RECIPES} == WORLDS.keys()


@by_name
def test_the_two_languages_meet_only_where_they_should(recipe):
    doc, body, tail = parts(recipe)
    assert "'" not in doc, "bash would end the doc at this apostrophe"
    assert "'''" not in body, "Python would end the string that hides the body here"
    assert tail == TAIL


@by_name
def test_it_is_python(recipe):
    code = compile(recipe.read_text(), recipe, "exec")
    assert not [w for w in code.co_consts if isinstance(w, str) and "\0" in w]


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_it_is_bash(script):
    found = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=10)
    assert found.returncode == 0, found.stderr


@by_name
def test_it_sources_only_what_is_there_and_lets_the_user_have_the_last_word(recipe):
    _, body, _ = parts(recipe)
    for name in re.findall(r'source "\$RECIPES/([^"$]+)"', body):
        assert (ROOT / "recipes" / name).exists()
    assert body.rstrip().endswith('"$@"')
    arrays = re.findall(r"^([A-Z]+)=\($", body, re.MULTILINE)
    assert arrays
    for array in arrays:
        assert f'"${{{array}[@]}}"' in body, f"{array} is not handed to launch"


@pytest.mark.parametrize("model", BILLIONS)
def test_the_facts_of_a_model_are_a_model_of_its_size(model):
    raw = json.loads((ROOT / "recipes/models" / f"{model}.json").read_text())
    assert num_parameters(HFConfig.from_dict(raw)) / 1e9 == pytest.approx(BILLIONS[model], rel=0.01)
    assert f"models/{model}.json" in (ROOT / "recipes/models" / f"{model}.sh").read_text()


# ---- dry runs


def planned(bench, monkeypatch, capsys, recipe: Path, *more: str, **env: str) -> tuple[int, str]:
    """Exit status and output of the program, in this process, with what launch hands over."""
    if recipe == ONE_GPU:  # asks the program itself which model fits, before launch
        return program(bench, recipe, *more, **env)
    rc, out = bench.run("bash", recipe, "--dry-run", *more, **env)
    assert rc == 0, out
    record = bench.records()[0]
    for name in ("NODES", "GPUS_PER_NODE", "MODEL_CONFIG"):
        monkeypatch.setenv(name, record["env"][name])
    for name in ("JUDGE_CONFIG", "TEACHER_CONFIG"):
        monkeypatch.setenv(name, record["env"].get(name, ""))
    monkeypatch.chdir(bench.folder)
    assert record["argv"][0] == "train" and record["argv"][-1 - len(more)] == "--dry-run"
    rc = train.main(record["argv"][1:])
    shown = capsys.readouterr()
    return rc, shown.out + shown.err


@by_name
def test_a_dry_run_plans_its_full_world_without_the_model_and_fits_80_gb(
    bench, monkeypatch, capsys, recipe
):
    rc, out = planned(bench, monkeypatch, capsys, recipe)
    assert rc == 0, out
    assert re.search(rf"\b{WORLDS[recipe.stem]} ranks?\b", out)
    assert re.search(r"model +read from recipes/models/\w+.json: no folder", out)
    assert "learner gradients" in out and "host memory of a node" in out
    assert "fits 80 GB" in out
    assert f"setting      --run.name {recipe.stem}" in out
    assert "note  " not in out  # no setting without an effect


def test_fewer_nodes_are_one_variable_and_the_plan_says_when_they_are_too_few(
    bench, monkeypatch, capsys
):
    recipe = ROOT / "recipes/grpo_32b.sh"
    rc, out = planned(bench, monkeypatch, capsys, recipe, NODES="4")
    assert rc == 0, out
    assert "32 ranks: tp 4 x cp 4 x pp 1 x dp 2" in out
    rc, out = planned(bench, monkeypatch, capsys, recipe, NODES="2")
    assert rc == 2
    assert "cannot run: --cluster.gpu_memory_gb 80: phase update_actor needs" in out
    assert "learner gradients 32.8, learner optimizer 24.6, learner weights 16.4" in out
    rc, out = planned(
        bench, monkeypatch, capsys, recipe, "--cluster.gpu_memory_gb", "141", NODES="2"
    )
    assert rc == 0 and "fits 141 GB" in out
    rc, out = planned(bench, monkeypatch, capsys, recipe, "--cluster.gpu_memory_gb", "0", NODES="2")
    assert rc == 0 and "fits" not in out


def test_an_engine_that_does_not_fit_is_refused_with_what_to_change(bench, monkeypatch, capsys):
    recipe = ROOT / "recipes/grpo_32b.sh"
    rc, out = planned(bench, monkeypatch, capsys, recipe, "--rollout.tp", "1")
    assert rc == 2
    assert "phase save_checkpoint needs" in out and "mostly engine weights 65.5" in out
    assert "raise rollout.tp" in out
    assert "cannot run: --rollout.gpu_memory_utilization 0.8: beside 65.5 GB of weights" in out


def program(bench, recipe: Path, *more: str, **env: str) -> tuple[int, str]:
    """The real program as a user starts it."""
    return bench.run("bash", recipe, "--dry-run", *more, PYTHONPATH=str(ROOT), **env)


def test_the_program_reads_the_model_from_its_folder_and_refuses_what_is_not_there(bench):
    model = bench.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN))
    rc, out = program(bench, ROOT / "recipes/grpo_gsm8k_0.5b.sh", MODEL_PATH=str(model))
    assert rc == 2, out
    assert f"model        {model}" in out
    assert "qwen2, 24 layers, hidden 896" in out
    assert "2 engines (torch) of 1 rank" in out
    assert f"cannot run: {model}: has neither model.safetensors" in out
    assert "cannot run: data file data/gsm8k/train.jsonl: no such file" in out
    assert "not checked" not in out


def test_the_0_5b_recipe_samples_with_sglang_where_there_are_gpus(bench):
    rc, out = program(bench, ROOT / "recipes/grpo_gsm8k_0.5b.sh", CUDA_VISIBLE_DEVICES="0")
    assert rc == 0, out
    assert "1 engine (sglang) of 1 rank" in out


def test_a_misspelt_key_is_refused_with_the_nearest_name(bench):
    rc, out = program(bench, ROOT / "recipes/grpo_32b.sh", "--algo.clip_hihg", "0.3")
    assert rc != 0
    assert "did you mean --algo.clip_high?" in out


# ---- the largest model for one GPU


def fits(gb: float, model: str, size: str, settings: list[str], monkeypatch, capsys) -> bool:
    """Whether a dry run with these settings says that a model fits."""
    monkeypatch.setenv("MODEL_CONFIG", str(ROOT / "recipes/models" / f"{model}.json"))
    tokens, recompute = size.split(":")
    sizes = ["--train.tokens_per_micro_batch", tokens, "--train.recompute", recompute]
    memory = ["--cluster.gpu_memory_gb", str(gb)]
    rc = train.main([*settings, "--model.path", "elsewhere", *sizes, *memory, "--dry-run"])
    shown = capsys.readouterr()
    assert ("fits" in shown.out) == (rc == 0), shown.err
    assert rc == 0 or "cannot run: --cluster.gpu_memory_gb" in shown.err, shown.err
    return rc == 0


@pytest.mark.parametrize(
    "gb, model, size",
    [
        (24, "qwen3_0_6b", "16384:full"),
        (48, "qwen3_1_7b", "4096:none"),
        (80, "qwen2_5_3b", "4096:none"),
        (141, "qwen3_4b", "8192:none"),
        (192, "qwen2_5_7b", "8192:none"),
    ],
)
def test_one_gpu_gets_the_largest_model_that_fits_by_the_plan(
    bench, monkeypatch, capsys, gb, model, size
):
    rc, out = program(bench, ONE_GPU, "--cluster.gpu_memory_gb", str(gb))
    assert rc == 0, out
    tokens, recompute = size.split(":")
    reason = (
        f"rlcore: {model}, {tokens} tokens per micro-batch, recompute {recompute}: fits {gb} GB"
    )
    assert reason in out
    assert f"model        read from recipes/models/{model}.json" in out

    _, body, _ = parts(ONE_GPU)
    models, sizes = (
        re.search(rf"^{n}=\((.*?)\)", body, re.M)[1].split() for n in ("CHOICES", "SIZES")
    )
    settings = [w for key in re.findall(r"^setting +(--\S+) (.*)", out, re.M) for w in key]
    del settings[settings.index("--dry-run") :]
    ask = (settings, monkeypatch, capsys)
    assert fits(gb, model, size, *ask)
    assert not any(fits(gb, model, larger, *ask) for larger in sizes[: sizes.index(size)])
    for larger in models[: models.index(model)][-1:]:
        assert f"rlcore: {larger}, " in out and "does not fit: --cluster.gpu_memory_gb" in out
        assert not any(fits(gb, larger, any_size, *ask) for any_size in sizes)


def test_of_ones_own_model_only_the_sizes_are_chosen(bench):
    model = runs.tiny_model(bench.folder / "my model")
    keys = ["--data.train", "label", "--data.val", "label", "--data.suffix", ""]
    keys += ["--reward", "exact", "--rollout.max_tokens", "64", "--model.random_init"]
    rc, out = program(bench, ONE_GPU, *keys, MODEL_PATH=str(model))
    assert rc == 0, out
    assert f"rlcore: {model}, 16384 tokens per micro-batch, recompute none: fits 80 GB" in out
    assert f"setting      --model.path {model}" in out and "not checked" not in out


@pytest.mark.parametrize(
    "keys, sentence",
    [
        (("--cluster.gpu_memory_gb", "8"), "no model fits"),
        (("--cluster.gpu_memory_gb", "0"), "--cluster.gpu_memory_gb 0: this recipe chooses"),
        (("--rollout.max_tokns", "9"), "did you mean --rollout.max_tokens?"),
        (("--model.path", "nowhere"), "--model.path nowhere: no such folder"),
    ],
)
def test_without_a_choice_one_gpu_says_why(bench, keys, sentence):
    rc, out = program(bench, ONE_GPU, *keys)
    assert rc == 2
    assert sentence in out and "no model was chosen for this GPU" in out
    assert "dry run:" not in out


def test_help_needs_no_choice(bench):
    rc, out = bench.run("bash", ONE_GPU, "--help", PYTHONPATH=str(ROOT))
    assert rc == 0 and "--rollout.max_tokens" in out and "rlcore:" not in out
