"""Every setting, its default and its text in `--help`, in two levels: section and key.

The configuration is read-only; values computed at run time are kept elsewhere. `resolve.py` makes
it from the command line. Section `async` is the field `async_`, since `async` is a keyword.
"""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from rlcore.algos.base import AlgoConfig
from rlcore.utils.bounds import above, at_least
from rlcore.utils.scores import LARGEST

PROJECTIONS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
"""Linear layers of a transformer layer, by their names on disk."""

Share = Annotated[float, at_least(0, at_most=1)]
TopP = Annotated[float, above(0, at_most=1, note="; 1 turns it off")]
Clip = Annotated[float, above(0, unbounded=True, note="; inf turns it off")]
ParallelSize = Annotated[int, at_least(1, note="; 1 turns it off")]
TimeoutFactor = Annotated[float, at_least(1, note=", the time of a correct response")]
Oversampling = Annotated[float, at_least(1, below=100, note="; 1 starts no more than is needed")]


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Selectors, also written `--algo`, `--reward`, `--env`, `--mode` and `--schedule`."""

    algo: str = "grpo"
    """Name of an algorithm in rlcore/algos, or dotted path of a module with a config class and a
    loss."""
    reward: str = "exact"
    """Name of a reward in rlcore/rewards, dotted path or HTTP address, or a weighted sum such as
    `math:1,judge:0.5`."""
    env: str = ""
    """Name of an environment in rlcore/envs, or dotted path, whose multi-turn episodes replace
    single responses; empty: none."""
    mode: Literal["sync", "stream", "async"] = "sync"
    """Training loop. `sync`: sample, then train, strictly on-policy. `stream`: on-policy, but half
    of the ranks train on complete groups while the others decode the last responses. `async`:
    separate ranks sample without waiting for the optimizer; samples are at most async.alpha policy
    versions old."""
    schedule: Literal["all", "tail_batching"] = "all"
    """Policy that ends a rollout. `all`: wait for every response. `tail_batching`: start more
    prompts than needed, train on the first to complete, and defer the rest to a separate long
    round."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, folder, length and start of the run."""

    name: str = ""
    """Name of the run; empty: the recipe's name."""
    dir: str = "runs"
    """Folder of all runs; this run is written to `<dir>/<name>/`."""
    seed: int = 0
    """Seed of all random choices."""
    steps: Annotated[int, at_least(0)] = 200
    """Number of training steps; each step is a rollout and its updates."""
    resume: str = "auto"
    """Start of the run. `auto`: from its newest checkpoint, if any. `fresh`: from step 0; an
    earlier run of this name is moved aside. A path: from that checkpoint. If Slurm or torchrun
    restarts the run, it always continues from its own newest checkpoint."""
    callbacks: tuple[str, ...] = ()
    """Dotted paths of callback classes (rlcore/trainer/callbacks.py), which get the metrics,
    evaluations and checkpoints, and may exclude samples or end the run."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model, tokenizer and precision."""

    path: str = ""
    """Hugging Face folder of the model (config.json, safetensors, tokenizer), or its name on the
    hub: ORG/NAME or ORG/NAME@REVISION."""
    tokenizer: str = ""
    """Folder of the tokenizer, or its name on the hub; empty: model.path."""
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    """Data type of the parameters in training; with bfloat16 the optimizer keeps fp32 main
    parameters."""
    random_init: bool = False
    """Whether to start from random weights for tests and dry runs; only config.json of model.path
    is needed."""
    num_layers: Annotated[int, at_least(0, at_most=1024)] = 0
    """Number of layers, with model.random_init; 0: as in config.json."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts for training and validation."""

    train: tuple[str, ...] = ()
    """Prompt files (.jsonl, .parquet), data sets on the Hugging Face hub as
    ORG/NAME[@REVISION][:CONFIG]:SPLIT, or one generated task: `label`, `oneline`, `frozenlake`,
    `blackjack` or `calc`. ORG/NAME alone is its split `train`."""
    val: tuple[str, ...] = ()
    """Validation files, data sets on the hub (ORG/NAME alone is its split `test`) or generated
    tasks, each reported under its own name."""
    prompts_per_step: Annotated[int, above(0)] = 32
    """Number of prompts that one step trains on."""
    prompt_field: str = "question"
    """Name of the column with the prompt: text, or a list of chat messages. Messages of the
    assistant at the end of the list are not part of the prompt."""
    answer_field: str = "answer"
    """Name of the column with the reference answer; empty: none. If it is data.prompt_field, the
    answer is the content of the last message, which must be the assistant's."""
    demonstrations: tuple[str, ...] = ()
    """Files with prompts and responses in the format of `rlcore sft`. Every update trains some of
    their rows beside the policy's samples (only with --algo gkd)."""
    demonstration_share: Annotated[float, above(0, below=1)] = 0.5
    """Share of data.demonstrations in the rows of an update; GKD's lambda is 1 minus this share."""
    teacher_prompt_field: str = ""
    """Name of the column of training rows with the prompt that the teacher reads in place of the
    policy's, such as one with the solution; empty: the same prompt."""
    template: Literal["auto", "chat", "none"] = "auto"
    """Form of the prompt. `chat`: a user message in the tokenizer's chat template (ChatML if it has
    none). `none`: plain text. `auto`: `none` for generated tasks, else `chat`."""
    system: str = ""
    """System message of the chat template; empty: none."""
    suffix: str = ""
    """Text appended to every prompt, such as "Put the answer in \\boxed{}.". A suffix that says how
    to mark the answer is left out where the prompt of a row says so itself."""
    max_prompt_tokens: Annotated[int, above(0)] = 1024
    """Maximum number of tokens in a prompt; longer prompts are left out and reported."""
    bad_rows: Literal["skip", "refuse"] = "skip"
    """Handling of invalid rows. `skip`: leave them out, and report how many and on which lines.
    `refuse`: end the run."""
    drop_duplicates: bool = False
    """Whether to leave out rows of the training files whose prompt has the same letters and digits
    as the prompt of an earlier row, in any of the files; in `rlcore sft`, the same tokens."""
    shuffle: bool = True
    """Whether to shuffle the prompts in every epoch."""
    weights: Annotated[tuple[float, ...], above(0)] = ()
    """Proportions in which prompts are drawn from the entries of data.train, one number for each
    entry, which then has epochs of its own. Empty: the entries are joined to one set."""
    num_prompts: Annotated[int, at_least(0)] = 0
    """Maximum number of rows per training file, or number of rows of a generated task; 0: all rows
    of a file, or an endless task."""
    num_val_prompts: Annotated[int, at_least(0, at_most=100_000)] = 0
    """Maximum number of rows per validation file or task; 0: all rows of a file, 1,024 rows of a
    task."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout engines and sampling."""

    engine: Literal["torch", "sglang"] = "torch"
    """Rollout engine. `torch`: built-in, one rank per engine. `sglang`: SGLang, rollout.tp ranks
    per engine."""
    tp: Annotated[int, above(0)] = 1
    """Tensor-parallel size of an engine, over neighbouring ranks of one node or of several whole
    nodes; above 1 only with SGLang."""
    ep: Annotated[int, above(0)] = 1
    """Expert-parallel size of an engine for a mixture of experts, within its rollout.tp ranks. Each
    of `ep` groups of ranks has its share of the experts; 1: every rank has a slice of every
    expert."""
    adaptive_tp: bool = False
    """Whether to adapt the engines' size between rounds, starting from rollout.tp; only with
    SGLang. The size doubles if preemptions rise and halves after rounds without any, separately for
    short and long rounds (rlcore/sched/planner.py)."""
    max_tp: Annotated[int, at_least(0)] = 0
    """Maximum engine size with rollout.adaptive_tp; 0: the ranks of a node, or fewer if the model's
    heads cannot be divided by more."""
    sglang_args: tuple[str, ...] = ()
    """Further SGLang server arguments as `key=value`, such as `attention_backend=triton`; not those
    that rlcore sets itself (rlcore/config/sglang_args.py)."""
    gpu_memory_utilization: Annotated[float, above(0, below=1)] = 0.8
    """Share of GPU memory for SGLang's weights and KV cache (its mem_fraction_static), if
    rollout.kv_cache_tokens is 0."""
    process: Literal["auto", "inline", "child"] = "auto"
    """Process of the engine. `inline`: the rank's own. `child`: a child process. `auto`: `inline`
    for one rank with the torch engine, else `child`."""
    samples_per_prompt: Annotated[int, above(0)] = 8
    """Number of responses per prompt."""
    max_tokens: Annotated[int, above(0)] = 1024
    """Maximum number of tokens in a response."""
    temperature: Annotated[float, at_least(0)] = 1.0
    """Sampling temperature in training."""
    top_k: Annotated[int, at_least(0)] = 0
    """Number of most likely tokens to sample from; 0: all tokens."""
    top_p: TopP = 1.0
    """Cumulative probability of the most likely tokens to sample from; 1: all tokens."""
    min_p: Annotated[float, at_least(0, below=1, note="; 0 turns it off")] = 0.0
    """Minimum probability of a sampled token, relative to the most likely token; 0: none."""
    stop_ids: tuple[int, ...] = ()
    """Ids of stop tokens in addition to the tokenizer's end of sequence."""
    max_running_requests: Annotated[int, above(0)] = 256
    """Maximum number of requests that one engine decodes at a time."""
    routing: Literal["group", "response", "histopipe"] = "group"
    """Routing of requests to engines. `group`: all responses to a prompt on one engine, which
    prefills it once. `response`: each on the engine with the fewest requests. `histopipe`, with
    --mode async: by the prompt's longest response in the previous epoch, alternating long and short
    steps on each engine."""
    queue: bool = False
    """Whether requests wait at the controller for the first engine with a free slot; batch
    composition then depends on timing. Otherwise all requests are sent at once and wait inside
    their engines."""
    kv_cache_tokens: Annotated[int, above(1, off=0, note="; 0: as many as fit")] = 0
    """Number of KV-cache tokens per engine of rollout.tp ranks; 0: sized by
    rollout.max_running_requests (torch) or rollout.gpu_memory_utilization (SGLang). With 0, batch
    composition can depend on free memory, so set it for bit-exact resumes. If an engine's size
    changes, this and rollout.max_running_requests scale with it."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Data type of the engine; `auto`: model.dtype."""
    quantize: Literal[
        "none", "int8", "int8_tensor", "int8_w8a8", "int4", "int3", "fp8", "fp4", "fp3"
    ] = "none"
    """Number format to which the torch engine rounds attention and MLP weights at every weight
    update. Matrix products stay in rollout.dtype, so the samples change but not the speed."""
    draft: Literal["none", "ngram", "history", "history_reward"] = "none"
    """Source of drafts for speculative decoding, which does not change samples. `ngram`: the
    request's own text. `history`: also earlier epochs' responses to the prompt, by most frequent
    continuation. `history_reward`: as `history`, but by largest sum of rewards."""
    fp32_lm_head: bool | None = None
    """Whether a bfloat16 engine computes the output layer in fp32; the torch engine then also
    computes the final norm in fp32. None: on a GPU."""
    threads: Annotated[int, above(0)] = 1
    """Number of CPU threads per engine."""
    progress_interval_s: Annotated[float, at_least(0)] = 0.5
    """Seconds between progress reports of an engine."""
    stall_timeout_s: Annotated[float, above(0)] = 1800.0
    """Seconds without progress after which a round fails with an error that names the silent
    ranks."""


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Keys of --rollout.draft, see rlcore/rollout/RHYMERL.md."""

    max_length: Annotated[int, at_least(1, at_most=4096)] = 32
    """Maximum number of tokens in a draft."""
    verify_tokens: Annotated[int, at_least(2, at_most=256)] = 8
    """Maximum number of tokens per request in one SGLang verification: the last token, then the
    draft, which is cut to fit. On a GPU, CUDA graphs are captured for this number and, with
    draft.adaptive, for 1, 2, 4, ... up to half of it."""
    initial_length: Annotated[int, above(0)] = 2
    """Maximum length of a request's first draft, and of the next draft after a rejected one.
    draft.adaptive raises it to a quarter of the length that it allows in a step."""
    length_growth: Annotated[int, at_least(0)] = 2
    """Number of tokens by which the maximum length grows after a fully accepted draft. For drafts
    of fixed length, set draft.initial_length to draft.max_length."""
    min_match: Annotated[int, at_least(1, at_most=64)] = 1
    """Minimum number of a request's most recent tokens that must match an earlier text, whose
    continuation is then the draft (paper: 3)."""
    max_match: Annotated[int, at_least(0)] = 0
    """Maximum number of a request's most recent tokens to match; 0: no limit (paper: 7)."""
    max_spec_factor: Annotated[float, at_least(0)] = 4.0
    """Maximum length of a draft as a multiple of the match length; 0: no limit (as in the
    paper)."""
    min_token_prob: Share = 0.3
    """Minimum probability of a draft, its share of the continuations found. A draft is cut before
    its probability falls below this; 0: no limit."""
    adaptive: bool = True
    """Whether to measure decode steps and allow drafts of the length that gives most tokens per
    second, or none. Otherwise drafts are always on."""
    matcher: Literal["auto", "device", "host"] = "auto"
    """Where SGLang matches texts; drafts are the same. `device`: the engine's device, whose memory
    then holds histories; on a GPU SGLang's overlapped scheduler stays on. `host`: the CPU, without
    overlap. `auto`: `device` on a GPU with rlcore's kernels, else `host`."""
    history_epochs: Annotated[int, above(0)] = 3
    """Number of past epochs used as draft source (paper: 1)."""
    max_history_tokens: Annotated[int, above(0)] = 64_000_000
    """Maximum number of tokens of all histories, at 4 bytes each in rank 0's memory; the oldest are
    removed first."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Parallelism, optimizer and memory of the learner."""

    tp: ParallelSize = 1
    """Tensor parallel size; above the model's key-value heads, several ranks share a head."""
    sp: bool = True
    """Whether to use sequence parallelism, which shards activations over the tensor-parallel ranks;
    only with train.tp above 1."""
    pp: ParallelSize = 1
    """Pipeline parallel size."""
    vpp: ParallelSize = 1
    """Number of model chunks per pipeline stage; above 1: the interleaved schedule."""
    pp_layers: Annotated[tuple[int, ...], at_least(1)] = ()
    """Number of layers of each pipeline stage, first to last, such as `15 13`; with train.vpp, of
    each model chunk in the order of the model. Empty: equal numbers."""
    cp: ParallelSize = 1
    """Context parallel size."""
    ep: ParallelSize = 1
    """Expert parallel size."""
    etp: ParallelSize = 1
    """Expert tensor parallel size: number of ranks that divide each expert's matrices; independent
    of train.tp. 1: experts are not divided."""
    distributed_optimizer: bool = True
    """Whether to shard optimizer states over the data-parallel ranks."""
    transformer_impl: Literal["local", "te"] = "local"
    """Implementation of the transformer layers. `local`: built-in, on torch. `te`: Transformer
    Engine."""
    attention_backend: Literal["auto", "fa2"] = "auto"
    """Flash attention of the local layers on a GPU. `auto`: FA4 if flash-attn-4 is installed, on
    Hopper and Blackwell; otherwise torch's FA2. `fa2`: torch's FA2."""
    apex: bool = False
    """Whether to use Apex' fused weight-gradient accumulation."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. `none`: off. `selective`: the attention core. `full`: every
    layer."""
    tokens_per_micro_batch: Annotated[int, above(0)] = 16384
    """Maximum number of packed tokens in a micro-batch; a longer sequence is a micro-batch of its
    own."""
    share_prefix: Literal["auto", "true", "false"] = "auto"
    """Whether a prefix that samples of a micro-batch have in common, such as a group's prompt, is
    computed once. `auto`: with the local layers; on a GPU, only if flash attention runs. `true`:
    always; Transformer Engine's layers then use the attention of the local ones."""
    samples_per_update: Annotated[int, at_least(0)] = 0
    """Number of samples per optimizer step; 0: all samples of a step."""
    epochs: Annotated[int, above(0)] = 1
    """Number of passes over the samples of a step."""
    lr: Annotated[float, above(0)] = 1e-6
    """Learning rate of the actor after warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up. `constant`: train.lr. `linear`, `cosine`: decay to
    train.min_lr."""
    lr_warmup_updates: Annotated[int, at_least(0)] = 0
    """Number of updates in which the learning rate rises linearly; 0: no warm-up."""
    lr_decay_updates: Annotated[int, at_least(0)] = 0
    """Number of updates until train.min_lr is reached; 0: all updates of the run."""
    min_lr: Annotated[float, at_least(0)] = 0.0
    """Final learning rate of `linear` and `cosine` decay."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of AdamW."""
    beta1: Annotated[float, at_least(0, below=1)] = 0.9
    """Decay rate of Adam's first moment."""
    beta2: Annotated[float, at_least(0, below=1)] = 0.95
    """Decay rate of Adam's second moment."""
    adam_eps: Annotated[float, above(0)] = 1e-8
    """Epsilon of Adam."""
    clip_grad: Clip = 1.0
    """Maximum gradient norm; inf: no clipping."""
    max_skipped_updates: Annotated[int, at_least(0)] = 10
    """Number of consecutive updates with a non-finite loss or gradient after which the run ends; 0:
    never. Each such update is skipped and counted (actor/skipped)."""
    moe_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """How tokens reach the experts of other ranks: by NCCL's all-to-all, or by DeepEP (flex), if
    installed. Megatron's all-gather needs as many tokens on every rank, which packing excludes."""
    moe_shared_expert_overlap: bool = False
    """Whether shared experts compute while tokens travel to the other experts and back."""
    moe_aux_loss_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the actor's load-balancing loss in each layer of an MoE model, with the
    expert shares of the update before; 0: no such loss."""
    moe_z_loss_coef: Annotated[float, at_least(0)] = 0.0
    """Coefficient of the mean squared logsumexp of the router's logits in each layer of an MoE
    model, which keeps logits small; 0: no such loss."""
    moe_bias_update_rate: Annotated[float, at_least(0)] = 0.0
    """Amount by which an expert's bias changes after each update: up if the expert had fewer tokens
    than the mean, down if it had more. Needs a model whose routers have biases. 0: no change."""
    offload: bool = False
    """Whether engine and learner take turns on the device: the learner moves to host memory during
    rollout, and the engine sleeps during training. On the CPU only the gradients are released."""
    offload_activations: bool = False
    """Whether the inputs of layers go to host memory in forward and come back in backward; only
    with train.recompute full. The gradients are the same, to the last bit."""
    offload_optimizer: bool = False
    """Whether main parameters and Adam's moments stay in host memory. Each step moves them through
    the GPU in chunks; the weights are the same, to the last bit."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which Adam's moments are kept. A step computes in float32 in either case."""
    deterministic: bool = False
    """Whether a GPU adds up gradients in a fixed order, so that a run or a resumed one repeats bit
    by bit; 20 % slower for sequences of mixed lengths. A CPU always does."""
    true_on_policy: bool = False
    """Whether sampler and learner compute the same log-probs, bit by bit, with batch-invariant
    operations: rlcore's for dense models in float32 on a CPU; on a GPU those of SGLang and
    Transformer Engine (not yet run). See rlcore/algos/README.md."""
    fused_loss: bool = False
    """Whether to compute policy loss and gradient in one pass over the logits (only ppo, grpo, dapo
    and dr_grpo). Otherwise log-probs and their gradient are fused, and the loss itself runs in
    torch."""
    head_chunk_tokens: Annotated[int, at_least(0)] = 0
    """Maximum number of tokens whose logits are in memory at a time; 0: the whole micro-batch. If
    set without train.fused_loss, the output layer is computed twice."""
    fp32_lm_head: bool | None = None
    """Whether logits of a bfloat16 or float16 model stay in fp32, as with rollout.fp32_lm_head;
    only with train.head_chunk_tokens. None: on a GPU."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: the actor trains low-rank adapters, and its weights stay those of model.path, which is
    also the reference of a KL term."""

    rank: Annotated[int, at_least(0, at_most=4096, note="; 0: train all weights")] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: Annotated[float, above(0)] = 32.0
    """Scale of an adapter's output, times the rank: alpha / rank multiplies B A x."""
    rs: bool = False
    """Whether the scale is alpha / sqrt(rank), so that large ranks learn as fast (rsLoRA)."""
    targets: tuple[str, ...] = PROJECTIONS
    """Names of the projections that have adapters, as PEFT's target_modules; default: all."""
    experts: bool = False
    """Whether gate_proj, up_proj and down_proj of the experts of an MoE model have adapters."""
    lr_ratio: Annotated[float, above(0)] = 1.0
    """Learning rate of the matrices B as a multiple of train.lr, that of A (LoRA+: 16)."""
    path: str = ""
    """Folder of adapters to start from, in PEFT's format; empty: new ones, whose B is 0."""
    weight_update: Literal["merged", "adapters"] = "merged"
    """What ranks exchange in a weight update. `merged`: all weights, with the adapters in them.
    `adapters`: A and B alone; each rank with an engine adds them to the weights of model.path,
    which it reads from the folder."""


