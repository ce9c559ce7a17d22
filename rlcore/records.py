"""Messages between controller, rollout workers, rewards and trainer. This module imports no torch.

Every record is a frozen `msgspec.Struct`, which is cheap to make, typed on the wire and never a
pickle. `utils/net.py` encodes records. Arrays are numpy. A finished response is sent once, as a
`Sample`, from the rank that generated it to the rank that trains on it.

Letters in shapes: P prompt tokens, R response tokens.
"""

import hashlib
from typing import Annotated, Any, Literal, dataclass_transform

import numpy as np
from msgspec import Meta, Struct

IntArray = np.ndarray  # int32
FloatArray = np.ndarray  # float32

RequestId = str
"""Stable name of one response, which also seeds the response's token sampler. Training: `t<n>.<k>`,
response k to issued prompt n. Evaluation: `e<step>.<set>.<prompt>.<k>`."""
GroupId = str
"""Name of a group (all responses to one issued prompt): a request id up to the last dot."""
Version = Annotated[int, Meta(ge=0)]
"""Number of training steps that produced the weights; 0: the weights loaded at the start."""
Finish = Literal["stop", "length", "turns", "abort", "failed"]
"""Reason why a response ended. `length`, `turns`: cut at the limit of tokens, or of an episode's
turns. `failed`: the environment failed; the response is not trained on."""
CUT: tuple[Finish, ...] = ("length", "turns")
"""Reasons by which a limit has cut a response."""
HoldMode = Literal["in_place", "recompute", "release"]
"""Treatment of running requests during a weight update. `in_place`: the engine keeps tokens and KV
cache. `recompute`: the engine keeps the tokens and prefills them again. `release`: the engine
removes the requests, and the controller keeps the tokens."""


# Only this module makes and parses ids (`tests/unit/test_ids.py`). Numbers start at 0.
# Training prompt 12 is group `t12`; its response 3 is `t12.3`; its greedy baseline is `bt12`.
# The group `e40.1.7` is prompt 7 of validation set 1 in the evaluation at step 40.
_BASELINE = "b"


def training_group(issue: int) -> GroupId:
    """Return the group id of the training prompt that was issued as number `issue`."""
    return f"t{issue}"


def issue_of(group: GroupId) -> int:
    """Return the issue number of a training group's prompt: 12 for `t12` and `bt12`."""
    return int(group.removeprefix(_BASELINE)[1:])


def baseline_of(group: GroupId) -> GroupId:
    """Return the id of the group's baseline group: one greedy response to the same prompt."""
    return _BASELINE + group


def is_baseline(group: GroupId) -> bool:
    """Return whether `group` is the baseline group of another group."""
    return group.startswith(_BASELINE)


def is_training(group: GroupId) -> bool:
    """Return whether `group` answers a training prompt, so that it may be trained on."""
    return group.startswith("t")


def without_baseline(group: GroupId) -> GroupId:
    """Return `group` without its baseline mark: `t12` for `bt12` and for `t12`."""
    return group.removeprefix(_BASELINE)


def eval_group(tag: str, eval_set: int, prompt: int) -> GroupId:
    """Return the group id of a validation prompt. `tag` names the evaluation and has no dots."""
    return f"{tag}.{eval_set}.{prompt}"


def eval_set_of(group: GroupId) -> int:
    """Return the number of the validation set that contains the group's prompt."""
    return int(group.split(".")[1])


def request_of(group: GroupId, response: int) -> RequestId:
    """Return the id of response number `response` to the group's prompt."""
    return f"{group}.{response}"


def turn_of(request: RequestId, turn: int) -> RequestId:
    """Return the request id of one turn of a dialogue; turn 0 has the id of the dialogue."""
    return f"{request}.{turn}" if turn else request


def group_of(request: RequestId) -> GroupId:
    """Return the id of the group that a request belongs to: `t12` for `t12.3`."""
    return request.rpartition(".")[0]


def prompt_key(prompt: IntArray) -> int:
    """Return the key of a prompt: 63 bits of the hash of its tokens ([P] int32). The key is the
    same in all epochs."""
    data = np.ascontiguousarray(prompt, np.int32).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def response_of(request: RequestId) -> int:
    """Return the number of the response within its group: 3 for `t12.3`."""
    return int(request.rpartition(".")[2])


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(Struct, frozen=True, eq=False, kw_only=True):
    """Base class of records: immutable, and compared by identity because fields may be arrays."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling settings. Returned log-probs are under the distribution that the settings define."""

    temperature: float = 1.0
    """Sampling temperature; 0 means greedy decoding."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    """Maximum number of tokens in a response, resumed tokens included."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response; the stop token is part of the response."""


