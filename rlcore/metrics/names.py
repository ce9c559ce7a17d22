"""Declare every metric once: name, unit, meaning. If verl has a metric, the name is verl's.

A name may contain fields: `<phase>` stands for one part of the name, `<set>` for the name of a data
set, `<k>` for a number. An exact name has priority over a name with fields. Writing a metric that
is not declared here is an error, so a misspelt name fails in the first test that runs a step.
"""

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache

from rlcore.utils import phases


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric."""

    name: str
    unit: str
    """Unit; "" for plain numbers and fractions of one."""
    meaning: str


def _spread(prefix: str, unit: str, meaning: str, parts: str = "/mean /max /min") -> list[Metric]:
    return [Metric(prefix + p, unit, f"{p[1:]} of {meaning}") for p in parts.split()]


CLOCK = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/",
    "sync/time_s",
    "sched/busy_s",
    "reward/latency",
    "reward/queue",
    "reward/judge_batch_rows",
    "reward/judge_prefill_tokens_per_s",
    "env/wait_s",
    "env/call_s",
    "sched/decode_s",
    "spec/draft_s",
    "spec/verify_s",
    "sched/trainer_idle",
    "sched/rollout_idle",
    "balance/",
)
"""Prefixes of metrics that depend on the clock; two equal runs differ only in these metrics."""

_TIMED = phases.STEP | phases.BETWEEN | phases.BEFORE

METRICS = [
    # progress of the run
    Metric("training/global_step", "steps", "steps done, including this one"),
    Metric("training/epoch", "epochs", "passes over the training prompts"),
    Metric("training/version", "updates", "policy version after this step"),
    # samples
    *_spread("critic/score", "", "the scores returned by the reward"),
    Metric("critic/score/std_err", "", "standard error of the mean score, clustered by prompt"),
    *_spread("critic/rewards", "", "the scores after shaping by length"),
    *_spread("critic/advantages", "", "the advantages of trained tokens"),
    *_spread("critic/returns", "", "the returns of trained tokens"),
    Metric("critic/vf_loss", "", "value loss, mean over trained tokens"),
    Metric("critic/vf_clipfrac", "", "share of trained tokens whose value is clipped"),
    Metric("critic/vpred_mean", "", "mean value predicted by the critic"),
    Metric("critic/vf_explained_var", "", "share of the returns' variance explained by the critic"),
    Metric("critic/loss", "", "loss of the critic, equal to critic/vf_loss"),
    Metric("critic/grad_norm", "", "gradient norm of the critic before clipping"),
    Metric("critic/lr", "", "learning rate of the critic's last update"),
    Metric("critic/offloaded_gb", "GB", "copied to host memory in a critic update, on rank 0"),
    Metric("critic/shared_tokens", "", "as actor/shared_tokens, in the critic's updates"),
    Metric("critic/skipped", "updates", "critic updates skipped: loss or gradient not finite"),
    Metric("critic/updates", "updates", "optimizer steps of the critic in this step"),
    *_spread("response_length", "tokens", "the lengths of kept responses"),
    Metric("response_length/clip_ratio", "", "share of responses cut at rollout.max_tokens"),
    *_spread("prompt_length", "tokens", "the lengths of prompts"),
    Metric("prompt_length/clip_ratio", "", "share of prompts with data.max_prompt_tokens tokens"),
    Metric("response/aborted_ratio", "", "share of responses without a token, as in verl"),
    Metric("training/excluded_samples", "", "samples that callbacks exclude from training"),
    Metric("training/equal_reward_groups", "", "share of groups whose scores are all equal"),
    Metric("training/replaced_groups", "groups", "groups of equal scores that were replaced"),
    Metric("training/trained_rows", "samples", "samples trained in this step"),
    Metric("training/demonstration_tokens", "tokens", "learned tokens of data.demonstrations"),
    Metric("training/failed_saves", "checkpoints", "earlier checkpoints that failed to be written"),
    Metric("training/failed_writes", "writes", "writes to log files of rank 0 that have failed"),
    # the update
    Metric("actor/loss", "", "total loss of the actor, aggregated by algo.loss_agg_mode"),
    Metric("actor/pg_loss", "", "policy-gradient loss, mean over trained tokens"),
    Metric("actor/sft_nll", "nats", "mean negative log-prob of demonstration tokens"),
    Metric("actor/pg_clipfrac", "", "share of trained tokens whose gradient is clipped"),
    Metric("actor/pg_clipfrac_lower", "", "share of trained tokens at the lower or dual clip"),
    Metric("actor/ppo_kl", "nats", "k1 estimate of an update's KL: mean of old - new log-prob"),
    Metric("actor/kl_loss", "nats", "KL to the reference model, without its coefficient"),
    Metric("actor/kl_loss_coeff", "", "coefficient of the KL in the loss, after adaptation"),
    Metric("actor/reward_kl_penalty", "nats", "KL to the reference in the reward, response mean"),
    Metric("actor/reward_kl_penalty_coeff", "", "coefficient of the KL in the reward of this step"),
    Metric("actor/teacher_kl", "nats", "k1 estimate of KL(policy || teacher), without coefficient"),
    Metric("actor/teacher_top_mass", "", "teacher's probability of its likeliest tokens (gkd)"),
    Metric("actor/top_mass", "", "policy's probability of the teacher's likeliest tokens (gkd)"),
    Metric("actor/teacher_streamed_layers", "layers", "teacher layers copied to the GPU per pass"),
    Metric("actor/entropy", "nats", "mean entropy of the learner at trained tokens"),
    Metric("actor/grad_norm", "", "gradient norm of the actor before clipping, mean over updates"),
    Metric("actor/lr", "", "learning rate of the actor's last update"),
    Metric("actor/offloaded_gb", "GB", "copied to host memory in an actor update, on rank 0"),
    Metric("actor/rerouted", "", "share of replayed tokens that go to other experts"),
    Metric("actor/shared_tokens", "", "share of an update's tokens that are not computed again"),
    Metric("actor/skipped", "updates", "actor updates skipped: loss or gradient not finite"),
    Metric("actor/updates", "updates", "optimizer steps of the actor in this step"),
    Metric("actor/expert_load_max", "", "tokens of the busiest expert / its layer's mean, largest"),
    Metric("actor/moe_aux_loss", "", "load-balancing loss, mean over layers; 1: equal loads"),
    Metric("actor/moe_z_loss", "", "mean squared logsumexp of router logits, mean over layers"),
    Metric("actor/unused_experts", "", "share of experts, over all layers, without any token"),
    Metric("algo/<name>", "", "algorithm-specific metric, mean over trained tokens"),
    # sampler compared with learner
    Metric("rollout_corr/kl", "nats", "k1 estimate of KL(sampler || learner)"),
    Metric("rollout_corr/k3_kl", "nats", "k3 estimate of KL(sampler || learner)"),
    Metric("rollout_corr/chi2_token", "", "mean squared probability ratio of tokens, minus 1"),
    Metric("rollout_corr/chi2_seq", "", "mean squared probability ratio of responses, minus 1"),
    Metric("rollout_corr/training_ppl", "", "perplexity of responses under the learner"),
    Metric("rollout_corr/training_log_ppl", "nats", "mean log perplexity under the learner"),
    Metric("rollout_corr/rollout_ppl", "", "perplexity of responses under the sampler"),
    Metric("rollout_corr/rollout_log_ppl", "nats", "mean log perplexity under the sampler"),
    Metric("rollout_corr/log_ppl_diff", "nats", "mean log perplexity of learner - sampler"),
    Metric("rollout_corr/log_ppl_abs_diff", "nats", "mean absolute log perplexity difference"),
    Metric("rollout_corr/log_ppl_diff_max", "nats", "largest log perplexity difference"),
    Metric("rollout_corr/log_ppl_diff_min", "nats", "smallest log perplexity difference"),
    Metric("rollout_corr/ppl_ratio", "", "mean ratio of perplexities, learner over sampler"),
    Metric("rollout_corr/log_prob_diff_max", "nats", "largest |log-prob difference| of a token"),
    *_spread(
        "rollout_corr/response_max_diff",
        "",
        "the largest |p_sampler - p_learner| per response, over responses",
        "_mean _max",
    ),
    *_spread(
        "rollout_corr/response_mean_diff",
        "",
        "the mean |p_sampler - p_learner| per response, over responses",
        "_mean _max",
    ),
    Metric("rollout_corr/responses_above_half", "", "share with response_max_diff above 0.5"),
    Metric("rollout_corr/score_is", "", "mean score of the learner by importance sampling"),
    *_spread(
        "rollout_corr/rollout_is",
        "",
        "the rollout correction weight after the cap",
        "_mean _std _min _max",
    ),
    *_spread(
        "rollout_corr/rollout_is_uncapped",
        "",
        "the correction weight before the cap, of tokens or responses",
        "_mean _max",
    ),
    Metric("rollout_corr/rollout_is_eff_sample_size", "", "effective sample size / trained tokens"),
    Metric("rollout_corr/rollout_is_ratio_fraction_high", "", "share of weights above the cap"),
    Metric("rollout_corr/rollout_is_ratio_fraction_low", "", "share of weights below 1 / the cap"),
    Metric("rollout_corr/rollout_rs_masked_fraction", "", "share of tokens rejected by rollout_rs"),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "", "share of responses with rejections"),
    Metric("rollout_corr/off_policy_masked_fraction", "", "tokens without loss by the mask"),
    *_spread(
        "training/rollout_probs_diff",
        "",
        "|p_learner - p_sampler| over trained tokens",
        "_mean _max _std",
    ),
    Metric("training/rollout_actor_probs_pearson_corr", "", "correlation, p_learner and p_sampler"),
    # staleness, in policy versions
    *_spread(
        "training/off_policy/token_staleness",
        "versions",
        "age of trained tokens",
        "/mean /max",
    ),
    *_spread("training/off_policy/trajectory_staleness", "versions", "age of the newest token"),
    *_spread(
        "training/off_policy/trajectory_staleness_worst",
        "versions",
        "age of the oldest token",
    ),
    *_spread("training/off_policy/trajectory_spans", "versions", "versions in a response"),
    # speed and memory
    Metric("perf/throughput", "tokens/s/rank", "prompt and response tokens per second and rank"),
    Metric("perf/time_per_step", "s", "time of a step, equal to timing_s/step"),
    Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the kept samples"),
    Metric("perf/samples_per_s", "samples/s", "kept samples per second of the step"),
    Metric("perf/gen_tokens_per_s", "tokens/s", "response tokens per second of gen"),
    Metric("perf/train_tokens_per_s", "tokens/s", "trained tokens per second of update_actor"),
    Metric("perf/mfu/actor", "", "model FLOPs utilisation of update_actor, on a known GPU"),
    Metric("perf/max_memory_allocated_gb", "GB", "peak GPU memory in tensors, maximum over ranks"),
    Metric("perf/max_memory_reserved_gb", "GB", "peak GPU memory reserved by the allocator"),
    Metric("perf/max_rss_gb_rank0", "GB", "peak resident memory of rank 0 (summary.json only)"),
    Metric("perf/cpu_memory_gb", "GB", "resident memory of rank 0 and its child processes"),
    Metric("perf/rollout_node_gb", "GB", "most host memory of a node's rollout ranks and children"),
    Metric("perf/train_node_gb", "GB", "most host memory of a node's train ranks and children"),
    Metric("global_seqlen/minmax_diff", "tokens", "most minus fewest tokens of any train rank"),
    *[Metric(f"timing_s/{name}", "s", meaning) for name, meaning in _TIMED.items()],
    Metric("timing_s/step", "s", "one step, from gen to update_weights"),
    Metric(
        "timing_s/write_checkpoint",
        "s",
        "writing of a checkpoint while training continues, slowest rank",
    ),
    *[
        Metric(f"timing_per_token_ms/{p}", "ms", f"time of {p} per token")
        for p in (*phases.STEP, "testing")
    ],
    # evaluation
    Metric("val-core/<set>/acc/mean@<k>", "", "mean score over prompts and k samples of each"),
    Metric("val-core/<set>/acc/pass@<k>", "", "chance that one of k samples is correct, unbiased"),
    Metric("val-core/<set>/acc/maj@<k>", "", "score of the most frequent answer of k samples"),
    Metric("val-core/<set>/acc/best@<k>", "", "expected best score of k samples, unbiased"),
    Metric("val-core/<set>/acc/greedy", "", "score of the greedy response"),
    Metric("val-core/<set>/nll/mean", "nats", "rlcore sft: mean nll of learned tokens"),
    Metric("val-aux/<set>/nll/num_tokens", "tokens", "rlcore sft: learned tokens of the set"),
    Metric("val-aux/<set>/acc/std_err@<k>", "", "standard error of mean@k over prompts"),
    Metric("val-aux/<set>/acc/<stat>", "", "further statistic of the scores of a data set"),
    Metric("val-aux/<set>/response_length/<stat>", "tokens", "response lengths in evaluation"),
    Metric("val-aux/<set>/num_prompts", "prompts", "prompts evaluated in a data set"),
    Metric("val-aux/<set>/reward/<name>", "", "mean of a detail of the reward in evaluation"),
    # rewards, schedulers, environments and other components
    Metric("reward/latency_s/mean", "s", "mean time of one score"),
    Metric("reward/latency_s/max", "s", "longest time of one score"),
    *_spread("reward/timeout_s", "s", "deadlines by reward.adaptive_timeout", "/mean /min"),
    Metric("reward/timeouts", "samples", "samples whose scoring exceeded its deadline"),
    Metric("reward/errors", "samples", "samples scored by reward.on_error, including timeouts"),
    Metric("reward/failures/<name>", "samples", "reward errors by reason: timeout, crash, ..."),
    *_spread("reward/queued_s", "s", "the time that a sample waited to be scored", "/mean /max"),
    Metric("reward/queue_depth/max", "samples", "most samples waiting for a score on one rank"),
    Metric("reward/judge_batch_rows", "rows", "mean size of the judge's batches"),
    Metric("reward/judge_cached", "", "share of the judge's verdicts served from its cache"),
    Metric("reward/judge_streamed_layers", "layers", "judge layers streamed to the GPU per batch"),
    Metric("reward/judge_prefill_tokens_per_s", "tokens/s", "prefill speed of the judge"),
    Metric("reward/judge_mass", "", "total probability of the judge's verdict tokens"),
    Metric("reward/judge_cut", "", "share of responses whose beginning was cut to fit the judge"),
    Metric("reward/<name>", "", "mean of a detail of the reward, or of one reward of a sum"),
    Metric("reward/<reward>/<name>", "", "mean of a detail of one reward of a sum"),
    Metric("sched/long_round", "", "1 in a long round, made of prompts deferred by earlier rounds"),
    Metric("sched/queue", "prompts", "prompts deferred to a long round"),
    Metric("sched/prompts_started", "prompts", "prompts started in the run, once per epoch"),
    Metric("sched/prompts_trained", "prompts", "prompts trained in the run, once per epoch"),
    Metric("sched/prompts_dropped", "prompts", "prompts dropped in the run, once per epoch"),
    Metric("sched/short_of_groups", "", "1 if a round ended with fewer groups than requested"),
    Metric("sched/rollout_tp", "ranks", "ranks of a rollout engine in this step"),
    Metric("sched/prefill_tokens", "tokens", "tokens that engines prefilled"),
    Metric(
        "sched/cached_tokens", "tokens", "prompt tokens that another request had in the KV cache"
    ),
    Metric("sched/preemptions", "requests", "requests preempted because the KV cache was full"),
    Metric("sched/cache_used", "", "largest share of its KV cache in use by an engine"),
    Metric("sched/surplus_tokens", "", "share of decoded tokens in responses that were not kept"),
    Metric("sched/length_shift", "", "mean length of kept over started responses, minus 1"),
    Metric("sched/tail_at", "", "share of responses done when a tail released nodes to other jobs"),
    Metric("sched/stream_at", "", "share of responses done when the first engines began to train"),
    Metric("sched/streamed_tokens", "", "share of the kept tokens trained before the round ended"),
    Metric("sched/stream_s", "s", "longest time that ranks trained before the round ended"),
    Metric("sched/migrated", "requests", "requests migrated to another engine"),
    Metric("sched/migrated_tokens", "tokens", "tokens of migrated requests, prefilled again"),
    Metric("sched/<name>", "", "counter of a scheduler, see sched/"),
    Metric("sched/trainer_idle", "", "share of the step that train ranks wait for samples"),
    Metric("sched/rollout_idle", "", "share of the step that engines are idle, mean over engines"),
    Metric("balance/train_share", "", "beta*: share of a step's GPU-seconds spent in training"),
    Metric("balance/rollout_ranks", "ranks", "predicted best number of rollout ranks"),
    Metric("balance/step_s", "s", "predicted time of a step with balance/rollout_ranks"),
    Metric("balance/speed_up", "", "predicted time of a step now over balance/step_s"),
    Metric("async/running_groups", "groups", "groups in flight when the batch was taken"),
    Metric("async/finished_groups", "groups", "finished groups left when the batch was taken"),
    Metric("async/carried", "requests", "requests continued with new weights after an update"),
    Metric("async/stale_groups", "groups", "groups dropped because they exceeded async.alpha"),
    Metric("async/stale_tokens", "tokens", "tokens of groups dropped because of their age"),
    Metric("env/turns", "turns", "turns of a kept episode, mean"),
    Metric("env/wait_s", "s", "time that a kept episode waited for its environment, mean"),
    Metric("env/cut", "", "share of episodes ended by a limit on turns or by rollout.max_tokens"),
    Metric("env/observed_tokens", "", "share of the response tokens written by environments"),
    Metric("env/episodes", "episodes", "episodes that ended in this step, on all ranks"),
    Metric("env/call_s", "s", "mean time of a reset or a step of an environment"),
    Metric("env/failures/timeout", "episodes", "attempts ended by an environment timeout"),
    Metric("env/failures/crash", "episodes", "attempts ended by an environment crash"),
    Metric("env/failures/error", "episodes", "attempts ended by an exception in the environment"),
    Metric("env/lost_tokens", "tokens", "tokens sampled in failed attempts"),
    Metric("env/<name>", "", "number in the environment's last info, mean over kept episodes"),
    Metric("pipe/known", "", "share of the last step's prompts with known lengths"),
    Metric("pipe/higher", "", "share of the last step's prompts that rose by a ranking group"),
    Metric("pipe/longest_group", "steps", "predicted decode steps of the slowest ranking group"),
    Metric("pipe/moved", "", "share of started responses that migrated to another engine"),
    Metric("sync/bytes", "bytes", "bytes of weights sent to one engine in a weight update"),
    Metric("sync/slow_bytes", "bytes", "bytes of weights sent between sites in a weight update"),
    Metric("sync/time_s", "s", "time of a weight update"),
    Metric("sync/transient_gb", "GB", "peak extra memory of a weight update"),
    Metric("memory/contexts_gb", "GB", "measured GPU memory of rank 0's contexts: all but tensors"),
    Metric("memory/learner_gb/<phase>", "GB", "GPU memory of the learner as the phase begins"),
    Metric("memory/device_gb/<phase>", "GB", "GPU memory in use on rank 0 as the phase begins"),
    Metric("memory/planned_gb/<phase>", "GB", "GPU memory planned for the phase"),
    Metric("spec/acceptance_rate", "", "share of drafted tokens that were accepted"),
    Metric("spec/mean_accept_len", "tokens", "tokens gained by a request in one verification"),
    Metric("spec/tokens_per_forward", "tokens", "tokens gained by one decode step, all requests"),
    Metric("spec/tokens_per_row/<batch>", "tokens", "tokens per request and step, by batch size"),
    Metric("spec/rows/<batch>", "requests", "requests times decode steps, by batch size"),
    Metric("spec/gate", "", "share of decode steps with drafting on"),
    Metric("spec/gate/<batch>", "", "share of requests with drafting on, by batch size"),
    Metric("spec/speculated_tokens", "", "share of the decoded tokens that came from drafts"),
    Metric("spec/drafted_tokens", "tokens", "tokens drafted"),
    Metric("spec/draft_s", "s", "time to make drafts, sum over engines"),
    Metric("spec/verify_s", "s", "time of decode steps with drafting on, sum over engines"),
    Metric("spec/verify_width", "tokens", "tokens of a request in a verification, with padding"),
    Metric("spec/history_prompts", "prompts", "prompts with earlier responses as draft source"),
    Metric("spec/history_tokens", "tokens", "tokens of earlier responses in the draft source"),
    Metric("judge/<name>", "", "counter of the judge service"),
    Metric("mux/wait_s/<phase>", "s", "time waiting for the permit of the phase"),
    Metric("mux/load_s/<phase>", "s", "warm start: time to load the phase from host memory"),
    Metric("mux/store_s/<phase>", "s", "time to store the phase's state in host memory"),
    Metric("mux/tail_s", "s", "time that other jobs could use nodes released by a rollout's tail"),
    Metric("mux/step_s", "s", "time holding the permit of a step, if all ranks do both phases"),
    Metric("mux/start_s", "s", "cold start: time to build engine and learner, in the first row"),
    Metric("mux/resident_gb/<phase>", "GB", "memory loaded for the phase, maximum over ranks"),
    # the end of a run: summary.json only
    Metric("val/accuracy_start", "", "mean@k before training, mean over data sets"),
    Metric("val/accuracy_end", "", "mean@k at the last evaluation, mean over data sets"),
    Metric("val/accuracy_start/<set>", "", "mean@k of one data set before training"),
    Metric("val/accuracy_end/<set>", "", "mean@k of one data set at the last evaluation"),
    Metric("val/std_err_start/<set>", "", "standard error of val/accuracy_start/<set>"),
    Metric("val/std_err_end/<set>", "", "standard error of val/accuracy_end/<set>"),
    Metric("before_s/<phase>", "s", "time of a phase before the first step"),
]

_FIELDS = {"<k>": r"\d+", "<batch>": r"\d+", "<set>": r"[^/]+(?:/[^/]+)*?"}
_EXACT = {m.name: m for m in METRICS if "<" not in m.name}


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    def pattern(name: str) -> re.Pattern[str]:
        parts = re.split(r"(<\w+>)", name)
        texts = [
            _FIELDS.get(p, "[^/]+") if i % 2 else re.escape(p) for i, p in enumerate(parts)
        ]  # Parts with an odd index are fields, such as `<k>`.
        return re.compile("".join(texts))

    return [(pattern(m.name), m) for m in METRICS if "<" in m.name]


@lru_cache(maxsize=4096)
def check(name: str) -> Metric:
    """Return the declaration of a metric. If there is none, raise ValueError with the nearest
    declared names."""
    if name in _EXACT:
        return _EXACT[name]
    for pattern, metric in _patterns():
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [m.name for m in METRICS], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "see rlcore/metrics/names.py"
    raise ValueError(f"metric {name}: not declared in metrics/names.py; {hint}")
