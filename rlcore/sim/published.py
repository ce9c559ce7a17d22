"""Published results of RollPacker for comparison with simulations, and sources of our constants.

Constants are not fitted to a table unless marked as fitted. The paper is arXiv 2509.21009 and its
submitted version; the code is the artifact Farrrrland/RollPacker. In notes, [A8] stands for the
length generator in workload.py.
"""

from dataclasses import dataclass

PROMPTS, SAMPLES = 128, 8
"""Prompts per step and responses per prompt (RollPacker's paper, section 6: P0 and R0)."""

# ---- figure 11


@dataclass(frozen=True, slots=True)
class Column:
    """Column of figure 11 of RollPacker's paper: rollout seconds of a model at one length cap."""

    system: str
    """Key of `SYSTEMS`. Its length generator is fitted on the ratios of this column, except for
    8k."""
    baseline_s: float
    fitted: bool
    """Whether the length generator is fitted on the ratios of this column. If so, agreement is no
    prediction; it only shows that one generator can reproduce all these ratios."""
    note: str = ""


FIGURE_11 = {
    "16k": Column("14B/16k", 277, True),
    "32k": Column(
        "32B/32k",
        673,
        True,
        "32k: R 1.125, R 1.25 and P 1.125 are not reproduced: the paper says that R 1.125 and 1.25 "
        "save 2 % and P 1.125 5 %, then R 1.5 and P 1.25 60 %; no generator of this form has that "
        "step",
    ),
    "8k": Column(
        "7B/8k",
        82,
        False,
        "8k: the generator is that of 16k with the cap at 8k, nothing fitted; that run does not "
        "wait for its tail alone [A8]",
    ),
}
FIGURE_11_ARMS = {
    # name in figure 11: (tail.eta_prompts, tail.eta_samples)
    "baseline": (1.0, 1.0),
    "R 1.125": (1.0, 1.125),
    "R 1.25": (1.0, 1.25),
    "R 1.5": (1.0, 1.5),
    "P 1.125": (1.125, 1.0),
    "P 1.25": (1.25, 1.0),
    "P 1.5": (1.5, 1.0),
    "both 1.25": (1.25, 1.25),
}
FIGURE_11_SECONDS = {
    # mean seconds of a rollout round, long rounds included
    "baseline": {"8k": 82, "16k": 277, "32k": 673},
    "R 1.125": {"8k": 77, "16k": 260, "32k": 658},
    "R 1.25": {"8k": 71, "16k": 232, "32k": 655},
    "R 1.5": {"8k": 54, "16k": 115, "32k": 265},
    "P 1.125": {"8k": 77, "16k": 244, "32k": 636},
    "P 1.25": {"8k": 72, "16k": 169, "32k": 259},
    "P 1.5": {"8k": 60, "16k": 143, "32k": 279},
    "both 1.25": {"8k": 47, "16k": 88, "32k": 170},
}

# ---- whole steps


@dataclass(frozen=True, slots=True)
class System:
    """Model in section 6 of RollPacker's paper, with its H800 cluster, layouts and lengths."""

    model: str
    gpus: int
    tp: int
    """GPUs of an engine."""
    lengths: str
    """Name of the generator in `workload.GENERATORS`."""
    layout: tuple[int, int, int]
    """TP, PP and CP of the learner."""


SYSTEMS = {
    "7B/8k": System("7B", 16, 1, "8k", (2, 1, 1)),
    "14B/16k": System("14B", 32, 2, "16k", (2, 2, 2)),
    "32B/32k": System("32B", 64, 2, "32k", (4, 1, 4)),
}
UTILIZATION = 0.85
"""Share of GPU memory that an engine may use (`gpu_memory_utilization` in RollPacker's code)."""

ROLLOUT_S = {"7B/8k": 82, "14B/16k": 277, "32B/32k": 673}
"""Published seconds of a rollout of veRL (figure 11)."""
TRAINING_S = {"14B/16k": 277 / 0.72 * 0.23}
"""Published seconds in which veRL trains: 88 s, as training takes 23 % of a step and rollout 72 %
(table 1, math), and a rollout 277 s (figure 11). Table 1's rows for code and judge give 88 and
86 s."""

# ---- rewards

