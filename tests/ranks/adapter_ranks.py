"""What the ranks of test_adapter_updates.py run: a learner with adapters sends them to engines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcore.hf.config import HFConfig
from rlcore.sync.base_weights import BaseWeights
from rlcore.sync.channel import make_channel
from rlcore.sync.peers import Peers
from tests import kit
from tests.ranks import learner_ranks
from tests.ranks.sync_ranks import Recording

ROUTES: dict[str, Sequence[Sequence[int]]] = {"gather": (), "two_stage": ((0, 1), (2, 3))}


def sent(
    rank: int, folder: str, cases: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """{case route kind: figures, and the largest difference of what the engine got from the
    learner's export} after three updates, each of which changes the adapters."""
    hf = HFConfig.from_folder(folder)
    found: dict[str, dict[str, Any]] = {}
    for case, options in cases.items():
        learner = learner_ranks.make(options["layout"], folder=folder, lora=options["lora"])
        where = {"dtype": torch.float32, "device": torch.device("cpu")}
        base = BaseWeights(folder, hf, learner.lora, **where)
        for route, sites in ROUTES.items():
            for kind, given in (("merged", None), ("adapters", base)):
                channel = make_channel(
                    route,  # type: ignore[arg-type]
                    max_bytes=8192,
                    sites=sites,
                    peers=Peers(name=f"{case} {route} {kind}", timeout_s=60),
                    base=given,
                )
                engine = Recording(hf, dtype="float32", max_model_tokens=64)
                for version in (1, 2):
                    learner_ranks.step(learner, version)
                    figures = channel.update_weights(learner, engine, version)
                want = kit.state(learner.export())
                assert engine.came.keys() == want.keys() and engine.version == 2
                apart = max(float((engine.came[n] - want[n]).abs().max()) for n in want)
                start = kit.state(base.merged(kit.state(learner.export_adapters())))
                assert all(torch.allclose(start[n], want[n], atol=1e-6) for n in want)
                found[f"{case} {route} {kind}"] = figures | {"apart": apart}
        learner.close()
    return found
