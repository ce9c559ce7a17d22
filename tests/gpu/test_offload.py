"""Optimizer states in host memory on a GPU, bit by bit."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.mcore import adam
from tests import kit
from tests.gpu import side
from tests.ranks import learner_ranks as ranks

pytestmark = [pytest.mark.gpu, side.needs_gpu]

OPTIMIZER = {"offload_optimizer": True}


def observed(settings: dict[str, Any], steps: int = 3, **case: Any) -> dict[str, Any]:
    with side.learner(settings, **case) as learner:
        return ranks.observe(learner, steps)


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    kit.assert_bitwise(found.pop("weights"), want.pop("weights"))
    kit.assert_bitwise({"logp": found.pop("logp")}, {"logp": want.pop("logp")})
    assert found == want


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_equal_those_of_states_on_the_gpu(
    dtype: str, distributed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)  # about twenty chunks
    plain = {"distributed_optimizer": distributed, "weight_decay": 0.1}
    assert_same(observed(plain | OPTIMIZER, dtype=dtype), observed(plain, dtype=dtype))


def test_a_checkpoint_of_states_in_host_memory_resumes_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "CHUNK_BYTES", 4096)
    with side.learner(OPTIMIZER, dtype="bfloat16") as learner:
        ranks.step(learner, 0)
        learner.save_async(tmp_path / "saved").result()
        want = ranks.step(learner, 1)
        weights = kit.state(learner.export())
    for then in (OPTIMIZER, {}):
        with side.learner(then, dtype="bfloat16") as other:
            other.load(tmp_path / "saved")
            assert ranks.step(other, 1) == want
            kit.assert_bitwise(kit.state(other.export()), weights)
