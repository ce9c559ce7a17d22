"""Search layouts, splits and systems for a model on a cluster, or for a recorded run, and say which
keys to set: `python -m rlcore sim advise`."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlcore.config import resolve
from rlcore.config.schema import Config
from rlcore.sim import ladder, splits
from rlcore.sim.cluster import Summary, simulate
from rlcore.sim.job import SimJob, config
from rlcore.trainer import memory
from rlcore.utils.errors import ConfigError

SIZES = (1, 2, 4, 8)
STEPS = 10
"""Simulated steps of an arm: two periods of tail batching."""
ALPHAS = (1, 2)
BEST = 3
LEAST_GAIN = 1.01
"""Contribution of a system up to which it is not worth switching on."""
NEAR = 1.03
"""Ratio of the seconds of a step up to which smaller model-parallel groups are taken: they leave
more splits to --mode async and halves to --mode stream."""


PLACEHOLDERS = ("model.path", "data.train", "eval.every", "run.seed")
"""Keys of a simulated job that say nothing about a real run."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A composition of systems, and what it would give."""

    job: SimJob
    keys: tuple[str, ...]
    """Keys to set besides those of the base job."""
    found: Summary
    contributions: dict[str, float]
    """What each system contributes: seconds of a step without it over seconds with it."""

    @property
    def samples_per_s(self) -> float:
        cfg = self.job.cfg
        return cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt / self.found.seconds

    @property
    def is_on_policy(self) -> bool:
        return self.job.cfg.select.mode != "async"


@dataclass(frozen=True, slots=True)
class Composition:
    """Systems to try together: keys by the name of the system that they switch on."""

    systems: dict[str, tuple[str, ...]]

    @property
    def name(self) -> str:
        return " + ".join(self.systems) or "synchronous"

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.systems.values() for key in keys)

    def without(self, name: str) -> str:
        """Return the name of the composition without one of its systems."""
        return Composition({n: keys for n, keys in self.systems.items() if n != name}).name


# ---- layouts


def gigabytes(job: SimJob) -> float:
    """Return the GB that the memory plan needs on the GPU that needs most. Raise ConfigError if
    that is more than the GPU has."""
    gpu_bytes = job.gpu.memory_gb * memory.GB
    plans = memory.plans(job.cfg, job.hf, job.gpus, gpu_bytes=gpu_bytes)
    for plan in plans:
        problems = (*plan.problems, memory.too_large(plan, gpu_bytes))
        if found := [line for line in problems if line]:
            raise ConfigError(found[0])
    return max(plan.total(plan.worst) for plan in plans) / memory.GB


def layouts(job: SimJob) -> Iterator[tuple[str, ...]]:
    """Yield the keys of all layouts of the learner to try, on whole nodes as far as possible."""
    node, experts = job.gpu.per_node, (1, 8) if job.hf.num_experts else (1,)
    recomputed = ("none", "selective", "full")
    for tp, pp, cp, ep, recompute in itertools.product(
        SIZES, SIZES[:3], SIZES, experts, recomputed
    ):
        if tp <= node and job.gpus % (tp * pp * cp) == 0:
            sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "recompute": recompute}
            yield tuple(word for k, v in sizes.items() for word in (f"--train.{k}", str(v)))


def with_layout(job: SimJob) -> SimJob:
    """Return the job with the layout of the learner that fits into memory and trains fastest, or
    nearly so (`NEAR`) in smaller groups.

    Raises:
        ConfigError: no layout fits; the error says what lacks in the last one.
    """
    drawn = job.drawn()
    fitting: list[tuple[float, SimJob]] = []
    why = "no layout divides the GPUs"
    for keys in layouts(job):
        try:
            made = job.with_("layout", *keys)
            gigabytes(made)
        except ConfigError as error:
            why = str(error)
            continue
        fitting.append((made.train_s(drawn) + made.training.sync_s, made))
    if not fitting:
        raise ConfigError(f"no layout of {job.gpus} x {job.gpu.name} fits: {why}")
    rollout_s = simulate(job, 1).phases["gen"]
    most = NEAR * (rollout_s + min(seconds for seconds, _ in fitting))
    near = [made for seconds, made in fitting if rollout_s + seconds <= most]
    return max(near, key=lambda made: made.training.dp)


