"""What the ranks of test_routing_replay.py run."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlcore.mcore.learner import MegatronLearner
from rlcore.mcore.routing import UNKNOWN
from rlcore.tensors import Batch
from tests import kit
from tests.ranks import learner_ranks as ranks
from tests.ranks.sizes import LENGTHS


def routes_of(batch: Batch, layers: int, experts: int, k: int, seed: int = 7) -> Tensor:
    """Return random experts of every token. The last token of a row has none, and common prefixes
    of rows have the same."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch.num_tokens, layers, experts, generator=g)
    routes = scores.topk(k).indices.flatten(1).to(torch.int16)
    each = routes.split(LENGTHS)
    for row, (other, count) in ranks.COMMON.items():
        each[row][:count] = each[other][:count]
    for row in each:
        row[-1] = UNKNOWN
    return routes


def given(learner: MegatronLearner, number: int) -> Batch:
    """Return the rows of update `number` with random routes."""
    batch, hf = ranks.rows(number), learner.hf
    routes = routes_of(batch, hf.num_layers, hf.num_experts, hf.experts_per_token)
    return batch.with_(routes=routes)


def observe(learner: MegatronLearner) -> dict[str, Any]:
    """Return log-probs and routes without and with replay, and the result of two updates with
    replay."""
    found: dict[str, Any] = {}
    mine = ranks.mine(learner, given(learner, 0))
    found["rows"] = list(range(learner.layout.dp_rank, 12, learner.layout.dp))
    found["own logp"], found["own"] = learner.logprobs_and_routes(mine.with_(routes=None))
    found["logp"], found["routes"] = learner.logprobs_and_routes(mine)
    found["given"] = mine.routes
    for number in range(2):
        batch = given(learner, number)
        learner.accumulate(ranks.mine(learner, batch), ranks.Loss())
        metrics = ranks.apply(learner, batch)
        found |= {f"{name} {number}": value for name, value in metrics.items()}
    found["weights"] = kit.state(learner.export())
    return found


def replayed(rank: int, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `observe` finds under every layout."""
    found = {}
    for name, layout in cases.items():
        learner = ranks.make(layout, arch="qwen3_moe", replays_routing=True)
        found[name] = observe(learner)
        learner.close()
    return found


def own_routes(rank: int, arch: str) -> dict[str, Any]:
    """Run an update without replay, and one that replays the routers' own choices."""
    found = {}
    for name in ("without", "with"):
        learner = ranks.make({}, arch=arch, replays_routing=True)
        batch = ranks.rows(0)
        if name == "with":
            batch = batch.with_(routes=learner.logprobs_and_routes(batch)[1])
        learner.accumulate(batch, ranks.Loss())
        found[name] = ranks.apply(learner, batch)
        found[f"{name} weights"] = kit.state(learner.export())
        learner.close()
    return found