NO_ADAPTERS = LoraConfig()


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Teacher of `--algo opd`, `--algo gkd` and `--algo.teacher_kl_coef`, which scores the policy's
    own samples."""

    models: tuple[str, ...] = ()
    """Hugging Face folder, its name on the hub, or URL of a server (.../generate of SGLang, .../v1
    of vLLM). `dataset=model` is the teacher of one dataset; several may be given."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of a teacher from a folder; auto: model.dtype."""
    top_k: Annotated[int, at_least(1)] = 64
    """Number of the teacher's likeliest tokens that `--algo gkd` compares with the policy."""
    batch_tokens: Annotated[int, at_least(1)] = 16384
    """Maximum number of tokens of a forward pass of a teacher from a folder, padding included."""
    resident_ratio: Share = 1.0
    """Maximum share of a teacher's layers that stay on the device while it scores; the others are
    copied from host memory."""
    served_name: str = "default"
    """Name of the model in requests to a server."""
    api_key_env: str = ""
    """Environment variable with the server's API key; empty: none."""
    workers: Annotated[int, at_least(1)] = 16
    """Maximum number of concurrent requests to a server per rank."""
    timeout_s: Annotated[float, above(0)] = 600.0
    """Deadline of a request to a server, in seconds."""
    retries: Annotated[int, at_least(0)] = 4
    """Number of retries of a failed request."""
    backoff_s: Annotated[float, at_least(0)] = 0.5
    """Seconds before the first retry; each further pause is twice as long, minus a random part."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic of `--algo.adv_estimator gae`: model.path's architecture with a value head, in
    `train`'s layout."""

    path: str = ""
    """Hugging Face folder of the critic's initial weights, or its name on the hub; empty:
    model.path."""
    lr: Annotated[float, above(0)] = 1e-5
    """Learning rate of the critic."""
    lr_warmup_updates: Annotated[int, at_least(0)] = 0
    """Number of updates in which the critic's learning rate rises linearly; 0: no warm-up."""
    weight_decay: Annotated[float, at_least(0)] = 0.0
    """Weight decay of the critic's optimizer."""
    clip_grad: Clip = 1.0
    """Maximum gradient norm of the critic; inf: no clipping."""
    clip_value: Clip = 0.5
    """Clip range in the value loss: how far a value may move from its value before the step's first
    update; inf: no clipping."""
    warmup_steps: Annotated[int, at_least(0)] = 0
    """Number of steps at the start of the run that train only the critic."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Keys of every reward. In a sum, `--reward.KEY` sets the key of all and `--reward.math.KEY` of
    one."""

    workers: Annotated[int, above(0)] = 1
    """Number of samples per rank that are scored at a time, in child processes, sandboxes or HTTP
    requests."""
    timeout_s: Annotated[float, above(0, unbounded=True)] = 10.0
    """Seconds after which a sample scores reward.on_error and its process group is killed."""
    on_error: Annotated[float, at_least(-LARGEST, at_most=LARGEST)] = 0.0
    """Score of a sample whose reward function failed."""
    memory_limit_gb: Annotated[float, at_least(0, unbounded=True)] = 8.0
    """Maximum memory growth of a child process in GiB, beyond which it is killed; 0: no limit."""
    max_pending: Annotated[int, above(0)] = 4096
    """Maximum number of responses per rank that wait for their scores; further ones wait at the
    engine."""
    adaptive_timeout: bool = False
    """Whether a prompt with a correct response gets a shorter timeout: timeout_factor times the
    scoring time of its slowest correct response so far, from min_timeout_s to timeout_s."""
    timeout_factor: TimeoutFactor = 1.5
    """Ratio of the timeout to the scoring time of the slowest correct response, with
    adaptive_timeout."""
    min_timeout_s: Annotated[float, above(0)] = 2.0
    """Minimum timeout in seconds with adaptive_timeout; it must suffice for the first score of a
    new child process."""
    correct_score: float = 1.0
    """Minimum score of a response that counts as correct, with adaptive_timeout."""

    def problems(self, key: str) -> list[str]:
        """Return an error for each conflict between keys; subclasses override this method. `key` is
        the key of the section, such as `reward` or `reward.judge`."""
        return []