def with_engines(job: SimJob, say: Callable[[str], None]) -> SimJob:
    """Return the job with engines of the size that samples fastest, and with the size of their
    caches. Raise ConfigError if no size has room for the weights and a request."""
    best, why = None, "no size divides the GPUs"
    for tp in SIZES:
        try:
            made = job.with_("engines", "--rollout.tp", str(tp))
        except ConfigError as error:
            why = str(error)
            continue
        seconds = simulate(made, 2).phases["gen"]
        say(f"engines of {tp}: {seconds:.3g} s")
        if best is None or seconds < best[0]:
            best = seconds, made
    if best is None:
        raise ConfigError(why)
    room = int(best[1].engine(best[1].cfg.rollout.tp).cache_tokens)
    return best[1].with_("engines", "--rollout.kv_cache_tokens", str(room))


# ---- systems


def arms(job: SimJob, drafts: tuple[str, ...] = ladder.DRAFTS) -> Iterator[Composition]:
    """Yield all compositions that may help: on-policy ones, and asynchronous ones with the split
    that the planner proposes. `drafts`: keys that switch drafts on."""
    on_policy = {k: v for k, v in ladder.ON_POLICY.items() if k != "planner"} | {"drafts": drafts}
    yield from _compositions({}, on_policy)
    for alpha in ALPHAS:
        try:
            ranks = splits.by_planner(job, alpha).rollout_gpus
        except ConfigError:  # the GPUs cannot be split
            continue
        keys = ("--mode", "async", "--async.alpha", str(alpha))
        mode = {f"async {alpha}": (*keys, "--cluster.rollout_ranks", str(ranks))}
        yield from _compositions(mode, {"queue": ladder.QUEUE, "drafts": drafts})


def _compositions(
    mode: Mapping[str, tuple[str, ...]], options: Mapping[str, tuple[str, ...]]
) -> Iterator[Composition]:
    for switches in itertools.product((False, True), repeat=len(options)):
        on = zip(options.items(), switches, strict=True)
        yield Composition({**mode} | {name: keys for (name, keys), is_on in on if is_on})


def search(
    job: SimJob, say: Callable[[str], None], drafts: tuple[str, ...] = ladder.DRAFTS
) -> list[Advice]:
    """Return all compositions for a job, the fastest first. What validation or the memory plan
    refuses is left out. `drafts`: keys that switch drafts on."""
    found: dict[str, tuple[Composition, SimJob, Summary]] = {}
    for arm in arms(job, drafts):
        try:
            made = job.with_(arm.name, *arm.keys)
            if not job.measured_training:
                gigabytes(made)
            summary = simulate(made, STEPS)
        except ConfigError as error:
            say(f"{arm.name}: left out: {error}")
            continue
        found[arm.name] = arm, made, summary
        say(f"{arm.name}: {summary.seconds:.3g} s")
    out = []
    for arm, made, summary in sorted(found.values(), key=lambda x: x[2].seconds):
        contributions = {
            name: found[rest][2].seconds / summary.seconds
            for name in arm.systems
            if (rest := arm.without(name)) in found
        }
        out.append(Advice(made, arm.keys, summary, contributions))
    return out


def best(found: Sequence[Advice]) -> list[Advice]:
    """Return the `BEST` fastest compositions in which every system contributes. The fastest
    on-policy one is always among them."""
    useful = [x for x in found if all(gain > LEAST_GAIN for gain in x.contributions.values())]
    chosen = useful[:BEST]
    if not any(advice.is_on_policy for advice in chosen):
        chosen[-1] = next(advice for advice in useful if advice.is_on_policy)
    return chosen


def keys_of(job: SimJob) -> str:
    """Return all keys of a job that differ from their defaults, as words of a command line."""
    usual = resolve.keys(replace(Config(), algo=config().algo))
    found = {
        key.removeprefix("select."): value
        for key, value in resolve.keys(job.cfg).items()
        if key not in PLACEHOLDERS and value != usual.get(key)
    }
    return " ".join(resolve.words(found))
