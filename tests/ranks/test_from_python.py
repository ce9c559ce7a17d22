"""`rlcore.train`: a script without a main guard, alone and as two ranks of torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kit, runs

pytestmark = pytest.mark.ranks(2)

SCRIPT = """
import json, os, sys

import rlcore

keys, rows, seen = json.loads(sys.argv[1]), json.loads(sys.argv[2]), []


def reward(sample, prompt, text):
    seen.append((prompt.fields["level"], text))
    return len(text) / 10


run = rlcore.train(keys, reward=reward, dataset=iter(rows))
assert len(run.metrics) == 2 and (run.model / "config.json").exists()
assert seen and {level for level, _ in seen} <= {0, 1, 2, 3}
first = run.metrics[0]["critic/score/mean"]
run = rlcore.train({**keys, "run.steps": 3}, reward=lambda *_: 7.0, dataset=rows)  # goes on
assert run.metrics[0]["critic/score/mean"] == first
assert len(run.metrics) == 3 and run.metrics[2]["critic/score/mean"] == 7
if os.environ.get("RANK", "0") == "0":
    print("found", first, len(list(run.folder.parent.glob("dataset-*.jsonl"))))
"""


def keys(folder: Path, name: str) -> dict[str, object]:
    words = runs.arguments(runs.tiny_model(folder / "model"), folder / "runs", name)
    found: dict[str, object] = dict(
        zip([w[2:] for w in words[5::2]], words[6::2], strict=True)  # behind the switches
    )
    del found["data.train"], found["data.val"], found["data.num_val_prompts"]
    return found | {
        "model.random_init": True,
        "run.steps": 2,
        "data.template": "none",
        "eval.at_start": False,
        "eval.at_end": False,
        "log.tensorboard": False,
        "log.plot": False,
    }


ROWS = [{"question": f"a{i}b2=", "answer": "3", "level": i} for i in range(4)]


def start(launcher: list[str], folder: Path, name: str) -> str:
    script = folder / f"{name}.py"
    script.write_text(SCRIPT)
    words = [str(script), json.dumps(keys(folder, name)), json.dumps(ROWS)]
    done = subprocess.run(
        [*launcher, *words], capture_output=True, text=True, timeout=240, env=environment()
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("found"))


def environment() -> dict[str, str]:
    import os

    path = {"PYTHONPATH": kit.python_path(), "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | path


def test_a_script_trains_with_its_own_function_and_rows_and_goes_on(tmp_path: Path) -> None:
    alone = start([sys.executable], tmp_path, "alone")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr", "localhost", "--nproc-per-node", "2"]
    both = start(torchrun, tmp_path, "both")
    _, first, files = alone.split()
    assert float(first) > 0 and files == "1"
    assert float(both.split()[1]) == pytest.approx(float(first)), (
        "the same responses, the same scores"
    )


BAD = {
    "no such key": ({"train.lrr": 1}, {}, "--train.lrr: there is no such key"),
    "no section": ({"lr": 1}, {}, "lr: allowed without a section are algo, reward, env, mode"),
    "two sources": (
        {"data.train": "label"},
        {},
        "data.train: is given beside .* dataset",
    ),
    "no rows": ({}, {"dataset": []}, "dataset: has no rows"),
    "no mapping": ({}, {"dataset": ["a"]}, "dataset: row 0 is a str; give dictionaries"),
    "no json": ({}, {"dataset": [{"a": b"b"}]}, "dataset: row 0 cannot be written as JSON"),
    "parameters": ({}, {"reward": lambda text: 1.0}, "must take .sample, prompt, text."),
    "batch": ({"train.samples_per_update": 7}, {}, "--train.samples_per_update 7"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    import rlcore
    from rlcore.utils.errors import ConfigError

    more, named, sentence = BAD[name]
    given = {"reward": lambda *_: 1.0, "dataset": ROWS, **named}
    with pytest.raises(ConfigError, match=sentence):
        rlcore.train({**keys(tmp_path, "bad"), **more}, **given)  # type: ignore[arg-type]


def test_a_run_that_fails_leaves_the_process_fit_for_the_next(tmp_path: Path) -> None:
    code = (
        "import json, sys, rlcore\n"
        "keys, rows = json.loads(sys.argv[1]), json.loads(sys.argv[2])\n"
        "try:\n"
        "    rlcore.train({**keys, 'run.name': 'fails'}, reward=lambda *_: 1 / 0, dataset=rows)\n"
        "except ValueError as error:\n"
        "    print('first', error)\n"
        "print('then', len(rlcore.train(keys, reward=lambda *_: 1, dataset=rows).metrics))\n"
    )
    words = [json.dumps(keys(tmp_path, "next")), json.dumps(ROWS)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "first the run is refused" in done.stdout and "\nthen 2\n" in done.stdout


def test_a_function_that_does_not_return_ends_the_run_and_is_named(tmp_path: Path) -> None:
    code = (
        "import json, sys, time, rlcore\n"
        "rows = [{'question': 'a1b2=', 'answer': '3'}]\n"
        "rlcore.train(json.loads(sys.argv[1]), reward=lambda *_: time.sleep(99), dataset=rows)"
    )
    given = keys(tmp_path, "hangs") | {"reward.timeout_s": 1}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 1
    assert "--reward inline: sample t0." in done.stdout + done.stderr
    assert "is not scored after 1 s (--reward.timeout_s)" in done.stdout + done.stderr
    assert "RuntimeError: the run has failed, as said above and in" in done.stderr