@dataclass(frozen=True, kw_only=True)
class RewardSum:
    """Base class for the section of a weighted sum: one `RewardConfig` field per reward."""


def reward_sections(reward: RewardConfig | RewardSum) -> dict[str, RewardConfig]:
    """Return each reward's section by key: `reward`, or for a sum `reward.math` and so on."""
    if isinstance(reward, RewardConfig):
        return {"reward": reward}
    return {f"reward.{f.name}": getattr(reward, f.name) for f in fields(reward)}


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Keys of every environment, see rlcore/envs/README.md; rollout.max_tokens limits a whole
    episode."""

    TASK: ClassVar[str] = ""
    """Name of the generated task that replaces data.train and data.val; empty: none."""
    max_turns: Annotated[int, above(0)] = 16
    """Maximum number of the policy's turns in an episode; a longer episode is cut."""
    max_turn_tokens: Annotated[int, at_least(0)] = 0
    """Maximum number of tokens in a turn; 0: the rest of rollout.max_tokens."""
    max_running_episodes: Annotated[int, above(0)] = 256
    """Maximum number of episodes per rank that have an environment at a time; further ones wait. An
    episode that waits for its environment does not count towards rollout.max_running_requests."""
    workers: Annotated[int, above(0)] = 2
    """Number of processes per rank that run environments, each environment in its own thread."""
    timeout_s: Annotated[float, above(0)] = 60.0
    """Seconds after which a reset or step fails its episode. The environment process ends once its
    other episodes have ended."""
    retries: Annotated[int, at_least(0)] = 1
    """Number of restarts of an episode whose environment failed, each in a new process. If the last
    restart fails, the episode scores 0 and is not trained on."""
    num_groups: Annotated[int, at_least(0)] = 0
    """Number of groups started per step; the first data.prompts_per_step to complete are trained
    on. 0: no extra groups. With --mode async use async.extra_prompts instead."""
    group_size: Annotated[int, at_least(0)] = 0
    """Number of episodes started per group; the first rollout.samples_per_prompt to finish are
    trained on. 0: no extra episodes."""

    def longest_silence(self) -> tuple[float, str]:
        """Return the longest time in seconds in which an episode may sample no token, and the keys
        that set it, as the beginning of an error."""
        return self.timeout_s, f"--env.timeout_s {self.timeout_s:g}:"

    def problems(self) -> list[str]:
        """Return an error for each conflict between keys; subclasses override this method."""
        return []


