from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pytest

from rlcore.records import (
    Abort,
    AnyCommand,
    AnyEvent,
    Finished,
    LengthReport,
    Partial,
    Prompt,
    Request,
    Sample,
    Sampling,
    Submit,
)
from rlcore.utils.net import decode, encode


def ints(*values):
    return np.array(values, np.int32)


def test_a_command_comes_back_with_its_arrays_types_and_nested_records():
    partial = Partial(tokens=ints(4), logps=np.array([-0.1], np.float32), versions=ints(2))
    request = Request(
        id="t1.0",
        prompt=ints(1, 2, 3),
        sampling=Sampling(stop_ids=(1,), max_tokens=9),
        resume=partial,
    )
    prompt = Prompt(index=7, dataset="x", tokens=ints(1, 2, 3), fields={"w": np.eye(2), "n": [1]})
    back = decode(encode(Submit(rank=3, requests=(request,), prompts={"t1": prompt})), AnyCommand)

    assert type(back) is Submit and back.rank == 3
    assert back.requests[0].prompt.dtype == np.int32
    assert back.requests[0].prompt.tolist() == [1, 2, 3]
    assert back.requests[0].sampling == request.sampling
    assert back.requests[0].resume.logps.tobytes() == partial.logps.tobytes()
    assert np.array_equal(back.prompts["t1"].fields["w"], np.eye(2))
    assert back.prompts["t1"].fields["n"] == [1]


def test_the_tag_tells_the_members_of_a_union_apart():
    assert type(decode(encode(Abort(rank=0, ids=("a.0",))), AnyCommand)) is Abort
    assert type(decode(encode(LengthReport(ids=("a.0",), lengths=(3,))), AnyEvent)) is LengthReport


def test_an_event_list_keeps_order_and_samples():
    sample = Sample(
        id="a.0",
        prompt=ints(1),
        tokens=ints(2, 3),
        logps=np.array([-1, -2], np.float32),
        versions=ints(0, 1),
        finish="stop",
    )
    events = [Finished(id="a.0", num_tokens=2, finish="stop", sample=sample, rank=1, time=2.5)]
    back = decode(encode(events), list[AnyEvent])[0]
    assert back.sample.tokens.tolist() == [2, 3] and back.sample.logps.dtype == np.float32
    assert (back.rank, back.time, back.finish) == (1, 2.5, "stop")


def test_empty_arrays_and_other_layouts_survive():
    for a in (
        np.zeros((0,), np.int32),
        np.arange(6).reshape(2, 3).T,
        np.array(2.0),
    ):
        back = decode(encode(a), np.ndarray)
        assert back.dtype == a.dtype and back.shape == a.shape and np.array_equal(back, a)
    back[...] = 1  # writable


def test_times_of_a_subclass_arrive_as_those_of_the_standard_library():
    class Stamp(datetime): ...

    class Span(timedelta): ...

    when = Stamp(2024, 1, 2, 3, 4, 5, 6, UTC)
    back = decode(encode({"at": when, "took": Span(1, 2, 3)}), dict[str, Any])
    plain = {"at": datetime(2024, 1, 2, 3, 4, 5, 6, UTC), "took": timedelta(1, 2, 3)}
    assert back == decode(encode(plain), dict[str, Any])


def test_objects_are_refused_on_the_way_out_and_wrong_fields_on_the_way_in():
    with pytest.raises(ValueError, match="only numeric arrays can be sent"):
        encode(np.array([object()]))
    with pytest.raises(ValueError, match="object cannot be sent"):
        encode({"a": object()})
    with pytest.raises(msgspec.ValidationError, match="ids"):
        decode(msgspec.msgpack.encode({"type": "Abort", "rank": 0, "ids": 3}), AnyCommand)
