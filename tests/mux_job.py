"""A job that only takes phases: `python tests/mux_job.py URL NAME FOLDER ITERATIONS`.

Its checkpoint is the list of steps that it has trained, written when a training ends. Every phase
leaves a line with its pool and times in NAME.spans, which is how a test sees who was where when."""

import json
import os
import sys
import time
from pathlib import Path

from rlcore.mux.gate import Profile, connect

PHASE_S = {"rollout": 0.06, "train": 0.04}


def main(url: str, name: str, folder: Path, iterations: int) -> None:
    checkpoint = folder / f"{name}.json"
    steps = json.loads(checkpoint.read_text()) if checkpoint.exists() else []
    profile = Profile(rollout_s=1.0, train_s=1.0, slo=10.0)
    gate = connect(url, name, profile, lease_s=float(os.environ.get("LEASE_S", "2")))
    with (folder / f"{name}.spans").open("a", buffering=1) as spans:
        while len(steps) < iterations:
            for phase, seconds in PHASE_S.items():
                with gate.phase(phase):
                    begin = time.monotonic()
                    spans.write(f"{os.getpid()} {phase} {begin} begin\n")
                    time.sleep(seconds)
                    if phase == "train":
                        steps.append(len(steps) + 1)
                        new = folder / f".{name}.{os.getpid()}"
                        new.write_text(json.dumps(steps))
                        new.replace(checkpoint)
                    spans.write(f"{os.getpid()} {phase} {time.monotonic()} end\n")
    gate.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
