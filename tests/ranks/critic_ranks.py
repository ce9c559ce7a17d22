"""What the ranks of test_critic.py run: the learner with a value head."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.mcore import bridge
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossOutput, ValueInputs
from tests import kit
from tests.ranks import learner_ranks as ranks

DIST = {"distributed_optimizer": True}
LEFT_OUT = -0.5
"""Tokens with this return or less are rejected."""


def loss(x: ValueInputs) -> LossOutput:
    """A clipped value loss, a term of whole sequences and tokens that it rejects."""
    clipped = x.value_old + (x.value - x.value_old).clamp(-0.3, 0.3)
    errors = [(v - x.returns).square() for v in (x.value, clipped)]
    sums = x.value.new_zeros(x.num_sequences).index_add(0, x.sequence, x.value * x.mask)
    return LossOutput(
        per_token=0.5 * errors[0].maximum(errors[1]) + 0.001 * sums[x.sequence].square(),
        metrics={
            "critic/vf_clipfrac": (errors[1] > errors[0] + 1e-5).float(),
            "critic/vpred_mean": x.value.detach(),
        },
        mask=x.returns > LEFT_OUT,
    )


def rows(number: int) -> Batch:
    """The samples of one update, the same on every rank."""
    batch = ranks.rows(number)
    g = torch.Generator().manual_seed(200 + number)
    returns = torch.randn(batch.num_tokens, generator=g)
    value_old = returns + 0.5 * torch.randn(batch.num_tokens, generator=g)
    return batch.with_(returns=returns, value_old=value_old)


def make(layout: Mapping[str, Any], **case: Any) -> MegatronLearner:
    """A critic of the tiny model, as new."""
    return ranks.make(layout, head="value", **case)


def head_of(critic: MegatronLearner) -> Tensor | None:
    """The value head's weights, on the ranks that have them."""
    every = {n: p for m in critic._models for n, p in m.module.named_parameters()}
    return every.get("output_layer.weight")


def set_head(critic: MegatronLearner) -> None:
    """Random weights, so that the trunk learns from the first update on."""
    head = head_of(critic)
    if head is not None:
        g = torch.Generator().manual_seed(11)
        head.data.copy_(0.2 * torch.randn(head.shape, generator=g))


def weights(critic: MegatronLearner) -> dict[str, Tensor]:
    """The trunk under Hugging Face names, and the head where it is."""
    trunk = replace(critic.hf, tie_word_embeddings=True)  # which is to say: no lm_head
    found = kit.state(bridge.export_hf(critic._models, trunk, critic.layout))
    head = head_of(critic)
    return found if head is None else found | {"head": head.detach().clone()}


def step(critic: MegatronLearner, number: int) -> dict[str, float]:
    """One update on the rows of this number."""
    batch = rows(number)
    critic.accumulate(ranks.mine(critic, batch), loss)
    return critic.apply(float(batch.mask.sum()))


def two_steps(critic: MegatronLearner, first: int) -> dict[str, Any]:
    """Two updates: their metrics and the weights after them."""
    metrics = {f"{k} {n}": v for n in (first, first + 1) for k, v in step(critic, n).items()}
    return {"metrics": metrics, "weights": weights(critic)}


def observe(**case: Any) -> dict[str, Any]:
    """Values as new and after three updates of this rank's rows; what the loss kept, metrics and
    weights."""
    critic = make(**case)
    batch = ranks.mine(critic, rows(0))
    found: dict[str, Any] = {"rows": list(range(critic.layout.dp_rank, 12, critic.layout.dp))}
    found["new"] = critic.values(batch)
    set_head(critic)
    found["start"] = weights(critic)
    for number in range(3):
        whole = rows(number)
        critic.accumulate(ranks.mine(critic, whole), loss)
        left = whole.mask & (whole.returns > LEFT_OUT)
        found[f"kept {number}"] = list(critic.kept())
        found[f"to keep {number}"] = [
            int(left.sum()),
            len(set(whole.sequence_index[left].tolist())),
        ]
        metrics = critic.apply(float(whole.mask.sum()))
        found |= {f"{k} {number}": v for k, v in metrics.items()}
    found["values"] = critic.values(batch)
    found["weights"] = weights(critic)
    critic.close()
    return found


