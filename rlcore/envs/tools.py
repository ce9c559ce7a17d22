"""Questions with tools: a calculator, Python in the sandbox (`rlcore/sandbox`), and a search in a
local corpus (`corpus.py`).

    policy        12 % of 1347 is <calc>0.12 * 1347</calc>
    environment   <result>161.64</result>
    policy        ... so the answer is 161.64

The result of a tool call is the next observation. The first turn without a tool call is the final
answer, which `--reward` scores. With `--env.calls native` the model's chat template shows the tools
and the policy calls them in the model's own format, several in a turn if it likes.

Own calculator instead of the package simpleeval: a few lines on `ast` save the dependency.
"""

import ast
import math
import operator
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium
from gymnasium.spaces import Text

from rlcore.config.schema import EnvConfig
from rlcore.envs.corpus import Corpus
from rlcore.envs.kind import EnvKind, ToolTurn, TurnCall
from rlcore.sandbox import isolation
from rlcore.sandbox.box import Broken, Sandbox
from rlcore.utils.bounds import above, at_least

_CALL = re.compile(r"<(calc|python|search)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_MOST_CHARS, _MOST_NODES, _MOST_POWER = 1000, 200, 256

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_NAMES: dict[str, Any] = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "log": math.log,
    "max": max,
    "min": min,
    "round": round,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}


@dataclass(frozen=True, kw_only=True)
class ToolsConfig(EnvConfig):
    """Keys of `--env tools`."""

    max_turns: int = 8
    calls: Literal["tags", "native"] = "tags"
    """`tags`: a turn calls a tool by `<calc>`, `<python>` or `<search>`; its last call counts.
    `native`: calls are in the format of the model's chat template, and all of them are made."""
    tools: tuple[Literal["calc", "python", "search"], ...] = ("calc", "python")
    """Tools that the policy may call. `calc`: a calculator. `python`: programs in a sandbox.
    `search`: documents of `env.corpus` by the words of a query."""
    corpus: str = ""
    """JSONL file of documents with `text` and perhaps `title`, for the tool `search`."""
    max_documents: Annotated[int, above(0)] = 3
    """Maximum number of documents in the result of a search."""
    program_timeout_s: Annotated[float, above(0)] = 10.0
    """Seconds after which a program is killed; its result then reports the timeout."""
    max_result_chars: Annotated[int, at_least(20)] = 2000
    """Maximum number of characters of a tool's result; a longer result is cut in the middle."""
    require_isolation: isolation.IsolationGrade = "fallback"
    """Weakest grade of isolation with which programs run: `fallback`, `namespaces` or `cgroup` (as
    `--reward.require_isolation`)."""

    def problems(self) -> list[str]:
        """Return errors for conflicting keys (`EnvConfig.problems`)."""
        out = []
        if not self.tools or len(set(self.tools)) < len(self.tools):
            out.append(
                f"--env.tools {' '.join(self.tools)}: some of calc, python and search, each once; "
                "without a tool take no --env"
            )
        if bool(self.corpus) != ("search" in self.tools):
            out.append(
                f"--env.corpus {self.corpus!r}, --env.tools {' '.join(self.tools)}: the tool "
                "search and a corpus need each other; give both or none"
            )
        if not self.program_timeout_s < self.timeout_s:
            out.append(
                f"--env.program_timeout_s {self.program_timeout_s:g}: must be below env.timeout_s "
                f"{self.timeout_s:g}"
            )
        return out


