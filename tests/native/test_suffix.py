"""The suffix forest: what it promises, by hand; then C++ against the Python reference."""

import functools
import inspect
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.ops import suffix

try:
    from rlcore._C import SuffixForest
except ImportError:
    SuffixForest = None

ROOT = Path(__file__).resolve().parents[2]
needs_build = pytest.mark.skipif(SuffixForest is None, reason="no native build")
pytestmark = pytest.mark.native

DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(suffix.Forest).parameters.items()
    if option.kind is inspect.Parameter.KEYWORD_ONLY
} | dict(stream=0, threads=1)
MAKERS = [
    pytest.param(suffix.ReferenceForest, id="python"),
    pytest.param(SuffixForest, id="native", marks=needs_build),
]


def i32(*xs: int) -> suffix.Ints:
    return np.array(xs, np.int32)


def i64(*xs: int) -> suffix.Longs:
    return np.array(xs, np.int64)


def corpus(prompts: dict[int, list[tuple[list[int], float]]]) -> tuple[np.ndarray, ...]:
    """Arguments of `build`: (response, reward) pairs of every key."""
    tokens, responses, starts, rewards = [], [0], [0], []
    for pairs in prompts.values():
        for text, reward in pairs:
            tokens += text
            responses.append(len(tokens))
            rewards.append(reward)
        starts.append(len(rewards))
    return i64(*prompts), i32(*tokens), i64(*responses), i64(*starts), np.float32(rewards).ravel()


def batch(texts: list[list[int]]) -> tuple[suffix.Ints, suffix.Longs]:
    """Tokens and offsets."""
    return i32(*sum(texts, [])), i64(0, *np.cumsum([len(t) for t in texts]))


class Case:
    """A forest with one prompt (key 0) and one request on it."""

    def __init__(self, make, history: list[tuple[list[int], float]], **options) -> None:
        self.forest = make(**{**DEFAULTS, **options})
        self.forest.build(*corpus({0: history}))
        self.forest.swap()
        self.handles = self.forest.open(i64(0))

    def feed(self, *tokens: int) -> "Case":
        self.forest.advance(self.handles, *batch([list(tokens)]))
        return self

    def draft(self, window: int | None = 8, running: int = 0) -> list[int]:
        windows = None if window is None else i32(window)
        tokens, lengths = self.forest.draft(self.handles, windows, running)
        assert (tokens[0, lengths[0] :] == -1).all()
        return tokens[0, : lengths[0]].tolist()

    def matches(self) -> tuple[int, int]:
        history, live = self.forest.matches(self.handles)
        return int(history[0]), int(live[0])

    def accept(self, n: int) -> int:
        """Accept, and the window after it."""
        self.forest.accept(self.handles, i32(n))
        return int(self.forest.windows(self.handles)[0])


@pytest.fixture(params=["0", pytest.param("1", marks=needs_build)], ids=["python", "native"])
def public(request, monkeypatch):
    """The class `Forest`, without and with the native build."""
    monkeypatch.setenv("RLCORE_NATIVE", request.param)
    suffix.native.load.cache_clear()
    yield functools.partial(suffix.Forest, threads=1)
    suffix.native.load.cache_clear()


@pytest.fixture(params=MAKERS)
def case(request):
    return lambda history, **options: Case(request.param, history, **options)


# ---- match and branch


def test_the_draft_is_what_followed_the_longest_suffix(case):
    c = case([([1, 2, 3, 4, 5, 6], 1), ([9, 2, 3, 4, 7, 8], 1)])
    assert c.feed(1, 2, 3, 4).draft() == [5, 6]
    assert c.matches() == (4, 0)


def test_a_larger_sum_of_rewards_beats_more_occurrences(case):
    history = [([1, 2, 3, 4], 0.5), ([1, 2, 3, 4], 0.25), ([1, 2, 3, 5], 1)]
    assert case(history).feed(1, 2, 3).draft() == [5]


def test_equal_sums_go_to_the_more_frequent_branch(case):
    history = [([1, 2, 3, 5], 0), ([1, 2, 3, 9], 0), ([1, 2, 3, 9], 0)]
    assert case(history).feed(1, 2, 3).draft() == [9]


def test_equal_branches_go_to_the_smaller_token(case):
    assert case([([1, 2, 3, 9], 1), ([1, 2, 3, 5], 1)]).feed(1, 2, 3).draft() == [5]


