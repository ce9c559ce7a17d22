"""No attribute of an object of ours is set from outside: what changes an object is a method of it,
and what does not change is made whole."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OTHERS = {
    "cli/sim.py": {"p": "argparse"},
    "hf/tokenizer.py": {"backend": "tokenizers"},
    "hf/tiktoken_model.py": {"backend": "tokenizers"},
    "mcore/adam.py": {"part": "Megatron"},
    "mcore/balance.py": {"module.router": "Megatron"},
    "mcore/build.py": {
        "attention": "Megatron",
        "chunk": "Megatron",
        "dispatcher": "Megatron",
        "mlp": "Megatron",
        "mlp.experts.submodules": "Megatron",
        "mlp.shared_experts.submodules": "Megatron",
        "param": "torch: a parameter, marked for Megatron",
        "parts.mlp.submodules.experts": "Megatron",
        "spec": "Megatron",
        "parts": "Megatron",
    },
    "mcore/experts.py": {"weight": "torch: a parameter, marked for Megatron"},
    "mcore/head.py": {"chunk.output_layer": "Megatron"},
    "mcore/layer_inputs.py": {"block": "Megatron"},
    "mcore/learner.py": {"torch.utils.deterministic": "torch"},
    "mcore/lora.py": {"parameter": "torch: a parameter, marked for Megatron"},
    "mcore/mla.py": {"self.weight": "torch: a parameter, marked for Megatron"},
    "mcore/norm.py": {"self.weight": "torch: a parameter, marked for Megatron"},
    "mcore/reference.py": {"p": "torch: a parameter"},
    "mcore/routing.py": {"module.router": "Megatron"},
    "mcore/shim.py": {
        "module": "Megatron",
        "clip_grads": "Megatron",
        "moe_utils": "Megatron",
        "spec.loader": "importlib",
        "torch.Tensor": "torch",
    },
    "mcore/value_head.py": {"self.weight": "torch: a parameter, marked for Megatron"},
    "mcore/wgrad.py": {"layers": "Megatron"},
    "rollout/sglang_engine/widths.py": {"self._runner": "SGLang", "runner": "SGLang"},
    "rollout/process.py": {"late": "threading"},
    "rollout/sglang_engine/cpu/rlcore_hollow.py": {"module": "Python: a module of a package"},
    "rollout/sglang_engine/drafts.py": {"req.sampling_params": "SGLang"},
    "rollout/sglang_engine/plugin.py": {
        "Scheduler": "SGLang",
        "info": "SGLang",
        "req": "SGLang",
        "req.sampling_params": "SGLang",
        "scheduler": "SGLang",
    },
    "rollout/sglang_engine/sampler.py": {"logits_output": "SGLang"},
    "rollout/sglang_engine/server.py": {
        "engine": "SGLang: a module",
        "ports": "SGLang",
        "server_args.PortArgs": "SGLang",
        "tempfile": "Python: the folder of temporary files",
    },
    "rollout/sglang_engine/worker.py": {
        "batch": "SGLang",
        "result": "SGLang",
        "result.logits_output": "SGLang",
    },
    "rollout/transport.py": {"pull": "zmq", "push": "zmq"},
    "sandbox/confine.py": {"_libc.syscall": "ctypes"},
    "sandbox/inside.py": {"sys": "Python: the program's own streams"},
    "sync/peers.py": {"options": "torch"},
    "utils/collective.py": {
        "dist.ProcessGroupGloo": "torch",
        "init": "Python: a function, marked as the one that replaces torch's",
        "options": "torch",
    },
    "utils/listen.py": {
        "TCPStore": "torch",
        "init": "Python: a function, marked as the one that replaces torch's",
    },
    "utils/log.py": {"log": "logging"},
}
"""File in rlcore/ -> an object that is set from outside -> the library whose it is."""


class _Finder(ast.NodeVisitor):
    """`found`: line and object of what is set on something that is not `self` or `cls`, nor the
    context of an autograd function."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._first: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args]
        self._first.append(arguments[0].arg if arguments else "")
        self.generic_visit(node)
        self._first.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store | ast.Del):
            self._note(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        names = [node.func, *node.args]
        for name, target in zip(names, [*node.args, None], strict=True):
            if _sets(name):  # called, or handed on with its object as `partial` takes it
                self._note(target)
        self.generic_visit(node)

    def _note(self, target: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            is_context = target.id == "ctx" and self._first[-1:] == ["ctx"]
            if target.id in ("self", "cls") or is_context:
                return
        self.found.append((target.lineno, ast.unparse(target)) if target else (0, "setattr"))


def _sets(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("setattr", "delattr")
    return isinstance(function, ast.Attribute) and function.attr in ("__setattr__", "__delattr__")


def _found(source: str) -> list[tuple[int, str]]:
    finder = _Finder()
    finder.visit(ast.parse(source))
    return finder.found


@cache
def _in_tree() -> dict[str, list[tuple[int, str]]]:
    files = sorted((ROOT / "rlcore").rglob("*.py"))
    found = {str(f.relative_to(ROOT / "rlcore")): _found(f.read_text()) for f in files}
    return {name: lines for name, lines in found.items() if lines}


def test_nothing_is_set_from_outside():
    wrong = [
        f"rlcore/{name}:{line}: an attribute of {target} is set from outside of its class"
        for name, lines in _in_tree().items()
        for line, target in lines
        if target not in OTHERS.get(name, {})
    ]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_needed():
    tree = {name: {target for _, target in lines} for name, lines in _in_tree().items()}
    unused = [
        f"{name}: {target}"
        for name, targets in OTHERS.items()
        for target in targets.keys() - tree.get(name, set())
    ]
    assert not unused, unused


@pytest.mark.parametrize(
    "line",
    [
        "job.seat = 3",
        "job.seat += 3",
        "job.seat: int = 3",
        "del job.seat",
        "job.seat, other = 3, 4",
        "[other, *job.seat] = 3, 4",
        "for job.seat in range(3): pass",
        "with open(path) as job.seat: pass",
        "setattr(job, 'seat', 3)",
        "delattr(job, 'seat')",
        "object.__setattr__(job, 'seat', 3)",
        "later = partial(setattr, job, 'seat')",
        "def forward(job, ctx): job.seat = 3",
    ],
)
def test_an_attribute_that_is_set_from_outside_is_found(line: str):
    assert [target for _, target in _found(line)] == ["job"]


@pytest.mark.parametrize(
    "line",
    [
        "def sit(self, seat): self.seat = seat",
        "def make(cls): cls.made = True",
        "def complete(cls): setattr(cls, 'made', True)",
        "def forward(ctx, x): ctx.size = len(x)",
        "job = replace(job, seat=3)",
        "job.tokens[0] = 3",
        "seat = job.seat",
    ],
)
def test_an_object_that_sets_itself_is_not(line: str):
    assert _found(line) == []


def test_a_part_of_an_object_is_another_object():
    assert _found("def sit(self): self.job.seat = 3") == [(1, "self.job")]
