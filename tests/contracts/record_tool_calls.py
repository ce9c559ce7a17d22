"""Write tests/contracts/tool_calls.json: texts with tool calls, and what SGLang's parsers make of
them.

    bash tools/setup.sh --sglang
    python -m tests.contracts.record_tool_calls [FILE]   # after a change of SGLang's pin or a text

SGLang's reasoning parser splits a text first, if its family has one, and the tool parser reads the
other part, as in its server.
"""

import importlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tests.kit import ROOT

FILE = Path(__file__).with_name("tool_calls.json")

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "share": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"type": "object"},
                    "unit": {"enum": ["C", "F"]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "any": {},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]

PARSERS = {
    "qwen": ("qwen25_detector.Qwen25Detector", "qwen3"),
    "qwen3_coder": ("qwen3_coder_detector.Qwen3CoderDetector", "qwen3"),
    "llama3": ("llama32_detector.Llama32Detector", ""),
    "glm": ("glm4_moe_detector.Glm4MoeDetector", "glm45"),
    "deepseek": ("deepseekv3_detector.DeepSeekV3Detector", "deepseek-r1"),
    "deepseek_v31": ("deepseekv31_detector.DeepSeekV31Detector", "deepseek-v3"),
}
"""Tool parser and reasoning parser of SGLang, by our family."""


