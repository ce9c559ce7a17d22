"""Build the teachers of a rank that trains, check them, and plan their memory."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from rlcore.cli.builders.model import max_model_tokens
from rlcore.cli.builders.start import BuildContext
from rlcore.config.rules import is_server, teachers_of
from rlcore.config.schema import Config
from rlcore.hf import residency
from rlcore.hf.config import HFConfig
from rlcore.hf.tokenizer import load_tokenizer
from rlcore.teacher.model import TeacherModel, work_bytes
from rlcore.teacher.scores import TokenScorer
from rlcore.teacher.server import TeacherServer
from rlcore.teacher.teachers import Teachers
from rlcore.trainer import memory
from rlcore.utils import collective
from rlcore.utils.errors import ConfigError
from rlcore.utils.host_room import room_bytes
from rlcore.utils.log import announce


def make_teachers(
    start: BuildContext, model_parallel_groups: Sequence[Sequence[int]]
) -> Teachers | None:
    """Return the teachers of a rank that trains; None if the algorithm needs none. Collective over
    the train ranks."""
    cfg, world = start.cfg, start.world
    if not cfg.algo.needs_teacher or not world.trains:
        return None
    top_k = top_k_of(cfg)
    timeout = timedelta(seconds=cfg.cluster.timeout_s)
    group = _group(model_parallel_groups, world.rank, timeout)
    scorers: dict[str, TokenScorer] = {}
    for dataset, model in teachers_of(cfg).items():
        made: TeacherModel | TeacherServer
        if is_server(model):
            made = TeacherServer(model, cfg.teacher, top_k=top_k, seed=world.rank)
        else:
            check(cfg, start.hf, model)
            made = TeacherModel(
                model,
                dtype=dtype_of(cfg),
                device=world.device,
                vocab_size=start.hf.vocab_size,
                temperature=cfg.rollout.temperature,
                top_k=top_k,
                batch_tokens=cfg.teacher.batch_tokens,
                resident_ratio=cfg.teacher.resident_ratio,
            )
        start.on_close(made.close)
        scorers[dataset] = made
        announce("teacher", f"{model}{f' for {dataset}' if dataset else ''}")
    return Teachers(scorers, top_k, group)


def top_k_of(cfg: Config) -> int:
    """Return how many likeliest tokens the teachers return; 0: none."""
    return cfg.teacher.top_k if cfg.algo.uses_teacher_top else 0


def dtype_of(cfg: Config) -> torch.dtype:
    """Return the data type of teachers from folders."""
    name = cfg.model.dtype if cfg.teacher.dtype == "auto" else cfg.teacher.dtype
    return getattr(torch, name)


def _group(
    model_parallel_groups: Sequence[Sequence[int]], rank: int, timeout: timedelta
) -> collective.Group:
    """Make a process group of each model-parallel group, and return this rank's; None if the groups
    have one rank. Collective over the train ranks."""
    found = None
    for ranks in model_parallel_groups if len(model_parallel_groups[0]) > 1 else ():
        made = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            found = made
    return found


def check(cfg: Config, hf: HFConfig, folder: str) -> HFConfig:
    """Check that a teacher from a folder can score the policy's tokens. Return its architecture.

    Raises:
        ConfigError: its tokenizer is another one, or it has too few positions or tokens.
    """
    teacher = HFConfig.from_folder(folder, "--teacher.models")
    key = f"--teacher.models {folder}"
    own = load_tokenizer(folder, key="--teacher.models")
    policy = load_tokenizer(cfg.model.tokenizer or cfg.model.path)
    if (word := policy.first_difference(own)) is not None:
        raise ConfigError(
            f"{key}: has another tokenizer than the policy, for example for {word!r}, so it cannot "
            "score the policy's tokens; give a model of the same family"
        )
    if (longest := max_model_tokens(cfg, hf)) > teacher.max_positions:
        raise ConfigError(
            f"{key}: has {teacher.max_positions} positions, but prompt and response may have "
            f"{longest} tokens; lower --rollout.max_tokens"
        )
    if (top_k := top_k_of(cfg)) > min(teacher.vocab_size, hf.vocab_size):
        raise ConfigError(
            f"--teacher.top_k {top_k}: the vocabulary has only "
            f"{min(teacher.vocab_size, hf.vocab_size)} tokens; lower it"
        )
    return teacher


def folders(cfg: Config) -> list[str]:
    """Return the folders of the teachers that compute on the run's own GPUs; none of an invalid
    --teacher.models, which the rules report."""
    if not cfg.algo.needs_teacher:
        return []
    with suppress(ConfigError):
        return [model for model in teachers_of(cfg).values() if not is_server(model)]
    return []


def with_teachers(
    others: memory.OtherMemory, cfg: Config, found: Mapping[str, HFConfig]
) -> memory.OtherMemory:
    """Add the memory of teachers, by folder, to that of other processes."""
    if not found:
        return others
    dtype = dtype_of(cfg)
    stay = work = host = 0
    for hf in found.values():  # one after the other
        sizes = residency.sizes_of(hf, dtype)
        stay = max(stay, sizes.outer + min(residency.SLOTS, sizes.num_layers) * sizes.layer)
        work = max(work, work_bytes(hf, dtype, cfg.teacher.batch_tokens))
        host += room_bytes(sizes.num_layers * sizes.layer)
    return replace(
        others,
        teacher=(
            memory.Item("teacher", stay, comes_later=True),
            memory.Item("teacher's work", work, True, True),
        ),
        host=(*others.host, memory.Item("teacher's layers", host)),
    )
