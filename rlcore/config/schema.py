"""Every setting, its default and what it means. Two levels: a section and a key.

The configuration is read-only: what is computed at run time lives elsewhere. `resolve.py` reads the
command line into it and refuses combinations that cannot work.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from rlcore.algos.base import AlgoConfig
from rlcore.utils.bounds import above, at_least, finite

Share = Annotated[float, at_least(0, at_most=1)]
TopP = Annotated[float, above(0, at_most=1, note="; 1 turns it off")]
Clip = Annotated[float, above(0, unbounded=True, note="; inf turns it off")]
ParallelSize = Annotated[int, at_least(1, note="; 1 turns it off")]
TimeoutFactor = Annotated[float, at_least(1, note=", what a right answer took is needed again")]
Oversampling = Annotated[float, at_least(1, below=100, note="; 1 starts no more than is needed")]


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """The selectors `--algo --reward --env --mode --schedule`: they are read first and choose the
    class behind the section of the same name, or the policy."""

    algo: str = "grpo"
    """A name in `algos/`, or a dotted path to a module of yours with a config class and a loss."""
    reward: str = "exact"
    """A name in `rewards/`, a dotted path or an http address; or a weighted sum of them, such as
    `math:1,judge:0.5`."""
    env: str = ""
    """A name in `envs/`, or a dotted path: responses are episodes of several turns. Empty: none."""
    mode: Literal["sync", "stream", "async"] = "sync"
    """The loop. `sync`: sample, then train, strictly on-policy. `stream`: the same, but half of the
    ranks train what is complete while the others decode the last answers. `async`: ranks that only
    sample never wait for the optimizer; samples are at most async.alpha policy versions old."""
    schedule: Literal["all", "tail_batching"] = "all"
    """When a round is over. `all`: every response is finished and rewarded. `tail_batching`: the
    first of more prompts than are needed are; the others wait for a round of their own."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str = ""
    """Name of the run; empty takes the recipe's name."""
    dir: str = "runs"
    """Folder that holds the runs: `<dir>/<name>/`."""
    seed: int = 0
    steps: Annotated[int, at_least(0)] = 200
    """Rollout-and-train rounds."""
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint of this run if there is one; `fresh` starts anew
    and moves the older run aside; a path starts from that checkpoint. Where Slurm or torchrun has
    started the run again, it goes on from what it has saved since, whatever is said here."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = ""
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    tokenizer: str = ""
    """Folder of the tokenizer; empty takes the model's."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Of the parameters in training; bfloat16 keeps fp32 main parameters in the optimizer."""
    random_init: bool = False
    """Random weights from the folder's config.json alone: for tests and dry runs."""
    num_layers: Annotated[int, at_least(0)] = 0
    """Overrides the number of layers (with random_init); 0 keeps the folder's."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: tuple[str, ...] = ()
    """Prompt files (.jsonl, .parquet), or the name of a generated task: `label`, `oneline`,
    `frozenlake`, `blackjack`."""
    val: tuple[str, ...] = ()
    """Evaluated at the start, every `eval.every` steps and at the end; reported by file name."""
    prompts_per_step: Annotated[int, above(0)] = 32
    """Prompts that one step trains on."""
    prompt_field: str = "question"
    answer_field: str = "answer"
    template: Literal["auto", "chat", "none"] = "auto"
    """`chat` renders the prompt as a user message with the tokenizer's chat template (ours, ChatML,
    where it has none); `none` takes it as it is; `auto` is chat unless the task says otherwise."""
    system: str = ""
    """System message of the chat template."""
    suffix: str = ""
    """Text appended to every prompt, such as "Put the answer in \\boxed{}."."""
    max_prompt_tokens: Annotated[int, above(0)] = 1024
    """Longer prompts are left out, with a report."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """Junk rows are named by line and counted; `refuse` ends the run instead."""
    shuffle: bool = True
    num_prompts: Annotated[int, at_least(0)] = 0
    """Rows of a generated task, or a cap on the rows of files; 0: endless, or all."""
    num_val_prompts: Annotated[int, at_least(0)] = 0
    """The same for `val`; 0 takes all rows, or 1,024 of a generated task."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: Literal["torch", "sglang"] = "torch"
    """`torch`: ours, one rank per engine. `sglang_args`: SGLang, over rollout.tp ranks."""
    tp: Annotated[int, above(0)] = 1
    """Ranks of one engine (tensor parallel): neighbours on one node. Above 1 only with sglang."""
    adaptive_tp: bool = False
    """`tp` is where the engines start: preemptions double it for the next round of the same kind,
    calm rounds halve it; sched/planner.py. Only with sglang."""
    max_tp: Annotated[int, at_least(0)] = 0
    """Largest size with adaptive_tp; 0: the ranks of a node, as far as the model's heads divide."""
    sglang_args: tuple[str, ...] = ()
    """Further arguments of SGLang's server as key=value, such as attention_backend=triton."""
    gpu_memory_utilization: Annotated[float, above(0, below=1)] = 0.8
    """Share of a GPU's memory that SGLang takes for weights and KV cache (its mem_fraction_static)
    where cache_tokens is 0."""
    process: Literal["auto", "inline", "child"] = "auto"
    """Where the engine lives; `auto` is a child process as soon as the world is larger than one."""
    samples_per_prompt: Annotated[int, above(0)] = 8
    max_tokens: Annotated[int, above(0)] = 1024
    """Most tokens in a response."""
    temperature: Annotated[float, at_least(0)] = 1.0
    top_k: Annotated[int, at_least(0)] = 0
    """0 keeps all tokens."""
    top_p: TopP = 1.0
    min_p: Annotated[float, at_least(0, below=1, note="; 0 turns it off")] = 0.0
    stop_ids: tuple[int, ...] = ()
    """Further stop tokens; the tokenizer's end of sequence always stops."""
    max_running_requests: Annotated[int, above(0)] = 256
    """Requests that one engine decodes at a time."""
    routing: Literal["group", "response", "histopipe"] = "group"
    """`group`: the responses to a prompt go to one engine, which prefills it once. `response`: each
    goes to the engine that has the fewest, wherever the others are. `histopipe`, with --mode async:
    by the prompt's longest response of the epoch before, such that an engine has long ones in one
    step and short ones in the next."""
    queue: bool = False
    """Requests wait at the controller for the first engine with a place free; else all go out at
    once, those of an engine wait there, and who is decoded beside whom does not hang on the
    clock."""
    kv_cache_tokens: Annotated[int, above(1, off=0, note="; 0: as many as fit")] = 0
    """Tokens of KV cache per engine; 0 sizes it for max_running full-length requests, at most what
    the memory allows. Where that is less, which rows share a forward hangs on the memory that is
    free at the start: give a number, and a resumed run is the same bit by bit. Both are of an
    engine of `tp` ranks: where sizes change, one of twice the ranks has twice as much."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """`auto` takes model.dtype."""
    quantize: Literal[
        "none", "int8", "int8_tensor", "int8_w8a8", "int4", "int3", "fp8", "fp4", "fp3"
    ] = "none"
    """The torch engine's attention and MLP weights take the values of this format at every push;
    products stay in rollout.dtype, so it changes the samples and not the speed."""
    draft: Literal["none", "ngram", "history", "history_reward"] = "none"
    """Guess the next tokens and verify the guesses in one forward; samples stay what they are.
    `ngram`: from the request's own text. `history`: from earlier epochs' responses to the same
    prompt, too, along the most frequent continuation. `history_reward`: along the one with the
    largest sum of rewards."""
    fp32_lm_head: bool = False
    """Logits in fp32, whatever rollout.dtype is: the engine's output layer, of the torch engine its
    last norm too."""
    threads: Annotated[int, above(0)] = 1
    """CPU threads of one engine."""
    progress_interval_s: Annotated[float, at_least(0)] = 0.5
    """Interval of progress events."""
    stall_timeout_s: Annotated[float, above(0)] = 1800.0
    """A round in which nothing happens for this long is ended with a sentence naming who is
    silent."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Of --rollout.draft; rlcore/rollout/RHYMERL.md."""

    max_length: Annotated[int, at_least(1, at_most=4096)] = 32
    """Longest draft."""
    verify_tokens: Annotated[int, at_least(2, at_most=256)] = 8
    """With SGLang: tokens of a request in one forward, its last one and the draft, which is shorter
    than this. On a GPU always as many, since CUDA graphs are captured for it."""
    initial_length: Annotated[int, above(0)] = 2
    """A request's first drafts are this long, and those after a wrong one; with the gate, in small
    batches up to a quarter of the window."""
    length_growth: Annotated[int, at_least(0)] = 2
    """They get this much longer whenever all of one was right. `initial_length` = `max_length`: of
    fixed length."""
    min_match: Annotated[int, at_least(1, at_most=64)] = 1
    """Tokens at the end of a text that must have occurred before to draft what followed there; the
    paper has 3."""
    max_match: Annotated[int, at_least(0)] = 0
    """Most that are looked at; 0: no limit. The paper has 7."""
    max_spec_factor: Annotated[float, at_least(0)] = 4.0
    """A draft is at most this many times as long as what matched; 0: no limit, as in the paper."""
    min_token_prob: Share = 0.3
    """A draft ends before it is rarer than this among what followed; 0: it does not."""
    adaptive: bool = True
    """Measure what steps with and without drafts take, and draft only where it pays; drafts of a
    large batch are cut. Without it drafts are always on."""
    history_epochs: Annotated[int, above(0)] = 3
    """So many of a prompt's last epochs are drafted from; the paper has 1."""
    max_history_tokens: Annotated[int, above(0)] = 64_000_000
    """Of all histories, 4 bytes each in the memory of rank 0; the oldest go first."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    tp: ParallelSize = 1
    """Tensor parallel size."""
    sp: bool = True
    """Sequence parallel: shard activations between the tensor-parallel parts; only with tp > 1."""
    pp: ParallelSize = 1
    """Pipeline parallel size."""
    vpp: ParallelSize = 1
    """Model chunks per pipeline stage; above 1 is the interleaved schedule."""
    cp: ParallelSize = 1
    """Context parallel size."""
    ep: ParallelSize = 1
    """Expert parallel size."""
    distributed_optimizer: bool = True
    """Shard optimizer states over the data-parallel ranks."""
    transformer_impl: Literal["local", "te"] = "local"
    """Layers: our own on torch, or Transformer Engine's."""
    apex: bool = False
    """Apex' fused weight-gradient accumulation."""
    recompute: Literal["none", "selective", "full"] = "none"
    tokens_per_micro_batch: Annotated[int, above(0)] = 16384
    """Packed tokens of one forward and backward; a longer sequence is its own micro-batch."""
    samples_per_update: Annotated[int, at_least(0)] = 0
    """Samples of one optimizer step; 0 takes all of the step."""
    epochs: Annotated[int, above(0)] = 1
    """Passes over the samples of a step."""
    lr: Annotated[float, above(0)] = 1e-6
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_updates: Annotated[int, at_least(0)] = 0
    lr_decay_updates: Annotated[int, at_least(0)] = 0
    """Updates until min_lr is reached; 0: the whole run."""
    min_lr: Annotated[float, at_least(0)] = 0.0
    weight_decay: Annotated[float, at_least(0)] = 0.0
    beta1: Annotated[float, at_least(0, below=1)] = 0.9
    beta2: Annotated[float, at_least(0, below=1)] = 0.95
    adam_eps: Annotated[float, above(0)] = 1e-8
    clip_grad: Clip = 1.0
    max_skipped_updates: Annotated[int, at_least(0)] = 10
    """An update whose loss or gradient is not finite is left out and counted (actor/skipped); so
    many in a row end the run. 0: never."""
    moe_aux_loss_coef: float = 0.0
    """Load-balancing loss of MoE models."""
    offload: bool = False
    """Engine and learner take turns on the device: the learner waits in host memory while the
    engine samples, the engine sleeps while the learner works. On the CPU only gradients go."""
    deterministic: bool = True
    """Deterministic kernels."""
    fused_loss: bool = False
    """Policy loss and gradient in one sweep over the logits, for the clipped losses (ppo, grpo,
    dapo, dr_grpo); every other loss has log-probs and gradients fused and its text in between."""
    head_chunk_tokens: Annotated[int, at_least(0)] = 0
    """Logits of so many tokens exist at a time, for less memory; 0: of the whole micro-batch. Costs
    the output layer's product a second time, unless fused_loss is on."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The value model of --algo.adv_estimator gae: the architecture of the start model with a value
    head, in the layout and with the micro-batches of `train`."""

    path: str = ""
    """Hugging Face folder of its start weights; empty takes model.path."""
    lr: Annotated[float, above(0)] = 1e-5
    lr_warmup_updates: Annotated[int, at_least(0)] = 0
    weight_decay: Annotated[float, at_least(0)] = 0.0
    clip_grad: Clip = 1.0
    clip_value: Clip = 0.5
    """A value moves at most this far from what it was before the step's first update, as far as
    the loss can tell; inf: no clip."""
    warmup_steps: Annotated[int, at_least(0)] = 0
    """First steps, in which the critic learns alone."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Keys that every reward has. With a sum of rewards `--reward.KEY` is of all that have it, and
    `--reward.math.KEY` of one."""

    workers: Annotated[int, above(0)] = 1
    """Samples scored at a time per rank: child processes, sandbox slots or requests."""
    timeout_s: Annotated[float, above(0, unbounded=True)] = 10.0
    """A sample that takes longer scores `on_error`; its process group is killed."""
    on_error: Annotated[float, finite()] = 0.0
    """Score of a sample whose reward function failed."""
    memory_limit_gb: Annotated[float, at_least(0, unbounded=True)] = 8.0
    """A child process that grows by more is killed; 0: it is not looked at."""
    max_pending: Annotated[int, above(0)] = 4096
    """Responses of a rank that wait for their scores at a time; more wait at the engine."""
    adaptive_timeout: bool = False
    """Once an answer to a prompt was right, others have `timeout_factor` times as long as the
    slowest right one took, in all epochs; timeout_s at most, `min_timeout_s` at least."""
    timeout_factor: TimeoutFactor = 1.5
    min_timeout_s: Annotated[float, above(0)] = 2.0
    """Also what a new child process may need for its first score."""
    correct_score: float = 1.0
    """An answer of at least this score is right."""

    def problems(self, key: str) -> list[str]:
        """What cannot work in the keys that a reward has besides these, one sentence each; `key` is
        the section's, such as `reward` or `reward.judge`."""
        return []


