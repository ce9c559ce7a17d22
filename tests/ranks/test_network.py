"""rlcore/utils/NETWORK.md lists every socket on which a run listens."""

import json
from pathlib import Path

import psutil
import pytest

from rlcore.cli import judge
from rlcore.cli import mux as mux_cli
from rlcore.data import label_task
from rlcore.hf.tokenizer import make_char_tokenizer
from rlcore.rollout.transport import free_port
from tests import kit, runs
from tests.mux_cluster import Up, needs_redis
from tests.sockets import of_page

pytestmark = pytest.mark.ranks(2)

ENV = "--env", "latency", "--env.turns", 2, "--env.mean_s", 0.1, "--env.max_turn_tokens", 4
PROMETHEUS, HISTORY = "--log.prometheus_port", "history drafts"


class Runs:
    """A step of a run in each mode, and what its ranks and their children listen on."""

    def __init__(self, folder: Path):
        self.folder, self.ranks, self.when = folder, {}, {}
        model = runs.tiny_model(folder / "model")
        brief = "--run.steps", 1, "--eval.no_at_start", "--eval.no_at_end"
        brief = *brief, "--checkpoint.no_at_end", "--checkpoint.no_export_hf"
        self.jobs: list[runs.Job] = []

        def job(name: str, ranks: int, *keys: object, when: str = "") -> None:
            argv = runs.arguments(model, folder / "runs", name, *brief, *keys)
            within = ["tests.sockets:watched", str(folder / name)]
            self.jobs.append({"name": name, "argv": argv, "ranks": ranks, "within": within})
            several = ("several ranks", "no torchrun") if ranks > 1 else ()
            self.ranks[name], self.when[name] = ranks, (*several, when)

        job("alone", 1, PROMETHEUS, free_port(), when=PROMETHEUS)
        job("env", 1, *ENV)
        job("judge", 1, *judged(folder))
        job("sync", 2, "--rollout.draft", "history_reward", when=HISTORY)
        job("stream", 2, "--mode", "stream")
        job("async", 2, "--mode", "async", "--cluster.rollout_ranks", 1)
        self.gang = runs.run(2, self.jobs, folder / "gang")


def judged(folder: Path) -> list[object]:
    path = kit.tiny_hf_folder(folder / "judge", vocab_size=len(label_task.VOCAB))
    make_char_tokenizer(path, label_task.CHARS)
    (path / "rubric.jinja").write_text(judge.RUBRIC)
    keys = {"model": path, "rubric": path / "rubric.jinja", "good": "*", "bad": "-"}
    words = [word for k, v in keys.items() for word in (f"--reward.{k}", v)]
    return ["--reward", "judge", "--reward.dtype", "float32", *words]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("network"))


@pytest.mark.parametrize("name", ["alone", "env", "judge", "sync", "stream", "async"])
def test_a_run_listens_on_the_sockets_of_the_page_and_on_no_other(done: Runs, name: str) -> None:
    done.gang.check(name, done.ranks[name])
    for rank in range(done.ranks[name]):
        found = json.loads((done.folder / name / f"{rank}.json").read_text())
        expected = of_page(f"rank {rank}", *done.when[name])
        assert found["sockets"] == {f"{s}, rank {rank}": int(n) for s, n in expected.items()}
        assert found["addresses"] == ["127.0.0.1"]


@needs_redis
def test_a_mux_listens_on_redis_alone(tmp_path: Path) -> None:
    up = Up(tmp_path / "mux", 1, 1)
    try:
        found = {
            name: [
                c.laddr
                for c in psutil.Process(pid).net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            ]
            for name, pid in up.about["pids"].items()
        }
    finally:
        assert mux_cli.main(["down", "--dir", str(up.folder)]) == 0
    assert [ip for ip, _ in found.pop("redis")] == ["127.0.0.1"] * int(
        of_page("Redis", "mux up")["Redis"]
    )
    assert list(found.values()) == [[]]
