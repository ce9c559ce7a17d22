"""Balance the load of the experts, by global counts of one optimizer step.

In each layer, with N tokens in the update and E experts:

    f_i       share of expert i in the tokens' choices
    P_i       mean over tokens of the router's score of expert i: softmax, or sigmoids of sum 1
    aux loss  E sum_i f_i P_i with the shares of the update before; 1 if all loads are equal
    z-loss    mean over tokens of logsumexp(logits)^2
    bias      b_i += rate * sign(mean count - count_i), after the step

The gradient adds, for each layer, coef * loss, as in Megatron. The shares are those of the update
before because micro-batches run one after another; so the losses are sums over tokens, and one
gradient under every layout (global-batch balancing, arXiv:2501.11873, without its buffer).

A token counts once for each sequence that has it, also if a common prefix is computed once.
Padding, forward-only passes and recomputed forward passes do not count. With routing replay the
replayed experts count.

Own code instead of Megatron's: its counts and divisors are of micro-batches, include padding, and
count a common prefix once.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rlcore.config.schema import TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.mcore.layout import ParallelLayout
from rlcore.mcore.microbatch import MicroBatch

Route = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""`TopKRouter.routing`: from logits to probabilities and a map of the chosen experts."""


class ExpertBalance:
    """Load of the experts of one learner, whose routers it watches."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        hf: HFConfig,
        train: TrainConfig,
        layout: ParallelLayout,
        device: torch.device,
    ) -> None:
        self._layout, self._num_experts, self._k = layout, hf.num_experts, hf.experts_per_token
        self._tp = layout.tp if train.sp else 1
        self._recomputes = train.recompute == "full"
        self._aux, self._z = train.moe_aux_loss_coef, train.moe_z_loss_coef
        self._rate = train.moe_bias_update_rate
        self._routers: dict[int, TopKRouter] = {}
        self._later: dict[int, deque[Tensor]] = {}
        """Weights of micro-batches whose backward will run forward again, by layer."""
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    layer = module.layer_number - 1
                    self._routers[layer], self._later[layer] = module.router, deque()
                    module.router.routing = partial(self._route, module.router.routing, layer)
        self._weights: Tensor | None = None
        """Number of sequences that have the token of each row of this rank; [rows]."""
        columns = 2 * hf.num_experts + 1 if self.has_losses else hf.num_experts
        self._sums = torch.zeros(hf.num_layers, columns, dtype=torch.float64, device=device)
        """By layer: tokens of each expert; with losses also sums of scores, and of z-losses."""
        self._counts = torch.zeros(hf.num_layers, hf.num_experts, dtype=torch.int64)
        """Tokens of each expert in the update that `measure` has seen, on all ranks."""
        self._kept: Tensor | None = None
        """Those of the last optimizer step."""
        self._shares: Tensor | None = None  # [layers, E] float64 on the device
        self._announced = (0, 0.0)

    @property
    def has_losses(self) -> bool:
        """Whether there is an auxiliary loss or a z-loss, which needs `begin_update`."""
        return bool(self._aux or self._z)

    def biases(self) -> Iterator[Tensor]:
        """Yield the expert biases of this rank's routers, if they have some."""
        for router in self._routers.values():
            if router.expert_bias is not None:
                yield router.expert_bias

    # ---- forward and backward

    def begin_update(self, num_tokens: int, normaliser: float) -> None:
        """Set the number of tokens of the next update over all ranks, and its normaliser."""
        self._announced = (num_tokens, normaliser)

    def start(self) -> None:
        """Begin a pass over micro-batches; without calls of `begin` it is not counted."""
        self._weights = None
        for waiting in self._later.values():
            waiting.clear()

    def begin(self, micro: MicroBatch) -> None:
        """Count the tokens of this micro-batch in the forward pass that follows."""
        if self.has_losses and not self._announced[0]:
            raise RuntimeError(
                "accumulate without begin_update: losses of routers need the update's number of "
                "tokens; call begin_update first"
            )
        assert micro.shared_by is not None, "the cutter counts no tokens"
        part = self._layout.tp_rank if self._tp > 1 else 0
        self._weights = micro.shared_by.chunk(self._tp)[part]

    def _route(
        self, route: Route, layer: int, logits: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route with Megatron's `route`; count the tokens of each expert, and add the gradient of
        the losses to the logits."""
        weights = self._weights
        if weights is None or not torch.is_grad_enabled():
            if weights is not None:  # backward takes the micro-batches in the order of forward
                self._later[layer].append(weights)
            return route(logits, padding_mask)
        if self._recomputes:
            weights = self._later[layer].popleft()
        if self.has_losses:
            logits = self._with_losses(layer, logits, weights)
        probs, chosen = route(logits, padding_mask)
        counts = torch.where(chosen, weights.unsqueeze(1), 0).sum(0)
        self._sums[layer, : self._num_experts] += counts
        return probs, chosen

    def _with_losses(self, layer: int, logits: Tensor, weights: Tensor) -> Tensor:
        """Return the logits, whose backward adds the gradient of the losses, times the normaliser
        by which `apply` divides."""
        rows, e = logits.flatten(0, -2), self._num_experts
        weights = weights.to(rows.dtype)
        if self._routers[layer].score_function == "sigmoid":
            scores = rows.sigmoid()
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        else:
            scores = rows.softmax(-1)
        mass = weights @ scores  # [E]
        z = weights @ rows.logsumexp(-1).square()
        self._sums[layer, e : 2 * e] += mass.detach()
        self._sums[layer, 2 * e] += z.detach()
        total = self._z * z
        if self._shares is not None:
            total = total + self._aux * e * (self._shares[layer].to(mass.dtype) @ mass)
        num_tokens, normaliser = self._announced
        return _WithLoss.apply(logits, total * (normaliser / num_tokens))

    # ---- the optimizer step

    def sums(self) -> Tensor:
        """Return this rank's sums since the last `forget`, float64; the caller adds up those of all
        ranks."""
        return self._sums.flatten()

    def forget(self) -> None:
        """Drop what is announced and summed of the update."""
        self._sums.zero_()
        self._announced = (0, 0.0)

    def measure(self, sums: Tensor, normaliser: float) -> dict[str, float]:
        """Return the metrics of an update, given its `sums` over all ranks.

        Raises:
            ValueError: `begin_update` announced another number of tokens or another normaliser.
        """
        e = self._num_experts
        sums = sums.view_as(self._sums).cpu()
        counts = sums[:, :e]
        totals = counts.sum(1)
        routed = totals > 0  # layers with experts
        num_tokens = int(totals.max()) // self._k
        if self.has_losses and (num_tokens, normaliser) != self._announced:
            raise ValueError(
                f"apply: the update has {num_tokens} tokens and normaliser {normaliser}, but "
                f"begin_update announced {self._announced}; announce what is accumulated"
            )
        self._counts = counts.long()
        if not num_tokens:
            return {}
        loads = counts[routed]
        found = {
            "actor/expert_load_max": float((loads.amax(1) / loads.mean(1)).max()),
            "actor/unused_experts": float((loads == 0).double().mean()),
        }
        if self.has_losses:
            shares = loads / totals[routed, None]
            means = sums[routed, e:] / num_tokens
            found["actor/moe_aux_loss"] = float(e * (shares * means[:, :e]).sum(1).mean())
            found["actor/moe_z_loss"] = float(means[:, e].mean())
        return found

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step, update the expert biases, and keep the shares of the update."""
        self._keep(self._counts)
        for layer, router in self._routers.items() if self._rate else ():
            counts = self._counts[layer]
            below = counts.sum() - self._num_experts * counts  # in integers: the same on all ranks
            sign = below.sign().to(router.expert_bias)
            router.expert_bias.add_(sign, alpha=self._rate)

    def _keep(self, counts: Tensor) -> None:
        total = counts.sum(1, keepdim=True).clamp(min=1)
        self._kept = counts
        self._shares = (counts / total.double()).to(self._sums.device)

    # ---- checkpoints

    def state(self) -> list[str] | None:
        """Return the tokens of each expert in the last optimizer step, a text for each layer."""
        if self._kept is None:
            return None
        return [" ".join(map(str, row)) for row in self._kept.tolist()]

    def load(self, state: list[str] | None) -> None:
        """Continue after the optimizer step of `state`; None: the next update has no shares."""
        self._kept = self._shares = None
        if state is not None:
            self._keep(torch.tensor([[int(n) for n in row.split()] for row in state]))


class _WithLoss(torch.autograd.Function):
    """Return the first argument; backward adds the gradient of the second, a loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor) -> Tensor:
        ctx.one = torch.ones_like(loss)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.one
