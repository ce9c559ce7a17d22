"""What `--dry-run` refuses and what it leaves open, held against the run itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlcore.cli import dry_run, train
from rlcore.cli.builders import weights
from rlcore.config.schema import Config, DataConfig, RolloutConfig
from rlcore.hf.config import HFConfig
from rlcore.utils import log
from tests import kit, runs

REPLAY = "--debug.replay"
JUDGE = "--reward", "judge", "--reward.good", "1", "--reward.bad", "2", "--reward.model"
PLAIN = "--data.template", "none"
FROM_WEIGHTS = "--model.no_random_init"
TAUGHT = "--algo", "gkd", "--teacher.models", "model", "--teacher.top_k", "4"
TAIL = "--schedule", "tail_batching", *PLAIN

BROKEN: dict[str, tuple[str, ...]] = {
    # the model
    "a name of the hub": ("--model.path", "Qwen/Qwen2.5-7B"),
    "no model": ("--model.path", "gone"),
    "no config": ("--model.path", "bare"),
    "config that is no JSON": ("--model.path", "torn"),
    "another architecture": ("--model.path", "gpt2"),
    "too few positions": ("--rollout.max_tokens", "8192"),
    "no tokenizer in the folder": ("--model.path", "mute"),
    "no tokenizer": ("--model.tokenizer", "gone"),
    "no weights": (FROM_WEIGHTS,),
    "layers of a model with weights": (FROM_WEIGHTS, "--model.num_layers", "1"),
    # the data
    "no data": ("--data.train", "gone.jsonl"),
    "no validation data": ("--data.val", "gone.jsonl"),
    "data of another kind": ("--data.train", "rows.csv"),
    "another field": ("--data.train", "good.jsonl", "--data.prompt_field", "text", *PLAIN),
    "no answers": ("--data.train", "good.jsonl", "--data.answer_field", "a", *PLAIN),
    "no rows": ("--data.train", "empty.jsonl", *PLAIN),
    "a bad row that may not be": ("--data.train", "bad.jsonl", "--data.bad_rows", "refuse", *PLAIN),
    "long prompts": ("--data.train", "good.jsonl", "--data.max_prompt_tokens", "3", *PLAIN),
    "prompts beside a long answer": (
        *("--data.train", "good.jsonl", "--rollout.max_tokens", "253", *PLAIN),
    ),
    "other characters": ("--data.val", "words.jsonl", *PLAIN),
    "a task as a chat": ("--data.template", "chat"),
    "a task and a file": ("--data.train", "label", "good.jsonl"),
    "only duplicates": (
        *("--data.train", "two.jsonl", "good.jsonl", "--data.drop_duplicates", *PLAIN),
    ),
    "too few prompts": (*TAIL, "--data.train", "good.jsonl"),
    # what earlier runs have left
    "no checkpoint": ("--run.resume", "gone"),
    "no log": (REPLAY, "gone"),
    "a log of something else": (REPLAY, "good.jsonl"),
    "no folder for runs": ("--run.dir", "rows.csv"),
    "no folder for folders": ("--run.dir", "rows.csv/a/b"),
    # rewards
    "no judge": (*JUDGE, "gone"),
    "no rubric": (*JUDGE, "model", "--reward.rubric", "gone.jinja"),
    "no key": (*JUDGE, "m", "--reward.url", "http://127.0.0.1:9", "--reward.api_key_env", "NO_KEY"),
    "no tries": ("--reward", "http://127.0.0.1:9/score", "--reward.retries", "-1"),
    "no module": ("--reward", "no.such.module"),
    # settings that do not fit the model, the ranks or what is installed
    "an argument that rlcore gives SGLang": ("--rollout.sglang_args", "nccl_port=1", "tp_size=2"),
    "float64": ("--model.dtype", "float64"),
    "demonstrations of a task": (*TAUGHT, "--data.demonstrations", "label"),
    "no demonstrations": (*TAUGHT, "--data.demonstrations", "gone.jsonl"),
    "two teachers of the same": ("--algo", "opd", "--teacher.models", "model", "x"),
    "no experts": ("--algo.routing_replay", "rollout"),
    "no experts to balance": ("--train.moe_aux_loss_coef", "1e-3"),
    "SGLang with a tied mixture of experts": (
        *("--rollout.engine", "sglang", "--model.path", "tied"),
    ),
    "SGLang with a dense layer among experts": (
        *("--rollout.engine", "sglang", "--model.path", "mixed"),
    ),
    "no ranks": ("--train.tp", "0"),
    "one rank": ("--mode", "stream"),
    "no end": ("--train.lr_schedule", "cosine", "--run.steps", "0"),
    "no cores": ("--cluster.rollout_ranks", "1", "--cluster.train_cores", "7777"),
    "no address": ("--mux.url", "env:NOT_THERE"),
    "no profile": ("--mux.url", "redis://127.0.0.1:1", "--mux.profile", "gone.json"),
}
WIDE = {"no cores": "2"}
"""Ranks, where it is not one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dry")
    runs.tiny_model(folder / "model")
    mixed = {"mlp_only_layers": [0], "tie_word_embeddings": False, "model_type": "qwen3_moe"}
    runs.tiny_model(folder / "mixed", **kit.ARCHS["qwen3_moe"], **mixed)
    runs.tiny_model(folder / "tied", **kit.ARCHS["qwen3_moe"], model_type="qwen3_moe")
    (folder / "bare").mkdir()
    (runs.tiny_model(folder / "torn") / "config.json").write_text("{")
    runs.tiny_model(folder / "gpt2", architectures=["GPT2LMHeadModel"])
    (runs.tiny_model(folder / "mute") / "tokenizer.json").unlink()
    good = '{"question": "a1b2=", "answer": "3"}\n'
    for name, text in {
        "good.jsonl": good,
        "two.jsonl": good.replace("a1", "b1") + good,
        "bad.jsonl": good + "not JSON\n",
        "empty.jsonl": "",
        "words.jsonl": '{"question": "What?", "answer": "3"}\n',
        "rows.csv": "question,answer\n",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """A machine without GPUs, and the logger as it was."""
    before = log.log.handlers[:], log.log.propagate, log.log.level
    for name in ("RANK", "WORLD_SIZE", "NODES", "GPUS_PER_NODE", "MODEL_CONFIG", "JUDGE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(folder)
    yield
    log.log.handlers[:], log.log.propagate, log.log.level = before
    if dist.is_initialized():
        dist.destroy_process_group()


def start(capsys: pytest.CaptureFixture, name: str, *more: str) -> tuple[int, str]:
    """Exit code and output of a run of one step, or of a dry run."""
    bare = "--run.steps", "1", "--checkpoint.no_at_end", "--checkpoint.no_export_hf"
    quick = "--eval.no_at_start", "--eval.no_at_end", "--cluster.timeout_s", "20"
    argv = runs.arguments(Path("model"), Path("runs"), name.replace(" ", "_"), *bare, *quick, *more)
    code = train.main(argv)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


@pytest.mark.parametrize("name", BROKEN)
def test_a_dry_run_refuses_what_the_run_refuses_with_its_sentence(
    name: str, folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in WIDE:
        monkeypatch.setenv("GPUS_PER_NODE", WIDE[name])
    code, planned = start(capsys, name, *BROKEN[name], "--dry-run")
    assert code == 2, planned
    assert not (folder / "runs" / name.replace(" ", "_")).exists()
    code, said = start(capsys, name, *BROKEN[name])
    assert code == 2, said
    refusals = [line.partition("cannot run: ")[2] for line in planned.splitlines()]
    refusals = [line for line in refusals if line] or planned.splitlines()  # no configuration
    assert any(line in said.splitlines() for line in refusals), (refusals, said)


def test_a_dry_run_refuses_the_learners_allocator_as_the_run_does(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "uses_cuda_ipc", lambda *_: True)  # else it needs a GPU
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for more in (["--dry-run"], []):
        code, said = start(capsys, "segments", *more)
        assert code == 2 and "PYTORCH_CUDA_ALLOC_CONF expandable_segments:True: SGLang" in said


def test_what_would_run_runs(folder: Path, capsys: pytest.CaptureFixture) -> None:
    more = "--data.train", "bad.jsonl", *PLAIN  # the bad row is skipped
    code, said = start(capsys, "good", *more, "--dry-run")
    assert code == 0, said
    assert said.splitlines()[-1] == "dry run: this would run" and "not checked" not in said
    code, said = start(capsys, "good", *more)
    assert code == 0, said


# ---- planned for another machine


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """The recipe knows the sizes of a model that is not here."""
    monkeypatch.setenv("MODEL_CONFIG", str(folder / "model" / "config.json"))


@pytest.mark.parametrize(
    ("config", "path", "stands"),
    [
        ("qwen2_5_7b.json", "Qwen/Qwen2.5-7B-Instruct", True),
        ("qwen2_5_7b.json", "me/Qwen2.5-32B", False),
        ("glm4_5_air.json", "zai-org/GLM-4.5-Air", True),
        ("qwen2_5_7b.json", "models/Qwen2.5-32B", True),  # a folder of another machine
        ("qwen2_5_7b.json", "/scratch/me/mine", True),
    ],
)
def test_the_recipes_config_stands_for_no_other_model_of_the_hub(config, path, stands) -> None:
    assert dry_run._stands_for(f"recipes/models/{config}", path) is stands


def test_a_plan_for_another_machine_names_what_it_has_not_seen(
    elsewhere: None, capsys: pytest.CaptureFixture
) -> None:
    more = "--model.path", "gone", "--data.train", "gone.jsonl", *PLAIN
    code, said = start(capsys, "elsewhere", *more, "--data.val", "good.jsonl", "--dry-run")
    assert code == 0, said
    assert "not checked: --model.path gone: no such folder" in said
    assert "not checked: data file gone.jsonl: no such file" in said
    conditions = "--model.path gone; --data.train gone.jsonl"
    assert (
        said.splitlines()[-1] == f"dry run: would run if these exist on that machine: {conditions}"
    )


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--model.tokenizer", "model", "--teacher.models", "http://host/generate"),
        ("--data.bad_rows", "refuse", *PLAIN),
    ],
)
def test_a_plan_for_another_machine_names_missing_demonstrations(
    elsewhere: None, capsys: pytest.CaptureFixture, more: tuple[str, ...]
) -> None:
    gone = "--model.path", "gone", *TAUGHT, "--data.demonstrations", "gone.jsonl"
    code, said = start(capsys, "elsewhere", *gone, *more, "--dry-run")
    assert code == 0, said
    assert "not checked: data file gone.jsonl: no such file" in said


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (("--rollout.max_tokens", "8192"), "in the model's 256 positions"),
        (("--data.val", "empty.jsonl"), "empty.jsonl: has no rows"),
        (("--model.tokenizer", "mute"), "--model.tokenizer mute: no tokenizer.json in it"),
    ],
)
def test_a_plan_for_another_machine_refuses_what_it_has_seen(
    elsewhere: None, capsys: pytest.CaptureFixture, more: tuple[str, ...], refusal: str
) -> None:
    code, said = start(capsys, "elsewhere", "--model.path", "gone", *PLAIN, *more, "--dry-run")
    assert code == 2 and "dry run: refused" in said
    assert refusal in said


