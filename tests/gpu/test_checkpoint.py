"""Checkpoints of a learner on a GPU, and from the CPU to the GPU."""

from pathlib import Path
from typing import Any

import pytest

from tests import kit
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "plain": {"layout": {}},
    "distributed": {"layout": {"distributed_optimizer": True}},
    "bfloat16": {"layout": {}, "dtype": "bfloat16"},
    "bfloat16 distributed": {"layout": {"distributed_optimizer": True}, "dtype": "bfloat16"},
    "experts": {
        "layout": {"distributed_optimizer": True},
        "arch": "qwen3_moe",
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_loaded_bit_by_bit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with side.learner(**case) as learner:
        for number in range(2):
            ranks.step(learner, number)
        learner.save(tmp_path / "c")
        saved, logp = side.state(learner), learner.logprobs(ranks.rows(0))
        figures, after = ranks.step(learner, 2), side.state(learner)
    with side.learner(**case) as learner:
        ranks.step(learner, 7)
        learner.load(tmp_path / "c")
        assert learner.version == 2
        kit.assert_bitwise(side.state(learner), saved)
        assert (learner.logprobs(ranks.rows(0)) == logp).all()
        assert ranks.step(learner, 2) == figures
        kit.assert_bitwise(side.state(learner), after)


def test_an_asynchronous_save_is_of_the_state_before_further_updates(tmp_path: Path) -> None:
    case = CASES["bfloat16 distributed"]
    with side.learner(**case) as learner:
        for number in range(3):  # the second save takes the memory of the first
            ranks.step(learner, number)
            saved = side.state(learner)
            written = learner.save_async(tmp_path / str(number))
            if number < 2:
                written.result()
        figures, after = ranks.step(learner, 3), side.state(learner)
        assert written.result().checksums
    with side.learner(**case) as learner:
        learner.load(tmp_path / "2")
        kit.assert_bitwise(side.state(learner), saved)
        assert ranks.step(learner, 3) == figures
        kit.assert_bitwise(side.state(learner), after)


def test_a_learner_that_never_stepped_loads_too(tmp_path: Path) -> None:
    case = CASES["bfloat16 distributed"]
    with side.learner(**case) as learner:
        ranks.step(learner, 0)
        learner.save(tmp_path / "c")
        weights, figures = side.weights(learner), ranks.step(learner, 1)
    with side.learner(**case) as learner:
        learner.load(tmp_path / "c")
        kit.assert_bitwise(side.weights(learner), weights)
        assert ranks.step(learner, 1) == figures


@pytest.mark.parametrize("name", ["plain", "bfloat16 distributed"])
def test_a_checkpoint_of_the_cpu_goes_on_on_the_gpu(name: str, tmp_path: Path) -> None:
    cases = {name: CASES[name]}
    straight = side.on_cpu("ranks.learner_ranks:saved", folder=str(tmp_path), cases=cases)[name]
    cases = {name: CASES[name] | {"of": name}}
    again = ranks.resumed(0, str(tmp_path), cases)[name]
    assert again["version at load"] == 2
    limit = 2e-3 if name == "plain" else 5e-2
    for key in ("actor/grad_norm 2", "actor/grad_norm 3", "actor/entropy 2"):
        assert abs(again["metrics"][key] / straight["metrics"][key] - 1) < limit, key


@side.needs_te
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_the_local_layers_load_a_checkpoint_of_transformer_engines(
    arch: str, tmp_path: Path
) -> None:
    case = CASES["bfloat16 distributed"] | {"arch": arch}
    layout = case["layout"] | {"transformer_impl": "te"}
    with side.learner(**case | {"layout": layout}) as learner:
        ranks.step(learner, 0)
        learner.save(tmp_path / "c")
        saved = side.weights(learner)
    with side.learner(**case) as learner:
        learner.load(tmp_path / "c")
        kit.assert_bitwise(side.weights(learner), saved)
