"""Compute small statistics with numpy: summaries, standard errors, pass@k, best@k, maj@k.

Values of several ranks must be gathered first: a mean of local means is not the global mean.

Own code instead of scipy: these few formulas need no further dependency.
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike


def summary(prefix: str, values: ArrayLike) -> dict[str, float]:
    """Return `{prefix/mean, prefix/max, prefix/min}`; {} if there are no values."""
    x = _flat(values)
    if x.size == 0:
        return {}
    return {
        f"{prefix}/mean": float(x.mean()),
        f"{prefix}/max": float(x.max()),
        f"{prefix}/min": float(x.min()),
    }


def standard_error(values: ArrayLike, clusters: Sequence[Hashable] | None = None) -> float:
    """Return the standard error of the mean; NaN for fewer than two values or clusters. `clusters`:
    cluster of each value, for values that are not independent, such as samples of one prompt."""
    x = _flat(values)
    if clusters is None:
        return float(x.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else math.nan
    if len(clusters) != x.size:
        raise ValueError(
            f"{x.size} values but {len(clusters)} clusters; give one cluster per value"
        )
    sums: dict[Hashable, float] = {}
    mean = x.mean() if x.size else 0.0
    for cluster, deviation in zip(clusters, x - mean, strict=True):
        sums[cluster] = sums.get(cluster, 0.0) + float(deviation)
    num = len(sums)
    if num < 2:
        return math.nan
    # Variance of the ratio estimator, which weights clusters by their size.
    return math.sqrt(num / (num - 1) * sum(s * s for s in sums.values())) / x.size


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, contain a correct one.
    This is an unbiased estimate of pass@k (arXiv:2107.03374). Raise ValueError unless 1 <= k <= n
    and 0 <= num_right <= n."""
    _check_k(num_samples, k)
    if not 0 <= num_right <= num_samples:
        raise ValueError(f"{num_right} correct of {num_samples} samples is impossible")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def best_at_k(scores: ArrayLike, k: int) -> float:
    """Return the expected best score of k of these samples, drawn without replacement. If scores
    are 0 or 1, the result equals `pass_at_k`."""
    x = np.sort(_flat(scores))
    _check_k(x.size, k)
    # The i-th smallest score is the best of comb(i, k - 1) subsets of size k.
    ways = [math.comb(i, k - 1) for i in range(x.size)]
    return float(sum(w * v for w, v in zip(ways, x.tolist(), strict=True)) / math.comb(x.size, k))


def majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Return the score of the most frequent answer of a prompt's samples; of several, that of the
    earliest sample. Samples without an answer do not vote; 0.0 if none has one."""
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]
    return scores[answers.index(winner)]


def evaluation(
    name: str,
    scores: Mapping[Hashable, Sequence[float]],
    answers: Mapping[Hashable, Sequence[str]] | None = None,
    right: float = 0.5,
) -> dict[str, float]:
    """Return the metrics of one data set from the scores of its prompts, k samples of each: mean@k
    with its standard error; for k > 1 also best@k and pass@j for j = 1, 2, 4, ... k, and with
    `answers`, the final answers of the samples, also maj@k. A score passes if it is at least
    `right`. Raise ValueError if prompts differ in their number of samples."""
    counts = {len(s) for s in scores.values()}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"evaluation of {name}: samples per prompt differ, {sorted(counts)}; draw the same "
            "number for each prompt"
        )
    k = counts.pop()
    core, aux = f"val-core/{name}/acc", f"val-aux/{name}"
    means = [sum(s) / k for s in scores.values()]
    out = {f"{core}/mean@{k}": sum(means) / len(means), f"{aux}/num_prompts": float(len(means))}
    if len(means) > 1:
        out[f"{aux}/acc/std_err@{k}"] = standard_error(means)
    if k > 1:
        num_right = [sum(v >= right for v in s) for s in scores.values()]
        for j in _powers(k):
            out[f"{core}/pass@{j}"] = float(np.mean([pass_at_k(k, c, j) for c in num_right]))
        out[f"{core}/best@{k}"] = float(np.mean([best_at_k(s, k) for s in scores.values()]))
        if answers:
            votes = [majority(s, answers.get(key, ())) for key, s in scores.items()]
            out[f"{core}/maj@{k}"] = float(np.mean(votes))
    return out


def _powers(k: int) -> list[int]:
    return sorted({2**i for i in range(k.bit_length()) if 2**i <= k} | {k})


def _check_k(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k {k}: must be from 1 to the number of samples, {num_samples}")


def _flat(values: ArrayLike) -> np.ndarray:
    return np.asarray(values, dtype=np.float64).reshape(-1)
