"""SGLang's decode step with drafts, as our own speculative algorithm.

Every decode step verifies drafts: the last token of each request and its draft go through one
forward. `sampler.verify` samples every position with the random number that plain decoding would
use there. Sampled tokens are accepted up to and including the first that differs from the draft. So
the tokens are those of plain decoding; `torch_engine/engine.py` explains why.

The first tensor-parallel rank makes the drafts and sends them to the other ranks, so all ranks
verify the same drafts. A draft is a chain, so its keys and values are written to their final cache
positions, and accepted tokens need no copy.

A step passes its accepted tokens to the next one as SGLang's NGRAM does, in `spec_info`, which the
overlapped scheduler relays on the device. The host learns them when the scheduler processes the
step's result (`processed`).

On a GPU, a step is as wide as the gate's draft length plus one, for which `widths.py` has captured
CUDA graphs. On a CPU, the width of a step is that of its longest draft plus one. A step without
drafts has width one: plain decoding.

Letters: N requests, W width of a step, L maximum draft length of a step.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import record_stream_for_v2_verify
from torch import Tensor
from torch.nn.functional import pad

from rlcore.records import History
from rlcore.rollout.sglang_engine import sampler
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.device_drafts import DeviceDrafts
from rlcore.rollout.sglang_engine.drafts import Drafts, HostDrafts
from rlcore.rollout.sglang_engine.mask import chain_mask
from rlcore.rollout.sglang_engine.names import DRAFTS
from rlcore.rollout.sglang_engine.widths import Widths
from rlcore.rollout.torch_engine.drafter import DraftSettings
from rlcore.sched.histospec import DraftGate
from rlcore.utils.net import decode


class DraftWorker(BaseSpecWorker):
    """Speculative worker of one tensor-parallel rank."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._width: int = get_spec().speculative_num_draft_tokens
        self._group = get_parallel().tp_group
        self._is_cpu = server_args.device == "cpu"
        self._widths: Widths | None = None
        told = json.loads(os.environ[DRAFTS])
        self._settings = DraftSettings(**told["settings"])
        self._drafts: Drafts | None = None
        if self._group.rank_in_group == 0:
            shared: dict[str, Any] = dict(
                num_seats=get_schedule().max_running_requests,
                stream_interval=told["stream_interval"],
                counters=Counters(server_args.model_path, new=True),
            )
            if told["matcher"] == "device":
                device = "cpu" if self._is_cpu else torch.device(server_args.device, gpu_id)
                self._drafts = DeviceDrafts(
                    told["draft"],
                    self._settings,
                    max_tokens=told["max_tokens"],
                    device=device,
                    **shared,
                )
            else:
                self._drafts = HostDrafts(told["draft"], self._settings, **shared)

    @property
    def draft_worker(self) -> None:
        """Worker of the draft model; None, because there is no draft model."""
        return None

    def init_cuda_graphs(self) -> None:
        """Capture CUDA graphs for all widths that the gate may choose. Collective."""
        if not self._is_cpu:
            gate = DraftGate(self._settings.max_length, self._settings.adaptive)
            self._widths = Widths(self.target_worker.model_runner, [n + 1 for n in gate.choices])

    def remember(self, path: str) -> None:
        """Index the histories in a file, and remove the file."""
        if self._drafts is not None:
            file = Path(path)
            histories, wanted = decode(file.read_bytes(), tuple[tuple[History, ...], list[int]])
            file.unlink()
            self._drafts.remember(histories, wanted)

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a prefill, which samples one token per request, or a decode step with drafts."""
        if not self._is_cpu:
            stream = torch.get_device_module(batch.device).current_stream()
            record_stream_for_v2_verify(batch, None, stream)
        if batch.forward_mode.is_decode():
            return self._verify(batch, on_publish)
        if self._widths is not None:
            self._widths.use(self._width)
        if self._drafts is not None:
            self._drafts.prefill(batch)
        result = self.target_worker.forward_batch_generation(batch)
        counts = torch.ones_like(batch.seq_lens, dtype=torch.int32)
        return self._relay(
            result, result.next_token_ids[:, None], counts, batch.seq_lens.clone(), on_publish
        )

    def processed(self, batch: Any, result: GenerationBatchResult) -> None:
        """Count the accepted tokens of a decode step, whose result the scheduler processes next."""
        if self._drafts is None:
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()  # the scheduler does so next
        tokens = result.next_token_ids.view(len(batch.reqs), -1)
        self._drafts.verified(batch.reqs, tokens.numpy(), result.accept_lens.numpy())

    def _verify(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        drafts, before = self._propose(batch), batch.spec_info
        sizes = (drafts >= 0).sum(1)
        width = (int(sizes.max()) if self._is_cpu else drafts.shape[1]) + 1
        if self._widths is not None:
            self._widths.use(width)
        old = before.accept_tokens.view(len(batch.reqs), -1)
        last = old.gather(1, before.accept_lens[:, None].long() - 1)
        # Padding after a draft is never accepted.
        tokens = torch.cat((last, drafts[:, : width - 1].clamp(0)), 1).long()
        column = torch.arange(width, device=batch.device)
        positions = batch.seq_lens[:, None] + column
        table = batch.req_to_token_pool.req_to_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.flatten()
        batch.out_cache_loc = table[batch.req_pool_indices[:, None], positions].long().flatten()
        mask = None  # on a CPU, `attention.py` makes its own mask
        if not self._is_cpu:
            mask = chain_mask(batch.seq_lens, width, self._most_tokens(batch))
        batch.spec_info = NgramVerifyInput(
            draft_token=batch.input_ids,
            custom_mask=mask,
            positions=positions.flatten(),
            draft_token_num=width,
            new_seq_lens=batch.seq_lens,
        )
        result = self.target_worker.forward_batch_generation(batch, is_verify=True)
        found, logps = sampler.verify(result.logits_output, batch.sampling_info, positions)
        if self._group.world_size > 1:  # logits of ranks may differ in rounding: use rank 0's
            found = self._group.broadcast(found, src=0)
        right = (found[:, :-1] == tokens[:, 1:]) & (column[1:] <= sizes[:, None])
        taken = right.long().cumprod(1).sum(1) + 1
        batch.forward_mode = ForwardMode.DECODE
        result.logits_output.next_token_logprobs = logps
        result.next_token_ids = found.flatten()
        return self._relay(result, found, taken.int(), batch.seq_lens + taken, on_publish)

    def _relay(
        self,
        result: GenerationBatchResult,
        tokens: Tensor,
        counts: Tensor,
        new_seq_lens: Tensor,
        on_publish: Any,
    ) -> GenerationBatchResult:
        """Pass a step's sampled tokens [N, W], of which the first `counts` [N] are accepted, to the
        scheduler and to the next step."""
        if on_publish is not None:
            on_publish(new_seq_lens)
        width = tokens.shape[1]
        result.accept_lens = counts
        result.new_seq_lens = new_seq_lens
        result.speculative_num_draft_tokens = width
        result.next_draft_input = NgramVerifyInput(
            draft_token_num=self._width,
            new_seq_lens=new_seq_lens,
            accept_tokens=pad(tokens.int(), (0, self._width - width)).flatten(),
            accept_lens=counts,
        )
        return result

    def _most_tokens(self, batch: Any) -> int:
        """Return the number of tokens in the cache, or a bound if the host does not know it yet."""
        if batch.seq_lens_cpu is not None:
            return int(batch.seq_lens_cpu.sum())
        known = sum(len(req.origin_input_ids) + len(req.output_ids) for req in batch.reqs)
        return known + self._width * len(batch.reqs)  # of the step that runs

    def _propose(self, batch: Any) -> Tensor:
        """Return drafts [N, L] int32, padded with -1, on the batch's device, the same on all
        ranks."""
        drafts: Tensor | None = None
        if self._drafts is not None:
            drafts = self._drafts.propose(batch).to(batch.device, non_blocking=True)
        if self._group.world_size == 1:
            assert drafts is not None
            return drafts
        length = torch.tensor([0 if drafts is None else drafts.shape[1]])
        group, first = self._group.cpu_group, self._group.ranks[0]
        torch.distributed.broadcast(length, first, group=group)
        if drafts is None:
            shape = len(batch.reqs), int(length)
            drafts = torch.empty(shape, dtype=torch.int32, device=batch.device)
        return self._group.broadcast(drafts, src=0) if drafts.numel() else drafts


def needs_host_lengths(original: Callable[..., bool], backends: Sequence[Any]) -> bool:
    """Wrap SGLang's `decide_needs_cpu_seq_lens`, which always returns true for an algorithm like
    NGRAM: with lengths on the host, every step waits for the last one. Our steps do not need
    them."""
    if get_exec().overlap.enable_two_batch_overlap:
        return original(backends)
    return any(getattr(b, "needs_cpu_seq_lens", True) for b in backends if b is not None)


def remember(scheduler: Any, path: str) -> None:
    """Pass the path of a file of histories to the worker. The plug-in makes this a method of
    SGLang's scheduler, called by RPC on every rank."""
    scheduler.draft_worker.remember(path)
