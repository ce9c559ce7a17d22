"""Plug-in for SGLang's processes: adds our sampler, bucket loading, in-place pauses and drafting.

SGLang finds `install` as the entry point `rlcore` of `sglang.srt.plugins` and calls it in every
process. In SGLang processes that our engine did not start, `install` does nothing.
"""

import os
from collections.abc import Callable
from typing import Any

from rlcore.rollout.sglang_engine import hooks
from rlcore.rollout.sglang_engine.names import DRAFTS, OWNER, REMEMBER


def install() -> None:
    """Install the hooks. SGLang calls this before its other code runs."""
    owner = os.environ.get(OWNER)
    if owner is None:
        return
    if DRAFTS in os.environ:
        from rlcore.rollout.sglang_engine import algorithm

        algorithm.register()
    if int(owner) == os.getpid():
        return
    from sglang.srt.plugins.hook_registry import HookType
    from sglang.srt.utils import is_cpu, kill_itself_when_parent_died

    kill_itself_when_parent_died()
    if os.getppid() != int(owner):  # the parent exited before SGLang began to watch it
        os._exit(1)
    from rlcore.rollout.sglang_engine import sampler, weights
    from rlcore.utils import listen

    listen.bind_stores()
    managers, runner = "sglang.srt.managers", "sglang.srt.model_executor"
    for target, hook, kind in (
        ("sglang.srt.layers.sampler.create_sampler", sampler.create, HookType.REPLACE),
        (
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
            ".adjusted_from_schedule_batch",
            _seeds,
            HookType.AFTER,
        ),
        (
            f"{runner}.model_runner_components.weight_updater.WeightUpdater"
            ".update_weights_from_tensor",
            weights.take,
            HookType.AROUND,
        ),
        (f"{managers}.scheduler.Scheduler.pause_generation", _tell, HookType.AFTER),
        (f"{managers}.scheduler.Scheduler.process_batch_result", _once, HookType.AROUND),
        (
            f"{managers}.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
            ".end_weight_update",
            _forget,
            HookType.AFTER,
        ),
    ):
        hooks.register(target, hook, kind)
    if is_cpu():  # the routes of experts are held in host memory, which CUDA would pin
        pin = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
        hooks.register(pin, _do_not_pin, HookType.REPLACE)
        method = "DeepseekV2AttentionMLA.dispatch_attn_forward_method"
        name = f"sglang.srt.models.deepseek_v2.{method}"
        hooks.register(name, _attend_to_latents, HookType.REPLACE)
        experts = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
        hooks.register(experts, _skip_remote_experts, HookType.AROUND)
    if DRAFTS in os.environ:
        _draft()


def _draft() -> None:
    """Install the hooks for drafting: a scheduler method and, on a CPU, attention over drafts."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookType
    from sglang.srt.utils import is_cpu

    from rlcore.rollout.sglang_engine import worker

    setattr(Scheduler, REMEMBER, worker.remember)
    lengths = "sglang.srt.managers.overlap_utils.decide_needs_cpu_seq_lens"
    hooks.register(lengths, worker.needs_host_lengths, HookType.AROUND)
    if is_cpu():
        from rlcore.rollout.sglang_engine import attention

        backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
        hooks.register(f"{backend}.forward_extend", attention.extend, HookType.AROUND)


def _do_not_pin(*_: Any) -> None:
    """Do nothing, in place of CUDA's registration of host memory."""


def _skip_remote_experts(
    original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, settings: Any
) -> Any:
    """Compute a rank's own experts on a CPU. Experts of other ranks have the id -1, with which
    SGLang's function fails; it counts an expert once per token, so call it for one expert of each
    token at a time."""
    ids = topk_output.topk_ids
    if bool((ids >= 0).all()):
        return original(layer, x, topk_output, settings)
    weights = topk_output.topk_weights.masked_fill(ids < 0, 0.0)
    make, logits = type(topk_output), topk_output.router_logits
    chosen = zip(weights.split(1, -1), ids.clamp(min=0).split(1, -1), strict=True)
    return sum(original(layer, x, make(w, i, logits), settings) for w, i in chosen)


def _attend_to_latents(*_: Any) -> Any:
    """Return the forward method of latent attention on a CPU, whose backend cannot expand latents
    to keys and values."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_methods

    return forward_methods.AttnForwardMethod.MLA


def _seeds(_: None, info: Any, batch: Any, vocab_size: int) -> None:
    """Pass the requests' seeds to the sampler; SGLang does this only in deterministic mode."""
    import torch

    seeds = [req.sampling_params.sampling_seed or 0 for req in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)


def _tell(_: None, scheduler: Any, request: Any) -> None:
    """Send all sampled tokens before an in-place pause takes effect, while the engine still has the
    version that sampled these tokens.

    The overlapped scheduler would process the result of the batch in flight only after the pause,
    so process it here. Also send tokens that wait for the next stream interval, and tokens of
    preempted requests. Skip requests without a token: SGLang needs a log-prob of each request.
    """
    if scheduler.enable_overlap and scheduler.last_batch and scheduler.result_queue:
        batch, result = scheduler.result_queue.popleft()
        scheduler.process_batch_result(batch, result)
        scheduler.result_queue.append((batch, None))  # `_once` ignores a result of None
    scheduler.cur_batch_for_debug = None  # else SGLang's watchdog takes a long pause for a hang
    reqs = [
        req
        for req in (*scheduler.collect_inflight_reqs(), *scheduler.waiting_queue)
        if req.output_ids and not req.finished()
    ]
    intervals = [req.sampling_params.stream_interval for req in reqs]
    for req in reqs:
        req.sampling_params.stream_interval = 1
    scheduler.output_streamer.stream_output(reqs, True)
    for req, interval in zip(reqs, intervals, strict=True):
        req.sampling_params.stream_interval = interval


def _once(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Process a batch result; do nothing if `_tell` has processed it and left None instead. With
    drafts, first count the tokens that a decode step accepted."""
    if result is None:
        return None
    if DRAFTS in os.environ and batch.forward_mode.is_decode():
        scheduler.draft_worker.processed(batch, result)
    return original(scheduler, batch, result)


def _forget(result: Any, manager: Any, request: Any) -> None:
    """Change the cache key of waiting requests after a weight update, so that these requests do not
    reuse the prefix cache of the old weights. The engine gives later requests a new key."""
    for req in manager.scheduler.waiting_queue:
        req.extra_key = f"{req.extra_key}+"
