"""SGLang's decode step with drafts, as our own speculative algorithm.

Every decode step verifies drafts: the last token of each request and its draft go through one
forward. `sampler.verify` samples every position with the random number that plain decoding would
use there. Sampled tokens are accepted up to and including the first that differs from the draft. So
the tokens are those of plain decoding; `torch_engine/engine.py` explains why.

The first tensor-parallel rank makes the drafts and sends them to the other ranks, so all ranks
verify the same drafts. A draft is a chain, so its keys and values are written to their final cache
positions, and accepted tokens need no copy.

On a GPU, a step is as wide as the gate's draft length plus one, for which `widths.py` has captured
CUDA graphs. On a CPU, the width of a step is that of its longest draft plus one. A step without
drafts has width one: plain decoding.

Letters: N requests, W width of a step.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from rlcore.records import History
from rlcore.rollout.sglang_engine import sampler
from rlcore.rollout.sglang_engine.counters import Counters
from rlcore.rollout.sglang_engine.drafts import Drafts
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
            self._drafts = Drafts(
                told["draft"],
                self._settings,
                num_seats=get_schedule().max_running_requests,
                stream_interval=told["stream_interval"],
                counters=Counters(server_args.model_path, new=True),
            )

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
        if batch.forward_mode.is_decode():
            return self._verify(batch)
        if self._widths is not None:
            self._widths.use(self._width)
        result = self.target_worker.forward_batch_generation(batch)
        result.accept_lens = torch.ones_like(batch.seq_lens, dtype=torch.int32)
        result.new_seq_lens = batch.seq_lens.clone()
        result.speculative_num_draft_tokens = self._width
        return result

    def _verify(self, batch: Any) -> GenerationBatchResult:
        drafts, longest = self._propose(batch)
        sizes = (drafts >= 0).sum(1)
        width = int(sizes.max()) + 1 if self._is_cpu else longest + 1
        if self._widths is not None:
            self._widths.use(width)
        nodes = np.zeros((len(batch.reqs), width), np.int64)
        nodes[:, 0] = [req.output_ids[-1] for req in batch.reqs]
        nodes[:, 1:] = drafts[:, : width - 1].clip(0)  # padding after a draft is never accepted
        tokens = torch.from_numpy(nodes).to(batch.device, non_blocking=True)
        column = torch.arange(width, device=batch.device)
        positions = batch.seq_lens[:, None] + column
        table = batch.req_to_token_pool.req_to_token
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.flatten()
        batch.out_cache_loc = table[batch.req_pool_indices[:, None], positions].long().flatten()
        mask = None  # on a CPU, `attention.py` makes its own mask
        if not self._is_cpu:
            mask = chain_mask(batch.seq_lens_cpu.long(), width, batch.device)
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
        room = torch.from_numpy(sizes).to(batch.device, non_blocking=True)
        right = (found[:, :-1] == tokens[:, 1:]) & (column[1:] <= room[:, None])
        taken = right.long().cumprod(1).sum(1) + 1
        if self._drafts is not None:
            host = torch.cat((found, taken[:, None]), 1).cpu().numpy()
            self._drafts.verified(batch.reqs, host[:, :-1], host[:, -1])
        batch.forward_mode = ForwardMode.DECODE
        result.logits_output.next_token_logprobs = logps
        result.next_token_ids = found.flatten()
        result.accept_lens = taken.int()
        result.new_seq_lens = batch.seq_lens + taken
        result.speculative_num_draft_tokens = width
        return result

    def _propose(self, batch: Any) -> tuple[np.ndarray, int]:
        """Return drafts [N, self._width - 1], padded with -1, and their maximum length in this
        step, the same on all ranks."""
        told = np.empty((len(batch.reqs) + 1, self._width - 1), np.int64)
        if self._drafts is not None:
            told[:-1], told[-1] = self._drafts.propose(batch.reqs, self._width - 1)
        if self._group.world_size > 1:
            torch.distributed.broadcast(
                torch.from_numpy(told), self._group.ranks[0], group=self._group.cpu_group
            )
        return told[:-1], int(told[-1, 0])


def remember(scheduler: Any, path: str) -> None:
    """Pass the path of a file of histories to the worker. The plug-in makes this a method of
    SGLang's scheduler, called by RPC on every rank."""
    scheduler.draft_worker.remember(path)
