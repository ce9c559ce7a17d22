"""tools/studies/exp_tis.py with a stand-in for the training runs: what it starts, reads, adds up
and draws.

Not covered: the runs themselves."""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from rlcore.cli import settings, tiny
from rlcore.config.schema import RolloutConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.quantize import FORMATS
from rlcore.hf.weights import save_folder
from rlcore.metrics import names
from tests.contracts.engine_contract import weights

ROOT = Path(__file__).resolve().parents[2]

# Writes what a run leaves behind; its arm tells how it goes.
STAND_IN = """
import json, os, pathlib, sys, time
argv = sys.argv[2:]
key = lambda name: argv[len(argv) - 1 - argv[::-1].index("--" + name) + 1]
begin = time.time()
time.sleep(float(os.environ.get("SLEEP_S", "0")))
if sys.argv[1] == "tiny":
    pathlib.Path(key("out")).mkdir(parents=True)
    sys.exit(0)
if key("rollout.quantize") == os.environ.get("FAILS"):
    sys.exit("this format fails")
run = pathlib.Path(key("run.dir")) / key("run.name")
run.mkdir()
times = {"begin": begin, "end": time.time(), "world": os.environ["WORLD_SIZE"], "argv": argv}
(run / "times.json").write_text(json.dumps(times))
(run / "config.json").write_text(json.dumps({"model": {"path": key("model.path")}}))
(run / "summary.json").write_text("{}")
"""