class Prompt(Record):
    """Prompt: one row of a data set, tokenised."""

    index: int
    """Row number in the filtered data set; the same in all epochs and after restarts."""
    dataset: str
    """Name of the data set that has the row; metrics are reported per data set."""
    tokens: IntArray  # [P]
    answer: str = ""
    text: str = ""
    """The prompt as text, for reward functions and logs."""
    fields: dict[str, Any] = {}
    """Other columns of the data row, unchanged, for reward functions."""
    teacher_tokens: IntArray | None = None
    """[Q] prompt that a teacher reads in place of this one; None: the same."""


class Partial(Record):
    """Tokens generated before a request was stopped; `Request.resume` continues from them."""

    tokens: IntArray  # [R]
    logps: FloatArray  # [R]
    versions: IntArray  # [R]
    drafted: np.ndarray | None = None  # [R] bool: token is an accepted draft token
    routes: np.ndarray | None = None  # [P + R, layers * K], as in `Sample`


class Request(Record):
    """Request to an engine for one response."""

    id: RequestId
    prompt: IntArray  # [P]
    sampling: Sampling
    priority: int = 0
    """Start priority: lower values start first, and equal values in order of submission."""
    resume: Partial | None = None
    history_key: int = 0
    """Key of the prompt whose histories drafts come from, for a turn of an episode; 0: `prompt`."""

    @property
    def draft_key(self) -> int:
        """Key of the histories that drafts come from (`prompt_key`)."""
        return self.history_key or prompt_key(self.prompt)

    @property
    def group(self) -> GroupId:
        """Return the group id. A group shares one prompt, which an engine prefills once."""
        return group_of(self.id)


class Branch(Record):
    """Further row of an episode whose history was rewritten. Shares the episode's reward."""

    prompt: IntArray  # [P]
    tokens: IntArray  # [R]
    logps: FloatArray  # [R]
    versions: IntArray  # [R], -1: not sampled in this row
    routes: np.ndarray | None = None  # [P + R, layers * K], as in `Sample`


class Sample(Record):
    """A finished or aborted response with its prompt."""

    id: RequestId
    prompt: IntArray  # [P]
    tokens: IntArray  # [R], the stop token included
    logps: FloatArray  # [R] log-probs under the distribution that was sampled from
    versions: IntArray  # [R] policy version that produced each token; -1: environment token
    finish: Finish
    drafted: np.ndarray | None = None
    """[R] bool: whether the token is an accepted draft token; None if the engine does not draft."""
    branches: tuple[Branch, ...] = ()
    """Further rows that are trained with this one."""
    routes: np.ndarray | None = None
    """[up to P + R, layers * K] int8 or int16: experts that each layer of a mixture of experts has
    used for the token; -1, or beyond the end of the array: unknown. None if the engine does not
    record routes. A token's routes are of the version that sampled it."""
    teacher_prompt: IntArray | None = None
    """[Q] prompt that a teacher reads in place of `prompt`; None: the same."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)

    @property
    def rows(self) -> tuple["Sample | Branch", ...]:
        """The rows to train on: this one, then its branches."""
        return (self, *self.branches)

    @property
    def num_tokens(self) -> int:
        """Number of response tokens of all rows; the prompts of branches are among them."""
        return len(self.tokens) + sum(len(b.prompt) + len(b.tokens) for b in self.branches)

    @property
    def oldest_version(self) -> int:
        """Policy version of the oldest sampled token of all rows; 0 if no token is sampled. It need
        not be in the first row, whose turns may have waited while others were sampled."""
        sampled = [row.versions[row.versions >= 0] for row in self.rows]
        return min((int(v.min()) for v in sampled if len(v)), default=0)

    @property
    def num_observed(self) -> int:
        """Number of these tokens that are not trained: those of environments."""
        return self.num_tokens - sum(int((row.versions >= 0).sum()) for row in self.rows)


def merge_routes(known: np.ndarray | None, found: np.ndarray | None) -> np.ndarray | None:
    """Merge the routes [n, layers * K] that two passes over one sequence have recorded. Where both
    know the experts of a token, the earlier pass (`known`) decides. The result is as long as
    `found`, which may have more tokens."""
    if known is None or found is None:
        return known if found is None else found
    merged = found.copy()
    n = min(len(known), len(found))
    merged[:n] = np.where(known[:n] < 0, found[:n], known[:n])
    return merged


class SampleRef(Struct, frozen=True, kw_only=True):
    """Reference to a sample: the rank that holds it, and its request id."""

    owner: int
    id: RequestId


class RewardResult(Record):
    """Result of the reward function for one sample."""

    score: float
    details: dict[str, float] = {}
    """Further numbers of the reward function, logged as metrics `reward/<name>`."""
    terms: tuple[float, ...] = ()
    """Score of each term, if the reward is a sum; empty: it is not."""
    error: str = ""
    """Reason why `score` is a substitute, such as a timeout, crash or exception; empty if none."""
    latency_s: float = 0.0
    timeout_s: float = 0.0
    """Deadline for computing this score, in seconds; set if deadlines adapt to prompts."""
    reference_latency_s: float = 0.0
    """Scoring time in seconds if deadlines adapt to prompts and the answer is right, else 0."""
    queued_s: float = 0.0
    """Seconds from the sample's submission to its result, without the scoring time itself."""
    num_ahead: int = 0
    """Number of unscored samples on the same rank when this sample was submitted."""
    answer: str = ""
    """Final answer of the response, for the majority vote of an evaluation; empty: none."""
    is_trained: bool = True
    """Whether the sample may be trained on; False if a callback's `keep_sample` excludes it."""


