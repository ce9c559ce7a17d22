"""The peer of bench_vs_trl.py: TRL's GRPOTrainer on the task of grpo_tiny.sh, on the CPU.

Runs in TRL's own virtual environment and imports nothing of rlcore. It reads settings as JSON on
stdin and prints one line of JSON at the end; prompts come as JSON lines (`question`, `answer`).
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def correct(completions: list[str], answer: list[str], **_) -> list[float]:
    """1 where the text behind the first `>` is the answer."""
    found = (text.partition(">")[2].strip() for text in completions)
    return [float(f == a) for f, a in zip(found, answer, strict=True)]


def arguments(s: dict) -> GRPOConfig:
    """The recipe's settings in TRL's words."""
    rows = s["prompts"] * s["group"]
    per_update = rows // s["updates"]
    micro = s["micro"] or per_update
    return GRPOConfig(
        output_dir=s["out"],
        use_cpu=True,
        bf16=False,
        seed=s["seed"],
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        shuffle_dataset=False,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_update // micro,
        generation_batch_size=rows,
        num_generations=s["group"],
        max_completion_length=s["max_tokens"],
        max_steps=s["steps"] * s["updates"],
        learning_rate=s["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=s["warmup_updates"],
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",  # the mean over all tokens of an update
        scale_rewards="group",
        gradient_checkpointing=False,
    )


class Watch(TrainerCallback):
    """The time at the end of every update."""

    def __init__(self):
        self.ends: list[float] = []

    def on_train_begin(self, args, state, control, **_):
        self.ends.append(time.perf_counter())

    def on_step_end(self, args, state, control, **_):
        self.ends.append(time.perf_counter())


def timed(function: Callable, seconds: list[float]) -> Callable:
    def wrapped(*args, **kwargs):
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    return wrapped


@torch.no_grad()
def accuracy(model, tokenizer, rows: list[dict], max_tokens: int, seed: int) -> float:
    """Share of right answers, sampled once at temperature 1."""
    torch.manual_seed(seed)
    model.eval()
    right = 0.0
    for at in range(0, len(rows), 256):
        part = rows[at : at + 256]
        batch = tokenizer(
            [r["question"] for r in part],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        out = model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts = tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += sum(correct(texts, [r["answer"] for r in part]))
    return right / len(rows)


def main() -> None:
    s = json.load(sys.stdin)
    torch.set_num_threads(s["threads"])
    train, held = (
        [json.loads(line) for line in Path(s[name]).read_text().splitlines()]
        for name in ("train_file", "val_file")
    )
    data = Dataset.from_list([{"prompt": r["question"], "answer": r["answer"]} for r in train])
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(s["model"])
    watch = Watch()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=correct,
        args=arguments(s),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
    )
    before = accuracy(model, tokenizer, held, s["max_tokens"], s["seed"])
    generating: list[float] = []
    # private, so it may be gone in another version: then only the split is missing
    inner = getattr(trainer, "_generate_single_turn", None)
    if inner is not None:
        trainer._generate_single_turn = timed(inner, generating)
    trainer.train()
    after = accuracy(trainer.model, tokenizer, held, s["max_tokens"], s["seed"] + 1)
    ends = watch.ends[:: s["updates"]]
    steps = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    log = trainer.state.log_history
    first = s["first_step"] - 1
    report = {
        "step_s": steps,
        "gen_s": generating,
        "median_step_s": statistics.median(steps[first:]),
        "median_gen_s": statistics.median(generating[first:]) if generating else None,
        "accuracy_start": before,
        "accuracy_end": after,
        "rewards": [row["reward"] for row in log if "reward" in row],
        "lr": [row["learning_rate"] for row in log if "learning_rate" in row],
        "completion_length": [
            row["completions/mean_length"] for row in log if "completions/mean_length" in row
        ],
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl)},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
