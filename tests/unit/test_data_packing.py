"""Packing by a worked example and against a loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from rlcore.algos.reduce import weights
from rlcore.data.packing import by_id, pack_samples, per_token
from rlcore.records import Branch, Sample
from rlcore.trainer.phases import share_of_sample
from rlcore.utils import net


def _sample(id, prompt, tokens, version=0):
    n = len(tokens)
    return Sample(
        id=id,
        prompt=np.array(prompt, np.int32),
        tokens=np.array(tokens, np.int32),
        logps=np.array([-t / 100 for t in tokens], np.float32),
        versions=np.full(n, version, np.int32),
        finish="stop",
    )


def test_two_samples_are_packed_one_after_the_other():
    batch = pack_samples([_sample("t0.0", [5, 6], [7], 3), _sample("t0.1", [5, 6], [8, 9], 4)])
    assert batch.tokens.tolist() == [5, 6, 7, 5, 6, 8, 9]
    assert batch.tokens.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.mask.tolist() == [False, False, True, False, False, True, True]
    assert batch.versions.tolist() == [-1, -1, 3, -1, -1, 4, 4]
    expected = torch.tensor([0, 0, -0.07, 0, 0, -0.08, -0.09])
    assert torch.equal(batch.rollout_log_probs, expected)
    assert batch.ids == ("t0.0", "t0.1")
    assert per_token([0.5, -2], batch).tolist() == [0.5] * 3 + [-2] * 4


def test_what_an_environment_showed_is_neither_trained_nor_has_a_log_prob():
    sample = structs.replace(
        _sample("t0.0", [5, 6], [7, 30, 31, 8], 2), versions=np.array([2, -1, -1, 3], np.int32)
    )
    batch = pack_samples([sample])
    assert batch.tokens.tolist() == [5, 6, 7, 30, 31, 8]
    assert batch.mask.tolist() == [False, False, True, False, False, True]
    assert batch.versions.tolist() == [-1, -1, 2, -1, -1, 3]
    assert torch.equal(batch.rollout_log_probs, torch.tensor([0, 0, -0.07, 0, 0, -0.08]))


ids = st.integers(1, 1000)
rows = st.tuples(st.lists(ids, min_size=1, max_size=9), st.lists(ids, max_size=9))


@settings(deadline=None, max_examples=50)
@given(st.lists(rows, max_size=6))
def test_a_packed_batch_is_what_a_loop_gives(pairs):
    samples = [_sample(f"t{i}.0", p, r, i) for i, (p, r) in enumerate(pairs)]
    batch = pack_samples(samples)
    want = {"tokens": [], "mask": [], "logp": [], "versions": [], "values": []}
    for i, (p, r) in enumerate(pairs):
        want["tokens"] += p + r
        want["mask"] += [False] * len(p) + [True] * len(r)
        want["logp"] += [0.0] * len(p) + [float(np.float32(-t / 100)) for t in r]
        want["versions"] += [-1] * len(p) + [i] * len(r)
        want["values"] += [i + 0.5] * (len(p) + len(r))
    assert batch.tokens.tolist() == want["tokens"]
    assert batch.mask.tolist() == want["mask"]
    assert batch.rollout_log_probs.tolist() == want["logp"]
    assert batch.versions.tolist() == want["versions"]
    assert batch.lengths == [len(p) + len(r) for p, r in pairs]
    assert per_token([i + 0.5 for i in range(len(pairs))], batch).tolist() == want["values"]
    order = list(range(len(pairs)))[::-1]
    again = pack_samples([samples[i] for i in order])
    assert torch.equal(batch.select(order).tokens, again.tokens)


def test_no_samples_are_an_empty_batch():
    batch = pack_samples([])
    assert (batch.num_tokens, batch.num_sequences, batch.lengths, batch.ids) == (0, 0, [], ())
    assert per_token([], batch).shape == (0,)
    assert batch.select([]).num_sequences == 0


def test_a_sample_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match="sample t3.0: has no prompt tokens"):
        pack_samples([_sample("t3.0", [], [1])])


def _branched() -> Sample:
    """An episode of two rows, whose second one repeats a sampled token that it does not train."""
    second = _sample("", [5, 6, 7], [9, 30, 4, 4, 4], 3)
    second = Branch(
        prompt=second.prompt,
        tokens=second.tokens,
        logps=second.logps,
        versions=np.array([-1, -1, 3, 3, 3], np.int32),
    )
    return structs.replace(_sample("t0.0", [5, 6], [7, 8], 2), branches=(second,))


def test_rows_of_an_episode_are_sequences_with_its_id():
    batch = pack_samples([_branched(), _sample("t0.1", [5], [8])])
    assert batch.ids == ("t0.0", "t0.0", "t0.1") and batch.lengths == [4, 8, 2]
    assert batch.mask.nonzero().flatten().tolist() == [2, 3, 9, 10, 11, 13]
    values = by_id({"t0.0": 2.0, "t0.1": -1.0}, batch)
    assert values.tolist() == [2.0] * 12 + [-1.0] * 2


def test_tokens_of_an_episode_are_those_of_its_rows():
    sample = _branched()
    assert (sample.num_tokens, sample.num_observed) == (2 + 3 + 5, 3 + 2)
    assert _sample("t0.1", [5], [8]).num_tokens == 1
    again = net.decode(net.encode(sample), Sample)
    (branch,) = again.branches
    assert branch.tokens.tolist() == [9, 30, 4, 4, 4] and again.num_observed == 5


def test_a_mean_over_rows_becomes_one_over_episodes():
    batch = pack_samples([_branched(), _sample("t0.1", [5], [8, 9])])
    share = share_of_sample(batch)
    by_row = weights(
        "seq-mean-token-mean", batch.mask, batch.sequence_index, batch.num_sequences, 9
    )
    found = (share * by_row)[batch.mask]
    assert torch.allclose(found, torch.tensor([0.2] * 5 + [0.5] * 2))
    assert share_of_sample(pack_samples([_sample("t0.0", [5], [8])])) is None
