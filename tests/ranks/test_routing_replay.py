"""`--algo.routing_replay`: experts that are given, under every layout, against one rank and against
transformers; and the whole program."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kit, runs
from tests.ranks import learner_ranks, routing_ranks
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

CASES: dict[str, dict[str, Any]] = kit.cases(
    {
        "ep4": {"ep": 4},
        "tp2 ep2": {"tp": 2, "ep": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "pp2 full recompute": {"pp": 2, "recompute": "full"},
        "cp2 tp2 ep2": {"cp": 2, "tp": 2, "ep": 2},
        "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
        "cp2 pp2 full recompute": {"cp": 2, "pp": 2, "recompute": "full"},
        "tp2 ep2 full recompute offloaded": {
            "tp": 2,
            "ep": 2,
            "recompute": "full",
            "offload_activations": True,
        },
    },
    "ep4",
    "pp2 vpp2",
)
REPLAYED = "tests.ranks.routing_ranks:replayed"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return kit.run_ranks(1, REPLAYED, {"cases": {"alone": {}}})[0]["alone"]


@pytest.fixture(scope="module")
def gang() -> list[dict[str, Any]]:
    return kit.run_ranks(4, REPLAYED, {"cases": CASES})


def test_the_given_experts_compute_every_token_whose_route_is_known(alone: dict[str, Any]) -> None:
    known = alone["given"][:, 0] >= 0
    assert 0 < (~known).sum() == len(LENGTHS)
    assert torch.equal(_sets(alone["routes"])[known], _sets(alone["given"])[known])
    assert (_sets(alone["own"]) != _sets(alone["given"])).any(-1)[known].float().mean() > 0.9
    assert (alone["logp"] - alone["own logp"]).abs().max() > 0.1
    assert alone["actor/rerouted 0"] > 0.8


@pytest.mark.parametrize("case", CASES)
def test_a_layout_replays_as_one_rank_does(
    alone: dict[str, Any], gang: list[dict[str, Any]], case: str
) -> None:
    for rank in gang:
        found = rank[case]
        for what in ("own logp", "logp"):
            rows = alone[what].split(LENGTHS)
            ours = found[what].split([LENGTHS[r] for r in found["rows"]])
            theirs = {i: rows[r] for i, r in enumerate(found["rows"])}
            kit.assert_close_named(dict(enumerate(ours)), theirs, atol=1e-5)
        for what in ("own", "routes"):
            rows = alone[what].split(LENGTHS)
            theirs = torch.cat([rows[r] for r in found["rows"]])
            assert torch.equal(_sets(found[what]), _sets(theirs)), what
        names = [name for name in alone if name.startswith("actor/")]
        assert 0.8 < found["actor/rerouted 1"] < 1
        by_row = "actor/rerouted", "actor/shared_tokens"  # more ranks share fewer prefixes
        names = [name for name in names if not name.startswith(by_row)]
        ours, theirs = ({name: part[name] for name in names} for part in (found, alone))
        kit.assert_close_named(ours, theirs, rtol=1e-5, atol=1e-5)
        kit.assert_close_named(found["weights"], alone["weights"], rtol=1e-5, atol=1e-5)


def _sets(routes: torch.Tensor) -> torch.Tensor:
    """Return the two experts of each layer, sorted by id."""
    return routes.unflatten(1, (-1, 2)).sort(-1).values.flatten(1)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "deepseek_v3"])
def test_replaying_the_routers_own_choices_changes_no_bit(arch: str) -> None:
    (found,) = kit.run_ranks(1, "tests.ranks.routing_ranks:own_routes", {"arch": arch})
    assert found["with"].pop("actor/rerouted") == 0
    assert found["with"] == found["without"]
    kit.assert_bitwise(found["with weights"], found["without weights"])


def test_log_probs_with_given_experts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = kit.tiny_hf_folder(tmp_path / "m", "qwen3_moe")
    learner = learner_ranks.make(
        {"share_prefix": "false"}, str(folder), replays_routing=True, temperature=1.0
    )
    batch = routing_ranks.given(learner, 0)
    assert batch.routes is not None
    found, _ = learner.logprobs_and_routes(batch)
    learner.close()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i, ours in enumerate(found.split(LENGTHS)):
        one = batch.select([i])
        assert one.routes is not None
        routes = one.routes[:-1].long().unflatten(1, (-1, 2))
        for layer, block in enumerate(theirs.model.layers):
            block.mlp.gate.forward = _fixed(block.mlp.gate, routes[:, layer])
        with torch.no_grad():
            logits = theirs(one.tokens[None, :-1]).logits[0]
        want = logits.log_softmax(-1).gather(-1, one.tokens[1:, None]).squeeze(-1)
        assert torch.allclose(ours[1:], want, atol=1e-4), i


def _fixed(gate: Any, chosen: torch.Tensor) -> Any:
    """The forward of transformers' router, with experts that are given."""

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), gate.weight)
        weights = logits.softmax(-1).gather(1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    return forward


SOME = "--eval.no_at_start", "--eval.no_at_end", "--checkpoint.no_export_hf"
SOME += ("--checkpoint.no_at_end",)
SMALL = *SOME, "--train.samples_per_update", 8, "--train.lr", 3e-2
COARSE = *SOME, "--rollout.quantize", "int8", "--train.lr", 1e-3
ASYNC = "--mode", "async", "--cluster.rollout_ranks", 1, "--async.alpha", 1
ROLLOUT = "--algo.routing_replay", "rollout"
TURNS = "--env", "latency", "--env.turns", 2, "--env.mean_s", 0, "--env.std_s", 0
TURNS += "--env.max_turn_tokens", 8
ARMS: dict[str, tuple[object, ...]] = {
    "none": SMALL,
    "old": (*SMALL, "--algo.routing_replay", "old"),
    "coarse": COARSE,
    "coarse replayed": (*COARSE, *ROLLOUT),
    "drafts": (*COARSE, *ROLLOUT, "--rollout.draft", "ngram"),
    "turns": (*COARSE, *ROLLOUT, *TURNS),
}
APART: dict[str, tuple[object, ...]] = {
    "async": (*COARSE, *ASYNC, *ROLLOUT),
    "async in place": (*COARSE, *ASYNC, *ROLLOUT, "--async.weight_update", "in_place"),
    "dp2": (*COARSE, *ROLLOUT),
    "pp2": (*COARSE, *ROLLOUT, "--train.pp", 2),
    "tp2 etp2": (*COARSE, *ROLLOUT, "--train.tp", 2, "--train.etp", 2),
    "etp2": (*COARSE, *ROLLOUT, "--train.etp", 2),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, float]]]:
    """The metrics of some runs of a mixture of experts."""
    folder = tmp_path_factory.mktemp("replay")
    model = runs.tiny_model(folder / "model", **kit.ARCHS["qwen3_moe"], model_type="qwen3_moe")
    for ranks, arms in ((1, ARMS), (2, APART)):
        jobs: list[runs.Job] = []
        for name, keys in arms.items():
            argv = runs.arguments(model, folder / "runs", name, *keys)
            jobs.append({"name": name, "argv": argv, "ranks": ranks})
        gang = runs.run(ranks, jobs, folder / f"gang{ranks}")
        for name in arms:
            gang.check(name, ranks)
    return {name: runs.rows(folder / "runs" / name) for name in (*ARMS, *APART)}


