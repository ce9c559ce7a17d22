"""The log-probs of verl and slime under the counter of `costs.py`, beside ours.

    python -m tests.pretend.peers rlcore
    python -m tests.pretend.peers slime DIR/slime/utils/ppo_utils.py
    python -m tests.pretend.peers verl DIR/verl/utils/megatron/tensor_parallel.py
    python -m tests.pretend.peers verl_entropy DIR/verl/utils/megatron/tensor_parallel.py

Logits of a micro-batch of recipes/grpo_32b.sh, in bf16, on one of four tensor-parallel ranks. Both
peers get them in float32 from Megatron's Float16Module. A function under torch.compile counts as
one launch that reads its arguments and writes its results.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rlcore.utils.gpus import GPUS
from tests import pretend
from tests.pretend import costs

TOKENS, VOCAB, TP = 8704, 152064, 4


def main(peer: str, path: str = "") -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    counter = costs.Counter(GPUS["H100"])

    def compiled(function: Any = None, **_: Any) -> Any:
        def run(*args: Any) -> Any:
            with _disable_current_modes():
                out = function(*args)
            counter.add("compiled", 0.0, sum(map(costs._size, costs._tensors((args, out)))))
            return out

        return run if function is not None else compiled_with

    def compiled_with(function: Any) -> Any:
        return compiled(function)

    torch.compile = compiled  # type: ignore[assignment]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    logits = torch.empty(
        TOKENS, VOCAB // TP, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
    begin = pretend.stats()
    pretend.reset_peak()
    with costs.stand_ins(counter), counter:
        log_probs = PEERS[peer](logits, tokens, path)
        loss = log_probs.sum()
        forward = counter.taken()
        loss.backward()
        backward = counter.taken()
    end = pretend.stats()
    print(f"{peer}: {(end['peak'] - begin['allocated']) / logits.nbytes:.2f} logits allocated")
    for name, work in (("forward", forward), ("backward", backward)):
        moved = sum(w["bytes"] for w in work.values() if w["kind"] != "collective")
        launches = sum(w["launches"] for w in work.values())
        print(f"{name}: {launches} launches, {moved / logits.nbytes:.1f} passes over the logits")


def ours(logits: Tensor, tokens: Tensor, path: str) -> Tensor:
    from rlcore.ops import logprob

    found = logprob.log_probs(
        logits, tokens, vocab_size=VOCAB, group=dist.group.WORLD, entropy_grad=False, in_place=True
    )
    return found.logp


def slime(logits: Tensor, tokens: Tensor, path: str) -> Tensor:
    function = _loaded(path)._VocabParallelLogProbEntropy
    return function.apply(logits.float(), tokens, None, dist.group.WORLD, True, False)[0]


def verl(logits: Tensor, tokens: Tensor, path: str) -> Tensor:
    return _verl(path).vocab_parallel_log_probs_from_logits(logits.float()[None], tokens[None])


def verl_entropy(logits: Tensor, tokens: Tensor, path: str) -> Tensor:
    """As its pass of old log-probs: with entropy, of a copy of the logits."""
    module, wide = _verl(path), logits.float()
    module.vocab_parallel_entropy(wide.clone()[None])
    return module.vocab_parallel_log_probs_from_logits(wide[None], tokens[None])


PEERS: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "rlcore": ours,
    "slime": slime,
    "verl": verl,
    "verl_entropy": verl_entropy,
}


def _verl(path: str) -> Any:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import cross_entropy

    import rlcore.mcore  # noqa: F401

    for module in (parallel_state, cross_entropy):
        for name, value in (("group", dist.group.WORLD), ("rank", 0), ("world_size", TP)):
            setattr(module, f"get_tensor_model_parallel_{name}", lambda *_, v=value, **__: v)
    return _loaded(path)


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("peer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if os.environ.get("RLCORE_PRETEND_CUDA") == "sizes":
        main(*sys.argv[1:])
    else:
        env = pretend.environment("sizes", dict(os.environ))
        command = [sys.executable, "-m", "tests.pretend.peers", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, cwd=pretend.ROOT, env=env).returncode)
