"""Messages between controller, rollout workers, rewards and trainer. No torch here.

Every record is a frozen `msgspec.Struct`: cheap to make, typed on the wire, never a pickle
(`utils/net.py` encodes them). Arrays are numpy. Finished responses travel once, as a `Sample`, from
the rank that generated them to the rank that trains them.

Letters in shapes: P prompt tokens, R response tokens.
"""

from typing import Annotated, Any, Literal, dataclass_transform

import numpy as np
from msgspec import Meta, Struct

IntArray = np.ndarray  # int32
FloatArray = np.ndarray  # float32

RequestId = str
"""Stable name of one response, `t<issue>.<k>` for the k-th response of the issue-th prompt issued
in training, `e<step>.<index>.<k>` in evaluation. It seeds the token sampler of the response."""
GroupId = str
"""Part of a request id before the last dot; it names all responses to one issue of a prompt."""
Version = Annotated[int, Meta(ge=0)]
"""Number of training steps (rounds) that made the weights; 0 is the loaded model."""
Finish = Literal["stop", "length", "abort", "failed"]
"""Reason that a response ended. `failed`: its environment failed, so it is not trained."""
HoldMode = Literal["in_place", "recompute", "release"]
"""Treatment of running requests during a weight update. `in_place`: the engine keeps tokens and KV
cache. `recompute`: it keeps the tokens and prefills them again. `release`: it removes the requests,
and the controller keeps their tokens."""


# Ids are made and parsed only here (`tests/unit/test_ids.py`):
#
#     t12      the 13th prompt of training     bt12     greedy answer to it: a baseline, not trained
#     t12.3    the 4th response to it          e40.1.7  evaluation at step 40, set 1, prompt 7
_BASELINE = "b"


def training_group(issue: int) -> GroupId:
    """Return the group of the prompt that was issued as number `issue`."""
    return f"t{issue}"


def issue_of(group: GroupId) -> int:
    """Return the issue number of a training group's prompt."""
    return int(group.removeprefix(_BASELINE)[1:])


def baseline_of(group: GroupId) -> GroupId:
    """Return the id of the baseline group: the greedy answer to this group's prompt."""
    return _BASELINE + group


def is_baseline(group: GroupId) -> bool:
    """Return whether the group is the baseline of another group."""
    return group.startswith(_BASELINE)


def without_baseline(group: GroupId) -> GroupId:
    """Return the group whose baseline this group is."""
    return group.removeprefix(_BASELINE)


def eval_group(tag: str, eval_set: int, prompt: int) -> GroupId:
    """Return the group of a validation prompt. `tag` names the evaluation and has no dots."""
    return f"{tag}.{eval_set}.{prompt}"


def eval_set_of(group: GroupId) -> int:
    """Return the number of the validation set that contains the group's prompt."""
    return int(group.split(".")[1])


def request_of(group: GroupId, response: int) -> RequestId:
    """Return the id of a response to the group's prompt."""
    return f"{group}.{response}"


def turn_of(request: RequestId, turn: int) -> RequestId:
    """Return the id of one turn of a dialogue; turn 0 has the id of the dialogue."""
    return f"{request}.{turn}" if turn else request


def group_of(request: RequestId) -> GroupId:
    """Return the group that a request belongs to: `t12.3` is in `t12`."""
    return request.rpartition(".")[0]


def response_of(request: RequestId) -> int:
    """Return the number of the response within its group: 3 of `t12.3`."""
    return int(request.rpartition(".")[2])


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(Struct, frozen=True, eq=False, kw_only=True):
    """Base of all records: immutable, compared by identity (they may hold arrays)."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling settings. Returned log-probs are of the distribution that these settings define."""

    temperature: float = 1.0
    """Sampling temperature; 0 means greedy."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    """Maximum number of tokens in a response, resumed tokens included."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a response; the stop token is part of the response."""


class Prompt(Record):
    """One row of a data set, tokenised."""

    index: int
    """Row number in its data set, after filtering: stable over epochs and restarts."""
    dataset: str
    """Name of the data set; metrics are reported per data set."""
    tokens: IntArray  # [P]
    answer: str = ""
    text: str = ""
    """The prompt as text, for rewards and logs."""
    fields: dict[str, Any] = {}
    """The other columns of the row, unchanged; rewards may use them."""


class Partial(Record):
    """Tokens of an aborted request; pass them in `Request.resume` to continue the response."""

    tokens: IntArray  # [R]
    logps: FloatArray  # [R]
    versions: IntArray  # [R]
    drafted: np.ndarray | None = None  # [R] bool, as in `Sample`


class Request(Record):
    """Request to an engine for one response."""

    id: RequestId
    prompt: IntArray  # [P]
    sampling: Sampling
    priority: int = 0
    """Order of starts: lower values first, equal values in order of submission."""
    resume: Partial | None = None

    @property
    def group(self) -> GroupId:
        """Return the group id. A group shares its prompt, so an engine prefills it once."""
        return group_of(self.id)


