"""tools/bench_endpoint.py, in small."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--episodes", "3", "--turns", "2", "--words", "3", "--every-s", "0.01"]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "tools" / "bench_endpoint.py"
    spec = importlib.util.spec_from_file_location("bench_endpoint", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_endpoint"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_endpoint"]


def test_every_server_and_load_has_its_rows(tool, tmp_path, capsys):
    file = tmp_path / "out.json"
    assert tool.main([*SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {f"{kind} {load} {what}" for kind in ("whole", "stream") for load in ("full", "paced")
            for what in ("cpu", "p50", "p99", "rate")} | {"body"} == rows.keys()  # fmt: skip
    assert all(row["value"] >= 0 for row in found["rows"])
    assert rows["whole full p50"]["value"] <= rows["whole full p99"]["value"]
    keys = {"episodes": 3, "turns": 2, "words": 3, "every_s": 0.01, "seed": 0, "sglang": False}
    assert found["settings"] == keys
    assert "whole full p99" in capsys.readouterr().out


def test_an_episode_has_the_recorded_turns_token_by_token(tool, real_data):
    """The server of episodes gives the recorded texts and calls, and a client that sends them back
    goes on in the same row: no token is rendered again."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(tool.with_template(real_data / "tokenizer_qwen", Path(scratch) / "qwen"))
        a = tool.parse([*SMALL, "--tokenizer", folder])
        command = [sys.executable, tool.__file__, "--serve", "episode", *SMALL[:6], "--tokenizer"]
        server = subprocess.Popen([*command, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            port, keys, pids = json.loads(server.stdout.readline())
            assert len(keys) == 6 and pids == [server.pid]
            turns, sizes = tool.conversation(a)[2::2], []
            for body, turn in zip(tool.bodies(a, stream=False), turns, strict=True):
                found = httpx.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions",
                    content=body,
                    headers={"authorization": f"Bearer {keys[0]}"},
                    timeout=60,
                    trust_env=False,
                ).json()
                said = found["choices"][0]["message"]
                assert said["content"] == turn["content"]
                call, wanted = said["tool_calls"][0], turn["tool_calls"][0]
                assert call["function"]["name"] == wanted["function"]["name"]
                arguments = json.loads(call["function"]["arguments"])
                assert arguments == json.loads(wanted["function"]["arguments"])
                sizes.append(found["usage"])
        finally:
            server.stdin.close()
            server.wait(60)
    first, second = sizes
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["completion_tokens"]


def test_a_seed_has_its_texts_and_requests_grow(tool):
    def texts(seed: str) -> list[bytes]:
        return tool.bodies(tool.parse([*SMALL, "--seed", seed]), stream=False)

    assert texts("1") == texts("1") != texts("2")
    first, second = (json.loads(body)["messages"] for body in texts("1"))
    assert len(first) == 2 and second[:2] == first and len(second) == 4
