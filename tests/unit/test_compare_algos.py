"""tools/studies/compare_algos.py apart from the peers: cases and packing, rlcore's answers, the
comparison, the table. That the peers agree is what the tool itself shows, in
tools/results/compare_algos.json.
"""

import ast
import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore import algos
from rlcore.algos.base import KL, Estimator, Rejection

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "log_probs": "logp",
    "entropy": "entropy",
    "mask": "mask",
    "score": "score",
    "advantage": "advantage",
    "old_log_probs": "old",
    "rollout_log_probs": "sampler",
    "ref_log_probs": "ref",
}
"""Tensors of `algos.loss_of` and arrays of a case."""


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "studies" / "compare_algos.py"
    spec = importlib.util.spec_from_file_location("compare_algos", path)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def cases(tool):
    return {f"{kind}0": tool.algo_cases.make(kind, 0) for kind in tool.algo_cases.KINDS}


@pytest.fixture(scope="module")
def checks(tool):
    return [c for peer in tool.NAMES for c in tool.algo_checks.of(peer)]


# ---- cases and packing


def test_packed_tokens_are_prompt_then_response_row_by_row(tool):
    mask = np.array([[1, 0, 1, 0], [1, 0, 0, 0]])
    logp = np.array([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0]])
    arrays = {"mask": mask, "length": np.array([3, 1]), "logp": logp, "score": np.array([7.0, 8.0])}
    case = tool.algo_cases.Case(arrays, prompts=(2, 1))
    assert case.packed("logp", on_prompts=-5.0).tolist() == [-5, -5, 1, 2, 3, -5, 4]
    assert case.packed("score").tolist() == [7, 7, 7, 7, 7, 8, 8]
    assert case.mask.tolist() == [False, False, True, False, True, False, True]
    assert case.sequence.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_padded_undoes_packed_and_is_0_behind_the_end(tool, cases):
    for case in cases.values():
        logp = torch.from_numpy(case.arrays["logp"])
        inside = torch.arange(logp.shape[1]) < torch.from_numpy(case.arrays["length"])[:, None]
        found = case.padded(case.packed("logp", on_prompts=0.0))
        assert torch.equal(found, torch.where(inside, logp, 0.0))


def test_padded_refuses_what_stands_on_a_prompt(cases):
    with pytest.raises(AssertionError, match="prompt"):
        cases["near0"].padded(cases["near0"].packed("logp", on_prompts=1e-9))


def test_a_case_is_the_same_for_the_same_seed_only(tool, cases):
    again, other = tool.algo_cases.make("mixed", 0), tool.algo_cases.make("mixed", 1)
    assert np.array_equal(again.arrays["logp"], cases["mixed0"].arrays["logp"])
    assert not np.array_equal(other.arrays["score"], cases["mixed0"].arrays["score"])


def test_cases_have_what_the_docstring_says(tool, cases):
    for name, case in cases.items():
        a = case.arrays
        mask = a["mask"].astype(bool)
        ratio, mismatch = (a["logp"] - a["old"])[mask], (a["old"] - a["sampler"])[mask]
        advantage, tokens = a["advantage"][mask], mask.sum(1)
        assert mask.sum() == tool.algo_cases.TRAINED and len(mask) == tool.algo_cases.RESPONSES
        assert (tokens == 0).sum() == (name == "masked0")
        assert tokens.max() > tokens.min() and (a["length"] > tokens).any()
        assert (advantage > 0).any() and (advantage < 0).any() and (a["score"] > 0).any()
        assert a["score"][1] == a["score"][2] and (a["group"][1:3] == 1).all()
        assert (a["group"] == 0).sum() == 1
        assert (a["advantage"] == a["response_advantage"][:, None]).all() == (name != "varied0")
        assert np.abs(ratio).min() < 1e-5 or name == "far0"
        assert (mismatch == 0).any()
        if name == "near0":
            assert np.abs(ratio).max() < 0.2
        else:
            assert ratio.max() > np.log(1.28) and ratio.min() < np.log(0.8)
            assert mismatch.max() > np.log(2.0) and mismatch.min() < -np.log(2.0)
        if name in ("varied0", "far0"):  # the dual clip has something to do
            assert (ratio[advantage < 0] > np.log(3.0)).any()
        assert (np.abs(ratio).max() > 20) == (np.abs(mismatch).max() > 20) == (name == "far0")


