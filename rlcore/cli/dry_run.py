"""`--dry-run`: show what would run, in one process and for any number of ranks."""

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.cli.explain import arithmetic, world_size
from rlcore.config import resolve, rules
from rlcore.config.schema import Config
from rlcore.hf import hub
from rlcore.hf.config import HFConfig
from rlcore.utils import bounds
from rlcore.utils.errors import ConfigError
from rlcore.utils.files import read_json

if TYPE_CHECKING:  # importing torch would slow down the command line
    from rlcore.cli.inputs import Findings
    from rlcore.mcore.layout import ParallelLayout
    from rlcore.trainer.memory import OtherMemory

GPU_GB = 80.0
"""Memory of a GPU in GB that is assumed if this machine has no GPU."""


def show(cfg: Config, every: bool = False) -> int:
    """Print batch arithmetic, layout, memory plan, settings (if not `every`, only changed ones) and
    the checks that are not possible on this machine. Return 2 if the run is refused."""
    from rlcore.cli import inputs
    from rlcore.cli.builders.model import with_downloads, with_layers, with_room
    from rlcore.mcore.layout import layout_of
    from rlcore.trainer import memory

    # recipes/common.sh computes the number of ranks of the real run from the same variables
    per_node, world = int(os.environ.get("GPUS_PER_NODE", 1)), world_size()
    apart = cfg.cluster.rollout_ranks
    train_ranks = max(world - apart, 1)
    problems = rules.broken(cfg)
    follows_rules = not problems
    chosen = resolve.to_json(cfg) if every else settings_of(cfg)
    notes = [] if problems else [f"note         {line}" for line in rules.warnings(cfg)]
    problems += rules.of_world(cfg, world, per_node)
    has_arithmetic = not rules.of_batch(cfg)
    layout = hf = None
    found = inputs.Findings(elsewhere=is_elsewhere(cfg))
    if not found.elsewhere:
        with found.check("--model.path"):
            cfg = with_downloads(cfg, weights=False)
    roomy = cfg
    try:
        if not bounds.broken(cfg.train, "train"):  # a parallel size of 0 divides by zero
            layout = layout_of(cfg.train, train_ranks, 0)
    except ConfigError as e:
        problems.append(str(e))
    try:
        if cfg.model.path:  # `rules.py` reports an empty path
            hf, where = model_of(cfg.model.path)
            notes.append(f"model        {where}")
            hf = with_layers(cfg, hf)
            notes.append(f"model        {hf.arch}, {hf.num_layers} layers, hidden {hf.hidden_size}")
    except ConfigError as e:
        problems.append(str(e))
        hf = None
    beside = memory.NOBODY
    try:
        beside, said = judges(cfg, found)
        notes += said
        if follows_rules:
            beside, said = taught(cfg, found, beside)
            notes += said
    except ConfigError as e:
        problems.append(str(e))
    if follows_rules:
        inputs.check(cfg, hf, world, found)
        problems += found.problems
        with contextlib.suppress(ConfigError):  # `inputs.check` has reported this error
            roomy = with_room(cfg, hf) if hf is not None else cfg
    if roomy != cfg:
        notes.append(
            f"prompts      at most {roomy.data.max_prompt_tokens} tokens, so that prompt and "
            "response fit the model's positions"
        )
    if layout is not None and has_arithmetic:
        print("\n".join(arithmetic(roomy, world, layout.dp)))
        tp = cfg.rollout.tp
        print(
            f"world        {_count(world, 'rank')}: tp {layout.tp} x cp {layout.cp} x "
            f"pp {layout.pp} x dp {layout.dp}, ep {layout.ep}, etp {layout.etp}, vpp {layout.vpp}"
            + (f", layers {' + '.join(map(str, layout.pp_layers))}" if layout.pp_layers else "")
            + (f" on the first {train_ranks}" if apart else "")
            + f"; {_count((apart or world) // tp, 'engine')} ({cfg.rollout.engine}) of "
            + _count(tp, "rank")
            + (f" on {_count(tp // per_node, 'node')}" if tp > per_node else "")
            + (f", ep {cfg.rollout.ep}" if cfg.rollout.ep > 1 else "")
            + ("; the size changes during the run" if rules.changes_size(cfg) else "")
        )
        print(rank_map(layout, world, per_node, tp))
    for line in notes:
        print(line)
    if hf is not None and not problems and cfg.lora.rank:
        print(adapters(cfg, hf))
    if hf is not None and not problems and cfg.algo.routing_replay == "rollout":
        print(routes(roomy, hf))
    if hf is not None and not problems:
        gpu_bytes, source = gpu_gb(cfg) * memory.GB, gpu_source(cfg)
        most = gpu_bytes or GPU_GB * memory.GB
        for plan in memory.plans(cfg, hf, world, gpu_bytes=most, beside=beside):
            print("\n".join(memory.table(plan, world, per_node)))
            problems += plan.problems if gpu_bytes else ()
            if large := memory.too_large(plan, gpu_bytes):
                problems.append(large)
            elif gpu_bytes:
                size = f"{gpu_bytes / memory.GB:g} GB{source}"
                print(f"  fits {size}; the largest phase is {plan.worst}")
    if hf is not None and not problems:
        print(expected(cfg, hf, world))
    if hf is not None and not problems and cfg.select.mode == "async":
        print(split(cfg, hf, world, per_node))
    print(chosen)
    for line in found.unchecked.values():
        print(f"not checked: {line}")
    for line in dict.fromkeys(problems):
        print(f"cannot run: {line}", file=sys.stderr)
    if problems:
        print("dry run: refused")
        return 2
    conditions = "; ".join(found.unchecked)
    end = (
        f"would run if these exist on that machine: {conditions}"
        if conditions
        else "this would run"
    )
    print(f"dry run: {end}")
    return 0


