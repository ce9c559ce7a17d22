"""Arguments of SGLang that `--rollout.sglang_args` must not set, because rlcore depends on them."""

OWNED = {
    "context_length": "--data.max_prompt_tokens and --rollout.max_tokens",
    "dtype": "--rollout.dtype",
    "enable_fp32_lm_head": "--rollout.fp32_lm_head",
    "ep_size": "--rollout.ep",
    "enable_memory_saver": "--train.offload",
    "max_running_requests": "--rollout.max_running_requests",
    "max_total_tokens": "--rollout.kv_cache_tokens",
    "mem_fraction_static": "--rollout.gpu_memory_utilization",
    "model_path": "--model.path",
    "random_seed": "--run.seed",
    "tokenizer_path": "--model.tokenizer",
    "tp_size": "--rollout.tp",
    # without a key of rlcore: processes and devices
    "base_gpu_id": "",
    "device": "",
    "disaggregation_mode": "",
    "dist_init_addr": "",
    "dp_size": "",
    "enable_dp_attention": "",
    "gpu_id_step": "",
    "nccl_port": "",
    "nnodes": "",
    "node_rank": "",
    "pp_size": "",
    "use_ray": "",
    # weights, which the learner sends under the names and in the format of model.path
    "enable_lora": "",
    "json_model_override_args": "",
    "load_format": "",
    "lora_paths": "",
    "modelopt_quant": "",
    "quantization": "",
    "weight_cache_mode": "",
    # requests and their tokens
    "incremental_streaming_output": "",
    "sampling_backend": "",
    "skip_tokenizer_init": "",
    "stream_interval": "",
}
"""Keys of rlcore to use instead, by SGLang's argument; "" if there is none."""

RUNNERS = ("triton", "triton_kernel", "flashinfer_cutlass")
"""Values of SGLang's `moe_runner_backend` that store the experts' weights as they are loaded. All
others rearrange weights after the first load, so later weight updates would be wrong."""


def problems(arguments: tuple[str, ...]) -> list[str]:
    """Return an error for every argument that rlcore owns or cannot work with."""
    out = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        key = f"--rollout.sglang_args {argument}"
        if not name.isidentifier() or not equals:
            out.append(f"{key}: must be key=value, such as attention_backend=triton")
        elif name.startswith("speculative_"):
            out.append(
                f"{key}: SGLang's own drafts change the distribution that is sampled; use "
                "--rollout.draft and --draft.verify_tokens"
            )
        elif name == "moe_runner_backend" and value not in RUNNERS:
            out.append(
                f"{key}: rearranges the experts' weights after loading, so weight updates would "
                f"be wrong; use one of {', '.join(RUNNERS)}"
            )
        elif name in OWNED:
            instead = f"use {OWNED[name]} instead" if OWNED[name] else "remove it"
            out.append(f"{key}: rlcore sets this argument itself; {instead}")
    return out
