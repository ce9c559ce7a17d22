"""The peer of compare_algos.py that answers with AReaL's own losses, see algo_peer.py.

A fourth word on the command line is a folder with AReaL's source; without it the installed package
answers.
"""

import importlib.util
import os
import sys
from typing import Any

import algo_peer
import torch
from algo_peer import Answer, Case

# The functions that are compared need torch and a config class; the modules that they stand in
# import the rest of the framework.
algo_peer.stub(
    "einops",
    "hydra",
    "torchdata",
    "transformers",
    "uvloop",
    "areal.infra",
    "areal.utils.logging",
    "areal.utils.name_resolve",
    "areal.utils.pkg_version",
    "areal.utils.seqpack",
)


def source() -> str:
    """The folder of the package `areal`."""
    if len(sys.argv) > 4:
        return os.path.join(sys.argv[4], "areal")
    spec = importlib.util.find_spec("areal")
    assert spec is not None and spec.submodule_search_locations
    return spec.submodule_search_locations[0]


ROOT = source()
for name in ("", ".engine", ".engine.fsdp_utils", ".utils.functional"):
    algo_peer.folder("areal" + name, os.path.join(ROOT, *name.split(".")))

from areal.api.cli_args import RejectionSamplingConfig  # noqa: E402
from areal.utils.functional import functional  # noqa: E402
from areal.version import __version__  # noqa: E402


def ppo_actor(
    c: Case, rejection: dict[str, Any] | None, c_clip: float | None, level: str = "token"
) -> Answer:
    """The policy loss around the proximal policy, clipped at 0.2."""
    logp = algo_peer.leaf(c["logp"])
    loss, _ = functional.ppo_actor_loss_fn(
        logprobs=logp,
        proximal_logprobs=c["old"],
        old_logprobs=c["sampler"],
        advantages=c["advantage"],
        eps_clip=0.2,
        loss_mask=c["mask"].bool(),
        c_clip=c_clip,
        rejection_sampling=None if rejection is None else RejectionSamplingConfig(**rejection),
        importance_sampling_level=level,
    )
    return algo_peer.with_gradients(loss, logp=logp)


def sapo(c: Case, tau_pos: float, tau_neg: float) -> Answer:
    """The smooth gate, by token."""
    logp = algo_peer.leaf(c["logp"])
    loss, _ = functional.sapo_loss_fn(
        logp, c["old"], c["advantage"], tau_pos, tau_neg, c["mask"].bool()
    )
    return algo_peer.with_gradients(loss, logp=logp)


def overlong(c: Case, tokens: int, penalty: float, max_tokens: int) -> Answer:
    """What the length takes off the reward of a response."""
    data = {"rewards": c["score"], "input_ids": c["mask"], "loss_mask": c["mask"]}
    before = c["score"].clone()
    after = functional.reward_overlong_penalty(data, tokens, penalty, max_tokens)["rewards"]
    return {"values": before - after}


def critic(c: Case, clip: float) -> Answer:
    """The value loss; the function takes float32 only."""
    value = algo_peer.leaf(c["value"].float())
    loss, _ = functional.ppo_critic_loss_fn(
        value, c["value_old"].float(), c["returns"].float(), clip, c["mask"].bool()
    )
    found = algo_peer.with_gradients(loss, value=value)
    return {name: torch.as_tensor(x).double() for name, x in found.items()}


if __name__ == "__main__":
    functions = (ppo_actor, sapo, overlong, critic)
    algo_peer.serve({f.__name__: f for f in functions}, {"areal": __version__})
