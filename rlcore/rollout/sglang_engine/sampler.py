"""The torch engine's sampler inside SGLang: same law, same random numbers, same log-probs.

SGLang's own returns log-probs from before its filters and numbers its random draws by a seed only
in its deterministic mode, which needs other kernels. Here a token depends on the logits, the
request's settings and its counter alone, and both engines draw the same one. So do decode steps
that check drafts: SGLang's own check gives log-probs from before the filters, and on a CPU takes
the likeliest token.
"""

from dataclasses import replace

import torch
from sglang.srt.layers import sampler
from torch import Tensor

from rlcore.rollout.torch_engine.sampler import GOLDEN, Settings, sample

NO_TOP_K = 1 << 30
"""SGLang's top_k for all tokens; 1 is greedy."""


class Sampler(sampler.Sampler):
    """Takes the place of SGLang's."""

    def forward(
        self,
        logits_output,
        sampling_info,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """Token ids [N]; their log-probs go into `logits_output`. `positions` [N] are those of the
        last tokens that are known, counted from the start of the prompt."""
        if sampling_info.sampling_seed is None:
            raise RuntimeError("a request came without its seed: rlcore's plugin is not loaded")
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        counter = sampling_info.sampling_seed + positions.to(torch.int64) * GOLDEN
        tokens, logps = sample(logits.float(), counter, _settings(sampling_info))
        logits_output.next_token_logprobs = logps.float()
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def create(backend: str | None = None) -> Sampler:
    """In place of SGLang's `create_sampler`."""
    return Sampler()


def verify(logits_output, info, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What plain decoding draws behind the tokens at `positions` [N, W] of the requests, if those
    are right: tokens [N, W] int64 and their log-probs, float32. Logits are [N * W, V]."""
    count, width = positions.shape
    counter = info.sampling_seed[:, None] + positions.to(torch.int64) * GOLDEN
    logits = logits_output.next_token_logits.float()
    tokens, logps = sample(logits, counter.flatten(), _settings(info, width))
    return tokens.view(count, width), logps.float().view(count, width)


def _settings(info, width: int = 1) -> Settings:
    """`width`: rows of logits that each request has."""

    def rows_of(values: Tensor) -> Tensor:
        return values.repeat_interleave(width) if width > 1 else values

    top_k, top_p, min_p = (
        rows_of(x) for x in (info.top_ks.to(torch.int64), info.top_ps, info.min_ps)
    )
    plain = Settings(
        scale=1 / rows_of(info.temperatures[:, 0]),
        greedy=top_k <= 1 if info.is_any_greedy else None,
        filtered=None,
    )
    filters = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    if info.is_all_greedy or not filters:
        return plain
    wanted = (top_k < NO_TOP_K) | (top_p < 1) | (min_p > 0)
    rows = torch.nonzero(wanted & (top_k > 1))[:, 0]
    if not len(rows):
        return plain
    return replace(
        plain,
        filtered=rows,
        top_k=top_k[rows],
        top_p=top_p[rows].double(),
        min_p=min_p[rows].double(),
    )
