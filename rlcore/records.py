"""The records that travel between controller, replicas, rewards and trainer. No torch here.

Every record is a frozen `msgspec.Struct`: cheap to make, typed on the wire, never a pickle
(`utils/net.py` encodes them). Arrays are numpy; a `Sample` is the only record that holds tokens
of a response, and it travels once, from the replica that made it to the rank that trains it.

Letters in shapes: P prompt tokens, R response tokens.
"""

from typing import Annotated, Any, Literal, dataclass_transform

import numpy as np
from msgspec import Meta, Struct

IntArray = np.ndarray  # int32
FloatArray = np.ndarray  # float32

RequestId = str
"""Stable name of one response, `t<issue>.<k>` for the k-th response of the issue-th prompt issued
in training, `e<step>.<index>.<k>` in evaluation. Random numbers of the sampler are keyed by it."""
GroupId = str
"""The part of a request id before the last dot: all responses to one issue of a prompt."""
Version = Annotated[int, Meta(ge=0)]
"""Number of training steps (rounds) behind the weights: 0 is the model that was loaded."""
Finish = Literal["stop", "length", "abort", "failed"]
"""Why a response ended; `failed`: its environment did, and it is not trained."""
HoldMode = Literal["in_place", "recompute", "release"]
"""What becomes of requests while weights change: the engine keeps tokens and cache, or tokens alone
and prefills them again, or it lets go of them, and the controller has the tokens."""


# Ids are made and read here alone (`tests/unit/test_ids.py`):
#
#     t12      the 13th prompt of training     bt12     greedy answer to it: a baseline, not trained
#     t12.3    the 4th response to it          e40.1.7  evaluation at step 40, set 1, prompt 7
_BASELINE = "b"


def training_group(issue: int) -> GroupId:
    """Return the group of the prompt that was issued as number `issue`."""
    return f"t{issue}"


def issue_of(group: GroupId) -> int:
    """Return the number that the prompt of a training group was issued as."""
    return int(group.removeprefix(_BASELINE)[1:])


def baseline_of(group: GroupId) -> GroupId:
    """Return the group of the greedy answer to this group's prompt."""
    return _BASELINE + group


def is_baseline(group: GroupId) -> bool:
    """Whether the group is a baseline of another one."""
    return group.startswith(_BASELINE)


def without_baseline(group: GroupId) -> GroupId:
    """Return the group that this one is a baseline of."""
    return group.removeprefix(_BASELINE)


def eval_group(tag: str, eval_set: int, prompt: int) -> GroupId:
    """Return the group of a prompt of a validation set. `tag`: names the evaluation, no dots."""
    return f"{tag}.{eval_set}.{prompt}"


def eval_set_of(group: GroupId) -> int:
    """Return the number of the validation set that the group's prompt is in."""
    return int(group.split(".")[1])


def request_of(group: GroupId, response: int) -> RequestId:
    """Return the id of a response to the group's prompt."""
    return f"{group}.{response}"


def turn_of(request: RequestId, turn: int) -> RequestId:
    """Return the id of a turn of a dialogue; the first one has the id of the whole."""
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
    """How to sample. The log-probs returned are of the distribution that these settings define."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    """Most tokens in a response, resumed ones included."""
    stop_ids: tuple[int, ...] = ()
    """A response ends with the first of these; the stop token is part of the response."""


class Prompt(Record):
    """One row of a data set, tokenised."""

    index: int
    """Row number in its data set, after filtering: stable over epochs and restarts."""
    source: str
    """Name of the data set: metrics are reported by it."""
    tokens: IntArray  # [P]
    answer: str = ""
    text: str = ""
    """The prompt as text, for rewards and for reading."""
    fields: dict[str, Any] = {}
    """The other columns of the row, as they came: rewards may use them."""


class Partial(Record):
    """What an aborted request had produced: hand it back in `Request.resume` to go on from
    there."""

    tokens: IntArray  # [R]
    logps: FloatArray  # [R]
    versions: IntArray  # [R]
    drafted: np.ndarray | None = None  # [R] bool, as in `Sample`


class Request(Record):
    """One response wanted from an engine."""

    id: RequestId
    prompt: IntArray  # [P]
    sampling: Sampling
    priority: int = 0
    """Lower starts first; equal priorities start in order of submission."""
    resume: Partial | None = None

    @property
    def group(self) -> GroupId:
        """Requests of one group have the same prompt, so an engine prefills it once."""
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
    """[R] bool: the token was guessed and found right; None where the engine does not draft."""

    @property
    def group(self) -> GroupId:
        return group_of(self.id)


class SampleRef(Struct, frozen=True, kw_only=True):
    """Names a sample without carrying it: the rank that holds it, and its id."""

    owner: int
    id: RequestId


class RewardResult(Record):
    """What a reward function said about one sample."""

    score: float
    details: dict[str, float] = {}
    """Further numbers, shown as `reward/<name>`."""
    error: str = ""
    """Why the score is a substitute: `timeout`, `crash`, or the exception's first line."""
    latency_s: float = 0.0
    timeout_s: float = 0.0
    """The deadline that it had, where deadlines adapt to prompts."""
    anchor_s: float = 0.0
    """The same as latency_s where deadlines adapt and this is a right answer."""
    queued_s: float = 0.0
    """Time that it waited before, and its score on the way back."""
    num_ahead: int = 0
    """Samples of its rank that had no score yet when it came."""


