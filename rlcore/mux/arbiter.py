"""The arbiter: the one process that decides which job runs where and when.

The arbiter reads the jobs' messages from Redis, lets `sched/cluster.py` and `sched/phase_mux.py`
decide, and writes the jobs' places (nodes) and permits. All its state is in Redis. One transaction
removes a message from its inbox and writes the message's effects, if the arbiter still has its
token. So an arbiter may fail between any two commands, and another arbiter continues. Messages are
numbered, so a message that a job sent twice counts once. Each job holds a lease, a key that expires
by Redis's clock. When the lease expires, the job counts as failed and its permit is free. After an
outage of the server or the arbiter, no job counts as failed until one more lease has passed."""

import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import redis

from rlcore.mux import store
from rlcore.mux.profile import STEP
from rlcore.sched import drift
from rlcore.sched.cluster import Cluster, Decision, JobGroup, MuxJob, NodePool, Nodes
from rlcore.sched.phase_mux import Grant, Member, Migrate, PhaseMux, Todo
from rlcore.utils import phases
from rlcore.utils.log import log

LOCK_S = 5.0
"""Seconds after which an arbiter that has not renewed its token counts as failed."""
IDLE_S = 0.2
"""Seconds between checks of leases and idle jobs while no message arrives."""
LEAST_PATIENCE_S = 30.0
"""Minimum idle seconds of a job between two phases before its permit passes to another job."""
ROLLOUT, TRAIN = phases.POOLS
PROMISED = {ROLLOUT: ("rollout_s",), TRAIN: ("train_s",)}
"""Profile fields whose sum is the worst-case time of a phase, for phases with such a time."""
PROMISED_COLOCATED = {STEP: ("rollout_s", "train_s", "sync_s")}


class _Lost(RuntimeError):
    """This arbiter has lost its token: its decision is discarded, and its state is reloaded."""


@dataclass(slots=True)
class Known:
    """State of a job that has joined."""

    incarnation: str
    seen: int = 0
    """Number of the job's most recent message."""
    status: str = "joined"
    """Status of the job: `joined`, `placed`, `queued` or `refused`."""
    why: str = ""
    profile: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, list[str]] = field(default_factory=dict)
    """Names of the nodes on which the job runs, by pool, in rank order. If empty, the job has
    named no nodes, and starts on the nodes that the arbiter assigns."""
    nodes: dict[str, list[int]] = field(default_factory=dict)
    """Node numbers of a placed job, by pool."""
    keep: int = 0
    """Number of rollout nodes on which a rollout's tail can continue; 0: a tail keeps all nodes."""
    asked: int = 0
    """Number of the message that requested the job's current (waiting or running) phase."""
    moved: int = 0
    """Number of the message that requested the most recent rollout with a tail that left nodes."""
    phases: int = 0
    """Number of phases that the job has completed."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """Durations of the most recent phases, in seconds, by name of the phase."""

    def describe(self, name: str, said: Mapping[str, Any], measured: Mapping[str, float]) -> None:
        """Set the profile and the nodes from the job's `join` message, `said`. `measured`: values
        measured for this job before, which replace smaller values of the profile.

        Raises:
            TypeError, ValueError, KeyError: the profile is invalid.
        """
        fields = dict(said["profile"])
        self.hosts = _hosts(said.get("hosts"))
        self.keep = int(said.get("keep", 0)) if self.hosts else 0
        self.profile = {"lease_s": min(float(fields.pop("lease_s")), store.MOST_LEASE_S)}
        self.profile |= asdict(MuxJob(id=name, **fields))
        for what, seconds in measured.items():
            self.profile[what] = max(self.profile[what], seconds)

    def refuse(self, why: str) -> None:
        """Refuse the job permanently."""
        self.status, self.why = "refused", why

    def decide(self, made: Decision, nodes: dict[str, list[int]]) -> None:
        """Record whether the job is placed, queued or refused. `nodes`: numbers of the nodes that a
        placed job has named."""
        self.why = made.explain()
        if self.hosts:
            self.why += f" ({_names(self)})"
        if made.group is None:
            self.status, self.nodes = made.kind, {}
        else:
            self.status, self.nodes = "placed", nodes

    def record_message(self, number: int) -> None:
        """Record the number of the job's most recent message."""
        self.seen = number

    def ask(self) -> None:
        """Record that the job's most recent message requests a phase."""
        self.asked = self.seen

    def move(self) -> None:
        """Record that the tail of the running phase has left nodes."""
        self.moved = self.asked

    def end_phase(self) -> None:
        """Count one more completed phase."""
        self.phases += 1

    def reprofile(self, profile: dict[str, Any], why: str) -> None:
        """Replace the profile by a profile with measured times or memory."""
        self.profile, self.why = profile, why


