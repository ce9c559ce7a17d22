"""Training algorithms, one file each, on torch only; README.md has a table of them.

An algorithm is a module with one config class, a subclass of `base.AlgoConfig`, and a function

    loss(x: LossInputs, cfg) -> LossOutput

which returns the policy loss per token. `algos/objective.py` adds correction, KL, entropy and
aggregation; the learner masks, sums and divides by the global count. `--algo NAME` selects a file
of this folder, `--algo my_pkg.my_module` any module on PYTHONPATH. `loss_of` gives notebooks and
forks the whole loss of an update.
"""

import difflib
import importlib
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from rlcore.algos.base import AlgoConfig, Estimator
from rlcore.utils import bounds
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.algos.update import UpdateLoss
    from rlcore.tensors import LossInputs

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


def config(name: str, **settings: Any) -> AlgoConfig:
    """Return the config of algorithm `name` with `settings`, such as clip_high=0.3. Raise
    ConfigError with one sentence for each setting that cannot work."""
    from rlcore.algos import advantage, correction  # imports torch, which is slow

    cls = config_class(name)
    found = bounds.mistyped(cls, settings, "algo")
    if not found:
        cfg = msgspec.convert(settings, cls)
        found = [*bounds.broken(cfg, "algo"), *cfg.problems()]
        found += [*advantage.problems(cfg), *correction.problems(cfg)]
    if found:
        raise ConfigError("\n".join(found))
    return cfg


def loss_of(
    rows: "LossInputs | Mapping[str, Tensor]",
    name: str,
    *,
    max_tokens: int | None = None,
    **settings: Any,
) -> "UpdateLoss":
    """Compute the loss of one update with algorithm `name`, exactly as the trainer does over all
    its ranks and micro-batches: rollout correction and rejection, policy loss, KL, entropy, and the
    sum over kept tokens divided by N. Call `backward()` on the result's `loss`.

    Args:
        rows: tensors of the whole update by the names of `LossInputs` (rlcore/tensors.py). Padded
            rows are [B, R] with any values in the padding. Packed rows are [T] with `sequence`
            [T], the row of each token. Gradients go to `log_probs`, `entropy` and `top_log_probs`.
                log_probs          nats: log-prob of the token under the learner
                mask               1 on trained tokens, else 0
                advantage          [B, R], or [B] for one per response
                old_log_probs      missing: `log_probs`, as in the first update of a step
                rollout_log_probs  missing: `old_log_probs`, a sampler without mismatch
                ref_log_probs      needed with kl_coef
                entropy            nats; needed with entropy_coef
                score              [B, R] or [B]: raw reward; needed by topr
                versions           policy version of each token, for the staleness metrics
            Losses that learn from a teacher need its log-probs as well.
        max_tokens: maximum response length in tokens, the divisor of seq-mean-token-sum-norm
            (dr_grpo).
        settings: keys of the algorithm's config; those of advantages and rewards have no effect.

    Raises:
        ConfigError: names every setting and every tensor that is wrong or missing.
    """
    from rlcore.algos import update  # imports torch, which is slow

    return update.of_rows(rows, module(name), config(name, **settings), max_tokens)
