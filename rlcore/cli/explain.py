"""`python -m rlcore explain`: show the batch sizes of a step, also as keys of verl and slime."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcore.cli import exits
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlcore.config.schema import Config


def main(argv: Sequence[str]) -> int:
    """Print the batch arithmetic for the given keys. The number of ranks is the product of the
    environment variables NODES and GPUS_PER_NODE. Return 2 if the keys are invalid."""
    return exits.guard(lambda: _main(argv))


def _main(argv: Sequence[str]) -> int:
    from rlcore.cli import settings
    from rlcore.config import rules

    if "--help" in argv or "-h" in argv:
        print(f"{__doc__}\n\n  python -m rlcore explain [any key of rlcore train]")
        return 0
    cfg = settings.parse(list(argv))
    if found := rules.of_batch(cfg):
        raise ConfigError("\n".join(found))
    from rlcore.mcore.layout import layout_of

    world = world_size()
    train_ranks = max(world - cfg.cluster.rollout_ranks, 1)
    print("\n".join(arithmetic(cfg, world, layout_of(cfg.train, train_ranks, 0).dp)))
    return 0


def world_size() -> int:
    """Return the number of ranks that recipes/common.sh would start."""
    nodes, per_node = (int(os.environ.get(name, 1)) for name in ("NODES", "GPUS_PER_NODE"))
    return nodes * per_node


def arithmetic(cfg: "Config", world: int, dp: int) -> list[str]:
    """Return lines with the sizes of step, update and run, also as keys of verl and slime."""
    prompts, samples = cfg.data.prompts_per_step, cfg.rollout.samples_per_prompt
    total = prompts * samples
    per_update = cfg.train.samples_per_update or total
    updates = max(1, total // per_update)
    most = cfg.data.max_prompt_tokens + cfg.rollout.max_tokens
    engines = (cfg.cluster.rollout_ranks or world) // cfg.rollout.tp
    started = f"{prompts} prompts x {samples} responses"
    if cfg.select.schedule == "tail_batching":
        tail = cfg.tail
        a, b = int(tail.eta_prompts * prompts + 1e-9), round(tail.eta_samples * samples)
        started = f"start {a} prompts x {b} responses, keep the first {started}"
    room = engines * cfg.rollout.max_running_requests
    waves = math.ceil(total / max(room, 1))
    return [
        f"step         {started} = {total} samples",
        f"update       {updates} of {per_update} samples, {cfg.train.epochs} epoch(s): "
        f"{updates * cfg.train.epochs} optimizer steps per step",
        f"rank         {per_update / dp:g} samples per update on each of {dp} data-parallel ranks, "
        f"in micro-batches of {cfg.train.tokens_per_micro_batch} tokens",
        f"tokens       at most {cfg.data.max_prompt_tokens} + {cfg.rollout.max_tokens} = {most} "
        f"per sample, {_short(total * most)} per step, {_short(per_update / dp * most)} per update "
        "of a rank",
        f"decoding     {engines} engine(s) of {cfg.rollout.tp} rank(s), "
        f"{cfg.rollout.max_running_requests} requests each: {waves} wave(s) if all responses are "
        "long",
        f"run          {cfg.run.steps} steps = {_short(cfg.run.steps * prompts)} prompts, "
        f"{_short(cfg.run.steps * total)} samples, {cfg.run.steps * updates * cfg.train.epochs} "
        "optimizer steps",
        f"in verl      data.train_batch_size {prompts}, rollout.n {samples}, "
        f"actor.ppo_mini_batch_size {per_update / samples:g} (counted in prompts)",
        f"in slime     --rollout-batch-size {prompts} --n-samples-per-prompt {samples} "
        f"--global-batch-size {per_update}",
    ]


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * size:
            return f"{number / size:.0f} {letter}"
    return f"{number:g}"
