"""The cases of compare_algos.py, and rlcore's answers to them.

A case is a batch of random responses as padded arrays, the peers' view, which this side packs. The
answers come on the path of a training step: correction, rejection, loss, KL, entropy, aggregation
by the counts of what is left (`algos.loss_of`). Everything is float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore import algos
from rlcore.algos import advantage, correction, kl, returns, value
from rlcore.algos.base import AlgoConfig
from rlcore.tensors import Batch, LossInputs, ValueInputs, cumulative
from rlcore.trainer import plan

KINDS = ("near", "mixed", "varied", "masked", "far")
"""near: log-ratios up to 0.1; the others: from 1e-6 to beyond the clips. varied: an advantage for
every token instead of one for the response. masked: a response that is not trained. far: log-ratios
beyond the clamps at 20 too."""
GROUPS = {"group": (1, 2, 4, 5), "pairs": (2, 4, 6)}
"""Sizes of the groups; those of `pairs` suit estimators that need two."""
RESPONSES = 12
MAX_TOKENS = 32
"""Longest response: the divisor of seq-mean-token-sum-norm."""
TRAINED = 65
"""Tokens of a case. verl has the factor N / (N - 1) of a variance in float32, where 65 / 64 is
exact."""
SPREADS = {
    "near": ((1e-6, 1e-3, 0.03), (0.0, 1e-3, 0.02)),
    "far": ((0.3, 3.0, 12.0), (0.0, 0.3, 12.0)),
}
"""Scales of log p / p_old and of log p_old / p_sampler; each token draws one."""
WIDE = ((1e-6, 1e-2, 0.3, 1.5), (0.0, 1e-3, 0.3, 1.5))

Answer = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One batch of B responses in rows of R places."""

    arrays: dict[str, np.ndarray]
    """By name, [B, R] or [B]; `length` counts a response's tokens, untrained ones included."""
    prompts: tuple[int, ...]
    """Tokens of each prompt."""

    @property
    def sizes(self) -> list[int]:
        """Packed tokens of each row: prompt and response."""
        return [p + n for p, n in zip(self.prompts, self.arrays["length"].tolist(), strict=True)]

    @property
    def sequence(self) -> Tensor:
        """[T] int64: the row of a packed token."""
        return torch.repeat_interleave(torch.arange(len(self.prompts)), torch.tensor(self.sizes))

    @property
    def place(self) -> Tensor:
        """[T] int64: where a packed token stands in the flattened [B, R]; -1 on prompts."""
        width, parts = self.arrays["mask"].shape[1], []
        for row, (p, size) in enumerate(zip(self.prompts, self.sizes, strict=True)):
            parts += [torch.full((p,), -1), row * width + torch.arange(size - p)]
        return torch.cat(parts)

    @property
    def mask(self) -> Tensor:
        """[T] bool: trained tokens."""
        return self.packed("mask", on_prompts=0).bool()

    @property
    def where(self) -> tuple[Tensor, Tensor, int]:
        """What functions of whole sequences ask for."""
        return self.mask, self.sequence, len(self.prompts)

    def packed(self, name: str, on_prompts: float = -0.37) -> Tensor:
        """[T] an array as packed tokens. What stands on prompts must not matter."""
        given, place = torch.from_numpy(self.arrays[name]), self.place
        if given.dim() == 1:
            return given[self.sequence]
        return torch.where(place < 0, on_prompts, given.flatten()[place]).to(given.dtype)

    def padded(self, values: Tensor) -> Tensor:
        """[B, R] from packed tokens, 0 behind the end of a response."""
        place, shape = self.place, self.arrays["mask"].shape
        assert not values[place < 0].any(), "a token of a prompt has a value or a gradient"
        out = values.new_zeros(shape[0] * shape[1])
        return out.index_copy(0, place[place >= 0], values[place >= 0]).view(shape)


