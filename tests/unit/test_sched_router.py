"""Routing of requests to engines."""

from hypothesis import given
from hypothesis import strategies as st

from rlcore.sched.router import LeastLoaded, Loads


@given(
    st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["add", "take", "pop"])), max_size=400)
)
def test_the_least_loaded_engine_is_found_without_looking_at_all(changes):
    loads, plain = Loads(range(8)), dict.fromkeys(range(8), 0)
    for rank, change in changes:
        if rank not in plain:
            continue
        if change == "pop" and len(plain) > 1:
            assert loads.pop(rank) == plain.pop(rank)
        else:
            loads[rank] += 1 if change == "add" else -1
            plain[rank] += 1 if change == "add" else -1
        assert loads == plain
        assert loads.least() == min(plain, key=lambda r: (plain[r], r))
        assert len(loads._heap) <= 64 + 4 * len(loads) + 1
    assert Loads().least() is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200))
def test_a_router_chooses_alike_with_and_without_the_heap(ended):
    """Requests come one by one, and after each of them one may end somewhere."""
    routers = LeastLoaded(3, spread=True), LeastLoaded(3, spread=True)
    heap, plain = Loads(range(6)), dict.fromkeys(range(6), 0)
    for number, end in enumerate(ended):
        chosen = [r.choose(f"t{number}.0", load) for r, load in zip(routers, (heap, plain))]  # noqa: B905
        assert chosen[0] == chosen[1]
        for load in (heap, plain):
            if chosen[0] is not None:
                load[chosen[0]] += 1
            load[end] = max(0, load[end] - 1)
