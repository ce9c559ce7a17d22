"""LoRA on one rank against plain torch. tests/ranks/test_learner.py has the
layouts, tests/ranks/test_checkpoint.py the checkpoints."""

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.config.schema import LoraConfig, ModelConfig, TrainConfig
from rlcore.hf import lora as peft
from rlcore.hf.config import HFConfig
from rlcore.hf.rope import inverse_frequencies
from rlcore.hf.size import size_of
from rlcore.hf.weights import WeightReader, read_folder, save_folder
from rlcore.mcore import bridge
from rlcore.mcore.check import check
from rlcore.mcore.layout import layout_of
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput
from rlcore.trainer.memory import adapter_parameters
from rlcore.utils.errors import ConfigError
from tests import kit
from tests.ranks import learner_ranks as ranks

LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0}
SOME: dict[str, Any] = {"rank": 2, "alpha": 3.0, "rs": True, "targets": ("k_proj", "up_proj")}
TRAIN: dict[str, Any] = {"clip_grad": 0.0, "adam_eps": 0.1, "weight_decay": 0.1}
COUNT = 50.0


def nll(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.log_probs, metrics={})


def adapters_folder(folder: Path, hf: HFConfig, lora: LoraConfig) -> Path:
    """A PEFT folder whose every A and B is random: a B of 0 would hide the gradient of A."""
    g = torch.Generator().manual_seed(5)
    tensors = ((n, torch.randn(s, generator=g) * 0.2) for n, s in peft.shapes(hf, lora).items())
    peft.save_adapters(tensors, hf, lora, "base", folder)
    return folder