class Arbiter:
    """Arbiter of all jobs' nodes and permits: call `run`, or call `step` repeatedly."""

    def __init__(self, url: str, pools: Mapping[str, NodePool] | None = None) -> None:
        """`pools`: the node pools `rollout` and `train`. Default: the pools stored in Redis."""
        self._url = url
        self._redis = store.connect(url)
        self._token = secrets.token_hex(8)
        self._given = dict(pools) if pools else None
        self._is_loaded = False
        self._locked_at = -math.inf
        self._grace_until = math.inf
        self._cluster = Cluster(NodePool(), NodePool())
        self._mux: dict[int, PhaseMux] = {}
        self._jobs: dict[str, Known] = {}
        self._queue: list[str] = []
        self._measured: dict[str, dict[str, float]] = {}
        """Measured values that exceed the job's profile, by job."""
        self._dirty: dict[str, str | None] = {}
        """Fields of the saved state that the next commit writes; a field with None is deleted."""
        self._rings: dict[str, dict[str, str]] = {}
        """Redis keys that the next commit writes, by job; the commit also notifies these jobs."""

    def run(self) -> None:
        """Run forever. While the server is down or another arbiter has the token, wait."""
        is_away = False
        while True:
            try:
                found = self.step()
                if found is None:
                    time.sleep(IDLE_S)
                elif not found:
                    self._redis.blpop([store.BELL], timeout=IDLE_S)
                is_away = False
            except redis.RedisError as error:
                if not is_away:
                    log.error("arbiter: %s; trying again", store.why(error, self._url))
                is_away, self._is_loaded = True, False
                time.sleep(IDLE_S)

    def step(self) -> bool | None:
        """Process one message of each inbox; return whether there was a message, or None if
        another arbiter has the token."""
        if not self._lock():
            return None
        if not self._is_loaded:
            self._load()
        try:
            return self._round()
        except _Lost as error:
            log.info("arbiter: %s", error)
            self._is_loaded, self._locked_at = False, -math.inf
            return None

    def _round(self) -> bool:
        self._redis.delete(store.BELL)  # the bell then announces only messages sent after this line
        names = sorted(self._redis.smembers(store.JOBS))
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.lindex(store.key(name, "in"), 0)
            pipe.exists(store.key(name, "alive"))
        answers = pipe.execute()
        found = False
        for name, text, is_alive in zip(names, answers[::2], answers[1::2], strict=True):
            now = time.time()
            if text is not None:
                found = True
                self._message(name, text, now)
                self._commit(pop=name)
            elif not is_alive and name in self._jobs and now > self._grace_until:
                log.info("arbiter: job %s has failed: its lease expired", name)
                self._leave(name, now)
                self._commit()
        now = time.time()
        for group, mux in self._mux.items():
            if mux.next_tick(now) < now:
                self._carry_out(group, mux.tick(now))
                self._commit()
        return found

    # ---- the token

    def _lock(self) -> bool:
        """Take or renew the token; return False while another arbiter has it."""
        now = time.monotonic()
        if now - self._locked_at < LOCK_S / 4:
            return True
        milliseconds = int(LOCK_S * 1000)
        if self._redis.get(store.ARBITER) == self._token:
            self._redis.set(store.ARBITER, self._token, px=milliseconds)
        elif self._redis.set(store.ARBITER, self._token, px=milliseconds, nx=True):
            self._is_loaded = False
        else:
            self._locked_at = -math.inf
            return False
        self._locked_at = now
        return True

    def release(self) -> None:
        """Give up the token, so that the next arbiter need not wait."""
        with contextlib.suppress(redis.RedisError):  # if Redis is down, the token expires
            if self._redis.get(store.ARBITER) == self._token:
                self._redis.delete(store.ARBITER)

    # ---- state

    def _load(self) -> None:
        saved = self._redis.hgetall(store.STATE)
        if self._given is not None:
            about = {name: asdict(pool) for name, pool in self._given.items()}
            for pool in about.values():
                pool["memory_gb"] = min(pool["memory_gb"], 1e12)  # JSON has no infinity
            saved["pools"] = store.dumps(about)
            self._redis.hset(store.STATE, "pools", saved["pools"])
            self._given = None
        if "pools" not in saved:
            raise RuntimeError("arbiter: Redis has no pools; start the arbiter with `mux up`")
        about = store.loads(saved["pools"])
        self._cluster = Cluster(NodePool(**about[ROLLOUT]), NodePool(**about[TRAIN]))
        if "cluster" in saved:
            self._cluster.restore(store.loads(saved["cluster"]))
        self._queue = store.loads(saved.get("queue")) or []
        self._jobs, self._mux, self._measured = {}, {}, {}
        now = time.time()
        for name, text in saved.items():
            kind, _, of = name.partition(":")
            if kind == "job":
                self._jobs[of] = Known(**store.loads(text))
            elif kind == "measured":
                self._measured[of] = store.loads(text)
            elif kind == "group":
                self._mux[int(of)] = PhaseMux()
                self._mux[int(of)].restore(store.loads(text), now)
        self._dirty.clear()
        self._rings.clear()
        leases = [k.profile.get("lease_s", LOCK_S) for k in self._jobs.values()]
        self._grace_until = now + max([LOCK_S, *leases])
        self._is_loaded = True
        log.info("arbiter: %d jobs in %d groups", len(self._jobs), len(self._cluster.groups))

    def _commit(self, pop: str | None = None) -> None:
        """Write all changes and remove the first inbox message of job `pop`, in one transaction."""
        pipe = self._redis.pipeline(transaction=True)
        try:
            pipe.watch(store.ARBITER)
            if pipe.get(store.ARBITER) != self._token:
                raise _Lost("its token has expired")
            pipe.multi()
            if pop is not None:
                pipe.lpop(store.key(pop, "in"))
            gone = [f for f, text in self._dirty.items() if text is None]
            kept = {f: text for f, text in self._dirty.items() if text is not None}
            if gone:
                pipe.hdel(store.STATE, *gone)
            if kept:
                pipe.hset(store.STATE, mapping=kept)
            for job, keys in self._rings.items():
                for what, text in keys.items():
                    pipe.set(store.key(job, what), text)
                pipe.rpush(store.key(job, "bell"), "1")
                pipe.ltrim(store.key(job, "bell"), -1, -1)
            pipe.execute()
        except redis.WatchError as error:
            raise _Lost("another arbiter has its token") from error
        except redis.RedisError:
            self._is_loaded = False  # the server may have applied the changes, so reload
            raise
        finally:
            pipe.reset()
        self._dirty.clear()
        self._rings.clear()

    def _note(self, *jobs: str) -> None:
        for name in jobs:
            known = self._jobs.get(name)
            self._dirty[f"job:{name}"] = None if known is None else store.dumps(asdict(known))

    def _note_group(self, group: int) -> None:
        mux = self._mux.get(group)
        self._dirty[f"group:{group}"] = None if mux is None else store.dumps(mux.state())

    def _note_cluster(self) -> None:
        self._dirty["cluster"] = store.dumps(self._cluster.state())
        self._dirty["queue"] = store.dumps(self._queue)

    # ---- messages of jobs

    def _message(self, name: str, text: str, now: float) -> None:
        try:
            said = store.loads(text)
            what, incarnation, number = said["what"], said["incarnation"], int(said["n"])
        except (ValueError, TypeError, KeyError) as error:
            log.error("arbiter: job %s: dropped an invalid message: %s", name, error)
            return
        known = self._jobs.get(name)
        if what == "join":
            if known is None or known.incarnation != incarnation:
                self._join(name, incarnation, number, said, now)
            return
        if known is None or known.incarnation != incarnation:
            self._tell(name, "place", {"incarnation": incarnation, "status": "lost"})
            return
        if number <= known.seen:
            return  # the job sent this message twice
        known.record_message(number)
        self._note(name)
        try:
            self._do(name, known, what, said, now)
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            log.error("arbiter: job %s: dropped a message of kind %r: %s", name, what, error)

    def _do(self, name: str, known: Known, what: str, said: dict[str, Any], now: float) -> None:
        if what == "leave":
            log.info("arbiter: job %s leaves after %d phases", name, known.phases)
            self._leave(name, now)
            return
        if known.status != "placed":
            return
        group = self._cluster.group_of(name).id
        if what == "ask":
            known.ask()
            mux = self._mux[group]
            self._carry_out(group, mux.ask(name, said["pools"], now))
            if name in mux.waiting():
                self._permit(name, (), mux.blockers(name))
        elif what == "done":
            known.end_phase()
            self._carry_out(group, self._mux[group].done(name, now))
            if known.moved != known.asked:  # a rollout whose tail left nodes is slower: no drift
                self._drift(name, known, said, now)
        elif what in ("progress", "freed") and said["of"] != known.asked:
            pass  # the message belongs to a rollout that has ended
        elif what == "progress":
            held = self._mux[group].held(name)
            if known.keep and not set(held) <= set(_rollout_slots(known)):
                raise ValueError("only a phase that holds no train nodes can release rollout nodes")
            todo = self._mux[group].progress(name, int(said["done"]), int(said["wanted"]), now)
            self._carry_out(group, todo)
        elif what == "freed":
            mine = _rollout_slots(known)
            slots = [mine[at] for at in said["nodes"]]
            known.move()
            self._carry_out(group, self._mux[group].freed(name, slots, now))
        else:
            raise ValueError("unknown kind of message")
        if name in self._jobs:
            self._note(name)

    def _drift(self, name: str, known: Known, said: Mapping[str, Any], now: float) -> None:
        """If the job takes more time or memory than its profile says, update the profile. If any
        job would then miss its SLO, or a node would lack memory, the job must join again with
        measured values."""
        phase = str(said.get("phase"))
        recent = known.seconds[phase] = _last(known.seconds.get(phase), said.get("seconds"))
        if switch_s := float(said.get("switch_s", 0.0)):
            switch = f"{phase} switch"
            known.seconds[switch] = _last(known.seconds.get(switch), switch_s)
        found: dict[str, float] = {}
        why = []
        promised = PROMISED_COLOCATED if known.profile.get("colocated") else PROMISED
        if phase in promised:
            parts = {key: known.profile[key] for key in promised[phase]}
            before = sum(parts.values())
            if (seconds := drift.drifted(recent, before)) is not None:
                found |= {key: part * seconds / before for key, part in parts.items()}
                why.append(
                    f"takes {seconds:.2f} s for {phase} but was admitted with {before:.2f} s"
                )
        for pool, gb in dict(said.get("gb", {})).items():
            key, before = f"{pool}_gb", known.profile[f"{pool}_gb"]
            if (more := drift.grown(float(gb), before)) is not None:
                found[key] = more
                why.append(
                    f"uses {gb:.2f} GB of host memory on a {pool} node but was admitted with "
                    f"{before:.2f} GB"
                )
        if not found:
            return
        text = f"job {name} {' and '.join(why)}"
        self._measured[name] = self._measured.get(name, {}) | found
        self._dirty[f"measured:{name}"] = store.dumps(self._measured[name])
        profile = known.profile | found
        if self._cluster.reprofile(_job(profile)):
            known.reprofile(profile, f"{text}; all jobs still meet their SLO")
            self._note_cluster()
            log.info("arbiter: %s", known.why)
            return
        broken = "a job would miss its SLO"
        if not any(key.endswith("_s") for key in found):
            broken = "a node would lack host memory"
        text += f"; {broken}, so it has to join again"
        log.info("arbiter: %s", text)
        self._leave(name, now)
        self._tell(name, "place", {"incarnation": known.incarnation, "status": "lost", "why": text})

    def _join(
        self, name: str, incarnation: str, number: int, said: Mapping[str, Any], now: float
    ) -> None:
        """Add a job that joins. If the job has joined before, remove its old entry first, which
        frees its permit."""
        if name in self._jobs:
            log.info("arbiter: job %s has restarted", name)
            self._leave(name, now)
        known = self._jobs[name] = Known(incarnation, number)
        try:
            known.describe(name, said, self._measured.get(name, {}))
        except (TypeError, ValueError, KeyError) as error:
            known.refuse(f"its profile is invalid: {error}")
            self._say_place(name, known)
            return
        self._place(name, now)

    def _place(self, name: str, now: float) -> bool:
        """Find nodes for a job; return False if the job stays in the queue."""
        known = self._jobs[name]
        job = _job(known.profile)
        runs_on = (len(known.hosts[ROLLOUT]), len(known.hosts[TRAIN])) if known.hosts else None
        nodes: dict[str, list[int]] = {}
        if why := self._cluster.never(job, runs_on):
            made = Decision.without_nodes(job.id, "refused", why)
        elif why := self._meets(job, known):
            made = Decision.without_nodes(job.id, "queued", why)
        elif isinstance(numbered := self._number(known), str):
            made = Decision.without_nodes(job.id, "queued", numbered)
        else:
            nodes = numbered
            on = {pool: tuple(numbers) for pool, numbers in nodes.items()}
            made = self._cluster.admit(job, Nodes(**on) if on else None)
        known.decide(made, nodes)
        if made.group is None:
            if made.kind == "queued" and name not in self._queue:
                self._queue.append(name)
        else:
            self._enter(self._cluster.groups[made.group], job, now)
        log.info("arbiter: %s", known.why)
        self._note_cluster()
        self._say_place(name, known, made)
        return made.kind != "queued"

    def _enter(self, group: JobGroup, job: MuxJob, now: float) -> None:
        mux = self._mux.setdefault(group.id, PhaseMux())
        known = self._jobs[job.id]
        nodes: Mapping[str, Sequence[int]] = known.nodes or {
            ROLLOUT: group.pinned[job.id],
            TRAIN: group.train[: job.train_nodes],
        }
        slots = {pool: tuple(f"{pool[0]}{n}" for n in numbers) for pool, numbers in nodes.items()}
        member = Member(
            job=job.id,
            slots=slots,
            keep=known.keep,
            patience_s=LEAST_PATIENCE_S + job.solo_s,
        )
        mux.join(member, now, group.order())
        self._note_group(group.id)

    def _meets(self, job: MuxJob, known: Known) -> str:
        """If a job has to wait because it shares a node with another job, return the reason, else
        "". Two jobs conflict if one job uses a node for rollouts and the other for training, and
        one of the jobs holds both pools for a whole step."""
        for name, other in self._jobs.items():
            if other is known or not (other.nodes and other.hosts and known.hosts):
                continue
            is_colocated = job.colocated, bool(other.profile["colocated"])
            if not any(is_colocated):
                continue
            for mine, theirs in ((ROLLOUT, TRAIN), (TRAIN, ROLLOUT)):
                node = min(set(known.hosts[mine]).intersection(other.hosts[theirs]), default=None)
                held = {mine, TRAIN, ROLLOUT} if is_colocated[0] else {mine}
                held &= {theirs, TRAIN, ROLLOUT} if is_colocated[1] else {theirs}
                if node is None or any(_share(known, other, pool) for pool in held):
                    continue
                return (
                    f"it uses {node} as a {mine} node but job {name} uses it as a {theirs} node, "
                    f"so they cannot alternate; start it on the nodes of job {name}, or it waits "
                    "until that job leaves"
                )
        return ""

    def _number(self, known: Known) -> dict[str, list[int]] | str:
        """Return numbers for the nodes that a job has named. A node that other jobs have also
        named keeps its number. Other nodes get unused numbers, preferably of nodes without a job.
        If there are too few numbers, return the reason."""
        found = {}
        for pool, names in known.hosts.items():
            bound, free = _bound(self._jobs, pool), self._cluster.free(pool == ROLLOUT)
            count = self._cluster.pools[pool == TRAIN].nodes or 0
            others = sorted(set(range(count)).difference(bound.values(), free))
            new = [name for name in names if name not in bound]
            if len(new) > len(free) + len(others):
                return (
                    f"its ranks are on the {pool} nodes {', '.join(new)} but the nodes of the pool "
                    f"are {', '.join(sorted(bound)) or f'only {count}'}; start it there, or it "
                    "waits until their jobs leave"
                )
            bound |= zip(new, (*free, *others), strict=False)
            found[pool] = [bound[name] for name in names]
        return found

    def _say_place(self, name: str, known: Known, made: Decision | None = None) -> None:
        about: dict[str, Any] = {
            "incarnation": known.incarnation,
            "status": known.status,
            "why": known.why,
        }
        if made is not None and made.group is not None:
            about |= {"group": made.group, "rollout": made.rollout, "train": made.train}
        self._tell(name, "place", about)
        self._note(name)

    def _leave(self, name: str, now: float) -> None:
        known = self._jobs.pop(name)
        self._note(name)
        if name in self._queue:
            self._queue.remove(name)
        if known.status == "placed":
            group = self._cluster.group_of(name).id
            todo = self._mux[group].leave(name, now)
            if self._cluster.leave(name) is None:
                del self._mux[group]
            self._carry_out(group, todo)
            waiting, self._queue = self._queue, []
            for other in waiting:  # queued jobs are placed in the order of arrival
                self._place(other, now)
        self._note_cluster()

    def _carry_out(self, group: int, todo: list[Todo]) -> None:
        self._note_group(group)
        for t in todo:
            if isinstance(t, Grant):
                self._permit(t.job, t.slots, [])
            else:
                self._ask_to_move(t)

    def _ask_to_move(self, todo: Migrate) -> None:
        """Ask a job to move the tail of its rollout off some nodes (indices of the job's nodes)."""
        known = self._jobs[todo.job]
        mine = _rollout_slots(known)
        about = {"incarnation": known.incarnation, "n": known.asked}
        self._tell(todo.job, "move", about | {"leave": [mine.index(s) for s in todo.free]})

    def _permit(self, name: str, slots: tuple[str, ...], behind: list[str]) -> None:
        """Write the permit for the phase that the job requested most recently. If `slots` is
        empty, the job has to wait for the jobs in `behind`."""
        known = self._jobs[name]
        about = {"incarnation": known.incarnation, "n": known.asked}
        self._tell(name, "permit", about | {"slots": slots, "behind": behind})

    def _tell(self, job: str, what: str, value: Any) -> None:
        self._rings.setdefault(job, {})[what] = store.dumps(value)


