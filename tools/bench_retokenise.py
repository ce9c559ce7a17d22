"""Count what it would change to tokenise the conversation of an episode again at each turn.

    python tools/bench_retokenise.py --tokenizer FOLDER --json FILE

A synthetic harness plays random episodes with the committed chat templates of Qwen. An answer has
reasoning, if the template shows it, and words or a call. Its tokens are those of the tokenizer,
except that a share of them (`odd`) is spelled with two tokens, as a model may sample it. Half of
the rows are of a harness that sends reasoning back, the others of one that does not.

`changed` is the share of episodes in which a context differs from the whole rendering, tokenised
again. `prefill` are tokens per episode that an engine with a prefix cache computes for the contexts
of `rlcore.envs.branches`; `prefill_again` for whole renderings, of which the cache has the prefix
that the turn before has left.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from rlcore.envs.branches import Branches  # noqa: E402
from rlcore.hf.tokenizer import Tokenizer, load_tokenizer  # noqa: E402
from rlcore.hf.tool_calls import family_of  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.records import Sample  # noqa: E402

TEMPLATES = ROOT / "tests/contracts/templates"
NAMES = ("qwen2_5", "qwen3", "qwen3_5_think")
TEXT = "the list of files has no test for this case so we read it again and change one line"
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
CALLS = {
    "qwen": '<tool_call>\n{{"name": "run", "arguments": {{"command": "{}"}}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=run>\n<parameter=command>\n{}\n</parameter>\n"
    "</function>\n</tool_call>",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    p.add_argument("--episodes", type=int, default=50, help="episodes per row")
    p.add_argument("--turns", type=int, default=10, help="turns of an episode")
    p.add_argument("--words", type=int, default=60, help="most words of a text")
    p.add_argument(
        "--odd",
        type=float,
        nargs="*",
        default=[0.0, 0.001, 0.01],
        help="shares of sampled tokens that the tokenizer would not choose",
    )
    p.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    p.add_argument("--json", type=Path, metavar="FILE", help="JSON file for the results")
    return p.parse_args(argv)


def with_template(folder: Path, template: str) -> Tokenizer:
    """Return the folder's tokenizer with another chat template."""
    with tempfile.TemporaryDirectory() as own:
        shutil.copytree(folder, own, dirs_exist_ok=True)
        shutil.copy(TEMPLATES / f"{template}.jinja", Path(own) / "chat_template.jinja")
        return load_tokenizer(own)


def spelled(own: Tokenizer, text: str, odd: float, rng: random.Random) -> list[int]:
    """Return the tokens of a text, a share of which is spelled with two tokens."""
    ids: list[int] = []
    for token in own.encode(text):
        piece = own.decode([token])
        at = rng.randrange(1, len(piece)) if len(piece) > 1 and rng.random() < odd else 0
        halves = [i for half in (piece[:at], piece[at:]) for i in own.encode(half)]
        ids += halves if at and own.decode(halves) == piece else [token]
    return ids


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def play(
    own: Tokenizer, odd: float, sends_reasoning: bool, a: argparse.Namespace, rng: random.Random
) -> dict[str, int]:
    """Play one episode and return its counts."""

    def some() -> str:
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, a.words)))

    words = TEXT.split()
    source, end = own.chat_template, own.encode("<|im_end|>")
    family = family_of(source)
    branches = Branches(own, family=family, num_tokens=1 << 20, max_tokens=1 << 20)
    messages: list[dict[str, Any]] = [{"role": "user", "content": some()}]
    cached: list[int] = []
    found = dict.fromkeys(("changed", "prefill", "prefill_again"), 0)
    for number in range(a.turns):
        turn = branches.begin(messages, TOOLS)
        context = turn.context.tolist()
        again = own.encode(own.render_chat(messages, tools=TOOLS))
        found["prefill"] += len(turn.new)
        found["prefill_again"] += len(again) - common(cached, again)
        found["changed"] |= context != again
        thought = f"<think>\n{some()}\n</think>\n\n" if "</think>" in source else ""
        if "'<think>\\n' }}" in source:  # the prompt opens the reasoning
            thought = thought.removeprefix("<think>\n")
        is_call = rng.random() < 0.7
        text = thought + (CALLS[family].format(some()) if is_call else some())
        ids = spelled(own, text, odd, rng) + end
        logps, versions = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
        sample = Sample(
            id=f"t0.{number}",
            prompt=turn.context,
            tokens=np.array(ids, np.int32),
            logps=logps,
            versions=versions,
            finish="stop",
        )
        message = dict(branches.end(turn, sample).message)
        if not sends_reasoning:
            message.pop("reasoning_content", None)
        cached = again + ids
        messages = [*messages, message, {"role": "tool" if is_call else "user", "content": some()}]
    return found


def main(argv: list[str] | None = None) -> None:
    a = parse(argv)
    rows = []
    print(f"{'template':15}{'reasoning':>12}{'odd':>7}{'changed':>9}{'prefill':>9}{'again':>8}")
    for name in NAMES:
        own = with_template(a.tokenizer, name)
        for sends_reasoning in (True, False):
            for odd in a.odd:
                rng = random.Random(f"{a.seed} {odd}")
                all_found = [play(own, odd, sends_reasoning, a, rng) for _ in range(a.episodes)]
                row = {
                    key: sum(found[key] for found in all_found) / a.episodes for key in all_found[0]
                }
                sent = "sent back" if sends_reasoning else "dropped"
                rows.append({"template": name, "reasoning": sent, "odd": odd, **row})
                print(
                    f"{name:15}{sent:>12}{odd:7g}{row['changed']:9.2f}"
                    f"{row['prefill']:9.0f}{row['prefill_again']:8.0f}",
                    flush=True,
                )
    if a.json:
        setting = {key: getattr(a, key) for key in ("episodes", "turns", "words", "seed")}
        write_atomic(a.json, json.dumps({**setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
