"""`rlcore sft` against TRL's SFTTrainer: the same rows, loss and gradients on one batch.

TRL's side is in sft_trl.json; `python -m tests.ranks.test_sft_trl` writes it anew, and the slow
test compares it with what TRL computes here.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests import kit
from tests.ranks import sft_ranks

GOLDEN = Path(__file__).with_name("sft_trl.json")


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["rows"] == theirs["rows"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, (norm, product) in theirs["gradients"].items():
        found = ours["gradients"][name]
        assert found[0] == pytest.approx(norm, rel=1e-5), name
        assert found[1] == pytest.approx(product, abs=1e-5 * norm), name


def of_trl(folder: Path) -> dict[str, Any]:
    """What TRL computes, in an environment of its own."""
    sys.path.insert(0, str(kit.ROOT / "tools" / "studies"))
    import bench_vs_trl

    settings = {"model": str(folder), "rows": sft_ranks.ROWS, "out": str(folder / "trl")}
    peer = kit.ROOT / "tools" / "studies" / "peers" / "trl_sft.py"
    done = subprocess.run(
        [bench_vs_trl.trl_python(1500.0), peer],
        input=json.dumps(settings),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.ranks(1)
def test_rows_loss_and_gradients_are_those_of_trl(tmp_path: Path) -> None:
    folder = sft_ranks.write(tmp_path)
    (ours,) = kit.run_ranks(1, "tests.ranks.sft_ranks:one_update", {"folder": str(folder)})
    close(ours, json.loads(GOLDEN.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_file_has_what_trl_computes(tmp_path: Path) -> None:
    close(of_trl(sft_ranks.write(tmp_path)), json.loads(GOLDEN.read_text()))


if __name__ == "__main__":
    with TemporaryDirectory() as name:
        GOLDEN.write_text(json.dumps(of_trl(sft_ranks.write(Path(name)))) + "\n")