def _last(before: list[float] | None, seconds: Any) -> list[float]:
    """Append one duration and keep the `drift.WINDOW` most recent durations."""
    return [*(before or []), float(seconds or 0.0)][-drift.WINDOW :]


def _hosts(said: Any) -> dict[str, list[str]]:
    """Return the job's node names by pool. If a name is repeated or invalid, raise ValueError."""
    if not said:
        return {}
    found = {pool: list(said[pool]) for pool in (ROLLOUT, TRAIN)}
    for names in found.values():
        if len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
            raise ValueError(f"node names {names}: must be different strings")
    return found


def _bound(jobs: Mapping[str, Known], pool: str) -> dict[str, int]:
    """Return the node numbers of the pool by node name, for nodes that placed jobs have named."""
    return {
        name: number
        for known in jobs.values()
        if known.nodes
        for name, number in zip(known.hosts[pool], known.nodes[pool], strict=True)
    }


def _share(one: Known, other: Known, pool: str) -> bool:
    """Return whether two jobs share a node of the pool, so that their phases there alternate."""
    return not set(one.hosts[pool]).isdisjoint(other.hosts[pool])


def _rollout_slots(known: Known) -> list[str]:
    """Return the slot names of the rollout nodes that the job has named, in rank order. If the job
    has named no nodes, return an empty list."""
    return [f"{ROLLOUT[0]}{n}" for n in known.nodes.get(ROLLOUT, ())]


