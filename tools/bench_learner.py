"""Measure updates and log-prob passes of the learner on one device, beside a transformers model.

    python tools/bench_learner.py                                     # tiny model on the CPU
    python tools/bench_learner.py --model 1.7b --device cuda --profile build/profile.txt

One packed batch of random tokens, the same for all arms; an update is a forward and backward of all
its rows and a step of the optimizer. An arm is one of

    rlcore           the learner with its default keys
    rlcore KEY=...   the same with keys of --train., such as 'rlcore deterministic=true', or of
                     --lora., such as 'rlcore lora.rank=32'
    one-by-one       the same, with experts computed one by one (Megatron's SequentialMLP)
    transformers     its model in the same precision with sdpa attention and torch's fused AdamW;
                     rows are sorted by length and padded to the longest of their micro-batch; the
                     loss is GRPO's on float32 logits

MFU counts 6 FLOPs per token for every weight in a matrix product and causal attention's products,
also with adapters, whose backward pass needs fewer. "state" are weights, gradients and optimizer
between updates; "peak" is the most that updates need: of the device, or on a CPU of this process
beyond what it had before the arm (Linux's VmHWM).
Weights are random; `differs` compares log-probs with those of the first arm.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from rlcore.algos import grpo  # noqa: E402
from rlcore.algos.objective import Objective  # noqa: E402
from rlcore.config.schema import LoraConfig, ModelConfig, TrainConfig  # noqa: E402
from rlcore.hf.config import HFConfig  # noqa: E402
from rlcore.hf.names import expected  # noqa: E402
from rlcore.hf.size import size_of  # noqa: E402
from rlcore.hf.weights import save_folder  # noqa: E402
from rlcore.mcore.learner import MegatronLearner  # noqa: E402
from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.tensors import Batch, cumulative  # noqa: E402

ARMS = ("rlcore", "rlcore deterministic=true", "transformers")
TINY = (128, 256, 3, 4, 2, 32, 512)
SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, head size, vocabulary
    "tiny": TINY,
    "4m": (256, 768, 4, 4, 2, 64, 4096),
    "0.2b": (1024, 3072, 6, 16, 8, 128, 65536),  # a checkpoint of 2.3 GB
    "0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7b": (2048, 6144, 28, 16, 8, 128, 151936),
    "4b": (2560, 9728, 36, 32, 8, 128, 151936),
    "tiny-moe": TINY,
    "30b-a3b": (2048, 6144, 4, 32, 4, 128, 151936),  # 4 of its 48 layers
}
EXPERTS = {"tiny-moe": (8, 2, 64), "30b-a3b": (128, 8, 768)}
"""Experts of a layer, experts per token, intermediate size of an expert."""
UNTIED = ("4b", "30b-a3b")
PROMPT = 128
"""Tokens of a prompt, at most; they are not trained on."""


class Arm(Protocol):
    def logprobs(self) -> Tensor: ...

    def update(self) -> None: ...

    def state_bytes(self) -> int: ...

    def close(self) -> None: ...


def config_of(name: str) -> HFConfig:
    hidden, intermediate, layers, heads, groups, size, vocab = SHAPES[name]
    experts: dict[str, Any] = {}
    if name in EXPERTS:
        fields = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        experts = dict(zip(fields, EXPERTS[name], strict=True)) | {"norm_topk_prob": True}
    return HFConfig.from_dict(
        {
            "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if experts else "qwen3",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": size,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": name not in UNTIED,
        }
        | experts
    )


def write_model(hf: HFConfig, folder: Path, device: str, seed: int) -> None:
    g = torch.Generator(device).manual_seed(seed)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in expected(hf).items():
            value = torch.ones(shape, device=device)
            if "norm" not in name:
                value.normal_(0, 0.02, generator=g)
            yield name, value.to(torch.bfloat16).cpu()

    save_folder(weights(), hf, None, folder)


def make_batch(a: argparse.Namespace, hf: HFConfig) -> Batch:
    """About a.tokens tokens in rows of a.length tokens, or of lengths up to eight times that."""
    g = torch.Generator().manual_seed(a.seed)
    lengths: list[int] = []
    while sum(lengths) < a.tokens:
        drawn = torch.empty(1).log_normal_(generator=g).item()
        lengths.append(a.length if a.equal else max(2, int(a.length * min(8, drawn))))
    total = sum(lengths)
    mask = torch.cat([torch.arange(n) >= min(PROMPT, n // 2) for n in lengths])
    return Batch(
        tokens=torch.randint(0, hf.vocab_size, (total,), generator=g),
        cu_seqlens=cumulative(lengths),
        mask=mask,
        rollout_log_probs=torch.full((total,), -10.0),
        advantage=torch.randn(total, generator=g),
        ids=tuple(str(i) for i in range(len(lengths))),
    )


class Ours:
    def __init__(self, a: argparse.Namespace, hf: HFConfig, folder: Path, batch: Batch, keys: str):
        given = {
            name: json.loads(value) for name, _, value in (k.partition("=") for k in keys.split())
        }
        keys_of_lora = {k: given.pop(k) for k in tuple(given) if k.startswith("lora.")}
        lora = LoraConfig(**{k.removeprefix("lora."): v for k, v in keys_of_lora.items()})
        train = TrainConfig(**({"tokens_per_micro_batch": a.micro} | given))
        model = ModelConfig(path=str(folder), dtype=a.dtype)
        self.learner = MegatronLearner(hf, model, train, lora=lora, device=a.device, seed=a.seed)
        self._batch = batch

    def logprobs(self) -> Tensor:
        return self.learner.logprobs(self._batch)

    def update(self) -> None:
        loss = Objective(grpo, grpo.GRPOConfig(), max_tokens=32768)
        loss.stop_watching()
        self.learner.accumulate(self._batch, loss)
        self.learner.apply(float(self._batch.mask.sum()))

    def state_bytes(self) -> int:
        return sum(self.learner.resident_bytes().values())

    def close(self) -> None:
        self.learner.close()


class OneByOne(Ours):
    def __init__(self, *args: Any):
        with mock.patch("rlcore.mcore.experts.can_group", return_value=False):
            super().__init__(*args)


class Peer:
    def __init__(self, a: argparse.Namespace, hf: HFConfig, folder: Path, batch: Batch, keys: str):
        import transformers

        assert not keys, keys
        dtype = getattr(torch, a.dtype)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", use_cache=False
        ).to(a.device)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._batch, self._device, self._micro = batch, a.device, a.micro

    def _micro_batches(self) -> Iterator[list[int]]:
        lengths = self._batch.lengths
        held: list[int] = []
        for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if held and lengths[held[0]] * (len(held) + 1) > self._micro:
                yield held
                held = []
            held.append(row)
        yield held

    def _rows(self, rows: list[int], field: str) -> Tensor:
        value, starts = getattr(self._batch, field), self._batch.cu_seqlens.tolist()
        parts = [value[starts[r] : starts[r + 1]] for r in rows]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(self._device)

    def _log_probs(self, rows: list[int]) -> Tensor:
        """[rows, longest - 1] float32."""
        tokens = self._rows(rows, "tokens")
        lengths = torch.tensor([self._batch.lengths[r] for r in rows], device=self._device)
        real = torch.arange(tokens.size(1), device=self._device) < lengths[:, None]
        mask = None if bool(real.all()) else real  # sdpa is causal by itself without a mask
        logits = self._model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1)
        return logp.gather(-1, tokens[:, 1:, None])[..., 0]

    @torch.no_grad()
    def logprobs(self) -> Tensor:
        made = torch.zeros(self._batch.num_tokens)
        starts, lengths = self._batch.cu_seqlens.tolist(), self._batch.lengths
        for rows in self._micro_batches():
            for row, logp in zip(rows, self._log_probs(rows).cpu(), strict=True):
                made[starts[row] + 1 : starts[row] + lengths[row]] = logp[: lengths[row] - 1]
        return made

    def update(self) -> None:
        total = float(self._batch.mask.sum())
        for rows in self._micro_batches():
            logp = self._log_probs(rows)
            mask = self._rows(rows, "mask")[:, 1:]
            ratio = (logp - logp.detach()).exp()
            advantage = self._rows(rows, "advantage")[:, 1:]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            (torch.where(mask, loss, 0.0).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state_bytes(self) -> int:
        held = [p for p in self._model.parameters()]
        held += [v for s in self._optimizer.state.values() for v in s.values()]
        return sum(t.numel() * t.element_size() for t in held)

    def close(self) -> None: ...


ARM_OF: dict[str, Callable[..., Arm]] = {
    "rlcore": Ours,
    "one-by-one": OneByOne,
    "transformers": Peer,
}


def flops(hf: HFConfig, lengths: list[int]) -> float:
    """Of forward and backward."""
    return size_of(hf).train_flops(sum(lengths), sum(n * n for n in lengths))


def memory_of(field: str) -> int:
    """Return a memory field of /proc/self/status, such as VmRSS, in bytes (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10


def measure(
    a: argparse.Namespace, name: str, made: Arm, work: float, tokens: int, before: int
) -> dict[str, Any]:
    """`before`: resident bytes of this process before the arm."""
    cuda = a.device.startswith("cuda")

    def seconds(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = [seconds(made.logprobs), seconds(made.update)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    logprobs = statistics.median(seconds(made.logprobs) for _ in range(a.rounds))
    updates = [seconds(made.update) for _ in range(a.rounds)]
    update = statistics.median(updates)
    if a.profile:
        profile(made, a, name)
    return {
        "arm": name,
        "update_s": update,
        "update_s_all": updates,
        "logprobs_s": logprobs,
        "first_s": first,
        "tokens_per_s": tokens / update,
        "mfu": work / update / (a.peak * 1e12),
        "mfu_logprobs": work / 3 / logprobs / (a.peak * 1e12),
        "state_gb": made.state_bytes() / 1e9,
        "peak_gb": (torch.cuda.max_memory_allocated() if cuda else memory_of("VmHWM") - before)
        / 1e9,
    }


def profile(made: Arm, a: argparse.Namespace, name: str) -> None:
    """Append the kernels of an update, by time."""
    from torch.profiler import ProfilerActivity

    cuda = a.device.startswith("cuda")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as found:
        made.update()
    key = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90)
    with Path(a.profile).open("a") as file:
        file.write(f"# {name}\n{table}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="tiny", help="shape of a Qwen3 model")
    parser.add_argument("--arms", nargs="+", default=ARMS, help="what is compared")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="bfloat16", help="data type of the weights")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per update")
    parser.add_argument("--length", type=int, default=1024, help="median tokens of a row")
    parser.add_argument("--equal", action="store_true", help="rows of equal length")
    parser.add_argument("--micro", type=int, default=8192, help="tokens per micro-batch")
    parser.add_argument("--rounds", type=int, default=3, help="number of measured updates")
    parser.add_argument("--peak", type=float, default=989, help="the device's TFLOPS, for the MFU")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--profile", default="", help="file that gets the kernels of an update")
    parser.add_argument("--json", default="", help="JSON file for the results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    a = parse(argv)
    hf = config_of(a.model)
    batch = make_batch(a, hf)
    work = flops(hf, batch.lengths)
    rows: list[dict[str, Any]] = []
    reference: Tensor | None = None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_model(hf, folder, a.device, a.seed)
        for arm in a.arms:
            kind, _, keys = arm.partition(" ")
            made: Arm | None = None
            before = memory_of("VmRSS")
            try:
                made = ARM_OF[kind](a, hf, folder, batch, keys)
                logp = made.logprobs()
                reference = logp if reference is None else reference
                gap = (logp - reference)[batch.mask].abs().mean().item()
                rows.append(
                    measure(a, arm, made, work, batch.num_tokens, before) | {"differs": gap}
                )
                made.close()
            except torch.cuda.OutOfMemoryError as e:
                rows.append({"arm": arm, "failed": str(e).splitlines()[0]})
            made = None
            gc.collect()
            torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if a.json:
        write_atomic(Path(a.json), json.dumps({"args": vars(a), "rows": rows}, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    base = next((r["update_s"] for r in rows if r["arm"] == "transformers" and "update_s" in r), 0)
    lines = [
        f"{'arm':50}{'update s':>9}{'x':>6}{'MFU':>6}{'log-probs s':>12}"
        f"{'state GB':>9}{'peak GB':>8}{'differs':>9}"
    ]
    for r in rows:
        if "failed" in r:
            lines.append(f"{r['arm']:50} {r['failed']}")
            continue
        lines.append(
            f"{r['arm']:50}{r['update_s']:9.3f}{base / r['update_s']:6.2f}{r['mfu']:6.3f}"
            f"{r['logprobs_s']:12.3f}{r['state_gb']:9.2f}{r['peak_gb']:8.2f}{r['differs']:9.1e}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
