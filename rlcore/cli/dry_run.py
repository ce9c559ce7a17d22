"""`--dry-run`: what would run, without running it. One process, whatever the world size."""

import os
import sys
from pathlib import Path

from rlcore.config import resolve, rules
from rlcore.config.schema import Config


def show(cfg: Config) -> int:
    """Print the resolved configuration, batch arithmetic and layout. 2 where a rule is broken."""
    from rlcore.hf.config import HFConfig
    from rlcore.mcore.layout import check_model, layout_of

    # recipes/common.sh tells the size of the real run
    world = int(os.environ.get("NODES", 1)) * int(os.environ.get("GPUS_PER_NODE", 1))
    problems = rules.broken(cfg)
    notes = [] if problems else [f"note         {line}" for line in rules.warnings(cfg)]
    layout = None
    try:
        layout = layout_of(cfg.train, world, 0)
    except ValueError as e:
        problems.append(str(e))
    if cfg.model.path and not Path(cfg.model.path).is_dir():
        notes.append(f"model        not checked: there is no folder {cfg.model.path} here")
    elif cfg.model.path:
        try:
            hf = HFConfig.from_folder(cfg.model.path)
            check_model(hf, cfg.train)
            notes.append(f"model        {hf.arch}, {hf.num_layers} layers, hidden {hf.hidden_size}")
        except ValueError as e:
            problems.append(str(e))
    print(resolve.to_json(cfg))
    total = cfg.data.prompts_per_step * cfg.rollout.samples_per_prompt
    per_update = cfg.train.samples_per_update or total
    print(
        f"\nstep         {cfg.data.prompts_per_step} prompts x {cfg.rollout.samples_per_prompt} "
        f"samples = {total} samples, {max(1, total // per_update)} updates of {per_update}, "
        f"{cfg.train.epochs} epoch(s); {cfg.run.steps} steps"
    )
    if layout is not None:
        print(
            f"world        {world} ranks: tp {layout.tp} x cp {layout.cp} x pp {layout.pp} x "
            f"dp {layout.dp}, ep {layout.ep}, vpp {layout.vpp}; {world} engines of one rank"
        )
    for line in notes:
        print(line)
    for line in problems:
        print(f"cannot run: {line}", file=sys.stderr)
    print("dry run: " + ("refused" if problems else "this would run"))
    return 2 if problems else 0
