"""Names of rlcore's keys in other frameworks and in older versions of rlcore.

`resolve.py` looks up an unknown key here before it suggests a key of similar spelling. In the
tables, the text after a key of rlcore states differences between the two keys.
"""

RENAMED = {
    "async.dynamic": "algo.equal_reward_groups",
    "async.dynamic_sampling": "algo.equal_reward_groups",
    "async.update": "async.weight_update",
    "cluster.gpu_gb": "cluster.gpu_memory_gb",
    "debug.deterministic": "debug.deterministic_order",
    "debug.die_at_step": "debug.kill_at_step",
    "draft.epochs": "draft.history_epochs",
    "draft.factor": "draft.max_spec_factor",
    "draft.gate": "draft.adaptive",
    "draft.growth": "draft.length_growth",
    "draft.max_tokens": "draft.max_history_tokens",
    "draft.min_prob": "draft.min_token_prob",
    "draft.start": "draft.initial_length",
    "draft.width": "draft.verify_tokens",
    "draft.window": "draft.max_length",
    "env.command_s": "env.command_timeout_s",
    "env.max_running": "env.max_running_episodes",
    "env.output_chars": "env.max_output_chars",
    "env.program_s": "env.program_timeout_s",
    "env.result_chars": "env.max_result_chars",
    "env.tests_s": "env.tests_timeout_s",
    "env.turn_tokens": "env.max_turn_tokens",
    "log.picture": "log.plot",
    "log.tokens": "log.rollout_tokens",
    "log.trace": "log.trace_steps",
    "mux.otherwise": "mux.if_unavailable",
    "mux.wait_s": "mux.max_wait_s",
    "reward.after": "reward.answer_marker",
    "reward.algebra_s": "reward.algebra_timeout_s",
    "reward.device_gb": "reward.device_memory_gb",
    "reward.full_marks": "reward.max_points",
    "reward.memory_gb": "reward.memory_limit_gb",
    "reward.packages": "reward.allow_packages",
    "reward.partial": "reward.partial_credit",
    "reward.program_mb": "reward.program_memory_mb",
    "reward.right_score": "reward.correct_score",
    "reward.start_s": "reward.start_timeout_s",
    "reward.timeout_least_s": "reward.min_timeout_s",
    "reward.which": "reward.occurrence",
    "rollout.cache_tokens": "rollout.kv_cache_tokens",
    "rollout.deadline_s": "rollout.stall_timeout_s",
    "rollout.max_running": "rollout.max_running_requests",
    "rollout.place": "rollout.routing",
    "rollout.progress_s": "rollout.progress_interval_s",
    "rollout.sglang": "rollout.sglang_args",
    "stream.every": "stream.check_every",
    "stream.first": "stream.earliest",
    "stream.last": "stream.latest",
    "tail.dynamic": "algo.equal_reward_groups",
    "tail.dynamic_sampling": "algo.equal_reward_groups",
    "tail.max_eta_prompts": "algo.max_replaced_groups",
    "tail.max_factor": "algo.max_replaced_groups",
    "tail.quotas": "tail.dataset_quotas",
    "train.max_skipped": "train.max_skipped_updates",
    "train.spec": "train.transformer_impl",
}
"""New names of renamed keys, by old name."""