def test_later_updates_replay_the_experts_of_the_first(rows: dict[str, Any]) -> None:
    """With a learning rate that moves routers, they would choose other experts."""
    for row in rows["old"].values():
        assert 0 < row["actor/rerouted"] < 1
    assert all("actor/rerouted" not in row for row in rows["none"].values())
    first, second = rows["none"][1], rows["old"][1]
    assert first["critic/score/mean"] == second["critic/score/mean"]  # the same samples
    assert first["actor/ppo_kl"] != second["actor/ppo_kl"]


def test_the_experts_of_a_coarse_sampler_bring_learner_and_sampler_together(
    rows: dict[str, Any],
) -> None:
    first, second = rows["coarse"][1], rows["coarse replayed"][1]
    assert first["critic/score/mean"] == second["critic/score/mean"]
    assert 0 < second["actor/rerouted"] < 1
    assert abs(second["rollout_corr/k3_kl"]) < 0.5 * abs(first["rollout_corr/k3_kl"])


@pytest.mark.parametrize("name", ["drafts", "turns", *APART])
def test_routes_come_to_the_learner_in_every_loop(rows: dict[str, Any], name: str) -> None:
    assert rows[name].keys() == {1, 2, 3, 4}
    for row in rows[name].values():
        assert 0 < row["actor/rerouted"] < 0.5 and row["actor/skipped"] == 0


def test_a_stage_replays_its_own_layers_of_samples_from_other_ranks(rows: dict[str, Any]) -> None:
    """A stage gets no other layers' routes (`StageLayers`)."""
    names = "critic/score/mean", "actor/rerouted", "rollout_corr/k3_kl", "rollout_corr/kl"
    ours, theirs = ({name: rows[arm][1][name] for name in names} for arm in ("pp2", "dp2"))
    kit.assert_close_named(ours, theirs, rtol=1e-4, atol=1e-6)