class Sample(Record):
    """A finished or aborted response."""

    id: RequestId
    prompt: IntArray  # [P]
    tokens: IntArray  # [R], the stop token included
    logps: FloatArray  # [R], of the distribution that was sampled
    versions: IntArray  # [R], policy version that produced each token, -1 where an environment did
    finish: Finish
    drafted: np.ndarray | None = None
    """Whether each token was drafted and accepted, [R] bool; None if the engine does not draft."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)


class SampleRef(Struct, frozen=True, kw_only=True):
    """Reference to a sample: the rank that holds it, and its id."""

    owner: int
    id: RequestId


class RewardResult(Record):
    """Result of the reward function for one sample."""

    score: float
    details: dict[str, float] = {}
    """Further metrics, logged as `reward/<name>`."""
    error: str = ""
    """Reason that the score is a substitute: `timeout`, `crash`, or the exception's first line."""
    latency_s: float = 0.0
    timeout_s: float = 0.0
    """Deadline of this score in seconds, if deadlines adapt to prompts."""
    reference_latency_s: float = 0.0
    """Equal to latency_s if deadlines adapt to prompts and the answer is right, else 0."""
    queued_s: float = 0.0
    """Seconds before scoring began plus those until the score was returned."""
    num_ahead: int = 0
    """Number of unscored samples of the same rank when this one was submitted."""


class Work(Record):
    """Order for `num_samples` responses to one prompt, under the group id `id`."""

    id: GroupId
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    wanted: int = 0
    """Number of finished and rewarded responses that complete the group. 0: all of them."""


class Group(Record):
    """All kept responses to one prompt, in order of their ids."""

    id: GroupId
    prompt_index: int
    dataset: str
    refs: tuple[SampleRef, ...]
    scores: tuple[float, ...]
    lengths: tuple[int, ...]
    """Number of tokens of each response."""
    finishes: tuple[Finish, ...]
    errors: tuple[str, ...]
    """Reason that each score is a substitute; empty if the score is genuine."""
    prompt_length: int
    observed: tuple[int, ...] = ()
    """Number of environment tokens in each response; empty without an environment."""


class History(Record):
    """An earlier response to a prompt with its reward, used as draft source."""

    key: int
    """Key of the prompt, the same in all epochs (`rollout/histospec.py`)."""
    id: RequestId
    tokens: IntArray
    """Last tokens of the prompt, then the response."""
    score: float


