"""Every recipe is valid bash and valid Python and starts. shellcheck and shfmt: `tools/test.sh`."""

import json
import re
import subprocess
from pathlib import Path

import pytest

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

MODELS = {
    "grpo_gsm8k_0.5b": QWEN,
    "grpo_32b": QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "head_dim": 128,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "grpo_tiny": QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "head_dim": 32,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "vocab_size": 34,
        "eos_token_id": 1,
    },
}
MODELS |= {"algo_tiny": MODELS["grpo_tiny"], "exp_tis_int8": MODELS["grpo_tiny"]}
# on a machine without GPUs
WORLDS = {
    "grpo_gsm8k_0.5b": "2",
    "grpo_32b": "32",
    "grpo_tiny": "2",
    "algo_tiny": "1",
    "exp_tis_int8": "1",
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
    assert {r.stem for r in RECIPES} == MODELS.keys() == WORLDS.keys()


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
    for name in re.findall(r'source "\$RECIPES/([^"]+)"', body):
        assert (ROOT / "recipes" / name).exists()
    assert body.rstrip().endswith('"$@"')
    arrays = re.findall(r"^([A-Z]+)=\($", body, re.MULTILINE)
    assert arrays
    for array in arrays:
        assert f'"${{{array}[@]}}"' in body, f"{array} is not handed to launch"


def dry_run(bench, recipe: Path, *more: str) -> tuple[int, str]:
    """The real program, from a folder that holds no more of the model than its config.json."""
    model = bench.folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODELS[recipe.stem]))
    (bench.folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    data = {"TRAIN_DATA": "rows.jsonl", "VAL_DATA": "rows.jsonl"}
    return bench.run(
        "bash", recipe, "--dry-run", *more, PYTHONPATH=str(ROOT), MODEL_PATH=str(model), **data
    )


@by_name
def test_a_dry_run_accepts_it_at_its_full_world_size(bench, recipe):
    rc, out = dry_run(bench, recipe)
    assert rc == 0, out
    assert f"{WORLDS[recipe.stem]} ranks" in out


def test_a_misspelt_key_is_refused_with_the_nearest_name(bench):
    rc, out = dry_run(bench, ROOT / "recipes/grpo_32b.sh", "--algo.clip_hihg", "0.3")
    assert rc != 0
    assert "did you mean --algo.clip_high?" in out


@by_name
def test_the_keys_of_a_recipe_are_keys_of_the_configuration(bench, recipe):
    """Without the program: what launch hands over, parsed."""
    from rlcore import algos
    from rlcore.config import resolve
    from rlcore.rewards.registry import config_class

    rc, out = bench.run("bash", recipe, "--dry-run")
    assert rc == 0, out
    argv = bench.records()[0]["argv"]
    assert argv[0] == "train" and argv[-1] == "--dry-run"
    argv = argv[1:-1]
    config = resolve.parse(argv, {"algo": algos.config_class, "reward": config_class})
    assert config.run.name == recipe.stem
