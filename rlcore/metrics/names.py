"""Every metric, declared once: name, unit, meaning. If verl has a metric, the name is verl's.

A name may contain fields: `<phase>` stands for one part of the name, `<set>` for the name of a data
set, `<k>` for a number. An exact name has priority over one with fields. Writing a metric that is
not declared here is an error, so a misspelt name fails in the first test that runs a step.
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
"""Prefixes of metrics that depend on the clock: two equal runs differ only in these."""

_TIMED = phases.STEP | phases.BETWEEN | phases.BEFORE

METRICS = [
    # progress of the run
    Metric("training/global_step", "steps", "steps done, this one included"),
    Metric("training/epoch", "epochs", "passes over the training prompts"),
    Metric("training/version", "updates", "policy version after this step"),
    # samples
    *_spread("critic/score", "", "the scores that the rewards gave"),
    Metric("critic/score/std_err", "", "standard error of the mean score, prompts as clusters"),
    *_spread("critic/rewards", "", "the scores after shaping by length"),
    *_spread("critic/advantages", "", "the advantages of trained tokens"),
    *_spread("critic/returns", "", "the returns of trained tokens"),
    Metric("critic/vf_loss", "", "value loss, mean over trained tokens"),
    Metric("critic/vf_clipfrac", "", "share of trained tokens where the value clip is at work"),
    Metric("critic/vpred_mean", "", "mean of the critic's values"),
    Metric("critic/vf_explained_var", "", "share of the returns' variance that the critic tells"),
    Metric("critic/loss", "", "the same as vf_loss"),
    Metric("critic/grad_norm", "", "the critic's gradient norm before clipping"),
    Metric("critic/lr", "", "learning rate of the critic's last update"),
    Metric("critic/skipped", "updates", "the critic's updates left out, gradient not finite"),
    Metric("critic/updates", "updates", "the critic's optimizer steps of this round"),
    *_spread("response_length", "tokens", "the lengths of kept responses"),
    Metric("response_length/clip_ratio", "", "share of responses cut at rollout.max_tokens"),
    *_spread("prompt_length", "tokens", "the lengths of prompts"),
    Metric("prompt_length/clip_ratio", "", "share of prompts of data.max_prompt_tokens tokens"),
    Metric("response/aborted_ratio", "", "share of started responses that were aborted"),
    Metric("training/equal_reward_groups", "", "share of groups whose scores are all equal"),
    Metric("training/trained_rows", "samples", "samples that had a gradient in this step"),
    Metric(
        "training/failed_saves",
        "checkpoints",
        "checkpoints before this step that could not be written (checkpoint.on_error continue)",
    ),
    # the update
    Metric("actor/loss", "", "the whole loss, averaged as algo.loss_agg_mode says"),
    Metric("actor/pg_loss", "", "policy-gradient loss, mean over trained tokens"),
    Metric("actor/sft_nll", "nats", "negative log-prob of a demonstration's token"),
    Metric("actor/pg_clipfrac", "", "share of trained tokens where the clip cut the gradient"),
    Metric(
        "actor/pg_clipfrac_lower", "", "share of trained tokens under the lower or the dual clip"
    ),
    Metric(
        "actor/ppo_kl", "nats", "k1 from the old to the new learner: mean of old - new log-prob"
    ),
    Metric("actor/kl_loss", "nats", "KL to the reference model, before its coefficient"),
    Metric("actor/kl_loss_coeff", "", "weight of the KL in the loss, as the controller left it"),
    Metric("actor/reward_kl_penalty", "nats", "KL to the reference, mean over responses"),
    Metric("actor/reward_kl_penalty_coeff", "", "weight of the KL in the reward in this step"),
    Metric("actor/entropy", "nats", "mean entropy of the learner at trained tokens"),
    Metric("actor/grad_norm", "", "global gradient norm before clipping, mean over updates"),
    Metric("actor/lr", "", "learning rate of the last update"),
    Metric("actor/skipped", "updates", "updates left out because loss or gradient was not finite"),
    Metric("actor/updates", "updates", "optimizer steps of this round"),
    Metric("actor/moe_aux_loss", "", "load-balancing loss of MoE models"),
    Metric("algo/<name>", "", "further number of an algorithm, averaged over trained tokens"),
    # sampler compared with learner
    Metric("rollout_corr/kl", "nats", "k1 from sampler to learner: mean of sampler - old log-prob"),
    Metric("rollout_corr/k3_kl", "nats", "k3 estimate of the same"),
    Metric("rollout_corr/chi2_token", "", "mean of the squared probability ratio, minus 1"),
    Metric("rollout_corr/chi2_seq", "", "the same of the ratio of whole responses"),
    Metric("rollout_corr/training_ppl", "", "perplexity of the responses under the learner"),
    Metric("rollout_corr/training_log_ppl", "nats", "its logarithm, mean over responses"),
    Metric("rollout_corr/rollout_ppl", "", "perplexity of the responses under the sampler"),
    Metric("rollout_corr/rollout_log_ppl", "nats", "its logarithm, mean over responses"),
    Metric("rollout_corr/log_ppl_diff", "nats", "mean over responses of learner - sampler log ppl"),
    Metric("rollout_corr/log_ppl_abs_diff", "nats", "mean of the absolute value of the same"),
    Metric("rollout_corr/log_ppl_diff_max", "nats", "the largest of them"),
    Metric("rollout_corr/log_ppl_diff_min", "nats", "the smallest of them"),
    Metric("rollout_corr/ppl_ratio", "", "perplexity of learner by sampler, mean over responses"),
    *_spread(
        "rollout_corr/response_max_diff",
        "",
        "over responses, the largest |p_sampler - p_learner| of a token",
        "_mean _max",
    ),
    *_spread(
        "rollout_corr/response_mean_diff",
        "",
        "over responses, the mean |p_sampler - p_learner| of its tokens",
        "_mean _max",
    ),
    Metric("rollout_corr/responses_above_half", "", "share with a token whose |dp| is above 0.5"),
    Metric("rollout_corr/score_is", "", "estimate of the learner's own mean score"),
    *_spread(
        "rollout_corr/rollout_is", "", "the rollout-correction weight", "_mean _std _min _max"
    ),
    Metric("rollout_corr/rollout_is_eff_sample_size", "", "effective share of the trained tokens"),
    Metric("rollout_corr/rollout_is_ratio_fraction_high", "", "share of weights above the cap"),
    Metric("rollout_corr/rollout_is_ratio_fraction_low", "", "share of weights below its inverse"),
    Metric("rollout_corr/rollout_rs_masked_fraction", "", "share of tokens rejected for mismatch"),
    Metric("rollout_corr/rollout_rs_seq_masked_fraction", "", "share of responses that lost some"),
    *_spread(
        "training/rollout_probs_diff",
        "",
        "|p_learner - p_sampler| over trained tokens",
        "_mean _max _std",
    ),
    Metric("training/rollout_actor_probs_pearson_corr", "", "correlation of the two probabilities"),
    # staleness, in policy versions
    *_spread(
        "training/off_policy/token_staleness", "versions", "the age of trained tokens", "/mean /max"
    ),
    *_spread("training/off_policy/trajectory_staleness", "versions", "the age of the newest token"),
    *_spread(
        "training/off_policy/trajectory_staleness_worst", "versions", "the age of the oldest token"
    ),
    *_spread("training/off_policy/trajectory_spans", "versions", "the versions within a response"),
    # speed and memory
    Metric("perf/throughput", "tokens/s/rank", "prompt and response tokens by step time and rank"),
    Metric("perf/time_per_step", "s", "the same as timing_s/step"),
    Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the kept samples"),
    Metric("perf/samples_per_s", "samples/s", "kept samples by step time"),
    Metric("perf/gen_tokens_per_s", "tokens/s", "response tokens by the seconds of gen"),
    Metric("perf/train_tokens_per_s", "tokens/s", "trained tokens of all epochs by update seconds"),
    Metric("perf/mfu/actor", "", "share of the hardware's peak that the update reached"),
    Metric("perf/max_memory_allocated_gb", "GB", "most accelerator memory in tensors, any rank"),
    Metric("perf/max_memory_reserved_gb", "GB", "most accelerator memory reserved, any rank"),
    Metric("perf/max_rss_gb_rank0", "GB", "most resident memory of rank 0; summary.json only"),
    Metric("perf/cpu_memory_gb", "GB", "resident memory of rank 0 and its children"),
    Metric(
        "perf/rollout_node_gb", "GB", "host memory of a node's rollout ranks with their children"
    ),
    Metric("perf/train_node_gb", "GB", "the same of its train ranks; of the node that has most"),
    Metric("global_seqlen/minmax_diff", "tokens", "most minus fewest tokens of a train rank"),
    *[Metric(f"timing_s/{name}", "s", meaning) for name, meaning in _TIMED.items()],
    Metric("timing_s/step", "s", "one step, from gen to update_weights"),
    *[
        Metric(f"timing_per_token_ms/{p}", "ms", f"{p}, by token")
        for p in (*phases.STEP, "testing")
    ],
    # evaluation
    Metric("val-core/<set>/acc/mean@<k>", "", "score, mean over prompts and k samples of each"),
    Metric("val-core/<set>/acc/pass@<k>", "", "chance that one of k samples is right, unbiased"),
    Metric("val-core/<set>/acc/best@<k>", "", "expected best score of k samples, unbiased"),
    Metric("val-core/<set>/acc/maj@<k>", "", "score of the most frequent answer of k"),
    Metric("val-core/<set>/acc/greedy", "", "score of the most likely response"),
    Metric("val-aux/<set>/acc/std_err@<k>", "", "standard error of mean@k over prompts"),
    Metric("val-aux/<set>/acc/<stat>", "", "further numbers about the scores of a set"),
    Metric("val-aux/<set>/response_length/<stat>", "tokens", "lengths of responses in evaluation"),
    Metric("val-aux/<set>/num_prompts", "prompts", "prompts evaluated"),
    Metric("val-aux/<set>/reward/<name>", "", "mean of a reward's detail in evaluation"),
    # components
    Metric("reward/latency_s/mean", "s", "mean time of one score"),
    Metric("reward/latency_s/max", "s", "longest time of one score"),
    *_spread("reward/timeout_s", "s", "the deadlines, where reward.adaptive_timeout", "/mean /min"),
    Metric("reward/timeouts", "samples", "scores that took longer than their deadline"),
    Metric("reward/errors", "samples", "scores replaced by reward.on_error, timeouts included"),
    Metric("reward/failures/<name>", "samples", "the same by reason: timeout, crash, memory, ..."),
    *_spread("reward/queued_s", "s", "time that samples waited for their turn", "/mean /max"),
    Metric("reward/queue_depth/max", "samples", "most that one rank had without a score at a time"),
    Metric("reward/judge_batch_rows", "rows", "mean size of the judge's batches"),
    Metric("reward/judge_cached", "", "share of verdicts that were known already"),
    Metric("reward/judge_streamed_layers", "layers", "of the judge that came in for each batch"),
    Metric("reward/judge_prefill_tokens_per_s", "tokens/s", "read by the judge while it computes"),
    Metric("reward/judge_mass", "", "probability of all verdict tokens together"),
    Metric("reward/judge_cut", "", "share of responses too long for the judge, cut in front"),
    Metric("reward/<name>", "", "mean of a detail that the reward returned; of a term of a sum"),
    Metric("reward/<reward>/<name>", "", "mean of a detail that this term of a sum returned"),
    Metric("sched/long_round", "", "1: made of prompts that were late in earlier rounds"),
    Metric("sched/queue", "prompts", "waiting for a long round"),
    Metric("sched/prompts_started", "prompts", "since the start of the run, each once an epoch"),
    Metric("sched/prompts_trained", "prompts", "of those that were started"),
    Metric("sched/prompts_dropped", "prompts", "of those that were started; with a reason"),
    Metric("sched/short_of_groups", "", "1: the round ended with fewer groups than were wanted"),
    Metric("sched/rollout_tp", "ranks", "of one rollout engine in this step"),
    Metric("sched/preemptions", "requests", "thrown out of a full KV cache and prefilled again"),
    Metric("sched/cache_used", "", "largest share of its KV cache that an engine had in use"),
    Metric("sched/surplus_tokens", "", "share of the decoded tokens that is not trained"),
    Metric("sched/length_shift", "", "kept responses over all started ones of their groups, - 1"),
    Metric("sched/tail_at", "", "share of the responses done when the rest left nodes to others"),
    Metric("sched/stream_at", "", "share of the responses done when engines began to train"),
    Metric(
        "sched/streamed_tokens", "", "share of the tokens that were trained before the round ended"
    ),
    Metric("sched/stream_s", "s", "the longest that an engine trained before the round ended"),
    Metric("sched/migrated", "requests", "that went on at another engine"),
    Metric("sched/migrated_tokens", "tokens", "that they had, prefilled there"),
    Metric("sched/<name>", "", "counter of the round's policies, see sched/"),
    Metric("sched/trainer_idle", "", "share of the step in which the train ranks wait for samples"),
    Metric(
        "sched/rollout_idle", "", "share of the step in which engines do nothing, mean over them"
    ),
    Metric("balance/train_share", "", "beta*: share of training in a step's GPU-seconds"),
    Metric("balance/rollout_ranks", "ranks", "that should sample, by the rates of the last steps"),
    Metric("balance/step_s", "s", "a step would take with that many"),
    Metric("balance/speed_up", "", "a step of the present split over that"),
    Metric("async/running_groups", "groups", "under way when the batch was taken"),
    Metric("async/finished_groups", "groups", "complete then and left for later batches"),
    Metric("async/carried", "requests", "under way at the push, which went on under new weights"),
    Metric("async/stale_groups", "groups", "dropped since they were older than async.alpha"),
    Metric("async/stale_tokens", "tokens", "that these had"),
    Metric(
        "async/equal_groups",
        "groups",
        "dropped since their rewards are equal, async.dynamic_sampling",
    ),
    Metric("env/turns", "turns", "of an episode, mean over kept ones"),
    Metric("env/wait_s", "s", "that an episode waited for its environment, mean over kept ones"),
    Metric("env/cut", "", "share of episodes that a limit ended: turns, or rollout.max_tokens"),
    Metric("env/observed_tokens", "", "share of the response tokens that environments gave"),
    Metric("env/episodes", "episodes", "that ended in this step, on all ranks"),
    Metric("env/call_s", "s", "mean time of a reset or a step of an environment"),
    Metric("env/failures/timeout", "episodes", "attempts that ended since nothing was answered"),
    Metric("env/failures/crash", "episodes", "... since the environment's process died"),
    Metric("env/failures/error", "episodes", "... since the environment raised"),
    Metric("env/lost_tokens", "tokens", "that the failed attempts had sampled"),
    Metric("env/<name>", "", "a number of the environment's last info, mean over kept episodes"),
    Metric("pipe/known", "", "share of the last step's prompts whose lengths are known"),
    Metric("pipe/higher", "", "of them in a higher ranking group than the epoch before"),
    Metric("pipe/longest_group", "steps", "of decoding that a ranking group takes at least, most"),
    Metric("pipe/moved", "", "responses that left for another engine, over those started"),
    Metric("sync/bytes", "bytes", "weights that one push carried to one engine"),
    Metric("sync/slow_bytes", "bytes", "weights that crossed between sites in one push, all links"),
    Metric("sync/time_s", "s", "time of one push"),
    Metric("sync/transient_gb", "GB", "extra memory that a push took at its peak"),
    Metric("memory/learner_gb/<phase>", "GB", "the learner's on its device as the phase begins"),
    Metric("memory/device_gb/<phase>", "GB", "of the GPU taken then, by whomever; rank 0"),
    Metric("memory/planned_gb/<phase>", "GB", "what the plan has for the whole phase"),
    Metric("spec/acceptance_rate", "", "share of drafted tokens that were accepted"),
    Metric("spec/mean_accept_len", "tokens", "of a request, gained by one verification"),
    Metric("spec/tokens_per_forward", "tokens", "gained by one decode step, all requests together"),
    Metric("spec/tokens_per_row/<batch>", "tokens", "of a request and step in such batches"),
    Metric("spec/rows/<batch>", "requests", "in decode steps with a batch of this to twice this"),
    Metric("spec/gate", "", "share of the decode steps that could verify drafts"),
    Metric("spec/gate/<batch>", "", "the same of batches of this to twice this size"),
    Metric("spec/speculated_tokens", "", "share of the decoded tokens that drafts had right"),
    Metric("spec/drafted_tokens", "tokens", "that were guessed"),
    Metric("spec/draft_s", "s", "making drafts, the sum of all engines"),
    Metric("spec/verify_s", "s", "decode steps that could verify drafts, the sum of all engines"),
    Metric("spec/knee", "tokens", "of a forward that takes twice as long as one of none; rank 0"),
    Metric("spec/history_prompts", "prompts", "whose earlier responses are known"),
    Metric("spec/history_tokens", "tokens", "of them"),
    Metric("judge/<name>", "", "counter of the judge service"),
    Metric("mux/wait_s/<phase>", "s", "waiting for the permit of a phase"),
    Metric("mux/load_s/<phase>", "s", "warm start: what the phase needs, from host memory"),
    Metric("mux/store_s/<phase>", "s", "giving the device back after the phase"),
    Metric("mux/tail_s", "s", "for which other jobs had nodes of a rollout that had left them"),
    Metric("mux/step_s", "s", "time of a step's permit, where every rank samples and trains"),
    Metric("mux/start_s", "s", "cold start: engine and learner from nothing, in the first row"),
    Metric("mux/resident_gb/<phase>", "GB", "that were loaded, of the rank that has most"),
    # the end of a run: summary.json only
    Metric("val/accuracy_start", "", "mean@k before training, mean over data sets"),
    Metric("val/accuracy_end", "", "mean@k at the last evaluation, mean over data sets"),
    Metric("val/accuracy_start/<set>", "", "mean@k of one data set before training"),
    Metric("val/accuracy_end/<set>", "", "mean@k of one data set at the last evaluation"),
    Metric("val/std_err_start/<set>", "", "standard error of val/accuracy_start/<set>"),
    Metric("val/std_err_end/<set>", "", "standard error of val/accuracy_end/<set>"),
    Metric(
        "before_s/<phase>",
        "s",
        "sum of a phase before the first step: start, update_weights, testing",
    ),
]

_FIELDS = {"<k>": r"\d+", "<batch>": r"\d+", "<set>": r"[^/]+(?:/[^/]+)*?"}
_EXACT = {m.name: m for m in METRICS if "<" not in m.name}


@lru_cache(maxsize=1)
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    def pattern(name: str) -> re.Pattern[str]:
        parts = re.split(r"(<\w+>)", name)
        texts = [
            _FIELDS.get(p, "[^/]+") if i % 2 else re.escape(p) for i, p in enumerate(parts)
        ]  # odd parts are fields
        return re.compile("".join(texts))

    return [(pattern(m.name), m) for m in METRICS if "<" in m.name]


@lru_cache(maxsize=4096)
def check(name: str) -> Metric:
    """Return the declaration of a metric; ValueError with the nearest declared names if there is
    none."""
    if name in _EXACT:
        return _EXACT[name]
    for pattern, metric in _patterns():
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, [m.name for m in METRICS], n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else "see rlcore/metrics/names.py"
    raise ValueError(f"metric {name}: not declared in metrics/names.py; {hint}")
