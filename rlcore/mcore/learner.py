"""The learner on Megatron-Core: `protocols.Learner` for any layout, on CPU and GPU.

    accumulate   forward and backward of one batch; per-token sums, no data-parallel communication
    apply        one gradient reduction, division by the global count, clip, step, zero

The same samples give the same gradient under every layout and every cut into micro-batches, up to
rounding. No random numbers are drawn in training: dropout is 0.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlcore.algos import sequence
from rlcore.config.schema import ModelConfig, TrainConfig
from rlcore.hf.config import HFConfig
from rlcore.hf.rope import inverse_frequencies
from rlcore.mcore import bridge, checkpoint, compat, parallel
from rlcore.mcore.build import build, check, dtype_of
from rlcore.mcore.layout import replicas
from rlcore.mcore.logprob import log_probs
from rlcore.mcore.memory import Parked
from rlcore.mcore.microbatch import Cut, Cutter, MicroBatch, rounded_count
from rlcore.mcore.schedule import learning_rate
from rlcore.tensors import Batch, Loss, LossInputs
from rlcore.utils.log import announce, log


class MegatronLearner:
    """See `protocols.Learner`. The default process group must be the train ranks' own; without one,
    a world of one is made."""

    def __init__(
        self,
        hf: HFConfig,
        model: ModelConfig,
        train: TrainConfig,
        *,
        device: torch.device | str | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        total_updates: int = 0,
        keep_reference: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Build the model on this rank and load its weights. Collective.

        Args:
            temperature: of the sampler; log-probs and entropies are of logits / temperature.
            seed: of the weights, with `model.random_init`.
            total_updates: where a learning-rate schedule without an end of its own ends.
            keep_reference: keep the start weights for `logprobs(..., "reference")`.

        Raises:
            ValueError: a setting or layout that cannot work.
        """
        check(hf, model, train)
        learning_rate(train, train.lr_warmup_updates, total_updates)
        self.device = torch.device(device) if device is not None else parallel.device()
        self._own_world = not dist.is_initialized()
        if self._own_world:
            backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.hf, self.temperature = hf, temperature
        self.version = 0
        self.updates = 0
        """Optimizer steps tried, skipped ones included: the learning rate follows it."""
        self._train, self._total_updates = train, total_updates
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(train.deterministic, warn_only=True)
            # Nothing reads memory before it writes it: filling it would only take time.
            torch.utils.deterministic.fill_uninitialized_memory = False
        self.layout, self._groups = parallel.initialise(train, seed=seed, timeout_s=timeout_s)
        self.replicas = replicas(train, self.layout.world_size)
        chunks = build(hf, model, train, self.layout, self.device)
        self._config = chunks[0].config
        if model.random_init:
            bridge.init_random(chunks, hf, self.layout, seed)
        else:
            bridge.load_hf(chunks, hf, model.path, self.layout)
        self._models = [self._wrapped(chunk, dtype_of(model)) for chunk in chunks]
        self._optimizer = self._make_optimizer(dtype_of(model))
        self._reference = None
        if keep_reference:
            self._reference = [p.detach().to("cpu", copy=True) for p in self._parameters()]
        self._cutter = Cutter(
            self.layout,
            sequence_parallel=self._config.sequence_parallel,
            inverse_frequencies=inverse_frequencies(hf.head_dim, hf.rope_theta, hf.rope_scaling),
            dtype=dtype_of(model),
            device=self.device,
            budget=train.tokens_per_micro_batch,
        )
        self._sums: dict[str, Tensor] = {}
        self._kept = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._accumulated = False
        self._parked: Parked | None = None
        announce(
            "learner", f"Megatron-Core on {self.device.type}, {model.dtype}, {self._describe()}"
        )

    # ---- building

    def _wrapped(self, chunk: torch.nn.Module, dtype: torch.dtype) -> DistributedDataParallel:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=dtype is torch.bfloat16,
            overlap_grad_reduce=False,
            use_distributed_optimizer=self._train.distributed_optimizer,
            average_in_collective=False,
        )
        return DistributedDataParallel(self._config, settings, chunk)

    def _make_optimizer(self, dtype: torch.dtype) -> Any:
        train = self._train
        settings = OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.beta1,
            adam_beta2=train.beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=train.distributed_optimizer,
        )
        return get_megatron_optimizer(settings, self._models)

    def _describe(self) -> str:
        sizes = {name: getattr(self.layout, name) for name in ("tp", "pp", "vpp", "cp", "ep", "dp")}
        text = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        return text + (", distributed optimizer" if self._train.distributed_optimizer else "")

    def _parameters(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()

    # ---- the protocol

    def logprobs(self, batch: Batch, model: Literal["actor", "reference"] = "actor") -> Tensor:
        """[T] float32 on the CPU, on every rank: log p of each token, 0 for first tokens."""
        self._must_be_here("logprobs")
        cut = self._cut(batch)
        found: list[Tensor] = []

        def collect(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict]:
            logp, _ = self._scores(micro, logits, entropy_grad=False)
            found.append(logp.float())
            return logp.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        with torch.no_grad(), self._weights(model):
            self._run(cut, collect, forward_only=True)
        values = torch.zeros(batch.num_tokens, dtype=torch.float32, device=self.device)
        if self.layout.is_last_stage:
            values[cut.order.to(self.device)] = torch.cat(found)
        if self.layout.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, group=group, group_src=self.layout.pp - 1)
        return values.cpu()

    def accumulate(self, batch: Batch, loss: Loss) -> None:
        """Add the gradient of sum(per_token * mask * weight). Local to the model replica; under
        expert parallelism to the replicas that share experts. An empty batch takes part too."""
        self._must_be_here("accumulate")
        self._name_metrics(batch, loss)
        self._run(self._cut(batch), partial(self._loss, loss), forward_only=False)
        self._accumulated = True

    def kept(self) -> tuple[int, int]:
        """Tokens and sequences that the loss left in its mask since the last `apply`, over all
        ranks. Collective."""
        counts = self._kept.clone()
        if self.layout.world_size > 1:
            dist.all_reduce(counts)
        tokens, sequences = counts.tolist()
        return tokens, sequences

    def apply(self, normaliser: float) -> dict[str, float]:
        """One optimizer step on the gradient sums divided by `normaliser`, counted over all ranks.

        Returns `actor/grad_norm`, `actor/lr`, `actor/loss` and the means of the loss's metrics over
        all trained tokens since the last call. A gradient that is not finite changes nothing and
        is reported as `actor/skipped` 1. Every rank must have called `accumulate`.
        """
        if not self._accumulated:
            raise RuntimeError("apply without accumulate: every rank accumulates, be it nothing")
        if not normaliser > 0:
            raise ValueError(f"normaliser {normaliser}: must be above 0; leave empty updates out")
        finalize_model_grads(self._models)
        for model in self._models:
            model.scale_gradients(1.0 / normaliser)
        rate = learning_rate(self._train, self.updates, self._total_updates)
        norm = self._step(rate)
        finite = norm == norm and abs(norm) != float("inf")
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.updates += 1
        if finite:
            self.version += 1
        else:
            log.warning("update %d is left out: its gradient norm is %s", self.updates, norm)
        self._accumulated = False
        self._kept.zero_()
        return self._metrics(normaliser) | {
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped": 0.0 if finite else 1.0,
        }

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under Hugging Face names, full on every rank; collective, exhaust it."""
        self._must_be_here("export")
        return bridge.export_hf(self._models, self.hf, self.layout)

    def offload(self) -> None:
        """Give the accelerator's memory back: weights, gradients and optimizer states wait in host
        memory, gradients as zeros. On the CPU there is nothing to do."""
        if self.device.type == "cpu":
            announce("offload", "nothing to do, the learner is on the CPU")
            return
        if self._parked is None:
            self._parked = Parked(self._kept_tensors(), self._gradient_buffers())

    def onload(self) -> None:
        """Bring everything back to where it was."""
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    def save(self, path: Path) -> None:
        """Write model, optimizer and counters to the folder `path`; collective.

        Raises:
            OSError: on every rank, where one could not write; what was at `path` stays.
        """
        self._must_be_here("save")
        state = {"version": self.version, "updates": self.updates}
        checkpoint.save(Path(path), self._models, self._optimizer, state)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, under any layout; collective."""
        self._must_be_here("load")
        state = checkpoint.load(Path(path), self._models, self._optimizer)
        self.version, self.updates = state["version"], state["updates"]

    def close(self) -> None:
        """Drop Megatron's process groups, and the world if it was made here."""
        parallel.destroy()
        if self._own_world:
            dist.destroy_process_group()

    def _must_be_here(self, what: str) -> None:
        """Emptied storages are not an error to torch, but whatever lies at address 0."""
        if self._parked is not None:
            raise RuntimeError(f"{what} between offload and onload: the weights are not here")

    # ---- forward and backward

    def _cut(self, batch: Batch) -> Cut:
        rows = self._cutter.groups(batch)
        count = rounded_count(len(rows), self.layout)
        if self._groups.lockstep is not None:
            most = torch.tensor(count, device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._groups.lockstep)
            count = int(most)
        return self._cutter.cut(batch, rows, count)

    def _run(self, cut: Cut, function: Callable, *, forward_only: bool) -> None:
        """Megatron's schedule over the micro-batches; `function(micro, logits)` makes the loss."""

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable]:
            micro = next(iterator)
            logits = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)
            return logits, partial(function, micro)

        iterators = [iter(cut.micro_batches) for _ in self._models]
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators,
            model=self._models,
            num_microbatches=len(cut.micro_batches),
            seq_length=self._train.tokens_per_micro_batch,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _scores(
        self, micro: MicroBatch, logits: Tensor, *, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every token, [T] each, 0 for first tokens. Every rank of the
        last stage has them; under context parallelism each contributes its part to the gradient."""
        scores = log_probs(
            logits.squeeze(0),
            micro.targets,
            vocab_size=self.hf.vocab_size,
            temperature=self.temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            entropy_grad=entropy_grad,
        )
        return self._about(micro, scores.logp), self._about(micro, scores.entropy)

    def _about(self, micro: MicroBatch, rows: Tensor) -> Tensor:
        """From rows of this rank to the tokens that they predict."""
        if self.layout.cp > 1:
            group = parallel_state.get_context_parallel_group()
            rows = _GatherRows.apply(rows, group, micro.packed.plan.gathered)
        return torch.where(micro.predicted, rows.index_select(0, micro.take), 0.0)

    def _loss(
        self, loss: Loss, micro: MicroBatch, logits: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logp, entropy = self._scores(
            micro, logits, entropy_grad=getattr(loss, "needs_entropy_grad", True)
        )
        inputs = _inputs(micro, logp, entropy)
        out = loss(inputs)
        terms = out.per_token if micro.batch.weight is None else out.per_token * micro.batch.weight
        kept = inputs.mask if out.mask is None else inputs.mask & out.mask
        total = torch.where(kept, terms, 0.0).sum()
        # Tensor- and context-parallel ranks have the same tokens: one of them counts.
        own = self.layout.tp_rank == self.layout.cp_rank == 0
        counted = inputs.mask if own else inputs.mask & False
        self._add("loss", torch.where(kept & counted, terms, 0.0).sum())
        self._add("count", counted.sum())
        self._kept += torch.stack(
            [
                (kept & counted).sum(),
                sequence.count(kept & counted, inputs.sequence, inputs.num_sequences).gt(0).sum(),
            ]
        )
        for name, values in ({"actor/entropy": entropy} | out.metrics).items():
            self._add(name, torch.where(counted, values, 0.0).sum())
        # The model's outputs must reach the loss, or backward of a dummy has no graph to follow.
        if not total.requires_grad:
            total = total + 0.0 * logp.sum()
        return total, inputs.mask.sum().int(), {}

    # ---- the step

    @torch.no_grad()
    def _step(self, rate: float) -> float:
        """Step on the ready gradients if their norm is finite. Returns it, before clipping."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._train.weight_decay * group.get("wd_mult", 1.0)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if norm != norm or abs(norm) == float("inf"):
            return norm
        if self._train.clip_grad > 0 and norm > self._train.clip_grad:
            for part in optimizer.chained_optimizers:
                if parameters := part.get_parameters():
                    clip_grad_by_total_norm_fp32(parameters, self._train.clip_grad, norm)
        optimizer.step_with_ready_grads()
        return norm

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _name_metrics(self, batch: Batch, loss: Loss) -> None:
        """Stages before the last learn the metrics' names from a loss over a token that nobody
        trains, so that all ranks reduce the same vector."""
        if self.layout.is_last_stage:
            return
        out = loss(_no_inputs(self.device, batch.logp_ref is not None))
        for name in ["loss", "count", "actor/entropy", *out.metrics]:
            self._add(name, torch.zeros((), device=self.device))

    def _metrics(self, normaliser: float) -> dict[str, float]:
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name] for name in names])
        if self.layout.world_size > 1:
            dist.all_reduce(sums)
        self._sums = {}
        total = dict(zip(names, sums.tolist(), strict=True))
        loss, count = total.pop("loss"), total.pop("count")
        return {name: value / max(count, 1.0) for name, value in total.items()} | {
            "actor/loss": loss / normaliser
        }

    # ---- weights

    @contextmanager
    def _weights(self, model: str) -> Iterator[None]:
        """The reference's weights stand in for the actor's."""
        if model == "actor":
            yield
            return
        if self._reference is None:
            raise RuntimeError("logprobs of the reference: build the learner with keep_reference")
        kept = [p.detach().to("cpu", copy=True) for p in self._parameters()]
        try:
            for p, value in zip(self._parameters(), self._reference, strict=True):
                p.data.copy_(value)
            yield
        finally:
            for p, value in zip(self._parameters(), kept, strict=True):
                p.data.copy_(value)

    def _kept_tensors(self) -> Iterator[Tensor]:
        """Everything on the accelerator whose contents must survive an offload."""
        yield from (p.data for p in self._parameters())
        for part in self._optimizer.chained_optimizers:
            yield from (p.data for p in part.get_parameters())
            for state in part.optimizer.state.values() if part.optimizer else ():
                yield from (v for v in state.values() if isinstance(v, Tensor))

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for model in self._models:
            for buffer in model.buffers + model.expert_parallel_buffers:
                yield buffer.grad_data