def test_a_plan_without_a_gpu_leaves_open_what_needs_one(capsys: pytest.CaptureFixture) -> None:
    code, said = start(capsys, "te", "--train.transformer_impl", "te", "--dry-run")
    assert code == 0
    assert (
        said.splitlines()[-1]
        == "dry run: would run if these exist on that machine: --train.transformer_impl te"
    )


def test_prompts_leave_room_for_an_answer_in_the_arithmetic(capsys: pytest.CaptureFixture) -> None:
    code, said = start(capsys, "room", "--dry-run")
    assert code == 0
    assert "tokens       at most 232 + 24 = 256 per sample" in said
    assert "prompts      at most 232 tokens, so that prompt and response fit" in said


def test_a_judge_that_its_recipe_makes_first_is_no_refusal(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("JUDGE_CONFIG", str(folder / "model" / "config.json"))
    code, said = start(capsys, "judge", *JUDGE, "gone", "--dry-run")
    assert code == 0, said
    assert said.splitlines()[-1].endswith("these exist on that machine: --reward.model gone")


def test_rows_are_read_to_the_end_only_where_one_can_end_the_run(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "a1b2=", "answer": "3"}\n' * 50 + "not JSON\n")
    for bad_rows, code in (("skip", 0), ("refuse", 2)):
        more = "--data.train", str(rows), *PLAIN, "--data.bad_rows", bad_rows
        found, said = start(capsys, "rows", *more, "--dry-run")
        assert found == code and ("rows.jsonl:51" in said) == bool(code), said


def test_the_routes_of_samples_are_counted() -> None:
    """Four experts fit int8: 4 layers of 2 experts are 8 bytes for each of 100 tokens."""
    hf = HFConfig.from_dict(kit.tiny_config("qwen3_moe"))
    cfg = Config(
        data=DataConfig(max_prompt_tokens=60, prompts_per_step=5),
        rollout=RolloutConfig(max_tokens=40, samples_per_prompt=2),
    )
    line = dry_run.routes(cfg, hf)
    assert line.startswith("routes       8 bytes per token, at most 0.0 MB per sample")
    wide = replace(hf, num_experts=256, experts_per_token=8)
    assert dry_run.routes(cfg, wide).startswith("routes       64 bytes per token")
    cfg = replace(cfg, data=replace(cfg.data, prompts_per_step=5_000_000))
    assert "and 64.00 GB per step" in dry_run.routes(cfg, wide)