def test_the_reward_of_a_response_stands_on_its_last_trained_token(cases):
    for name, case in cases.items():
        a = case.arrays
        rows, places = a["token_reward"].nonzero()
        assert np.allclose(a["token_reward"].sum(1), a["score"])
        for row, place in zip(rows, places, strict=True):
            trained = a["mask"][row].nonzero()[0]
            assert place == (trained[-1] if len(trained) else 2), name


# ---- rlcore's answers


def test_the_loss_is_the_mean_over_trained_tokens_and_its_gradient_is_padded(tool, cases):
    case = cases["masked0"]
    found = tool.algo_cases.loss("gpg", rollout_is="none")(case)
    a = case.arrays
    assert torch.allclose(
        found["loss"], torch.tensor(-(a["advantage"] * a["logp"] * a["mask"]).sum() / 65)
    )
    expected = torch.from_numpy(-a["advantage"] * a["mask"] / 65)
    assert torch.allclose(found["d_logp"], expected, rtol=1e-14, atol=0)
    assert not found["d_entropy"].any()


def test_a_rejected_token_leaves_the_denominator_of_the_answer(tool, cases):
    case, rule = cases["mixed0"], {"rollout_rs": ("token_k2",), "rollout_rs_threshold": ("0.1",)}
    found = tool.algo_cases.loss("gpg", rollout_is="none", **rule)(case)
    a = case.arrays
    kept = a["mask"] * ((a["old"] - a["sampler"]) ** 2 / 2 <= 0.1)
    assert 0 < kept.sum() < 65
    assert float(found["loss"]) == pytest.approx(
        -(a["advantage"] * a["logp"] * kept).sum() / kept.sum(), rel=1e-13
    )


def test_every_row_has_a_finite_answer_in_float64(checks, cases):
    for c in checks:
        found = c.ours(cases[f"{c.cases[0]}0"])
        for name, value in found.items():
            assert value.isfinite().all(), (c.name, c.setting, name)
            if not name.startswith("metric "):
                assert value.dtype == torch.float64, (c.name, c.setting, name)


def test_padded_rows_give_every_loss_of_the_comparison(checks, cases, monkeypatch):
    """The ten lines of a notebook; the answers come from the same rows, packed behind prompts."""
    asked, of_packed = [], algos.loss_of
    monkeypatch.setattr(
        algos, "loss_of", lambda x, *a, **s: asked.append((a, s)) or of_packed(x, *a, **s)
    )
    for c in checks:
        for case in (cases[f"{kind}0"] for kind in c.cases):
            asked.clear()
            found = c.ours(case)
            for (algo,), settings in asked if "loss" in found else ():
                rows = {n: torch.tensor(case.arrays[array]) for n, array in ROWS.items()}
                leaves = [rows[n].requires_grad_() for n in ("log_probs", "entropy")]
                out = of_packed(rows, algo, **settings)
                grads = torch.autograd.grad(out.loss, leaves, allow_unused=True)
                for name, value in zip(
                    ("loss", "d_logp", "d_entropy"), (out.loss, *grads), strict=True
                ):
                    value = torch.zeros_like(found[name]) if value is None else value
                    torch.testing.assert_close(value, found[name], rtol=1e-12, atol=1e-14)
    assert sum("loss" in c.ours(cases[f"{c.cases[0]}0"]) for c in checks) > 100


# ---- the rows


def test_every_loss_estimator_divergence_and_rejection_has_a_row(checks):
    rows = {c.name for c in checks}
    assert set(algos.NAMES) - {"opd", "gkd"} <= rows  # test_gkd.py compares these
    alone = {"none", "maxrl"}  # the peer of maxrl is a fork of verl, on no package index
    assert {f"advantage/{name}" for name in set(Estimator.__args__) - alone} <= rows
    assert {f"kl/{name}" for name in KL.__args__} <= rows
    rules = {c.told.get("rollout_rs") for c in checks if c.name == "correction"}
    assert set(Rejection.__args__) <= rules