def settings_of(cfg: Config) -> str:
    """Return a line for each of --algo, --reward, --env, --mode, --schedule and for each key that
    differs from its default."""
    lines = [f"setting      --{key} {value}" for key, value in changed(cfg).items()]
    return "\n".join([*lines, "setting      --dry-run all prints every key"])


def changed(cfg: Config) -> dict[str, str]:
    """Return --algo, --reward, --env, --mode, --schedule and the keys that differ from their
    defaults, with their values."""
    from rlcore.cli import settings

    selectors = resolve.keys(cfg.select)
    default = settings.parse([f"--{name}={value}" for name, value in selectors.items() if value])
    return {
        key: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in (selectors | resolve.keys(cfg)).items()
        if (key in selectors and value) or value != resolve.keys(default).get(key, "")
    }


def is_elsewhere(cfg: Config) -> bool:
    """Return whether the folder of a model, judge or teacher is missing here, but the recipe names
    its config.json. Then the run is for another machine, or the recipe makes the model first. The
    recipe's config.json does not stand for a model on the hub with another name."""
    from rlcore.cli.builders import teachers
    from rlcore.cli.builders.rewards import own_judges

    folders = {"MODEL_CONFIG": [cfg.model.path]}
    folders["JUDGE_CONFIG"] = [judge.model for judge in own_judges(cfg).values()]
    folders["TEACHER_CONFIG"] = teachers.folders(cfg)
    return any(
        not Path(path).is_dir() and _stands_for(config, path)
        for variable, paths in folders.items()
        if (config := os.environ.get(variable))
        for path in paths
    )


def _stands_for(config: str, path: str) -> bool:
    """Return whether the recipe's file `config`, such as qwen2_5_7b.json, may be that of the model
    `path`: Qwen/Qwen2.5-7B-Instruct, or any folder."""
    if not hub.is_name(path) or path.startswith("models/"):
        return True
    name, stem = (re.sub(r"[^a-z0-9]", "", Path(x).name.lower()) for x in (path, config))
    return name.startswith(stem.removesuffix("json"))


def adapters(cfg: Config, hf: HFConfig) -> str:
    """Return a line with the number of trained parameters."""
    from rlcore.hf.lora import num_adapter_parameters, scale
    from rlcore.hf.names import num_parameters

    count = num_adapter_parameters(hf, cfg.lora)
    share = count / num_parameters(hf)
    where = ", ".join(cfg.lora.targets) + (" (experts too)" if cfg.lora.experts else "")
    return (
        f"LoRA         rank {cfg.lora.rank}, scale {scale(cfg.lora):g}, on {where}: trains "
        f"{count / 1e6:.2f} M parameters, {share:.2%} of the weights"
    )


def routes(cfg: Config, hf: HFConfig) -> str:
    """Return a line with the bytes of the experts that samples carry to the learner."""
    import numpy as np

    size = np.min_scalar_type(-hf.num_experts).itemsize
    per_token = hf.num_layers * hf.experts_per_token * size
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    samples = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    return (
        f"routes       {per_token} bytes per token, at most {per_token * longest / 1e6:.1f} MB per "
        f"sample and {per_token * longest * samples / 1e9:.2f} GB per step, beside the tokens"
    )


def expected(cfg: Config, hf: HFConfig, world: int) -> str:
    """Return a line with the simulated time of a step, or the reason why there is none."""
    import torch

    from rlcore.sim import expect
    from rlcore.utils.gpus import gpu_named

    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "H100"
    gpu = gpu_named(name)
    earlier = Path(cfg.run.dir) / (cfg.run.name or "run") / "rollouts.jsonl"
    try:
        if gpu is None:
            raise ValueError(f"the data sheet of {name} is not known")
        found, mfu, said = expect.step(cfg, hf, world, gpu, earlier)
    except ValueError as error:
        return f"expected     no estimate of the step time: {error}"
    phases = ", ".join(f"{p} {s:.1f}" for p, s in found.phases.items() if s >= 0.05)
    without = "turns and rewards" if cfg.select.env else "rewards"
    if cfg.algo.needs_teacher:
        without += " and teachers"
    return (
        f"expected     {found.seconds:.1f} s per step on {world} x {gpu.name} ({phases}), "
        f"MFU of the update {mfu:.2f}, "
        f"simulated without {without}; lengths {said}"
    )