class Plain:
    """The model in plain torch, with A and B as leaves."""

    def __init__(
        self, model: Path, adapters: Path, lora: LoraConfig, dtype: torch.dtype = torch.float64
    ) -> None:
        self.hf = HFConfig.from_folder(model)
        self.weights = {n: tensor.to(dtype) for n, tensor in read_folder(model, self.hf)}
        stored = WeightReader(adapters, peft.WEIGHTS)
        self.leaves = {n: stored.get(n).to(dtype).requires_grad_() for n in stored.names()}
        self.factor = lora.alpha / (lora.rank**0.5 if lora.rs else lora.rank)

    def log_probs(self, tokens: Tensor) -> Tensor:
        hf, x = self.hf, self.weights["model.embed_tokens.weight"][tokens]
        frequencies = inverse_frequencies(hf.head_dim, hf.rope)
        angles = torch.arange(len(tokens))[:, None] * frequencies.float()
        turn = torch.cat([angles, angles], 1)[:, None]
        for i in range(hf.num_layers):
            at = f"model.layers.{i}."
            h = self._norm(x, at + "input_layernorm")
            q, k, v = (
                self._linear(h, f"{at}self_attn.{n}_proj").unflatten(-1, (-1, hf.head_dim))
                for n in "qkv"
            )
            if hf.qk_norm:
                q, k = (
                    self._norm(q, at + "self_attn.q_norm"),
                    self._norm(k, at + "self_attn.k_norm"),
                )
            q, k = (y * turn.cos() + self._half_turn(y) * turn.sin() for y in (q, k))
            k, v = (y.repeat_interleave(hf.num_heads // hf.num_kv_heads, 1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / hf.head_dim**0.5
            past = torch.ones(scores.shape[1:]).tril().bool()
            seen = scores.masked_fill(~past, -torch.inf).softmax(-1)
            h = torch.einsum("hqk,khd->qhd", seen, v).flatten(1)
            x = x + self._linear(h, at + "self_attn.o_proj")
            h = self._norm(x, at + "post_attention_layernorm")
            gate, up = (self._linear(h, f"{at}mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, at + "mlp.down_proj")
        head = "model.embed_tokens" if hf.tie_word_embeddings else "lm_head"
        logits = self._norm(x, "model.norm") @ self.weights[f"{head}.weight"].T / 0.8
        return F.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None]).squeeze(-1)

    def gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the gradients of the mean negative log-likelihood by name, and keep them in the
        leaves."""
        loss = torch.zeros(())
        for i in range(batch.num_sequences):
            one = batch.select([i])
            loss = loss - self.log_probs(one.tokens)[one.mask[1:]].sum()
        (loss / COUNT).backward()
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))
        a, b = (self.leaves.get(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
        return y if a is None or b is None else y + self.factor * (x @ a.T) @ b.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.square().mean(-1, keepdim=True) + self.hf.rms_norm_eps
        return x * scale.rsqrt() * self.weights[f"{name}.weight"]

    @staticmethod
    def _half_turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)


def gradients(learner: MegatronLearner, lora: LoraConfig) -> dict[str, Tensor]:
    params = bridge._parameters(learner._models, learner.hf, learner.layout, adapters=True)
    pieces = bridge.adapter_pieces(learner.hf, lora)
    return {p.tensors[0]: params[p.name].main_grad.clone() for p in pieces}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("arch", "settings"), [("qwen3", LORA), ("qwen2", LORA), ("llama", SOME)])
def test_gradients_and_a_step_are_those_of_plain_torch(
    arch: str, settings: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """To 1e-6 in float64, which the learner's float32 RoPE limits. Of qwen2 and llama, plain torch
    in float32 is further than that from plain torch in float64: we may be as far, and a half."""
    model, lora = kit.tiny_hf_folder(tmp_path / "model", arch), LoraConfig(**settings)
    folder = adapters_folder(tmp_path / "adapters", HFConfig.from_folder(model), lora)
    wanted = Plain(model, folder, lora)
    batch = ranks.rows(0).with_(weight=None)
    theirs = wanted.gradients(batch)
    limit = 1e-6
    if dtype == "float32":
        rounded = Plain(model, folder, lora, torch.float32).gradients(batch)
        apart = max(float((rounded[n] - grad).abs().max()) for n, grad in theirs.items())
        assert apart < 1e-5
        limit = max(limit, 1.5 * apart)
    optimizer = torch.optim.AdamW(
        wanted.leaves.values(), lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.1
    )

    more = {"path": str(folder)}
    learner = ranks.make(TRAIN, str(model), dtype=dtype, lora=settings | more)
    learner.accumulate(batch, nll)
    found = {name: grad / COUNT for name, grad in gradients(learner, lora).items()}
    assert found.keys() == theirs.keys() and len(found) == 8 * len(lora.targets)
    largest = max(float(grad.abs().max()) for grad in theirs.values())
    assert min(float(grad.abs().max()) for grad in theirs.values()) > largest / 1000
    kit.assert_close_named(found, theirs, rtol=0, atol=limit)

    learner.apply(COUNT)
    optimizer.step()
    trained = kit.state(learner.export_adapters())
    leaves = {name: leaf.detach() for name, leaf in wanted.leaves.items()}
    kit.assert_close_named(trained, leaves, rtol=0, atol=1e-6)
    learner.close()


def test_the_reference_is_the_base_and_has_no_weights_of_its_own(tmp_path: Path) -> None:
    """Log-probs of the learner without adapters, also after updates."""
    model, batch = str(kit.tiny_hf_folder(tmp_path / "model")), ranks.rows(0)
    with closing(ranks.make({}, model)) as plain:
        wanted, weights = plain.logprobs(batch), kit.state(plain.export())
    with closing(ranks.make({}, model, lora=LORA, keep_reference=True)) as learner:
        assert torch.equal(learner.logprobs(batch), wanted)  # B is 0
        kit.assert_bitwise(kit.state(learner.export()), weights)
        held = learner.resident_bytes()
        for number in range(2):
            ranks.step(learner, number)
        assert torch.equal(learner.logprobs(batch, "reference"), wanted)
        assert (learner.logprobs(batch) - wanted).abs().max() > 0.1
        assert learner.resident_bytes()["weights"] == held["weights"]
        with learner.reference(), pytest.raises(RuntimeError, match="inside reference"):
            learner.export()
        merged = kit.state(learner.export())
    changed = {name for name in merged if not torch.equal(merged[name], weights[name])}
    assert changed == set(peft.adapted(learner.hf, learner.lora))


def test_the_merged_weights_give_the_log_probs_of_the_adapters(tmp_path: Path) -> None:
    model, batch = str(kit.tiny_hf_folder(tmp_path / "model", "qwen2")), ranks.rows(0)
    lora = {"rank": 3, "alpha": 6.0, "targets": ("q_proj", "v_proj", "down_proj")}
    with closing(ranks.make({}, model, lora=lora)) as learner:
        ranks.step(learner, 0)
        wanted, hf = learner.logprobs(batch), learner.hf
        save_folder(learner.export(), hf, None, tmp_path / "merged")
        shards = {shard.name: tensor for shard, tensor in learner.shards()}
        for name, tensor in read_folder(tmp_path / "merged", hf):
            assert torch.equal(shards[name].reshape(tensor.shape), tensor)
        adapters = tmp_path / "adapters"
        peft.save_adapters(learner.export_adapters(), hf, learner.lora, model, adapters)
    with closing(ranks.make({}, str(tmp_path / "merged"))) as merged:
        kit.assert_close_named({"l": merged.logprobs(batch)}, {"l": wanted}, atol=1e-5)
    with closing(ranks.make({}, model, lora=lora | {"path": str(adapters)})) as again:
        assert torch.equal(again.logprobs(batch), wanted)


def test_recomputation_and_the_head_in_chunks_change_no_gradient() -> None:
    """Full recomputation alone would give no gradients, since the embedding is frozen."""
    found = {}
    for name, train in {
        "plain": {},
        "full": {"recompute": "full"},
        "selective": {"recompute": "selective", "distributed_optimizer": True},
        "chunks": {"head_chunk_tokens": 16},
    }.items():
        with closing(ranks.make(train, lora=LORA)) as learner:
            metrics = [ranks.step(learner, number) for number in range(2)]
            norms = {f"norm {i}": m["actor/grad_norm"] for i, m in enumerate(metrics)}
            found[name] = norms | kit.state(learner.export_adapters())
    assert found["plain"]["norm 1"] > 0.1
    for one in found.values():
        kit.assert_close_named(one, found["plain"])


def test_lora_plus_scales_the_step_of_b_alone() -> None:
    steps = {}
    for ratio in (1.0, 4.0):
        with closing(ranks.make({}, lora=LORA | {"lr_ratio": ratio})) as learner:
            before = kit.state(learner.export_adapters())
            ranks.step(learner, 0)
            after = kit.state(learner.export_adapters())
            steps[ratio] = {name: after[name] - before[name] for name in after}
    for name, step in steps[4.0].items():
        wanted = steps[1.0][name] * (4 if "lora_B" in name else 1)
        kit.assert_close_named({name: step}, {name: wanted}, atol=1e-7)
    assert all(steps[1.0][n].abs().max() > 1e-4 for n in steps[1.0] if "lora_B" in n)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 4}, "--lora.rank 3: must be 4 as in"),
        ({"lora_alpha": 7}, "--lora.alpha 6: must be 7 as in"),
        ({"use_rslora": True}, "has another scale; set --lora.rs"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"peft_type": "IA3"}, "is not of a LoRA adapter"),
    ],
)
def test_a_folder_of_other_adapters_is_refused(
    config: dict[str, Any], text: str, tmp_path: Path
) -> None:
    hf, lora = HFConfig.from_dict(kit.tiny_config()), LoraConfig(**LORA)
    folder = adapters_folder(tmp_path / "adapters", hf, lora)
    peft.reader(folder, hf, lora)
    file = folder / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ConfigError, match=text):
        peft.reader(folder, hf, lora)


def test_a_folder_of_other_projections_is_refused(tmp_path: Path) -> None:
    hf, some = HFConfig.from_dict(kit.tiny_config()), LoraConfig(**LORA | {"targets": ("q_proj",)})
    folder = adapters_folder(tmp_path / "adapters", hf, some)
    with pytest.raises(ConfigError, match="has no tensor .*set --lora.targets"):
        peft.reader(folder, hf, LoraConfig(**LORA))
    folder = adapters_folder(tmp_path / "all", hf, LoraConfig(**LORA))
    with pytest.raises(ConfigError, match="also has tensor"):
        peft.reader(folder, hf, some)


@pytest.mark.parametrize(
    ("arch", "lora", "train", "text"),
    [
        ("qwen3", {}, {"tp": 4}, "--train.tp 4: with --lora.rank it must be at most the model's 2"),
        ("qwen3", {"experts": True}, {}, "--lora.experts: the model has no experts"),
        ("qwen3_moe", {"experts": True}, {"etp": 2}, "--train.etp 2: adapters of experts are not"),
        (
            "glm4_moe",
            {},
            {"tp": 2, "moe_shared_expert_overlap": True},
            "--train.moe_shared_expert_overlap True: with --train.tp 2 shared experts cannot have",
        ),
        ("qwen3_moe", {"targets": ("up_proj",)}, {}, "--lora.targets up_proj: are projections of"),
    ],
)
def test_what_a_model_cannot_adapt_is_refused(
    arch: str, lora: dict[str, Any], train: dict[str, Any], text: str
) -> None:
    hf = HFConfig.from_dict(kit.tiny_config(arch))
    with pytest.raises(ConfigError, match=text):
        check(hf, ModelConfig(dtype="float32"), TrainConfig(**train), LoraConfig(**LORA | lora))


def test_shared_experts_without_adapters_may_overlap() -> None:
    hf, model = HFConfig.from_dict(kit.tiny_config("glm4_moe")), ModelConfig(dtype="float32")
    train = TrainConfig(moe_shared_expert_overlap=True)
    check(hf, model, train, LoraConfig(**LORA))
    check(hf, model, replace(train, tp=2), LoraConfig(**LORA | {"targets": ("q_proj",)}))


def test_adapters_are_counted_in_flops_and_memory() -> None:
    hf, lora = HFConfig.from_dict(kit.tiny_config()), LoraConfig(**LORA)
    # q 96, k 64, v 64, o 96, gate 80, up 80, down 80 inputs and outputs, in 4 layers
    assert peft.num_adapter_parameters(hf, lora) == 3 * 560 * 4 == 6720
    plain, size = size_of(hf), size_of(hf, lora=lora)
    assert plain.train_flops(10, 0) == 60 * plain.products
    assert size.train_flops(10, 0) == 40 * size.products + 60 * 6720
    assert (plain.trained, size.trained) == (plain.parameters, 6720)
    train = TrainConfig(tp=2)
    # B of q, k, v, gate and up (64 + 32 + 32 + 48 + 48 rows) and A of o and down (64 + 48) are cut
    halved = 3 * 4 * (224 + 112)
    count, experts, adapted = adapter_parameters(hf, lora, layout_of(train, 2, 0))
    assert (count, experts) == (6720 - halved // 2, 0)
    assert adapted == sum(math.prod(shape) for shape in peft.adapted(hf, lora).values()) // 2