@dataclass(frozen=True, kw_only=True)
class TailConfig:
    """Keys of `--schedule tail_batching`, see rlcore/sched/tail_batching.py."""

    eta_prompts: Oversampling = 1.25
    """Prompts started in a short round, as a multiple of data.prompts_per_step."""
    eta_samples: Oversampling = 1.25
    """Responses started per prompt, as a multiple of rollout.samples_per_prompt; the first to
    finish are kept. Above 1, groups are biased towards short responses."""
    dataset_quotas: tuple[str, ...] = ()
    """Number of prompts per dataset in a step, as `dataset=prompts`; the numbers must sum to
    data.prompts_per_step. Empty: no quotas."""


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """Keys of `--mode stream`, see rlcore/sched/stream.py."""

    earliest: Share = 0.2
    """Share of responses that must have finished before half of the engines may stop decoding and
    start training."""
    latest: Share = 0.5
    """Share of finished responses above which no engine stops early any more."""
    check_every: Annotated[float, above(0, at_most=1)] = 0.05
    """Share of responses that finish between two checks of whether the unfinished requests fit into
    the engines that continue."""


@dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Keys of `--mode async`, see rlcore/sched/staleness.py."""

    alpha: Annotated[float, at_least(0)] = 2.0
    """Maximum number of policy versions between a sample's first token and its training; may be a
    fraction, 0: synchronous. At most (1 + alpha) x data.prompts_per_step prompts are running or
    finished."""
    weight_update: Literal["recompute", "in_place"] = "recompute"
    """What a weight update does to the KV cache of running requests. `recompute`: recompute it with
    the new weights. `in_place`: keep it, which is faster."""
    extra_prompts: Annotated[int, at_least(0)] = 0
    """Number of additional running prompts; the slowest prompts are dropped when they exceed
    async.alpha."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on data.val."""

    every: Annotated[int, at_least(0)] = 20
    """Number of steps between evaluations; 0: only at the start and at the end."""
    at_start: bool = True
    """Whether to evaluate before the first step."""
    at_end: bool = True
    """Whether to evaluate after the last step."""
    samples_per_prompt: Annotated[int, above(0)] = 1
    """Number of responses per validation prompt."""
    temperature: Annotated[float, at_least(0)] = 1.0
    """Sampling temperature in evaluation."""
    top_p: TopP = 1.0
    """Cumulative probability of the most likely tokens to sample from; 1: all tokens."""
    top_k: Annotated[int, at_least(0)] = 0
    """Number of most likely tokens to sample from; 0: all tokens."""
    greedy: bool = False
    """Whether to evaluate a second time with greedy decoding."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints and the exported model."""

    every: Annotated[int, at_least(0)] = 20
    """Number of steps between checkpoints; 0: no limit."""
    every_minutes: Annotated[float, at_least(0)] = 30.0
    """Minutes after which the current step ends with a checkpoint; 0: no limit. With
    checkpoint.every 0 as well, only the last step has one."""
    at_end: bool = True
    """Whether to save a checkpoint after the last step."""
    keep: Annotated[int, at_least(0)] = 2
    """Number of newest checkpoints kept; 0: all."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the highest validation accuracy, too: the mean over
    data.val, of checkpoints that follow an evaluation."""
    on_error: Literal["stop", "continue"] = "stop"
    """Handling of a checkpoint or log file (metrics, samples, rounds, traces) that cannot be
    written, e.g. because the disk is full. `stop`: end the run. `continue`: report and count it
    (training/failed_saves, training/failed_writes) and continue; the run fails only if the last
    checkpoint cannot be written. Earlier checkpoints are kept."""
    grace_s: Annotated[float, at_least(0, at_most=600, note=", since launchers wait no longer")] = (
        25.0
    )
    """Seconds after SIGTERM to finish the step, save and exit with code 0; 0: exit at once. If the
    step takes longer, the run exits with code 143 and resumes from the previous checkpoint. Slurm
    allows KillWait (30 s by default) or GraceTime."""
    async_save: bool | None = None
    """Whether training continues while a checkpoint is written: each rank copies its part to host
    memory (12 bytes per parameter) and writes it from there. None: true on a GPU, else false."""
    export_hf: bool = True
    """Whether to export the final model in Hugging Face format to `<run>/hf`."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weight updates from learner to engines."""

    route: Literal["auto", "gather", "intranode", "two_stage"] = "auto"
    """Route of weights between ranks. `gather`: every rank gathers every tensor. `intranode`:
    ranks broadcast their shards inside their node. `two_stage`: one copy is sent to each site
    (sync.ranks_per_site) and broadcast inside it. `auto`: `two_stage` with cluster.rollout_ranks,
    else `gather`."""
    bucket_mb: Annotated[int, above(0)] = 256
    """Size in MiB of a bucket, the unit in which weights are sent; up to three buckets are under
    way to an engine at a time."""
    ranks_per_site: Annotated[int, at_least(0)] = 0
    """Number of neighbouring ranks that share a fast network; 0: the ranks of a node."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Roles of the ranks, network and devices."""

    rollout_ranks: Annotated[int, at_least(0)] = 0
    """How many ranks, counted from the last, only sample while the others train; 0: every rank does
    both in turn."""
    gpu_memory_gb: Annotated[float | None, at_least(0, at_most=1e6, note=" GB; 0: no check")] = None
    """Memory of a GPU in GB (10^9 bytes) that `--dry-run` compares the plan with; 0: no check.
    None: the memory of the local GPU, or 80 without a GPU."""
    timeout_s: Annotated[float, above(0)] = 600.0
    """Seconds after which a collective or another wait between ranks fails."""
    interface: str = ""
    """Network interface to listen on between nodes, such as eth0; empty: the interface that reaches
    the master node."""
    rollout_cores: tuple[int, ...] = ()
    """CPU cores, as the node numbers them, for ranks that only sample, with their engines and
    rewards; empty: any."""
    train_cores: tuple[int, ...] = ()
    """CPU cores, as the node numbers them, for ranks that train; empty: any."""