MATH_WORKERS = 32
"""Number of workers of the math reward (`world_size` in RollPacker's code)."""
MATH_S = 277 / 0.72 * 0.05 * MATH_WORKERS / (PROMPTS * SAMPLES)
"""Seconds to score a math response (0.6), fitted on table 1: scoring takes 5 % of a step."""
SANDBOX_QUANTILES = (
    (0.0, 0.026),
    (0.01, 0.027),
    (0.25, 0.029),
    (0.5, 0.031),
    (0.75, 0.036),
    (0.9, 0.078),
    (0.95, 0.156),
    (0.99, 9.14),
    (1.0, 21.05),
)
"""Run time quantiles of 2,001 prompts' reference programs, in s (code: `data/time_list.json`)."""
LOOPING = 0.05
"""Share of programs that loop: about 5 % reach the timeout (RollPacker's paper, section 4.3)."""
SANDBOX_WORKERS = MATH_WORKERS
SANDBOX_TIMEOUT_S = 30.0
"""Timeout of a program in seconds (RollPacker's paper, section 4.3)."""
JUDGE_GPUS = 0.25
"""Share of all GPUs that a dedicated judge has (RollPacker's paper, section 4.3)."""
JUDGE_UTILIZATION = 0.226
"""Share of a GPU's peak FLOP/s that a judge reaches (RollPacker's paper, figure 7b)."""

TABLE_1 = {
    # shares of a step of veRL, 14B/16k: rollout, reward, training
    "math": (0.72, 0.05, 0.23),
    "code": (0.66, 0.13, 0.21),
    "judge": (0.71, 0.07, 0.22),
}

TABLE_2: dict[str, dict[str, tuple[float, ...]]] = {
    # values of the submitted version, then of arXiv v1 if different
    "7B/8k": {"tail": (1.30,), "reward": (2.01,), "planner": (2.01, 2.02), "trainer": (2.03,)},
    "14B/16k": {
        "tail": (1.48,),
        "reward": (1.99, 1.76),
        "planner": (2.02, 1.95),
        "trainer": (2.22,),
    },
    "32B/32k": {"tail": (2.21,), "reward": (2.48,), "planner": (2.52,), "trainer": (2.56,)},
}
"""Published speed-ups over veRL; each entry includes the techniques of the entries before it."""
OVER_RLHFUSE = {"7B/8k": 1.14, "14B/16k": 1.68, "32B/32k": 2.24}

FIGURE_10C = {"7B/8k": (106, 129), "14B/16k": (134, 302), "32B/32k": (261, 771)}
"""Published seconds of a short and of a long step, by model and length cap."""

ASYNC_REWARD = {"7B/8k": 1.48, "14B/16k": 1.35, "32B/32k": 1.18}
"""Published speed-up by scoring responses as they end, over scoring all after the rollout."""
ADAPTIVE_TIMEOUT = 1.6
"""Published speed-up of code rewards by timeouts that adapt to the prompt."""
SHARED_JUDGE = 1.25
"""Published speed-up, at most, by a judge on the GPUs of the engines (MPS)."""
STREAMED_JUDGE = {"7B/8k": 1.1, "14B/16k": 1.1, "32B/32k": 1.4}
"""Published speed-up by a judge half of whose layers are read from the host, by length cap."""

# ---- stream trainer, table 3: 7B/8k, math, long rounds

STREAM_S = {"none": 124.2, "20%": 122.7, "30%": 118.2, "40%": 119.8, "adaptive": 115.2}

# ---- planner, figure 6: Qwen3-8B, 32k, 8 H800

FIGURE_6_GPUS = 8
FIGURE_6_PREEMPTIONS = {
    ("short", 1): 5199,
    ("long", 1): 2900,
    ("short", 2): 4102,
    ("long", 2): 2601,
}
FIGURE_6_SECONDS = {("short", 1): 1029, ("long", 1): 1172, ("short", 2): 768, ("long", 2): 1284}
FIGURE_12A_SPEEDUP = 1.9
"""Published planner speed-up over tp 1: 14B, 16 GPUs, length cap 8k to 32k, raised by 2k a step."""

# ---- scaling, figure 14: 14B/16k

SCALING = {
    # GPUs: (prompts, veRL, RollPacker), samples per second relative to veRL on 32 GPUs
    32: (128, 1.0, 2.22),
    64: (256, 1.42, 3.37),
    128: (512, 2.18, 4.81),
}

# ---- ROLL Flash and RhymeRL

REPLICATION_S = {(32, 16): (116, 89), (64, 16): (149, 81), (16, 32): (162, 83)}
"""Published rollout seconds of ROLL Flash by (prompts, responses per prompt): with all responses of
a prompt on one worker, and on any worker. Another source states 16 x 64 instead of 16 x 32, but a
worker with 64 responses at the limit would need 250 s."""
REPLICATION_ENGINES = 16
"""Number of engines for `REPLICATION_S` (our assumption)."""
RHYMERL_ROLLOUT_SHARE = 0.875
"""Share of the rollout in a step of veRL, 32B/16k: the middle of RhymeRL's .84 to .91."""
RHYMERL_GPUS = 64
"""Number of H100 for that share (our assumption)."""
