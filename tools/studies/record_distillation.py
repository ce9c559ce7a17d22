#!/usr/bin/env python
"""Record what TRL's and verl's own distillation losses give, for tests/unit/test_gkd.py.

    git clone https://github.com/huggingface/trl; git clone https://github.com/verl-project/verl
    python tools/studies/record_distillation.py --trl trl --verl verl --json FILE

The functions are taken from the files of the checkouts, which are not imported: TRL's
`generalized_jsd_loss`, with the whole vocabulary, and verl's `compute_forward_kl_topk` for FSDP.
"""

import __future__

import argparse
import ast
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS, VOCAB, TOP = 5, 17, 6
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def functions(file: Path, names: tuple[str, ...], **known: Any) -> list[Any]:
    """Return functions of a file, also of its classes, with `known` as their globals."""
    tree = ast.parse(file.read_text())
    found = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    space = {"torch": torch, "F": F, **known}
    flag = __future__.annotations.compiler_flag  # names of types stay text
    for name in names:
        found[name].decorator_list = []
        code = compile(ast.Module([found[name]], []), str(file), "exec", flag)
        exec(code, space)  # noqa: S102  # the code of the checkout
    return [space[name] for name in names]


def commit(folder: Path) -> str:
    """Return the commit of a checkout."""
    git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.check_output(git, text=True).strip()


def answer(loss: Tensor, logits: Tensor) -> dict[str, Any]:
    """Return losses and gradient of their sum."""
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    return {"loss": loss.tolist(), "gradient": grad.tolist()}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl", type=Path, required=True)
    parser.add_argument("--verl", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    (jsd,) = functions(args.trl / "trl/experimental/gkd/gkd_trainer.py", ("generalized_jsd_loss",))
    names = "kl_divergence", "compute_forward_kl_topk"
    _, top = functions(
        args.verl / "verl/trainer/distillation/fsdp/losses.py",
        names,
        get_ulysses_sequence_parallel_world_size=lambda: 1,
    )
    g = torch.Generator().manual_seed(args.seed)
    policy = (2 * torch.randn(TOKENS, VOCAB, generator=g, dtype=torch.float64)).requires_grad_()
    teacher = 2 * torch.randn(TOKENS, VOCAB, generator=g, dtype=torch.float64)
    record: dict[str, Any] = {
        "policy": policy.tolist(),
        "teacher": teacher.tolist(),
        "temperature": 0.7,
        "commits": {"trl": commit(args.trl), "verl": commit(args.verl)},
        "trl": {},
    }
    for beta in BETAS:
        loss = jsd(policy[None], teacher[None], beta=beta, temperature=0.7, reduction="none")
        record["trl"][str(beta)] = answer(loss[0].sum(-1), policy)
    likeliest = (teacher / 0.7).log_softmax(-1).topk(TOP)
    nested = [torch.nested.nested_tensor([x], layout=torch.jagged) for x in likeliest]
    settings = SimpleNamespace(log_prob_min_clamp=None)
    config = SimpleNamespace(distillation_loss=settings)
    found = top((policy / 0.7)[None], *nested, config, "thd")
    record["verl"] = answer(found["distillation_losses"][0], policy) | {
        "teacher_mass": found["teacher_mass"][0].tolist(),
        "policy_mass": found["student_mass"][0].tolist(),
    }
    args.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
