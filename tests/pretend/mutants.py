"""Faults of CUDA programs, put into rlcore one by one: a test on the pretend device must fail.

    python -m tests.pretend.mutants            # all, some minutes; exit status 1 if one survives
    python -m tests.pretend.mutants wait       # one class

Each mutant runs in a copy of the sources. Missing barriers of kernels are not here:
`tests/native/test_loss_native.py` removes each barrier by itself.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests import pretend

JUDGE, LEARNER = "rlcore/hf/layer_pipeline.py", "rlcore/mcore"
PARK = "tests/gpu/test_memory.py -k parts_go_by_themselves"
LAYERS = "tests/gpu/test_judge.py -k stream_from_pinned_memory and float32"
PUSH = "tests/gpu/test_push.py -k bucket_stays_on_the_gpu and gather"
ENGINE = "tests/gpu/test_engine.py"
STATES = "tests/gpu/test_offload.py -k states_on_the_gpu and bfloat16-True"
INPUTS = "tests/gpu/test_offload.py -k layer_inputs_on and qwen3"


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file` the text `old` becomes `new`, and `test` must fail."""

    kind: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant(
        "device",
        f"{LEARNER}/microbatch.py",
        "return tuple(_each_tensor(part, change) for part in value)",
        "return value",
        "tests/gpu/test_attention.py",
    ),
    Mutant(
        "device",
        "rlcore/rollout/torch_engine/engine.py",
        "top_k=torch.from_numpy(top_k[rows]).to(device)",
        "top_k=torch.from_numpy(top_k[rows])",
        ENGINE,
    ),
    Mutant(
        "device",
        f"{LEARNER}/microbatch.py",
        "for name, part in _fields(value).items()})",
        'for name, part in _fields(value).items() if name != "advantage"})',
        "tests/gpu/test_learner.py",
    ),
    Mutant("wait", JUDGE, "self._stream.wait_stream(current)", "pass", LAYERS),
    Mutant(
        "wait",
        JUDGE,
        "self.streams.current_stream(self.device).wait_event(self.event)",
        "pass",
        LAYERS,
    ),
    Mutant(
        "wait",
        JUDGE,
        "_Copy(self._stream.record_event()",
        "_Copy(current.record_event()",
        LAYERS,
    ),
    Mutant(
        "wait",
        f"{LEARNER}/adam.py",
        "partial(_copy, here, chunk.kept), free[i])",
        "partial(_copy, here, chunk.kept))",
        STATES,
    ),
    Mutant(
        "wait",
        f"{LEARNER}/adam.py",
        "partial(_copy, chunk.kept, here), self._down.now())",
        "partial(_copy, chunk.kept, here))",
        STATES,
    ),
    Mutant(
        "wait",
        f"{LEARNER}/layer_inputs.py",
        "        wait(self.ready)\n        self.here = None",
        "        self.here = None",
        INPUTS,
    ),
    Mutant(
        "wait",
        f"{LEARNER}/layer_inputs.py",
        "        wait(self.ready)\n        here, self.here",
        "        here, self.here",
        INPUTS,
    ),
    Mutant(
        "pinned",
        "rlcore/utils/host_room.py",
        "self._blocks: list[Tensor] = []",
        'self._blocks: list[Tensor] = HostRoom.__init__.__annotations__.setdefault("all", [])',
        PARK,
    ),
    Mutant("pinned", "rlcore/utils/host_room.py", "pin_memory=pinned", "pin_memory=False", PARK),
    Mutant(
        "pinned",
        "rlcore/utils/host_room.py",
        "            outside.copy_(here, non_blocking=True)",
        "            outside.copy_(here, non_blocking=True)\n            here.zero_()",
        LAYERS,
    ),
    Mutant(
        "ipc",
        "rlcore/sync/colocated.py",
        "mine = self._payload(buffer) if self._is_read",
        'mine = self.__dict__.setdefault("_first", self._payload(buffer)) if self._is_read',
        PUSH,
    ),
    Mutant(
        "ipc",
        "rlcore/utils/buckets.py",
        "        made.offset,\n",
        "        0,\n",
        PUSH,
    ),
    Mutant(
        "ipc",
        "rlcore/rollout/torch_engine/engine.py",
        "            if problem := damage(bucket, flat):",
        '            self.__dict__.setdefault("_opened", []).append(flat)\n'
        "            if problem := damage(bucket, flat):",
        PUSH,
    ),
)


def why_caught(mutant: Mutant, root: Path) -> str:
    """Return the error with which the mutant's test fails in the copy of the sources at `root`; ""
    if the test passes.

    Raises:
        ValueError: the source does not have the mutant's text exactly once.
    """
    path = root / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file}: {source.count(mutant.old)} times: {mutant.old}")
    path.write_text(source.replace(mutant.old, mutant.new))
    try:
        return _error(mutant.test, root)
    finally:
        path.write_text(source)


def _error(test: str, root: Path) -> str:
    """Return the first error of a test; "" if it passes."""
    file, *words = test.split(" ", 2)
    env = pretend.environment("real")
    env["PYTHONPATH"] = f"{root / 'tests/pretend/site'}:{root}"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", file, *words]
    done = subprocess.run(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True)
    if not done.returncode:
        return ""
    errors = [line[1:].strip() for line in done.stdout.splitlines() if line.startswith("E ")]
    return errors[0] if errors else done.stdout[-200:]


def main(kinds: list[str]) -> int:
    """Print a line for each mutant; return 1 if one survives."""
    chosen = [m for m in MUTANTS if not kinds or m.kind in kinds]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "rlcore"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs")
        shutil.copytree(pretend.ROOT, root, ignore=ignored)
        for test in dict.fromkeys(m.test for m in chosen):
            if error := _error(test, root):
                raise SystemExit(f"{test} fails without a mutant: {error}")
        for mutant in chosen:
            error = why_caught(mutant, root)
            survived += not error
            place = f"{mutant.kind:7} {Path(mutant.file).name}: {mutant.old.split(chr(10))[0][:50]}"
            print(f"{place}\n    {error[:120] or 'SURVIVED'}", flush=True)
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