def parity(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every case in turn: {name: {layout, arch}}."""
    return {name: observe(**case) for name, case in cases.items()}


# ---- actor and critic in one process


def together(layout: Mapping[str, Any], *, critic_first: bool) -> dict[str, Any]:
    """Each alone, then both, the reference in between; the one made first is closed first."""

    def actor() -> MegatronLearner:
        return ranks.make(layout, keep_reference=True)

    def critic() -> MegatronLearner:
        made = make(layout)
        set_head(made)
        return made

    def one(learner: MegatronLearner, number: int) -> dict[str, Any]:
        if learner.head == "lm":
            return ranks.step(learner, number) | kit.state(learner.export())
        return step(learner, number) | weights(learner)

    found: dict[str, Any] = {"alone": {}, "together": {}}
    makers = [critic, actor] if critic_first else [actor, critic]
    for maker in makers:
        learner = maker()
        found["alone"] |= {f"{maker.__name__} {n}": one(learner, n) for n in range(2)}
        learner.close()
    first, second = (maker() for maker in makers)
    names = [maker.__name__ for maker in makers]
    both = found["together"]
    both[f"{names[1]} 0"] = one(second, 0)
    both[f"{names[0]} 0"] = one(first, 0)
    acts, values = (second, first) if critic_first else (first, second)
    mine = ranks.mine(acts, rows(0))
    logp, value = acts.logprobs(mine), values.values(mine)
    with acts.reference():
        reference = [acts.logprobs(mine, "reference") for _ in range(2)]
    found["reference moved"] = [float((r - logp).abs().max()) for r in reference]
    found["same after"] = bool(
        torch.equal(acts.logprobs(mine), logp) and torch.equal(values.values(mine), value)
    )
    both[f"{names[0]} 1"] = one(first, 1)
    first.close()
    first.close()
    both[f"{names[1]} 1"] = one(second, 1)
    found["other layout"] = refusal({"cp": 2})
    second.close()
    return found


def refusal(layout: Mapping[str, Any]) -> str:
    """Why a critic of this layout is not made."""
    try:
        make(layout)
    except ValueError as error:
        return str(error)
    return ""


def checkpoints(folder: Path) -> dict[str, Any]:
    """Actor and critic side by side: two updates, save, two more, load, the same two again. Then
    the critic under other layouts."""
    layout = {"tp": 2} | DIST
    actor, critic = ranks.make(layout), make(layout)
    set_head(critic)
    for number in range(2):
        ranks.step(actor, number)
        step(critic, number)
    found: dict[str, Any] = {}
    actor.save(folder / "actor")
    critic.save(folder / "critic")
    for when in ("straight", "again"):
        found[when] = two_steps(critic, 2)
        found[f"{when} actor"] = ranks.two_more(actor)
        if when == "straight":
            actor.load(folder / "actor")
            critic.load(folder / "critic")
            found["versions"] = [actor.version, critic.version]
    actor.close()
    critic.close()
    for name, layout in {"pp2 vpp2": {"pp": 2, "vpp": 2}, "dp4": {}}.items():
        critic = make(layout | DIST)
        step(critic, 7)
        critic.load(folder / "critic")
        found[name] = two_steps(critic, 2)
        critic.close()
    return found


def gang(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All that four ranks run, in one start."""
    return {
        "parity": parity(cases),
        "tp2": together({"tp": 2} | DIST, critic_first=False),
        "pp2": together({"pp": 2} | DIST, critic_first=True),
        "checkpoints": checkpoints(Path(folder)),
    }


def alone(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One rank."""
    return parity(cases)
