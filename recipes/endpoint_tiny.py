"""Agent with a calculator, on the package openai: the harness of recipes/endpoint_tiny.sh.

    python endpoint_tiny.py serve           # plays all episodes; prints the folder of its socket
    python endpoint_tiny.py play FOLDER     # harness of an episode: has it played by that process

The agent is `solve`. To import openai takes a second of CPU time, far longer than an episode of a
tiny model, so all episodes share a process. With a larger model that second does not matter:
`--env.function` or `--env.command` starts an agent for each episode.
"""

import json
import os
import re
import signal
import socket
import sys

TIMEOUT_S = 120.0
MAX_TURNS = 4
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Work out a sum.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12+7-3"}},
            "required": ["expression"],
        },
    },
}


async def solve(client, task):
    """Let the model work out a sum with the tool. Return 1 if its answer is right, else 0."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(MAX_TURNS):
        content, calls = await ask(client, messages)
        if not calls:
            return int(content.strip() == task["answer"])
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        for call in calls:
            result = calc(json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return 0


async def ask(client, messages):
    """Return text and calls of the model's next turn, put together from a stream."""
    content, calls = "", {}
    asked = {"model": "policy", "messages": messages, "tools": [CALC]}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for delta in [choice.delta for choice in chunk.choices]:
            content += delta.content or ""
            for piece in delta.tool_calls or []:
                function = {"name": piece.function.name, "arguments": ""}
                new = {"id": piece.id, "type": "function", "function": function}
                call = calls.setdefault(piece.index, new)
                call["function"]["arguments"] += piece.function.arguments or ""
    return content, list(calls.values())


def calc(arguments):
    """Return the value of a sum, or what is wrong with it."""
    expression = str(arguments.get("expression", ""))
    if not re.fullmatch(r"[+-]?\d+([+-]\d+)*", expression, re.ASCII):
        return "error: not a sum"
    return str(sum(map(int, re.findall(r"[+-]?\d+", expression))))


async def serve():
    """Play an episode for each connection, until the recipe ends."""
    import asyncio
    from tempfile import TemporaryDirectory

    from openai import AsyncOpenAI

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    parent = os.getppid()
    shared = AsyncOpenAI(base_url="http://none", api_key="none", timeout=TIMEOUT_S)

    async def answer(reader, writer):
        try:
            asked = json.loads(await asyncio.wait_for(reader.readline(), TIMEOUT_S))
            client = shared.with_options(base_url=asked["url"], api_key=asked["key"])
            writer.write(str(await solve(client, asked["task"])).encode())
        finally:
            writer.close()

    with TemporaryDirectory(prefix="rlcore-agent-") as folder:
        await asyncio.start_unix_server(answer, f"{folder}/socket")
        print(folder, flush=True)
        while os.getppid() == parent:
            await asyncio.sleep(0.5)


def play(folder):
    """Have the episode played, and write its score."""
    with open(os.environ["RLCORE_TASK"]) as file:
        task = json.load(file)
    asked = {
        "url": os.environ["OPENAI_BASE_URL"],
        "key": os.environ["OPENAI_API_KEY"],
        "task": task,
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(TIMEOUT_S)
        server.connect(f"{folder}/socket")
        server.sendall(json.dumps(asked).encode() + b"\n")
        score = server.makefile().read()
    if not score:
        sys.exit("the agent failed; its error is in the output of the recipe")
    with open(os.environ["RLCORE_SCORE"], "w") as file:
        file.write(score)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        import asyncio

        asyncio.run(serve())
    else:
        play(sys.argv[2])