def test_negative_rewards_are_shifted_by_the_smallest(case):
    """-1, -1, -0.5 become 0, 0, 0.5."""
    history = [([1, 2, 3, 4], -1), ([1, 2, 3, 4], -1), ([1, 2, 3, 5], -0.5)]
    assert case(history).feed(1, 2, 3).draft() == [5]


def test_no_match_crosses_a_response_boundary(case):
    c = case([([1, 2, 3], 1), ([4, 5, 6], 1)])
    assert c.feed(1, 2, 3).draft() == []
    assert c.feed(4).matches() == (0, 0)


def test_a_match_that_never_continues_shrinks_until_one_does(case):
    """1 2 3 4 only ends a response; 2 3 4 goes on elsewhere."""
    c = case([([1, 2, 3, 4], 1), ([2, 3, 4, 8], 1)])
    assert c.feed(1, 2, 3, 4).draft() == [8]
    assert c.matches() == (4, 0)


def test_it_shrinks_to_min_match_and_no_further(case):
    history = [([1, 2, 3, 4], 1), ([3, 4, 8], 1)]
    assert case(history).feed(1, 2, 3, 4).draft() == []
    assert case(history, min_match=2).feed(1, 2, 3, 4).draft() == [8]


def test_a_limit_makes_longer_contexts_equal(case):
    """With 3 tokens of context the branch with two rewards wins; with 4 the one that fits."""
    history = [([1, 2, 3, 4, 5], 1), ([8, 2, 3, 4, 6], 1), ([9, 2, 3, 4, 6], 1)]
    assert case(history, limit=3).feed(1, 2, 3, 4).draft() == [6]
    assert case(history, limit=0).feed(1, 2, 3, 4).draft() == [5]


def test_min_prob_stops_the_draft_where_its_path_is_too_rare(case):
    """After 1 2 3: 4 in all four, then 5 in two of four, then 6 in one of four."""
    history = [([1, 2, 3, 4, 5, 6], 1), ([1, 2, 3, 4, 5, 7], 0), ([1, 2, 3, 4, 8], 0)]
    history.append(([1, 2, 3, 4, 9], 0))
    for min_prob, draft in [(0.0, [4, 5, 6]), (0.3, [4, 5]), (0.5, [4, 5]), (0.6, [4])]:
        assert case(history, min_prob=min_prob).feed(1, 2, 3).draft() == draft


def test_a_rare_branch_that_rewards_pick_leaves_the_draft_to_the_most_frequent(case):
    """1 in 16 is below 0.3, 15 in 16 is not; without a threshold the reward decides."""
    history = [([1, 2, 3, 7, 7, 7], 0)] * 15 + [([1, 2, 3, 8, 8, 8], 1)]
    assert case(history, min_prob=0.3).feed(1, 2, 3).draft() == [7, 7, 7]
    assert case(history, min_prob=0.0).feed(1, 2, 3).draft() == [8, 8, 8]
    many = [([1, 2, 3, k], 1) for k in range(20, 60)] + [([1, 2, 3, 9], 0)] * 30
    assert case(many, min_prob=0.3).feed(1, 2, 3).draft() == [9]
    assert case(many, min_prob=0.5).feed(1, 2, 3).draft() == []


def test_equally_frequent_branches_that_rewards_passed_over_go_to_the_smaller_token(case):
    history = [([1, 2, 3, k], 0) for k in (9, 9, 7, 7)] + [([1, 2, 3, 8], 1)]
    assert case(history, min_prob=0.4).feed(1, 2, 3).draft() == [7]


def test_factor_bounds_the_draft_by_the_match(case):
    history = [(list(range(1, 30)), 1)]
    assert case(history, factor=1.5).feed(1, 2, 3).draft() == [4, 5, 6, 7]


def test_an_unknown_key_has_no_history(case):
    c = case([([1, 2, 3, 4], 1)])
    c.handles = c.forest.open(i64(77))
    assert c.feed(1, 2, 3).draft() == []


# ---- the own stream


def test_the_own_stream_drafts_where_the_history_has_nothing(case):
    assert case([]).feed(1, 2, 3, 4, 5, 1, 2, 3).draft(2) == [4, 5]


