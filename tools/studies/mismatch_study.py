"""How far sampler and learner are apart on the same weights, setting by setting.

    python tools/studies/mismatch_study.py --quick              # a minute, 2 cores
    python tools/studies/mismatch_study.py --json FILE          # ten, with a picture
    python tools/studies/mismatch_study.py --sglang --json FILE # samplers by SGLang

With mu the probability that the sampler recorded for a sampled token and p the Megatron
learner's for the same token, of every response

    max_t |mu - p|    mean_t |mu - p|    k1 = mean -log w    k3 = mean (w - 1 - log w)    w = p / mu

over the learner's layout and precision, the sampler's precision, response length and model. What a
sampler setting has sampled is scored by every learner. Weights are rounded to bfloat16 once, as
models are published, so that all precisions compute with the same ones; temperature 1.

    learner    tp, cp; `sp` is Megatron's sequence parallelism, a form of tensor parallelism. What
               the study calls SP (Ulysses: a sequence is cut over ranks) is nearest to cp
    sampler    the torch engine, in three precisions: `fp32-head` computes the logits in fp32
               (`--rollout.fp32_lm_head`). With --int8 also `bf16 int8` (--rollout.quantize).
               --sglang measures this axis alone: also SGLang at TP 1
               and 2, samplers in bf16, `short` only, under learners of one rank and `tp2 sp`
    length     `short`, `5 x short` (five responses as one), `long`, and the first part of a long
               one: all of forced length, no stop token. `own ...`: responses that end by
               themselves, of a trained model; the longest third, the shortest third, and as many
               first tokens of the longest as the shortest have
    model      `random` and `sft`, 0.4 M weights: at its start and after `rlcore tiny`; `deep` and
               `moe`: random, hidden 256, 8 layers; `moe R3`: the learner computes `moe` with the
               sampler's experts (--algo.routing_replay); with `--trained FOLDER` also `rl`, with
               `--mixture FOLDER`, made by `rlcore tiny --experts 8`, also `sft moe` and its R3

Differs from the study (fengyao.notion.site/off-policy-rl; 512 prompts of DAPO-Math-17k, vLLM and
FSDP on GPUs): tiny models, CPU, tens of responses, and forced lengths. `findings` puts beside each
of its findings what the rows show; every verdict is computed from them.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rlcore.cli.builders.engine import SGLANG_ENGINE  # noqa: E402
from rlcore.config.schema import ModelConfig, TrainConfig  # noqa: E402
from rlcore.data import label_task  # noqa: E402
from rlcore.data.packing import pack_samples  # noqa: E402
from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.names import expected, num_parameters  # noqa: E402
from rlcore.hf.weights import read_folder, save_folder  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.metrics.plots import COLORS  # noqa: E402
from rlcore.records import Down, Finished, Request, Sample, Sampling  # noqa: E402
from rlcore.rollout.child import ChildEngine  # noqa: E402
from rlcore.rollout.torch_engine.engine import TorchEngine  # noqa: E402
from rlcore.sync.pack import MAX_BYTES, pack  # noqa: E402
from rlcore.tensors import Batch  # noqa: E402
from rlcore.utils import collective, env  # noqa: E402
from rlcore.utils.seed import derive  # noqa: E402

Row = dict[str, Any]

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, "sp": False},
    "tp2 sp": {"tp": 2},
    "cp2": {"cp": 2},
    "tp2 sp cp2": {"tp": 2, "cp": 2},
    "tp4 sp": {"tp": 4},
    "cp4": {"cp": 4},
}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SAMPLERS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "bf16 fp32-head": {"dtype": "bfloat16", "fp32_head": True},
    "bf16 int8": {"dtype": "bfloat16", "quantize": "int8"},
}
"""Options of an engine."""
BACKENDS = {"torch tp1": 1, "sglang tp1": 1, "sglang tp2": 2}
"""Engines, with their tensor-parallel sizes."""
OTHERS = tuple(name for name in BACKENDS if name != "torch tp1")
SPLIT = ("short", "5 x short", "long", "first of long")
OWN = ("own short", "own long", "first of own long")
TINY_TOKENS = len(label_task.VOCAB)
OWN_MOST = 144
"""Most tokens of an answer to the tiny task."""
MIXTURES = (("moe", "deep"), ("sft moe", "sft"))
"""Mixtures of experts, each with the dense model of its width."""
FLOOR = 2.0**-24
"""Spacing of float32 below 1: a smaller difference is taken for this one in ratios."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    prompts: int = 24
    deep_prompts: int = 8
    """Of the models with 8 layers."""
    own: int = 192
    """Responses that end by themselves; 0: none."""
    short: int = 200
    long: int = 1000
    """0: none of these responses."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    samplers: tuple[str, ...] = ("fp32", "bf16", "bf16 fp32-head")
    all_precisions: tuple[str, ...] = ("one", "tp2 sp", "cp2")
    """Layouts under which every learner precision meets every sampler; the others are measured with
    equal ones."""


QUICK = Size(
    prompts=8,
    deep_prompts=2,
    own=48,
    short=60,
    long=300,
    layouts=("one", "tp2", "tp2 sp", "cp2"),
    all_precisions=("one",),
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the study."""

    name: str
    folder: Path
    hf: HFConfig
    prompts: int
    ends: bool
    """It was trained to end its answers."""