class Work(Record):
    """One prompt to be answered `num_samples` times under the group id `id`."""

    id: GroupId
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    wanted: int = 0
    """Responses that make the group complete: the first that are finished and rewarded. 0: all."""


class Group(Record):
    """All kept responses to one prompt, in order of their ids."""

    id: GroupId
    prompt_index: int
    source: str
    refs: tuple[SampleRef, ...]
    scores: tuple[float, ...]
    lengths: tuple[int, ...]
    """Tokens of each response."""
    finishes: tuple[Finish, ...]
    errors: tuple[str, ...]
    """Why a score is a substitute; empty where it is genuine."""
    prompt_length: int
    observed: tuple[int, ...] = ()
    """Of the tokens of each response, those that an environment gave; empty where there is none."""


class History(Record):
    """An earlier response to a prompt with its reward, for drafting."""

    key: int
    """The prompt's, in all epochs: `rollout/histospec.py`."""
    id: RequestId
    tokens: IntArray
    """The prompt's last tokens and the response."""
    score: float


# ---- events: replicas and rewards to the controller


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event(Struct, frozen=True, eq=False, kw_only=True, tag=True):
    """Something that happened at a replica. `time` is the sender's clock in seconds."""

    round: int = 0
    """Number of the sender's round: what comes late is dropped."""
    rank: int = 0
    time: float = 0.0


class Ready(Event):
    """The rank has entered the round and takes commands."""


class Progress(Event):
    """Lengths of the live requests of one replica; one per interval, not one per token."""

    ids: tuple[RequestId, ...]
    lengths: tuple[int, ...]
    tails: tuple[Partial, ...] = ()
    """What each has produced since the last report, or nothing: what an engine in a child process
    has told outlives it. It stays at the replica."""


class Finished(Event):
    """A response ended by itself. The engine attaches the sample; on the wire it stays home."""

    id: RequestId
    num_tokens: int
    finish: Finish
    sample: Sample | None = None
    version: Version = 0
    """Of its first token; known to the controller of an endless round alone."""
    num_observed: int = 0
    """Of its tokens, those that an environment gave: they are not trained."""


class Aborted(Event):
    """A request was stopped on demand; its partial sample comes along from the engine."""

    id: RequestId
    num_tokens: int
    sample: Sample | None = None


class Rewarded(Event):
    """A finished response has its score."""

    id: RequestId
    result: RewardResult


class Preempted(Event):
    """The engine threw a request out of its cache and will prefill it again."""

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
    """Largest share of the KV cache that running requests took at a time."""
    cache_tokens: int = 0
    """Tokens that it holds."""
    verify_steps: int = 0
    """Of the decode steps, those that could verify drafts."""
    verify_rows: int = 0
    """Requests in them."""
    verify_tokens: int = 0
    """Tokens that they gained."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted ones that are part of a response."""
    draft_s: float = 0.0
    """Of busy_s: making drafts."""
    verify_s: float = 0.0
    """Of busy_s: decode steps that could verify drafts, the making of drafts included."""
    by_batch: tuple[tuple[int, int, int], ...] = ()
    """Requests in decode steps, tokens that they gained, and how many of the requests were in steps
    that could verify drafts; by the size of the batch: 1, 2 to 3, 4 to 7, and so on."""
    episodes: int = 0
    """That ended, with `--env`."""
    turns: int = 0
    """That were sampled, of episodes that were aborted or failed too."""
    env_calls: int = 0
    """Resets and steps of environments that were answered."""
    env_s: float = 0.0
    """What these took, summed."""
    env_timeouts: int = 0
    """Attempts at an episode that ended since the environment did not answer in time."""
    env_crashes: int = 0
    """... since its process died."""
    env_errors: int = 0
    """... since it raised."""
    env_lost_tokens: int = 0
    """That these had sampled."""
    knee: float = 0.0
    """Tokens of a forward that takes twice as long as one of none, as far as drafting knows it."""


class Down(Event):
    """The engine died. `lost` are the requests that it held."""

    reason: str
    lost: tuple[RequestId, ...] = ()
    partials: dict[RequestId, Partial] = {}
    """What the lost requests had produced, as far as it is known."""


class Released(Event):
    """The replica has let go of its live requests; `partials` is what they had produced."""

    partials: dict[RequestId, Partial] = {}


