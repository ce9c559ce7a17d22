"""The whole program in a world of one: a dozen runs in one process, and one that is killed."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.metrics import names, trace
from rlcore.trainer import resume, seal
from tests import kit, runs

KEPT = "--checkpoint.every", 2, "--checkpoint.keep", 0
LOGGED = "--log.rollouts", -1, "--log.rollout_tokens", 60, "--log.trace_steps", 2, "--log.plot"
SAVED = "--checkpoint.no_export_hf", "--eval.no_at_start", "--eval.no_at_end"
BARE = "--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"
ONE = *BARE, "--eval.no_at_end", "--run.steps", 1
NAN = "--algo", "tests.nan_algo"
TWO = *BARE, "--eval.no_at_end", "--run.steps", 2
FAULTS = [(how, on) for how in ("full", "removed") for on in ("stop", "continue")]
MODES = "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"


class World:
    """What all tests of this file look at."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        self.model = runs.tiny_model(folder / "model")
        self.killed = self._killed()
        self.gang = self._gang()

    def job(self, name: str, *more: object, run: str = "") -> runs.Job:
        argv = runs.arguments(self.model, self.runs, run or name, *more)
        return {"name": name, "argv": argv}

    def _killed(self) -> runs.Gang:
        """Dies after step 3, whose checkpoint does not exist."""
        return runs.run(
            1, [self.job("killed", *KEPT, "--debug.kill_at_step", 3)], self.folder / "killed"
        )

    def _gang(self) -> runs.Gang:
        rows = self.folder / "rows.jsonl"
        rows.write_text(
            '{"question": "a1b2=", "answer": "3"}\n'
            "not JSON\n"
            '{"question": "a1b3=", "answer": "4"}\n'
            '{"question": 7}\n'
            f'{{"question": "{"a1b2c3" * 20}=", "answer": "5"}}\n'
        )
        again = ("--model.path", self.folder / "no_such_folder")
        jobs = [
            self.job("straight", *KEPT, *LOGGED),
            self.job("async", "--checkpoint.every", 1, "--checkpoint.keep", 0,
                     "--checkpoint.async_save"),
            self.job("resumed", *KEPT, run="killed"),
            self.job("done", *KEPT, run="straight"),
            self.job("shuffled", *ONE, "--debug.shuffle_rewards"),
            self.job("plain", *ONE),
            self.job("keep", *ONE, "--reward", "tests.scores.half"),
            self.job(
                "drop", *ONE, "--reward", "tests.scores.half", "--algo.equal_reward_groups", "drop"
            ),
            self.job("kl", *TWO, "--algo.kl_coef", 0.1),
            self.job("epochs", *ONE, "--train.epochs", 2, "--train.samples_per_update", 8),
            *[self.job(mode, *ONE, "--algo.loss_agg_mode", mode) for mode in MODES],
            self.job("cut", *ONE, "--rollout.temperature", 0.7, "--rollout.top_p", 0.9),
            self.job(
                "odd", *ONE, "--reward", "tests.scores.odd", "--reward.timeout_s", 1,
                "--reward.on_error", -1,
            ),
            self.job("broken", *TWO, "--reward", "tests.scores.broken"),
            self.job("zero", *ONE, "--reward", "tests.scores.zero"),
            self.job("code", *ONE, "--data.train", "oneline", "--reward", "code",
                     "--algo.entropy_coef", 0.01),
            self.job("rows", *ONE, "--data.train", rows, "--data.max_prompt_tokens", 64,
                     "--data.template", "none"),
            self.job("no model", *again),
            self.job("no data", "--data.train", self.folder / "nothing.jsonl"),
            self.job("no key", "--rollout.max_token", 5),
            self.job("no layout", "--train.tp", 2),
            self.job("no folder", "--run.dir", self.model / "config.json"),
            self.job("refused", "--data.train", rows, "--data.bad_rows", "refuse",
                     "--data.template", "none"),
            self.job("fresh", *ONE, "--run.resume", "fresh", run="plain"),
            self.job("offload", *TWO, "--train.offload"),
            self.job("limit", *SAVED, "--run.steps", 1, run="limited"),
            self.job("limited", *SAVED, "--run.steps", 2) | {"file_bytes": 60_000},
            self.job("unlimited", *SAVED, "--run.steps", 2, run="limited"),
            self.job("going on", *SAVED, "--checkpoint.every", 2, "--checkpoint.no_at_end",
                     "--checkpoint.on_error", "continue",
                     "--run.steps", 3) | {"file_bytes": 60_000},
            self.job("going on async", *SAVED, "--checkpoint.every", 2, "--checkpoint.async_save",
                     "--checkpoint.no_at_end", "--checkpoint.on_error", "continue",
                     "--run.steps", 5) | {"file_bytes": 60_000},
            self.job("whole", *SAVED, "--checkpoint.every", 1, "--run.steps", 2),
            self.job("often", *SAVED, "--checkpoint.every", 0, "--checkpoint.every_minutes", 1e-6,
                     "--checkpoint.keep", 0, "--checkpoint.no_at_end", "--run.steps", 3),
            self.job("damaged", *SAVED, "--run.steps", 3, run="whole") | {"before": self._cut()},
            self.job("nan", *BARE, "--eval.no_at_end", *NAN, "--train.max_skipped_updates", 2,
                     "--checkpoint.every", 1, "--checkpoint.async_save"),
            self.job("nan loss", *ONE, *NAN, "--algo.where", "loss"),
            self.job("told", *SAVED, "--run.steps", 500) | {"before": self._tell()},
            self.job("told again", *SAVED, "--run.steps", 500, run="told")
            | {"before": self._tell()},
        ]  # fmt: skip
        self.disk = self._mount()
        if self.disk:
            full = *SAVED, *KEPT, "--checkpoint.every", 1, "--run.dir", self.disk, "--run.steps", 3
            grow = ["mount", "-o", "remount,size=16m", str(self.disk)]
            jobs += [
                self.job("full", *full),
                self.job("emptied", *full, run="full") | {"before": grow},
                *[self.fault(f"{how} {on}", self.disk, how, on) for how, on in FAULTS],
            ]
        try:
            gang = runs.run(1, jobs, self.folder / "gang")
            self.disk_rows = runs.rows(self.disk / "full") if self.disk else {}
        finally:
            if self.disk:
                subprocess.run(["umount", self.disk], check=True)
        return gang

    def fault(self, name: str, disk: Path, how: str, on_error: str) -> runs.Job:
        """The disk fills, or the run's folder is deleted, while step 2 is sampled."""
        keys = *SAVED, "--checkpoint.every", 2, "--checkpoint.no_at_end", "--run.steps", 3
        keys += "--log.rollouts", -1, "--log.trace_steps", -1, "--log.tensorboard"
        job = self.job(name, *keys, "--checkpoint.on_error", on_error, "--run.dir", disk)
        folder = disk / name if how == "removed" else disk
        return job | {"within": ["tests.faults:at_phase", "gen", 2, how, str(folder)]}

    def _cut(self) -> list[str]:
        """Half of a file of the newest checkpoint is lost."""
        file = (
            self.runs
            / "whole"
            / "checkpoints"
            / "step_000002"
            / "learner"
            / "rank00000_0.safetensors"
        )
        return ["truncate", "--size=60000", str(file)]

    def _tell(self) -> list[str]:
        """SIGTERM, as Slurm sends it, when the next two steps of the run `told` are done."""
        file = self.runs / "told" / "metrics.jsonl"
        rows = 'rows() { cat "$0" 2>/dev/null | wc -l; }; before=$(rows)'
        wait = "while [ $(rows) -lt $((before + 2)) ]; do sleep 0.02; done"
        return ["sh", "-c", f"{rows}; ({wait}; kill -TERM $PPID) &", str(file)]

    def _mount(self) -> Path | None:
        """A disk with room for two checkpoints; None where we may not make one."""
        disk = self.folder / "disk"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", disk]
        try:
            return disk if subprocess.run(command, capture_output=True).returncode == 0 else None
        except FileNotFoundError:
            return None

    def rows(self, name: str) -> dict[int, dict[str, Any]]:
        self.gang.check(name)
        return runs.rows(self.runs / {"unlimited": "limited"}.get(name, name))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world_of_one"))


