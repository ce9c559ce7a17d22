"""What the ranks of test_balance.py run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlcore.hf.names import EXPERT_BIAS
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput
from tests import kit
from tests.ranks import learner_ranks as ranks
from tests.ranks.routing_ranks import routes_of

AUX, Z, RATE = 0.3, 0.01, 1e-3
NORMALISER = 50.0
"""Neither the number of tokens nor of trained tokens."""
STEPS = 20

ARCHS = {"softmax": "qwen3_moe", "sigmoid": "glm4_moe"}
"""Architectures by the score function of their routers."""


class Likelihood:
    """Negative log-likelihood, times `factor`."""

    needs_entropy_grad = False

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = factor

    def __call__(self, x: LossInputs) -> LossOutput:
        return LossOutput(per_token=-self._factor * x.log_probs, metrics={})


def loads(layers: int, experts: int) -> Tensor:
    """Return numbers of tokens of each expert, as of an earlier update: [layers, experts]."""
    return torch.randint(1, 90, (layers, experts), generator=torch.Generator().manual_seed(5))


def update(
    learner: MegatronLearner, batch: Batch, loss: Any, parts: int = 1
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Run an update that is skipped, so that nothing changes; return its metrics, and its gradients
    under the names of the weights."""
    mine = ranks.mine(learner, batch)
    learner.begin_update(mine.num_tokens, NORMALISER)
    for part in range(parts):
        learner.accumulate(mine.select(range(part, mine.num_sequences, parts)), loss)
    found: dict[str, Tensor] = {}

    def look(rate: float) -> float:
        weights = [(p, p.data) for p in learner._parameters()]
        for p, _ in weights:
            p.data = p.main_grad
        state = kit.state(learner.export())
        found.update({n: x for n, x in state.items() if not n.endswith(EXPERT_BIAS)})
        for p, data in weights:
            p.data = data
        return math.nan

    with mock.patch.object(learner, "_step", look):
        metrics = learner.apply(NORMALISER)
    return metrics, found


def make(
    layout: Mapping[str, Any], folder: str = "", arch: str = "qwen3_moe", **options: Any
) -> MegatronLearner:
    losses = {"moe_aux_loss_coef": AUX, "moe_z_loss_coef": Z}
    return ranks.make(losses | dict(layout), folder, arch, "float64", temperature=1.0, **options)


def with_unequal_loads(learner: MegatronLearner) -> MegatronLearner:
    """Let the learner continue after an update with unequal loads, and with unequal biases."""
    assert learner._balance is not None
    counts = loads(learner.hf.num_layers, learner.hf.num_experts)
    learner._balance.load([" ".join(map(str, row)) for row in counts.tolist()])
    for bias in learner._balance.biases():
        bias.copy_(torch.arange(len(bias)) / 10)
    return learner


def observe(layout: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return metrics, counts and gradients of an update with softmax and with sigmoids, of the
    models in `folder`."""
    found: dict[str, Any] = {}
    for name, arch in ARCHS.items():
        learner = with_unequal_loads(make(layout, f"{folder}/{arch}"))
        learner.logprobs(ranks.mine(learner, ranks.rows(1)))  # not counted
        metrics, gradients = update(learner, ranks.rows(0), Likelihood(), parts=2)
        assert learner._balance is not None
        counts = learner._balance._counts.tolist()
        found[name] = {"metrics": metrics, "gradients": gradients, "counts": counts}
        if name == "softmax":
            _, found["router losses"] = update(learner, ranks.rows(0), Likelihood(0.0))
        learner.close()
    return found


def observed(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `observe` finds under every layout."""
    return {name: observe(layout, folder) for name, layout in cases.items()}


def routes_of_all(batch: Batch, layers: int, experts: int, k: int, number: int) -> Tensor:
    """Return random experts of every token, for update `number`: [T, layers * k]."""
    routes = routes_of(batch, layers, experts, k, seed=number)
    return torch.where(routes < 0, torch.arange(k).repeat(layers).to(routes.dtype), routes)


def routed(learner: MegatronLearner, number: int) -> Batch:
    """Return the rows of update `number` with random routes."""
    batch, hf = ranks.rows(number), learner.hf
    sizes = hf.num_layers, hf.num_experts, hf.experts_per_token
    return batch.with_(routes=routes_of_all(batch, *sizes, number))


def train(learner: MegatronLearner, numbers: range) -> dict[str, Any]:
    """Make updates with replayed routes; return weights, and the biases of this rank's layers."""
    for number in numbers:
        batch = ranks.mine(learner, routed(learner, number))
        learner.begin_update(batch.num_tokens, NORMALISER)
        learner.accumulate(batch, Likelihood())
        learner.apply(NORMALISER)
    assert learner._balance is not None
    routers = learner._balance._routers
    return {
        "biases": {layer: router.expert_bias.clone() for layer, router in routers.items()},
        "weights": kit.state(learner.export()),
    }


def trained(rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Train with biases under every layout; and from a checkpoint of half of the updates, written
    under the same layout and under that of the case before."""
    found: dict[str, Any] = {}
    before = list(cases)[-1]
    options: dict[str, Any] = {"replays_routing": True, "arch": ARCHS["sigmoid"]}
    for name, layout in cases.items():
        learner = make(layout | {"moe_bias_update_rate": RATE}, **options)
        train(learner, range(STEPS // 2))
        learner.save(Path(folder) / name)
        found[name] = train(learner, range(STEPS // 2, STEPS))
        learner.close()
    for name, layout in cases.items():
        for kind, source in {"resumed": name, "resumed from other": before}.items():
            learner = make(layout | {"moe_bias_update_rate": RATE}, **options)
            learner.load(Path(folder) / source)
            found[name][kind] = train(learner, range(STEPS // 2, STEPS))
            learner.close()
        before = name
    return found