def test_every_row_asks_for_a_function_of_the_peer_with_settings_that_travel_as_json(tool, checks):
    for c in checks:
        tree = ast.parse((ROOT / "tools" / "studies" / "peers" / f"{c.peer}_algos.py").read_text())
        functions = {n.name: n.args for n in tree.body if isinstance(n, ast.FunctionDef)}
        named = {a.arg for a in functions[c.ask].args}
        assert functions[c.ask].kwarg or set(c.told) <= named, (c.name, c.setting)
        assert "Infinity" not in json.dumps(c.told)
        assert set(c.cases) <= set(tool.algo_cases.KINDS)


def test_rows_are_told_apart_by_their_names(checks):
    named = [(c.peer, c.name, c.setting, c.function, bool(c.known)) for c in checks]
    assert len(set(named)) == len(named)


# ---- the comparison and the table


def test_a_difference_is_taken_by_the_largest_entry(tool):
    ours, theirs = torch.tensor([1.0, 4.0, 0.0]), torch.tensor([1.0, 5.0, 0.5])
    assert tool.relative(ours, theirs) == pytest.approx(0.2)
    assert tool.relative(torch.zeros(3), torch.zeros(3)) == 0.0
    assert tool.relative(torch.tensor([float("nan")]), torch.tensor([float("nan")])) == np.inf
    assert tool.relative(torch.zeros(3), torch.zeros(2)) == np.inf


def check(tool, **changes):
    given = {"peer": "verl", "name": "grpo", "function": "f", "ask": "policy_loss", "told": {}}
    return tool.algo_checks.Check(**(given | {"ours": lambda case: {}} | changes))


def answer(loss, grad, **metrics):
    given = {"loss": loss, "d_logp": grad} | {f"metric {n}": v for n, v in metrics.items()}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}


def test_a_row_takes_the_worst_case_of_loss_and_gradient(tool):
    ours = {"near0": answer(1.0, [1.0, 2.0]), "near1": answer(2.0, [1.0, 2.0])}
    theirs = {"near0": answer(1.0, [1.0, 2.5]), "near1": answer(2.0, [1.0, 2.0])}
    row = tool.compare(check(tool), ours, theirs)
    assert row["difference"] == {"value": 0.0, "gradient": pytest.approx(0.2)}
    assert row["verdict"] == "DIFFERS" and row["must_agree"] and row["cases"] == 2
    assert row["value"] == pytest.approx(0.2) and row["ratio"] == pytest.approx(2e9)


def test_a_known_difference_need_not_agree_and_says_why(tool):
    row = tool.compare(
        check(tool, known="they clamp"),
        {"near0": answer(1.0, [1.0])},
        {"near0": answer(2.0, [1.0])},
    )
    assert row["verdict"] == "known" and row["note"] == "they clamp" and not row["must_agree"]
    same = {"near0": answer(1.0, [1.0])}
    assert tool.compare(check(tool, known="they clamp"), same, same)["verdict"] == "same"


def test_a_gradient_that_one_side_does_not_know_is_0(tool):
    ours, theirs = {"near0": answer(1.0, [0.0, 0.0])}, {"near0": answer(1.0, [0.0, 0.0])}
    ours["near0"]["d_entropy"] = torch.zeros(2)
    assert tool.compare(check(tool), ours, theirs)["verdict"] == "same"
    ours["near0"]["d_entropy"] = torch.tensor([0.0, 1e-3])
    assert tool.compare(check(tool), ours, theirs)["verdict"] == "DIFFERS"


def test_figures_have_a_tolerance_of_their_own_and_may_be_all_of_a_row(tool):
    ours, theirs = {"near0": answer(1.0, [1.0], kl=1.0)}, {"near0": answer(3.0, [1.0], kl=1 + 1e-7)}
    row = tool.compare(check(tool, metrics=("kl",), only_metrics=True), ours, theirs)
    assert row["verdict"] == "same" and row["metrics"]["kl"] == pytest.approx(1e-7)
    assert row["baseline"] == tool.METRIC_TOLERANCE
    row = tool.compare(check(tool, metrics=("kl",)), ours, theirs)
    assert row["verdict"] == "DIFFERS" and row["difference"]["value"] == pytest.approx(2 / 3)