def test_the_own_stream_needs_a_longer_match_than_the_history(case):
    history = [([1, 2, 3, 9, 9], 1)]
    assert case(history).feed(1, 2, 3, 4, 1, 2, 3).draft(1) == [9]
    assert case(history).feed(5, 1, 2, 3, 4, 5, 1, 2, 3).draft(1) == [4]


def test_a_period_of_the_own_stream_goes_on(case):
    assert case([]).feed(1, 2, 3, 1, 2, 3, 1).draft(7) == [2, 3, 1, 2, 3, 1, 2]


def test_of_equal_own_matches_the_most_recent_is_taken(case):
    assert case([]).feed(1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3).draft(1) == [8]


def test_only_the_last_candidates_are_compared(case):
    stream = [9, 1, 2, 3, 7, 1, 2, 3, 8, 9, 1, 2, 3]
    assert case([], candidates=2).feed(*stream).draft(1) == [7]
    assert case([], candidates=1).feed(*stream).draft(1) == [8]


def test_without_live_the_own_stream_is_not_used(case):
    assert case([], live=False).feed(1, 2, 3, 4, 1, 2, 3).draft() == []


# ---- windows


def test_the_window_grows_by_two_and_falls_back_to_two(case):
    c = case([(list(range(100)), 1)], max_window=8)
    c.feed(0, 1, 2)
    seen = []
    for accepted in [2, 4, 6, 8, 8, 3, 2]:
        assert len(c.draft(None)) >= accepted
        seen.append(c.accept(accepted))
    assert seen == [4, 6, 8, 8, 8, 2, 4]


def test_a_short_draft_that_is_accepted_whole_grows_the_window(case):
    """Acceptance is compared with what was proposed, 1, not with the window, 2."""
    c = case([([1, 2, 3, 4], 1)])
    assert c.feed(1, 2, 3).draft(None) == [4]
    assert c.accept(1) == 4


def test_an_empty_draft_leaves_the_window(case):
    c = case([(list(range(9)), 1)])
    assert len(c.feed(0, 1, 2).draft(None)) == 2
    assert c.accept(2) == 4
    assert c.feed(77).draft(None) == []
    assert c.accept(0) == 4


@pytest.mark.parametrize(
    "knee, running, first, second",
    [(0, 10**6, 2, 4), (40, 10, 2, 3), (40, 40, 1, 1), (400, 10, 8, 16), (1000, 8, 8, 16)],
)
def test_the_load_rule_bounds_drafts_and_speeds_their_growth(case, knee, running, first, second):
    """Budget knee // running - 1: none, 3, 1 (at least), 32 (39), 32 (124); start budget // 4."""
    c = case([(list(range(100)), 1)], knee=knee)
    assert len(c.feed(0, 1, 2).draft(None, running)) == first
    c.accept(first)
    assert len(c.draft(None, running)) == second


def test_the_width_of_a_batch_is_its_largest_window_or_the_budget(case):
    c = case([(list(range(100)), 1)], knee=40)
    assert c.forest.draft(c.handles, i32(5), 0)[0].shape == (1, 5)
    assert c.forest.draft(c.handles, None, 10)[0].shape == (1, 3)
    assert c.forest.draft(c.handles, None, 1)[0].shape == (1, 32)


# ---- requests and epochs


def test_a_closed_handle_is_refused_for_ever(case):
    c = case([])
    c.forest.close(c.handles)
    again = c.forest.open(i64(0))
    assert again[0] != c.handles[0]
    for call in (
        c.feed,
        c.draft,
        c.matches,
        lambda: c.accept(0),
        lambda: c.forest.close(c.handles),
    ):
        with pytest.raises(ValueError, match=rf"handles\[0\] {c.handles[0]}: .*not open"):
            call()


def test_a_request_stays_on_the_histories_that_it_was_opened_on(case):
    c = case([([1, 2, 3, 4], 1)])
    c.forest.build(*corpus({0: [([1, 2, 3, 5], 1)]}))
    assert c.feed(1, 2, 3).draft() == [4]
    c.forest.swap()
    assert c.draft() == [4]
    c.handles = c.forest.open(i64(0))
    assert c.feed(1, 2, 3).draft() == [5]


def test_a_swap_needs_a_build(case):
    c = case([])
    with pytest.raises(ValueError, match="swap: nothing was built since the last"):
        c.forest.swap()


