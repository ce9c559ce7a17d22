"""`python -m rlcore judge --out FOLDER --seed N`: make a tiny judge for the task `label`.

The judge is a Qwen3 model of 0.1 M weights with a tokenizer of 34 characters. Its rubric shows the
answer beside the text after the response's last `>`. The judge is trained to tell whether the two
texts are equal. With `--steps 0` its weights stay random, which is enough to test all parts.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli import exits

if TYPE_CHECKING:  # importing torch would slow down the command line
    from torch import Tensor

GOOD, BAD, FILL, WIDTH = "*", "-", "+", 4
RUBRIC = (
    f'{{{{ answer[-{WIDTH}:].rjust({WIDTH}, "{FILL}") }}}};'
    f'{{{{ response.rpartition(">")[2][-{WIDTH}:].rjust({WIDTH}, "{FILL}") }}}}='
)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """Make a tiny judge model for the generated task `label`."""

    out: Path
    """Folder to which the judge and its rubric, rubric.jinja, are written."""
    seed: int = 0
    """Seed of weights and training data."""
    steps: int = 600
    """Maximum number of training steps; 0: keep the random weights."""
    rows: int = 256
    """Number of training rows per step."""
    lr: float = 3e-3
    """Learning rate after warm-up; it decays to a tenth."""
    target: float = 0.995
    """Training ends when this share of verdicts is correct on three fresh batches in a row."""


def main(argv: Sequence[str]) -> int:
    """Make the judge, unless its folder already has one. Training ends early if three batches in a
    row reach `--target`. Return 1 if training takes all `--steps` and a fresh batch is below
    `--target`, otherwise 0."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    import tyro

    cfg = tyro.cli(JudgeConfig, args=list(argv), prog="rlcore judge", use_underscores=True)
    if (cfg.out / "model.safetensors").is_file():
        print(f"{cfg.out} exists; choose another --out")
        return 0
    agreement, steps = make(cfg)
    print(f"judge: agrees with the exact rule on {agreement:.3f} after {steps} steps, in {cfg.out}")
    if cfg.steps and steps == cfg.steps and agreement < cfg.target:
        print(
            f"--target {cfg.target}: not reached within --steps {cfg.steps}; raise --steps or "
            "lower --target",
            file=sys.stderr,
        )
        return 1
    return 0


def make(cfg: JudgeConfig) -> tuple[float, int]:
    """Train the judge and write its folder. Return the share of correct verdicts on a fresh batch,
    and the number of training steps."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlcore.data import label_task
    from rlcore.hf.tokenizer import make_char_tokenizer

    torch.manual_seed(cfg.seed)
    tokenizer = make_char_tokenizer(cfg.out, label_task.CHARS)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(label_task.VOCAB),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            rope_theta=10000.0,  # type: ignore[call-arg]  # becomes rope_parameters
            initializer_range=0.05,
            tie_word_embeddings=True,
            eos_token_id=label_task.EOS,
            pad_token_id=label_task.PAD,
            use_cache=False,
        )
    )
    verdicts = torch.tensor([tokenizer.token_id(BAD), tokenizer.token_id(GOOD)])
    draw = random.Random(cfg.seed)

    def batch() -> tuple["Tensor", "Tensor"]:
        pairs = [_pair(draw) for _ in range(cfg.rows)]
        texts = [f"{a.rjust(WIDTH, FILL)};{b.rjust(WIDTH, FILL)}=" for a, b in pairs]
        same = torch.tensor([int(a == b) for a, b in pairs])
        return torch.tensor([tokenizer.encode(text) for text in texts]), same

    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 30) * (1 - 0.9 * i / max(cfg.steps, 1))
    )
    steps = good = 0
    while steps < cfg.steps and good < 3:
        ids, same = batch()
        logits = model(ids).logits[:, -1]
        agrees = (logits[:, verdicts].argmax(-1) == same).float().mean().item()
        good = good + 1 if agrees >= cfg.target else 0
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, verdicts[same]).backward()
        optimizer.step()
        warm.step()
        steps += 1
    with torch.no_grad():
        ids, same = batch()
        agreement = (model(ids).logits[:, -1][:, verdicts].argmax(-1) == same).float().mean()
    model.save_pretrained(cfg.out)
    (cfg.out / "rubric.jinja").write_text(RUBRIC)
    facts = {"agreement": agreement.item(), "steps": steps, "seed": cfg.seed}
    (cfg.out / "judge.json").write_text(json.dumps(facts) + "\n")
    return agreement.item(), steps


def _pair(draw: random.Random) -> tuple[str, str]:
    """Draw an answer and the end of a response: the same answer, the answer with one digit changed,
    another number, a part of the answer, or a text that is not a number."""
    answer = str(draw.randrange(10 ** draw.choice((1, 2, 2, 3))))
    kind = draw.choice(("same", "same", "digit", "digit", "number", "part", "junk"))
    if kind == "same":
        return answer, answer
    if kind == "digit":
        place = draw.randrange(len(answer))
        return answer, answer[:place] + draw.choice("0123456789") + answer[place + 1 :]
    if kind == "number":
        return answer, str(draw.randrange(10 ** draw.choice((1, 2, 3))))
    if kind == "part":
        return answer, draw.choice((answer[1:], answer[:-1], answer + draw.choice("0123456789")))
    return answer, "".join(draw.choice("0123456789+=;abcdef") for _ in range(draw.randrange(5)))