def _names(known: Known) -> str:
    return "; ".join(f"{pool} on {', '.join(known.hosts[pool])}" for pool in (ROLLOUT, TRAIN))


def _job(profile: Mapping[str, Any]) -> MuxJob:
    return MuxJob(**{k: v for k, v in profile.items() if k != "lease_s"})


def status(url: str) -> dict[str, Any]:
    """Return the state of the cluster from Redis, for display and for JSON.

    Raises:
        redis.RedisError: the server does not answer.
    """
    client = store.connect(url)
    saved = client.hgetall(store.STATE)
    about = store.loads(saved.get("pools")) or {
        ROLLOUT: asdict(NodePool()),
        TRAIN: asdict(NodePool()),
    }
    cluster = Cluster(NodePool(**about[ROLLOUT]), NodePool(**about[TRAIN]))
    if "cluster" in saved:
        cluster.restore(store.loads(saved["cluster"]))
    jobs = {f[4:]: Known(**store.loads(t)) for f, t in saved.items() if f.startswith("job:")}
    now = time.time()
    groups = []
    for group in cluster:
        mux = PhaseMux()
        mux.restore(store.loads(saved.get(f"group:{group.id}")) or [], now)
        members = []
        for name in group.order():
            job, known = group.jobs[name], jobs[name]
            waits = mux.waiting().get(name)
            members.append(
                {
                    "job": name,
                    "holds": list(mux.held(name)),
                    "waits_s": None if waits is None else now - waits,
                    "behind": mux.blockers(name) if waits is not None else [],
                    "phases": known.phases,
                    "slack": job.limit_s / group.period_s - 1,
                    "seconds": known.seconds,
                }
            )
        groups.append(
            {
                "group": group.id,
                "rollout": sorted(group.load),
                "train": list(group.train),
                "names": {pool: _bound(jobs, pool) for pool in (ROLLOUT, TRAIN)},
                "period_s": group.period_s,
                "host_gb": dict(zip((ROLLOUT, TRAIN), group.host_gb, strict=True)),
                "utilization": {
                    ROLLOUT: sum(j.busy_s[0] * j.rollout_nodes for j in group.jobs.values())
                    / (group.period_s * len(group.load)),
                    TRAIN: sum(j.busy_s[1] for j in group.jobs.values()) / group.period_s,
                },
                "jobs": members,
            }
        )
    return {
        "arbiter": client.exists(store.ARBITER) == 1,
        "nodes": {
            pool: {"used": used, "of": about[pool]["nodes"], "host_gb": about[pool]["memory_gb"]}
            for pool, used in zip((ROLLOUT, TRAIN), cluster.nodes, strict=True)
        },
        "groups": groups,
        "others": [
            {"job": name, "status": k.status, "why": k.why}
            for name, k in jobs.items()
            if k.status != "placed"
        ],
    }
