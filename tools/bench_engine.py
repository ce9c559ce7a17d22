"""Measure tokens per second of an engine for the tiny model or a Hugging Face folder.

    python tools/bench_engine.py --json out.json
    python tools/bench_engine.py --model path/to/Qwen2.5-0.5B --dtype bfloat16 --prompts 8
    python tools/bench_engine.py --engine sglang --device cuda --model MODEL --dtype bfloat16

Weights are random, so lengths are drawn: every request has its own `max_tokens`, geometric with the
long tail of the tiny task (median 26, longest about 5 times that). `cpu` figures count the
process's CPU time and hold on a busy machine.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.names import expected  # noqa: E402
from rlcore.protocols import Engine  # noqa: E402
from rlcore.records import Finished, Request, Sampling, Stats  # noqa: E402
from rlcore.rollout.child import ChildEngine  # noqa: E402
from rlcore.rollout.torch_engine.engine import TorchEngine  # noqa: E402
from rlcore.sync.pack import load_weights  # noqa: E402

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 34,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Run the rounds and print one line each; the last line is the median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="folder with a config.json; default: tiny")
    parser.add_argument("--dtype", default="float32", help="data type")
    parser.add_argument("--device", default=None, help="torch device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per round")
    parser.add_argument("--group", type=int, default=8, help="responses per prompt")
    parser.add_argument("--max-running", type=int, default=256, help="maximum concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=12, help="median tokens per prompt")
    parser.add_argument("--median", type=int, default=26, help="median tokens per response")
    parser.add_argument("--longest", type=int, default=140, help="maximum tokens per response")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--engine", choices=("torch", "sglang"), default="torch", help="engine")
    parser.add_argument(
        "--true-on-policy", action="store_true", help="torch: equal bits with the learner"
    )
    parser.add_argument("--child", action="store_true", help="run the engine in a child process")
    parser.add_argument("--sglang-args", nargs="*", default=(), help="SGLang arguments KEY=TEXT")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--json", default="", help="JSON file for the results")
    a = parser.parse_args()

    config = json.loads((Path(a.model) / "config.json").read_text()) if a.model else TINY
    hf = HFConfig.from_dict(config)
    options = {
        "max_model_tokens": 3 * a.prompt_tokens + a.longest,
        "dtype": a.dtype,
        "device": a.device,
        "max_running": a.max_running,
        "threads": a.threads,
        "seed": a.seed,
    }
    engine: Engine
    if a.engine == "torch":
        options["true_on_policy"] = a.true_on_policy
    if a.engine == "sglang":
        a.child = True
        options["sglang"] = dict(word.split("=", 1) for word in a.sglang_args)
    if a.child:
        settings = {"config": config} | options
        factory = f"rlcore.rollout.{a.engine}_engine.engine:build"
        engine = ChildEngine(factory, settings, threads=a.threads, start_s=600.0)
    else:
        engine = TorchEngine(hf, **options)
    device = "cpu" if a.child else a.device or "cpu"  # a GPU draws a billion weights at once
    gen = torch.Generator(device).manual_seed(a.seed)
    weights = (
        (n, torch.ones(s) if "norm" in n else torch.randn(s, generator=gen, device=device) * 0.02)
        for n, s in expected(hf).items()
    )
    load_weights(engine, weights, 0)
    rows = [_round(engine, hf, a, number) for number in range(a.rounds + 1)][1:]
    for row in rows:
        print(json.dumps(row))
    median = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
    print(json.dumps({"median": median}))
    if a.json:
        Path(a.json).write_text(json.dumps({"args": vars(a), "rounds": rows, "median": median}))
    engine.close()


def _round(engine: Engine, hf: HFConfig, a: argparse.Namespace, number: int) -> dict[str, float]:
    gen = np.random.default_rng((a.seed, number))
    requests = []
    for p in range(a.prompts):
        size = int(gen.integers(a.prompt_tokens // 2, 3 * a.prompt_tokens))
        prompt = gen.integers(2, hf.vocab_size, size).astype(np.int32)
        for k in range(a.group):
            limit = 1 + min(a.longest - 1, int(gen.geometric(np.log(2) / a.median)))
            sampling = Sampling(max_tokens=limit)
            requests.append(Request(id=f"b{number}x{p}.{k}", prompt=prompt, sampling=sampling))
    start, cpu = time.perf_counter(), time.process_time()
    engine.submit(requests)
    tokens = steps = left = prefill = 0
    left = len(requests)
    while left:
        for event in engine.poll(1.0):
            if isinstance(event, Finished):
                left -= 1
                tokens += event.num_tokens
            elif isinstance(event, Stats):
                steps += event.decode_steps
                prefill += event.prefill_tokens
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    # The work of a child is not in this process's CPU time.
    on_cpu = {} if a.child else {"tokens_per_cpu_s": round(tokens / cpu)}
    return on_cpu | {
        "tokens_per_s": round(tokens / wall),
        "tokens": tokens,
        "decode_steps": steps,
        "prefill_tokens": prefill,
        "wall_s": round(wall, 3),
    }


if __name__ == "__main__":
    main()