VERL = {
    "actor.clip_ratio_high": "algo.clip_high",
    "actor.clip_ratio_low": "algo.clip_low",
    "actor.entropy_coeff": "algo.entropy_coef",
    "actor.fsdp_config.param_offload": "train.offload",
    "actor.grad_clip": "train.clip_grad",
    "actor.kl_loss_coef": "algo.kl_coef",
    "actor.kl_loss_type": "algo.kl_type",
    "actor.loss_agg_mode": "algo.loss_agg_mode",
    "actor.megatron.context_parallel_size": "train.cp",
    "actor.megatron.expert_model_parallel_size": "train.ep",
    "actor.megatron.expert_tensor_parallel_size": "train.etp",
    "actor.megatron.pipeline_model_parallel_size": "train.pp",
    "actor.megatron.tensor_model_parallel_size": "train.tp",
    "actor.optim.lr": "train.lr",
    "actor.optim.lr_warmup_steps": "train.lr_warmup_updates",
    "actor.optim.override_optimizer_config.optimizer_cpu_offload": "train.offload_optimizer",
    "actor.optim.override_optimizer_config.use_precision_aware_optimizer": (
        "train.moments_dtype: bfloat16"
    ),
    "actor.optim.weight_decay": "train.weight_decay",
    "actor.ppo_epochs": "train.epochs",
    "actor.ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
    "actor.ppo_mini_batch_size": "train.samples_per_update: samples, where verl counts prompts",
    "actor.router_replay.mode": "algo.routing_replay: old for R2, rollout for R3",
    "actor.use_prefix_grouper": "train.share_prefix",
    "algorithm.adv_estimator": "algo.adv_estimator",
    "algorithm.filter_groups.enable": "algo.equal_reward_groups: replace, where verl has True",
    "algorithm.filter_groups.max_num_gen_batches": "algo.max_replaced_groups: in prompts of a step",
    "algorithm.gamma": "algo.gamma",
    "algorithm.gdpo_reward_keys": "reward: a sum such as math:1,judge:0.5",
    "algorithm.kl_ctrl.kl_coef": "algo.kl_reward_coef",
    "algorithm.lam": "algo.lam",
    "algorithm.norm_adv_by_std_in_grpo": "algo.norm_adv_by_std",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.max_response_length": "rollout.max_tokens",
    "data.prompt_key": "data.prompt_field",
    "data.train_batch_size": "data.prompts_per_step",
    "data.train_files": "data.train",
    "data.val_files": "data.val",
    "distillation.distillation_loss.distillation_loss_coef": "algo.teacher_kl_coef",
    "distillation.distillation_loss.topk": "teacher.top_k",
    "distillation.teacher_models.teacher_model.model_path": "teacher.models",
    "model.enable_activation_offload": "train.offload_activations",
    "model.lora_alpha": "lora.alpha",
    "model.lora_rank": "lora.rank",
    "model.path": "model.path",
    "model.target_modules": "lora.targets",
    "rollout.expert_parallel_size": "rollout.ep",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.max_num_seqs": "rollout.max_running_requests",
    "rollout.n": "rollout.samples_per_prompt",
    "rollout.tensor_model_parallel_size": "rollout.tp",
    "rollout.val_kwargs.n": "eval.samples_per_prompt",
    "rollout_correction.rollout_is": "algo.rollout_is",
    "trainer.experiment_name": "run.name",
    "trainer.project_name": "log.wandb",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.total_training_steps": "run.steps",
    "trainer.val_before_train": "eval.at_start",
}
"""Keys of rlcore that correspond to verl's keys, by verl's key without `actor_rollout_ref.`."""

TRL = {
    "batch_size": "data.prompts_per_step",
    "beta": "algo.kl_coef",
    "callbacks": "run.callbacks",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "generation_batch_size": "data.prompts_per_step: prompts, where TRL counts responses",
    "gradient_accumulation_steps": "train.tokens_per_micro_batch, which sets the micro-batches",
    "importance_sampling_level": "algo gspo, for the ratio of whole sequences",
    "learning_rate": "train.lr",
    "lmbda": "data.demonstration_share: 1 minus it",
    "loss_type": "algo.loss_agg_mode",
    "lr_scheduler_type": "train.lr_schedule",
    "mask_truncated_completions": "algo.truncated_responses drop",
    "max_completion_length": "rollout.max_tokens",
    "max_grad_norm": "train.clip_grad",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_steps": "run.steps",
    "model_name_or_path": "model.path",
    "multi_objective_aggregation": "algo.adv_estimator: gdpo, for normalize_then_sum",
    "num_generations": "rollout.samples_per_prompt",
    "num_iterations": "train.epochs",
    "off_policy_mask_threshold": "algo.off_policy_mask_threshold",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.tokens_per_micro_batch, in tokens",
    "report_to": "log.wandb",
    "reward_funcs": "reward",
    "reward_weights": "reward: a sum such as math:1,judge:0.5",
    "save_steps": "checkpoint.every",
    "scale_rewards": "algo.norm_adv_by_std",
    "teacher_model_name_or_path": "teacher.models",
    "temperature": "rollout.temperature",
    "use_bias_correction_kl": "algo.kl_unbiased",
    "use_vllm": "rollout.engine",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "algo.rollout_is",
    "vllm_tensor_parallel_size": "rollout.tp",
    "warmup_steps": "train.lr_warmup_updates",
}
"""Keys of rlcore that correspond to the fields of TRL's `GRPOConfig`, by field."""

