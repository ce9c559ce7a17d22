"""Harnesses for tests of `--env endpoint`."""

import os
import threading
import time
from typing import Any

import httpx


def ask(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The message that the policy answers with."""
    found = client.post("chat/completions", json={"model": "m", "messages": messages, **more})
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


def talk(task: dict[str, Any]) -> float:
    """Two turns of a conversation and one of a sub-agent, and a score that depends on them."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        messages = [{"role": "user", "content": task["prompt"]}]
        first = ask(client, messages)
        second = ask(client, [*messages, first, {"role": "user", "content": "Again."}])
        third = ask(client, [{"role": "user", "content": "What else?"}], max_tokens=3)
    return float(sum(len(m["content"]) for m in (first, second, third)) % 5)


def complete(task: dict[str, Any]) -> float:
    """Text completions: a text that is continued, and ids that are."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:

        def more(prompt: str | list[int]) -> dict[str, Any]:
            asked = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True, "logprobs": 0}
            found = client.post("completions", json=asked)
            assert found.status_code == 200, found.text
            return found.json()["choices"][0]

        ids = [5, 6, 7]
        for _ in range(3):
            choice = more(ids)
            assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) <= 3
            ids += [*choice["token_ids"], 8]
        text = task["prompt"]
        text += more(text)["text"] + " "
        more(text)
    return float(sum(ids) % 5)


def plain(task: dict[str, Any]) -> float:
    """A turn without tools, and one with tools, which is refused."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        asked = {"model": "m", "messages": [{"role": "user", "content": task["prompt"]}]}
        answer = ask(client, asked["messages"])
        tools = [{"type": "function", "function": {"name": "f"}}]
        refused = client.post("chat/completions", json=asked | {"tools": tools})
        assert refused.status_code == 400, refused.text
        assert "writes no tool calls in a format that rlcore reads" in refused.text
    return float(len(answer["content"]) % 5)


def hurried(task: dict[str, Any]) -> float:
    """A turn, and the end in the middle of further ones."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = os.environ["OPENAI_BASE_URL"] + "/"
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        ask(client, [{"role": "user", "content": task["prompt"]}])
        for i in range(3):
            more = [{"role": "user", "content": f"More {i}."}]
            threading.Thread(target=ask, args=(client, more), daemon=True).start()
        time.sleep(0.02)
        os.makedirs(os.path.dirname(os.environ["RLCORE_SCORE"]), exist_ok=True)
        with open(os.environ["RLCORE_SCORE"], "w") as file:
            file.write(str(len(task["prompt"]) % 2))
        os._exit(0)


def silent(task: dict[str, Any]) -> float:
    """No turn at all."""
    return 1.0