# ---- events: rollout workers and rewards to the controller


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event(Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Event at a rollout worker or its engine. `time` is the sender's clock in seconds."""

    round: int = 0
    """Round of the sender; events of earlier rounds are dropped."""
    rank: int = 0
    time: float = 0.0


class Ready(Event):
    """The rank has entered the round and accepts commands."""


class LengthReport(Event):
    """Lengths of the live requests of one engine; sent once per interval, not per token."""

    ids: tuple[RequestId, ...]
    lengths: tuple[int, ...]
    tails: tuple[Partial, ...] = ()
    """New tokens of each request since the last report, or empty. If an engine process fails, its
    rank can recover the reported tokens; they are not sent to the controller."""


class Finished(Event):
    """A response is complete. The engine attaches the sample; the controller gets the event
    without it."""

    id: RequestId
    num_tokens: int
    finish: Finish
    sample: Sample | None = None
    version: Version = 0
    """Policy version of the first token; known only to the controller of an endless round."""
    num_observed: int = 0
    """Number of tokens that an environment produced; they are not trained."""


class Aborted(Event):
    """A request was aborted by command; the engine attaches its partial sample."""

    id: RequestId
    num_tokens: int
    sample: Sample | None = None


class Rewarded(Event):
    """The reward of a finished response is known."""

    id: RequestId
    result: RewardResult


class Preempted(Event):
    """The engine evicted a request from its KV cache and will prefill it again."""

    id: RequestId


class Stats(Event):
    """Counters of one engine since the last report."""

    decode_steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    busy_s: float = 0.0
    running: int = 0
    waiting: int = 0
    cache_used: float = 0.0
    """Peak share of the KV cache in use by running requests."""
    cache_tokens: int = 0
    """Capacity of the KV cache, in tokens."""
    verify_steps: int = 0
    """Number of decode steps that could verify drafts."""
    verify_rows: int = 0
    """Number of requests in these verify steps, summed over the steps."""
    verify_tokens: int = 0
    """Number of tokens generated in verify steps."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Number of drafted tokens that became part of a response."""
    draft_s: float = 0.0
    """Part of busy_s spent on drafting."""
    verify_s: float = 0.0
    """Part of busy_s spent in verify steps, drafting included."""
    by_batch: tuple[tuple[int, int, int], ...] = ()
    """Counts by decode batch size (1, 2 to 3, 4 to 7, and so on): requests, tokens generated, and
    requests in verify steps."""
    episodes: int = 0
    """Number of ended episodes, with `--env`."""
    turns: int = 0
    """Number of sampled turns, including those of aborted or failed episodes."""
    env_calls: int = 0
    """Number of environment resets and steps that were answered."""
    env_s: float = 0.0
    """Total seconds of these calls."""
    env_timeouts: int = 0
    """Number of episode attempts that ended because the environment did not answer in time."""
    env_crashes: int = 0
    """Number of episode attempts that ended because the environment's process exited."""
    env_errors: int = 0
    """Number of episode attempts that ended because the environment raised an exception."""
    env_lost_tokens: int = 0
    """Number of tokens sampled in these failed attempts."""
    knee: float = 0.0
    """Number of tokens at which a forward pass takes twice as long as an empty one, as estimated
    for drafting."""


class Down(Event):
    """The engine has failed. `lost` are the requests that it held."""

    reason: str
    lost: tuple[RequestId, ...] = ()
    partials: dict[RequestId, Partial] = {}
    """Known tokens of the lost requests."""


class Released(Event):
    """The rollout worker has removed its live requests; `partials` holds their tokens."""

    partials: dict[RequestId, Partial] = {}


class Moved(Event):
    """The rollout worker has removed the requests of a `Move`; `partials` holds their tokens."""

    partials: dict[RequestId, Partial] = {}


class Trained(Event):
    """The rank has finished the oldest `Train` command that it was sent."""

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
    """Command to one rank."""

    rank: int


class Submit(Command):
    """Start these requests; `prompts` holds their dataset rows by group, for the reward."""

    requests: tuple[Request, ...]
    prompts: dict[GroupId, Prompt]


class Remember(Command):
    """Store earlier responses to upcoming prompts as draft source."""

    histories: tuple[History, ...]


class Histories(Record):
    """Responses that a rank finished in a round, kept as draft source for later rounds."""

    rank: int
    histories: tuple[History, ...]


class Abort(Command):
    """Stop these requests."""

    ids: tuple[RequestId, ...]


class Move(Command):
    """Remove these requests and reply `Moved`; they continue on another engine."""

    ids: tuple[RequestId, ...]


class Streamed(Struct, frozen=True, kw_only=True):
    """Groups trained while other groups were still decoding, and the data-parallel ranks that
    trained them."""

    groups: tuple[GroupId, ...]
    dp_ranks: tuple[int, ...]


class Release(Command):
    """Remove all live requests and reply `Released`; they continue elsewhere while this rank
    trains."""


class Ship(Command):
    """Send these finished samples to the ranks `to`."""

    ids: tuple[RequestId, ...]
    to: tuple[int, ...]


class Train(Command):
    """Accumulate the gradient of these groups, which are divided over the data-parallel ranks
    `dp_ranks`. Their samples are sent separately."""

    groups: tuple[Group, ...]
    dp_ranks: tuple[int, ...]


class EndRound(Command):
    """End the round; `groups` are the groups to train."""

    groups: tuple[Group, ...]
    dropped: dict[GroupId, str] = {}
    """Complete groups that are not trained, with the reason. Groups in neither field were late."""
    reference_latency: dict[str, float] = {}
    """Scoring time in seconds of the slowest right answer of the round, by prompt
    (`sched/reward_timeout.py`)."""
    streamed: tuple[Streamed, ...] = ()
    """Groups of `groups` that are trained already, in order of training."""
    stats: dict[str, float] = {}


class TrainOrder(Command):
    """Train these groups next, in an endless round."""

    groups: tuple[Group, ...]
    stats: dict[str, float] = {}


class Hold(Command):
    """Stop decoding for a weight update, keep running requests, and reply `Held`. The samples of
    the groups in `forget` may be deleted."""

    mode: HoldMode
    forget: tuple[GroupId, ...] = ()
    reference_latency: dict[str, float] = {}
    """Scoring times of the slowest right answers, as in `EndRound`."""


class Fail(Command):
    """Fail the round; every rank raises an error with the message `reason`."""

    reason: str


class DropEngine(Command):
    """End this rank's engine, because another rank of the same engine has failed."""

    reason: str


class Repair(Command):
    """No engine works: restart this rank's engine if it has failed, take part in a weight update,
    and reply `Ready`."""


class Alive(Command):
    """Heartbeat of a controller that waits for other ranks; resets the receiver's deadline."""


class JoinSync(Command):
    """Join the weight update; the training ranks are ready for it."""


AnyCommand = (
    Submit
    | Remember
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
    """Name, type, shape and place of one tensor in a bucket."""

    name: str
    """Hugging Face name."""
    dtype: str
    """torch's spelling without the prefix: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket, a multiple of 16."""


class Shard(Struct, frozen=True, kw_only=True):
    """One rank's part of one tensor: indices `start` to `stop` (exclusive) of dimension `dim`, and
    all indices of the other dimensions."""

    name: str
    """Hugging Face name."""
    dtype: str
    """Data type, spelled as in `TensorMeta`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int
    start: int
    stop: int


class Bucket(Struct, frozen=True, kw_only=True):
    """Group of tensors sent together in a weight update. `transport` defines the payload: `bytes`
    is the data itself, `shm` the name of a shared-memory file, `cuda_ipc` a handle of GPU memory
    (`utils/buckets.py`). A payload stays readable until the engine's call returns."""

    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    checksum: int
    """Unsigned 64-bit checksum of all bytes, as `ops.reshard.checksum`; an engine rejects a bucket
    whose bytes have another checksum."""
    transport: Literal["bytes", "shm", "cuda_ipc"] = "bytes"