@dataclass(frozen=True)
class Unit:
    """What counts as one response: rows of the batch, at most `most` response tokens of each."""

    rows: tuple[int, ...]
    most: int = sys.maxsize


@dataclass
class Sampled:
    """What one sampler setting made of one model."""

    batch: Batch
    units: dict[str, list[Unit]] = field(default_factory=dict)

    def logps(self, values: torch.Tensor) -> list[np.ndarray]:
        """Response by response, float64."""
        lengths = self.batch.lengths
        parts = zip(values.split(lengths), self.batch.mask.split(lengths), strict=True)
        return [part[mask].double().numpy() for part, mask in parts]


def of_samplers(size: Size) -> Size:
    """For the sampler's axis: a third of the responses or less, `short` alone."""
    layouts = "one", "tp2 sp"
    return replace(
        size,
        prompts=max(1, size.prompts // 3),
        deep_prompts=max(1, size.deep_prompts // 4),
        long=0,
        own=0,
        samplers=("bf16", "bf16 fp32-head"),
        layouts=layouts,
        all_precisions=layouts,
    )


# ---- statistics


def summary(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> Row:
    """Figures over responses; a pair is log mu and log p of the tokens of one response."""
    if not pairs or any(len(mu) != len(p) or not len(mu) for mu, p in pairs):
        raise ValueError("responses: at least one, and of each as many log-probs on both sides")
    diffs = [np.abs(np.exp(mu) - np.exp(p)) for mu, p in pairs]
    maxima = np.array([d.max() for d in diffs])
    log_w = np.concatenate([p - mu for mu, p in pairs])
    return {
        "responses": len(pairs),
        "tokens": int(log_w.size),
        "max": float(maxima.max()),
        "p99": float(np.quantile(maxima, 0.99)),
        "median": float(np.median(maxima)),
        "p10": float(np.quantile(maxima, 0.1)),
        "mean": float(np.mean([d.mean() for d in diffs])),
        "k1": float(-log_w.mean()),
        "k3": float((np.expm1(log_w) - log_w).mean()),
        "above_half": int((maxima > 0.5).sum()),
        "above_tenth": int((maxima > 0.1).sum()),
        "above_hundredth": int((maxima > 0.01).sum()),
        "maxima": maxima.tolist(),
    }


def rows_of(
    sampled: Sampled, logp: torch.Tensor, labels: Mapping[str, str], lengths: Sequence[str]
) -> list[Row]:
    """One row per length."""
    mu, p = sampled.logps(sampled.batch.rollout_log_probs), sampled.logps(logp)
    found = []
    for length in lengths:
        pairs = [
            tuple(np.concatenate([side[r][: unit.most] for r in unit.rows]) for side in (mu, p))
            for unit in sampled.units[length]
        ]
        found.append({**labels, "length": length, **summary(pairs)})
    return found


def finish(rows: list[Row]) -> list[Row]:
    """Name, value, baseline and ratio: the value is the largest mismatch, the baseline that of one
    rank with everything else equal."""
    keys = ("model", "learner_dtype", "sampler", "sampler_dtype", "length")
    base = {tuple(r[k] for k in keys): r["max"] for r in rows if r["learner"] == "one"}
    for r in rows:
        one = base[tuple(r[k] for k in keys)]
        r["name"] = " / ".join(
            [
                r["model"],
                f"{r['learner']} {r['learner_dtype']}",
                f"{r['sampler']} {r['sampler_dtype']}",
                r["length"],
            ]
        )
        r |= {"value": r["max"], "unit": "probability", "baseline": one}
        r["ratio"] = r["max"] / one if one > 0 else None
    return rows


# ---- models and samples


def subjects(folder: Path, a: argparse.Namespace, size: Size) -> list[Subject]:
    """Write the models into `folder`, weights rounded to bfloat16."""
    most = max(size.short, size.long, OWN_MOST) + 3 * len(label_task.LABELS)
    tiny = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": TINY_TOKENS,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": label_task.EOS,
    }
    # Wide enough an initialisation that a random model has opinions: log-probs of about -2.3.
    deep = tiny | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "vocab_size": 64,
    }
    moe = deep | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 384,
        "norm_topk_prob": True,
    }
    found = []

    def add(name: str, hf: HFConfig, tensors: Iterator, prompts: int, ends: bool = False) -> None:
        hf = hf.with_(max_positions=most)
        rounded = ((n, t.to(torch.bfloat16).float()) for n, t in tensors)
        save_folder(rounded, hf, None, folder / name)
        found.append(Subject(name=name, folder=folder / name, hf=hf, prompts=prompts, ends=ends))

    def random(name: str, config: dict[str, Any], prompts: int) -> None:
        hf = HFConfig.from_dict(config)
        add(name, hf, random_weights(hf, derive(a.seed, name)), prompts)

    random("random", tiny, size.prompts)
    warm = warm_started(a)
    trained = {"trained": ("rl", a.trained), "mixture": ("sft moe", a.mixture)}
    for key, (name, path) in {"dir": ("sft", warm), **trained}.items():
        if path is not None:
            hf = HFConfig.from_folder(path)
            if hf.vocab_size != TINY_TOKENS:
                raise ValueError(
                    f"--{key} {path}: has {hf.vocab_size} tokens and the tiny task {TINY_TOKENS};"
                    " give the hf folder of a run on the tiny task"
                )
            add(name, hf, read_folder(path, hf), size.prompts, ends=True)
    random("deep", deep, size.deep_prompts)
    random("moe", moe, size.deep_prompts)
    return found