class Tools(gymnasium.Env[Any, Any]):
    """Environment that runs the last tool call of a turn. The first program of an episode starts a
    sandbox, which closes with the episode. Every program has its own process."""

    observation_space = action_space = Text(max_length=1 << 20, min_length=0)

    def __init__(self, config: ToolsConfig) -> None:
        self._config = config
        self._box: Sandbox | None = None
        self._corpus = Corpus(Path(config.corpus)) if config.corpus else None
        self._calls = self._errors = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; the prompt is the question."""
        super().reset(seed=seed)
        self._calls = self._errors = 0
        return "", {}

    def step(
        self, action: str | ToolTurn
    ) -> tuple[str | list[str], float, bool, bool, dict[str, Any]]:
        """Run the turn's calls (by tags the last one) and return the results; without a tool call,
        end the episode. The info counts calls and failed calls."""
        if isinstance(action, ToolTurn):
            is_over = not action.calls and not action.num_malformed
            results = [self._run(c.name, _argument(c)) for c in action.calls]
            return "" if is_over else results, 0.0, is_over, False, self._counts()
        calls = _CALL.findall(action)
        if not calls:
            return "", 0.0, True, False, self._counts()
        shown = self._run(*calls[-1])
        return f"<result>{shown}</result>\n", 0.0, False, False, self._counts()

    def close(self) -> None:
        """Close the sandbox and the corpus."""
        self._close_box()
        if self._corpus is not None:
            self._corpus.close()

    def _close_box(self) -> None:
        if self._box is not None:
            self._box.close()
            self._box = None

    def _run(self, tool: str, text: str) -> str:
        """Run a call and return its result, or the error."""
        self._calls += 1
        try:
            if tool not in self._config.tools:
                there = " ".join(self._config.tools)
                raise ValueError(f"there is no tool {tool}; use one of: {there}")
            result = self._made(tool, text)
        except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError) as error:
            self._errors += 1
            result = f"error: {error}"
        return _cut(result, self._config.max_result_chars)

    def _made(self, tool: str, text: str) -> str:
        if tool == "calc":
            return f"{calculate(text):.12g}"
        return self._python(text) if tool == "python" else self._search(text)

    def _search(self, query: str) -> str:
        """Return the best documents, each with the same share of the characters of a result."""
        assert self._corpus is not None
        found = self._corpus.search(query, self._config.max_documents)
        if not found:
            return "no document has a word of the query"
        share = max(self._config.max_result_chars // len(found) - 1, 5)
        shown = [
            f"{i}. {d.title}\n{d.text}" if d.title else f"{i}. {d.text}"
            for i, d in enumerate(found, 1)
        ]
        return "\n".join(
            text if len(text) <= share else f"{text[: share - 4]} ..." for text in shown
        )

    def _counts(self) -> dict[str, float]:
        return {"calls": float(self._calls), "call_errors": float(self._errors)}

    def _python(self, source: str) -> str:
        """Run a program and return its output. Raises ValueError with the last line of stderr if
        the program fails."""
        if self._box is None:
            self._box = Sandbox(isolation.grade_name(self._config.require_isolation))
        end = time.monotonic() + self._config.program_timeout_s
        try:
            outcome = self._box.run(source, lambda: end)
        except Broken as error:
            self._close_box()
            raise ValueError(f"the sandbox failed: {error}") from error
        printed = outcome.stdout.decode("utf-8", "replace").strip()
        if outcome.why or outcome.code:
            said = outcome.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ValueError(outcome.why or " ".join(said) or f"exit code {outcome.code}")
        return printed


def calculate(text: str) -> float:
    """Evaluate an expression of + - * / // % **, brackets, pi, e and a dozen functions. Raises
    ValueError, TypeError, ArithmeticError or SyntaxError if the text is invalid or too large."""
    text = text.strip().replace("^", "**")
    if len(text) > _MOST_CHARS:
        raise ValueError(f"an expression of {len(text)} characters: must be at most {_MOST_CHARS}")
    tree = ast.parse(text, mode="eval")
    if sum(1 for _ in ast.walk(tree)) > _MOST_NODES:
        raise ValueError("the expression has too many parts")
    found = float(_value(tree.body))
    if not math.isfinite(found):
        raise ValueError("the value is not finite")
    return found


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            values = [_value(a) for a in node.args]
            if function is round and len(values) == 2:
                return round(values[0], int(values[1]))
            return float(function(*values))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not arithmetic")


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > _MOST_POWER:
        raise ValueError(f"a power of {exponent:g}: must be at most {_MOST_POWER}")
    found = base**exponent
    if isinstance(found, complex):
        raise ValueError("the root of a negative number is not real")
    return found


def _argument(call: TurnCall) -> str:
    """Return the text that a call passes to its tool; empty if it has none."""
    return str(call.arguments.get(_SHOWN[call.name][1], ""))


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


_SHOWN = {
    "calc": ("Evaluate an arithmetic expression.", "expression", "such as 0.12 * 1347"),
    "python": ("Run a program and return what it prints.", "code", "the program"),
    "search": ("Search documents and return the best ones.", "query", "words to look for"),
}


def tools_of(config: ToolsConfig) -> list[dict[str, Any]]:
    """Return the tools in OpenAI's form, for the chat template; none with calls by tags."""
    if config.calls == "tags":
        return []
    found = []
    for name in config.tools:
        purpose, argument, meaning = _SHOWN[name]
        parameters = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": meaning}},
            "required": [argument],
        }
        function = {"name": name, "description": purpose, "parameters": parameters}
        found.append({"type": "function", "function": function})
    return found


KIND = EnvKind(ToolsConfig, Tools, scored_by="reward", tools=tools_of)
