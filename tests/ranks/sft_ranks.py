"""What the rank of test_sft_trl.py runs, and the model and the rows that both sides learn."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from rlcore.config.schema import DataConfig
from rlcore.data import conversations
from rlcore.data.conversations import Demonstration
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.trainer.demonstrations import batch_of
from rlcore.trainer.sft import nll
from tests import kit

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]


def said(*texts: str, system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


ROWS = [
    said("Two and two?", "Four."),
    said("Zürich?", "A city at a lake."),
    said("Hello!", "Hi, how can I help?", "Name a prime.", "Seven; eleven too.", "Thanks", "Bye"),
    said("2 * 3 =", "6", system="You compute."),
]


def write(folder: Path) -> Path:
    """A random model, a tokenizer of bytes, and a chat template that marks what to learn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    kit.tiny_hf_folder(folder, vocab_size=len(letters) + len(SPECIAL))
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    settings |= {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def rows_of(folder: str) -> list[Demonstration]:
    tokenizer, data = load_tokenizer(folder), DataConfig(prompt_field="messages")
    found = [conversations.demonstrations({"messages": row}, data, tokenizer) for row in ROWS]
    return [only for (only,) in map(list, found)]


def summary(gradient: Tensor) -> list[float]:
    flat = gradient.double().flatten()
    return [flat.norm().item(), (flat * torch.arange(len(flat)).double().cos()).sum().item()]


def one_update(rank: int, folder: str) -> dict[str, Any]:
    """Rows, loss and gradients of an update, as tools/studies/peers/trl_sft.py reports them."""
    from megatron.core.distributed import finalize_model_grads

    from tests.ranks import learner_ranks

    rows = rows_of(folder)
    learner = learner_ranks.make({}, folder, temperature=1.0)
    learner.accumulate(batch_of(rows), nll)
    n = sum(int(row.learn.sum()) for row in rows)
    finalize_model_grads(learner._models)
    weights = [p.detach().clone() for p in learner._parameters()]
    for p in learner._parameters():  # export knows how to put parameters together
        p.data.copy_(p.main_grad / n)
    gradients = {name: summary(g) for name, g in learner.export()}
    for p, value in zip(learner._parameters(), weights, strict=True):
        p.data.copy_(value)
    loss = learner.apply(float(n))["actor/loss"]
    learner.close()
    listed = [
        [
            [*row.prompt.tolist(), *row.response.tolist()],
            [0] * len(row.prompt) + row.learn.astype(int).tolist(),
        ]
        for row in rows
    ]
    return {"loss": loss, "rows": sorted(listed), "gradients": gradients}