def make(kind: str, seed: int) -> Case:
    """A random batch of ragged responses with `TRAINED` trained tokens."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    rows = RESPONSES
    untrained = [rows - 1] if kind == "masked" else []
    cuts = np.sort(rng.choice(np.arange(1, TRAINED), rows - len(untrained) - 1, replace=False))
    trained = [*np.diff([0, *cuts, TRAINED]).tolist(), *(0 for _ in untrained)]
    holes = [int(rng.integers(0, 3)) if n > 1 else 0 for n in trained]
    lengths = [n + h if n else 3 for n, h in zip(trained, holes, strict=True)]
    shape = (rows, max(lengths) + 1)
    mask = np.zeros(shape, dtype=np.int64)
    for row, (n, h) in enumerate(zip(trained, holes, strict=True)):
        mask[row, : n + h] = 1
        mask[row, 1 + rng.permutation(n + h - 2)[:h] if h else []] = 0

    def spread(scales: tuple[float, ...]) -> np.ndarray:
        return rng.choice(scales, shape) * rng.normal(size=shape)

    ratios, mismatch = SPREADS.get(kind, WIDE)
    old, value_old = -rng.gamma(1.0, 1.5, shape) - 1e-3, rng.normal(size=shape)
    score = np.where(rng.random(rows) < 0.6, rng.integers(0, 2, rows), rng.normal(size=rows))
    score[1:3] = 1.0  # the group of two has no spread
    of_response = rng.normal(size=rows)
    of_token = (
        rng.normal(size=shape) if kind == "varied" else of_response[:, None] + np.zeros(shape)
    )
    token_reward, counted = np.zeros(shape), mask.copy()
    counted[untrained] = np.arange(shape[1]) < 3
    token_reward[np.arange(rows), shape[1] - 1 - counted[:, ::-1].argmax(1)] = score
    arrays = {
        "mask": mask,
        "length": np.array(lengths),
        "logp": old + spread(ratios),
        "old": old,
        "sampler": old + spread(mismatch),
        "ref": old + spread(ratios),
        "entropy": rng.gamma(2.0, 0.5, shape),
        "advantage": of_token,
        "response_advantage": of_response,
        "score": score,
        "token_reward": token_reward,
        "baseline": rng.random(rows),
        "value": value_old + spread((0.05, 0.5)),
        "value_old": value_old,
        "returns": value_old + spread((0.05, 1.0)),
        "kls": rng.gamma(1.0, 0.1, 8),
    }
    for name, sizes in GROUPS.items():
        arrays[name] = np.repeat(np.arange(len(sizes)), sizes)
    prompts = tuple(int(p) for p in rng.integers(1, 5, rows))
    p = np.exp(old)  # the others of a vocabulary have a part of (1 - p)^2 together
    arrays["sum_pi_squared"] = p**2 + (1 - p) ** 2 * rng.random(shape)  # drawn last
    return Case(arrays, prompts)


# ---- rlcore's answers


def inputs(case: Case) -> LossInputs:
    """What the learner hands to a loss, as one micro-batch."""
    mask = case.mask
    return LossInputs(
        log_probs=case.packed("logp").requires_grad_(),
        entropy=case.packed("entropy").requires_grad_(),
        mask=mask,
        score=case.packed("score"),
        advantage=case.packed("advantage"),
        old_log_probs=case.packed("old"),
        rollout_log_probs=case.packed("sampler"),
        correction=torch.ones(len(mask), dtype=torch.float64),
        ref_log_probs=case.packed("ref"),
        sequence=case.sequence,
        num_sequences=len(case.prompts),
        versions=torch.where(mask, 0, -1).int(),
    )


def loss(algo: str, **settings: Any) -> Callable[[Case], Answer]:
    """The loss of an update in one micro-batch and its gradients, with the figures that go with it
    averaged over the trained tokens, as the learner does."""

    def answer(case: Case) -> Answer:
        x = inputs(case)
        out = algos.loss_of(x, algo, max_tokens=MAX_TOKENS, **settings)
        gradients = _with_gradients(case, out.loss, logp=x.log_probs, entropy=x.entropy)
        return gradients | _figures(out.metrics)

    return answer


def _figures(metrics: dict[str, float]) -> Answer:
    return {f"metric {n}": torch.tensor(m, dtype=torch.float64) for n, m in metrics.items()}


def _with_gradients(case: Case, total: Tensor, **leaves: Tensor) -> Answer:
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    found = {
        f"d_{name}": case.padded(torch.zeros_like(x) if g is None else g)
        for (name, x), g in zip(leaves.items(), grads, strict=True)
    }
    return {"loss": total.detach(), **found}


def corrected(**settings: Any) -> Callable[[Case], Answer]:
    """Correction weights, the mask that rejection leaves, the figures of a step."""
    cfg = algos.config("grpo", **settings)

    def answer(case: Case) -> Answer:
        x = inputs(case)
        found = algos.loss_of(x, "grpo", **settings)
        out = {"mask": case.padded(found.kept.double())}
        if cfg.rollout_is != "none":
            log_w = x.old_log_probs - x.rollout_log_probs
            weights = correction.weights(cfg, log_w, *case.where) / found.correction_mean
            out["weights"] = case.padded(torch.where(x.mask, weights, 0.0))
        return out | _figures(found.metrics)

    return answer


def uncapped(**settings: Any) -> Callable[[Case], Answer]:
    """The maximum of the weights before the cap, by verl's name, which has it for sequences."""
    all_figures = corrected(**settings)

    def answer(case: Case) -> Answer:
        found = all_figures(case)["metric rollout_corr/rollout_is_uncapped_max"]
        return {"metric rollout_corr/rollout_is_max": found}

    return answer


def kept_weights(**settings: Any) -> Callable[[Case], Answer]:
    """Correction weights, 0 where a token is rejected."""
    both = corrected(**settings)

    def answer(case: Case) -> Answer:
        found = both(case)
        return {"weights": found["weights"] * found["mask"]}

    return answer


