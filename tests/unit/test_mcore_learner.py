"""The learner in a world of one, in this process. tests/ranks/test_learner.py has the layouts."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlcore.hf.config import HFConfig
from rlcore.mcore import build, checkpoint, export
from rlcore.mcore.learner import MegatronLearner
from rlcore.tensors import Batch, LossInputs, LossOutput
from rlcore.utils.errors import ConfigError
from tests import kit
from tests.ranks import learner_ranks as ranks


@pytest.fixture
def learner() -> Iterator[MegatronLearner]:
    made = ranks.make({"distributed_optimizer": True, "clip_grad": 0.0}, keep_reference=True)
    yield made
    made.close()


def nll(x: LossInputs) -> LossOutput:
    return LossOutput(per_token=-x.log_probs, metrics={})


def rejecting(x: LossInputs) -> LossOutput:
    keep = x.score > 0
    return LossOutput(
        per_token=-x.log_probs, metrics={"actor/rejected": (~keep).float()}, mask=keep
    )


def test_accumulated_halves_are_the_whole(learner: MegatronLearner, tmp_path: Path) -> None:
    batch = ranks.rows(0)
    learner.save(tmp_path / "start")
    learner.accumulate(batch, nll)
    whole = learner.apply(100.0)
    assert whole.pop("actor/shared_tokens") > 0  # of sequences that the halves part
    learner.load(tmp_path / "start")
    learner.accumulate(batch.select(range(5)), nll)
    learner.accumulate(batch.select(range(5, 12)), nll)
    halves = learner.apply(100.0)
    assert halves.pop("actor/shared_tokens") > 0
    kit.assert_close_named(halves, whole, atol=1e-6)
    assert learner.version == 1


def test_the_loss_is_the_sum_over_trained_tokens_divided_by_the_normaliser(
    learner: MegatronLearner,
) -> None:
    batch = ranks.rows(0).with_(weight=None)
    logp = learner.logprobs(batch)
    learner.accumulate(batch, nll)
    figures = learner.apply(7.0)
    assert figures["actor/loss"] == pytest.approx(float(-logp[batch.mask].sum()) / 7, rel=1e-5)
    assert 0 < figures["actor/entropy"] < torch.tensor(53.0).log()


def test_what_a_loss_sees_of_a_bare_batch(learner: MegatronLearner) -> None:
    full = ranks.rows(0)
    seen: list[LossInputs] = []

    def look(x: LossInputs) -> LossOutput:
        seen.append(x)
        return nll(x)

    batch = Batch(tokens=full.tokens, cu_seqlens=full.cu_seqlens, mask=torch.ones_like(full.mask))
    learner.accumulate(batch, look)
    learner.apply(1.0)
    assert sum(x.num_sequences for x in seen) == 12
    for x in seen:
        assert torch.equal(x.old_log_probs, x.log_probs.detach()) and torch.equal(
            x.rollout_log_probs, x.old_log_probs
        )
        assert (x.correction == 1).all() and (x.advantage == 0).all() and (x.versions == -1).all()
        assert x.ref_log_probs is None
        assert int((~x.mask).sum()) == x.num_sequences  # first tokens have nothing before them
        assert x.log_probs.requires_grad and x.entropy.requires_grad


def test_tokens_that_the_loss_rejects_are_as_if_they_were_not_trained(
    learner: MegatronLearner, tmp_path: Path
) -> None:
    batch = ranks.rows(0)
    left = batch.mask & (batch.score > 0)
    learner.save(tmp_path / "start")
    found = []
    for trained, loss in ((batch.mask, rejecting), (left, nll)):
        learner.load(tmp_path / "start")
        learner.accumulate(batch.with_(mask=trained), loss)
        found.append((learner.kept(), learner.apply(50.0), kit.state(learner.export())))
    (kept, ours, weights), (theirs_kept, theirs, theirs_weights) = found
    sequences = len(set(batch.sequence_index[left].tolist()))
    assert kept == theirs_kept == (int(left.sum()), sequences)
    assert ours["actor/loss"] == theirs["actor/loss"]
    assert ours["actor/grad_norm"] == theirs["actor/grad_norm"] > 0
    kit.assert_bitwise(weights, theirs_weights)
    assert learner.kept() == (0, 0)
    assert ours["actor/rejected"] == 0  # metrics are of what is left


def test_a_loss_that_rejects_everything_has_a_gradient_of_zero(learner: MegatronLearner) -> None:
    batch = ranks.rows(0)
    learner.accumulate(
        batch, lambda x: LossOutput(per_token=-x.log_probs, metrics={}, mask=x.score > 9)
    )
    assert learner.kept() == (0, 0)
    figures = learner.apply(1.0)
    assert figures["actor/grad_norm"] == 0 == figures["actor/skipped"]


def test_what_is_discarded_leaves_no_trace(learner: MegatronLearner) -> None:
    """The next update is the one that it would have been."""
    batch, loss = ranks.rows(3), ranks.Loss()
    before, updates = kit.state(learner.export()), learner.updates
    learner.accumulate(batch, loss)
    learner.discard()
    kit.assert_bitwise(kit.state(learner.export()), before)
    assert learner.updates == updates and learner.kept() == (0, 0)
    with pytest.raises(RuntimeError, match="apply without accumulate"):
        learner.apply(1.0)


def test_a_gradient_that_is_not_finite_changes_nothing(learner: MegatronLearner) -> None:
    before = kit.state(learner.export())

    def broken(x: LossInputs) -> LossOutput:
        return LossOutput(per_token=x.log_probs * float("nan"), metrics={})

    learner.accumulate(ranks.rows(0), broken)
    figures = learner.apply(10.0)
    assert figures["actor/skipped"] == 1.0
    assert learner.version == 0
    kit.assert_bitwise(kit.state(learner.export()), before)
    learner.accumulate(ranks.rows(0), nll)
    assert learner.apply(10.0)["actor/skipped"] == 0.0
    assert learner.version == 1
    moved = kit.state(learner.export())
    assert all(torch.isfinite(tensor).all() for tensor in moved.values())
    assert not torch.equal(moved["model.norm.weight"], before["model.norm.weight"])


def test_the_reference_stays_at_the_start(learner: MegatronLearner) -> None:
    batch = ranks.rows(0)
    start = learner.logprobs(batch)
    learner.accumulate(batch, nll)
    learner.apply(100.0)
    moved = kit.state(learner.export())
    assert torch.equal(learner.logprobs(batch, "reference"), start)
    kit.assert_bitwise(kit.state(learner.export()), moved)
    assert (learner.logprobs(batch) - start).abs().max() > 1e-3


def everything(learner: MegatronLearner) -> dict[str, torch.Tensor]:
    """What training changes: weights, what the optimizer steps on, its moments."""
    kept = [*learner._parameters(), *learner._optimizer_tensors()]
    return {str(i): t.detach().clone() for i, t in enumerate(kept)}


def test_the_reference_stands_in_without_moving_a_byte(learner: MegatronLearner) -> None:
    ranks.step(learner, 0)
    batch = ranks.rows(0)
    logp, before = learner.logprobs(batch), everything(learner)
    places = [p.data_ptr() for p in learner._parameters()]
    one_by_one = learner.logprobs(batch, "reference")
    with learner.reference():
        assert not set(places) & {p.data_ptr() for p in learner._parameters()}
        for _ in range(2):
            assert torch.equal(learner.logprobs(batch, "reference"), one_by_one)
    assert [p.data_ptr() for p in learner._parameters()] == places
    kit.assert_bitwise(everything(learner), before)
    assert torch.equal(learner.logprobs(batch), logp)
    assert not torch.equal(one_by_one, logp)


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_does_not_notice_the_reference(dtype: str, distributed: bool) -> None:
    layout, found = {"distributed_optimizer": distributed}, {}
    for asked in (False, True):
        learner = ranks.make(layout, dtype=dtype, keep_reference=True)
        try:
            figures = []
            for number in range(3):
                if asked:
                    learner.logprobs(ranks.rows(number), "reference")
                figures.append(ranks.step(learner, number))
            found[asked] = figures, everything(learner)
        finally:
            learner.close()
    assert found[True][0] == found[False][0]
    kit.assert_bitwise(found[True][1], found[False][1])


def test_nothing_else_works_while_the_reference_is_in_place(
    learner: MegatronLearner, tmp_path: Path
) -> None:
    batch = ranks.rows(0)
    learner.accumulate(batch, nll)
    before = everything(learner)
    with learner.reference():
        for name, call in {
            "logprobs": lambda: learner.logprobs(batch),
            "accumulate": lambda: learner.accumulate(batch, nll),
            "apply": lambda: learner.apply(1.0),
            "export": learner.export,
            "save": lambda: learner.save(tmp_path / "x"),
            "load": lambda: learner.load(tmp_path / "x"),
            "offload": learner.offload,
            "reference": lambda: learner.reference().__enter__(),
        }.items():
            with pytest.raises(RuntimeError, match=rf"{name} inside reference\(\)"):
                call()
    kit.assert_bitwise(everything(learner), before)
    with pytest.raises(ZeroDivisionError), learner.reference():
        raise ZeroDivisionError
    kit.assert_bitwise(everything(learner), before)


def test_apply_asks_for_gradients_and_a_count(learner: MegatronLearner) -> None:
    with pytest.raises(RuntimeError, match="apply without accumulate"):
        learner.apply(1.0)
    learner.accumulate(ranks.rows(0), nll)
    with pytest.raises(ValueError, match="normaliser 0.0"):
        learner.apply(0.0)


def test_a_model_without_reference_says_so() -> None:
    learner = ranks.make({})
    try:
        with pytest.raises(RuntimeError, match="keep_reference"):
            learner.logprobs(ranks.rows(0), "reference")
    finally:
        learner.close()


def test_weight_decay_reaches_matrices_and_the_rate_follows_its_schedule() -> None:
    layout = {"weight_decay": 0.5, "lr_warmup_updates": 2, "lr": 0.1}
    learner = ranks.make(layout)
    try:
        before = kit.state(learner.export())
        empty = ranks.rows(0).select([])
        rates = []
        for _ in range(3):
            learner.accumulate(empty, nll)
            rates.append(learner.apply(1.0)["actor/lr"])
        after = kit.state(learner.export())
    finally:
        learner.close()
    assert rates == pytest.approx([0.05, 0.1, 0.1])
    name = "model.layers.0.mlp.down_proj.weight"
    kept = (1 - 0.05 * 0.5) * (1 - 0.1 * 0.5) ** 2
    assert torch.allclose(after[name], before[name] * kept, rtol=1e-5)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_bfloat16_keeps_fp32_main_parameters() -> None:
    layout = {"lr": 2e-4, "adam_eps": 1e-8, "distributed_optimizer": True}
    learner = ranks.make(layout, dtype="bfloat16")
    try:
        for _ in range(30):
            learner.accumulate(ranks.rows(0), nll)
            learner.apply(100.0)
        after = kit.state(learner.export())
    finally:
        learner.close()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    # Norms start at 1, where half a digit of bfloat16 is 20 such steps: only their sum shows.
    assert (after["model.norm.weight"] != 1).any()


def test_an_update_with_clipping_is_the_same_in_float64() -> None:
    found = []
    for dtype in ("float32", "float64"):
        learner = ranks.make({"clip_grad": 0.5}, dtype=dtype)
        try:
            figures = ranks.step(learner, 0)
            assert figures["actor/grad_norm"] > 0.6
            found.append((figures, kit.state(learner.export())))
        finally:
            learner.close()
    kit.assert_close_named(*[figures for figures, _ in found])
    kit.assert_close_named(*[weights for _, weights in found])


# ---- checkpoints


def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stays(
    learner: MegatronLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    learner.save(path)
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
    with monkeypatch.context() as patch:
        full = SimpleNamespace(f_bavail=1, f_frsize=4096)
        patch.setattr(checkpoint, "os", SimpleNamespace(statvfs=lambda folder: full))
        with pytest.raises(OSError, match="the disk is full; free some space") as caught:
            learner.save(path)
    assert caught.value.errno == errno.ENOSPC
    assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


FAILURES = {
    "the disk is full; free some space": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "the disk is full; free": SafetensorError("I/O error: No space left on device (os error 28)"),
    "CUDA out of memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
}


@pytest.mark.parametrize("sentence", FAILURES)
def test_a_save_that_fails_is_a_sentence_and_the_old_checkpoint_stays(
    learner: MegatronLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str
) -> None:
    path = tmp_path / "checkpoint"
    learner.save(path)

    def fail(*args: object, **kwargs: object) -> None:
        raise FAILURES[sentence]

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fail)
        with pytest.raises(OSError, match=sentence):
            learner.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    learner.load(path)
    learner.save(path)


def test_a_checkpoint_may_have_many_files(
    learner: MegatronLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.step(learner, 0)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 4096)
    learner.save(tmp_path / "checkpoint")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 10
    saved = everything(learner)
    ranks.step(learner, 1)
    learner.load(tmp_path / "checkpoint")
    kit.assert_bitwise(everything(learner), saved)


def test_a_folder_that_is_no_checkpoint_is_refused(
    learner: MegatronLearner, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        learner.load(tmp_path)


def test_a_checkpoint_of_another_model_or_with_a_damaged_file_is_refused(
    learner: MegatronLearner, tmp_path: Path
) -> None:
    learner.save(tmp_path / "c")
    index = tmp_path / "c" / checkpoint.INDEX
    text = index.read_text()
    index.write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(ConfigError, match="has format 3, but this version of rlcore reads"):
        learner.load(tmp_path / "c")
    index.write_text(text)
    (file,) = (tmp_path / "c").glob("*.safetensors")
    entries = load_file(file)
    name = next(n for n in entries if n.startswith("exp_avg/") and entries[n].ndim == 2)
    save_file(entries | {name: entries[name][:-1].clone()}, file)
    with pytest.raises(ConfigError, match=r"has \d+ of \d+ values .* is of another model"):
        learner.load(tmp_path / "c")
    save_file({k: v for k, v in entries.items() if k != name}, file)
    with pytest.raises(ConfigError, match=r"has 0 of \d+ values"):
        learner.load(tmp_path / "c")
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="a file is damaged"):
        learner.load(tmp_path / "c")


# ---- away and back


def test_offload_takes_the_gradients_away_on_the_cpu_and_nothing_may_be_asked_meanwhile(
    learner: MegatronLearner,
) -> None:
    ranks.step(learner, 0)
    batch, here = ranks.rows(0), learner.resident_bytes()
    logp, before = learner.logprobs(batch), everything(learner)
    learner.offload()
    learner.offload()
    assert learner.resident_bytes() == here | {"gradients": 0}
    for what in (lambda: learner.logprobs(batch), lambda: learner.export()):
        with pytest.raises(RuntimeError, match=": the weights are offloaded"):
            what()
    with pytest.raises(RuntimeError, match="discard: the gradients are offloaded"):
        learner.discard()
    learner.onload(["weights"])
    assert torch.equal(learner.logprobs(batch), logp)
    with pytest.raises(RuntimeError, match="accumulate: the gradients are offloaded"):
        learner.accumulate(batch, ranks.Loss())
    learner.onload()
    learner.onload()
    assert learner.resident_bytes() == here
    kit.assert_bitwise(everything(learner), before)
    assert ranks.step(learner, 1)["actor/skipped"] == 0


def test_offload_frees_the_buffer_of_megatrons_all_gather(learner: MegatronLearner) -> None:
    """With sequence parallelism it is as large as the activations of a micro-batch."""
    from megatron.core import parallel_state  # not before rlcore.mcore, which prepares it

    held = parallel_state.get_global_memory_buffer()
    held.get_tensor([8, 4], torch.float32, "mpu")
    learner.offload(["optimizer"])
    assert held.buffer == {}
    learner.onload()


def test_offload_does_not_forget_gradients_that_nobody_applied(learner: MegatronLearner) -> None:
    learner.accumulate(ranks.rows(0), ranks.Loss())
    with pytest.raises(RuntimeError, match="offload between accumulate and apply"):
        learner.offload()
    learner.offload(["optimizer"])
    learner.onload()
    learner.discard()
    learner.offload()
    learner.onload()


def test_the_sum_of_squares_is_that_of_the_log_probs_of_the_whole_vocabulary(
    learner: MegatronLearner,
) -> None:
    batch, seen = ranks.rows(0), []
    size = learner.hf.vocab_size

    def look(x: LossInputs) -> LossOutput:
        seen.append(x.top_log_probs)
        return nll(x)

    every = torch.arange(size).expand(batch.num_tokens, size).contiguous()
    top = torch.zeros(batch.num_tokens, size)
    logp, squares = learner.logprobs_and_squares(batch)
    assert torch.equal(logp, learner.logprobs(batch))
    for row in range(batch.num_sequences):
        one = batch.with_(teacher_top_ids=every, teacher_top_log_probs=top).select([row])
        seen.clear()
        learner.accumulate(one, look)
        want = (2 * torch.cat(seen).detach()).logsumexp(-1)
        mine = squares.split(batch.lengths)[row]
        assert torch.allclose(mine[one.mask], want[one.mask], atol=1e-5)
    learner.discard()
    assert (squares < 0)[batch.mask].all()


def test_a_checkpoint_of_transformer_engines_layers_has_the_names_of_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for its spec, which names no norm of a layer with experts."""
    local = build._local_spec

    def te_spec(hf: HFConfig, *args: Any) -> ModuleSpec:
        layer = local(hf, *args)
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
        monkeypatch.setattr(build, "get_gpt_layer_with_transformer_engine_spec", lambda **_: layer)
        return build._te_spec(hf, *args)

    monkeypatch.setattr(build, "_local_spec", te_spec)
    with closing(ranks.make({}, arch="qwen3_moe")) as learner:
        ranks.step(learner, 0)
        learner.save(tmp_path / "c")
        hf, weights = learner.hf, kit.state(learner.export())
    monkeypatch.setattr(build, "_local_spec", local)
    kit.assert_bitwise(dict(export.read(tmp_path / "c", hf, torch.float32, set(weights))), weights)
    with closing(ranks.make({}, arch="qwen3_moe")) as learner:
        learner.load(tmp_path / "c")
        kit.assert_bitwise(kit.state(learner.export()), weights)