def chosen(subjects: list[Subject], names: Sequence[str] | None) -> list[Subject]:
    """Those of these names, or all."""
    known = [subject.name for subject in subjects]
    if unknown := sorted(set(names or ()) - set(known)):
        raise ValueError(f"--models {unknown[0]}: is not here; take some of {', '.join(known)}")
    return [subject for subject in subjects if not names or subject.name in names]


def random_weights(hf: HFConfig, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Norms 1, the rest normal with `initializer_range`."""
    for name, shape in expected(hf).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(shape)
        else:
            generator = torch.Generator().manual_seed(derive(seed, name))
            yield name, torch.randn(shape, generator=generator) * hf.initializer_range


def warm_started(a: argparse.Namespace) -> Path | None:
    """The warm-started tiny model, where the recipes keep it; made if it is not there."""
    path = a.dir / "models" / f"label-s{a.seed}"
    if (path / "model.safetensors").is_file():
        return path
    command = [sys.executable, "-m", "rlcore", "tiny", "--seed", str(a.seed), "--out", str(path)]
    if a.quick:
        print(f"--quick leaves sft out: {path} is not there; {' '.join(command[1:])} makes it")
        return None
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1800)
    return path


def make_engine(
    hf: HFConfig, options: Mapping[str, Any], seed: int, backend: str
) -> TorchEngine | ChildEngine:
    """An engine without weights."""
    usual = {"max_model_tokens": hf.max_positions, "device": "cpu", "seed": seed}
    options = usual | {"records_routes": bool(hf.num_experts)} | dict(options)
    if backend == "torch tp1":
        return TorchEngine(hf, **options)
    settings = {"config": hf.to_dict(), "tp": BACKENDS[backend], "max_running": 128, **options}
    return ChildEngine(SGLANG_ENGINE, settings, threads=1, start_s=300.0)


def load(engine: TorchEngine | ChildEngine, subject: Subject, tp: int) -> None:
    """The subject's weights into an engine of its shape."""
    engine.begin_load(0)
    for bucket, buffer in pack(read_folder(subject.folder, subject.hf), MAX_BYTES):
        engine.load_bucket(bucket, [buffer] * tp)
    engine.end_load()


def sample(
    subject: Subject,
    options: Mapping[str, Any],
    size: Size,
    seed: int,
    backend: str = "torch tp1",
) -> Sampled:
    """All responses of one sampler setting."""
    ((_, made),) = samples([subject], options, size, seed, backend)
    return made


def samples(
    subjects: Sequence[Subject],
    options: Mapping[str, Any],
    size: Size,
    seed: int,
    backend: str,
) -> Iterator[tuple[Subject, Sampled]]:
    """Of one sampler setting, model by model. Neighbours of one shape share an engine, as SGLang
    needs longer to start than to sample."""
    for hf, group in itertools.groupby(subjects, key=lambda subject: subject.hf):
        engine = make_engine(hf, options, seed, backend)
        try:
            for subject in group:
                load(engine, subject, BACKENDS[backend])
                yield subject, _responses(engine, subject, size, seed)
        finally:
            engine.close()


def _responses(
    engine: TorchEngine | ChildEngine, subject: Subject, size: Size, seed: int
) -> Sampled:
    short = _sample(engine, seed, "s", subject.prompts, 5, Sampling(max_tokens=size.short))
    long: list[Sample] = []
    if size.long:
        long = _sample(engine, seed, "l", subject.prompts, 1, Sampling(max_tokens=size.long))
    own: list[Sample] = []
    if subject.ends and size.own:
        stop = Sampling(max_tokens=OWN_MOST, stop_ids=(label_task.EOS,))
        own = _sample(engine, seed, "o", size.own, 1, stop)
    sampled = Sampled(pack_samples([*short, *long, *own]))
    at = len(short)
    longs = [Unit((r,)) for r in range(at, at + len(long))]
    sampled.units = {
        "short": [Unit((r,)) for r in range(at)],
        "5 x short": [Unit(tuple(range(r, r + 5))) for r in range(0, at, 5)],
    }
    if long:
        first = [Unit(unit.rows, size.short) for unit in longs]
        sampled.units |= {"long": longs, "first of long": first}
    if own:
        sampled.units |= own_units([len(s.tokens) for s in own], at + len(long))
    return sampled


def own_units(lengths: Sequence[int], first: int) -> dict[str, list[Unit]]:
    """The shortest and the longest third of responses, and the first tokens of the longest: as many
    as the median of the shortest has. Rows count from `first`."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    third = max(1, len(order) // 3)
    shortest, longest = order[:third], order[-third:]
    head = int(np.median([lengths[i] for i in shortest]))
    return {
        "own short": [Unit((first + i,)) for i in shortest],
        "own long": [Unit((first + i,)) for i in longest],
        "first of own long": [Unit((first + i,), head) for i in longest],
    }


def _sample(
    engine: TorchEngine | ChildEngine,
    seed: int,
    name: str,
    prompts: int,
    each: int,
    sampling: Sampling,
) -> list[Sample]:
    """Responses in the order of their prompts."""
    requests = []
    for i in range(prompts):
        text = label_task.make("val", seed, i).prompt
        tokens = np.array([label_task.VOCAB.index(c) for c in text], np.int32)
        requests += [
            Request(id=f"{name}{i}.{k}", prompt=tokens, sampling=sampling) for k in range(each)
        ]
    engine.submit(requests)
    found: dict[str, Sample] = {}
    while len(found) < len(requests):
        for event in engine.poll(1.0):
            if isinstance(event, Finished):
                found[event.id] = event.sample
            elif isinstance(event, Down):
                raise RuntimeError(f"the sampler is gone: {event.reason}")
    return [found[request.id] for request in requests]


# ---- gangs of learner ranks


@dataclass(frozen=True, kw_only=True)
class Case:
    """A learner and the samples that it scores."""

    model: str
    layout: str
    dtype: str
    samples: tuple[str, ...]
    replays: bool = False
    """Whether the learner computes with the sampler's experts."""


def train_config(layout: str) -> TrainConfig:
    return TrainConfig(**LAYOUTS[layout], distributed_optimizer=False, tokens_per_micro_batch=4096)


def ranks_of(layout: str) -> int:
    return math.prod(LAYOUTS[layout].get(name, 1) for name in ("tp", "cp"))


def score(folder: Path, cases: Sequence[Case], timeout_s: float) -> None:
    """Run the cases, gang by gang: `<folder>/<case number>.pt` holds their log-probs."""
    for world in sorted({ranks_of(c.layout) for c in cases}):
        mine = [i for i, c in enumerate(cases) if ranks_of(c.layout) == world]
        start = time.monotonic()
        run_gang(folder, world, {str(i): asdict(cases[i]) for i in mine}, timeout_s)
        print(
            f"{len(mine)} learners on {world} ranks: {time.monotonic() - start:.0f} s", flush=True
        )


def run_gang(folder: Path, world: int, cases: Mapping[str, Row], timeout_s: float) -> None:
    """`world` processes of this file; RuntimeError with the last words of one that fails."""
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "store").unlink(missing_ok=True)
    own = {"WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank-of", str(folder)]
    gang = []
    for rank in range(world):
        with open(folder / f"log{rank}", "wb") as log:
            gang.append(
                subprocess.Popen(
                    command,
                    env=os.environ | own | {"RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    end = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in gang):
            for rank, process in enumerate(gang):
                late = time.monotonic() > end and process.poll() is None
                if process.poll() or late:
                    why = f"was not done after {timeout_s:.0f} s" if late else "failed"
                    words = (folder / f"log{rank}").read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"rank {rank} of {world} {why}:\n{words}")
            time.sleep(0.05)
    finally:
        for process in gang:
            process.kill()
            process.wait()
    bad = [rank for rank, process in enumerate(gang) if process.returncode]
    if bad:
        words = (folder / f"log{bad[0]}").read_text(errors="replace")[-4000:]
        raise RuntimeError(f"rank {bad[0]} of {world} failed:\n{words}")


def one_rank(folder: Path) -> None:
    """What every process of a gang does."""
    import torch.distributed as dist

    from rlcore.mcore.learner import MegatronLearner

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    collective.share_gloo_device()
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300)
    )
    batches: dict[str, Batch] = {}
    for number, case in json.loads((folder / "cases.json").read_text()).items():
        path = folder / "models" / case["model"]
        learner = MegatronLearner(
            HFConfig.from_folder(path),
            ModelConfig(path=str(path), dtype=DTYPES[case["dtype"]]),
            train_config(case["layout"]),
            device="cpu",
            replays_routing=case["replays"],
        )
        found = {}
        for name in case["samples"]:
            if name not in batches:
                batches[name] = load_batch(folder / name)
            batch = batches[name]
            found[name] = learner.logprobs(batch if case["replays"] else batch.with_(routes=None))
        learner.close()
        if rank == 0:
            torch.save(found, folder / f"{number}.pt")
    dist.barrier()
    dist.destroy_process_group()