class Work(Record):
    """Work item: sample `num_samples` responses to one prompt, as the group `id`."""

    id: GroupId
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    wanted: int = 0
    """Number of finished and rewarded responses that complete the group; 0 means `num_samples`."""


class Group(Record):
    """Kept responses to one prompt, ordered by id."""

    id: GroupId
    prompt_index: int
    dataset: str
    refs: tuple[SampleRef, ...]
    scores: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of tokens of each response."""
    finishes: tuple[Finish, ...]
    errors: tuple[str, ...]
    """Error of each response's reward, as in `RewardResult.error`."""
    prompt_length: int
    observed: tuple[int, ...] = ()
    """Number of environment tokens in each response; empty without an environment."""
    answers: tuple[str, ...] = ()
    """Final answer of each response (`RewardResult.answer`), in evaluations; empty: none."""
    excluded: tuple[bool, ...] = ()
    """Whether a callback excludes each response from training; empty: it excludes none."""
    terms: tuple[tuple[float, ...], ...] = ()
    """Score of each response by the terms of a sum of rewards (`RewardResult.terms`); empty: the
    reward is no sum."""


class History(Record):
    """Earlier response to a prompt, with its reward; used as draft source."""

    key: int
    """Key of the data's prompt (`prompt_key`)."""
    id: RequestId
    tokens: IntArray
    """Last tokens of the prompt, then the response. An episode has a history for each row."""
    score: float