class _GatherRows(torch.autograd.Function):
    """Rows of all context-parallel ranks in sequence order. Every rank computes the same loss of
    them, so backward keeps this rank's part and sums nothing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, gathered: Tensor) -> Tensor:
        ctx.rank, ctx.size = group.rank(), rows.size(0)
        ctx.save_for_backward(gathered)
        every = rows.new_empty(group.size() * rows.size(0))
        compat.all_gather(every, rows.contiguous(), group=group)
        return every.index_select(0, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gathered,) = ctx.saved_tensors
        every = torch.empty_like(grad).index_copy_(0, gathered, grad)
        return every[ctx.rank * ctx.size : (ctx.rank + 1) * ctx.size], None, None


def _inputs(micro: MicroBatch, logp: Tensor, entropy: Tensor) -> LossInputs:
    batch, own = micro.batch, logp.detach()
    versions = batch.versions
    if versions is None:
        versions = torch.full_like(batch.tokens, -1, dtype=torch.int32)
    return LossInputs(
        logp=logp,
        entropy=entropy,
        mask=batch.mask & micro.predicted,
        score=torch.zeros_like(own) if batch.score is None else batch.score,
        advantage=torch.zeros_like(own) if batch.advantage is None else batch.advantage,
        logp_old=own if batch.logp_old is None else batch.logp_old,
        logp_sampler=own if batch.logp_sampler is None else batch.logp_sampler,
        correction=torch.ones_like(own) if batch.correction is None else batch.correction,
        logp_ref=batch.logp_ref,
        sequence=micro.sequence,
        num_sequences=batch.num_sequences,
        versions=versions,
    )


def _no_inputs(device: torch.device, reference: bool) -> LossInputs:
    """One token that nobody trains."""
    zero = torch.zeros(1, device=device)
    return LossInputs(
        logp=zero,
        entropy=zero,
        mask=torch.zeros(1, dtype=torch.bool, device=device),
        score=zero,
        advantage=zero,
        logp_old=zero,
        logp_sampler=zero,
        correction=zero + 1,
        logp_ref=zero if reference else None,
        sequence=torch.zeros(1, dtype=torch.int64, device=device),
        num_sequences=1,
        versions=torch.zeros(1, dtype=torch.int32, device=device),
    )
