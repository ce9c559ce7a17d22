"""`python -m rlcore profile`: measure how fast engines decode and prefill, by engine size.

    python -m rlcore profile --model.path MODEL --rollout.engine sglang --tp 1 2 --out profile.json

The command writes the table that `rlcore/sim/profile.py` describes and prints the best value of
--rollout.tp. All keys of `rlcore train` can be given. For each tensor-parallel size, an engine is
started as in a run, but with random weights.

Decode steps are timed from the moment at which all sequences have tokens until all end together. A
prefill is timed from the request to its only token. Every row is the median of three measurements.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlcore.cli import exits
from rlcore.records import (
    AnyEvent,
    Down,
    Finished,
    LengthReport,
    Request,
    Sampling,
    Stats,
    request_of,
)
from rlcore.sim import profile
from rlcore.sim.profile import Decode, EngineMeasurements, Prefill
from rlcore.utils.errors import ConfigError

if TYPE_CHECKING:  # importing torch would slow down --help
    from rlcore.cli.world import World
    from rlcore.config.schema import Config
    from rlcore.hf.config import HFConfig
    from rlcore.rollout.child import ChildEngine

LEAST_S = 0.3
"""Minimum seconds of decoding in a measurement, unless --steps limits the number of steps."""
FEWEST = 16
"""Minimum number of decode steps in a measurement."""
REPEATS = 3
"""Number of measurements per row of the table, which shows their median."""
REPORT_S = 0.02
"""Seconds between two progress reports of the engine."""


def main(argv: Sequence[str]) -> int:
    """Measure the times of engines. Return 2 if the command line is invalid, 1 on a failure."""
    p = argparse.ArgumentParser(
        prog="python -m rlcore profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("profile.json"),
        help="JSON file for the measurements (default: %(default)s)",
    )
    p.add_argument("--tp", type=int, nargs="+", help="tensor-parallel sizes; default: rollout.tp")
    p.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        help="batch sizes, in sequences per rank (default: %(default)s)",
    )
    p.add_argument(
        "--context",
        type=int,
        nargs="+",
        help="tokens per sequence; default: 1/8 and 1/2 of the longest possible",
    )
    p.add_argument(
        "--steps", type=int, default=512, help="maximum decode steps to time (default: %(default)s)"
    )
    a, rest = p.parse_known_args(list(argv))
    return exits.guard(lambda: run(a, rest))


def run(a: argparse.Namespace, rest: Sequence[str]) -> int:
    """Measure engines of all sizes, print and write the table. Return the exit code."""
    from rlcore.cli import settings

    cfg = settings.parse(rest)
    for name, values in (("tp", a.tp or [1]), ("batch", a.batch), ("steps", [a.steps])):
        if min(values) < 1:
            raise ConfigError(f"--{name} {min(values)}: must be at least 1")
    sizes = sorted(set(a.tp or [cfg.rollout.tp]))
    if cfg.rollout.engine == "torch" and sizes != [1]:
        raise ConfigError(
            f"--tp {sizes[-1]}: the torch engine has one rank; set --tp 1 or --rollout.engine "
            "sglang"
        )
    import torch

    from rlcore.cli.builders.model import model_config, with_downloads
    from rlcore.cli.world import World
    from rlcore.config import rules
    from rlcore.metrics.jsonl import write_atomic
    from rlcore.trainer import memory

    cfg = with_downloads(cfg, weights=False)
    hf = model_config(cfg)
    longest = memory.longest(cfg, hf)
    contexts = sorted(set(a.context or [max(longest // 8, 1), max(longest // 2, 1)]))
    if contexts[0] < 1 or contexts[-1] + FEWEST > hf.max_positions:
        raise ConfigError(
            f"--context {contexts[0]} to {contexts[-1]}: must be at least 1, and with {FEWEST} "
            f"decode steps fit the model's {hf.max_positions} positions"
        )
    cuda = torch.cuda.is_available()
    here = World(0, 1, 0, torch.device("cuda", 0) if cuda else torch.device("cpu"), None)
    before = os.getloadavg()[0]
    layouts = []
    for tp in sizes:
        layouts.append(measure(cfg, hf, here, tp, a.batch, contexts, a.steps))
        print("\n".join(rows_of(layouts[-1], heading=tp == sizes[0])), flush=True)
    load = before, os.getloadavg()[0]
    per_rank, context = max(a.batch), contexts[-1]
    best = profile.best(layouts, per_rank, context)
    head = {
        "engine": cfg.rollout.engine,
        "model": cfg.model.path,
        "device": torch.cuda.get_device_name(0) if cuda else f"cpu, {os.cpu_count()} cores",
        "dtype": rules.engine_dtype(cfg),
        "load": load,
    }
    table = profile.to_json(layouts, best_tp=best, head=head)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(a.out, json.dumps(table, indent=1) + "\n")
    rates = ", ".join(
        f"tp {x.tp} {profile.rate(x.cost, x.tp, per_rank, context):.0f}" for x in layouts
    )
    print(
        f"\nbest: --rollout.tp {best} (tokens/s of a rank that has {per_rank} sequences of "
        f"{context} tokens: {rates})"
    )
    if max(load) > (os.cpu_count() or 1) and not cuda:
        print(
            f"note: the load average was {max(load):.1f}, so other processes were running; measure "
            "again on an idle machine"
        )
    print(a.out)
    return 0


def rows_of(layout: EngineMeasurements, *, heading: bool) -> list[str]:
    """Return the measurements of one engine size as lines of text."""
    lines = ["  tp  sequences  context  ms/step  tokens/s/rank"] if heading else []
    for r in layout.decode:
        rate = r.sequences / r.step_s / layout.tp
        lines.append(
            f"{layout.tp:4}{r.sequences:11}{r.context:9.0f}{1000 * r.step_s:9.2f}{rate:15.0f}"
        )
    c = layout.cost
    lines.append(
        f"{layout.tp:4}  step {1e3 * c.step_s:.3g} ms + {1e6 * c.sequence_s:.3g} us a sequence + "
        f"{1e9 * c.context_s:.3g} ns a token of context, within "
        f"{profile.error(c, layout.decode):.0%}; prefill {1e6 * c.prefill_s:.3g} us a token; "
        f"{c.cache_tokens:.0f} tokens of cache; started in {layout.start_s:.1f} s"
    )
    return lines


def measure(
    cfg: "Config",
    hf: "HFConfig",
    here: "World",
    tp: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    steps: int,
) -> EngineMeasurements:
    """Measure an engine of `tp` ranks. Batches that do not fit the engine's KV cache are left out.

    Raises:
        ConfigError: no batch fits.
    """
    start = time.monotonic()
    most = min(hf.max_positions, max(contexts) + steps)
    engine = start_engine(cfg, hf, here, tp, max(batches) * tp, most)
    try:
        engine.begin_load(0)  # this call returns once the engine has started
        start_s = time.monotonic() - start
        load_random(engine, hf, tp, cfg.run.seed)
        bench = Bench(engine, hf.vocab_size, most, cfg.rollout.stall_timeout_s)
        bench.decode(1, 1, FEWEST)  # warm-up, in which the engine reports its KV cache size
        decode = []
        for context in contexts:
            for batch in sorted(set(batches)):
                if (row := bench.row(batch * tp, context, steps)) is not None:
                    decode.append(row)
        lengths = sorted({max(1, c // 4) for c in contexts} | set(contexts))
        prefill = [bench.prefill(n) for n in lengths if n < bench.cache_tokens]
    finally:
        engine.close()
    cost = profile.fit(decode, prefill, bench.cache_tokens)
    return EngineMeasurements(tp=tp, cost=cost, start_s=start_s, decode=decode, prefill=prefill)


def start_engine(
    cfg: "Config", hf: "HFConfig", here: "World", tp: int, max_running: int, max_model_tokens: int
) -> "ChildEngine":
    """Start an engine of `tp` ranks in a child process; return before the engine is ready."""
    from rlcore.cli.builders.engine import SGLANG_ENGINE, TORCH_ENGINE, engine_settings
    from rlcore.rollout.child import ChildEngine
    from rlcore.trainer.policies import with_tp

    sized = with_tp(cfg, tp)
    settings = engine_settings(sized, hf, here) | {
        "max_running": max_running,
        "max_model_tokens": max_model_tokens,
        "progress_s": REPORT_S,
    }
    factory = TORCH_ENGINE
    if cfg.rollout.engine == "sglang":
        factory, settings["tp"] = SGLANG_ENGINE, tp
    return ChildEngine(
        factory,
        settings,
        threads=cfg.rollout.threads,
        deadline_s=cfg.cluster.timeout_s,
        start_s=cfg.cluster.timeout_s,
    )


def load_random(engine: "ChildEngine", hf: "HFConfig", tp: int, seed: int) -> None:
    """Load random weights into the engine; their values do not affect its speed."""
    import torch

    from rlcore.hf.names import expected
    from rlcore.sync.pack import MAX_BYTES, pack
    from rlcore.utils.buckets import shared

    generator = torch.Generator().manual_seed(seed)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in expected(hf).items():
            scale = 1.0 if name.endswith("norm.weight") else 0.02
            yield name, torch.rand(shape, generator=generator) * scale

    for bucket, buffer in pack(weights(), MAX_BYTES):
        with shared(buffer) as path:
            named = msgspec.structs.replace(bucket, transport="shm")
            engine.load_bucket(named, [path.encode()] * tp)
    engine.end_load()


class Bench:
    """Client of an engine that sends requests and times the events of the engine."""

    def __init__(self, engine: Any, vocab_size: int, most: int, deadline_s: float) -> None:
        self._engine, self._vocab, self._most = engine, vocab_size, most
        self._deadline_s = deadline_s
        self._random = np.random.default_rng(0)
        self._sent = 0
        self.cache_tokens = 0

    def row(self, sequences: int, context: int, steps: int) -> Decode | None:
        """Measure the decode time for one batch size and context length. If the KV cache cannot
        hold all sequences until they end, return None."""
        count, enough = min(FEWEST, steps), min(steps, max(2 * context, FEWEST))
        rows: list[Decode] = []
        short: Decode | None = None  # last measurement that was too short to be precise
        while len(rows) < REPEATS:
            prompt = max(1, min(context - count // 2, self._most - count))
            if sequences * (prompt + count) > self.cache_tokens:
                if short is None:
                    break
                count, enough = count // 2, 0  # the KV cache has no room for more steps
                continue
            seconds, found = self.decode(sequences, prompt, count)
            if found is not None and (seconds >= LEAST_S or 2 * count > enough):
                rows.append(found)
            elif 2 * count > steps:
                break
            else:
                short, count = found, 2 * count
        if not rows:
            print(
                f"skipped: {sequences} sequences of {context} tokens do not fit the engine at once"
            )
            return None
        return sorted(rows, key=lambda row: row.step_s)[len(rows) // 2]

    def decode(self, sequences: int, prompt: int, steps: int) -> tuple[float, Decode | None]:
        """Decode `steps` tokens in each of `sequences` sequences, after `prompt` prompt tokens.

        Returns:
            The timed seconds, and the measurement (None: no report shows all sequences decoding).
        """
        events = self._play(sequences, prompt, steps)
        begun = [
            e
            for e in events
            if isinstance(e, LengthReport) and len(e.ids) == sequences and min(e.lengths) > 0
        ]
        if not begun or sum(begun[0].lengths) >= sequences * steps:
            return 0.0, None
        first = sum(begun[0].lengths) / sequences
        seconds = max(e.time for e in events if isinstance(e, Finished)) - begun[0].time
        context = prompt + (first + steps) / 2
        step_s = seconds / (steps - first)
        return seconds, Decode(sequences=sequences, context=context, step_s=step_s)

    def prefill(self, tokens: int) -> Prefill:
        """Measure the time of a prefill, from sending one prompt to its first token."""
        seconds = []
        for _ in range(REPEATS):
            start = time.monotonic()
            self._play(1, tokens, 1)
            seconds.append(time.monotonic() - start)
        return Prefill(tokens=tokens, seconds=float(np.median(seconds)))

    def _play(self, sequences: int, prompt: int, steps: int) -> list[AnyEvent]:
        """Send random prompts, wait for all responses, and return all events of the engine."""
        requests = []
        for _ in range(sequences):
            tokens = self._random.integers(0, self._vocab, prompt).astype(np.int32)
            sampling = Sampling(max_tokens=steps)
            requests.append(
                Request(id=request_of(f"p{self._sent}", 0), prompt=tokens, sampling=sampling)
            )
            self._sent += 1
        events: list[AnyEvent] = []
        left, end = sequences, time.monotonic() + self._deadline_s
        self._engine.submit(requests)
        while left:
            new = self._engine.poll(1.0)
            events += new
            for event in new:
                if isinstance(event, Down):
                    raise RuntimeError(event.reason)
                if isinstance(event, Stats):
                    self.cache_tokens = max(self.cache_tokens, event.cache_tokens)
                left -= isinstance(event, Finished)
            if time.monotonic() > end:
                raise TimeoutError(
                    f"--rollout.stall_timeout_s {self._deadline_s:g} exceeded: {left} of "
                    f"{sequences} sequences of {prompt} + {steps} tokens are unfinished; raise it"
                )
        return events
