"""`python -m rlcore export RUN`: write a checkpoint's weights as a Hugging Face folder.

    rlcore export runs/NAME                           # the newest checkpoint, to runs/NAME/hf
    rlcore export runs/NAME --step 40 --out FOLDER
    rlcore export runs/NAME/checkpoints/step_000040 --out FOLDER
    rlcore export runs/NAME --adapters                # of a LoRA run: PEFT's format, to adapters
    torchrun --nproc-per-node 8 -m rlcore export runs/NAME     # 8 processes share the work

It needs no GPU and about 6 GB of memory per process. It may run beside the training.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.config.schema import LoraConfig
    from rlcore.hf.config import HFConfig
    from rlcore.mcore.bridge import TensorSource

TIMEOUT_S = 3600.0
"""Seconds that the processes of one export wait for each other."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint and what its run says of the model."""

    checkpoint: Path
    model: str
    """Folder of the model that the run started from."""
    tokenizer: str
    """Folder of the tokenizer."""
    dtype: str
    """Data type of the weights in training."""
    num_layers: int
    """Number of layers; 0: as in config.json."""
    lora: "LoraConfig"
    """Settings of the adapters."""
    seed: int | None
    """Seed of the weights that the run started from; None: those of `model`."""

    def base(self, hf: "HFConfig") -> "TensorSource | None":
        """Return the weights that the run started from, to which its adapters are added; None if
        the run has no adapters."""
        if not self.lora.rank:
            return None
        from rlcore.hf.weights import WeightReader
        from rlcore.mcore.bridge import RandomWeights

        return WeightReader(self.model) if self.seed is None else RandomWeights(hf, self.seed)


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint. Return 0 if the folder was written, 2 if an argument or the checkpoint
    is refused."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlcore export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, help="folder of a run, or of one of its checkpoints")
    parser.add_argument("--out", type=Path, help="folder to write; default: hf in the run's folder")
    parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="data type of the weights; default: as in training (model.dtype)",
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="write the adapters of a LoRA run in PEFT's format; default folder: adapters",
    )
    parser.add_argument("--model", default="", help="folder of the model, if it was moved")
    args = parser.parse_args(list(argv))
    source = source_of(args.path, args.step, args.model)
    if args.adapters and not source.lora.rank:
        raise ConfigError(f"--adapters: {args.path} has none; leave it out")
    write, name = (export_adapters, "adapters") if args.adapters else (export, "hf")
    out = args.out or source.checkpoint.parents[1] / name
    _check_target(source, out, args.adapters)
    with _joined():
        write(source, out, args.dtype or source.dtype)
    return 0


def source_of(path: Path, step: int | None, model: str) -> Source:
    """Find the checkpoint in a run's folder, and read the run's settings.

    Raises:
        ConfigError: there is no such checkpoint, or its run's config.json cannot be read.
    """
    from rlcore.config.schema import LoraConfig
    from rlcore.trainer import resume, seal

    if (path / seal.MANIFEST).is_file():
        checkpoint = path.resolve()
    else:
        steps = {int(p.name.removeprefix("step_")): p for p in resume.found(path)}
        if step is None:
            whole = [p for p in steps.values() if not seal.look(p)[0]]
            if not whole:
                raise ConfigError(
                    f"{path}: has no complete checkpoint ({len(steps)} incomplete); give the "
                    "folder of a run that has saved one"
                )
            checkpoint = whole[0]
        elif step in steps:
            checkpoint = steps[step]
        else:
            known = ", ".join(map(str, sorted(steps))) or "none"
            raise ConfigError(f"--step {step}: {path} has no such checkpoint; it has {known}")
    file = checkpoint.parents[1] / "config.json"
    try:
        saved = json.loads(file.read_text())
        section, lora = saved["model"], saved.get("lora", {})  # runs before LoRA have no section
        found = Source(
            checkpoint=checkpoint,
            model=model or section["path"],
            tokenizer=model or section["tokenizer"] or section["path"],
            dtype=section["dtype"],
            num_layers=section["num_layers"] if section["random_init"] else 0,
            lora=LoraConfig(**lora | {"targets": tuple(lora["targets"])} if lora else {}),
            seed=saved["run"]["seed"] if section["random_init"] else None,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}: cannot be read ({type(error).__name__}); a checkpoint is exported with the "
            "settings of its run, which are in this file"
        ) from error
    if not Path(found.model).is_dir():
        raise ConfigError(
            f"--model {found.model}: no such folder; give the folder of the model that the run "
            "started from, since its config.json and tokenizer are copied"
        )
    return found


def _check_target(source: Source, out: Path, adapters: bool) -> None:
    """Check that the folder to write is free, or is of an earlier export."""
    from rlcore.hf.lora import ADAPTER_FILES
    from rlcore.hf.weights import MODEL_FILES, check_target

    if out.resolve() == Path(source.model).resolve():
        raise ConfigError(f"--out {out}: is the model that the run started from; give another")
    check_target(out, ADAPTER_FILES if adapters else MODEL_FILES)


@contextmanager
def _joined() -> Iterator[None]:
    """Join the other processes, if torchrun has started several, and leave them at the end."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def export(source: Source, out: Path, dtype: str) -> None:
    """Write the Hugging Face folder. Collective over the processes of the export.

    Raises:
        ConfigError: the checkpoint is damaged or of another model.
        OSError: the folder cannot be written.
    """
    import torch
    from rich.progress import track

    from rlcore.hf.names import expected
    from rlcore.hf.weights import save_folder, share_of
    from rlcore.mcore import export as reader
    from rlcore.utils import collective

    rank, size = collective.place()
    hf, kind = _checked(source, rank), getattr(torch, dtype)
    tensors = reader.read(
        source.checkpoint / "learner",
        hf,
        kind,
        share_of(hf, kind, rank, size),
        source.lora,
        source.base(hf),
    )
    shown = track(
        tensors,
        f"{out.name}",
        total=len(expected(hf)),
        disable=rank > 0 or not sys.stdout.isatty(),
    )
    save_folder(shown, hf, source.tokenizer, out, together=True)
    if rank == 0:
        print(f"model: {out}")


def export_adapters(source: Source, out: Path, dtype: str) -> None:
    """Write the adapters as a PEFT folder, by the first process. Collective. Raises as `export`."""
    import torch

    from rlcore.hf.lora import save_adapters
    from rlcore.mcore import export as reader
    from rlcore.utils import collective

    rank, _ = collective.place()
    hf = _checked(source, rank)
    if rank:
        return
    tensors = reader.read_adapters(
        source.checkpoint / "learner", hf, getattr(torch, dtype), source.lora
    )
    save_adapters(tensors, hf, source.lora, source.model, out)
    print(f"adapters: {out}")


def _checked(source: Source, rank: int) -> "HFConfig":
    """Check the files of the checkpoint. Return the model's architecture. Collective."""
    from rlcore.hf.config import HFConfig
    from rlcore.trainer import seal

    if rank == 0:
        print(f"{source.checkpoint}: checking", flush=True)
    if fault := seal.fault(source.checkpoint, None):
        raise ConfigError(f"{source.checkpoint}: {fault}; choose another checkpoint with --step")
    hf = HFConfig.from_folder(source.model)
    return hf.with_(num_layers=source.num_layers) if source.num_layers else hf
