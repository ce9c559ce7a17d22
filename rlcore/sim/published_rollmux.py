"""Published results of RollMux for comparison with simulations, and sources of our constants.

The paper is arXiv 2512.11306 and its OSDI version (Weave). If a value is not published, we assume
one. An assumed value is not fitted to a table unless marked as fitted.
"""

from dataclasses import dataclass

# ---- pools

H20, H800 = 8 * 1.85, 8 * 5.28
"""Published price of a node with eight GPUs in $ per hour, for H20 and H800."""
NODE_GB = 1500.0
"""Host memory of a node in GB (our assumption; the paper has 1 to 2 TB)."""
WARM_S = {"rollout": 1.9, "train": 5.9}
"""Seconds of a warm start by pool. The OSDI version has 0.9 to 1.9 and 4.1 to 5.9; we use the
larger values, since admission must hold in the worst case."""
COLD_S = {"v1": 80.0, "OSDI": 135.8}
"""Published maximum seconds of a cold start (no states in host memory), by version of the paper."""

# ---- the nine profiles

SHAPES = {"balanced": 1 / 2, "rollout-heavy": 3 / 4, "train-heavy": 1 / 3}
"""Rollout time as a share of rollout plus training time, in the worst case, by shape of the job.
Shapes are from RollMux's paper. Shares are our assumption, since durations are not published."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size class of a job (our assumption)."""

    seconds: tuple[float, float]
    """Range of the seconds of rollout plus training per iteration, uniformly distributed."""
    nodes: tuple[int, ...]
    """Possible numbers of nodes in each pool."""
    gb: float
    """Host memory in GB that the job occupies on each node."""


SIZES = {
    "S": Size((100, 250), (1,), 150),
    "M": Size((250, 600), (1, 2), 300),
    "L": Size((600, 1100), (2,), 490),  # paper: a phase of 32B takes up to 490 GB
}
SLO = (1.0, 2.0)
"""Published range of a job's SLO (maximum slow-down of an iteration), drawn uniformly."""
MEAN_HOURS, SIGMA = 27.9, 1.0
"""Duration of a job alone: published mean in hours, and log-normal width (our assumption)."""

# ---- traces


@dataclass(frozen=True, slots=True)
class JobTrace:
    """Settings for a trace of jobs that arrive and leave."""

    jobs: int
    hours: float
    """Hours in which jobs arrive. Poisson arrivals are our assumption; no trace is published."""
    sizes: dict[str, float]
    """Relative frequencies of the size classes."""


TRACE_200 = JobTrace(200, 336, {"S": 0.80, "M": 0.17, "L": 0.03})
"""Trace of 200 jobs in two weeks. Sizes are fitted on the published cost of all jobs alone: 940 $/h
/ (200 x 27.9 h / 370 h) is 62.3 $/h per job, 1.09 times the cost of 8 H20 plus 8 H800."""
TRACE_300 = JobTrace(300, 580, {"S": 1.0, "M": 1.0, "L": 1.0})
WINDOW_HOURS = 370
"""Hours of the published measurement: 188,800 $ at 510 $/h."""
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
"""Published cost relative to the optimal cost: minimum and maximum over the workloads."""
SLO_KEPT = {"RollMux": (1.0, 1.0), "random": (0.37, 0.58), "greedy": (0.42, 0.61)}
DECISION_MS = 591
"""Published milliseconds of a placement decision in a cluster with 2,000 jobs."""

# ---- micro-benchmarks


@dataclass(frozen=True, slots=True)
class JobKind:
    """Kind of job in RollMux's micro-benchmarks."""

    rollout_per_train: float
    """Ratio of rollout to training time. D (2.5) and E (6) are from RollMux's paper. A and C are
    our assumption, balanced and train-heavy as in `SHAPES`."""
    nodes: int = 1
    """Number of nodes in each pool, from RollMux's paper."""
    train_scaling: float = 0.0


KINDS = {
    "A": JobKind(1.0),
    "C": JobKind(0.5, nodes=2),
    "D": JobKind(2.5, train_scaling=1.0),  # assumed: in a group with C, D trains on all 16 H800
    "E": JobKind(6.0),
}
SOLO_S = 300.0
"""Seconds of an iteration of a job alone (assumed; in the paper, a phase takes 50 to 900 s)."""
MODEL, LENGTHS, PROMPTS, SAMPLES = "7B", "8k", 128, 8
"""Workload whose lengths make iterations vary (RollPacker's figure 11; our assumption)."""


@dataclass(frozen=True, slots=True)
class Micro:
    """A group of jobs in the micro-benchmarks, pinned to nodes as in RollMux's paper."""

    jobs: str
    pins: tuple[tuple[int, ...], ...]
    train: int
    over_solo: tuple[float, float]
    """Published cost efficiency relative to the jobs running alone: arXiv v1, OSDI version."""
    over_colocated: float
    price: float
    """Cost of the jobs alone divided by the cost of the group: the maximum possible gain."""


MICRO = {
    "A+A": Micro("AA", ((0,), (0,)), 1, (1.82, 1.82), 1.468, 2.0),
    "D+D+E": Micro("DDE", ((0,), (1,), (2,)), 1, (2.04, 1.90), 1.299, 1.975),
    "C+D+D": Micro("CDD", ((0, 1), (0,), (1,)), 2, (2.11, 1.99), 1.661, 2.0),
}
OVER_GAVEL = (1.43, 1.78)
"""Published minimum and maximum cost efficiency of the groups relative to Gavel+ (OSDI version)."""
SLOWDOWN = (1.016, 1.098)
"""Published minimum and maximum slowdown of a job (OSDI version; arXiv v1: 1.05 to 1.09)."""
NAIVE_SLOWDOWN = (1.40, 1.64)
"""Published slowdown of two rollout-heavy jobs that share nodes without a fixed order of phases."""

MIGRATION = (1.06, 1.28)
"""Published minimum and maximum speed-up by tail migration; the maximum is for 14B with 8k."""
MIGRATION_MODELS = (("7B", "8k"), ("14B", "8k"), ("14B", "16k"), ("32B", "32k"))
"""Models and length caps for migration: 14B with 8k is RollMux's, the others are our assumption."""
SYNC = {8: (7.87, 8.33), 16: (2.62, 2.75)}
"""Published minimum and maximum speed-up of a weight update in two stages, by number of GPUs on
either side. The baseline's algorithm is not published."""
SLOW_GBS, FAST_GBS = 20 / 8, 400 / 8
"""Published speed in GB/s of the Ethernet between the clusters, and of InfiniBand inside them."""
COLD_LOSS = 0.45
"""Published share of throughput lost if job states do not stay in host memory (OSDI version)."""
WARM_RATIO = {"v1": 48.0, "OSDI": 71.5}
