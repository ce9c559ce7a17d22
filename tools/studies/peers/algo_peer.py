"""What the peers of compare_algos.py share: jobs in, answers out, stubs for heavy imports.

A peer runs in a Python of its own and imports nothing of rlcore. It is called with three files: the
jobs as JSON, the cases as .npz, and where the answers go as .npz. A job names a function of the
peer script, a case and settings; its answer is a dict of arrays. The last line on stdout is JSON
with the versions.

Arrays of a case are padded, [B, R] for B responses of at most R tokens, float64; `mask` is int64,
as verl and TRL have it.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Case = dict[str, Tensor]
Answer = dict[str, Tensor | float]


class Empty:
    """What a stub has for every name: base class, decorator and annotation, but no behaviour."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    def __init_subclass__(cls, **kwargs) -> None:
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if args else None


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the named modules, and what is below them, as modules full of `Empty`. They are what
    the peer imports beside the functions that are compared and these never call."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, path=None, target=None):
        if any(name == n or name.startswith(n + ".") for n in self._names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        def get(name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Empty,), {})

        module.__getattr__ = get


def stub(*names: str) -> None:
    """Put stubs in the place of these modules, also where the real ones are installed."""
    sys.meta_path.insert(0, Stubs(names))


def folder(name: str, path: str) -> None:
    """A package that is its folder alone: its __init__ does not run."""
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module


def leaf(x: Tensor) -> Tensor:
    """A copy that gradients are taken of."""
    return x.detach().clone().requires_grad_()


def with_gradients(loss: Tensor, **leaves: Tensor) -> Answer:
    """The loss and its gradient by every leaf, as `loss` and `d_<name>`."""
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {
        f"d_{name}": torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {"loss": loss.detach(), **found}


def serve(functions: dict[str, Callable[..., Answer]], versions: dict[str, str]) -> None:
    """Answer the jobs that the command line names."""
    jobs_file, cases_file, answers_file = sys.argv[1:4]
    with open(jobs_file) as f:
        jobs = json.load(f)
    arrays = np.load(cases_file)
    cases: dict[str, Case] = {}
    for key in arrays.files:
        case, _, name = key.partition("/")
        cases.setdefault(case, {})[name] = torch.from_numpy(arrays[key])
    answers = {}
    for job in jobs:
        case = {name: x.clone() for name, x in cases[job["case"]].items()}
        answer = functions[job["function"]](case, **job["settings"])
        for name, value in answer.items():
            answers[f"{job['id']}/{name}"] = torch.as_tensor(value).detach().numpy()
    np.savez(answers_file, **answers)
    print(json.dumps({"torch": torch.__version__, **versions}))
