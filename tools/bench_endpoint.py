"""Measure CPU time and latency of the endpoint of harnesses (`--env endpoint`).

    python tools/bench_endpoint.py --seed 0 --json FILE                           # two minutes
    python tools/bench_endpoint.py --seed 0 --tokenizer FOLDER --sglang --json FILE  # seven minutes

A server process answers `--episodes` clients at a time, each with its own connection and key. An
episode is a conversation with tools: every request has all earlier messages. The answers are
recorded turns that are returned at once, so that the server's own work is left.

- `whole`, `stream`: HTTP, keys and JSON. Tokens are neither rendered nor sampled.
- `episode` (with `--tokenizer`): all that an episode of `--env endpoint` takes, with the tokens of
  the recorded turns: chat template, tokenizer, rows of the episode, text and calls of the answer.
- `sglang` (with `--sglang`): SGLang's server with the same tokens, whose scheduler alone is
  replaced (`tools/studies/peers/sglang_replay.py`). Its server and detokenizer are counted.

`full`: a client sends its next request when it has an answer, so latencies are queues in front of
one busy core. `paced`: a client waits `--every-s` on average between two requests.

Rows: name, value, unit, baseline, ratio. `cpu` is the CPU time of the server process per request.
The baseline of a `cpu` row is uvicorn with an application that reads the body and returns the same
number of bytes; that of the `episode` rows is SGLang's server. Clients and server share the
machine's cores.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from rlcore.envs.chat_api import ChatAnswer, ChatCall, TurnRequest  # noqa: E402
from rlcore.envs.endpoint import Endpoint, EndpointServer  # noqa: E402
from rlcore.envs.episode import Transcript  # noqa: E402
from rlcore.envs.harness_env import EndpointConfig, HarnessHost  # noqa: E402
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import Request, RequestId, Sample, Sampling  # noqa: E402

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
}
"""Model whose config SGLang's server reads; no process loads it."""
Row = dict[str, Any]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--episodes", type=int, default=256, help="episodes at a time")
    p.add_argument("--turns", type=int, default=20, help="turns of an episode")
    p.add_argument("--words", type=int, default=60, help="words of a message, on average")
    p.add_argument("--every-s", type=float, default=1.0, help="mean pause of a paced client")
    p.add_argument("--seed", type=int, default=0, help="seed of texts and pauses")
    p.add_argument("--tokenizer", default="", help="folder with Qwen's tokenizer.json")
    p.add_argument("--sglang", action="store_true", help="measure SGLang's server, too")
    p.add_argument("--json", default="", help="JSON file for the results")
    p.add_argument("--serve", choices=["endpoint", "bare", "episode"], help=argparse.SUPPRESS)
    return p.parse_args(argv)


# ---- recorded turns


