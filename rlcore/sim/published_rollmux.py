"""Published results of RollMux for comparison with simulations, and the origin of our constants.

[paper]: arXiv 2512.11306 and its OSDI version (Weave). [ours]: our assumption for a value that is
not published; not fitted to a table unless marked as fitted.
"""

from dataclasses import dataclass

# ---- pools

H20, H800 = 8 * 1.85, 8 * 5.28
"""Price in $ of a node of eight GPUs for an hour; [paper]."""
NODE_GB = 1500.0
"""Host memory of a node in GB; [ours], as [paper] has 1 to 2 TB."""
WARM_S = {"rollout": 1.9, "train": 5.9}
"""Seconds of a warm start by pool; [paper] OSDI: 0.9 to 1.9 and 4.1 to 5.9. We use the larger
values, since admission must hold in the worst case."""
COLD_S = {"v1": 80.0, "OSDI": 135.8}
"""Maximum seconds of a cold start, without states in host memory; [paper]."""

# ---- the nine profiles

SHAPES = {"balanced": 1 / 2, "rollout-heavy": 3 / 4, "train-heavy": 1 / 3}
"""Ratio rollout / (rollout + train) in the worst case; [ours]. The names are [paper]'s, but the
durations are not published."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size class of a job; [ours]."""

    seconds: tuple[float, float]
    """Range of the seconds of rollout plus train, uniformly distributed."""
    nodes: tuple[int, ...]
    """Choices for the number of nodes in each pool."""
    gb: float
    """Host memory in GB on each node."""


SIZES = {
    "S": Size((100, 250), (1,), 150),
    "M": Size((250, 600), (1, 2), 300),
    "L": Size((600, 1100), (2,), 490),  # [paper] a phase of 32B takes up to 490 GB
}
SLO = (1.0, 2.0)
"""Range of the SLO, uniformly distributed; [paper]."""
MEAN_HOURS, SIGMA = 27.9, 1.0
"""Duration of a job alone: the mean is from [paper]; the log-normal form and width are [ours]."""

# ---- traces


@dataclass(frozen=True, slots=True)
class JobTrace:
    """Settings for a trace of jobs that arrive and leave."""

    jobs: int
    hours: float
    """Hours in which the jobs arrive (Poisson process); [ours], the traces are not published."""
    sizes: dict[str, float]
    """Weights of the size classes."""


TRACE_200 = JobTrace(200, 336, {"S": 0.80, "M": 0.17, "L": 0.03})
"""Trace of two weeks. The sizes are fitted on the cost of all jobs running alone: 940 $/h / (200 x
27.9 h / 370 h) is 62.3 $/h a job, 1.09 times the cost of 8 H20 and 8 H800."""
TRACE_300 = JobTrace(300, 580, {"S": 1.0, "M": 1.0, "L": 1.0})
WINDOW_HOURS = 370
"""Hours of the measured window; from [paper]: 188,800 $ at 510 $/h."""
TRACE_200_TOLD = {
    "RollMux, $/h": 510,
    "solo, $/h": 940,
    "colocated, $/h": 710,
    "solo / RollMux": 1.84,
    "colocated / RollMux": 1.38,
    "SLO kept": 1.0,
    "fewer bubbles, rollout": 0.244,
    "fewer bubbles, train": 0.431,
    "peak H20": 216,
    "peak H800": 152,
    "peak H20, solo": 328,
    "peak H800, solo": 328,
}
"""Published results for `TRACE_200`. We read the published reduction of bubbles as the share of
idle time that is removed."""

OVER_OPTIMUM = {"RollMux": (1.01, 1.12), "random": (1.72, 2.00), "greedy": (1.38, 1.89)}
"""Ratio of the cost to the optimal cost: minimum and maximum over the workloads."""
SLO_KEPT = {"RollMux": (1.0, 1.0), "random": (0.37, 0.58), "greedy": (0.42, 0.61)}
DECISION_MS = 591
"""Milliseconds of a placement decision in a cluster with 2,000 jobs."""

# ---- micro-benchmarks


@dataclass(frozen=True, slots=True)
class JobKind:
    """Kind of job in the micro-benchmarks."""

    rollout_per_train: float
    """Ratio of rollout to training time. D and E: 2.5 and 6, [paper]. A and C: [ours], balanced and
    train-heavy as in `SHAPES`, since nothing is published."""
    nodes: int = 1
    """Number of nodes in each pool; [paper]."""
    train_scaling: float = 0.0


KINDS = {
    "A": JobKind(1.0),
    "C": JobKind(0.5, nodes=2),
    "D": JobKind(2.5, train_scaling=1.0),  # [ours] in a group with C, D trains on all 16 H800
    "E": JobKind(6.0),
}
SOLO_S = 300.0
"""Seconds of an iteration of a job alone; [ours]. [paper]: a phase takes 50 to 900 s."""
MODEL, LENGTHS, PROMPTS, SAMPLES = "7B", "8k", 128, 8
"""Workload from which iterations vary: the generator of RollPacker's figure 11; [ours]."""


@dataclass(frozen=True, slots=True)
class Micro:
    """A group of jobs, pinned to nodes as in the paper."""

    jobs: str
    pins: tuple[tuple[int, ...], ...]
    train: int
    over_solo: tuple[float, float]
    """Cost efficiency relative to the jobs running alone, in arXiv v1 and OSDI."""
    over_colocated: float
    price: float
    """Cost of the jobs alone over the cost of the group: the maximum possible gain; [ours]."""


MICRO = {
    "A+A": Micro("AA", ((0,), (0,)), 1, (1.82, 1.82), 1.468, 2.0),
    "D+D+E": Micro("DDE", ((0,), (1,), (2,)), 1, (2.04, 1.90), 1.299, 1.975),
    "C+D+D": Micro("CDD", ((0, 1), (0,), (1,)), 2, (2.11, 1.99), 1.661, 2.0),
}
OVER_GAVEL = (1.43, 1.78)
"""Minimum and maximum gain over Gavel+ of the three groups; OSDI."""
SLOWDOWN = (1.016, 1.098)
"""Minimum and maximum slowdown of a job; OSDI. v1: 1.05 to 1.09."""
NAIVE_SLOWDOWN = (1.40, 1.64)
"""Slowdown of two rollout-heavy jobs that share nodes without a fixed order."""

MIGRATION = (1.06, 1.28)
"""Minimum and maximum gain of migration; the maximum is for 14B with 8k lengths."""
MIGRATION_MODELS = (("7B", "8k"), ("14B", "8k"), ("14B", "16k"), ("32B", "32k"))
"""Models and lengths of the migration results: the second is [paper], the others are [ours]."""
COLD_LOSS = 0.45
"""Share of throughput lost if states do not stay in host memory; [paper] OSDI."""
WARM_RATIO = {"v1": 48.0, "OSDI": 71.5}