@needs_build
def test_an_epoch_is_freed_with_its_last_request():
    c = Case(SuffixForest, [([1, 2, 3] * 5000, 1)])
    old = c.forest.stats()["history_bytes"]
    c.forest.build(*corpus({0: [([1], 1)]}))
    c.forest.swap()
    assert c.forest.stats()["history_bytes"] > old
    c.forest.close(c.handles)
    assert c.forest.stats()["history_bytes"] < 4096
    assert c.forest.stats()["live_bytes"] <= 4 << 20


@needs_build
@pytest.mark.parametrize("tokens, most", [(3000, 22), (4096, 26), (16900, 34), (33000, 34)])
def test_a_stream_costs_what_is_said_and_leaves_with_its_request(tokens, most):
    """Many streams that grow side by side; one slab of 4 MiB is the pool's own."""
    forest = SuffixForest(**DEFAULTS | dict(stream=4096))
    handles = forest.open(np.zeros(64, np.int64))
    rng = np.random.default_rng(0)
    for at in range(0, tokens, 1000):
        size = min(1000, tokens - at)
        text = rng.integers(0, 10**6, 64 * size).astype(np.int32)  # no three tokens twice
        forest.advance(handles, text, np.arange(65) * size)
    assert forest.stats()["live_tokens"] == 64 * tokens
    assert forest.stats()["live_bytes"] - (4 << 20) < most * 64 * max(tokens, 4096)
    forest.close(handles[1:])
    assert forest.stats()["live_bytes"] <= 12 << 20
    forest.close(handles[:1])
    assert forest.stats()["live_bytes"] <= 4 << 20


@needs_build
def test_a_history_costs_less_than_sixty_bytes_a_token():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5000, 3000)
    texts = [(np.where(rng.random(3000) < 0.05, 7, text).tolist(), 1.0) for _ in range(8)]
    facts = SuffixForest(**DEFAULTS).build(*corpus({0: texts}))
    assert facts["tokens"] == 24000
    assert facts["bytes"] / facts["tokens"] < 60


# ---- bad input


