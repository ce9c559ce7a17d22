"""The torch engine's sampler inside SGLang: same distribution, random numbers and log-probs.

SGLang's own sampler returns log-probs from before its filters. It seeds its random draws per
request only in its deterministic mode, which needs other kernels. SGLang's own verification of
drafts also returns log-probs from before the filters, and on a CPU takes the most likely token.
With this sampler, a token depends only on the logits, the request's settings and its counter. So
the torch engine and SGLang sample the same token, also in steps that verify drafts.
"""

from dataclasses import replace

import torch
from sglang.srt.layers import sampler
from torch import Tensor

from rlcore.rollout.torch_engine.sampler import GOLDEN, SamplingTensors, sample


class Sampler(sampler.Sampler):
    """Replacement for SGLang's sampler; samples as the torch engine does."""

    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """Sample token ids [N] and write their log-probs to `logits_output`. `positions` [N]:
        positions of the last known tokens, counted from the start of the prompt."""
        if sampling_info.sampling_seed is None:
            raise RuntimeError("a request has no seed, so rlcore's plug-in is not loaded")
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        counter = sampling_info.sampling_seed + positions.to(torch.int64) * GOLDEN
        tokens, logps = sample(logits, counter, _settings(sampling_info))
        logits_output.next_token_logprobs = logps.float()
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def create(backend: str | None = None) -> Sampler:
    """Create our sampler. This replaces SGLang's `create_sampler`."""
    return Sampler()


def verify(logits_output, info, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Sample int64 tokens and float32 log-probs [N, W] after `positions` [N, W], from logits
    [N * W, V]. A token equals that of plain decoding if all earlier tokens do."""
    count, width = positions.shape
    counter = info.sampling_seed[:, None] + positions.to(torch.int64) * GOLDEN
    logits, settings = logits_output.next_token_logits, _settings(info, width)
    tokens, logps = sample(logits, counter.flatten(), settings)
    return tokens.view(count, width), logps.float().view(count, width)


def _settings(info, width: int = 1) -> SamplingTensors:
    """Convert SGLang's sampling settings, in which a top_k of 1 means greedy, and 1 << 30 keeps all
    tokens. `width`: number of rows of logits per request."""

    def rows_of(values: Tensor) -> Tensor:
        return values.repeat_interleave(width) if width > 1 else values

    top_k, top_p, min_p = (
        rows_of(x) for x in (info.top_ks.to(torch.int64), info.top_ps, info.min_ps)
    )
    plain = SamplingTensors(
        scale=1 / rows_of(info.temperatures[:, 0]),
        greedy=top_k <= 1 if info.is_any_greedy else None,
        filtered=None,
    )
    filters = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    if info.is_all_greedy or not filters:
        return plain
    # All rows, since to find those with filters would wait for the GPU.
    return replace(
        plain,
        filtered=torch.arange(len(top_k), device=top_k.device),
        top_k=top_k,
        top_p=top_p.double(),
        min_p=min_p.double(),
        few=info.npu_top_k_top_p_eligible,  # known on the host: all top_k are from 1 to 1024
    )
