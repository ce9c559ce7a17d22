"""A real SGLang server as teacher, against the same model from its folder."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from rlcore.config.schema import TeacherConfig
from rlcore.rollout.sglang_engine import server as sglang_server
from rlcore.rollout.transport import free_port
from rlcore.teacher.model import TeacherModel
from rlcore.teacher.scores import TeacherRow
from rlcore.teacher.server import TeacherServer
from tests import kit

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: bash tools/setup.sh --sglang",
    ),
]
START_S = 240
STAND_INS = Path(sglang_server.__file__).with_name("cpu")
VOCAB = kit.tiny_config("qwen3")["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.tiny_hf_folder(tmp_path_factory.mktemp("teacher") / "m")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Address of `sglang.launch_server` with the model, on the CPU."""
    port = free_port()
    keys = {
        "--model-path": folder,
        "--port": port,
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--dtype": "float32",
        "--max-total-tokens": 4096,
        "--log-level": "error",
    }
    words = [str(word) for pair in keys.items() for word in pair]
    flags = "--skip-tokenizer-init", "--skip-server-warmup", "--disable-overlap-schedule"
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STAND_INS)}
    started = subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", *words, *flags], env=env
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert started.poll() is None and time.monotonic() < end, "the server did not start"
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        if started.poll() is None:
            for process in (*psutil.Process(started.pid).children(recursive=True), started):
                process.kill()
            started.wait()


@pytest.mark.parametrize("top_k", [0, 5])
def test_sglang_gives_the_log_probs_of_the_folder(folder: Path, address: str, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in (2, 9, 40):
        mask = torch.arange(length) >= length // 2
        rows.append(TeacherRow(torch.randint(0, VOCAB, (length,), generator=generator), mask))
    here = TeacherModel(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        temperature=1.0,
        top_k=top_k,
        batch_tokens=1000,
    )
    with here.loaded():
        want = here.score(rows)
    here.close()
    there = TeacherServer(f"{address}/generate", TeacherConfig(), top_k=top_k)
    for _ in range(2):  # the second time a part of the prompt is in SGLang's cache
        for ours, theirs in zip(there.score(rows), want, strict=True):
            assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
            assert torch.allclose(ours.top_log_probs, theirs.top_log_probs, atol=1e-4)
            assert torch.equal(ours.top_ids, theirs.top_ids)
    there.close()
