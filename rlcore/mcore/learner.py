"""The learner on Megatron-Core: `protocols.Learner` for any layout, on CPU and GPU.

`accumulate` runs forward and backward of a batch and sums gradients, without data-parallel
communication. `apply` reduces the sums, divides by the global count, clips, steps and zeroes.

The same samples give the same gradient under every layout and every division into micro-batches, up
to rounding. Training draws no random numbers: dropout is 0.

The model's head gives logits over the vocabulary (actor and other log-prob models) or one value per
token (critic). Actor and critic of one process share only the process groups.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import tee
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlcore.algos import sequence
from rlcore.config import rules
from rlcore.config.schema import NO_ADAPTERS, ClusterConfig, LoraConfig, ModelConfig, TrainConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.mcore import adam, bridge, checkpoint, compat, flash, inputs, parallel
from rlcore.mcore.balance import ExpertBalance
from rlcore.mcore.build import Head, build, dtype_of
from rlcore.mcore.check import check, check_replay
from rlcore.mcore.head import LateHead
from rlcore.mcore.layer_inputs import LayerInputs
from rlcore.mcore.layout import model_parallel_groups
from rlcore.mcore.lora import SUFFIX, BaseModel
from rlcore.mcore.memory import Parked, identity
from rlcore.mcore.microbatch import Cut, Cutter, MicroBatch, rounded_count
from rlcore.mcore.reference import ReferenceModel
from rlcore.mcore.routing import RoutingReplay
from rlcore.mcore.schedule import learning_rate
from rlcore.mcore.shim import patch_norm
from rlcore.ops import head as chunked
from rlcore.ops import native
from rlcore.ops.logprob import LogProbs, log_probs, log_probs_and_squares, statistics_dtype
from rlcore.ops.policy import ROWS, PolicyLoss, policy_loss
from rlcore.ops.products import replace_products
from rlcore.protocols import PARTS, Part, WrittenFiles
from rlcore.records import Shard
from rlcore.tensors import (
    Batch,
    Loss,
    LossInputs,
    LossOutput,
    PolicyInputs,
    PolicySpec,
    ValueInputs,
    ValueLoss,
)
from rlcore.utils.errors import ConfigError
from rlcore.utils.log import announce, log


class MegatronLearner:
    """Megatron-Core implementation of `protocols.Learner`. The default process group must consist
    of the train ranks. If no group exists, the learner creates a group of one rank."""

    def __init__(
        self,
        hf: HFConfig,
        model: ModelConfig,
        train: TrainConfig,
        *,
        head: Head = "lm",
        lora: LoraConfig = NO_ADAPTERS,
        device: torch.device | str | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        total_updates: int = 0,
        keep_reference: bool = False,
        replays_routing: bool = False,
        timeout_s: float = ClusterConfig.timeout_s,
    ) -> None:
        """Build the model on this rank and load its weights. Collective.

        Args:
            head: `lm` builds a model with log-probs; `value` builds a critic, which has `values`
                instead of `logprobs`, metrics critic/* instead of actor/*, and no `export`.
            lora: with a rank, only adapters are trained, and the reference is the base.
            temperature: sampling temperature; log-probs and entropies are of logits / temperature.
            seed: seed of the initial weights, with `model.random_init`.
            total_updates: update at which the learning rate stops falling if
                `train.lr_decay_updates` is 0.
            keep_reference: keep the start weights for `logprobs(..., "reference")`.
            replays_routing: follow the routes of batches that have some (`Batch.routes`).

        Raises:
            ValueError: a setting is invalid, or another learner of this process has another layout.
        """
        check(hf, model, train, lora)
        if replays_routing:
            check_replay(hf)
        learning_rate(train, train.lr_warmup_updates, total_updates)
        if head == "value" and keep_reference:
            raise ValueError(
                "keep_reference True: a critic computes no log-probs and needs no reference; set "
                "it for the actor only"
            )
        self.device = torch.device(device) if device is not None else parallel.device()
        if self.device.type == "cpu":
            replace_products(batch_invariant=train.true_on_policy)
        self.hf, self.head, self.temperature = hf, head, temperature
        self._role = "critic" if head == "value" else "actor"
        self.version = 0
        self.updates = 0
        """Number of optimizer steps, including skipped steps; determines the learning rate."""
        self._async_writer: checkpoint.AsyncWriter | None = None
        self._train, self._total_updates = train, total_updates
        self.lora = lora
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(train.deterministic, warn_only=True)
            # No code reads uninitialized memory, so filling it would only cost time.
            fill = False
            # torch's type stubs lack this flag.
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        with ExitStack() as undo:
            self.layout, self._groups = parallel.initialise(
                train, where=self.device, seed=seed, timeout_s=timeout_s
            )
            undo.callback(parallel.destroy)
            self._build(model, seed, keep_reference, replays_routing)
            self._on_close = undo.pop_all()

    # ---- building

    def _build(
        self, model: ModelConfig, seed: int, keep_reference: bool, replays_routing: bool
    ) -> None:
        hf, train = self.hf, self._train
        own_attention = rules.has_own_attention(train)
        self.model_parallel_groups: Sequence[Sequence[int]] = model_parallel_groups(
            train, self.layout.world_size
        )
        chunks = build(hf, model, train, self.layout, self.device, self.head, self.lora)
        self._config = chunks[0].config
        self._routing: RoutingReplay | None = None
        if replays_routing:
            self._routing = RoutingReplay(
                chunks,
                self.layout,
                num_layers=hf.num_layers,
                experts_per_token=hf.experts_per_token,
                recomputes=train.recompute == "full",
                sequence_parallel=self._config.sequence_parallel,
            )
        whole = self.head == "lm"
        self._balance: ExpertBalance | None = None
        if hf.num_experts and whole:
            self._balance = ExpertBalance(chunks, hf, train, self.layout, self.device)
        if model.random_init:
            bridge.init_random(chunks, hf, self.layout, seed, head=whole)
        else:
            bridge.load_hf(chunks, hf, model.path, self.layout, head=whole)
        if self.lora.rank:
            self._fill_adapters(chunks, seed)
        # The last stage returns hidden states, so that the head can run in chunks of tokens.
        self._late = None
        if train.head_chunk_tokens and self.layout.is_last_stage and whole:
            self._late = LateHead(chunks[-1])
        self._fp32_logits = train.fp32_lm_head is True or (
            train.fp32_lm_head is None and chunked.gives_float32(self.device, dtype_of(model))
        )
        self._layer_inputs = LayerInputs(self.device)
        for chunk in chunks if train.offload_activations else ():
            self._layer_inputs.attach(chunk.decoder)
        self._models = [self._wrapped(chunk, dtype_of(model)) for chunk in chunks]
        self._optimizer = self._make_optimizer(dtype_of(model))
        self._reference: BaseModel | ReferenceModel | None = None
        if keep_reference:
            biases = self._balance.biases() if self._balance is not None else ()
            self._reference = (
                BaseModel(chunks)
                if self.lora.rank
                else ReferenceModel([*self._parameters(), *biases])
            )
        kernel = None
        if own_attention:
            kernel = flash.choose(
                train.attention_backend, self.device, dtype_of(model), hf.head_dim
            )
        self._shares_prefix = rules.shares_prefix(
            train, model.dtype, hf.head_dim, cuda=self.device.type == "cuda"
        )
        self._cutter = Cutter(
            self.layout,
            sequence_parallel=self._config.sequence_parallel,
            head_dim=hf.rope_dim,
            rope=hf.rope,
            dtype=dtype_of(model),
            device=self.device,
            budget=train.tokens_per_micro_batch,
            flash=kernel,
            padded=own_attention,
            share_prefix=self._shares_prefix,
            counts_tokens=self._balance is not None,
        )
        self._sums: dict[str, Tensor] = {}
        self._kept: list[tuple[tuple[str, ...], Tensor]] = []
        """Ids and numbers of kept tokens [B] of the rows of each micro-batch since the last update;
        without ids, every row is a sequence."""
        self._tokens, self._computed = 0, 0  # of the batches since the last update
        self._compared: set[bool] = set()
        """Kinds of batches for which fused and torch policy loss were compared and agreed. True:
        batches without old log-probs. False: batches with old log-probs."""
        self._accumulated = False
        self._copied_bytes = 0
        self._has_told = False
        self._parts: dict[Part, Parked] = {
            "weights": Parked(lambda: (p.data for p in self._parameters())),
            "optimizer": Parked(self._optimizer_tensors),
            "gradients": Parked(self._gradient_buffers, zeros=True),
        }
        announce(
            "critic" if self.head == "value" else "learner",
            f"Megatron-Core on {self.device.type}, {model.dtype}, {self._describe()}",
        )
        if whole:  # announce the kernel backends at start-up, not at the first step
            native.torch_ops("token_logprob", self.device.type)
            if train.fused_loss:
                native.torch_ops("policy_loss", self.device.type)

    def _fill_adapters(self, chunks: Sequence[torch.nn.Module], seed: int) -> None:
        source: bridge.TensorSource = peft.NewAdapters(self.hf, self.lora, seed)
        if self.lora.path:
            source = peft.reader(self.lora.path, self.hf, self.lora)
        bridge.fill_adapters(chunks, self.hf, self.layout, self.lora, source)

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
        overrides: dict | None = None
        if self.lora.rank:
            overrides = {ParamKey(name=f"*{SUFFIX}.B.*"): {"lr_mult": self.lora.lr_ratio}}
        made = get_megatron_optimizer(settings, self._models, overrides)
        if self.device.type == "cuda":
            patch_norm()
        moments = torch.bfloat16 if train.moments_dtype == "bfloat16" else None
        for part in made.chained_optimizers if train.offload_optimizer or moments else ():
            groups = part.optimizer.param_groups if part.optimizer is not None else ()
            if any(group["params"] for group in groups):  # a stage may be without experts
                adam.replace_inner(part, offload=train.offload_optimizer, moments=moments)
        for part in made.chained_optimizers if self.device.type == "cuda" else ():
            if isinstance(part.optimizer, torch.optim.AdamW):  # neither TE's nor Apex'
                for group in part.optimizer.param_groups:
                    group["fused"] = True
        return made

    def _describe(self) -> str:
        names = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
        sizes = {name: getattr(self.layout, name) for name in names}
        text = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"
        train, lm = self._train, self.head == "lm"
        text += f", layers {' + '.join(map(str, train.pp_layers))}" if train.pp_layers else ""
        text += f", LoRA of rank {self.lora.rank}" if self.lora.rank else ""
        text += ", distributed optimizer" if train.distributed_optimizer else ""
        text += ", optimizer states in host memory" if train.offload_optimizer else ""
        text += ", bfloat16 moments" if train.moments_dtype == "bfloat16" else ""
        text += ", layer inputs in host memory" if train.offload_activations else ""
        text += ", shared prefixes" if self._shares_prefix else ""
        text += ", fused policy loss" if lm and train.fused_loss else ""
        chunk = train.head_chunk_tokens if lm else 0
        text += f", output layer in chunks of {chunk} tokens" if chunk else ""
        return text + (", logits in fp32" if chunk and self._fp32_logits else "")

    def _parameters(self) -> Iterator[Tensor]:
        for model in self._models:
            yield from model.parameters()

    # ---- methods of protocols.Learner

    def logprobs(self, batch: Batch, model: Literal["actor", "reference"] = "actor") -> Tensor:
        """Return the log-prob of each token (0 for a sequence's first token) on every rank: [T]
        float32 on the CPU."""
        self._must_have("lm", "logprobs")
        if model == "actor":
            self._must_be_here("logprobs", "weights")
            return self._per_token(batch, self._logp)
        in_place = self._reference is not None and self._reference.is_in_place
        batch = batch.with_(routes=None)  # its routers choose for themselves
        with nullcontext() if in_place else self.reference():
            return self._per_token(batch, self._logp)

    def logprobs_and_routes(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probs as `logprobs` does, and the experts that the routers have chosen:
        [T, layers * K] int16 on the CPU, on every rank (`Batch.routes`)."""
        assert self._routing is not None, "built without replays_routing"
        self._must_have("lm", "logprobs_and_routes")
        self._must_be_here("logprobs_and_routes", "weights")
        cuts: list[Cut] = []
        found = self._per_token(batch, self._logp, cuts)
        recorded = self._routing.recorded()
        return found, torch.empty_like(recorded).index_copy_(0, cuts[0].order, recorded)

    def logprobs_and_squares(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probs as `logprobs` does, and the log of the sum of squared probabilities
        of all tokens of the vocabulary (`Batch.log_sum_pi_squared`), on every rank: [T] float32
        each on the CPU."""
        self._must_have("lm", "logprobs_and_squares")
        self._must_be_here("logprobs_and_squares", "weights")
        logp, squares = self._per_token(batch, self._logp_and_squares, columns=2).t()
        return logp.contiguous(), squares.contiguous()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Replace the learner's weights on the device by the reference weights during the block.
        Repeated `logprobs(batch, "reference")` then load the reference weights once."""
        self._must_be_here("reference", "weights")
        if self._reference is None:
            raise RuntimeError("no reference weights; build the learner with keep_reference")
        with self._reference.in_place():
            yield

    def values(self, batch: Batch) -> Tensor:
        """Return the critic's value before each token is sampled (0 for the first token of a
        sequence) on every rank: [T] float32 on the CPU."""
        self._must_have("value", "values")
        self._must_be_here("values", "weights")
        return self._per_token(batch, self._value)

    def begin_update(self, num_tokens: int, normaliser: float) -> None:
        """Announce the number of tokens that this data-parallel rank will accumulate, and the
        normaliser of `apply`. Losses of routers need both before `accumulate`; without such losses
        the call does nothing. Collective over the train ranks."""
        if self._balance is None or not self._balance.has_losses:
            return
        total = torch.tensor(num_tokens if self.layout.is_leader else 0, device=self.device)
        if self.layout.world_size > 1:
            dist.all_reduce(total)
        self._balance.begin_update(int(total), normaliser)

    def accumulate(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        """Add the gradient of sum(loss per token * mask * weight). Collective over the
        model-parallel group; with expert parallelism, over all model-parallel groups that share
        experts. Ranks with an empty batch must call too. A critic passes `ValueInputs` to a
        `ValueLoss`.

        With `train.fused_loss`, an actor gets the fused op's inputs from the loss's method `policy`
        (see `algos.objective.Objective`); the loss itself gives only metrics. Fused op and loss
        are compared token by token, once with and once without old log-probs.

        Raises:
            ValueError: the batch lacks an input of the loss, or the fused op and the loss disagree.
        """
        self._must_be_here("accumulate", "weights", "gradients")
        if self.head == "value" and batch.num_tokens and batch.returns is None:
            raise ValueError("accumulate on a critic: the batch has no returns; set them")
        fused = self.head == "lm" and self._train.fused_loss
        if fused:
            self._must_be_fusible(batch, loss)
        self._name_metrics(batch, loss)
        function = partial(self._fused if fused else self._loss, loss)
        self._run(self._cut(batch), function, forward_only=False)
        self._accumulated = True

    def kept(self) -> tuple[int, int]:
        """Return the number of tokens that the loss has kept since the last `apply`, and the number
        of sequences with a kept token, over all ranks. The rows of one sample are one sequence.
        Collective."""
        ids: list[Hashable] = []
        for i, (given, tokens) in enumerate(self._kept):
            ids += given or [(i, row) for row in range(len(tokens))]
        counts = torch.cat([tokens for _, tokens in self._kept]).tolist() if self._kept else []
        sequences = {id for id, n in zip(ids, counts, strict=True) if n}
        sums = torch.tensor([int(sum(counts)), len(sequences)], device=self.device)
        if self.layout.world_size > 1:
            dist.all_reduce(sums)
        return int(sums[0]), int(sums[1])

    def apply(self, normaliser: float) -> dict[str, float]:
        """Make one optimizer step on the gradient sums, divided by the global count `normaliser`.

        Returns `actor/grad_norm`, `actor/lr`, `actor/loss` (critic/* for a critic) and the loss's
        metrics. Each metric is the mean over the tokens that the loss has kept since the last
        `apply`. If the gradient norm or the loss is not finite, the weights stay unchanged and
        `actor/skipped` is 1. Every rank must have called `accumulate`.
        """
        self._must_be_here("apply", *PARTS)
        if not self._accumulated:
            raise RuntimeError("apply without accumulate: every rank must call accumulate first")
        if not normaliser > 0:
            raise ValueError(f"normaliser {normaliser}: must be above 0; skip empty updates")
        finalize_model_grads(self._models)
        for model in self._models:
            model.scale_gradients(1.0 / normaliser)
        rate = learning_rate(self._train, self.updates, self._total_updates)
        metrics = self._metrics(normaliser)
        loss = metrics[f"{self._role}/loss"]
        norm = self._step(rate) if isfinite(loss) else nan
        finite = isfinite(norm)
        for model in self._models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.updates += 1
        if finite:
            self.version += 1
            if self._balance is not None:
                self._balance.update()
        else:
            log.warning(
                "%s: update %d is skipped; its loss is %g, its gradient norm %g",
                self._role,
                self.updates,
                loss,
                norm,
            )
        self._accumulated = False
        self._kept.clear()
        return (
            metrics
            | {
                f"{self._role}/grad_norm": norm,
                f"{self._role}/lr": rate,
                f"{self._role}/skipped": 0.0 if finite else 1.0,
            }
            | self._offloaded()
        )

    def _offloaded(self) -> dict[str, float]:
        """Return how much was copied to host memory since the last update, if anything may be."""
        if not (self._train.offload_activations or self._train.offload_optimizer):
            return {}
        inner = (part.optimizer for part in self._optimizer.chained_optimizers)
        kept = (one for one in inner if isinstance(one, adam.ChunkedAdamW))
        total = self._layer_inputs.copied_bytes + sum(one.copied_bytes for one in kept)
        new, self._copied_bytes = total - self._copied_bytes, total
        return {f"{self._role}/offloaded_gb": new / 1e9}

    def discard(self) -> None:
        """Discard the accumulated gradients and metrics, but keep weights, optimizer and update
        counters. Every rank must call `discard`."""
        self._must_be_here("discard", "gradients")
        for model in self._models:
            model.zero_grad_buffer()
        self._accumulated = False
        self._kept.clear()
        self._forget_sums()

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under Hugging Face names, full on every rank, with the adapters added
        to them. Collective: every rank must exhaust the iterator."""
        self._must_have("lm", "export")
        self._must_be_here("export", "weights")
        return bridge.export_hf(self._models, self.hf, self.layout)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters under PEFT's names, full on every rank. Collective: every rank must
        exhaust the iterator."""
        self._must_be_here("export_adapters", "weights")
        return bridge.export_adapters(self._models, self.hf, self.layout, self.lora)

    def shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of the weights, as views unless they have adapters; not
        collective."""
        self._must_have("lm", "shards")
        self._must_be_here("shards", "weights")
        return bridge.shards(self._models, self.hf, self.layout)

    def adapter_shards(self) -> Iterator[tuple[Shard, Tensor]]:
        """Yield this rank's shards of the adapters under PEFT's names, as views; not collective."""
        self._must_be_here("adapter_shards", "weights")
        return bridge.adapter_shards(self._models, self.hf, self.layout, self.lora)

    def offload(self, parts: Collection[Part] = PARTS) -> None:
        """Release the accelerator memory of `parts`. Weights and optimizer states move to host
        memory; gradients are freed, and `onload` restores zeros. On the CPU, only gradients are
        freed, but offloaded parts must not be used before `onload` either."""
        self._must_be_itself("offload")
        if self._accumulated and "gradients" in parts:
            raise RuntimeError(
                "offload between accumulate and apply: the gradients would be lost; apply or "
                "discard them first"
            )
        if self.device.type == "cpu" and not self._has_told:
            self._has_told = True
            announce("offload", "frees only the gradients, since the learner is on the CPU")
        # Megatron keeps the buffer of its last all-gather; the next all-gather makes a new one.
        parallel_state.get_global_memory_buffer().buffer.clear()
        for part in parts:
            self._parts[part].park()

    def onload(self, parts: Collection[Part] = PARTS) -> None:
        """Move `parts` back to the learner's device."""
        for part in parts:
            self._parts[part].restore()

    def resident_bytes(self) -> dict[Part, int]:
        """Return the bytes that each part occupies on the learner's device now."""
        return {name: part.resident_bytes for name, part in self._parts.items()}

    def save(self, path: Path) -> None:
        """Write model, optimizer and counters to the folder `path`. Collective.

        Raises:
            OSError: a rank could not write; all ranks raise it.
        """
        self._must_be_here("save", "weights", "optimizer")
        checkpoint.save(Path(path), self._models, self._optimizer, self._state())

    def save_async(
        self, path: Path, then: Callable[[WrittenFiles], None] = lambda written: None
    ) -> Future[WrittenFiles]:
        """Copy model, optimizer and counters to host memory, and return while a thread writes them
        to the new folder `path`. Collective. Returns and raises as `checkpoint.AsyncWriter.write`.
        """
        self._must_be_here("save", "weights", "optimizer")
        if self._async_writer is None:
            self._async_writer = checkpoint.AsyncWriter()
            self._on_close.callback(self._async_writer.close)
        state = self._state()
        return self._async_writer.write(Path(path), self._models, self._optimizer, state, then)

    def load(self, path: Path) -> None:
        """Load a checkpoint that `save` wrote, under this or another layout. Collective.

        Raises:
            ConfigError: `path` holds no checkpoint, or one of another model.
        """
        self._must_be_here("load", "weights", "optimizer")
        adapters = peft.summary(self.lora)
        state = checkpoint.load(
            Path(path),
            self._models,
            self._optimizer,
            vocab_size=self.hf.vocab_size,
            head=self.head,
            adapters=adapters,
        )
        self.version, self.updates = state["version"], state["updates"]
        if self._balance is not None:
            self._balance.load(state.get("expert_tokens"))

    def _state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "updates": self.updates,
            "head": self.head,
            "vocab_size": self.hf.vocab_size,
            "lora": peft.summary(self.lora),
            "expert_tokens": None if self._balance is None else self._balance.state(),
        }

    def close(self) -> None:
        """Leave the process groups; the last learner of the process releases them. Idempotent."""
        self._on_close.close()

    def _must_have(self, head: Head, what: str) -> None:
        if self.head == head:
            return
        if head == "value":
            raise RuntimeError(f"{what} of an actor: it has no value head; use the critic")
        raise RuntimeError(f"{what} of a critic: it has no logits; use the actor")

    def _must_be_fusible(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        if not hasattr(loss, "policy"):
            raise ConfigError(
                "--train.fused_loss: this loss has no `policy` to fuse; turn fused_loss off"
            )
        if batch.num_tokens and batch.rollout_log_probs is None:
            raise ConfigError(
                "--train.fused_loss: the batch has no rollout_log_probs; set them or turn "
                "fused_loss off"
            )
        if batch.weight is not None and bool((batch.mask & (batch.weight == 0)).any()):
            raise ConfigError(
                "--train.fused_loss: the batch has weight 0 on trained tokens, whose log-probs "
                "the fused op skips; mask these tokens out, or turn fused_loss off"
            )

    def _must_be_here(self, what: str, *parts: Part) -> None:
        """Raise RuntimeError if a part is offloaded: torch does not detect emptied storages and
        would access address 0."""
        for part in parts:
            if self._parts[part].is_away:
                raise RuntimeError(f"{what}: the {part} are offloaded; call onload first")
        self._must_be_itself(what)

    def _must_be_itself(self, what: str) -> None:
        if self._reference is not None and self._reference.is_in_place:
            raise RuntimeError(f"{what} inside reference(): must be called after the block")

    # ---- forward and backward

    def _cut(self, batch: Batch) -> Cut:
        rows = self._cutter.groups(batch)
        count = rounded_count(len(rows), self.layout)
        if self._groups.lockstep is not None:
            most = torch.tensor(count, device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._groups.lockstep)
            count = int(most)
        return self._cutter.cut(batch, rows, count)

    def _run(
        self, cut: Cut, function: Callable, *, forward_only: bool, records: bool = False
    ) -> None:
        """Run Megatron's pipeline schedule over the micro-batches; `function(micro, logits)`
        returns a micro-batch's loss. `records`: keep what the routers choose."""
        routing, balance = self._routing, self._balance
        if routing is not None:
            routing.start(forward_only=forward_only, records=records)
        if balance is not None:
            balance.start()

        def step(iterator: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable]:
            micro = next(iterator)
            if routing is not None:
                routing.begin(micro, is_first=model is self._models[0])
            if balance is not None and not forward_only:
                balance.begin(micro)
            logits = model(micro.tokens, micro.positions, None, packed_seq_params=micro.packed)
            return logits, partial(function, micro)

        # Interleaved stages take the micro-batches at different times.
        iterators = list(tee(cut.micro_batches, len(self._models)))
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators,
            model=self._models,
            num_microbatches=cut.count,
            seq_length=self._train.tokens_per_micro_batch,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        for model in self._models:  # a stage keeps the activations that it received last
            model.module.set_input_tensor(None)

    def _per_token(
        self,
        batch: Batch,
        read: Callable[[MicroBatch, Tensor], Tensor],
        recorded: list[Cut] | None = None,
        *,
        columns: int = 0,
    ) -> Tensor:
        """Run a forward pass over the batch; return `read(micro, outputs)` for all tokens in the
        batch's order, [T] float32 on the CPU.

        Args:
            recorded: gets the cut of the batch, for which the routers' choices are kept.
            columns: number of values per token that `read` returns, [T, columns]; 0: one, [T].
        """
        cut = self._cut(batch)
        if recorded is not None:
            recorded.append(cut)
        found: list[Tensor] = []

        def collect(micro: MicroBatch, outputs: Tensor) -> tuple[Tensor, Tensor, dict]:
            values = read(micro, outputs)
            found.append(values.float())
            return values.new_zeros(()), torch.zeros((), dtype=torch.int), {}

        with torch.no_grad():
            self._run(cut, collect, forward_only=True, records=recorded is not None)
        shape = (batch.num_tokens, columns) if columns else (batch.num_tokens,)
        values = torch.zeros(shape, dtype=torch.float32, device=self.device)
        if self.layout.is_last_stage:
            values[cut.order.to(self.device)] = torch.cat(found)
        if self.layout.pp > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(values, group=group, group_src=self.layout.pp - 1)
        return values.cpu()

    def _scores(
        self, micro: MicroBatch, logits: Tensor, *, entropy_grad: bool, ids: Tensor | None = None
    ) -> LogProbs:
        """Return log-prob and entropy of all tokens, [T] each (0 for first tokens), on all ranks of
        the last pipeline stage; with `ids` [T, K], also the log-probs of these tokens in their
        places. Backward gives each context-parallel rank its part of the gradient."""
        where = self._where(entropy_grad=entropy_grad)
        if ids is not None:
            where["ids"] = self._rows_about(micro, ids.t()).t().contiguous()
        if self._late is None:
            scores = log_probs(logits.squeeze(0), micro.targets, in_place=True, **where)
        else:
            scores = self._by_chunks(chunked.log_probs, logits, micro.targets, **where)
        of_ids = None if scores.of_ids is None else self._about(micro, scores.of_ids)
        return LogProbs(self._about(micro, scores.logp), self._about(micro, scores.entropy), of_ids)

    def _where(self, **more: Any) -> dict[str, Any]:
        """Return the arguments that all ops on logits share, plus `more`."""
        return {
            "vocab_size": self.hf.vocab_size,
            "temperature": self.temperature,
            "group": parallel_state.get_tensor_model_parallel_group(),
            **more,
        }

    def _by_chunks(self, function: Callable, hidden: Tensor, *args: Any, **where: Any) -> Any:
        assert self._late is not None
        return function(
            self._late.rows(hidden),
            self._late.weight,
            *args,
            chunk_tokens=self._train.head_chunk_tokens,
            weight_grad=self._late.weight_grad,
            fp32_logits=self._fp32_logits,
            **where,
        )

    def _logp(self, micro: MicroBatch, logits: Tensor) -> Tensor:
        return self._scores(micro, logits, entropy_grad=False).logp

    def _logp_and_squares(self, micro: MicroBatch, outputs: Tensor) -> Tensor:
        """Return log-prob and log sum p^2 of all tokens, [T, 2], as `_scores` does."""
        if self._late is None:
            found = log_probs_and_squares(outputs.squeeze(0), micro.targets, **self._where())
        else:
            found = chunked.log_probs_and_squares(
                self._late.rows(outputs),
                self._late.weight,
                micro.targets,
                chunk_tokens=self._train.head_chunk_tokens,
                fp32_logits=self._fp32_logits,
                **self._where(),
            )
        return self._about(micro, torch.stack(found, -1))

    def _value(self, micro: MicroBatch, outputs: Tensor) -> Tensor:
        """Return the critic's value before each token is sampled, [T]: the model output at the
        previous token."""
        return self._about(micro, outputs.view(-1))

    def _about(self, micro: MicroBatch, rows: Tensor) -> Tensor:
        """Convert this rank's output rows [L, ...] to token values [T, ...]: each token gets the
        row that predicts it; a sequence's first token gets 0."""
        if self.layout.cp > 1:
            group = parallel_state.get_context_parallel_group()
            rows = _GatherRows.apply(rows, group, micro.packed.gathered)
        predicted = micro.predicted.view(-1, *[1] * (rows.dim() - 1))
        return torch.where(predicted, rows.index_select(0, micro.take), 0.0)

    def _rows_about(self, micro: MicroBatch, values: Tensor) -> Tensor:
        """Convert token values [..., T] to this rank's output rows [..., L]: each row gets the
        value of the token that it predicts; rows that predict no trained token get 0."""
        length, cp = micro.targets.numel(), self.layout.cp
        # At most one of the tokens that share a row is trained on. Values of all others, such as a
        # sequence's first token, which no row predicts, go to an extra last row.
        index = torch.where(micro.predicted & micro.batch.mask, micro.take, cp * length)
        rows = values.new_zeros(*values.shape[:-1], cp * length + 1)
        rows = rows.index_copy_(-1, index, values)[..., :-1]
        if cp > 1:
            rows = torch.empty_like(rows).index_copy_(-1, micro.packed.gathered, rows)
            rows = rows.narrow(-1, self.layout.cp_rank * length, length)
        return rows

    def _inputs(
        self, loss: Loss | ValueLoss, micro: MicroBatch, outputs: Tensor
    ) -> LossInputs | ValueInputs:
        if self.head == "value":
            return inputs.of_value(micro, self._value(micro, outputs))
        entropy_grad = getattr(loss, "needs_entropy_grad", True)
        ids = micro.batch.teacher_top_ids
        scores = self._scores(micro, outputs, entropy_grad=entropy_grad, ids=ids)
        return inputs.of_policy(micro, *scores)

    def _loss(
        self, loss: Loss | ValueLoss, micro: MicroBatch, outputs: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x = self._inputs(loss, micro, outputs)
        total = self._count(x, _output(loss, x), micro)
        # The loss must depend on the outputs, or backward of an empty micro-batch has no graph.
        if not total.requires_grad:
            total = total + 0.0 * (x.value if isinstance(x, ValueInputs) else x.log_probs).sum()
        return total, x.mask.sum().int(), {}

    def _fused(
        self, loss: Loss | ValueLoss, micro: MicroBatch, outputs: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute loss and gradient with the fused op. The loss function itself runs in torch on
        the op's log-probs, only for metrics."""
        given, spec = self._policy(loss, micro)
        made = self._policy_loss(micro, outputs, given, spec)
        own = micro.batch.old_log_probs is None
        first = own not in self._compared and bool(micro.batch.mask.any())
        with torch.set_grad_enabled(first):
            logp, entropy = self._about(micro, made.logp), self._about(micro, made.entropy)
            if first:
                logp.requires_grad_()
            x = inputs.of_policy(micro, logp, entropy)
            out = _output(loss, x)
            total = self._count(x, out, micro)
        if first:
            figures = dict(zip(ROWS, made.tokens, strict=True))
            fused = {"loss": figures["loss"] * given.weight, "gradient": figures["grad_logp"]}
            self._must_agree(micro, fused, total, x, out)
            self._compared.add(own)
        return made.loss, x.mask.sum().int(), {}

    def _must_agree(
        self, micro: MicroBatch, fused: dict[str, Tensor], total: Tensor, x: Any, out: LossOutput
    ) -> None:
        """Raise ValueError if the fused op's token losses and gradients (`fused`) differ from the
        torch loss. 1 token in 1000 may differ, because close to a clip bound rounding decides."""
        kept = out.kept(x.mask)
        weight = 1.0 if micro.batch.weight is None else micro.batch.weight
        slope = torch.zeros_like(x.log_probs)
        if total.requires_grad:
            (slope,) = torch.autograd.grad(total, x.log_probs)
        text = {"loss": torch.where(kept, out.per_token.detach() * weight, 0.0), "gradient": slope}
        trained = int(x.mask.sum())
        for what, want in text.items():
            # An untrained token may share the row of a trained one (prefix_tree.py).
            found = torch.where(x.mask, self._about(micro, fused[what]), 0.0)
            limit = 1e-3 * want.abs() + 1e-5 * want.abs().nan_to_num().amax()
            apart = ~((found - want).abs() <= limit) & ~(found.isnan() & want.isnan())
            count = int(apart.sum())
            if count > trained // 1000:
                t = int(apart.nonzero()[0])
                raise ConfigError(
                    f"--train.fused_loss: the fused op computes another loss: the {what} of a "
                    f"token is {float(found[t]):.6g}, by the loss itself {float(want[t]):.6g} "
                    f"({count} of {trained} tokens); turn fused_loss off"
                )

    def _policy(self, loss: Any, micro: MicroBatch) -> tuple[PolicyInputs, PolicySpec]:
        """Return the fused op's inputs, in the order of this rank's rows, and the op's settings."""
        batch = micro.batch
        dtype = statistics_dtype(self._config.params_dtype)
        unknown = torch.zeros(batch.num_tokens, dtype=dtype, device=self.device)
        x = inputs.of_policy(micro, unknown, unknown)
        given, spec = loss.policy(x, old_is_own=batch.old_log_probs is None)
        if batch.weight is not None:
            given = given._replace(weight=given.weight * batch.weight)
        names = [name for name, value in given._asdict().items() if value is not None]
        rows = self._rows_about(micro, torch.stack([getattr(given, name) for name in names]))
        return given._replace(**dict(zip(names, rows, strict=True))), spec

    def _policy_loss(
        self, micro: MicroBatch, outputs: Tensor, given: PolicyInputs, spec: PolicySpec
    ) -> PolicyLoss:
        if self._late is not None:
            args = (micro.targets, given, spec)
            return self._by_chunks(chunked.policy_loss, outputs, *args, **self._where())
        return policy_loss(
            outputs.squeeze(0),
            micro.targets,
            given,
            spec,
            in_place=True,
            unit_upstream=True,
            **self._where(),
        )

    def _count(self, x: LossInputs | ValueInputs, out: LossOutput, micro: MicroBatch) -> Tensor:
        """Add a micro-batch to the metrics of the update; return the micro-batch's total loss."""
        terms = out.per_token if micro.batch.weight is None else out.per_token * micro.batch.weight
        kept = out.kept(x.mask)
        # Tensor- and context-parallel ranks have the same tokens, so only one rank counts them.
        own = self.layout.tp_rank == self.layout.cp_rank == 0
        counted = kept if own else kept & False
        if own:
            self._tokens += micro.batch.num_tokens
            self._computed += micro.num_rows
        self._add("loss", torch.where(counted, terms, 0.0).sum())
        self._add("count", counted.sum())
        tokens = sequence.count(counted, x.sequence, x.num_sequences)
        self._kept.append((micro.batch.ids, tokens))
        for name, values in _metrics_of(x, out).items():
            self._add(name, torch.where(counted, values, 0.0).sum())
        return torch.where(kept, terms, 0.0).sum()

    # ---- the optimizer step

    @torch.no_grad()
    def _step(self, rate: float) -> float:
        """Step the optimizer if the gradient norm is finite; return the norm before clipping."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._train.weight_decay * group.get("wd_mult", 1.0)
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not isfinite(norm):
            return norm
        if self._train.clip_grad > 0 and norm > self._train.clip_grad:
            for part in optimizer.chained_optimizers:
                _clip(part.get_parameters(), self._train.clip_grad, norm)
        optimizer.step_with_ready_grads()
        return norm

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _name_metrics(self, batch: Batch, loss: Loss | ValueLoss) -> None:
        """Register the metric names on pipeline stages before the last, so that all ranks reduce
        the same vector. The names come from the loss of one placeholder token."""
        if self.layout.is_last_stage:
            return
        x = inputs.placeholder(self.head, self.device, batch)
        for name in ["loss", "count", *_metrics_of(x, _output(loss, x))]:
            self._add(name, torch.zeros((), device=self.device))

    def _metrics(self, normaliser: float) -> dict[str, float]:
        names = sorted(self._sums)
        numbers = (self._tokens, self._computed)
        more = [torch.full((), n, dtype=torch.float64, device=self.device) for n in numbers]
        if self._routing is not None:
            more += self._routing.rerouted().to(self.device)
        figures = len(names) + len(more)
        sums = torch.stack([*(self._sums[name] for name in names), *more])
        if self._balance is not None:
            sums = torch.cat([sums, self._balance.sums()])
        if self.layout.world_size > 1:
            dist.all_reduce(sums)
        balance = {}
        if self._balance is not None:
            balance = self._balance.measure(sums[figures:], normaliser)
        self._forget_sums()
        values = sums[:figures].tolist()
        tokens, computed, *routes = values[len(names) :]
        total = dict(zip(names, values[: len(names)], strict=True))
        loss, count = total.pop("loss"), total.pop("count")
        found = {name: value / max(count, 1.0) for name, value in total.items()}
        found[f"{self._role}/loss"] = loss / normaliser
        if self._shares_prefix:
            found[f"{self._role}/shared_tokens"] = 1 - computed / max(tokens, 1)
        if routes and routes[1]:
            found[f"{self._role}/rerouted"] = routes[0] / routes[1]
        return found | balance

    def _forget_sums(self) -> None:
        """Drop what `accumulate` has counted for the metrics."""
        self._sums = {}
        self._tokens = self._computed = 0
        if self._routing is not None:
            self._routing.rerouted()
        if self._balance is not None:
            self._balance.forget()

    # ---- tensors that can be offloaded

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the optimizer's moments, and main parameters that are not the model's weights."""
        own = {identity(p.data.untyped_storage()) for p in self._parameters()}
        for part in self._optimizer.chained_optimizers:
            tensors = [p.data for p in part.get_parameters()]
            if isinstance(part.optimizer, adam.ChunkedAdamW):
                tensors += part.optimizer.on_device()
            for state in part.optimizer.state.values() if part.optimizer else ():
                tensors += [v for v in state.values() if isinstance(v, Tensor) and v.dim()]
            yield from (t for t in tensors if identity(t.untyped_storage()) not in own)

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for model in self._models:
            for buffer in model.buffers + model.expert_parallel_buffers:
                yield buffer.grad_data


class _GatherRows(torch.autograd.Function):
    """Gather the rows of all context-parallel ranks in sequence order. All ranks compute the same
    loss on the gathered rows, so backward keeps this rank's part without a sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, gathered: Tensor) -> Tensor:
        ctx.rank, ctx.size = group.rank(), rows.size(0)
        ctx.save_for_backward(gathered)
        every = rows.new_empty(group.size() * rows.size(0), *rows.shape[1:])
        compat.all_gather(every, rows.contiguous(), group=group)
        return every.index_select(0, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (gathered,) = ctx.saved_tensors
        every = torch.empty_like(grad).index_copy_(0, gathered, grad)
        return every[ctx.rank * ctx.size : (ctx.rank + 1) * ctx.size], None, None


def _clip(parameters: Sequence[Tensor], most: float, norm: float) -> None:
    """Scale the gradients from norm `norm` to norm `most`."""
    if grads := [p.grad for p in parameters if p.grad is not None]:
        torch._foreach_mul_(grads, most / (norm + 1e-6))


def _output(loss: Loss | ValueLoss, x: LossInputs | ValueInputs) -> LossOutput:
    """Return the loss of `x`: a policy loss of `LossInputs`, or a value loss of `ValueInputs`."""
    return cast(Callable[[LossInputs | ValueInputs], LossOutput], loss)(x)


def _metrics_of(x: LossInputs | ValueInputs, out: LossOutput) -> dict[str, Tensor]:
    """Return the loss's metrics by name, [T] each; the caller averages them over tokens."""
    return out.metrics if isinstance(x, ValueInputs) else {"actor/entropy": x.entropy} | out.metrics