def conversation(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the messages of an episode: system, user, then turns and results of tools."""
    die = random.Random(a.seed)

    def text() -> str:
        letters = "etaoinshrdlu"
        size = die.randint(1, 2 * a.words)
        return " ".join("".join(die.choices(letters, k=die.randint(2, 8))) for _ in range(size))

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text()},
        {"role": "user", "content": text()},
    ]
    for turn in range(a.turns):
        call = {"name": "bash", "arguments": json.dumps({"command": text()})}
        calls = [{"id": f"call_{turn}", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": text(), "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text()})
    return messages


def bodies(a: argparse.Namespace, stream: bool) -> list[bytes]:
    """Return the body of each turn's request."""
    messages = conversation(a)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return [
        json.dumps(
            {"model": "policy", "tools": [TOOL], "messages": messages[: 2 + 2 * turn], **options}
        ).encode()
        for turn in range(a.turns)
    ]


def with_template(tokenizer: Path, folder: Path) -> Path:
    """Write a folder with a tokenizer and the chat template of Qwen2.5."""
    shutil.copytree(tokenizer, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = ROOT / "tests/contracts/templates/qwen2_5.jinja"
    settings["chat_template"] = template.read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def turn_ids(a: argparse.Namespace, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of each recorded turn, as the template of Qwen2.5 writes it."""
    out = []
    for said in conversation(a)[2::2]:
        call = said["tool_calls"][0]["function"]
        inside = f'{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}'
        text = f"{said['content']}\n<tool_call>\n{inside}\n</tool_call><|im_end|>"
        out.append(tokenizer.encode(text))
    return out


# ---- server process


def serve(a: argparse.Namespace) -> None:
    """Serve until stdin ends. Prints the port, the keys and the processes that count."""
    if a.serve == "episode":
        asyncio.run(serve_episodes(a))
        return
    turns = conversation(a)[2::2]

    async def complete(request: TurnRequest) -> ChatAnswer:
        said = turns[len(request.messages) // 2 - 1]
        call = said["tool_calls"][0]
        return ChatAnswer(
            content=said["content"],
            calls=(ChatCall(call["id"], call["function"]["name"], call["function"]["arguments"]),),
            finish="tool_calls",
            prompt_tokens=1000,
            completion_tokens=100,
        )

    endpoint = BareEndpoint(2000) if a.serve == "bare" else Endpoint()
    server = EndpointServer(endpoint)
    keys = [endpoint.open(f"t0.{i}", complete) for i in range(2 * a.episodes)]
    print(json.dumps([server.port, keys, [os.getpid()]]), flush=True)
    sys.stdin.read()
    server.close()


async def serve_episodes(a: argparse.Namespace) -> None:
    """Serve episodes of `--env endpoint`, two for each client: one of them is the warm-up."""
    tokenizer = load_tokenizer(a.tokenizer)
    turns = [np.array(ids, np.int32) for ids in turn_ids(a, tokenizer)]
    host = HarnessHost(
        EndpointConfig(command="none"), tokenizer, num_tokens=1 << 20, max_tokens=1 << 20
    )

    async def policy(asked: Request) -> Sample:
        _, _, *number = asked.id.split(".")  # turn 0 has the id of the episode
        ids = turns[int(number[0]) if number else 0]
        return Sample(
            id=asked.id,
            prompt=asked.prompt,
            tokens=ids,
            logps=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish="stop",
        )

    def open_episode(name: RequestId) -> str:
        so_far = Transcript(name, np.zeros(0, np.int32))
        return host.open(so_far, policy, Sampling(max_tokens=1 << 20), name).key

    keys = [open_episode(f"t{i}.0") for i in range(2 * a.episodes)]
    print(json.dumps([int(host.root_url.rpartition(":")[2]), keys, [os.getpid()]]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    host.close()


class BareEndpoint(Endpoint):
    """The baseline: reads bodies and returns a fixed number of bytes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        answer = b" " * num_bytes

        async def app(scope: Any, receive: Any, send: Any) -> None:
            while (await receive()).get("more_body"):
                pass
            head = [(b"content-length", str(num_bytes).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await send({"type": "http.response.body", "body": answer})

        self.app = app  # type: ignore[assignment]  # any ASGI application


# ---- clients


async def play(
    port: int, key: str, requests: list[bytes], every_s: float, die: random.Random
) -> list[float]:
    """Send the requests of an episode one after another; return their latencies."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    took = []
    for body in requests:
        if every_s:
            await asyncio.sleep(die.uniform(0, 2 * every_s))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {key}\r\n"
        begin = time.perf_counter()
        writer.write(
            f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        reply = await reader.readuntil(b"\r\n\r\n")
        size = reply.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        answer = await reader.readexactly(int(size))
        if not reply.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server refused a request: {answer.decode()}")
        took.append(time.perf_counter() - begin)
    writer.close()
    return took


async def play_all(
    port: int, keys: list[str], requests: list[bytes], every_s: float, seed: int
) -> list[float]:
    dice = [random.Random(f"{seed} {i}") for i in range(len(keys))]
    found = await asyncio.gather(
        *(play(port, k, requests, every_s, d) for k, d in zip(keys, dice, strict=True))
    )
    return sorted(t for took in found for t in took)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process: Linux has a clock for each."""
    return time.clock_gettime((~pid << 3) | 2)


def measure(
    a: argparse.Namespace, kind: str, stream: bool, every_s: float, folder: str = ""
) -> dict[str, float]:
    """Return CPU time per request, latencies and requests per second of one server."""
    same = ("episodes", "turns", "words", "seed")
    words = [w for name in same for w in (f"--{name}", str(getattr(a, name)))]
    command = [__file__, "--serve", kind, *words, *(("--tokenizer", folder) if folder else ())]
    if kind == "sglang":
        command = [str(ROOT / "tools/studies/peers/sglang_replay.py"), folder]
    server = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port, keys, pids = json.loads(server.stdout.readline())
        requests = bodies(a, stream)
        # The first requests are slower; they are of other episodes.
        asyncio.run(play_all(port, keys[a.episodes :], requests[:1], 0.0, a.seed))
        before, begin = sum(map(cpu_s, pids)), time.perf_counter()
        took = asyncio.run(play_all(port, keys[: a.episodes], requests, every_s, a.seed))
        wall, cpu = time.perf_counter() - begin, sum(map(cpu_s, pids)) - before
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(60)
    return {
        "cpu": 1e6 * cpu / len(took),
        "p50": 1e3 * took[len(took) // 2],
        "p99": 1e3 * took[int(len(took) * 0.99)],
        "rate": len(took) / wall,
    }


def rows(a: argparse.Namespace) -> list[Row]:
    """Measure all servers and loads."""
    bare = measure(a, "bare", False, 0.0)
    out: list[Row] = []
    for name, stream in (("whole", False), ("stream", True)):
        for load, every_s in (("full", 0.0), ("paced", a.every_s)):
            found = measure(a, "endpoint", stream, every_s)
            # The selector finds several requests at a time with the full load, as in the baseline.
            out += shown(f"{name} {load}", found, bare if load == "full" else None)
    if a.tokenizer:
        with tempfile.TemporaryDirectory() as scratch:
            out += token_rows(a, with_template(Path(a.tokenizer), Path(scratch) / "qwen"))
    sizes = [len(body) for body in bodies(a, False)]
    out.append({"name": "body", "value": sum(sizes) / len(sizes), "unit": "bytes"})
    return out


def token_rows(a: argparse.Namespace, folder: Path) -> list[Row]:
    """Measure the servers that render, tokenise and decode."""
    if a.sglang:
        tokenizer = load_tokenizer(folder)
        ids = [tokenizer.token_id(token) for token in ("<|im_start|>", "assistant")]
        recorded = {"turns": turn_ids(a, tokenizer), "opening": ids, "episodes": a.episodes}
        (folder / "turns.json").write_text(json.dumps(recorded))
        (folder / "config.json").write_text(json.dumps(MODEL))
    out: list[Row] = []
    for load, every_s in (("full", 0.0), ("paced", a.every_s)):
        peer = measure(a, "sglang", False, every_s, str(folder)) if a.sglang else None
        if peer:
            out += shown(f"sglang {load}", peer, None)
        out += shown(f"episode {load}", measure(a, "episode", False, every_s, str(folder)), peer)
    return out


def shown(name: str, found: dict[str, float], baseline: dict[str, float] | None) -> list[Row]:
    """Return the rows of one server and load, with the CPU time of a baseline."""
    units = {"cpu": "us/request", "p50": "ms", "p99": "ms", "rate": "requests/s"}
    out: list[Row] = [
        {"name": f"{name} {key}", "value": found[key], "unit": unit} for key, unit in units.items()
    ]
    if baseline:
        out[0] |= {"baseline": baseline["cpu"], "ratio": found["cpu"] / baseline["cpu"]}
    return out


def main(argv: list[str] | None = None) -> int:
    a = parse(argv)
    if a.serve:
        serve(a)
        return 0
    found = rows(a)
    for row in found:
        beside = f"   of {row['baseline']:8.1f}   {row['ratio']:.2f}x" if "ratio" in row else ""
        print(f"{row['name']:18} {row['value']:10.1f} {row['unit']:11}{beside}")
    if a.json:
        left_out = ("json", "serve", "tokenizer")  # paths of a machine
        settings = {k: v for k, v in vars(a).items() if k not in left_out}
        write_atomic(
            Path(a.json), json.dumps({"settings": settings, "rows": found}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
