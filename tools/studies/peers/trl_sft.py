"""The peer of tests/ranks/test_sft_trl.py: loss and gradients of TRL's SFTTrainer on one batch.

Runs in TRL's own virtual environment and imports nothing of rlcore. It reads a model folder and
rows of messages as JSON on stdin and prints one line of JSON at the end.
"""

import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def main() -> None:
    s = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
    arguments = SFTConfig(
        output_dir=s["out"],
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=len(s["rows"]),
        assistant_only_loss=True,
        max_length=None,
        gradient_checkpointing=False,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"messages": row} for row in s["rows"]]),
        processing_class=AutoTokenizer.from_pretrained(s["model"]),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    learned = batch["labels"] != -100
    loss = trainer.compute_loss(model, dict(batch), num_items_in_batch=learned[:, 1:].sum())
    loss.backward()
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [
        [ids[:n].tolist(), marks[:n].int().tolist()]
        for ids, marks, n in zip(batch["input_ids"], learned, lengths, strict=True)
    ]
    gradients = {name: summary(p.grad) for name, p in model.named_parameters()}
    print(json.dumps({"loss": loss.item(), "rows": sorted(rows), "gradients": gradients}))


def summary(gradient: torch.Tensor) -> list[float]:
    """Norm of a gradient, and its product with cos(0), cos(1), ..."""
    flat = gradient.double().flatten()
    return [flat.norm().item(), (flat * torch.arange(len(flat)).double().cos()).sum().item()]


if __name__ == "__main__":
    main()