# ---- what a run leaves behind


def test_a_run_writes_a_row_per_step_with_declared_names(world: World) -> None:
    rows = world.rows("straight")
    assert list(rows) == [0, 1, 2, 3, 4]
    for row in rows.values():
        for name, value in row.items():
            names.check(name)
            assert value is not None and math.isfinite(value), name
    assert "val-core/label/acc/mean@1" in rows[0]
    assert "critic/score/mean" not in rows[0]
    assert all(rows[n]["actor/grad_norm"] > 0 for n in (1, 2, 3, 4))
    assert "val-core/label/acc/mean@1" in rows[4]


def test_programs_are_tested_in_the_sandbox(world: World) -> None:
    row = world.rows("code")[1]
    assert row["reward/errors"] == 0 and row["reward/latency_s/mean"] > 0
    assert row["reward/passed"] == row["critic/score/max"] == 0  # random weights write no Python
    assert "sandbox: " in world.gang.text("code")


def test_a_run_keeps_its_configuration_and_its_samples(world: World) -> None:
    world.gang.check("straight")
    folder = world.runs / "straight"
    config = json.loads((folder / "config.json").read_text())
    assert config["rollout"]["max_running_requests"] == 5
    lines = [json.loads(x) for x in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [n for n in (1, 2, 3, 4) for _ in range(16)]
    for line in lines:
        assert line["score"] == pytest.approx(len(set(line["response"])) / 34)
        assert 0 < line["num_tokens"] <= 24
    for step in (1, 2, 3, 4):
        said = [x for x in lines if x["step"] == step and "tokens" in x]
        assert sum(len(x["tokens"]["pieces"]) for x in said) == 60
        for x in said[:-1]:  # the last is cut
            pieces, n = x["tokens"]["pieces"], x["num_tokens"]
            letters = [p for p in pieces if not p.startswith("<")]  # no special tokens
            assert "".join(letters) == x["response"] and len(pieces) == n
            assert len(x["tokens"]["logps"]) == n and max(x["tokens"]["logps"]) <= 0
            assert x["tokens"]["versions"] == [[step - 1, n]]
    assert (folder / "curve.png").stat().st_size > 1000


def test_the_trace_has_every_phase_and_response_of_its_steps(world: World) -> None:
    world.rows("straight")
    path, ranks = trace.merge(world.runs / "straight", world.folder / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    bars = [e for e in events if e["ph"] == "X"]
    assert ranks == 1 and min(e["ts"] for e in events if "ts" in e) == 0
    steps = [e for e in bars if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == [1, 2]
    for step in steps:
        inside = [
            e["name"]
            for e in bars
            if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"]
        ]
        assert {"gen", "exchange", "update_actor", "update_weights"} < set(inside)
    for bundle in ("response", "reward"):
        found = {e["args"]["id"] for e in events if e["ph"] == "b" and e["name"] == bundle}
        assert {f"t{g}.{k}" for g in range(8) for k in range(4)} <= found
        assert not {i for i in found if i.startswith("t8.")}  # of step 3
    by_id = [(e["id"], e["ph"], e["ts"]) for e in events if e["ph"] in "be" and e["id"] == 1]
    assert [ph for _, ph, _ in by_id] == ["b", "e"] and by_id[0][2] <= by_id[1][2]


def test_the_summary_has_accuracy_speed_and_seconds(world: World) -> None:
    rows = world.rows("straight")
    found = json.loads((world.runs / "straight" / "summary.json").read_text())
    assert found["steps"] == 4
    assert found["val/accuracy_start"] == rows[0]["val-core/label/acc/mean@1"]
    assert found["val/accuracy_end"] == rows[4]["val-core/label/acc/mean@1"]
    assert found["perf/samples_per_s"] > 0
    assert {"timing_s/step", "timing_s/gen", "timing_s/update_actor"} <= found.keys()


def test_the_trained_weights_load_in_transformers(world: World) -> None:
    world.gang.check("straight")
    from transformers import AutoModelForCausalLM

    folder = world.runs / "straight" / "hf"
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    saved = runs.checkpoint(world.runs / "straight", 4)
    ours = model.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(ours, saved["param/embedding.word_embeddings.weight@0,0"][: len(ours)])
    assert (folder / "tokenizer.json").is_file()


# ---- resume


def test_four_steps_equal_two_a_kill_and_two_bit_by_bit(world: World) -> None:
    world.gang.check("straight")
    world.gang.check("resumed")
    assert world.killed.codes == [-signal.SIGKILL]
    assert "resumed from" in world.gang.text("resumed")
    straight = runs.checkpoint(world.runs / "straight", 4)
    resumed = runs.checkpoint(world.runs / "killed", 4)
    kit.assert_bitwise(*({k: v for k, v in c.items() if k not in ("common", "state")}
                         for c in (straight, resumed)))  # fmt: skip
    assert any("exp_avg_sq" in name for name in straight)
    assert straight["common"] == resumed["common"]
    assert straight["state"] == resumed["state"]
    assert straight["state"]["sampler"]["position"] == 16


def test_a_resumed_run_has_every_step_once_with_the_same_numbers(world: World) -> None:
    straight, resumed = world.rows("straight"), runs.rows(world.runs / "killed")
    assert list(resumed) == list(straight)
    for step in straight:
        assert runs.same(resumed[step]) == runs.same(straight[step]), step


def test_a_run_that_is_done_stays_as_it_is(world: World) -> None:
    world.gang.check("done")
    assert list(runs.rows(world.runs / "straight")) == [0, 1, 2, 3, 4]


def test_a_fresh_run_moves_the_older_one_aside_with_its_log(world: World) -> None:
    world.gang.check("fresh")
    old = world.runs / "plain.old1"
    assert (old / "metrics.jsonl").is_file() and (old / "logs" / "rank0.log").is_file()
    assert (world.runs / "plain" / "logs" / "rank0.log").is_file()
    assert f"moved the earlier run of this name to {old}" in world.gang.text("fresh")


# ---- settings of the update


def test_shuffled_rewards_change_advantages_and_not_the_scores(world: World) -> None:
    plain, shuffled = world.rows("plain")[1], world.rows("shuffled")[1]
    for name in ("critic/score/mean", "critic/score/max", "critic/score/min"):
        assert shuffled[name] == plain[name]
    assert shuffled["critic/rewards/mean"] == pytest.approx(plain["critic/rewards/mean"])
    assert shuffled["actor/grad_norm"] != plain["actor/grad_norm"]
    assert shuffled["critic/advantages/max"] != plain["critic/advantages/max"]


def test_groups_of_equal_rewards_are_kept_or_dropped(world: World) -> None:
    keep, drop = world.rows("keep")[1], world.rows("drop")[1]
    assert keep["training/equal_reward_groups"] == drop["training/equal_reward_groups"] == 0.5
    assert (keep["training/trained_rows"], drop["training/trained_rows"]) == (16, 8)
    assert drop["actor/grad_norm"] > keep["actor/grad_norm"] > 0


def test_the_kl_to_the_reference_starts_at_zero_and_grows(world: World) -> None:
    rows = world.rows("kl")
    assert abs(rows[1]["actor/kl_loss"]) < 1e-6
    assert rows[2]["actor/kl_loss"] > 1e-5
    assert rows[1]["timing_s/ref"] > 0


def test_a_step_has_epochs_times_parts_updates(world: World) -> None:
    rows = world.rows("epochs")
    assert rows[1]["actor/updates"] == 4
    assert rows[1]["timing_s/old_log_prob"] > 0
    assert rows[1]["actor/ppo_kl"] != 0
    assert world.rows("plain")[1]["actor/updates"] == 1


def test_every_aggregation_of_the_loss_has_its_own_scale(world: World) -> None:
    """16 sequences of at most 24 tokens: the sums over tokens differ only in what divides them."""
    by_sum, by_mean, by_most = (world.rows(mode)[1]["actor/grad_norm"] for mode in MODES)
    row = world.rows("plain")[1]
    assert by_sum == pytest.approx(24 * by_most, rel=1e-5)
    assert by_sum == pytest.approx(row["actor/grad_norm"] * row["response_length/mean"], rel=1e-5)
    assert abs(by_mean / row["actor/grad_norm"] - 1) > 1e-3


# ---- sampler against learner


def test_with_the_same_weights_sampler_and_learner_agree(world: World) -> None:
    for row in (world.rows("straight")[1], world.rows("straight")[4]):
        assert 0 <= row["rollout_corr/k3_kl"] < 1e-8
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-5)


def test_a_cut_distribution_is_corrected_by_the_weight(world: World) -> None:
    """The learner knows the temperature and not the cuts: the sampler's log-probs are of the
    distribution without its tail, so they are larger and the weight is the share that was kept."""
    row = world.rows("cut")[1]
    assert row["rollout_corr/kl"] > 0.01
    assert row["rollout_corr/rollout_is_min"] > 0.85
    assert row["rollout_corr/rollout_is_mean"] < 0.99
    assert row["rollout_corr/rollout_is_max"] <= 1 + 1e-4


# ---- bad input


def refusal(world: World, job: str, code: int = 2) -> str:
    """The one sentence that a job ended with; no traceback on the terminal."""
    assert world.gang.code(job) == code, world.gang.text(job)
    text = world.gang.text(job)
    assert "Traceback" not in text, text
    return text.strip().splitlines()[-1]


def test_a_missing_model_folder_is_one_sentence(world: World) -> None:
    said = refusal(world, "no model")
    assert "--model.path" in said and "no_such_folder: no such folder" in said


def test_a_missing_data_file_is_one_sentence(world: World) -> None:
    assert "nothing.jsonl: no such file" in refusal(world, "no data")


def test_an_unknown_key_names_the_nearest(world: World) -> None:
    assert "did you mean --rollout.max_tokens?" in refusal(world, "no key")


def test_a_layout_that_does_not_fit_the_world_is_one_sentence(world: World) -> None:
    assert "tp" in refusal(world, "no layout")


def test_a_run_folder_that_cannot_be_made_is_one_sentence(world: World) -> None:
    said = refusal(world, "no folder")
    assert said.startswith("--run.dir") and "cannot create the" in said


def test_bad_rows_are_named_counted_and_left_out(world: World) -> None:
    row, text = world.rows("rows")[1], world.gang.text("rows")
    assert "rows.jsonl:2: " in text and "rows.jsonl:4: " in text
    assert "1" in next(x for x in text.splitlines() if "max_prompt_tokens" in x)
    assert row["critic/score/mean"] > 0
    assert row["training/epoch"] == 2  # four prompts of a set of two


def test_bad_rows_can_end_the_run(world: World) -> None:
    assert "rows.jsonl:2: " in refusal(world, "refused")


def test_a_reward_that_misbehaves_costs_its_own_samples(world: World) -> None:
    """Sample 1 of each group raises; of the first row, sample 2 hangs and sample 3 exits."""
    row = world.rows("odd")[1]
    assert row["reward/errors"] == 6
    assert row["reward/timeouts"] == 1
    assert row["critic/score/mean"] == pytest.approx((10 * 1 + 6 * -1) / 16)
    said = world.gang.text("odd")
    assert "sample t0.2 scores -1: timeout after 1 s" in said
    assert "sample t0.3 scores -1: crash: exit code 7" in said
    assert said.count("much to say") < 20
    assert (world.runs / "odd" / "logs" / "reward0.log").read_text().count("much to say") > 1000


def test_a_reward_that_fails_on_all_responses_ends_the_run_at_its_first_step(world: World) -> None:
    assert world.gang.code("broken") == 2
    assert (
        "--reward tests.scores.broken: failed on all 16 responses of the first step, on the first "
        "with: KeyError: 'no such column'"
    ) in world.gang.text("broken")
    assert not (world.runs / "broken" / "checkpoints").exists()


def test_the_step_line_says_when_no_response_is_preferred(world: World) -> None:
    said = "rewards are equal in every group, so no response is preferred"
    assert said in world.gang.text("zero") and said not in world.gang.text("straight")


def test_a_checkpoint_follows_the_step_in_which_the_time_is_over(world: World) -> None:
    world.gang.check("often")
    steps = sorted(path.name for path in (world.runs / "often" / "checkpoints").iterdir())
    assert steps == ["step_000001", "step_000002", "step_000003"]


def test_a_failed_write_ends_the_run_and_leaves_the_older_checkpoint(world: World) -> None:
    """Files longer than 60 kB fail in the middle."""
    said = refusal(world, "limited", code=1)
    assert "checkpoint of step 2 could not be written" in said
    assert "earlier checkpoints are kept" in said and "rank0.log)" in said
    assert "Traceback" in (world.runs / "limited" / "logs" / "rank0.log").read_text()
    assert list(world.rows("unlimited")) == [1, 2]
    assert "1 of 2 steps done" in world.gang.text("unlimited")


def test_a_full_disk_is_said_before_the_write_and_costs_nothing(world: World) -> None:
    if not world.disk:
        pytest.skip("needs the right to mount a small tmpfs")
    assert "the disk is full" in refusal(world, "full", code=1)
    assert "2 of 3 steps done" in world.gang.text("emptied")
    assert list(world.disk_rows) == [1, 2, 3]


@pytest.mark.parametrize(("how", "on_error"), FAULTS)
def test_a_fault_of_the_disk_between_two_saves_is_one_sentence(
    world: World, how: str, on_error: str
) -> None:
    """Whatever file is written first: metrics, samples, rounds, traces, logs."""
    if not world.disk:
        pytest.skip("needs the right to mount a small tmpfs")
    name, why = f"{how} {on_error}", {"full": "the disk is full", "removed": "was deleted"}[how]
    said = world.gang.text(name)
    assert "Traceback" not in said and "Logging error" not in said, said
    assert f"{world.disk / name}/" in said and why in said
    if on_error == "stop":
        assert world.gang.code(name) == 1 and said.count("checkpoints are kept. Correct this") >= 1
        assert "step 3/3" not in said
    else:
        assert world.gang.code(name) == 0 and "step 3/3" in said
        told = [line for line in said.splitlines() if "the run continues" in line]
        files = [line.partition(" (")[0] for line in told if line.startswith("cannot write")]
        assert files and len(files) == len(set(files)), told


def test_a_failed_write_is_counted_and_the_run_goes_on_where_it_shall(world: World) -> None:
    rows, text = world.rows("going on"), world.gang.text("going on")
    assert [row.get("training/failed_saves") for row in rows.values()] == [None, None, 1]
    assert "checkpoint of step 2 could not be written" in text and "the run continues" in text
    assert not list((world.runs / "going on" / "checkpoints").iterdir())


def test_asynchronous_checkpoints_are_those_of_a_run_that_waits(world: World) -> None:
    world.gang.check("async")
    for theirs in resume.found(world.runs / "straight"):
        mine = world.runs / "async" / "checkpoints" / theirs.name
        assert not seal.fault(mine, None)
        files = sorted(path.relative_to(theirs) for path in (theirs / "learner").iterdir())
        assert len(files) > 1
        for file in files:
            assert (mine / file).read_bytes() == (theirs / file).read_bytes()
    rows, straight = world.rows("async"), world.rows("straight")
    assert rows[3]["timing_s/write_checkpoint"] > 0
    assert rows[3]["actor/grad_norm"] == straight[3]["actor/grad_norm"]


def test_an_asynchronous_write_that_fails_is_counted_and_the_run_goes_on(world: World) -> None:
    world.gang.check("going on async")
    rows, text = world.rows("going on async"), world.gang.text("going on async")
    assert any(row.get("training/failed_saves") for row in rows.values())
    assert "checkpoint of step 2 could not be written" in text and "the run continues" in text
    assert not list((world.runs / "going on async" / "checkpoints").iterdir())


def test_a_run_that_fails_in_the_next_step_keeps_an_asynchronous_checkpoint(world: World) -> None:
    refusal(world, "nan", code=1)
    (kept,) = resume.found(world.runs / "nan")
    assert resume.step_of(kept) == 1 and not seal.fault(kept, None)


def test_a_damaged_checkpoint_costs_a_step_and_is_said(world: World) -> None:
    world.gang.check("damaged")
    text = world.gang.text("damaged")
    assert "step_000002 is damaged: learner/rank00000_0.safetensors has 60000 of" in text
    assert "1 of 3 steps done" in text
    folder = world.runs / "whole"
    rows, straight = runs.rows(folder), world.rows("straight")
    assert list(rows) == [1, 2, 3]
    for step in (2, 3):
        assert rows[step]["actor/grad_norm"] == straight[step]["actor/grad_norm"]
    assert (folder / "checkpoints" / "step_000002.old1").is_dir()


def test_updates_that_are_not_finite_are_left_out_and_end_the_run(world: World) -> None:
    said = refusal(world, "nan", code=1)
    assert "actor's loss or gradient was not finite in 2 updates in a row" in said
    assert "the last in step 2" in said
    assert runs.rows(world.runs / "nan")[1]["actor/skipped"] == 1
    assert world.rows("nan loss")[1]["actor/skipped"] == 1


def test_a_sigterm_saves_ends_in_order_and_can_be_gone_on_from(world: World) -> None:
    world.gang.check("told")
    world.gang.check("told again")
    first, second = world.gang.text("told"), world.gang.text("told again")
    last = int(re.search(r"ended by SIGTERM after step (\d+) of 500", first)[1])
    assert last >= 2 and f"{last} of 500 steps done" in second
    folder = world.runs / "told"
    end = int(re.search(r"ended by SIGTERM after step (\d+) of 500", second)[1])
    assert list(runs.rows(folder)) == list(range(1, end + 1)) and end > last
    assert (folder / "checkpoints" / f"step_{end:06d}" / "state.json").is_file()
    assert not (folder / "flight").exists()


def test_offloading_changes_nothing_but_the_memory(world: World) -> None:
    straight, offloaded = world.rows("straight"), world.rows("offload")
    for step in (1, 2):
        found = runs.same(offloaded[step])
        memory = {name: found.pop(name) for name in list(found) if name.startswith("memory/")}
        assert found == runs.same(straight[step])
    # On the CPU the gradients go: 4 of the 16 bytes of a parameter.
    generate, turn = (memory[f"memory/learner_gb/{x}"] for x in ("gen", "load_learner"))
    assert generate / turn == pytest.approx(12 / 16, rel=0.02)


# ---- the command


def test_help_and_refusals_that_need_no_torch_do_not_import_it() -> None:
    wrong = (
        "--run.seed x",
        "--run.sed 1",
        "--algo grop",
        "--reward nothing",
        "--reward.timeout_s x",
        "--rollout.tp 0",
        "--model.path /nowhere",
    )
    code = (
        "import sys; from rlcore.__main__ import main; main(['--help']);"
        f"assert all(main(['train', *words.split()]) == 2 for words in {wrong});"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
    assert "train" in done.stdout