SLIME = {
    "advantage_estimator": "algo.adv_estimator",
    "clip_grad": "train.clip_grad",
    "context_parallel_size": "train.cp",
    "decoder_first_pipeline_num_layers": "train.pp_layers, of all stages",
    "decoder_last_pipeline_num_layers": "train.pp_layers, of all stages",
    "entropy_coef": "algo.entropy_coef",
    "dynamic_sampling_filter_path": "algo.equal_reward_groups: replace, for equal rewards",
    "eps_clip": "algo.clip_low",
    "eps_clip_high": "algo.clip_high",
    "eval_interval": "eval.every",
    "eval_prompt_data": "data.val",
    "exp_avg_dtype": "train.moments_dtype",
    "expert_model_parallel_size": "train.ep",
    "expert_tensor_parallel_size": "train.etp",
    "global_batch_size": "train.samples_per_update",
    "hf_checkpoint": "model.path",
    "input_key": "data.prompt_field",
    "kl_loss_coef": "algo.kl_coef",
    "kl_loss_type": "algo.kl_type",
    "label_key": "data.answer_field",
    "max_tokens_per_gpu": "train.tokens_per_micro_batch",
    "moe_aux_loss_coeff": "train.moe_aux_loss_coef",
    "moe_router_bias_update_rate": "train.moe_bias_update_rate",
    "moe_z_loss_coeff": "train.moe_z_loss_coef",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_rollout": "run.steps",
    "opsm_delta": "algo.off_policy_mask_threshold",
    "optimizer_cpu_offload": "train.offload_optimizer",
    "over_sampling_batch_size": "tail.eta_prompts, as a factor",
    "pipeline_model_parallel_size": "train.pp",
    "prompt_data": "data.train",
    "rm_type": "reward",
    "rollout_batch_size": "data.prompts_per_step",
    "rollout_max_response_len": "rollout.max_tokens",
    "rollout_num_gpus": "cluster.rollout_ranks",
    "rollout_num_gpus_per_engine": "rollout.tp",
    "rollout_temperature": "rollout.temperature",
    "save_interval": "checkpoint.every",
    "sglang_ep_size": "rollout.ep",
    "sglang_mem_fraction_static": "rollout.gpu_memory_utilization",
    "tensor_model_parallel_size": "train.tp",
    "true_on_policy_mode": "train.true_on_policy",
    "update_weight_buffer_size": "sync.bucket_mb",
    "use_rollout_routing_replay": "algo.routing_replay: rollout",
    "use_routing_replay": "algo.routing_replay: old",
    "use_tis": "algo.rollout_is",
    "use_unbiased_kl": "algo.kl_unbiased",
}
"""Keys of rlcore that correspond to slime's arguments, by argument."""

MISSING = {
    "fp8": "FP8 training",
    "speculative_draft_model_path": "a draft model (EAGLE, MTP); rollout.draft has drafts without",
}
"""Features that rlcore does not have, by a word in other frameworks' keys."""


def explain(name: str) -> str:
    """Return a hint for a key that rlcore does not have, "" if no table has the key.

    A key matches by its full name (without `actor_rollout_ref.`) or by its last part. A renamed key
    also matches if negated (`draft.no_gate`) or set for one reward of a sum (`reward.exact.after`).
    """
    name = name.removeprefix("actor_rollout_ref.")
    section, last = name.partition(".")[0], name.rpartition(".")[2]
    if new := RENAMED.get(f"{section}.{last.removeprefix('no_')}"):
        negated = "no_" if last.startswith("no_") else ""
        return f"it is now --{name.removesuffix(last)}{negated}{new.rpartition('.')[2]}"
    for who, table in (("verl", VERL), ("TRL", TRL), ("slime", SLIME)):
        for theirs, ours in table.items():
            if name == theirs or (who != "verl" and last == theirs):
                return f"here {who}'s {theirs} is --{ours}"
    for theirs, ours in VERL.items():  # match by the last part, as in --train.ppo_epochs
        if last == theirs.rpartition(".")[2]:
            return f"here verl's {theirs} is --{ours}"
    for word, what in MISSING.items():
        if word in (last, name.partition(".")[0]):
            return f"rlcore does not have {what}"
    return ""