# ---- events: rollout workers and rewards to the controller


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event(Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Event from a rollout worker or its engine; `time` is the sender's clock in seconds."""

    round: int = 0
    """Number of the round in which the event was sent. Events of earlier rounds are dropped."""
    rank: int = 0
    time: float = 0.0


class Ready(Event):
    """The rank has entered the round and accepts commands."""


class LengthReport(Event):
    """Lengths of one engine's unfinished requests; sent at intervals, not for every token."""

    ids: tuple[RequestId, ...]
    lengths: tuple[int, ...]
    tails: tuple[Partial, ...] = ()
    """New tokens of each request since the previous report; may be empty. If the engine's process
    fails, its rank still has these tokens. The controller gets reports without them."""


class Finished(Event):
    """A response is complete. The engine attaches the sample; the rank removes the sample before
    sending the event to the controller."""

    id: RequestId
    num_tokens: int
    finish: Finish
    sample: Sample | None = None
    version: Version = 0
    """Policy version of the oldest token, set by the rollout worker; used in `--mode async`."""
    num_observed: int = 0
    """Number of environment tokens in the response, which are not trained on."""


class Aborted(Event):
    """A request was aborted by a command; the engine attaches the partial sample."""

    id: RequestId
    num_tokens: int
    sample: Sample | None = None


class Rewarded(Event):
    """The reward of a finished response is known."""

    id: RequestId
    result: RewardResult


class Preempted(Event):
    """The engine evicted a request from the KV cache and will prefill the request again."""

    id: RequestId


class Stats(Event):
    """Counters of one engine since its previous `Stats`."""

    decode_steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0
    """Peak share (0 to 1) of the KV cache that running requests use."""
    cache_tokens: int = 0
    """Capacity of the KV cache, in tokens."""
    verify_steps: int = 0
    """Number of verify steps: decode steps with drafting on, which can check draft tokens."""
    verify_rows: int = 0
    """Number of requests in verify steps (decode steps with drafting on), summed over steps."""
    verify_inputs: int = 0
    """Number of tokens in the forwards of verify steps, padding included."""
    verify_tokens: int = 0
    """Number of tokens generated in verify steps (decode steps with drafting on)."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Number of drafted tokens that became part of a response."""
    draft_s: float = 0.0
    """Seconds of `busy_s` spent on making drafts."""
    verify_s: float = 0.0
    """Seconds of `busy_s` in verify steps (decode steps with drafting on), drafting included."""
    by_batch: tuple[tuple[int, int, int], ...] = ()
    """Counts for each range of decode batch sizes (1, 2 to 3, 4 to 7, and so on): requests,
    generated tokens, and requests in steps with drafting on."""
    episodes: int = 0
    """Number of episodes that ended; 0 without `--env`."""
    turns: int = 0
    """Number of sampled turns of the policy, including turns of aborted or failed episodes."""
    env_calls: int = 0
    """Number of environment resets and steps that the environment answered."""
    env_s: float = 0.0
    """Total seconds of the environment calls that `env_calls` counts."""
    env_timeouts: int = 0
    """Number of episode attempts that ended because the environment did not answer in time."""
    env_crashes: int = 0
    """Number of episode attempts that ended because the environment's process exited."""
    env_errors: int = 0
    """Number of episode attempts that ended because the environment raised an exception."""
    env_lost_tokens: int = 0
    """Number of tokens sampled in episode attempts that failed (timeout, crash or error)."""
    cached_tokens: int = 0
    """Number of prompt tokens that needed no prefill, because another request had them in the KV
    cache."""


class Down(Event):
    """The engine has failed; `lost` has the ids of its unfinished requests."""

    reason: str
    lost: tuple[RequestId, ...] = ()
    partials: dict[RequestId, Partial] = {}
    """Tokens that are known of the lost requests, by request id."""


class Released(Event):
    """The rollout worker has removed all unfinished requests; `partials` holds their tokens."""

    partials: dict[RequestId, Partial] = {}


class Moved(Event):
    """The rollout worker has removed the requests of a `Move`; `partials` holds their tokens."""

    partials: dict[RequestId, Partial] = {}


class Trained(Event):
    """The rank has finished its oldest unfinished `Train` command."""

    seconds: float = 0.0


class Held(Event):
    """The rollout worker has stopped decoding after a `Hold` and has no more events to report."""


class Wanted(Event):
    """The learner is waiting for the groups of its next update."""


class Holding(Event):
    """The learner has new weights; all engines must stop decoding for the weight update."""

    mode: HoldMode


AnyEvent = (
    Ready
    | LengthReport
    | Finished
    | Aborted
    | Rewarded
    | Preempted
    | Stats
    | Down
    | Released
    | Moved
    | Trained
    | Held
    | Wanted
    | Holding
)


# ---- commands: controller to the ranks


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command(Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Command from the controller or rank 0 to one rank."""

    rank: int


class Submit(Command):
    """Start these requests; `prompts` has each group's dataset row, which the reward needs."""

    requests: tuple[Request, ...]
    prompts: dict[GroupId, Prompt]


class Remember(Command):
    """Store earlier responses to the prompts of upcoming requests as draft source."""

    histories: tuple[History, ...]


class SendHistories(Command):
    """Send rank 0 the `Histories` of these finished samples (`--mode async`)."""

    scores: dict[RequestId, float]
    """Scores of the samples, by id. A worker may no longer have them, such as after a resume."""
    keys: dict[GroupId, int]
    """Keys of the groups' prompts."""


class Histories(Record):
    """Responses that a rank finished in a round, kept as draft source for later rounds."""

    rank: int
    histories: tuple[History, ...]


class Abort(Command):
    """Abort these requests of the rank's engine."""

    ids: tuple[RequestId, ...]


class Move(Command):
    """Remove these requests from the engine and reply `Moved`; another engine continues them."""

    ids: tuple[RequestId, ...]


class Streamed(Struct, frozen=True, kw_only=True):
    """Groups that were trained on while other groups were still decoding, and the data-parallel
    ranks that trained them."""

    groups: tuple[GroupId, ...]
    dp_ranks: tuple[int, ...]


class Release(Command):
    """Remove all unfinished requests from the engine and reply `Released`. The requests continue on
    other engines while this rank trains."""


class Ship(Command):
    """Send these finished samples to the ranks in `to`."""

    ids: tuple[RequestId, ...]
    to: tuple[int, ...]


class Train(Command):
    """Accumulate the gradient of these groups, which are divided among the data-parallel ranks
    `dp_ranks`. The samples arrive separately."""

    groups: tuple[Group, ...]
    dp_ranks: tuple[int, ...]


class EndRound(Command):
    """End the round; `groups` has the groups to train on."""

    groups: tuple[Group, ...]
    dropped: dict[GroupId, str] = {}
    """Reason by group, for complete groups that are not trained on. Groups in neither `groups` nor
    `dropped` did not complete in time."""
    reference_latency: dict[str, float] = {}
    """Scoring time in seconds of the slowest right answer of the round, by prompt
    (`sched/reward_timeout.py`)."""
    streamed: tuple[Streamed, ...] = ()
    """Part of `groups` that was already trained on during the round, in order of training."""
    stats: dict[str, float] = {}


class TrainOrder(Command):
    """Train on these groups next (train ranks with `--mode async`)."""

    groups: tuple[Group, ...]
    stats: dict[str, float] = {}


class Hold(Command):
    """Stop decoding for a weight update, treat running requests as `mode` says, and reply `Held`.
    Samples of the groups in `forget` are no longer needed."""

    mode: HoldMode
    forget: tuple[GroupId, ...] = ()
    reference_latency: dict[str, float] = {}
    """Scoring time in seconds of the slowest right answer since the last hold, by prompt."""


class Fail(Command):
    """Fail the round; every rank raises an error with the message `reason`."""

    reason: str


class DropEngine(Command):
    """Terminate this rank's engine, because another rank of the engine has failed."""

    reason: str


class Repair(Command):
    """No engine works. Restart this rank's failed engine, join a weight update, send `Ready`."""


class Alive(Command):
    """Heartbeat to a waiting rank, which then restarts its deadline; other ranks are busy."""


class JoinSync(Command):
    """Join the weight update, for which the train ranks are ready."""


AnyCommand = (
    Submit
    | Remember
    | SendHistories
    | Abort
    | Move
    | Release
    | Ship
    | Train
    | DropEngine
    | Repair
    | EndRound
    | TrainOrder
    | Hold
    | JoinSync
    | Fail
    | Alive
)


# ---- weights


class TensorMeta(Struct, frozen=True, kw_only=True):
    """Name, data type, shape and offset of one tensor in a bucket."""

    name: str
    """Hugging Face name of the tensor."""
    dtype: str
    """Data type as torch names it, without the prefix `torch.`, such as `float32` or `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the tensor in bytes from the start of the bucket, a multiple of 16."""


class Shard(Struct, frozen=True, kw_only=True):
    """Slice of a tensor that one rank holds: indices `start` to `stop` (exclusive) of dimension
    `dim`, and all indices of the other dimensions."""

    name: str
    """Hugging Face name of the tensor."""
    dtype: str
    """Data type as torch names it, without the prefix `torch.`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    start: int
    stop: int


class Bucket(Struct, frozen=True, kw_only=True):
    """Tensors that are sent together in a weight update. `transport` defines the payload: the data
    itself (`bytes`), the name of a shared-memory file (`shm`), or a handle of GPU memory
    (`cuda_ipc`; `utils/buckets.py`). A payload stays readable until `load_bucket` returns."""

    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    checksum: int
    """Unsigned 64-bit checksum of all bytes (`ops.reshard.checksum`). An engine rejects a bucket
    whose bytes do not match."""
    transport: Literal["bytes", "shm", "cuda_ipc"] = "bytes"
