"""One rank's learner of a recipe at its real size, on the pretend device of mode `sizes`.

    python -m tests.pretend.profile recipes/grpo_32b.sh
    python -m tests.pretend.profile --table > tools/results/gpu_counts.md

Nothing is computed, and the other ranks do not exist: collectives return at once. What remains is
what this rank allocates, launches, synchronises and copies in each phase of a step.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests import pretend

ROOT = pretend.ROOT
STUB = """#!/bin/sh
[ "$1" = -c ] && exec {python} "$@"
shift 4 # -u -m rlcore train
exec {python} -c "{record}" "$@"
"""
"""Python for a recipe's dry run: it prints the arguments instead."""
LEVELS = ("peak", "allocated", "pinned")
NAMES = (*LEVELS, "launches", "syncs", "bytes_to_device", "bytes_to_host")


def measure(
    recipe: str,
    *keys: str,
    rank: int = 0,
    computed: int = 300_000,
    timeout_s: float = 800.0,
    module: str = "tests.pretend.profile",
) -> dict[str, Any]:
    """Return the figures of each phase of the rank, and what its memory plan expects. Tensors of
    more than `computed` elements are not computed; routes to experts must be. Rank -1 is the last.
    `module` calls `main`.
    """
    args = _arguments(recipe, *keys)
    env = pretend.environment("sizes", os.environ | args["env"])
    env |= {"RLCORE_PRETEND_CUDA_DEVICES": "1", "RLCORE_PRETEND_CUDA_BYTES": "200000000000"}
    env["RLCORE_PRETEND_CUDA_ELEMENTS"] = str(computed)
    command = [sys.executable, "-m", module, "--rank", str(rank), *args["argv"]]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise AssertionError(f"{recipe}: {done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _arguments(recipe: str, *keys: str) -> dict[str, Any]:
    """Return the arguments that a recipe gives the program, and its variables."""
    wanted = "NODES", "GPUS_PER_NODE", "MODEL_CONFIG", "JUDGE_CONFIG"
    record = (
        "import json, os, sys; print(json.dumps({'argv': sys.argv[1:], 'env': "
        f"{{n: os.environ[n] for n in {wanted} if n in os.environ}}}}))"
    )
    stub = ROOT / "build" / "pretend" / "record.sh"
    stub.parent.mkdir(parents=True, exist_ok=True)
    stub.write_text(STUB.format(python=sys.executable, record=record))
    stub.chmod(0o755)
    command = ["bash", str(ROOT / recipe), "--dry-run", *keys]
    env = os.environ | {"PYTHON": str(stub)}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    from rlcore.cli import settings
    from rlcore.cli.builders.model import with_layers
    from rlcore.cli.builders.rewards import own_judges
    from rlcore.cli.dry_run import model_of

    cfg = settings.parse([a for a in argv[2:] if a != "--dry-run"])
    hf = with_layers(cfg, model_of(cfg.model.path)[0])
    found = _train(cfg, hf, int(argv[1]))
    found["judges"] = [
        _judge(section, model_of(section.model, "JUDGE_CONFIG", "--reward.model")[0])
        for section in own_judges(cfg).values()
    ]
    print(json.dumps(found))


class Phases:
    """Figures of each phase, from the pretend device's counters."""

    counter: Any = None
    """Counter of `costs.py` that counts operations, too."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._last = pretend.stats()

    def mark(self, phase: str) -> None:
        """End a phase."""
        now = pretend.stats()
        self.found[phase] = {n: now[n] - (0 if n in LEVELS else self._last[n]) for n in NAMES}
        if self.counter is not None:
            self.found[phase]["work"] = self.counter.taken()
        self._last = now
        pretend.reset_peak()


def _train(cfg: Any, hf: Any, rank: int) -> dict[str, Any]:
    """Step the rank's learner, and its critic, without the other ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlcore.mcore import bridge, learner
    from rlcore.mcore.layout import layout_of
    from rlcore.trainer import memory
    from rlcore.trainer.policies import estimator

    world = int(os.environ["NODES"]) * int(os.environ["GPUS_PER_NODE"]) - cfg.cluster.rollout_ranks
    rank %= world
    helper = c10d._new_process_group_helper

    def fake(
        size: int, number: int, ranks: Any, backend: Any, store: Any, *a: Any, **k: Any
    ) -> Any:
        return helper(size, number, ranks, dist.Backend("fake"), store, *a, **k)

    c10d._new_process_group_helper = fake
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    bridge.init_random = zeroed
    _multiply_into_float32()
    _balance_experts()
    learner.isfinite = lambda x: True  # nothing is computed, so a norm may be anything
    phases = Phases()
    model = replace(cfg.model, random_init=True)
    device = torch.device("cuda", 0)
    keep = cfg.algo.needs_reference
    own = learner.MegatronLearner(hf, model, cfg.train, device=device, keep_reference=keep)
    every = [own]
    if estimator(cfg) == "gae":
        critic = learner.MegatronLearner(hf, model, cfg.train, device=device, head="value")
        every.append(critic)
    phases.mark("build")
    layout = layout_of(cfg.train, world, rank)
    longest = memory.longest(cfg, hf)
    total = max(cfg.train.tokens_per_micro_batch, longest)
    batch = _batch(total, longest, layout.pp)
    if layout.pp > 1:  # no other stage sends the shapes of its micro-batches, which are all alike
        cut = own._cutter.cut(batch, own._cutter.groups(batch), layout.pp)
        rows = next(cut.micro_batches).tokens.size(1) // (layout.tp if cfg.train.sp else 1)
        shape = [rows, 1, hf.hidden_size]
        P2PCommunicator._communicate_shapes = lambda *_: (shape, shape)

    def accumulate() -> None:
        own.accumulate(batch, _Loss())
        for critic in every[1:]:
            critic.accumulate(batch, _ValueLoss())

    accumulate()
    for one in every:
        one.apply(1.0)
    phases.mark("first step")
    own.logprobs(batch)  # the optimizer's state exists since the first step
    if keep:
        own.logprobs(batch, "reference")
    for critic in every[1:]:
        critic.values(batch)
    phases.mark("old_log_prob")
    accumulate()
    phases.mark("update_actor")
    for one in every:
        one.apply(1.0)
    phases.mark("optimizer_step")
    resident = sum(sum(one.resident_bytes().values()) for one in every)
    if cfg.train.offload:
        for one in every:
            one.offload()
        phases.mark("offload")
        for one in every:
            one.onload()
        phases.mark("load_learner")
    for _ in own.export():
        pass
    phases.mark("update_weights")
    plan = memory.make(cfg, hf, layout, gpu_bytes=80e9)
    return {
        "phases": phases.found,
        "micro_batches": layout.pp,
        "tokens": total,
        "longest": longest,
        "resident": resident,
        "plan": {
            name: {item.part: item.num_bytes for item in items}
            for name, items in plan.phases.items()
        },
        "host": {item.part: item.num_bytes for item in plan.host},
    }


def zeroed(chunks: Any, *_: Any, **__: Any) -> None:
    """Initialise a model without random numbers, in place of `bridge.init_random`."""
    for chunk in chunks:
        for p in chunk.parameters():
            p.data.zero_()


def fp32_product(a: Any, b: Any, out: Any) -> Any:
    """Stand in for `torch.mm` with a float32 result, which the pretend device does not have."""
    return out


def _multiply_into_float32() -> None:
    import torch

    from rlcore.ops import head

    def mm(a: Any, b: Any, *, out_dtype: Any = None, out: Any = None) -> Any:
        return plain(a, b, out=out) if out_dtype is None else fp32_product(a, b, out)

    plain, torch.mm = torch.mm, mm
    head.gives_float32 = lambda device, dtype: dtype is torch.bfloat16  # type: ignore[assignment]


def _judge(cfg: Any, hf: Any) -> dict[str, Any]:
    """Let a judge read its largest batch, and return its figures and its plan."""
    import torch

    from rlcore.hf.names import expected
    from rlcore.rewards.judge.model import JudgeModel
    from rlcore.rewards.judge.residency import footprint

    # The pretend device has the plain kernel alone. Flash attention writes its output only.
    torch.nn.functional.scaled_dot_product_attention = lambda q, *_, **__: torch.empty_like(q)
    phases = Phases()
    begin = pretend.stats()["allocated"]
    plan = footprint(cfg, hf)
    with TemporaryDirectory(prefix="judge") as folder:
        _hollow(Path(folder), hf, expected(hf))
        model = JudgeModel(
            folder,
            dtype=cfg.dtype,
            device=torch.device("cuda", 0),
            resident_ratio=cfg.resident_ratio,
        )
        model.load_layers(plan.work)
    phases.mark("load")
    longest = min(cfg.max_tokens, hf.max_positions)
    rows = max(1, min(cfg.batch_rows, cfg.batch_tokens // longest))
    model.probabilities([[1] * longest] * rows, [5, 6])
    phases.mark("batch")
    for row in phases.found.values():
        row["peak"] -= begin
    stays, work = plan.stay, plan.work
    return {"phases": phases.found, "plan": {"load": stays, "batch": stays + work}}


def _hollow(folder: Path, hf: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a model without data: a file of holes behind a header."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(file, 8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(hf.to_dict()))


def _balance_experts() -> None:
    """Let experts take turns, on all ranks alike, since no router's logits are computed."""
    import torch
    from megatron.core.transformer.moe import router, token_dispatcher

    choose, gather = (
        router.topk_routing_with_score_function,
        token_dispatcher.gather_from_sequence_parallel_region,
    )

    def in_turn(logits: Any, k: int, **options: Any) -> Any:
        probs, routes = choose(logits, k, **options)
        tokens, experts = routes.shape
        chosen = torch.arange(tokens * k, device=routes.device).view(tokens, k) % experts
        return probs, torch.zeros_like(routes).scatter_(1, chosen, True)

    def gathered(value: Any, *a: Any, group: Any, **k: Any) -> Any:
        if value.dim() == 1 and not value.is_floating_point():  # counts: those of every rank
            return value.repeat(group.size())
        return gather(value, *a, group=group, **k)

    router.topk_routing_with_score_function = in_turn
    token_dispatcher.gather_from_sequence_parallel_region = gathered


def _batch(total: int, longest: int, copies: int) -> Any:
    """Return `copies` micro-batches of `total` tokens, in sequences of at most `longest`."""
    import torch

    from rlcore.tensors import Batch, cumulative

    lengths = [longest] * (total // longest) + ([total % longest] if total % longest else [])
    lengths, total = lengths * copies, total * copies
    g = torch.Generator().manual_seed(0)
    return Batch(
        tokens=torch.randint(0, 1000, (total,), generator=g),
        cu_seqlens=cumulative(lengths),
        mask=torch.cat([torch.arange(n) > 10 for n in lengths]),
        old_log_probs=-torch.rand(total, generator=g),
        advantage=torch.randn(total, generator=g),
        score=torch.randn(total, generator=g),
        returns=torch.randn(total, generator=g),
        ids=tuple(map(str, range(len(lengths)))),
    )


class _Loss:
    needs_entropy_grad = False

    def __call__(self, x: Any) -> Any:
        from rlcore.tensors import LossOutput

        return LossOutput(per_token=-x.log_probs * x.advantage, metrics={})


class _ValueLoss:
    def __call__(self, x: Any) -> Any:
        from rlcore.tensors import LossOutput

        return LossOutput(per_token=(x.value - x.returns).square(), metrics={})


TABLE = """# Launches, syncs and copies of a step

Counted on the pretend device at real sizes, on one rank of each recipe; nothing was computed, and
no time can be told. Made by `python -m tests.pretend.profile --table`.

Update: forward and backward of a micro-batch. Log-probs: a forward of one. Optimizer: a step.
MB: copied to the device and to the host.
"""


def table() -> str:
    """Return the figures of all GPU recipes as a page."""
    from tests.pretend.test_profile import CASES, measured

    heads = [f"{what} {unit}" for what in ("update", "log-probs") for unit in ("launches", "syncs")]
    heads += ["update MB", "optimizer launches", "optimizer syncs", "offload and onload MB"]
    rows = [["recipe", "micro-batches", *heads]]
    for case in CASES:
        print(case, file=sys.stderr)
        found = measured(case)
        phases, count = found["phases"], found["micro_batches"]
        update, log_probs, step = (
            phases[name] for name in ("update_actor", "old_log_prob", "optimizer_step")
        )
        moved = [phases[name] for name in ("offload", "load_learner") if name in phases]
        figures = [row[n] / count for row in (update, log_probs) for n in ("launches", "syncs")]
        figures += [_copied(update) / count, step["launches"], step["syncs"]]
        figures.append(sum(map(_copied, moved)))
        rows.append([case, str(count), *(f"{x:,.0f}" for x in figures)])
    rows.insert(1, ["---"] * len(rows[0]))
    return TABLE + "\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _copied(row: dict[str, int]) -> float:
    return (row["bytes_to_device"] + row["bytes_to_host"]) / 1e6


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        main(sys.argv[1:])
    elif sys.argv[1] == "--table":
        print(table())
    else:
        print(json.dumps(measure(*sys.argv[1:]), indent=1))