class Moved(Event):
    """The replica has let go of requests that were to `Move`."""

    partials: dict[RequestId, Partial] = {}


class Trained(Event):
    """The rank is through with the oldest `Train` that it was sent."""

    seconds: float = 0.0


class Held(Event):
    """The replica has stopped decoding, as it was told, and has nothing more to report."""


class Wanted(Event):
    """The learner waits for the groups of its next update."""


class Holding(Event):
    """The learner has new weights: all are to stop for the push."""

    mode: HoldMode


AnyEvent = (
    Ready
    | Progress
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
    """An order to one rank."""

    rank: int


class Submit(Command):
    """Start these requests; `prompts` are the rows they come from, by group, for the reward."""

    requests: tuple[Request, ...]
    prompts: dict[GroupId, Prompt]


class Remember(Command):
    """Earlier responses to prompts that you are about to get, for drafting."""

    histories: tuple[History, ...]


class Histories(Record):
    """What a rank's replica has finished in a round, for those that come later."""

    rank: int
    histories: tuple[History, ...]


class Abort(Command):
    """Stop these requests."""

    ids: tuple[RequestId, ...]


class Move(Command):
    """Let go of these requests and say `Moved`: they go on elsewhere."""

    ids: tuple[RequestId, ...]


class Streamed(Struct, frozen=True, kw_only=True):
    """Groups that were trained while others were still decoded, and who shared them."""

    groups: tuple[GroupId, ...]
    dp_ranks: tuple[int, ...]


class Release(Command):
    """Let go of all live requests and say `Released`: they go on elsewhere, you train."""


class Ship(Command):
    """Send these finished samples to the ranks `to`."""

    ids: tuple[RequestId, ...]
    to: tuple[int, ...]


class Train(Command):
    """Accumulate the gradient of these groups, which the data-parallel ranks `dp_ranks` share. The
    samples are on their way."""

    groups: tuple[Group, ...]
    dp_ranks: tuple[int, ...]


class EndRound(Command):
    """The round is over: these groups were kept."""

    groups: tuple[Group, ...]
    dropped: dict[GroupId, str] = {}
    """Complete groups that do not count, and why; what is in neither was late."""
    anchors: dict[str, float] = {}
    """Seconds that the slowest right answer of the round took, by prompt (`sched/reward.py`)."""
    streamed: tuple[Streamed, ...] = ()
    """What of `groups` has been trained, in the order in which it was."""
    stats: dict[str, float] = {}


class Batch(Command):
    """What the learner trains next, in an endless round."""

    groups: tuple[Group, ...]
    stats: dict[str, float] = {}


class Hold(Command):
    """Stop decoding for a push, keep what is under way, and say `Held`; the samples of the groups
    `forget` are of no more use."""

    mode: HoldMode
    forget: tuple[GroupId, ...] = ()
    anchors: dict[str, float] = {}
    """As in `EndRound`."""


class Fail(Command):
    """The round cannot end; `reason` is the sentence that every rank raises."""

    reason: str


class Drop(Command):
    """End your engine: another rank that it needs has lost its part."""

    reason: str


class Repair(Command):
    """No engine is left: start yours again if it is dead, take part in a push of the weights, say
    Ready."""


class Alive(Command):
    """The controller is there and waits for others; resets the receiver's deadline."""


class Meet(Command):
    """The ranks that train are through: come to the push."""


AnyCommand = (
    Submit
    | Remember
    | Abort
    | Move
    | Release
    | Ship
    | Train
    | Drop
    | Repair
    | EndRound
    | Batch
    | Hold
    | Meet
    | Fail
    | Alive
)


# ---- weights


class TensorMeta(Struct, frozen=True, kw_only=True):
    """Where one tensor lies in a bucket."""

    name: str
    """Hugging Face name."""
    dtype: str
    """torch's spelling without the prefix: `float32`, `bfloat16`."""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the bucket, a multiple of 16."""


class Shard(Struct, frozen=True, kw_only=True):
    """A part of one tensor as one rank has it: the indices from `start` up to `stop` of `dim`, all
    of the other dimensions."""

    name: str
    """Hugging Face name."""
    dtype: str
    """As in `TensorMeta`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    start: int
    stop: int


class Bucket(Struct, frozen=True, kw_only=True):
    """A piece of the weights. `transport` says what a payload is: `bytes` are the bytes themselves,
    `shm` is the name of a shared-memory file that holds them, `cuda_ipc` the handle of memory of a
    GPU (`utils/buckets.py`). A payload may be read until the engine's call returns."""

    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    checksum: int
    """Of all bytes, 64 bits without sign, as `ops.reshard.checksum`: an engine takes nothing from a
    bucket that has another one."""
    transport: Literal["bytes", "shm", "cuda_ipc"] = "bytes"