@dataclass(frozen=True, kw_only=True)
class RewardSum:
    """Base of the sections of a weighted sum of rewards: a `RewardConfig` for each, by name."""


def reward_sections(reward: RewardConfig | RewardSum) -> dict[str, RewardConfig]:
    """Every reward's own section by its key: `reward`, or in a sum `reward.math`, ..."""
    if isinstance(reward, RewardConfig):
        return {"reward": reward}
    return {f"reward.{f.name}": getattr(reward, f.name) for f in fields(reward)}


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Keys that every environment has; of `--env`, rlcore/envs/README.md. An episode takes the
    place of a response: rollout.max_tokens is the limit of all its turns and observations."""

    TASK: ClassVar[str] = ""
    """Of a kind of environment that makes its own prompts: the generated task that takes the place
    of data.train and data.val."""
    max_turns: Annotated[int, above(0)] = 16
    """Turns of the policy in an episode; one that needs more is cut."""
    max_turn_tokens: Annotated[int, at_least(0)] = 0
    """Most tokens of a turn; 0: as many as are left of rollout.max_tokens."""
    max_running_episodes: Annotated[int, above(0)] = 256
    """Episodes of a rank that have an environment at a time; others wait. Those that wait for their
    environment take no place of rollout.max_running_requests."""
    workers: Annotated[int, above(0)] = 2
    """Processes of a rank that run environments, as many as they are in threads."""
    timeout_s: Annotated[float, above(0)] = 60.0
    """An environment that takes longer for a reset or a step fails its episode; its process is
    ended when the other episodes there have."""
    retries: Annotated[int, at_least(0)] = 1
    """Times that an episode is begun anew when its environment failed, in a process of its own.
    After the last it counts as failed, scores 0 and is not trained."""
    num_groups: Annotated[int, at_least(0)] = 0
    """Groups of episodes that a step starts; it takes the first data.prompts_per_step that are
    complete. 0: no more than these. With `--mode async` async.extra_prompts does this."""
    group_size: Annotated[int, at_least(0)] = 0
    """Episodes of a group that are started; the first rollout.samples_per_prompt count. 0: no more
    than these."""

    def problems(self) -> list[str]:
        """What cannot work in the keys that an environment has besides these, one sentence each."""
        return []


@dataclass(frozen=True, kw_only=True)
class TailConfig:
    """Of `--schedule tail_batching`; sched/tail_batching.py."""

    eta_prompts: Oversampling = 1.25
    """A short round starts this many times data.prompts_per_step prompts."""
    eta_samples: Oversampling = 1.25
    """It starts this many times rollout.samples_per_prompt responses of each, and keeps the first:
    short answers are then more likely to be kept. 1: the groups are not biased."""
    dataset_quotas: tuple[str, ...] = ()
    """`source=prompts` of every source of the data, together data.prompts_per_step; empty: sources
    come as the data have them."""
    dynamic_sampling: bool = False
    """A group of equal rewards does not count: another prompt is started in its place (DAPO)."""
    max_eta_prompts: Oversampling = 4.0
    """With `dynamic_sampling`: at most this many times data.prompts_per_step prompts are started in
    a round, which then ends with fewer groups."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Of `--mode stream`; sched/stream.py."""

    earliest: Share = 0.2
    """Share of the responses that are done when half of the engines may stop decoding."""
    latest: Share = 0.5
    """Share from which on they go on to the end instead."""
    check_every: Annotated[float, above(0, at_most=1)] = 0.05
    """Step between, at which it is asked whether what is left fits into the other caches."""


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Of `--mode async`; sched/staleness.py."""

    alpha: Annotated[float, at_least(0)] = 2.0
    """Most policy versions between the first token of a sample and its training. Fractions are
    allowed; 0 is the synchronous mode. (1 + alpha) x data.prompts_per_step prompts are running or
    finished at most."""
    weight_update: Literal["recompute", "in_place"] = "recompute"
    """Requests go on under new weights from the tokens that they have. `recompute`: their cache is
    made anew; `in_place`: it stays as the old weights made it, which is faster."""
    extra_prompts: Annotated[int, at_least(0)] = 0
    """So many prompts run besides, and the slowest are dropped when they are too old."""
    dynamic_sampling: bool = False
    """A group of equal rewards does not count: another prompt is started in its place (DAPO), for
    one batch at most four times as many as it has; then such groups count."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every: Annotated[int, at_least(0)] = 20
    """Steps between evaluations; 0: only at the start and at the end."""
    at_start: bool = True
    at_end: bool = True
    samples_per_prompt: Annotated[int, above(0)] = 1
    temperature: Annotated[float, at_least(0)] = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, at_least(0)] = 0
    greedy: bool = False
    """Evaluate a second time with the most likely token."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: Annotated[int, at_least(0)] = 0
    """Steps between checkpoints; 0: only at the end."""
    at_end: bool = True
    keep: Annotated[int, at_least(0)] = 2
    """Checkpoints kept; 0 keeps all."""
    on_error: Literal["stop", "continue"] = "stop"
    """When a checkpoint cannot be written, such as to a full disk: `stop` ends the run in one
    sentence, `continue` says it, counts it (training/failed_saves) and tries again at the next one.
    Earlier checkpoints stay either way; after the last step it is `stop`."""
    grace_s: Annotated[float, at_least(0, at_most=600, note=", as launchers wait no longer")] = 25.0
    """A SIGTERM (Slurm's, before it kills) leaves so many seconds to finish the step, save and
    leave with exit code 0; what takes longer ends with 143 and goes on from the checkpoint before.
    0: it ends at once. Slurm gives KillWait, 30 s unless it is set, or its GraceTime."""
    export_hf: bool = True
    """Write a Hugging Face folder at the end: `<run>/hf`."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    route: Literal["auto", "gather", "intranode", "two_stage"] = "auto"
    """How weights travel between ranks. `gather`: every rank gathers every tensor. `intranode`:
    owners broadcast their shards inside their node. `two_stage`: one copy enters every site, then
    it is broadcast inside; the same mechanism. `auto`: gather where every rank trains and samples,
    two_stage where cluster.rollout_ranks only sample, which gather cannot reach."""
    bucket_mb: Annotated[int, above(0)] = 256
    """Size of a bucket in MiB: the unit of a push, and what it holds at a time."""
    ranks_per_site: Annotated[int, at_least(0)] = 0
    """Neighbouring ranks that share a fast network; 0: those of a node."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    rollout_ranks: Annotated[int, at_least(0)] = 0
    """The last so many ranks sample and the others train. 0: every rank does both, in turn."""
    gpu_memory_gb: Annotated[float | None, at_least(0, note=" GB; 0: not checked")] = None
    """Memory of a GPU in GB (10^9 bytes) that `--dry-run` holds the plan against. None takes that
    of the GPU here, or 80 where there is none; 0: not checked."""
    timeout_s: Annotated[float, above(0)] = 600.0
    """Deadline of a collective and of every wait between ranks."""
    interface: str = ""
    """Network interface to listen on between nodes, such as eth0; empty: the one that reaches the
    master."""
    rollout_cores: tuple[int, ...] = ()
    """CPU cores of the ranks that only sample, of their engines and rewards; empty: any. Of a node,
    as the system numbers them."""
    train_cores: tuple[int, ...] = ()
    """The same of the ranks that train."""


@dataclass(frozen=True, kw_only=True)
class MuxConfig:
    """Of `--mux.url`: the run takes turns with other jobs on the same nodes; rlcore/mux."""

    url: str = ""
    """The cluster's Redis server, as `rlcore mux add JOB` says it; empty: nobody else is here.
    `env:NAME` takes it from the environment, so that no `ps` shows the job's password."""
    job: str = ""
    """The job's name there; empty takes that of the run."""
    profile: str = ""
    """The mux_profile.json of a run that had its nodes alone; empty takes the one that `rlcore mux
    add --profile` was given."""
    slo: Annotated[float, at_least(1, note=", which is as fast as alone")] = 2.0
    """An iteration may take this many times what it takes alone, at worst."""
    if_unavailable: Literal["wait", "solo"] = "wait"
    """Without an answer of the server, or without a place: wait for it, or run as if alone."""
    tail_nodes: Annotated[int, at_least(0)] = 0
    """When 80 % of the responses of a rollout are there and another job could use its nodes, the
    rest goes on, from the tokens that there are, on the first so many of its rollout nodes, and the
    others are the other job's; 0: it stays on all."""
    lease_s: Annotated[float, at_least(1, note=", or a slow moment kills")] = 15.0
    """A job that is silent for so long is dead, and its permits are another's."""
    max_wait_s: Annotated[float, above(0)] = 86400.0
    """At most so long is waited for a place, and for each turn."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    rollouts: Annotated[int, at_least(-1, note="; -1: all")] = 4
    """Samples of rank 0's engine written to rollouts.jsonl per step; -1 writes all."""
    rollout_tokens: Annotated[int, at_least(-1, note="; -1: all")] = 0
    """Tokens of a step that these samples bring along for `rlcore view`, each with its text,
    log-prob and version: about 20 bytes and 5 us a token. The first responses have theirs, the
    last of them is cut; -1: all."""
    trace_steps: Annotated[int, at_least(-1, note="; -1: all")] = 0
    """Steps from the start of the process of which every rank writes what it did when, for `rlcore
    trace`: phases, responses, rewards, engine load; about 400 bytes a response. -1: all."""
    tensorboard: bool = True
    wandb: str = ""
    """Project of Weights & Biases; empty: none."""
    prometheus_port: Annotated[int, at_least(0, at_most=65535, note="; 0: none")] = 0
    """Rank 0 shows the last value of every metric at http://HOST:PORT/metrics; 0: it does not."""
    prometheus_host: str = "127.0.0.1"
    """Address to listen on: whoever reaches it can read the metrics."""
    plot: bool = True
    """Draw curve.png at the end; `python -m rlcore plot RUN` draws it at any time."""
    progress: bool = True
    """Progress bars on a terminal."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    shuffle_rewards: bool = False
    """Shuffle rewards over the samples of a step: the control that must not learn."""
    kill_at_step: int = 0
    """Kill rank 0 with SIGKILL when this step ends: for tests of resume."""
    deterministic_order: bool = False
    """Of two responses the shorter came first, whatever the clock says, and all are waited for: a
    run with `--schedule tail_batching` repeats itself bit by bit, and gains no time by it."""
    replay: str = ""
    """The rounds.jsonl of an earlier run, or its folder: responses count in the order that it has,
    whatever the clock says, so that every step makes the same batch. Its rounds are found by their
    prompts' ids: a resumed run may replay the rest of a longer log. With --mode async the folder of
    a run that had debug.record: its batches are trained again, in that order, tokens and all."""
    record: bool = False
    """Of --mode async: write what debug.replay needs, events and trained samples, 12 bytes a token,
    to `<run>/record`."""
    rollout_tp: Annotated[tuple[int, ...], at_least(1)] = ()
    """Size of the rollout engines in step 1, 2, ..., the last one in all others: with SGLang."""
    env_barrier: bool = False
    """All episodes of a rank take their turns together, and wait for the slowest environment: to
    see what env-level asynchrony saves. The order of episodes in a batch is then fixed, too."""
    reward_barrier: bool = False
    """Rewards start when the rank's engine has nothing left to decode, not as responses end: to
    see what the overlap saves."""
    decode_floor_ms: Annotated[float, at_least(0)] = 0.0
    """Every decode step lasts at least this long, as on a memory-bound GPU."""
    full_length: bool = False
    """No token ends a response: all have rollout.max_tokens, the worst case of a step, to write a
    job's mux_profile.json."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration. `algo`, `reward` and `env` hold the class that their selector
    chose."""

    select: SelectConfig = field(default_factory=SelectConfig)
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    algo: Any = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    """On the command line `async`, which is no name in Python."""
    reward: Any = field(default_factory=RewardConfig)
    env: Any = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mux: MuxConfig = field(default_factory=MuxConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