def save_batch(batch: Batch, path: Path) -> None:
    torch.save({n: getattr(batch, n) for n in ("tokens", "cu_seqlens", "mask", "routes")}, path)


def load_batch(path: Path) -> Batch:
    return Batch(**torch.load(path, weights_only=True))


# ---- the study


def file_of(model: str, backend: str, dtype: str) -> str:
    """Where the samples of one sampler setting are."""
    return f"{model} {backend} {dtype}"


def plan(
    models: Sequence[Subject], size: Size, backends: Sequence[str] = ("torch tp1",)
) -> tuple[list[Case], list[Row]]:
    """The learners, and a row for each that the model refuses."""
    from rlcore.mcore.layout import check_model

    cases, refused = [], []
    for model in models:
        for layout in size.layouts:
            try:
                check_model(model.hf, train_config(layout))
            except ValueError as why:
                refused.append(not_measured(model.name, layout, "torch tp1", f"refused: {why}"))
                continue
            for dtype in DTYPES:
                if layout in size.all_precisions:
                    pairs = list(itertools.product(backends, size.samplers))
                else:
                    pairs = [("torch tp1", dtype)]
                names = tuple(file_of(model.name, *pair) for pair in pairs)
                for replays in (False, True) if model.hf.num_experts else (False,):
                    cases.append(
                        Case(
                            model=model.name,
                            layout=layout,
                            dtype=dtype,
                            samples=names,
                            replays=replays,
                        )
                    )
    return cases, refused


def not_measured(model: str, layout: str, sampler: str, note: str) -> Row:
    return {
        "name": f"{model} / {layout} / {sampler}",
        "value": None,
        "unit": "probability",
        "baseline": None,
        "ratio": None,
        "model": model,
        "learner": layout,
        "sampler": sampler,
        "note": note,
    }