def qwen(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def coder(name: str, **values: str) -> str:
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    inner = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"\n<tool_call>{name}\n{inner}</tool_call>"


def wide(word: str) -> str:
    """Return a special token of DeepSeek."""
    return "<\uff5c" + word.replace(" ", "\u2581") + "\uff5c>"


def deepseek(*bodies: str, between: str = "\n") -> str:
    calls = between.join(
        f"{wide('tool call begin')}{body}{wide('tool call end')}" for body in bodies
    )
    return f"{wide('tool calls begin')}{calls}{wide('tool calls end')}"


def v3(name: str, arguments: str) -> str:
    return f"function{wide('tool sep')}{name}\n```json\n{arguments}\n```"


def v31(name: str, arguments: str) -> str:
    return f"{name}{wide('tool sep')}{arguments}"


PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
NOW = '{"name": "now", "arguments": {}}'
NESTED = (
    '{"city": "K\u00f6ln \u6771\u4eac \U0001f600 \\"}{\\"", '
    '"days": 3, "exact": true, "share": 0.5, "tags": ["a}", "]b"], '
    '"where": {"x": {"y": [1, null, -2.5e3]}}}'
)
TAGS = '{"name": "weather", "arguments": {"city": "a\\n</tool_call> <tool_call> <think>"}}'
BARE = '{"name": "weather", "parameters": {"city": "Paris", "days": 2}}'
PYTHON = "<|python_tag|>"
BAD = '{"name": "weather", "arguments": {"city": "Paris"'

TEXTS: dict[str, dict[str, str]] = {
    "qwen": {
        "no call": "It is sunny in Paris.",
        "empty": "",
        "one": qwen(PARIS),
        "one with content": "I look.\n" + qwen(PARIS),
        "two": qwen(PARIS, NOW),
        "nested": qwen(f'{{"name": "weather", "arguments": {NESTED}}}'),
        "tags in a string": qwen(TAGS),
        "spaced": qwen('{ "name" : "now" ,\n "arguments" : { } }'),
        "arguments first": qwen('{"arguments": {"city": "Rome"}, "name": "weather"}'),
        "escapes": qwen('{"name": "weather", "arguments": {"city": "\\u4eac\\/\\t"}}'),
        "no arguments": qwen('{"name": "now"}'),
        "reasoning": "<think>\nI need it.\n</think>\n\n" + qwen(PARIS),
        "reasoning and content": "<think>\nA.\n\nB.\n</think>\n\nI look.\n" + qwen(PARIS),
        "empty reasoning": "<think>\n\n</think>\n\n" + qwen(PARIS),
        "call in reasoning": f"<think>\n{qwen(NOW)}\n</think>\n\nIt is late.",
        "reasoning without end": "<think>\nI wonder",
        "reasoning without end before a call": "<think>\nSo\n" + qwen(PARIS),
        "content with blank lines": "I look.\n\n\n" + qwen(PARIS),
        "text after": qwen(PARIS) + "\nThat is all.",
        "text between": f"{qwen(PARIS)} and {qwen(NOW)}",
        "unknown tool": qwen('{"name": "fly", "arguments": {}}', NOW),
        "invalid json": qwen("{'name': 'now'}", NOW),
        "not closed in json": qwen(BAD),
        "no closing tag": f"<tool_call>\n{PARIS}",
        "cut": "I look.\n<tool_call>\n" + BAD,
        "no name": qwen('{"arguments": {"city": "Paris"}}'),
        "name is a number": qwen('{"name": 5, "arguments": {}}'),
        "arguments are text": qwen('{"name": "weather", "arguments": "{\\"city\\": \\"x\\"}"}'),
        "arguments are a list": qwen('{"name": "weather", "arguments": [1]}'),
        "list of calls": qwen(f"[{PARIS}, {NOW}]"),
        "nan": qwen('{"name": "weather", "arguments": {"share": NaN}}'),
        "on one line": f"<tool_call>{PARIS}</tool_call>",
        "brace too many": qwen(PARIS + "}"),
    },
    "qwen3_coder": {
        "no call": "It is sunny in Paris.",
        "one": coder("weather", city="Paris"),
        "one with content": "I look.\n\n" + coder("weather", city="Paris"),
        "two": coder("weather", city="Paris") + "\n" + coder("now"),
        "types": coder(
            "weather", city="5", days="3", exact="true", share="0.5", tags='["a"]', where='{"x": 1}'
        ),
        "lines": coder("weather", city="a\n\n  b <c> }{"),
        "tags in a string": coder("weather", city="</tool_call> <tool_call>"),
        "reasoning": "<think>\nI need it.\n</think>\n\n" + coder("weather", city="Paris"),
        "boolean of Python": coder("weather", exact="True"),
        "null for text": coder("weather", city="null"),
        "text for an integer": coder("weather", days="three"),
        "unknown tool": coder("fly", city="x"),
        "unknown argument": coder("weather", height="5"),
        "no closing tag": "<tool_call>\n<function=now>\n</function>",
        "no function": "<tool_call>\nnow\n</tool_call>",
        "parameter without end": "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n"
        "</function>\n</tool_call>",
    },
    "llama3": {
        "no call": "It is sunny in Paris.",
        "one": BARE,
        "python tag": PYTHON + BARE,
        "content before the tag": "I look." + PYTHON + BARE,
        "two": f'{BARE};{{"name": "now", "parameters": {{}}}}',
        "typed": '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}',
        "arguments": PARIS,
        "brace in text": "Use {x}.",
        "nested": f'{{"name": "weather", "parameters": {NESTED}}}',
        "two with a space": f'{BARE}; {{"name": "now", "parameters": {{}}}}',
        "answer in json": '{"answer": 5}',
        "answer with a name": '{"name": "Ann", "age": 5}',
        "text after": BARE + " That is all.",
        "unknown tool": '{"name": "fly", "parameters": {}}',
        "cut": '{"name": "weather", "parameters": {"city": "Par',
        "dict of Python": "{'name': 'now', 'parameters': {}}",
        "program": PYTHON + "print(1)",
    },
    "glm": {
        "no call": "\nIt is sunny in Paris.",
        "one": glm("weather", city="Paris"),
        "one with content": "\nI look." + glm("weather", city="Paris"),
        "two": glm("weather", city="Paris") + glm("now"),
        "types": glm(
            "weather",
            days="3",
            exact="true",
            share="0.5",
            tags='["a"]',
            where='{"x": 1}',
            any="[1]",
        ),
        "lines": glm("weather", city="a\n\n  b <c> }{"),
        "reasoning": "\n<think>I need it.</think>\nI look." + glm("weather", city="Paris"),
        "empty reasoning": "\n<think></think>" + glm("weather", city="Paris"),
        "form of GLM-4.7": "<tool_call>weather\n<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "</tool_call>",
        "text that is json": glm("weather", city="5.50"),
        "text that is true": glm("weather", city="true"),
        "null or text": glm("weather", note="null"),
        "tags in a string": glm("weather", city="</tool_call> x"),
        "text for an integer": glm("weather", days="three"),
        "unknown tool": glm("fly", city="x"),
        "no closing tag": "\n<tool_call>now\n",
        "no name": "\n<tool_call>\n</tool_call>",
        "value without end": "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>x\n"
        "</tool_call>",
    },
    "deepseek": {
        "no call": "It is sunny in Paris.",
        "one": deepseek(v3("weather", '{"city": "Paris"}')),
        "one with content": "I look." + deepseek(v3("weather", '{"city": "Paris"}')),
        "two": deepseek(v3("weather", '{"city": "Paris"}'), v3("now", "{}")),
        "nested": deepseek(v3("weather", NESTED)),
        "fence in a string": deepseek(v3("weather", '{"city": "```json {} ```"}')),
        "reasoning": "<think>\nI need it.\n</think>\n\n" + deepseek(v3("now", "{}")),
        "unknown tool": deepseek(v3("fly", "{}"), v3("now", "{}")),
        "invalid json": deepseek(v3("weather", "{city}"), v3("now", "{}")),
        "arguments are a list": deepseek(v3("weather", "[1]")),
        "no block": deepseek(f"function{wide('tool sep')}now {{}}"),
        "cut": deepseek(v3("weather", '{"city": "Paris"}'))[:80],
        "text after": deepseek(v3("now", "{}")) + " Done.",
    },
    "deepseek_v31": {
        "no call": "It is sunny in Paris.",
        "one": deepseek(v31("weather", '{"city": "Paris"}')),
        "one with content": "I look." + deepseek(v31("weather", '{"city": "Paris"}')),
        "two": deepseek(v31("weather", '{"city": "Paris"}'), v31("now", "{}"), between=""),
        "unknown tool": deepseek(v31("fly", "{}")),
        "invalid json": deepseek(v31("weather", "{city}")),
    },
}


def of_sglang(family: str, text: str) -> dict[str, Any]:
    """Return what SGLang's parsers make of a text."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    tool_parser, reasoning_parser = PARSERS[family]
    module, name = tool_parser.split(".")
    detector = getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), name)()
    reasoning = None
    if "<think>" in text and reasoning_parser:
        reasoning, text = ReasoningParser(reasoning_parser).parse_non_stream(text)
    found = detector.detect_and_parse(text or "", [Tool(**tool) for tool in TOOLS])
    calls = [{"name": c.name, "arguments": c.parameters} for c in found.calls]
    return {"reasoning": reasoning, "content": found.normal_text, "calls": calls}


def main() -> None:
    if torch.version.cuda is None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        sys.path.insert(0, str(ROOT / "rlcore" / "rollout" / "sglang_engine" / "cpu"))
    cases = [
        {"family": family, "name": name, "text": text, "sglang": of_sglang(family, text)}
        for family, of_family in TEXTS.items()
        for name, text in of_family.items()
    ]
    record = {
        "command": "python -m tests.contracts.record_tool_calls",
        "sglang": metadata.version("sglang"),
        "tools": TOOLS,
        "cases": cases,
    }
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
