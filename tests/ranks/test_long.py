"""What takes minutes: soak, chaos, fuzz, and that the tiny task is learned. Only with `--long`."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlcore.cli.settings import parse
from rlcore.config import resolve, rules
from rlcore.config.schema import DataConfig
from rlcore.data.prompts import read_file
from tests import runs

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2)]


def resources(pids: list[int]) -> tuple[float, int]:
    """Resident megabytes and open files of processes and all their children."""
    total, files = 0.0, 0
    for pid in pids:
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            total += sum(p.memory_info().rss for p in family) / 1e6
            files += sum(p.num_fds() for p in family)
        except psutil.NoSuchProcess:
            continue  # the run is ending
    return total, files


@pytest.mark.timeout(900)
def test_memory_and_open_files_stay_flat_over_300_steps(tmp_path):
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(
        model, tmp_path, "soak", "--run.steps", 300, "--rollout.max_running_requests", 64
    )
    gang = runs.Running(2, [{"name": "soak", "argv": argv, "programs": True}], tmp_path / "gang")
    seen = []
    metrics = tmp_path / "soak" / "metrics.jsonl"
    while any(p.poll() is None for p in gang.processes):
        done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        seen.append((done, *resources([p.pid for p in gang.processes])))
        time.sleep(0.5)
    gang.wait().check("soak", ranks=2)
    table = np.array([row for row in seen if 100 <= row[0] <= 295])
    assert len(table) >= 5, "the run was too short to say anything"
    slope = np.polyfit(table[:, 0], table[:, 1], 1)[0]
    print(f"soak: {slope * 1000:.1f} kB per step, files {table[:, 2].min()}-{table[:, 2].max()}")
    assert slope * 195 < 0.05 * table[0, 1], f"{slope:.3f} MB per step"
    assert table[-1, 2] <= table[0, 2] + 10


@pytest.mark.timeout(900)
def test_a_run_survives_engines_and_reward_children_being_killed(tmp_path):
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(model, tmp_path, "chaos", "--run.steps", 1500)
    argv += ["--cluster.timeout_s", "120"]
    gang = runs.Running(2, [{"name": "chaos", "argv": argv, "programs": True}], tmp_path / "gang")
    done, killed = threading.Event(), []

    def strike() -> None:
        dice = random.Random(0)
        while not done.wait(6.0):
            victim = dice.choice(["rlcore.rollout.process", "rlcore.rewards.child"])
            for process in gang.processes:
                found = [
                    p
                    for p in psutil.Process(process.pid).children(recursive=True)
                    if victim in " ".join(p.cmdline())
                ]
                if found:
                    found[0].kill()
                    killed.append(victim)
                    break

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    metrics = tmp_path / "chaos" / "metrics.jsonl"
    end = time.monotonic() + 90
    while time.monotonic() < end and all(p.poll() is None for p in gang.processes):
        time.sleep(0.5)
    alive = all(p.poll() is None for p in gang.processes)
    done.set()
    thread.join()
    finished = alive or all(p.returncode == 0 for p in gang.processes)
    for p in gang.processes:
        p.terminate()
    gang.wait()
    texts = "\n".join(p.read_text()[-2000:] for p in gang.folder.glob("chaos.*.txt"))
    assert finished, texts
    table = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert sum(row.get("sched/engines_down", 0.0) for row in table) > 0
    assert len(killed) >= 5 and len(table) > 20, (killed, len(table))


def test_random_command_lines_are_accepted_or_refused_in_one_sentence():
    dice = random.Random(1)
    keys = list(resolve.keys(parse([])))
    words = ["0", "1", "-1", "1e-3", "x", "", "true", "label", "99999999999", "nan", "a b", "--"]
    accepted = 0
    for _ in range(1000):
        argv = []
        for _ in range(dice.randrange(1, 4)):
            key = dice.choice(keys)
            if dice.random() < 0.1:
                at = dice.randrange(len(key))
                key = key[:at] + dice.choice("abcxyz._-") + key[at + 1 :]
            argv += [f"--{key}", *dice.choices(words, k=dice.choice([0, 1, 1, 1, 2]))]
        try:
            rules.broken(parse(argv))
            accepted += 1
        except ValueError as error:
            assert "\n" not in str(error) and str(error).strip(), argv
    assert 50 < accepted < 950


def test_mutated_data_files_are_read_or_refused_in_one_sentence(tmp_path):
    class Tokens:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def min_tokens(self, text: str) -> int:
            return 0

        def render_chats(self, chats) -> list[str]:
            return [str(messages) for messages in chats]

    dice = random.Random(2)
    row = b'{"question": "What is 2+3?", "answer": "5", "more": [1, {"a": null}]}\n'
    file = tmp_path / "mutated.jsonl"
    kept = 0
    for _ in range(2000):
        data = bytearray(row * 4)
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(3)] = bytes(dice.choices(range(256), k=dice.randrange(3)))
        file.write_bytes(bytes(data))
        try:
            kept += len(read_file(file, "mutated", DataConfig(), Tokens()))
        except ValueError as error:
            assert str(error).strip()
    assert kept > 2000


@pytest.mark.timeout(900)
def test_the_tiny_recipe_learns(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = ["bash", "recipes/grpo_tiny.sh", "--run.dir", str(tmp_path), "--run.steps", "60"]
    subprocess.run(command, cwd=root, check=True, env=os.environ | {"CI": "1"}, timeout=800)
    summary = json.loads((tmp_path / "grpo_tiny" / "summary.json").read_text())
    assert summary["val/accuracy_end"] - summary["val/accuracy_start"] > 0.1


@pytest.mark.timeout(1800)
def test_the_tiny_code_recipe_learns(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = ["bash", "recipes/code_tiny.sh", "--run.dir", str(tmp_path), "--eval.every", "0"]
    command += ["--data.num_val_prompts", "1024"]  # one standard error of a difference is 0.02
    subprocess.run(command, cwd=root, check=True, env=os.environ | {"CI": "1"}, timeout=1700)
    summary = json.loads((tmp_path / "code_tiny" / "summary.json").read_text())
    assert summary["val/accuracy_end"] - summary["val/accuracy_start"] > 0.06


@pytest.mark.timeout(1800)
def test_the_tiny_walks_are_learned(tmp_path):
    root = Path(__file__).resolve().parents[2]
    command = [
        "bash",
        "recipes/frozenlake_tiny.sh",
        "--run.dir",
        str(tmp_path),
        "--eval.every",
        "0",
    ]
    subprocess.run(command, cwd=root, check=True, env=os.environ | {"CI": "1"}, timeout=1700)
    summary = json.loads((tmp_path / "frozenlake_tiny" / "summary.json").read_text())
    assert summary["val/accuracy_end"] - summary["val/accuracy_start"] > 0.1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_an_agent_with_openais_client_learns_to_use_a_tool(tmp_path, seed):
    pytest.importorskip("openai", reason="no package openai: bash tools/setup.sh --openai")
    root = Path(__file__).resolve().parents[2]
    command = ["bash", "recipes/endpoint_tiny.sh", "--run.dir", str(tmp_path)]
    command += ["--run.seed", str(seed)]
    subprocess.run(command, cwd=root, check=True, env=os.environ | {"CI": "1"}, timeout=1700)
    summary = json.loads((tmp_path / "endpoint_tiny" / "summary.json").read_text())
    assert summary["val/accuracy_end"] - summary["val/accuracy_start"] > 0.2
    rows = runs.rows(tmp_path / "endpoint_tiny")
    name = "training/rollout_probs_diff_max"
    differences = [row[name] for row in rows.values() if name in row]
    assert len(differences) > 12 and max(differences) < 1e-3
    assert rows[max(rows)]["env/turns"] > 1.8  # a call, and the answer


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(4))
def test_a_rank_that_stands_still_ends_the_run_with_a_verdict(tmp_path, number):
    """Rank 1 is stopped at some moment: in a round the controller names it, in a collective the
    watchdog names the phase, unless the collective times out first."""
    model = runs.tiny_model(tmp_path / "model")
    argv = runs.arguments(model, tmp_path, "stuck", "--run.steps", 5000)
    argv += ["--cluster.timeout_s", "8", "--rollout.stall_timeout_s", "8"]
    gang = runs.Running(2, [{"name": "stuck", "argv": argv}], tmp_path / "gang")
    metrics = tmp_path / "stuck" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 10 + number:
        assert gang.processes[0].poll() is None
        time.sleep(0.05)
    gang.processes[1].send_signal(signal.SIGSTOP)
    try:
        gang.processes[0].wait(60)
    finally:
        gang.processes[1].kill()
        gang.processes[0].kill()
    said = (gang.folder / "stuck.0.txt").read_text()
    words = "rank 1: no message", "has made no progress", "is stopped by a signal"
    assert any(word in said for word in words), said[-1500:]