@pytest.fixture(scope="module")
def exp():
    spec = importlib.util.spec_from_file_location("exp_tis", ROOT / "tools/studies/exp_tis.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["exp_tis"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["exp_tis"]


# ---- arms


def test_the_arms_are_the_papers(exp, tmp_path):
    runs = exp.plan(exp.ARMS, [0, 1], 200, tmp_path)
    assert len(runs) == 18 and len({r.name for r in runs}) == 18
    assert [r.seed for r in runs] == [0] * 9 + [1] * 9  # a seed is whole before the next begins
    keys = {r.arm: " ".join(r.keys) for r in runs if r.seed == 1}
    head = "--run.seed 1 --run.steps 200 --rollout.quantize "
    token = "--algo.rollout_is token --algo.rollout_is_threshold"
    assert keys["none-none"] == f"{head}none --algo.rollout_is none"
    assert keys["int3-tis2"] == f"{head}int3 {token} 2"
    assert keys["int3-tis8"] == f"{head}int3 {token} 8"
    assert keys["int3-is"] == f"{head}int3 {token} inf"
    assert keys["int3-ppo_is"] == f"{head}int3 --algo.rollout_is none --algo.bypass_mode"
    assert keys["fp3-none"] == f"{head}fp3 --algo.rollout_is none"


def test_the_configuration_knows_every_arms_keys_and_every_format(exp, tmp_path):
    arms = [f"int3-{name}" for name in exp.CORRECTIONS]
    for run in exp.plan(arms, [3], 7, tmp_path, ["--train.lr", "1e-3"]):
        cfg = settings.parse(list(run.keys))
        assert (cfg.run.seed, cfg.run.steps, cfg.train.lr) == (3, 7, 1e-3)
        assert cfg.rollout.quantize == "int3"
        assert cfg.algo.bypass_mode == (run.arm == "int3-ppo_is")
        caps = {"int3-tis2": 2.0, "int3-tis8": 8.0, "int3-is": math.inf}
        assert cfg.algo.rollout_is == ("token" if run.arm in caps else "none")
        assert cfg.algo.rollout_is_threshold == caps.get(run.arm, 2.0)
    assert set(get_args(get_type_hints(RolloutConfig)["quantize"])) == FORMATS.keys()


@pytest.mark.parametrize("arm", ["int7-tis2", "int8-tis3", "int8"])
def test_an_unknown_arm_is_refused_with_what_there_is(exp, tmp_path, arm):
    with pytest.raises(ValueError, match=f"--arms {arm}: .* int8, .* correction of none, tis2"):
        exp.plan([arm], [0], 1, tmp_path)


def test_more_arms_than_colours_are_refused(exp, tmp_path):
    arms = [f"{form}-none" for form in FORMATS] + ["int8-tis2", "int8-is"]
    with pytest.raises(ValueError, match="11 arms; a picture holds 10"):
        exp.plan(arms, [0], 1, tmp_path)


# ---- runs


@pytest.fixture
def started(bench, monkeypatch):
    """The environment of the bench, with the stand-in of this file."""
    (bench.folder / "fake" / "rlcore" / "__main__.py").write_text(STAND_IN)
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "NODE_RANK", "MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("PYTHONPATH", "PYTHON", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, bench.env[name])
    monkeypatch.chdir(bench.folder)  # python -m looks here first
    return bench.folder / "runs"


@pytest.mark.slow
def test_runs_are_one_process_each_and_two_go_side_by_side(exp, started, monkeypatch, capfd):
    monkeypatch.setenv("SLEEP_S", "3")
    runs = exp.plan(["int3-none", "int3-ppo_is"], [0], 5, started)
    (started / "models/label-s0").mkdir(parents=True)
    assert exp.run_all(runs, 2) == set()
    times = [json.loads((r.folder / "times.json").read_text()) for r in runs]
    assert max(t["begin"] for t in times) < min(t["end"] for t in times)
    assert [t["world"] for t in times] == ["1", "1"]
    assert times[1]["argv"][-1] == "--algo.bypass_mode"
    assert "int3-ppo_is_0_5: " in capfd.readouterr().out


@pytest.mark.slow
def test_a_finished_run_is_not_repeated_a_failed_one_is_and_the_others_go_on(
    exp, started, monkeypatch, capfd
):
    monkeypatch.setenv("FAILS", "fp3")
    runs = exp.plan(["fp3-none", "int3-none"], [0], 5, started)
    assert exp.run_all(runs, 1) == {runs[0].name}
    assert "ended with code 1, see" in capfd.readouterr().out
    assert "this format fails" in runs[0].beside("screen.txt").read_text()
    assert [exp.finished(r) for r in runs] == [False, True]
    monkeypatch.delenv("FAILS")
    assert exp.run_all(runs[:1], 1) == set()
    assert exp.finished(runs[0])


def test_a_run_of_other_keys_is_not_taken_for_a_finished_one(exp, started):
    (run,) = exp.plan(["int3-none"], [0], 5, started)
    assert exp.run_all([run], 1) == set()
    (other,) = exp.plan(["int3-none"], [0], 5, started, ["--train.lr", "1"])
    with pytest.raises(ValueError, match=r"was made with .*int3.*; give another --dir"):
        exp.finished(other)


def test_an_interrupt_ends_the_runs_that_were_started(exp, started, monkeypatch):
    monkeypatch.setenv("SLEEP_S", "3600")
    processes, start = [], exp.start

    def interrupted(run):
        if processes:
            raise KeyboardInterrupt
        processes.append(start(run))
        return processes[0]

    monkeypatch.setattr(exp, "start", interrupted)
    (started / "models/label-s0").mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt):
        exp.run_all(exp.plan(["int3-none", "int3-is"], [0], 5, started), 2)
    assert processes[0].poll() is not None  # an hour before its own end


# ---- figures


def a_run(exp, folder, arm, seed, accuracy=(0.5, 0.8), k1=0.02, without=(), steps=40):
    """A folder as a run leaves it; the last 20 steps have other numbers than the ones before."""
    (run,) = exp.plan([arm], [seed], steps, folder)
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps({"model": {"path": f"/m/s{seed}"}}))
    rows = [{"step": 0, exp.ACCURACY: accuracy[0]}]
    for step in range(1, steps + 1):
        late = step > steps - 20
        row = {
            exp.REWARD: 0.7 if late else 0.1,
            exp.REWARD_IS: 0.75,
            exp.ENTROPY: 0.05,
            exp.LENGTH: 30.0,
            exp.K1: k1 if late else None,
            exp.GAP: 0.9 if step == 3 else 0.5,
        }
        rows.append({"step": step} | {n: v for n, v in row.items() if n not in without})
    rows[-1][exp.ACCURACY] = accuracy[1]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return exp.read(run, lambda path: {"hf": 0.9}.get(path.name, 0.55))


def test_a_run_is_its_ends_and_its_last_twenty_steps(exp, tmp_path):
    done = a_run(exp, tmp_path, "int3-none", 1)
    assert done.accuracy == [(0, 0.5), (40, 0.8)]
    assert done.figures() == pytest.approx(
        {
            "start": 0.5,
            "end": 0.8,
            "full_start": 0.55,
            "full_end": 0.9,
            "reward": 0.7,
            "reward_is": 0.75,
            "entropy": 0.05,
            "length": 30.0,
            "k1": 0.02,
            "gap": 0.5,
            "gap_max": 0.9,
        }
    )


