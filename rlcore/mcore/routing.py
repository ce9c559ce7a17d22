"""Routing replay: routers choose the experts that an earlier pass has chosen for the same tokens.

A mixture of experts whose weights have changed a little, or that computes with other kernels, sends
some tokens to other experts, and their log-probs jump. With replay only the choice is that of the
earlier pass (arXiv:2507.18071, section 5.3); the probabilities are the router's own, and the
gradient goes through them.

Own code beside Megatron's `RouterReplay`, whose lists are global to a process: here a learner has
its own, and the routes come with the micro-batch, in any layout.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rlcore.mcore import compat
from rlcore.mcore.layout import ParallelLayout
from rlcore.mcore.microbatch import MicroBatch

UNKNOWN = -1
"""Expert of a token whose route no pass has recorded; its router chooses."""
Choose = Callable[..., tuple[Tensor, Tensor]]


class RoutingReplay:
    """The routers of one rank's model chunks."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        layout: ParallelLayout,
        *,
        num_layers: int,
        experts_per_token: int,
        recomputes: bool,
        sequence_parallel: bool,
    ) -> None:
        """`recomputes`: whether the backward pass recomputes the forward pass of every layer."""
        self._layout, self._num_layers, self._k = layout, num_layers, experts_per_token
        self._tp = layout.tp if sequence_parallel else 1
        self._recomputes = recomputes
        self._routers: list[_Router] = []
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, MoELayer):
                    router = _Router(self, module.layer_number - 1)
                    module.router.router_replay = router
                    self._routers.append(router)
        self._micro: MicroBatch | None = None
        self._forward_only = self._records = False
        self._seen: list[MicroBatch] = []
        self._counts: list[Tensor] = []

    def start(self, *, forward_only: bool, records: bool = False) -> None:
        """Begin a pass over micro-batches. `records`: keep what the routers choose."""
        self._forward_only, self._records = forward_only, records
        self._seen = []
        for router in self._routers:
            router.forget()

    def begin(self, micro: MicroBatch, *, is_first: bool) -> None:
        """Use the routes of this micro-batch in the forward pass that follows. `is_first`: whether
        this rank's first model chunk runs the pass."""
        self._micro = micro
        if self._records and is_first:
            self._seen.append(micro)

    def rerouted(self) -> Tensor:
        """Return two counts since the last call, summed over layers, [2] float64: tokens whose
        replayed experts differ from the router's own choice, and replayed tokens."""
        found = torch.stack(self._counts).sum(0) if self._counts else torch.zeros(2)
        self._counts = []
        return found.double()

    def recorded(self) -> Tensor:
        """Return the experts of all layers, in the order of the micro-batches' tokens: [T, layers *
        K] int16 on the CPU, on every rank. Collective over the model-parallel group."""
        parts = []
        for i, micro in enumerate(self._seen):
            rows = micro.tokens.numel()
            routes = torch.zeros(
                rows, self._num_layers, self._k, dtype=torch.int32, device=micro.tokens.device
            )
            for router in self._routers:
                routes[:, router.layer] = self._whole(router.chosen[i]).int()
            if self._layout.pp > 1:  # each stage has written its own layers
                group = parallel_state.get_pipeline_model_parallel_group()
                dist.all_reduce(routes, group=group)
            if self._layout.cp > 1:
                group = parallel_state.get_context_parallel_group()
                every = routes.new_empty(self._layout.cp * rows, *routes.shape[1:])
                compat.all_gather(every, routes.contiguous(), group=group)
                routes = every.index_select(0, micro.packed.gathered)
            place = micro.take.roll(-1)  # row of each token; `take` has that of the token before
            parts.append(routes.index_select(0, place).flatten(1).to(torch.int16).cpu())
        self.start(forward_only=True)
        return torch.cat(parts) if parts else torch.zeros(0, self._num_layers * self._k).short()

    def choose(
        self, router: "_Router", scores: Tensor, own: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return values and indices of the experts to use, [rows, K] each. Rows with a known route
        use the experts of the micro-batch; other rows use the router's `own` experts."""
        again = self._recomputes and not self._forward_only and torch.is_grad_enabled()
        if again:  # backward takes the micro-batches in the order of forward
            routes = router.later.popleft()
        else:
            assert self._micro is not None, "a router ran outside of a pass"
            routes = self._part(self._micro.routes, router.layer)
            if self._recomputes and not self._forward_only:
                router.later.append(routes)
        if routes is not None:
            own = _replayed(scores, own, routes, None if again else self._counts)
        if self._records:
            router.chosen.append(own[1])
        return own

    def _part(self, routes: Tensor | None, layer: int) -> Tensor | None:
        """Return the routes of one layer for the rows of this tensor-parallel rank: [rows, K]."""
        if routes is None:
            return None
        rows = routes.size(0) // self._tp
        start = self._layout.tp_rank * rows if self._tp > 1 else 0
        return routes[start : start + rows, layer * self._k : (layer + 1) * self._k].long()

    def _whole(self, rows: Tensor) -> Tensor:
        """Return the rows of all tensor-parallel ranks."""
        if self._tp == 1:
            return rows
        every = rows.new_empty(self._tp * rows.size(0), rows.size(1))
        group = parallel_state.get_tensor_model_parallel_group()
        compat.all_gather(every, rows.contiguous(), group=group)
        return every


class _Router:
    """One router; Megatron calls it in place of its own `RouterReplay`."""

    def __init__(self, replay: RoutingReplay, layer: int) -> None:
        self._replay, self.layer = replay, layer
        self.later: deque[Tensor | None] = deque()
        """Routes of forward passes whose backward will run forward again."""
        self.chosen: list[Tensor] = []

    def forget(self) -> None:
        """Drop everything that earlier passes have left."""
        self.later.clear()
        self.chosen = []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Choose,
    ) -> tuple[Tensor, Tensor]:
        """Return values and indices of the chosen experts, [rows, topk] each."""
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        return self._replay.choose(self, scores, own)


def _replayed(
    scores: Tensor, own: tuple[Tensor, Tensor], routes: Tensor, counts: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return values and indices of the experts in `routes`, and of the router's `own` experts in
    rows without a route. Append the counts of `RoutingReplay.rerouted` to `counts`."""
    known = routes[:, :1] != UNKNOWN
    chosen = torch.where(known, routes, own[1])
    if counts is not None:
        other = (chosen.sort(-1).values != own[1].sort(-1).values).any(-1)
        counts.append(torch.stack([other.sum(), known.sum()]))
    return scores.gather(1, chosen), chosen
