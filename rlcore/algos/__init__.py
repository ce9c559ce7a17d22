"""Training algorithms, one file each, on torch only; README.md has a table of them.

An algorithm is a module with one config class, a subclass of `base.AlgoConfig`, and a function

    loss(x: LossInputs, cfg) -> LossOutput

which returns the policy loss per token. `trainer/objective.py` adds correction, KL, entropy and
aggregation; the learner masks, sums and divides by the global count. `--algo NAME` selects a file
of this folder, `--algo my_pkg.my_module` any module on PYTHONPATH.
"""

import difflib
import importlib
import inspect
from types import ModuleType
from typing import get_args

from rlcore.algos.base import AlgoConfig, Estimator
from rlcore.utils.errors import ConfigError

NAMES = (
    "ppo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "gmpo",
    "cispo",
    "cispo_m1",
    "sapo",
    "topr",
    "decoupled_ppo",
    "tis_ratio01",
    "kimi15",
    "vespo",
    "dppo",
    "clip_cov",
    "kl_cov",
    "gpg",
    "reinforce",
    "opd",
    "gkd",
)


def module(name: str) -> ModuleType:
    """Import an algorithm's module by name or dotted path. Raise ConfigError if that fails."""
    if "." not in name and name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if name in get_args(Estimator):
            hint = f"; {name} is an advantage estimator: --algo grpo --algo.adv_estimator {name}"
        raise ConfigError(f"--algo {name}: allowed are {', '.join(NAMES)}, or a dotted path{hint}")
    path = name if "." in name else f"rlcore.algos.{name}"
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as e:
        raise ConfigError(f"--algo {name}: cannot import {e.name}; is it on PYTHONPATH?") from e
    if not callable(getattr(found, "loss", None)):
        raise ConfigError(f"--algo {name}: {path} has no function loss(x, cfg)")
    return found


def estimator(found: ModuleType, cfg: AlgoConfig) -> str:
    """Return the name of the advantage estimator, or `own` if the algorithm's module has a function
    `advantages(groups, cfg)`."""
    return "own" if hasattr(found, "advantages") else cfg.adv_estimator


def config_class(name: str) -> type[AlgoConfig]:
    """Return the config class that the module of algorithm `name` defines."""
    found = module(name)
    own = [
        c
        for _, c in inspect.getmembers(found, inspect.isclass)
        if issubclass(c, AlgoConfig) and c.__module__ == found.__name__
    ]
    if len(own) != 1:
        raise ConfigError(
            f"--algo {name}: needs exactly one subclass of AlgoConfig, has {len(own)}"
        )
    return own[0]
