"""`--dry-run`: what would run, without running it. One process, whatever the world size."""

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.explain import arithmetic, world_size
from rlcore.config import resolve, rules
from rlcore.config.schema import Config, reward_sections
from rlcore.hf.config import HFConfig, read_json

if TYPE_CHECKING:  # the command line should not pay for torch
    from rlcore.mcore.layout import Layout
    from rlcore.trainer.memory import Beside

GPU_GB = 80.0
"""Of a GPU where there is none to ask."""


def show(cfg: Config) -> int:
    """Print the resolved configuration, batch arithmetic, layout and memory plan. 2 where a rule is
    broken or the plan does not fit."""
    from rlcore.mcore.layout import check_model, layout_of
    from rlcore.trainer import memory

    # recipes/common.sh tells the size of the real run
    per_node, world = int(os.environ.get("GPUS_PER_NODE", 1)), world_size()
    apart = cfg.cluster.rollout_ranks
    train_ranks = max(world - apart, 1)
    problems = rules.broken(cfg)
    notes = [] if problems else [f"note         {line}" for line in rules.warnings(cfg)]
    problems += rules.of_world(cfg, world, per_node)
    has_arithmetic = not rules.of_batch(cfg)
    layout = hf = None
    try:
        layout = layout_of(cfg.train, train_ranks, 0)
    except ValueError as e:
        problems.append(str(e))
    try:
        hf, where = model_of(cfg.model.path)
        notes.append(f"model        {where}")
        if hf is not None:
            notes.append(f"model        {hf.arch}, {hf.num_layers} layers, hidden {hf.hidden_size}")
            if layout is not None:
                check_model(hf, cfg.train)
    except ValueError as e:
        problems.append(str(e))
        hf = None
    beside = memory.NOBODY
    try:
        beside, said = judges(cfg)
        notes += said
    except ValueError as e:
        problems.append(str(e))
    print(resolve.to_json(cfg))
    print()
    if layout is not None and has_arithmetic:
        print("\n".join(arithmetic(cfg, world, layout.dp)))
        tp = cfg.rollout.tp
        print(
            f"world        {_count(world, 'rank')}: tp {layout.tp} x cp {layout.cp} x "
            f"pp {layout.pp} x dp {layout.dp}, ep {layout.ep}, vpp {layout.vpp}"
            + (f" on the first {train_ranks}" if apart else "")
            + f"; {_count((apart or world) // tp, 'engine')} ({cfg.rollout.engine}) of "
            + _count(tp, "rank")
            + (", or another size after some steps" if rules.changes_size(cfg) else "")
        )
        print(rank_map(layout, world, per_node, tp))
    for line in notes:
        print(line)
    if hf is not None and not problems:
        gpu_bytes, source = gpu_gb(cfg) * memory.GB, gpu_source(cfg)
        most = gpu_bytes or GPU_GB * memory.GB
        if apart:
            cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, offload=False))
            alone = memory.worst_of(cfg, hf, train_ranks, gpu_bytes=most, has_engine=False)
            sampler = memory.make_sampler(cfg, hf, train_ranks, gpu_bytes=most, beside=beside)
            plans = [alone, sampler]
        else:
            plans = [memory.worst_of(cfg, hf, world, gpu_bytes=most, beside=beside)]
        for plan in plans:
            print("\n".join(memory.table(plan, world, per_node)))
            problems += plan.problems if gpu_bytes else ()
            if said := memory.too_large(plan, gpu_bytes):
                problems.append(said)
            elif gpu_bytes:
                where = plan.worst.replace("_", "-")
                print(f"  fits {gpu_bytes / memory.GB:g} GB{source}: {where} takes most")
    if hf is not None and not problems and not apart:
        print(expected(cfg, hf, world))
    if hf is not None and not problems and cfg.select.mode == "async":
        print(split(cfg, hf, world, per_node))
    for line in problems:
        print(f"cannot run: {line}", file=sys.stderr)
    print("dry run: " + ("refused" if problems else "this would run"))
    return 2 if problems else 0