def test_rows_have_the_fields_of_every_result(tool):
    same = {"near0": answer(1.0, [1.0])}
    row = tool.compare(check(tool, setting="x"), same, same)
    assert {"name", "value", "unit", "baseline", "ratio"} <= row.keys()
    assert row["name"] == "verl/grpo/x"
    assert json.loads(json.dumps(row)) == row


def test_the_table_names_functions_once_numbers_its_notes_and_counts(tool):
    one, other = {"near0": answer(1.0, [1.0])}, {"near0": answer(1.0, [2.0])}
    rows = [
        tool.compare(check(tool), one, one),
        tool.compare(check(tool, name="ppo", known="why"), one, other),
        tool.compare(check(tool, name="gpg", function="g"), one, other),
    ]
    lines = tool.table(rows, {"verl": {"verl": "0.9.1"}})
    text = "\n".join(lines)
    assert "verl (verl 0.9.1)" in text and text.count("\n  f\n") == 1 and "\n  g\n" in text
    assert any(line.startswith("ppo") and line.endswith("known (1)") for line in lines)
    assert any(line.startswith("gpg") and line.endswith("DIFFERS") for line in lines)
    assert "(1) why" in lines and lines[-1] == "same: 1, known: 1, DIFFERS: 1"


def test_a_folder_without_the_package_is_refused(tool, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tool.parse(["--roll-source", str(tmp_path)])
    assert f"--roll-source {tmp_path}: has no folder roll" in capsys.readouterr().err


def test_the_recorded_command_has_no_folder_of_this_machine(tool, tmp_path):
    (tmp_path / "roll").mkdir()
    words = ["--roll-source", str(tmp_path), "--seed", "1"]
    assert tool.named(tool.parse(words), words) == ["--roll-source", "DIR", "--seed", "1"]


def test_the_committed_result_agrees_where_it_must():
    result = json.loads((ROOT / "tools" / "results" / "compare_algos.json").read_text())
    assert set(result["versions"]) == {"verl", "trl", "areal", "roll", "slime"}
    assert {r["rlcore"] for r in result["rows"]} >= set(algos.NAMES) - {"opd", "gkd"}
    for row in result["rows"]:
        assert row["verdict"] == "same" or not row["must_agree"], row["name"]
        assert row["verdict"] != "known" or row["note"]


# ---- the peers' frame


def test_stubs_stand_for_modules_that_are_not_there_and_end_at_use(tool):
    peer = importlib.import_module("algo_peer")
    before = list(sys.meta_path)
    try:
        peer.stub("no_such_package")
        below = importlib.import_module("no_such_package.deeper")
        child = type("Child", (below.Base,), {})
        assert issubclass(child, peer.Empty)
        assert not hasattr(below, "__wrapped__")
        with pytest.raises(AttributeError):
            child().run()
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package_either")
    finally:
        sys.meta_path[:] = before
        for name in ("no_such_package.deeper", "no_such_package"):
            sys.modules.pop(name, None)


def test_jobs_go_through_files_and_come_back(tool, tmp_path, monkeypatch, capsys):
    """The frame of every peer script, with a peer that doubles the log-probs it is given."""
    peer = importlib.import_module("algo_peer")
    case = tool.algo_cases.make("near", 3)
    files = [tmp_path / f for f in ("jobs.json", "cases.npz", "answers.npz")]
    job = {"id": "0/near3", "case": "near3", "function": "double", "settings": {"by": 2.0}}
    files[0].write_text(json.dumps([job]))
    np.savez(files[1], **{f"near3/{k}": v for k, v in case.arrays.items()})
    monkeypatch.setattr(sys, "argv", ["peer", *map(str, files)])

    def double(c, by):
        logp = peer.leaf(c["logp"])
        return peer.with_gradients(by * logp.sum(), logp=logp)

    peer.serve({"double": double}, {"peer": "1.0"})
    assert json.loads(capsys.readouterr().out)["peer"] == "1.0"
    with np.load(files[2]) as found:
        assert found["0/near3/loss"] == pytest.approx(2 * case.arrays["logp"].sum())
        assert (found["0/near3/d_logp"] == 2.0).all()


def test_a_row_looks_at_its_own_kinds_of_cases(tool, cases):
    only = dataclasses.replace(check(tool), cases=("far", "near"))
    assert tool.chosen(only, cases) == ["near0", "far0"]