def test_the_table_has_means_and_standard_errors_over_seeds(exp, tmp_path):
    """.8 and .9: mean .85, standard deviation .0707, error .05."""
    done = [
        a_run(exp, tmp_path, "int3-tis2", 0, accuracy=(0.5, 0.8), k1=-0.02),
        a_run(exp, tmp_path, "int3-tis2", 1, accuracy=(0.5, 0.9), k1=-0.04),
        a_run(exp, tmp_path, "none-none", 0),
    ]
    arms = exp.over_seeds(done)
    assert arms["int3-tis2"]["end"] == pytest.approx(
        {"mean": 0.85, "std_err": 0.05, "num_seeds": 2}
    )
    assert math.isnan(arms["none-none"]["end"]["std_err"])
    lines = exp.table(arms).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| int3, TIS, C = 2 | 0.500 +- 0.000 | 0.850 +- 0.050 |" in lines[2]
    assert "| -0.0300 +- 0.0100 |" in lines[2]
    assert lines[3].startswith("| full precision, not corrected | 0.500 | 0.800 | 0.550 | 0.900 |")


def test_what_an_arm_does_not_log_is_a_dash_and_said(exp, tmp_path, capsys):
    lacking = (exp.K1, exp.GAP, exp.REWARD_IS)
    done = [
        a_run(exp, tmp_path, "int3-ppo_is", 0, without=lacking),
        a_run(exp, tmp_path, "int3-none", 0),
    ]
    exp.write(done, tmp_path / "out" / "exp.json")
    text = (tmp_path / "out" / "exp.md").read_text()
    assert "`k1`: not logged by int3-ppo_is." in text
    assert "| 30.0 | - | - | - |" in text
    assert text in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "exp.json").read_text())
    assert found["arms"]["int3-ppo_is"]["k1"] == {"mean": None, "std_err": None, "num_seeds": 0}
    assert [row["arm"] for row in found["rows"]] == ["int3-ppo_is", "int3-none"]
    assert (tmp_path / "out" / "exp.png").stat().st_size > 20_000


def test_every_metric_that_it_reads_is_declared(exp):
    for name in (exp.ACCURACY, *exp.SERIES):
        names.check(name)


def test_a_folder_without_steps_is_named(exp, tmp_path):
    (run,) = exp.plan(["int3-none"], [0], 5, tmp_path)
    run.folder.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"int3-none_0_5/metrics.jsonl: has no steps"):
        exp.read(run)


def test_a_running_mean_is_of_the_numbers_in_its_window(exp):
    values = np.array([1.0, math.nan, 4.0, 7.0])
    assert exp.smooth(values, 2).tolist() == [1.0, 1.0, 4.0, 5.5]
    assert math.isnan(exp.smooth(values[1:], 1)[0])


# ---- models


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny task's model with random weights."""
    start, folder = (tmp_path_factory.mktemp("m") / name for name in ("start", "model"))
    tiny.write_start(tiny.TinyConfig(out=folder, layers=1), start)
    hf = HFConfig.from_folder(start)
    save_folder(iter(weights(hf, 0, std=0.1).items()), hf, start, folder)
    return folder


def test_the_gap_of_a_format_is_nothing_without_one_and_grows_with_fewer_bits(exp, model):
    gaps = {name: exp.gap_of(model, name, 3, 2) for name in ("none", "int8", "int3")}
    assert gaps["none"]["max"] < 1e-4 and abs(gaps["none"]["k1"]) < 1e-4
    assert gaps["none"]["max"] < gaps["int8"]["max"] < gaps["int3"]["max"]
    assert 0 < gaps["int8"]["mean"] < gaps["int3"]["mean"]


def test_a_response_is_right_as_the_reward_of_the_recipe_says(exp):
    assert exp.correct("b5+7=12;>12", "12")
    assert not exp.correct("b5+7=12;>13", "12")
    assert not exp.correct("12", "12")


def test_full_precision_needs_a_model(exp, tmp_path):
    with pytest.raises(ValueError, match="holds no model; run with --checkpoint.export_hf"):
        exp.full_precision(tmp_path)
