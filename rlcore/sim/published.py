"""What papers have published, to hold a simulation against; where each constant of ours is from.

Nothing here is fitted to make a table agree, except what says so.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """A column of figure 11 of RollPacker."""

    generator: str
    """In `workload.GENERATORS`. Its numbers are fitted on the ratios of this column (PAPERS.md A8),
    so agreement there says that one generator can have them all, and predicts none."""
    step_s: float
    """Of a decode step, whatever the batch: 277 s for 16k tokens, 673 s for 32k are the baseline's
    published means, whose longest answers reach the cap in every round (PAPERS.md A8)."""
    baseline_s: float


FIGURE_11 = {
    "16k": Setting(generator="16k", step_s=0.017, baseline_s=277),
    "32k": Setting(generator="32k", step_s=0.0205, baseline_s=673),
}
"""The column 8k (82 s) is left out: no generator fits it, since that run does not wait for its tail
alone (PAPERS.md A8)."""

FIGURE_11_ARMS = {
    # name: (eta_prompts, eta_samples)
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
    # mean seconds of a rollout round, long rounds included: 8k, 16k, 32k
    "baseline": (82, 277, 673),
    "R 1.125": (77, 260, 658),
    "R 1.25": (71, 232, 655),
    "R 1.5": (54, 115, 265),
    "P 1.125": (77, 244, 636),
    "P 1.25": (72, 169, 259),
    "P 1.5": (60, 143, 279),
    "both 1.25": (47, 88, 170),
}
PROMPTS, SAMPLES = 128, 8
