"""Losses of routers and expert biases, under every layout: against transformers in float64, and
against one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kit, runs
from tests.ranks import balance_ranks
from tests.ranks import learner_ranks as ranks
from tests.ranks.balance_ranks import AUX, NORMALISER, RATE, STEPS, Z
from tests.ranks.sizes import LENGTHS

pytestmark = pytest.mark.ranks(4)

CASES: dict[str, dict[str, Any]] = kit.cases(
    {
        "dp4": {},
        "ep4": {"ep": 4},
        "ep2 without shared prefixes": {"ep": 2, "share_prefix": "false"},
        "tp2 ep2": {"tp": 2, "ep": 2},
        "tp2 ep2 full recompute": {"tp": 2, "ep": 2, "recompute": "full"},
        "pp2 ep2": {"pp": 2, "ep": 2},
        "pp2 vpp2": {"pp": 2, "vpp": 2},
        "cp2 pp2 full recompute": {"cp": 2, "pp": 2, "recompute": "full"},
        "cp2 tp2 ep2": {"cp": 2, "tp": 2, "ep": 2},
        "tp2": {"tp": 2},
        "etp2": {"etp": 2},
        "tp2 ep2 etp2": {"tp": 2, "ep": 2, "etp": 2},
    },
    "ep4",
    "tp2 ep2",
    "pp2 ep2",
)
FEW = "ep2 without shared prefixes", "tp2 ep2 full recompute", "cp2 pp2 full recompute"
TRAINED = {name: CASES[name] for name in FEW}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balance")
    for arch in balance_ranks.ARCHS.values():
        kit.tiny_hf_folder(folder / arch, arch)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    args = {"folder": str(folder), "cases": {"alone": {}}}
    return kit.run_ranks(1, "tests.ranks.balance_ranks:observed", args)[0]["alone"]


@pytest.fixture(scope="module")
def gang(folder: Path) -> list[dict[str, Any]]:
    args = {"folder": str(folder), "cases": CASES}
    return kit.run_ranks(4, "tests.ranks.balance_ranks:observed", args, timeout_s=240)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """The same by transformers, each sequence alone."""
    found = {name: reference(folder, name) for name in ("softmax", "sigmoid")}
    return found | {"router losses": reference(folder, "softmax", factor=0.0)["gradients"]}


def reference(folder: Path, routers: str, factor: float = 1.0) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder / balance_ranks.ARCHS[routers], dtype=torch.float64, experts_implementation="eager"
    )
    layers = model.model.layers
    seen: dict[int, list[Any]] = {}
    for number, layer in enumerate(layers):
        if hasattr(layer.mlp, "experts"):
            seen[number] = []
            _watch(layer.mlp, seen[number])
    batch, loss = ranks.rows(0), torch.zeros((), dtype=torch.float64)
    for i in range(batch.num_sequences):
        one = batch.select([i])
        logits = model(one.tokens[None]).logits[0]
        logp = logits[:-1].log_softmax(-1).gather(-1, one.tokens[1:, None]).squeeze(-1)
        loss = loss - factor * (logp * one.mask[1:] * one.weight[1:]).sum() / NORMALISER
    experts = layers[-1].mlp.gate.weight.size(0)
    given = balance_ranks.loads(len(layers), experts).double()
    counts, aux, z = {}, [], []
    for layer, calls in seen.items():
        logits, scores, chosen = (torch.cat(part) for part in zip(*calls, strict=True))
        assert len(logits) == sum(LENGTHS)
        f = given[layer] / given[layer].sum()
        loss = loss + AUX * experts * (f * scores.mean(0)).sum()
        loss = loss + Z * logits.logsumexp(-1).square().mean()
        counts[layer] = torch.bincount(chosen.flatten(), minlength=experts)
        own = counts[layer] / counts[layer].sum()
        aux.append(float(experts * (own * scores.detach().mean(0)).sum()))
        z.append(float(logits.detach().logsumexp(-1).square().mean()))
    loss.backward()
    table = torch.stack([*counts.values()])
    none = torch.zeros(experts, dtype=torch.int64)
    return {
        "gradients": kit.gradients(model),
        "counts": [counts.get(i, none).tolist() for i in range(len(layers))],
        "metrics": {
            "actor/expert_load_max": float((table.amax(1) / table.double().mean(1)).max()),
            "actor/unused_experts": float((table == 0).double().mean()),
            "actor/moe_aux_loss": sum(aux) / len(aux),
            "actor/moe_z_loss": sum(z) / len(z),
        },
    }


def _watch(block: Any, calls: list[Any]) -> None:
    """Append logits, scores of sum 1 and chosen experts to `calls` at each forward pass of a
    router, which computes in float64. Its biases are those of the learner."""

    def project(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden.reshape(-1, hidden.size(-1)), block.gate.weight)

    def softmax(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = project(hidden)
        scores = logits.softmax(-1)
        chosen = scores.topk(2).indices
        weights = scores.gather(1, chosen)
        calls.append((logits, scores, chosen))
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    if not hasattr(block, "route_tokens_to_experts"):
        block.gate.forward = softmax
        return
    bias, route = block.gate.e_score_correction_bias, block.route_tokens_to_experts
    bias.copy_(torch.arange(len(bias), dtype=torch.float32) / 10)

    def sigmoid(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, weights = route(logits)
        scores = logits.sigmoid()
        calls.append((logits, scores / scores.sum(-1, keepdim=True), chosen))
        return chosen, weights

    block.gate.forward, block.route_tokens_to_experts = project, sigmoid


@pytest.mark.parametrize("routers", ["softmax", "sigmoid"])
def test_one_rank_has_the_gradient_and_counts_of_transformers(
    alone: dict[str, Any], plain: dict[str, Any], routers: str
) -> None:
    _same(alone[routers], plain[routers])


@pytest.mark.parametrize("case", CASES)
def test_a_layout_has_the_gradient_and_counts_of_transformers(
    gang: list[dict[str, Any]], plain: dict[str, Any], case: str
) -> None:
    for rank in gang:
        for routers in ("softmax", "sigmoid"):
            _same(rank[case][routers], plain[routers])
        _same_gradients(rank[case]["router losses"], plain["router losses"])


@pytest.mark.parametrize("case", CASES)
def test_a_layout_has_the_gradient_of_one_rank(
    gang: list[dict[str, Any]], alone: dict[str, Any], case: str
) -> None:
    for rank in gang:
        for routers in ("softmax", "sigmoid"):
            ours, theirs = (found[routers]["gradients"] for found in (rank[case], alone))
            _same_gradients(ours, theirs, 1e-6)


def _same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert found["counts"] == want["counts"]
    metrics = {name: found["metrics"][name] for name in want["metrics"]}
    kit.assert_close_named(metrics, want["metrics"], rtol=1e-6, atol=0)
    _same_gradients(found["gradients"], want["gradients"])


def _same_gradients(ours: dict[str, Any], theirs: dict[str, Any], atol: float = 2e-6) -> None:
    """Every gradient differs by less than `atol` of its largest value. Angles in float32 limit it,
    where they are not the same."""
    ours, theirs = dict(ours), dict(theirs)
    assert len(theirs) > 20
    scale = {name: max(float(x.abs().max()), 1e-9) for name, x in theirs.items()}
    kit.assert_close_named(
        {name: x / scale[name] for name, x in ours.items()},
        {name: x / scale[name] for name, x in theirs.items()},
        rtol=0,
        atol=atol,
    )


# ---- expert biases


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    args = {"folder": str(tmp_path_factory.mktemp("alone")), "cases": {"alone": {}}}
    return kit.run_ranks(1, "tests.ranks.balance_ranks:trained", args)[0]["alone"]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    args = {"folder": str(tmp_path_factory.mktemp("gang")), "cases": TRAINED}
    return kit.run_ranks(4, "tests.ranks.balance_ranks:trained", args, timeout_s=400)


def test_biases_follow_the_counts_of_each_update(of_one_rank: dict[str, Any]) -> None:
    biases = {layer: torch.zeros(8) for layer in (1, 2, 3)}
    for number in range(STEPS):
        batch = ranks.rows(number)
        routes = balance_ranks.routes_of_all(batch, layers=4, experts=8, k=4, number=number)
        for layer, bias in biases.items():
            chosen = routes.view(-1, 4, 4)[:, layer].flatten()
            counts = torch.bincount(chosen.int(), minlength=8).double()
            bias += RATE * (counts.mean() - counts).sign().float()
    kit.assert_bitwise(of_one_rank["biases"], biases)
    assert max(bias.abs().max() for bias in biases.values()) > 2 * RATE


@pytest.mark.parametrize("case", TRAINED)
def test_biases_are_the_same_bits_under_every_layout(
    of_one_rank: dict[str, Any], of_ranks: list[dict[str, Any]], case: str
) -> None:
    for kind in ("", "resumed", "resumed from other"):
        found: dict[int, Any] = {}
        for rank in of_ranks:
            biases = (rank[case][kind] if kind else rank[case])["biases"]
            for layer, bias in biases.items():
                assert torch.equal(found.setdefault(layer, bias), bias)
        kit.assert_bitwise(found, of_one_rank["biases"])


def test_a_resumed_run_repeats_every_bit(
    of_one_rank: dict[str, Any], of_ranks: list[dict[str, Any]]
) -> None:
    for found in (of_one_rank, *(rank[case] for rank in of_ranks for case in TRAINED)):
        kit.assert_bitwise(found["resumed"]["weights"], found["weights"])


# ---- the whole program

SOME = "--eval.no_at_start", "--eval.no_at_end", "--checkpoint.no_export_hf"
SOME += "--checkpoint.no_at_end", "--train.samples_per_update", 8
LOSSES = "--train.moe_aux_loss_coef", 0.01, "--train.moe_z_loss_coef", 0.001


def test_a_run_balances_and_reports_loads(tmp_path: Path) -> None:
    sizes = kit.ARCHS["qwen3_moe"]
    model = runs.tiny_model(tmp_path / "model", **sizes, model_type="qwen3_moe")
    arms: dict[str, tuple[object, ...]] = {
        "losses": (*LOSSES, "--algo.loss_agg_mode", "seq-mean-token-mean"),
        "loads": ("--algo.routing_replay", "rollout"),
    }
    jobs: list[runs.Job] = []
    for name, keys in arms.items():
        argv = runs.arguments(model, tmp_path / "runs", name, *SOME, *keys)
        jobs.append({"name": name, "argv": argv, "ranks": 2})
    gang = runs.run(2, jobs, tmp_path / "gang")
    for name in arms:
        gang.check(name, 2)
        for row in runs.rows(tmp_path / "runs" / name).values():
            assert row["actor/updates"] > 1 and row["actor/skipped"] == 0
            assert 1 < row["actor/expert_load_max"] <= 4
            assert 0 <= row["actor/unused_experts"] < 1
            assert ("actor/moe_aux_loss" in row) == (name == "losses")
            if name == "losses":
                assert 1 <= row["actor/moe_aux_loss"] < 4 and row["actor/moe_z_loss"] > 0
