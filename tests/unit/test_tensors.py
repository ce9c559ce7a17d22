"""What a batch refuses, in one sentence each."""

import math

import pytest
import torch

from rlcore.data.packing import pack_samples
from rlcore.tensors import Batch, cumulative
from tests.unit.test_data_packing import _sample as sample


def batch(**more) -> Batch:
    """Two sequences of one prompt token and two of the response."""
    return Batch(
        tokens=torch.arange(6),
        cu_seqlens=cumulative([3, 3]),
        mask=torch.tensor([False, True, True] * 2),
        ids=("t0.0", "t0.1"),
        **more,
    )


def test_a_sound_batch_passes():
    batch(rollout_log_probs=torch.zeros(6), score=torch.ones(6)).check()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["rollout_log_probs", "score", "old_log_probs"])
def test_a_number_that_is_not_finite_is_named_with_its_sample_and_place(field, value):
    values = torch.zeros(6)
    values[4] = value
    with pytest.raises(ValueError, match=rf"sample t0\.1: {field} of token 1 is .*finite"):
        batch(**{field: values}).check()


def test_what_stands_on_prompts_is_nobodys_business():
    values = torch.zeros(6)
    values[3] = math.nan
    batch(rollout_log_probs=values).check()


def test_lengths_that_disagree_are_named():
    with pytest.raises(ValueError, match=r"advantage has shape \[5\] for 6 tokens"):
        batch(advantage=torch.zeros(5)).check()
    odd = batch().with_(cu_seqlens=cumulative([3, 2]))
    with pytest.raises(ValueError, match="cu_seqlens ends at 5 but the batch has 6 tokens"):
        odd.check()


def test_an_empty_batch_has_no_sequences():
    empty = batch().select([])
    empty.check()
    assert empty.sequence_index.tolist() == [] and empty.lengths == []


def test_a_sample_without_a_log_prob_for_each_token_is_refused():
    good = sample("t0.0", [1], [2, 3])
    bad = type(good)(
        **{f: getattr(good, f) for f in good.__struct_fields__} | {"logps": good.logps[:1]}
    )
    with pytest.raises(ValueError, match=r"sample t0\.0: has 2 tokens, 1 log-probs and 2 versions"):
        pack_samples([bad])