def absent_samplers(backends: Sequence[str] = ("torch tp1",)) -> list[Row]:
    """Rows of the sampler's axis that have no numbers."""
    rows = []
    if "sglang tp1" not in backends:
        rows = [not_measured("any", "any", name, "--sglang measures it") for name in OTHERS]
    return [*rows, not_measured("any", "any", "torch tp2", "the torch engine has TP 1 only")]


def study(a: argparse.Namespace, size: Size, folder: Path) -> tuple[list[Row], dict[str, float]]:
    """All rows, and how far a repetition is from the first run."""
    torch.set_num_threads(1)
    models = chosen(subjects(folder / "models", a, size), a.models)
    backends = tuple(BACKENDS) if a.sglang else ("torch tp1",)
    cases, refused = plan(models, size, backends)
    sampled: dict[str, Sampled] = {}
    labels_of: dict[str, dict[str, str]] = {}
    for backend, sampler in itertools.product(backends, size.samplers):
        start = time.monotonic()
        for model, made in samples(models, SAMPLERS[sampler], size, a.seed, backend):
            name = file_of(model.name, backend, sampler)
            sampled[name] = made
            labels_of[name] = {"sampler": backend, "sampler_dtype": sampler}
            save_batch(made.batch, folder / name)
        print(f"{backend} {sampler}: {time.monotonic() - start:.0f} s", flush=True)
    for model in models:
        weights = num_parameters(model.hf) / 1e6
        sure = sampled[file_of(model.name, "torch tp1", "bf16")].batch
        print(
            f"{model.name}: {weights:.1f} M weights, {sure.num_sequences} responses with "
            f"{int(sure.mask.sum())} tokens a sampler, mean log-prob "
            f"{float(sure.rollout_log_probs[sure.mask].mean()):.2f}",
            flush=True,
        )
    again = next(i for i, c in enumerate(cases) if c.layout == "one" and c.dtype == "bf16")
    score(folder, [*cases, cases[again]], a.timeout_s)
    rows = []
    for number, case in enumerate(cases):
        for name, logp in torch.load(folder / f"{number}.pt", weights_only=True).items():
            labels = {
                "model": case.model + (" R3" if case.replays else ""),
                "learner": case.layout,
                "learner_dtype": case.dtype,
                **labels_of[name],
            }
            equal = labels["sampler_dtype"] == case.dtype
            lengths = list(sampled[name].units) if equal else ["short"]
            rows += rows_of(sampled[name], logp, labels, lengths)
    first, second = (
        torch.load(folder / f"{number}.pt", weights_only=True) for number in (again, len(cases))
    )
    learner = max(float((first[name] - second[name]).abs().max()) for name in first)
    model = next(m for m in models if m.name == cases[again].model)
    twice = sample(model, SAMPLERS["bf16"], size, a.seed)
    once = sampled[file_of(model.name, "torch tp1", "bf16")]
    same = torch.equal(twice.batch.tokens, once.batch.tokens)
    apart = (
        (twice.batch.rollout_log_probs - once.batch.rollout_log_probs).abs().max()
        if same
        else math.inf
    )
    repeats = {"learner": learner, "sampler": float(apart)}
    return [*finish(rows), *refused, *absent_samplers(backends)], repeats


# ---- findings


@dataclass(frozen=True)
class Comparison:
    """Geometric mean of the responses' largest mismatch, of one row over that of another, with two
    standard errors; response by response where both rows have the same ones."""

    what: str
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        figures = (self.ratio, self.low, self.high)
        ratio, low, high = (f"{x:.2f}" if x > 0.1 else f"{x:.1e}" for x in figures)
        return f"{self.what} x{ratio} ({low} to {high})"


def compare(what: str, over: Row, under: Row) -> Comparison:
    """`over` against `under`."""
    a, b = (np.log(np.maximum(r["maxima"], FLOOR)) for r in (over, under))
    keys = ("model", "sampler", "sampler_dtype", "length")
    if all(over[k] == under[k] for k in keys):
        d = a - b
        error = d.std(ddof=1) / math.sqrt(d.size) if d.size > 1 else math.inf
        mean = d.mean()
    else:
        mean = a.mean() - b.mean()
        parts = [x.var(ddof=1) / x.size if x.size > 1 else math.inf for x in (a, b)]
        error = math.sqrt(sum(parts))
    ratio, spread = math.exp(mean), math.exp(min(2 * error, 50.0))
    return Comparison(what, ratio, ratio / spread, ratio * spread)


def verdict(shown: Sequence[bool]) -> str:
    """Of several comparisons, each of which shows the finding or does not."""
    if not shown:
        return "cannot be tested here"
    if all(shown):
        return "agrees"
    return f"in part, {sum(shown)} of {len(shown)}" if any(shown) else "does not"