@dataclass(frozen=True, kw_only=True)
class MuxConfig:
    """Nodes shared with other jobs in turns, with `--mux.url`; see rlcore/mux."""

    url: str = ""
    """Address of the cluster's Redis server, as printed by `rlcore mux add JOB`; empty: disabled.
    `env:NAME` reads it from the environment, so that `ps` does not show the job's password."""
    job: str = ""
    """Name of the job at the server; empty: the name of the run."""
    profile: str = ""
    """File mux_profile.json of a run on unshared nodes; empty: the file given to `rlcore mux add
    --profile`."""
    slo: Annotated[float, at_least(1, note="; 1 is the speed on unshared nodes")] = 2.0
    """Maximum time of an iteration as a multiple of its time on unshared nodes."""
    if_unavailable: Literal["wait", "solo"] = "wait"
    """Behaviour if the server does not reply or has no free nodes for the job. `wait`: wait for
    them. `solo`: run without the server."""
    tail_nodes: Annotated[int, at_least(0)] = 0
    """Number of rollout nodes on which the tail of a rollout continues if another job could use the
    other nodes; 0: all nodes. The tail begins when 80 % of the responses are done; moved requests
    keep the tokens generated so far."""
    lease_s: Annotated[float, at_least(1, note=", or a short delay counts as a failure")] = 15.0
    """Seconds without a heartbeat after which a job counts as failed and loses its permits."""
    max_wait_s: Annotated[float, above(0)] = 86400.0
    """Maximum seconds that the job waits to be placed on nodes, and for each permit."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Logs, metrics and the terminal."""

    rollouts: Annotated[int, at_least(-1, note="; -1: all")] = 4
    """Number of samples of rank 0's engine written to rollouts.jsonl per step; -1: all, also of
    other ranks unless some ranks only sample or only train."""
    rollout_tokens: Annotated[int, at_least(-1, note="; -1: all")] = 0
    """Number of tokens per rank and step written to rollouts.jsonl with text, log-prob and version
    for `rlcore view`, first responses first; -1: all. A token takes about 20 bytes and 5 us."""
    trace_steps: Annotated[int, at_least(-1, note="; -1: all")] = 0
    """Number of steps, counted from process start, that every rank records for `rlcore trace`:
    phases, responses, rewards and engine load; -1: all. A response takes about 400 bytes."""
    tensorboard: bool = True
    """Whether to write TensorBoard logs."""
    wandb: str = ""
    """Weights & Biases project; empty: disabled."""
    prometheus_port: Annotated[int, at_least(0, at_most=65535, note="; 0: none")] = 0
    """Port at which rank 0 serves the latest metrics, http://HOST:PORT/metrics; 0: disabled."""
    prometheus_host: str = "127.0.0.1"
    """Address on which rank 0 serves the metrics, without authentication."""
    plot: bool = True
    """Whether to draw curve.png when the run ends; `rlcore plot RUN` draws it at any time."""
    progress: bool = True
    """Whether to show progress bars on a terminal."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Tests and experiments; not for training."""

    shuffle_rewards: bool = False
    """Whether to shuffle rewards over the samples of a step, so that nothing can be learned."""
    kill_at_step: int = 0
    """Step at whose end rank 0 is killed with SIGKILL, for tests of resuming; 0: never."""
    deterministic_order: bool = False
    """Whether to wait for all responses and then count shorter ones as finished first. Runs with
    `--schedule tail_batching` then repeat bit by bit, but are no faster than with `all`."""
    replay: str = ""
    """File rounds.jsonl (or the folder) of an earlier run, whose order of responses is repeated so
    that every step has the same batch. Rounds are found by their prompts' ids, so a resumed run may
    replay the rest of a longer log. With --mode async: folder of a run with debug.record, whose
    batches are trained on again with identical tokens."""
    record: bool = False
    """Whether to write what debug.replay needs with --mode async (events and trained samples) to
    `<run>/record`, 12 bytes per token."""
    rollout_tp: Annotated[tuple[int, ...], at_least(1)] = ()
    """Tensor-parallel sizes of the SGLang engines in steps 1, 2, ...; later steps use the last one.
    Empty: rollout.tp."""
    env_barrier: bool = False
    """Whether all episodes of a rank wait for the slowest environment in every turn, to measure
    env-level asynchrony. It also fixes the order of episodes in a batch."""
    reward_barrier: bool = False
    """Whether rewards start only after the rank's engine has decoded everything, to measure their
    overlap with decoding."""
    decode_floor_ms: Annotated[float, at_least(0)] = 0.0
    """Minimum milliseconds per decode step, to imitate a memory-bound GPU."""
    full_length: bool = False
    """Whether to force all responses to rollout.max_tokens tokens, the worst case, for a job's
    mux_profile.json."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Configuration of a training run; `--dry-run` only checks it and shows its plan. The selectors
    `--algo`, `--reward` and `--env` choose the keys of their sections."""

    select: SelectConfig = field(default_factory=SelectConfig)
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    algo: Any = field(default_factory=AlgoConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    reward: Any = field(default_factory=RewardConfig)
    env: Any = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    mux: MuxConfig = field(default_factory=MuxConfig)
    log: LogConfig = field(default_factory=LogConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
