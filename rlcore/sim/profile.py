"""Measured costs of an engine on a machine, as a file that `python -m rlcore profile` writes and
the planners read.

One JSON object:

    format     1
    engine     "torch" or "sglang"
    model      folder or name of the model; its weights are random, which costs the same
    device     "cpu, 2 cores", or a GPU's name
    dtype      data type of the engine, such as "bfloat16"
    load       load average of the machine, before and after: if above the number of cores, other
               programs were running, and the seconds are unreliable
    best_tp    the size to use for `--rollout.tp`: see `best`
    layouts    one object for every tensor-parallel size:
        tp             ranks of the engine
        cache_tokens   tokens that its KV cache holds
        start_s        seconds to start an engine until it accepts weights: cost of a change of tp
        decode         rows {"sequences", "context", "step_s"}: seconds of a decode step of
                       this many sequences with `context` tokens each (prompt and response, the
                       mean over the timed steps)
        prefill        rows {"tokens", "seconds"}: one prompt, up to its first response token
        cost           fields of `sim.cost.EngineCost` that fit these rows best, with cache_tokens
        error          largest relative error of the fit among the decode rows

Seconds are wall-clock time, sizes are in tokens. `read` reads the file, and
`EngineCost(**layout["cost"])` has all that a simulation needs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.sim.cost import EngineCost
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decode:
    """Measured decode step."""

    sequences: int
    context: float
    """Context tokens of each sequence: prompt and response."""
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Measured prefill of one prompt."""

    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMeasurements:
    """Measurements for engines of one tensor-parallel size."""

    tp: int
    cost: EngineCost
    start_s: float = 0.0
    decode: Sequence[Decode] = ()
    prefill: Sequence[Prefill] = ()


def fit(decode: Sequence[Decode], prefill: Sequence[Prefill], cache_tokens: float) -> EngineCost:
    """Fit nonnegative costs of an engine to measurements, by least squares of relative errors.

    Raises:
        ConfigError: no decode step was measured.
    """
    if not decode:
        raise ConfigError(
            "no decode step was measured; choose --batch and --context that fit the cache"
        )
    terms = [[1.0, r.sequences, r.sequences * r.context] for r in decode]
    step, sequence, context = positive(terms, [r.step_s for r in decode])
    of_prompt = 0.0
    if prefill:  # also fit a constant time per call, which is not part of the time per token
        ones = [[1.0, r.tokens] for r in prefill]
        of_prompt = positive(ones, [r.seconds for r in prefill])[-1]
    return EngineCost(
        step_s=step,
        sequence_s=sequence,
        context_s=context,
        prefill_s=of_prompt,
        cache_tokens=cache_tokens,
    )


def error(cost: EngineCost, decode: Sequence[Decode]) -> float:
    """Return the largest relative error of the cost model among the measured decode steps."""
    found = [cost.decode_s(r.sequences, r.sequences * r.context, 1) / r.step_s for r in decode]
    return max(abs(ratio - 1) for ratio in found)


def rate(cost: EngineCost, tp: int, sequences: int, context: float) -> float:
    """Return the tokens per second per rank, at a load of `sequences` sequences of `context` tokens
    per rank. An engine decodes `tp` x `sequences` sequences, or as many as fit its KV cache."""
    most = cost.cache_tokens // max(context, 1)
    n = max(1, min(sequences * tp, int(min(most, 2**31))))
    return n / cost.decode_s(n, n * context, 1) / tp


def best(layouts: Sequence[EngineMeasurements], sequences: int, context: float) -> int:
    """Return the `tp` with the most tokens per second per rank at this load. If sizes tie, return
    the smallest, since its failures affect the fewest ranks."""
    return max(layouts, key=lambda x: (rate(x.cost, x.tp, sequences, context), -x.tp)).tp


def to_json(
    layouts: Sequence[EngineMeasurements], *, best_tp: int, head: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the contents of the profile file. `head`: engine, model, device, dtype and load."""
    return {
        "format": FORMAT,
        **head,
        "best_tp": best_tp,
        "layouts": [
            {
                "tp": x.tp,
                "cache_tokens": x.cost.cache_tokens,
                "start_s": x.start_s,
                "decode": [asdict(r) for r in x.decode],
                "prefill": [asdict(r) for r in x.prefill],
                "cost": asdict(x.cost),
                "error": error(x.cost, x.decode),
            }
            for x in layouts
        ],
    }


def read(path: Path) -> dict[int, EngineMeasurements]:
    """Return the measurements in a profile file, by tensor-parallel size.

    Raises:
        ConfigError: the file is invalid; the error says why.
    """
    try:
        found = read_json(path)
    except ConfigError as e:
        raise ConfigError(f"profile {path}: cannot read it ({e})") from e
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"profile {path}: does not have format {FORMAT}; write one with python -m rlcore "
            "profile"
        )
    try:
        layouts = [_layout(row) for row in found["layouts"]]
    except (KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"profile {path}: a layout has missing or unknown fields: {e}") from e
    for x in layouts:
        bad = [f.name for f in fields(EngineCost) if not _is_known(getattr(x.cost, f.name))]
        if bad or not x.cost.decode_s(1, 1, 1) > 0:
            lacking = ", ".join(bad) or "the time of a decode step"
            raise ConfigError(f"profile {path}: the layout of tp {x.tp} lacks {lacking}")
    if not layouts:
        raise ConfigError(
            f"profile {path}: contains no layouts (engine sizes); write it again with python -m "
            "rlcore profile"
        )
    return {x.tp: x for x in layouts}


def _is_known(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


def _layout(row: Mapping[str, Any]) -> EngineMeasurements:
    return EngineMeasurements(
        tp=row["tp"],
        cost=EngineCost(**row["cost"]),
        start_s=row.get("start_s", 0.0),
        decode=[Decode(**r) for r in row.get("decode", ())],
        prefill=[Prefill(**r) for r in row.get("prefill", ())],
    )


def positive(terms: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float]:
    """Return the x >= 0 that minimizes the sum of squares of (terms @ x - wanted) / wanted. Since x
    has few entries, every choice of nonzero entries is tried."""
    scale = np.asarray(wanted, np.float64)
    a = np.asarray(terms, np.float64) / scale[:, None]
    count, best_x, least = a.shape[1], np.zeros(a.shape[1]), math.inf
    for size in range(1, count + 1):
        for columns in itertools.combinations(range(count), size):
            part = a[:, columns]
            if np.linalg.matrix_rank(part) < size:
                continue
            x = np.linalg.lstsq(part, np.ones(len(scale)), rcond=None)[0]
            far = float(((part @ x - 1) ** 2).sum())
            if (x >= 0).all() and far < least - 1e-12:
                least, best_x = far, np.zeros(count)
                best_x[list(columns)] = x
    return best_x.tolist()
