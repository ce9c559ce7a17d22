"""Draw docstrings, help texts and errors of rlcore for a reader who has not seen the code.

    python tools/studies/sample_texts.py --seed COMMIT > texts.md

The texts come with their place. A verdict for each (clear, second reading, unclear) is written
beside it by the reader; `tools/results/language.json` is such a list.
"""

import argparse
import ast
import io
import random
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("warning", "error", "info", "announce", "ConfigError", "ValueError", "RuntimeError")
Text = tuple[str, str]
"""Place and text."""


def docstrings_and_comments(name: str, source: str) -> Iterator[Text]:
    """Docstrings of modules, classes, functions and fields outside of `*Config`, and comments."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in () if getattr(node, "name", "").endswith("Config") else node.body:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield f"{name}:{child.lineno}", value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and "noqa" not in token.string:
            yield f"{name}:{token.start[0]}", token.string


def helps(name: str, source: str) -> Iterator[Text]:
    """Help texts of configuration keys and of the options of commands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, text in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    key, value = ast.unparse(field.target), ast.literal_eval(text.value)
                    yield f"{name}:{text.lineno}", f"{node.name}.{key}: {value}"
        if isinstance(node, ast.keyword) and node.arg == "help":
            yield f"{name}:{node.value.lineno}", ast.unparse(node.value)


def errors(name: str, source: str) -> Iterator[Text]:
    """Texts of errors and log lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = ast.unparse(node.args[0])
            message = " " in text and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
            if called in CALLS and message:  # one word is the label of an announcement
                yield f"{name}:{node.lineno}", text


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--seed", help="seed; default: the commit that is checked out")
    p.add_argument("--count", type=int, default=100, help="texts of each kind")
    a = p.parse_args()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    seed = a.seed or head
    files = sorted((ROOT / "rlcore").rglob("*.py"))
    for find in (docstrings_and_comments, helps, errors):
        found = [t for f in files for t in find(str(f.relative_to(ROOT)), f.read_text())]
        drawn = random.Random(f"{seed}/{find.__name__}").sample(found, min(a.count, len(found)))
        print(
            f"\n## {find.__name__.replace('_', ' ')}: {len(drawn)} of {len(found)}, seed {seed}\n"
        )
        for number, (place, text) in enumerate(drawn, 1):
            print(f"{number}. `{place}` {' '.join(text.split())}")


if __name__ == "__main__":
    main()