def rank_map(layout: "ParallelLayout", world: int, per_node: int, tp: int) -> str:
    """Return a line with the formulas for a rank's number from its position in the learner's
    `layout`, and for the first rank of an engine of size `tp`."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    stride, terms = 1, []
    for name, size in sizes.items():
        if size > 1:
            terms.append(name if stride == 1 else f"{stride} x {name}")
        stride *= size
    first = stride if stride < world else 0
    engine = (f"{first} + " if first else "") + (f"{tp} x engine" if tp > 1 else "engine")
    spread = layout.expert_ranks
    return (
        f"rank map     rank = {' + '.join(terms) or '0'}, counted from 0"
        + (f"; experts are sharded over {spread} neighbours of a stage" if spread > 1 else "")
        + f"; first rank of an engine = {engine}; node = rank / {per_node}"
    )


def split(cfg: Config, hf: HFConfig, world: int, per_node: int) -> str:
    """Return a line on how many ranks should sample, or why there is no estimate."""
    from rlcore.cli import splits

    folder = Path(cfg.run.dir) / (cfg.run.name or "run")
    plan = splits.planner(cfg, world, per_node)
    try:
        said = splits.by_data_sheet(plan, cfg, hf, world, folder / "rollouts.jsonl")
        said = splits.by_last_steps(plan, cfg, folder, world) or said
    except ValueError as error:
        said = f"no estimate of other numbers of rollout ranks: {error}"
    return f"balance      {said}"


def judges(cfg: Config, found: "Findings") -> tuple["OtherMemory", list[str]]:
    """Return the memory of judges on the run's own GPUs, and lines that describe the judges.

    Raises:
        ConfigError: the folder of a judge has no model.
    """
    from rlcore.cli.builders.rewards import beside, own_judges
    from rlcore.rewards.judge.residency import footprint

    sized, lines = [], []
    for key, section in own_judges(cfg).items():
        if not section.model:
            continue
        with found.check(f"--{key}.model {section.model}", may_lack=found.may_lack(section.model)):
            hf, where = model_of(section.model, "JUDGE_CONFIG", "--reward.model")
            sized.append((section, hf))
            stay = footprint(section, hf).num_resident
            lines += [
                f"judge        {where}",
                f"judge        {hf.arch}, {hf.num_layers} layers, at most {stay} resident on the "
                f"GPU (--{key}.resident_ratio {section.resident_ratio:g})",
            ]
    return beside(sized), lines


def taught(
    cfg: Config, found: "Findings", others: "OtherMemory"
) -> tuple["OtherMemory", list[str]]:
    """Return the memory of other models with that of teachers on the run's own GPUs, and lines that
    describe the teachers.

    Raises:
        ConfigError: the folder of a teacher has no model.
    """
    from rlcore.cli.builders import teachers

    sized, lines = {}, []
    for folder in teachers.folders(cfg):
        with found.check(f"--teacher.models {folder}", may_lack=found.may_lack(folder)):
            sized[folder], where = model_of(folder, "TEACHER_CONFIG", "--teacher.models")
            hf = sized[folder]
            lines.append(
                f"teacher      {where}: {hf.arch}, {hf.num_layers} layers, hidden {hf.hidden_size}"
            )
    return teachers.with_teachers(others, cfg, sized), lines


def model_of(
    path: str, variable: str = "MODEL_CONFIG", key: str = "--model.path"
) -> tuple[HFConfig, str]:
    """Read a model's architecture from its folder, else from the file that the recipe names in the
    environment variable `variable`.

    Returns:
        The architecture, and a text that names the folder or file.

    Raises:
        ConfigError: neither folder nor file exists, or the one found describes no model.
    """
    facts = os.environ.get(variable, "")
    if Path(path).is_dir() or not facts:
        return HFConfig.from_folder(path, key), path
    file = Path(facts)
    name = "/".join(file.parts[-3:])
    missing = f"no folder {path} on this machine"
    return HFConfig.from_dict(read_json(file)), f"read from {name}: {missing}"


def gpu_gb(cfg: Config) -> float:
    """Return the GPU memory in GB that the memory plan must fit; 0: no limit."""
    if cfg.cluster.gpu_memory_gb is not None:
        return cfg.cluster.gpu_memory_gb
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / 1e9
    return GPU_GB


def gpu_source(cfg: Config) -> str:
    """Return a note on the source of the GPU's memory size; "" with --cluster.gpu_memory_gb."""
    import torch

    if cfg.cluster.gpu_memory_gb is not None:
        return ""
    if torch.cuda.is_available():
        return " (GPU of this machine)"
    return " (assumed, this machine has no GPU; set --cluster.gpu_memory_gb)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
