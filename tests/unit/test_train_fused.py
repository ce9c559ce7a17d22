"""--train.fused_loss and --train.head_chunk_tokens through the whole program, in one process."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests import runs

TWO = (
    *("--checkpoint.no_at_end", "--checkpoint.no_export_hf", "--eval.no_at_start"),
    *("--eval.no_at_end", "--run.steps", 2, "--train.samples_per_update", 8),
)
# A sampler that differs from the learner, and every term.
TERMS: dict[str, tuple[Any, ...]] = {
    "grpo": (
        *("--algo", "grpo", "--rollout.quantize", "int8", "--algo.kl_coef", 0.1),
        *("--algo.entropy_coef", 0.01, "--algo.rollout_rs", "token_k1"),
        *("--algo.rollout_rs_threshold", 1.01, "--algo.rollout_is_threshold", 1.005),
    ),
    "ppo": ("--algo", "ppo", "--train.epochs", 2, "--algo.rollout_is_batch_normalize"),
}
FUSED = "--train.fused_loss"
CHUNKS = "--train.head_chunk_tokens", 32
WAYS: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "fused": (FUSED,),
    "chunks": CHUNKS,
    "fused_chunks": (FUSED, *CHUNKS),
}


CASES = [("grpo", "chunks"), ("grpo", "fused_chunks"), ("ppo", "fused")]


class Found:
    def __init__(self, folder: Path):
        self.folder = folder
        self.model = runs.tiny_model(folder / "model")
        jobs = [
            self.job(f"{algo}_{way}", *terms, *keys)
            for algo, terms in TERMS.items()
            for way, keys in WAYS.items()
            if (algo, way) in [(algo, "plain"), *CASES]
        ]
        jobs.append(self.job("refused", "--algo", "gspo", FUSED))
        self.gang = runs.run(1, jobs, folder / "gang", timeout_s=240)

    def job(self, name: str, *keys: object) -> runs.Job:
        argv = runs.arguments(self.model, self.folder / "runs", name, *TWO, *keys)
        return {"name": name, "argv": argv}

    def rows(self, name: str) -> list[dict[str, float]]:
        self.gang.check(name)
        found = runs.rows(self.folder / "runs" / name)
        return [runs.same(found[step]) for step in (1, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("fused"))


@pytest.mark.parametrize(("algo", "way"), CASES)
def test_metrics_have_the_same_names_and_values(found: Found, algo: str, way: str) -> None:
    """Values of the first step: two updates, the first with old log-probs of its own unless the
    recipe asks before. A token sampled in the second may hang on the last bit of a weight."""
    (want, later), (ours, ours_later) = found.rows(f"{algo}_plain"), found.rows(f"{algo}_{way}")
    assert ours.keys() == want.keys() and ours_later.keys() == later.keys()
    for name, value in want.items():
        assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert all(math.isfinite(value) for value in ours_later.values())


def test_the_runs_do_what_they_are_here_for(found: Found) -> None:
    row = found.rows("grpo_fused_chunks")[0]
    assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert row["rollout_corr/rollout_is_max"] == pytest.approx(1.005)
    assert row["actor/kl_loss"] >= 0 and row["actor/grad_norm"] > 0 == row["actor/skipped"]
    assert found.rows("ppo_fused")[0]["critic/grad_norm"] > 0


def test_an_algorithm_that_cannot_be_fused_ends_the_program_with_a_sentence(found: Found) -> None:
    assert found.gang.code("refused") not in (0, 99)
    text = found.gang.text("refused")
    assert "--train.fused_loss: loss gspo cannot be fused" in text