def good_build() -> dict:
    names = ["keys", "tokens", "response_offsets", "prompt_offsets", "rewards"]
    parts = corpus({5: [([1, 2], 1), ([3], 0)], 6: [([4], 0)]})
    return dict(zip(names, parts, strict=True))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(keys=i64(5, 5)), r"keys\[1\] 5: .*every prompt once"),
        (dict(keys=np.array([5.0, 6.0])), "keys: must be int64, not float64"),
        (dict(keys=[5, 6]), "keys: must be a numpy array of int64, not list"),
        (dict(tokens=i32(1, -2, 3, 4)), r"tokens\[1\] -2: token ids .* 0 or more"),
        (dict(tokens=i64(1, 2, 3, 4)), "tokens: must be int32, not int64"),
        (dict(tokens=np.zeros((2, 2), np.int32)), "tokens: must have one dimension, not 2"),
        (dict(tokens=np.zeros(8, np.int32)[::2]), "tokens: must be contiguous, has a stride of 8"),
        (dict(response_offsets=i64(0, 2, 4)), "response_offsets: 4 entries are needed, got 3"),
        (dict(response_offsets=i64(1, 2, 3, 4)), r"response_offsets\[0\] 1: .*begin with 0"),
        (dict(response_offsets=i64(0, 3, 2, 4)), r"response_offsets\[2\] 2: offsets .* not fall"),
        (dict(response_offsets=i64(0, 2, 3, 9)), r"response_offsets\[3\] 9: the last offset"),
        (dict(prompt_offsets=i64(0, 2, 2)), r"prompt_offsets\[2\] 2: the last offset"),
        (dict(rewards=np.float32([1, np.nan, 0])), r"rewards\[1\] nan: .*finite"),
        (dict(rewards=np.float32([np.inf, 0, 0])), r"rewards\[0\] inf: .*finite"),
        (dict(rewards=np.float32([0, 0, 1e6])), r"rewards\[2\] 1.*: .*finite"),
        (dict(rewards=np.float64([1, 0, 0])), "rewards: must be float32, not float64"),
    ],
)
def test_a_bad_build_names_the_argument_and_changes_nothing(case, change, message):
    c = case([([1, 2, 3, 4], 1)])
    with pytest.raises(ValueError, match=message):
        c.forest.build(**{**good_build(), **change})
    with pytest.raises(ValueError, match="nothing was built"):
        c.forest.swap()
    assert c.feed(1, 2, 3).draft() == [4]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda f, h: f.open(i32(1)), "keys: must be int64, not int32"),
        (lambda f, h: f.open(None), "keys: must be a numpy array of int64, not NoneType"),
        (lambda f, h: f.advance(h, i32(1), i64(0, 2)), r"offsets\[1\] 2: the last offset"),
        (lambda f, h: f.advance(h, i32(1), i64(0)), "offsets: 2 entries are needed, got 1"),
        (lambda f, h: f.advance(h, i32(-7), i64(0, 1)), r"tokens\[0\] -7: token ids .* 0 or more"),
        (lambda f, h: f.advance(i64(*h, *h), i32(), i64(0, 0, 0)), r"handles\[1\] \d+: .*every"),
        (lambda f, h: f.draft(h, i32(33), 0), r"windows\[0\] 33: .*0 to max_window 32"),
        (lambda f, h: f.draft(h, i32(-1), 0), r"windows\[0\] -1: .*0 to max_window 32"),
        (lambda f, h: f.draft(h, i32(1, 2), 0), "windows: 1 entries are needed, got 2"),
        (lambda f, h: f.draft(h.astype(np.int32), None, 0), "handles: must be int64, not int32"),
        (lambda f, h: f.draft(i64(-1), None, 0), r"handles\[0\] -1: .*not open"),
        (lambda f, h: f.draft(i64(1 << 40), None, 0), r"handles\[0\] \d+: .*not open"),
        (
            lambda f, h: f.accept(h, i32(1)),
            r"accepted\[0\] 1: .*0 to .* last draft.*, 0",
        ),
        (lambda f, h: f.accept(h, i32(-1)), r"accepted\[0\] -1: .*0 to .* last draft"),
        (lambda f, h: f.accept(h, i32()), "accepted: 1 entries are needed, got 0"),
        (lambda f, h: f.step(h, i32(3), i32(1), i64(0, 1), None, 0), r"accepted\[0\] 3: .*0 to"),
    ],
)
def test_a_bad_call_names_the_argument_and_changes_nothing(case, call, message):
    c = case([([1, 2, 3, 4], 1)]).feed(1, 2)
    with pytest.raises(ValueError, match=message):
        call(c.forest, c.handles)
    assert c.feed(3).draft() == [4]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(min_match=0), "min_match 0: .*1 to 64"),
        (dict(limit=2), "limit 2: .*0 .*none.* or at least min_match 3"),
        (dict(limit=-1), "limit -1: .*0 .*none.* or at least min_match 3"),
        (dict(min_prob=1.5), "min_prob 1.5: .*from 0 to 1"),
        (dict(min_prob=float("nan")), "min_prob nan: .*from 0 to 1"),
        (dict(max_window=0), "max_window 0: .*1 to 4096"),
        (dict(start_window=64), "start_window 64: .*1 to max_window 32"),
        (dict(growth=-1), "growth -1: .*0 to 4096"),
        (dict(knee=-5), "knee -5: .*0 .*unknown"),
        (dict(candidates=0), "candidates 0: .*at least 1"),
        (dict(live_match=0), "live_match 0: .*1 to 64"),
        (dict(factor=-1.0), "factor -1(.0)?: .*0 .*none"),
        (dict(stream=-1), "stream -1: .*0 to"),
        (dict(threads=-1), "threads -1: .*0 .*all cores"),
    ],
)
def test_bad_options_are_refused(case, options, message):
    with pytest.raises(ValueError, match=message):
        case([], **options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(limit=7.5), "limit 7.5: must be a whole number"),
        (dict(limit=2**31), "limit 2147483648: must be a 32-bit integer"),
        (dict(threads=None), "threads None: must be a whole number"),
        (dict(growth=True), "growth True: must be a whole number"),
        (dict(live=2), "live 2: must be True or False"),
        (dict(min_prob="0.3"), "min_prob '0.3': must be a number"),
        (dict(factor=float("inf")), "factor inf: must be a finite number"),
    ],
)
def test_options_of_another_type_are_refused(public, options, message):
    with pytest.raises(ValueError, match=message):
        public(**options)