def advantages(estimator: str, groups: str = "group", **settings: Any) -> Callable[[Case], Answer]:
    """Advantages of every token, and returns where the estimator has them."""
    cfg = AlgoConfig(adv_estimator=estimator, **settings)

    def by_response(case: Case) -> Answer:
        score, group = case.arrays["score"], case.arrays[groups]
        tokens = case.arrays["mask"].sum(1)
        given = [
            advantage.GroupRewards(
                rewards=tuple(score[group == g].tolist()),
                lengths=tuple(tokens[group == g].tolist()),
            )
            for g in range(group.max() + 1)
        ]
        flat = [a for row in advantage.outcome(given, cfg) for a in row]
        values = torch.tensor(flat, dtype=torch.float64)
        return {"advantages": values[:, None] * torch.from_numpy(case.arrays["mask"])}

    def by_token(case: Case) -> Answer:
        mask = case.mask
        batch = Batch(
            tokens=torch.zeros(len(mask), dtype=torch.int64),
            cu_seqlens=cumulative(case.sizes),
            mask=mask,
            rollout_log_probs=case.packed("sampler"),
            value_old=case.packed("value_old"),
        )
        reward = returns.token_rewards(batch, case.arrays["score"].tolist(), None)
        base = case.arrays["baseline"].tolist() if estimator == "remax" else None
        found, gains = returns.advantages(batch, reward, cfg, base)
        if estimator != "remax":
            found = returns.whitened(found, mask, returns.whitening_sums(found, mask))
        return {"advantages": case.padded(found), "returns": case.padded(gains)}

    return by_token if estimator in returns.TOKEN else by_response


def token_baseline(estimator: str, tools: bool, **settings: Any) -> Callable[[Case], Answer]:
    """Advantages and returns of every token. Without `tools` all tokens of a response are
    trained."""
    cfg = AlgoConfig(adv_estimator=estimator, **settings)

    def answer(case: Case) -> Answer:
        mask = case.mask if tools else case.place >= 0
        batch = Batch(
            tokens=torch.zeros(len(mask), dtype=torch.int64),
            cu_seqlens=cumulative(case.sizes),
            mask=mask,
            rollout_log_probs=case.packed("sampler"),
            old_log_probs=case.packed("old"),
            log_sum_pi_squared=case.packed("sum_pi_squared", on_prompts=1.0).log(),
        )
        like = torch.zeros(len(mask), dtype=torch.float64)
        reward = returns.token_rewards(batch, case.arrays["score"].tolist(), like)
        group = case.arrays["group"].tolist()
        terms = returns.baseline_terms(batch, reward, cfg, group)
        sums = returns.baseline_sums(terms, max(group) + 1, int(terms.place.max()) + 1)
        found, gains = returns.above_baseline(terms, reward, sums)
        return {"advantages": case.padded(found), "returns": case.padded(gains)}

    return answer


def divergence(kind: str) -> Callable[[Case], Answer]:
    """The KL estimate of every trained token and the gradient of its sum."""

    def answer(case: Case) -> Answer:
        logp = case.packed("logp").requires_grad_()
        values = torch.where(case.mask, kl.estimate(kind, logp, case.packed("ref")), 0.0)
        found = _with_gradients(case, values.sum(), logp=logp)
        return {"values": case.padded(values.detach()), "d_logp": found["d_logp"]}

    return answer


def overlong(share: float, penalty: float) -> Callable[[Case], Answer]:
    """Reward that a response loses for its length."""
    cfg = AlgoConfig(overlong_share=share, overlong_penalty=penalty)

    def answer(case: Case) -> Answer:
        lengths = case.arrays["mask"].sum(1).tolist()
        lost = [plan.overlong(n, MAX_TOKENS, cfg) for n in lengths]
        return {"values": torch.tensor(lost, dtype=torch.float64)}

    return answer


def controlled(start: float, target: float, horizon: int, samples: int) -> Callable[[Case], Answer]:
    """The coefficient after every KL of the case."""

    def answer(case: Case) -> Answer:
        control, out = kl.AdaptiveController(target, horizon), []
        for figure in case.arrays["kls"].tolist():
            control.update(figure, samples)
            out.append(start * control.scale)
        return {"values": torch.tensor(out, dtype=torch.float64)}

    return answer


def critic(clip: float) -> Callable[[Case], Answer]:
    """The value loss, averaged over the trained tokens."""

    def answer(case: Case) -> Answer:
        estimate, mask = case.packed("value").requires_grad_(), case.mask
        x = ValueInputs(
            value=estimate,
            value_old=case.packed("value_old"),
            returns=case.packed("returns"),
            mask=mask,
            sequence=case.sequence,
            num_sequences=len(case.prompts),
        )
        out = value.loss(x, clip)
        share = out.metrics["critic/vf_clipfrac"][mask].mean()
        total = torch.where(mask, out.per_token, 0.0).sum() / mask.sum()
        found = _with_gradients(case, total, value=estimate)
        return found | {"metric critic/vf_clipfrac": share}

    return answer
