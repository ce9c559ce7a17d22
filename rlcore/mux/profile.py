"""Profile of a job for admission to shared nodes: worst-case times on unshared nodes, with every
response at its maximum length. A run that shares no nodes writes `<run>/mux_profile.json`, which
`mux add --profile` and `--mux.profile` read."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlcore.config.schema import MuxConfig
from rlcore.metrics.jsonl import write_atomic
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

FILE = "mux_profile.json"
_MOST = 1e12
STEP = "step"
"""Name of the phase in which a colocated job samples and trains, on the nodes of both pools."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Times and resources of a job; the fields are documented in `sched.cluster.MuxJob`."""

    rollout_s: float
    train_s: float
    rollout_nodes: int = 1
    train_nodes: int = 1
    sync_s: float = 0.0
    slo: float = MuxConfig.slo
    rollout_gb: float = 0.0
    train_gb: float = 0.0
    colocated: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Profile":
        """Make a profile from plain values, ignoring unknown keys. Raise ConfigError if a value is
        missing or has the wrong type."""
        known = {f.name for f in fields(cls)}
        found = {name: value for name, value in values.items() if name in known}
        colocated = found.pop("colocated", False)
        wrong = [
            name
            for name, v in found.items()
            if isinstance(v, bool) or not isinstance(v, int | float) or not 0 <= v < _MOST
        ]
        if not isinstance(colocated, bool):
            raise ConfigError(f"profile of a job: colocated {colocated!r}: must be true or false")
        if missing := {"rollout_s", "train_s"} - found.keys():
            wrong += sorted(missing)
        if wrong:
            raise ConfigError(
                f"profile of a job: {', '.join(wrong)}: must be numbers from 0 to {_MOST:g}"
            )
        return cls(**found, colocated=colocated)

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read a profile from a file. Raise ConfigError if the file has no valid profile."""
        try:
            return cls.of(read_json(path))
        except ConfigError as error:
            raise ConfigError(
                f"{path}: not the profile of a job ({error}); give the {FILE} that a run without "
                "--mux.url writes with cluster.rollout_ranks or --debug.full_length"
            ) from error


class Profiler:
    """Writer of the profile of a run that shares no nodes, from the metrics of every step. Times
    are maxima over all steps except the first, which fills caches. If responses end before their
    limit, a step's times are scaled by limit / mean length. Scaled times are never too short, since
    large batches cost less per token. With --debug.full_length, no time is scaled."""

    def __init__(
        self,
        folder: Path,
        *,
        max_tokens: int,
        rollout_nodes: int,
        train_nodes: int,
        colocated: bool = False,
        copy_gb: float = 0.0,
    ) -> None:
        """`max_tokens`: maximum number of tokens of a response. `copy_gb`: memory
        that the first asynchronous save will allocate on a train node."""
        self._path, self._max_tokens = folder / FILE, max_tokens
        self._nodes = {"rollout_nodes": rollout_nodes, "train_nodes": train_nodes}
        self._colocated, self._copy_gb = colocated, copy_gb
        self._steps = 0
        self._worst = {"rollout_s": 0.0, "train_s": 0.0}
        self._stretch = 1.0

    def see(self, metrics: Mapping[str, float]) -> None:
        """Update the profile with the metrics of a step."""
        self._steps += 1
        if "timing_s/write_checkpoint" in metrics:
            self._copy_gb = 0.0  # it is in the node's memory by now
        if self._steps == 2:
            self._worst, self._stretch = dict.fromkeys(self._worst, 0.0), 1.0
        rollout_s = metrics["timing_s/gen"] + metrics.get("timing_s/reward", 0.0)
        stretch = max(1.0, self._max_tokens / max(metrics["response_length/mean"], 1.0))
        found = {"rollout_s": rollout_s, "train_s": metrics["timing_s/step"] - rollout_s}
        for name, seconds in found.items():
            self._worst[name] = max(self._worst[name], seconds * stretch)
        self._stretch = max(self._stretch, stretch)
        profile = Profile(
            rollout_s=self._worst["rollout_s"],
            train_s=self._worst["train_s"],
            rollout_nodes=self._nodes["rollout_nodes"],
            train_nodes=self._nodes["train_nodes"],
            colocated=self._colocated,
            rollout_gb=metrics["perf/rollout_node_gb"],
            train_gb=metrics["perf/train_node_gb"] + self._copy_gb,
        )
        about = {k: v for k, v in asdict(profile).items() if k != "slo"}
        about |= {"steps": self._steps, "stretched_by": self._stretch}
        write_atomic(self._path, json.dumps(about, indent=1) + "\n")