def expected(cfg: Config, hf: HFConfig, world: int) -> str:
    """A sentence on the time of a step, by the simulator; or why there is none."""
    import torch

    from rlcore.sim import expect

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "H100"
    gpu = expect.gpu_named(name)
    earlier = Path(cfg.run.dir) / (cfg.run.name or "run") / "rollouts.jsonl"
    try:
        if gpu is None:
            raise ValueError(f"there is no data sheet of {name}")
        found, said = expect.step(cfg, hf, world, gpu, earlier)
    except ValueError as error:
        return f"expected     no estimate of the time of a step: {error}"
    phases = ", ".join(f"{p} {s:.1f}" for p, s in found.phases.items() if s >= 0.05)
    return (
        f"expected     {found.seconds:.1f} s a step on {world} x {gpu.name} ({phases}), by the "
        f"simulator; lengths {said}; {'turns and rewards' if cfg.select.env else 'rewards'} not "
        "counted"
    )


def rank_map(layout: "Layout", world: int, per_node: int, tp: int) -> str:
    """A sentence on which rank is what: `layout` is of the ranks that train, `tp` of an engine."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    stride, terms = 1, []
    for name, size in sizes.items():
        if size > 1:
            terms.append(name if stride == 1 else f"{stride} x {name}")
        stride *= size
    first = stride if stride < world else 0
    engine = (f"{first} + " if first else "") + (f"{tp} x engine" if tp > 1 else "engine")
    return (
        f"rank map     rank = {' + '.join(terms) or '0'}, counted from 0"
        + (f"; {layout.ep} neighbours of a stage share the experts" if layout.ep > 1 else "")
        + f"; an engine begins at rank {engine}; node = rank / {per_node}"
    )


def split(cfg: Config, hf: HFConfig, world: int, per_node: int) -> str:
    """A sentence on how many ranks sample; or why there is none."""
    from rlcore.cli import splits

    folder = Path(cfg.run.dir) / (cfg.run.name or "run")
    plan = splits.planner(cfg, world, per_node)
    try:
        said = splits.by_data_sheet(plan, cfg, hf, world, folder / "rollouts.jsonl")
        said = splits.by_last_steps(plan, cfg, folder, world) or said
    except ValueError as error:
        said = f"no estimate of other splits: {error}"
    return f"balance      {said}"


def judges(cfg: Config) -> tuple["Beside", list[str]]:
    """What judges on our own GPUs take, and lines about them. ValueError where one is no model."""
    from rlcore.cli.assemble import beside
    from rlcore.rewards.judge.config import JudgeRewardConfig
    from rlcore.rewards.judge.residency import footprint

    found, lines = [], []
    for key, section in reward_sections(cfg.reward).items():
        if not isinstance(section, JudgeRewardConfig) or section.url or not section.model:
            continue
        hf, where = model_of(section.model, "JUDGE_CONFIG")
        lines.append(f"judge        {where}")
        if hf is not None:
            found.append((section, hf))
            stay = footprint(section, hf).num_resident
            lines.append(
                f"judge        {hf.arch}, {hf.num_layers} layers, of which {stay} may stay on the "
                f"GPU (--{key}.resident_ratio {section.resident_ratio:g})"
            )
    return beside(found), lines


def model_of(path: str, variable: str = "MODEL_CONFIG") -> tuple[HFConfig | None, str]:
    """A model's architecture and where it was read: its folder, else the file that the recipe
    names in `variable`, else nowhere. ValueError where what is there is no model."""
    if path and Path(path).is_dir():
        return HFConfig.from_folder(path), path
    missing = f"there is no folder {path} here"
    facts = os.environ.get(variable, "")
    if not path or not facts:
        return None, f"not checked: {missing}"
    file = Path(facts)
    name = "/".join(file.parts[-3:])
    return HFConfig.from_dict(read_json(file)), f"from {name}, not the folder: {missing}"


def gpu_gb(cfg: Config) -> float:
    """Memory of a GPU in GB that the plan must fit; 0: any."""
    if cfg.cluster.gpu_gb is not None:
        return cfg.cluster.gpu_gb
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 1e9
    return GPU_GB


def gpu_source(cfg: Config) -> str:
    """Where that figure is from, if nobody gave it."""
    import torch

    if cfg.cluster.gpu_gb is not None:
        return ""
    if torch.cuda.is_available():
        return " (the GPU here)"
    return " (no GPU here: an assumption; --cluster.gpu_gb says another size)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