@pytest.mark.parametrize(
    "running, message",
    [
        (1.5, "running 1.5: must be a whole number"),
        (2**70, "running 1180591620717411303424: must be a 32-bit integer"),
        (-1, "running -1: must be 0 .the batch"),
    ],
)
def test_a_bad_number_of_running_requests_is_refused(public, running, message):
    forest = public()
    handles = forest.open(i64(0))
    calls = [
        lambda: forest.draft(handles, running=running),
        lambda: forest.step(handles, i32(0), i32(), i64(0, 0), running=running),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@needs_build
def test_the_defaults_in_c_are_those_in_python():
    from rlcore._C import suffix_defaults

    own = inspect.signature(suffix.Forest).parameters
    assert suffix_defaults == {name: own[name].default for name in suffix_defaults}
    assert set(DEFAULTS) - set(suffix_defaults) == {"threads"}


# ---- adversarial texts


@needs_build
@pytest.mark.parametrize("limit", [0, 7])
def test_a_million_times_one_token(limit):
    c = Case(SuffixForest, [([5] * 2**20, 1)], limit=limit, live=False)
    assert c.feed(*[5] * 100).draft() == [5] * 8
    assert c.matches() == (limit or 100, 0)
    assert c.feed(6).matches() == (0, 0)


@needs_build
def test_a_million_random_bits():
    bits = np.random.default_rng(1).integers(0, 2, 2**20)
    c = Case(SuffixForest, [(bits.tolist(), 1)], limit=0)
    c.forest.advance(c.handles, bits[1000:1100].astype(np.int32), i64(0, 100))
    assert c.matches()[0] == 100
    assert c.draft(32) == bits[1100:1132].tolist()


@needs_build
def test_a_period_of_the_history_is_followed_to_its_end():
    c = Case(SuffixForest, [([1, 2, 3, 4] * 20000, 1)], limit=0, live=False)
    assert c.feed(*[1, 2, 3, 4] * 19999).draft() == [1, 2, 3, 4]


def test_empty_responses_and_empty_batches_are_fine(case):
    c = case([([], 1), ([], 0)])
    assert c.feed(1, 2, 3).draft() == []
    tokens, lengths = c.forest.draft(i64(), None, 0)
    assert tokens.shape == (0, 32) and lengths.shape == (0,)
    assert c.forest.draft(i64(), i32(), 0)[0].shape == (0, 0)
    c.forest.build(*corpus({}))
    c.forest.swap()


# ---- native and reference


def draw_options(rng: random.Random) -> dict:
    gram = rng.choice([1, 2, 3])
    return {
        **DEFAULTS,
        "min_match": gram,
        "limit": rng.choice([0, gram, gram + 1, 7]),
        "min_prob": rng.choice([0.0, 0.1, 0.5, 1.0]),
        "max_window": rng.choice([4, 32]),
        "knee": rng.choice([0, 40, 200]),
        "live": rng.random() < 0.6,
        "candidates": rng.choice([1, 3, 16]),
        "live_match": rng.choice([1, 2, 3]),
        "factor": rng.choice([0.0, 0.5, 3.5]),
        "stream": rng.choice([0, 300]),
    }


def draw_history(rng: random.Random, letters: int) -> tuple[np.ndarray, ...]:
    keys = rng.sample(range(-2, 3), rng.randint(0, 3))
    texts = {
        key: [
            ([rng.randrange(letters) for _ in range(rng.choice([0, 1, 4, 9, 20]))], reward)
            for reward in rng.choices([0, 0.5, 1, 2, -1], k=rng.randint(0, 4))
        ]
        for key in keys
    }
    return corpus(texts)


def same(results: list) -> None:
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_build
@settings(deadline=None, max_examples=150)
@given(st.randoms(use_true_random=False))
def test_native_and_reference_agree_on_every_call(rng):
    """Random insert, append, match, draft, accept and free over small alphabets."""
    options, letters = draw_options(rng), rng.choice([1, 2, 3, 5])
    forests = [suffix.ReferenceForest(**options), SuffixForest(**options)]
    requests: list[tuple[int, int]] = []
    for _ in range(rng.randint(3, 15)):
        what = rng.random()
        if what < 0.2:
            history = draw_history(rng, letters)
            for forest in forests:
                forest.build(*history)
                forest.swap()
        elif what < 0.4 or not requests:
            keys = i64(*rng.choices(range(-2, 4), k=2))
            requests += zip(*(f.open(keys).tolist() for f in forests), strict=True)
        elif what < 0.5:
            gone = requests.pop(rng.randrange(len(requests)))
            for forest, handle in zip(forests, gone, strict=True):
                forest.close(i64(handle))
        else:
            some = rng.sample(requests, rng.randint(1, len(requests)))
            compare_a_round(rng, forests, [i64(*h) for h in zip(*some, strict=True)], letters)


def compare_a_round(rng, forests, handles, letters: int) -> None:
    size = len(handles[0])
    text = batch(
        [[rng.randrange(letters) for _ in range(rng.choice([0, 1, 5]))] for _ in "x" * size]
    )
    windows = rng.choice([None, i32(*(rng.randint(0, 4) for _ in range(size)))])
    running = rng.choice([0, 1, 20])
    pairs = list(zip(forests, handles, strict=True))
    for forest, h in pairs:
        forest.advance(h, *text)
    same([f.matches(h) for f, h in pairs])
    drafts = [f.draft(h, windows, running) for f, h in pairs]
    same(drafts)
    accepted = i32(*(rng.choice([0, n]) for n in drafts[0][1].tolist()))
    same([f.step(h, accepted, *text, windows, running) for f, h in pairs])
    same([[f.windows(h)] for f, h in pairs])


@needs_build
def test_a_step_is_accept_advance_and_draft():
    rng = np.random.default_rng(3)
    text = rng.integers(0, 3, 200).tolist()
    whole, parts = (Case(SuffixForest, [(text, 1)]) for _ in range(2))
    accepted = i32(0)
    for at in range(0, 60, 5):
        more = batch([text[at : at + 5]])
        parts.forest.accept(parts.handles, accepted)
        parts.forest.advance(parts.handles, *more)
        expected = parts.forest.draft(parts.handles, None, 0)
        same([whole.forest.step(whole.handles, accepted, *more, None, 0), expected])
        accepted = expected[1]


# ---- builds


@needs_build
def test_threads_build_the_same_histories():
    rng = np.random.default_rng(4)
    texts = {k: [(rng.integers(0, 9, 300).tolist(), 1.0)] for k in range(40)}
    drafts = []
    for threads in (1, 4):
        forest = SuffixForest(**{**DEFAULTS, "threads": threads})
        forest.build(*corpus(texts))
        forest.swap()
        handles = forest.open(i64(*range(40)))
        forest.advance(handles, *batch([t[0][0][100:110] for t in texts.values()]))
        drafts.append(forest.draft(handles, None, 0))
    same(drafts)


@needs_build
def test_requests_are_served_while_the_next_epoch_is_built():
    rng = np.random.default_rng(5)
    text = rng.integers(0, 50, 40000).tolist()
    epochs = [corpus({0: [(text, 1)]}), corpus({0: [(text[::-1], 1)]})]
    forest = SuffixForest(**{**DEFAULTS, "threads": 2})
    forest.build(*epochs[0])
    forest.swap()
    drafts = [serve_once(forest, text)]
    forest.build(*epochs[1])
    forest.swap()
    drafts.append(serve_once(forest, text))
    assert drafts[0] == text[120:124] != drafts[1]
    failures: list[BaseException] = []

    def build() -> None:
        try:
            for k in range(8):
                forest.build(*epochs[k % 2])
                forest.swap()
        except BaseException as error:
            failures.append(error)

    builder = threading.Thread(target=build)
    builder.start()
    served = 0
    while builder.is_alive() or served == 0:
        assert serve_once(forest, text) in drafts
        served += 1
    builder.join()
    assert not failures
    assert serve_once(forest, text) == drafts[1]


def serve_once(forest, text: list[int]) -> list[int]:
    handles = forest.open(i64(0))
    forest.advance(handles, i32(*text[100:120]), i64(0, 20))
    tokens, lengths = forest.draft(handles, i32(4), 0)
    forest.close(handles)
    return tokens[0, : lengths[0]].tolist()


@needs_build
def test_arrays_that_another_thread_writes_to_are_used_as_they_were_checked():
    """Offsets, windows, tokens, handles and accepted lengths turn bad and good during the calls."""
    code = ROGUE_WRITER
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert ran.stdout.strip() == "alive", (ran.returncode, ran.stderr)


ROGUE_WRITER = """
import sys, threading, time
import numpy as np
from tests.native.test_suffix import DEFAULTS, SuffixForest, corpus, i32, i64
sys.setswitchinterval(1e-6)
forest = SuffixForest(**DEFAULTS)
history = list(corpus({0: [(list(range(50)) * 40, 1.0)] * 20}))
forest.build(*history)
forest.swap()
handles = forest.open(np.zeros(256, np.int64))
good = [handles, np.zeros(256, np.int32), np.zeros(2560, np.int32) + 5,
        np.arange(0, 2561, 10), np.full(256, 4, np.int32)]
bad = [handles + (1 << 20), np.full(256, -9, np.int32), np.full(2560, -1, np.int32),
       np.arange(0, 2561, 10) * 10**6, np.full(256, 10**6, np.int32)]
shared = [a.copy() for a in good]
texts = history[1].copy(), history[2].copy()
stop = False
def write():
    while not stop:
        for a, b, c in zip(shared, bad, good):
            a[:] = b
            a[:] = c
        history[1][:] = -1
        history[2][1:-1] = 1 << 40
        history[1][:], history[2][:] = texts
writer = threading.Thread(target=write)
writer.start()
refused = served = 0
end = time.monotonic() + 3
while time.monotonic() < end:
    for call in (lambda: forest.step(*shared, 0), lambda: forest.build(*history)):
        try:
            call()
            served += 1
        except ValueError:
            refused += 1
stop = True
writer.join()
assert served and refused, (served, refused)
print("alive")
"""

OUT_OF_MEMORY = """
import resource, numpy as np
from rlcore._C import SuffixForest
from tests.native.test_suffix import DEFAULTS, Case, corpus
c = Case(SuffixForest, [([1, 2, 3, 4], 1)])
now = int(open("/proc/self/statm").read().split()[0]) * 4096
c.forest = SuffixForest(**DEFAULTS | dict(threads=@THREADS))
c.forest.build(*corpus({0: [([1, 2, 3, 4], 1)]}))
c.forest.swap()
c.handles = c.forest.open(np.zeros(1, np.int64))
tokens = np.random.default_rng(0).integers(0, 9, 1_000_000).astype(np.int32)
ends = np.arange(0, 1_000_001, 125_000)
parts = np.arange(8), tokens, ends, np.arange(9), np.zeros(8, np.float32)
resource.setrlimit(resource.RLIMIT_AS, (now + (@LIMIT << 20), resource.RLIM_INFINITY))
try:
    c.forest.build(*parts)
except MemoryError:
    print("kept")
assert c.feed(1, 2, 3).draft() == [4]
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
c.forest.build(*parts)
"""


@needs_build
@pytest.mark.parametrize("threads, limit", [(1, 64), (1, 152), (4, 152), (4, 170)])
def test_out_of_memory_while_building_keeps_what_was_there(threads, limit):
    """64 MiB: no room for the block of 144 MiB; with more the builders themselves run out."""
    code = OUT_OF_MEMORY.replace("@THREADS", str(threads)).replace("@LIMIT", str(limit))
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert ran.returncode == 0 and ran.stdout.strip() == "kept", ran.stderr


# ---- the public class


def test_the_public_class_serves_with_and_without_a_build(monkeypatch):
    for wanted in ("0", ""):
        monkeypatch.setenv("RLCORE_NATIVE", wanted)
        suffix.native.load.cache_clear()
        forest = suffix.Forest(threads=1)
        forest.build(*corpus({3: [([1, 2, 3, 4, 5, 6], 1)]}))
        forest.swap()
        handles = forest.open(i64(3))
        forest.advance(handles, i32(1, 2, 3), i64(0, 3))
        assert forest.draft(handles)[0][0, :3].tolist() == [4, 5, -1]
        forest.accept(handles, i32(2))
        assert forest.windows(handles).tolist() == [4]
        assert forest.matches(handles)[0].tolist() == [3]
        assert forest.stats()["requests"] == 1
        assert forest.stats()["tokens"] == 6
        forest.close(handles)
    suffix.native.load.cache_clear()