class Table:
    """The measured rows by setting."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [r for r in rows if r["value"] is not None]
        self.models = list(dict.fromkeys(r["model"] for r in self.rows))

    def get(
        self,
        model: str,
        learner: str = "one",
        length: str = "short",
        learner_dtype: str = "bf16",
        sampler_dtype: str = "bf16",
        sampler: str = "torch tp1",
    ) -> Row | None:
        """The row, or None where it was not measured."""
        want = {
            "model": model,
            "learner": learner,
            "length": length,
            "learner_dtype": learner_dtype,
            "sampler_dtype": sampler_dtype,
            "sampler": sampler,
        }
        return next((r for r in self.rows if all(r[k] == v for k, v in want.items())), None)

    def ratios(
        self, over: Mapping[str, str], under: Mapping[str, str], models: Sequence[str] = ()
    ) -> list[Comparison]:
        """The comparison in every model that has both rows."""
        found = []
        for model in models or self.models:
            a, b = self.get(model, **over), self.get(model, **under)
            if a is not None and b is not None:
                what = f"{model} {' '.join(over.values())} / {' '.join(under.values())}"
                found.append(compare(what, a, b))
        return found


def findings(rows: Sequence[Row], repeats: Mapping[str, float]) -> list[dict[str, str]]:
    """What the study published and what these rows show, at bf16 on both sides. A larger mismatch
    is shown where the ratio is above 1 by two standard errors."""
    table = Table(rows)
    found: list[dict[str, str]] = []

    def say(published: str, shown: Sequence[bool], ours: str) -> None:
        found.append({"published": published, "verdict": verdict(shown), "ours": ours})

    def larger(published: str, *pairs: list[Comparison], note: str = "") -> None:
        all_of = [c for pair in pairs for c in pair]
        text = "; ".join([*map(str, all_of), *([note] if note else [])])
        say(published, [c.low > 1 for c in all_of], text or "not measured")

    def layout(over: str, under: str, length: str = "short") -> list[Comparison]:
        return table.ratios(
            {"learner": over, "length": length}, {"learner": under, "length": length}
        )

    def length(over: str, under: str) -> list[Comparison]:
        return table.ratios({"length": over}, {"length": under})

    one = [(m, table.get(m)) for m in table.models]
    counts = ", ".join(f"{m} {r['above_half']} of {r['responses']}" for m, r in one if r)
    split = [n for n in LAYOUTS if n != "one"]
    larger(
        "sampler TP 1 with a learner on one rank has the lowest mismatch",
        *[layout(name, "one") for name in ("tp2 sp", "cp2", "tp2 sp cp2", "tp4 sp", "cp4")],
    )
    larger(
        "sampler TP 2 has more mismatch than TP 1 with a learner on one rank",
        table.ratios({"sampler": "sglang tp2"}, {"sampler": "sglang tp1"}),
    )
    say(
        "sampler TP 2: two responses above 0.5; with a learner of SP 8: a two-digit number",
        [],
        "responses above 0.5 by learner: "
        + "; ".join(
            f"{m}, {sampler} "
            + ", ".join(
                f"{n} {r['above_half']}"
                for n in ("one", *split)
                if (r := table.get(m, n, sampler=sampler))
            )
            for sampler in BACKENDS
            for m in table.models
            if table.get(m, sampler=sampler)
        ),
    )
    larger(
        "sequence parallelism of the learner adds",
        layout("tp2 sp", "tp2"),
        layout("cp2", "one"),
        layout("tp2 sp cp2", "tp2 sp"),
        note="Ulysses is nearest to cp",
    )
    larger(
        "a TP 8 learner is better than an SP 8 learner",
        layout("cp2", "tp2 sp"),
        layout("cp4", "tp4 sp"),
        note="2 and 4 ranks",
    )
    equal = [(m, table.get(m, "tp2 sp", sampler="sglang tp2")) for m in table.models]
    equal_counts = [f"{m} {r['above_half']} of {r['responses']}" for m, r in equal if r]
    say(
        "equal TP on both sides (2/2, 4/4): few responses above 0.5",
        [10 * r["above_half"] <= r["responses"] for _, r in equal if r],
        f"at 1/1 above 0.5: {counts}; at 2/2: {', '.join(equal_counts) or 'not measured'}",
    )
    say(*_unchanged(table, split))
    larger(
        "longer responses have a larger max: 20k > 4k",
        length("long", "short"),
        length("own long", "own short"),
    )
    larger("also for as many tokens: 20k > 5 x 4k", length("long", "5 x short"))
    larger("5 x 4k > 4k", length("5 x short", "short"), note="a max over five times the tokens")
    larger(
        "the first 4k of a 20k response already exceed a lone 4k",
        length("first of long", "short"),
        length("first of own long", "own short"),
        note="with forced lengths both have the same distribution; `own` ones end by themselves",
    )
    backend = table.ratios({"sampler": "sglang tp1"}, {"sampler": "torch tp1"})
    say(
        "the sampler's backend alone is not decisive",
        [2 / 3 <= c.ratio <= 1.5 for c in backend],
        "; ".join([*map(str, backend), "not decisive: x0.67 to x1.5"]) if backend else "torch only",
    )
    say(*_deterministic(one, repeats))
    pairs = (("sft", "random", "short"), ("rl", "sft", "short"), ("rl", "sft", "own long"))
    trained = [
        compare(f"{a} / {b} {n}", table.get(a, length=n), table.get(b, length=n))
        for a, b, n in pairs
        if table.get(a, length=n) and table.get(b, length=n)
    ]
    larger("a base model has less mismatch than a post-trained one", trained)
    moe = [
        compare(f"moe / deep, {n}", table.get("moe", n), table.get("deep", n))
        for n in LAYOUTS
        if table.get("moe", n) and table.get("deep", n)
    ]
    say("MoE differs from dense", [c.low > 1 or c.high < 1 for c in moe], "; ".join(map(str, moe)))
    lowers, near = [], []
    for (mixture, dense), n, s in itertools.product(MIXTURES, LAYOUTS, ("bf16", "bf16 int8")):
        replayed = table.get(f"{mixture} R3", n, sampler_dtype=s)
        for other, into in ((mixture, lowers), (dense, near)):
            if replayed and (row := table.get(other, n, sampler_dtype=s)):
                into.append(compare(f"{mixture} R3 / {other}, {n}, {s}", replayed, row))
    claim = "replay of the sampler's experts lowers the mismatch"
    say(claim, [c.high < 1 for c in lowers], "; ".join(map(str, lowers)))
    claim = "with replay a mixture is as near as a dense model (at most x1.25)"
    say(claim, [c.ratio <= 1.25 for c in near], "; ".join(map(str, near)))
    return found


def precision_lines(rows: Sequence[Row]) -> list[str]:
    """The precisions against bf16 on both sides; the study published nothing about them."""
    table = Table(rows)
    lines = ["precision: learner / sampler against bf16 / bf16 (one rank, short)"]
    for backend, learner, sampler in itertools.product(BACKENDS, DTYPES, SAMPLERS):
        setting = {"learner_dtype": learner, "sampler_dtype": sampler, "sampler": backend}
        pairs = [(m, table.get(m, **setting), table.get(m, sampler=backend)) for m in table.models]
        text = [str(compare(m, a, b)) for m, a, b in pairs if a and b]
        if text and (learner, sampler) != ("bf16", "bf16"):
            lines.append(f"  {backend:12}{learner + ' / ' + sampler:24}{'; '.join(text)}")
    return lines


def _unchanged(table: Table, split: Sequence[str]) -> tuple[str, list[bool], str]:
    """Mean mismatch and KL of every layout against one rank."""
    shown, parts = [], []
    for model in table.models:
        one = table.get(model)
        others = [r for name in split if (r := table.get(model, name))]
        if one is None or not others:
            continue
        text = []
        for key in ("mean", "k3"):
            ratios = [r[key] / one[key] for r in others]
            shown += [0.8 <= x <= 1.25 for x in ratios]
            text.append(f"{key} x{min(ratios):.2f} to x{max(ratios):.2f}")
        parts.append(f"{model} {', '.join(text)}")
    claim = "mean mismatch and KL stay unchanged over these settings"
    return claim, shown, "; ".join([*parts, "unchanged: x0.8 to x1.25 of one rank"])


def _deterministic(
    one: Sequence[tuple[str, Row | None]], repeats: Mapping[str, float]
) -> tuple[str, list[bool], str]:
    """Both sides repeat bit for bit, and still differ."""
    exact = all(value == 0.0 for value in repeats.values())
    rows = [(m, r) for m, r in one if r]
    seen = ", ".join(f"{m} {r['max']:.2g}" for m, r in rows)
    text = (
        f"a second run differs by {repeats['sampler']:.2g} (sampler) and {repeats['learner']:.2g} "
        f"(learner) in log-probs; the largest mismatch between them: {seen}"
    )
    shown = [r["max"] > 100 * FLOOR for _, r in rows] if exact else []
    return "deterministic kernels alone do not help", shown, text


# ---- report


def table_lines(rows: Sequence[Row]) -> list[str]:
    """The table of all rows."""
    head = (
        f"{'model':12}{'learner':16}{'sampler':26}{'length':19}{'resp':>5}{'tokens':>8}"
        f"{'max':>9}{'p99':>9}{'median':>9}{'mean':>9}{'k1':>10}{'k3':>9}"
        f"{'>.5':>5}{'>.1':>5}{'>.01':>5}{'ratio':>7}"
    )
    lines = [head]
    for r in rows:
        if r["value"] is None:
            lines.append(f"{r['model']:12}{r['learner']:16}{r['sampler']:26}{r['note']}")
            continue
        ratio = f"{r['ratio']:7.2f}" if r["ratio"] is not None else f"{'-':>7}"
        learner = f"{r['learner']} {r['learner_dtype']}"
        sampler = f"{r['sampler']} {r['sampler_dtype']}"
        lines.append(
            f"{r['model']:12}{learner:16}{sampler:26}{r['length']:19}"
            f"{r['responses']:5}{r['tokens']:8}{r['max']:9.1e}{r['p99']:9.1e}{r['median']:9.1e}"
            f"{r['mean']:9.1e}{r['k1']:10.1e}{r['k3']:9.1e}"
            f"{r['above_half']:5}{r['above_tenth']:5}{r['above_hundredth']:5}{ratio}"
        )
    return lines


def finding_lines(found: Sequence[Mapping[str, str]]) -> list[str]:
    """Published findings beside ours."""
    lines = ["published findings beside ours (bf16 on both sides, max |mu - p| of a response)"]
    for f in found:
        lines += ["", f"  {f['published']}", f"    {f['verdict']}: {f['ours']}"]
    return lines


def write_json(path: Path, head: Mapping[str, Any], rows: Sequence[Row], found: Sequence) -> None:
    """One row a line; the responses' own maxima stay out."""

    def lines(items: Sequence[Mapping[str, Any]]) -> str:
        short = [{k: _digits(v) for k, v in item.items() if k != "maxima"} for item in items]
        return "[\n" + ",\n".join("  " + json.dumps(item) for item in short) + "\n ]"

    parts = [f' "{key}": {json.dumps(value)}' for key, value in head.items()]
    parts += [f' "findings": {lines(found)}', f' "rows": {lines(rows)}']
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _digits(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel per axis of the study: of each setting the median response, the range from the
    first decile to the 99th percentile, and the largest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = Table(rows)

    def by_model(**setting: str) -> dict[str, Row]:
        found = {m: table.get(m, **setting) for m in table.models}
        return {m: r for m, r in found.items() if r}

    settings = {
        "learner: ranks (short)": {name: by_model(learner=name) for name in LAYOUTS},
        "precision: learner / sampler (one rank, short)": {
            f"{d} / {s}": by_model(learner_dtype=d, sampler_dtype=s)
            for d in DTYPES
            for s in SAMPLERS
        }
        | {
            f"bf16 / {name} {s}": by_model(sampler=name, sampler_dtype=s)
            for name in OTHERS
            for s in ("bf16", "bf16 fp32-head")
        },
        "length of the response (one rank)": {n: by_model(length=n) for n in (*SPLIT, *OWN)},
        "model (short; one mark a layout)": {
            m: {n: r for n in LAYOUTS if (r := table.get(m, n))} for m in table.models
        },
    }
    figure = Figure(figsize=(13, 10), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "Largest |p_sampler - p_learner| of a response; bf16 on both sides if not said\n"
        "bar: first decile to 99th percentile of responses; dot: median; cross: largest; dash: 0.5",
        fontsize=12,
    )
    axes = figure.subplots(2, 2)
    for ax, (title, marks) in zip(axes.flat, settings.items(), strict=True):
        _panel(ax, {name: found for name, found in marks.items() if found}, table.models)
        ax.set_title(title, fontsize=11)
    for model, color in zip(table.models, COLORS, strict=False):
        axes[0, 0].plot([], [], color=color, linewidth=2.4, marker="o", label=model)
    figure.legend(fontsize=9, frameon=False, loc="outside lower center", ncols=len(table.models))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(path)


def _panel(ax: Any, settings: Mapping[str, Any], models: Sequence[str]) -> None:
    """Settings from top to bottom; a text stands where nothing was measured."""
    color = dict(zip(models, COLORS, strict=False))
    for y, found in enumerate(settings.values()):
        if isinstance(found, str):
            ax.text(0.5, y, found, transform=ax.get_yaxis_transform(), ha="center", va="center")
            continue
        slots = models if set(found) <= set(models) else list(found)
        for name, r in found.items():
            at = y + 0.7 * ((slots.index(name) + 0.5) / len(slots) - 0.5)
            low, mid, high, top = (max(r[k], FLOOR) for k in ("p10", "median", "p99", "max"))
            ax.plot([low, high], [at, at], color=color[r["model"]], linewidth=2.4, alpha=0.5)
            ax.plot(mid, at, "o", color=color[r["model"]], markersize=4)
            ax.plot(top, at, "x", color=color[r["model"]], markersize=5)
    ax.set_yticks(range(len(settings)), list(settings), fontsize=9)
    ax.set_ylim(len(settings) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.set_xlim(right=1.3)
    ax.grid(axis="x", alpha=0.25)
    ax.axvline(0.5, color="#7f7f7f", linewidth=0.8, linestyle="--")
    ax.spines[["top", "right"]].set_visible(False)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--quick", action="store_true", help="few responses and layouts: a minute")
    p.add_argument("--dir", type=Path, default=ROOT / "runs", help="has models/label-s<seed>")
    p.add_argument("--sglang", action="store_true", help="the samplers alone, SGLang among them")
    p.add_argument("--models", nargs="+", help="only these; default: all that are there")
    p.add_argument("--trained", type=Path, help="`hf` folder of a run on the tiny task: model `rl`")
    p.add_argument("--mixture", type=Path, help="by `rlcore tiny --experts 8`: model `sft moe`")
    p.add_argument("--int8", action="store_true", help="also a sampler with weights in int8")
    p.add_argument("--json", type=Path)
    p.add_argument("--picture", type=Path, help="default: beside the JSON file")
    p.add_argument("--timeout-s", type=float, default=1200.0, help="of one gang of ranks")
    p.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return p.parse_args(argv)


def main() -> int:
    """Exit code 0; a rank that fails ends it with a trace."""
    a = parse()
    if a.rank_of:
        one_rank(a.rank_of)
        return 0
    start = time.monotonic()
    size = QUICK if a.quick else Size()
    if a.sglang:
        size = of_samplers(size)
    if a.int8:
        size = replace(size, samplers=(*size.samplers, "bf16 int8"))
    with TemporaryDirectory(prefix="mismatch") as name:
        rows, repeats = study(a, size, Path(name))
    found = findings(rows, repeats)
    print("\n".join(["", *table_lines(rows), "", *precision_lines(rows), ""]))
    print("\n".join([*finding_lines(found), ""]))
    seconds = round(time.monotonic() - start, 1)
    print(f"{seconds:.0f} s")
    if a.json:
        head = {
            "what": "per-response max and mean |p_sampler - p_learner| over settings",
            "settings": {
                "seed": a.seed,
                "trained": a.trained is not None,
                "mixture": a.mixture is not None,
                **asdict(size),
            },
            "seconds": seconds,
            "repeats": repeats,
            "machine": env.report(),
        }
        write_json(a.json, head, rows, found)
        print(a.json)
    picture = a.picture or (a.json.with_suffix(".png") if a.json else None)
    if picture:
        draw(rows, picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
