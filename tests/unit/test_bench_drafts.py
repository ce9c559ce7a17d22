"""tools/studies/bench_drafts.py: its text, rules, windows, comparison; one small run of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "studies"))

import bench_drafts as bench  # noqa: E402
from drafts import equal, ngram, real, ref_sam, replay, show, workload  # noqa: E402
from drafts.drafter import Drafter  # noqa: E402

SMALL = {"prompts": 2, "group": 2, "min_len": 40, "max_len": 90, "prompt_len": 16}
texts = st.lists(st.integers(0, 2), max_size=30)


@pytest.fixture(scope="module")
def small():
    return workload.generate(workload.Config(**SMALL))


# --- the workload


def test_the_same_settings_give_the_same_text_and_another_seed_another(small):
    again = workload.generate(workload.Config(**SMALL))
    other = workload.generate(workload.Config(**SMALL, seed=1))
    assert np.array_equal(small.truth.tokens, again.truth.tokens)
    assert not np.array_equal(small.truth.tokens, other.truth.tokens)


def test_responses_have_the_lengths_asked_for_and_lie_one_after_the_other(small):
    lengths = np.diff(small.history.response_offsets)
    assert len(lengths) == 4 and (lengths >= 40).all() and (lengths <= 90).all()
    joined = [np.concatenate(small.history.responses(p)) for p in range(2)]
    assert np.array_equal(np.concatenate(joined), small.history.tokens)
    assert np.array_equal(joined[1], small.history.of(1))


def test_most_of_the_next_epoch_is_copied_from_the_last(small):
    """Most 4-grams of a truth occur in the same prompt's history, and few in the other's."""

    def grams(text):
        return {tuple(text[i : i + 4]) for i in range(len(text) - 3)}

    for p in range(2):
        truth, own, other = (
            grams(t) for t in (small.truth.of(p), *map(small.history.of, (p, 1 - p)))
        )
        assert len(truth & own) > 0.5 * len(truth) > 5 * len(truth & other)


def test_a_workload_is_read_back_as_it_was_saved(small, tmp_path):
    workload.save(small, tmp_path / "w.npz")
    back = workload.read(tmp_path / "w.npz")
    assert np.array_equal(back.prompts, small.prompts) and back.copied == small.copied
    for a, b in ((back.history, small.history), (back.truth, small.truth)):
        assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.rewards, b.rewards)
        assert np.array_equal(a.response_offsets, b.response_offsets)
        assert np.array_equal(a.prompt_offsets, b.prompt_offsets)


def test_a_real_response_has_those_of_the_checkpoints_before_it_as_its_history(tmp_path):
    from rlcore.data import label_task
    from rlcore.hf.tokenizer import make_char_tokenizer

    make_char_tokenizer(tmp_path, label_task.CHARS)
    rows = [
        {"idx": i, "checkpoint": 20 * k, "question": f"a{i}=", "response": f"b{k}=1{i};>{k}"}
        | {"correct": k == 2}
        for k in (3, 1, 2)
        for i in (0, 1)
    ]
    w = real.make(rows, tmp_path, history=2)  # of three checkpoints the last has two before it
    assert w.truth.num_prompts == 2 and len(w.prompts[0]) == real.PROMPT
    assert w.history.rewards.tolist() == [0, 1, 0, 1] and w.truth.rewards.tolist() == [0, 0]
    first, second = w.history.responses(0)
    assert len(first) == len(second) == len(w.truth.of(0)) and (first != second).sum() == 2
    assert len(real.make(rows, tmp_path, history=1).truth.rewards) == 4
    with pytest.raises(ValueError, match="--history 3: no prompt has so many"):
        real.make(rows, tmp_path, history=3)


# --- rules of peers that are written here


def vllm_by_search(text, min_n, max_n):
    for n in range(max_n, min_n - 1, -1):
        for i in range(len(text) - n):
            if n <= len(text) and text[i : i + n] == text[len(text) - n :]:
                return i + n
    return -1


@given(texts, st.integers(1, 3), st.integers(0, 3))
def test_vllms_rule_finds_the_first_place_of_the_longest_ngram(text, min_n, more):
    found = ngram.vllm_rule(np.array(text, np.int32), min_n, min_n + more)
    assert found == vllm_by_search(text, min_n, min_n + more)


@given(texts, st.integers(1, 4))
def test_prompt_lookup_finds_the_first_place_of_the_longest_ngram(text, max_n):
    found = ngram.lookup_rule(np.array(text, np.int32), max_n)
    assert found == vllm_by_search(text, 1, max_n)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # its hash wraps
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=3), texts
)
def test_the_yardstick_matches_and_drafts_as_a_search_does(history, stream):
    """Unambiguous drafts only: ties are broken by the order of insertion."""
    flat = np.array(sum(history, []), np.int32)
    offsets = np.cumsum([0, *map(len, history)])
    prompt_of, weights = np.zeros(len(history), np.int32), np.ones(len(history))
    arena = ref_sam.build(flat, offsets, prompt_of, weights, 1)
    roots, states, matched = (np.zeros(1, np.int32) for _ in range(3))
    tokens = np.array(stream, np.int32)
    ref_sam.advance(
        arena, roots, states, matched, np.array([0]), tokens, np.array([0, len(stream)])
    )
    occurring = [
        n
        for n in range(len(stream) + 1)
        if any(h[i : i + n] == stream[len(stream) - n :] for h in history for i in range(len(h)))
    ]
    assert matched[0] == max(occurring)
    draft, num = ref_sam.draft(arena, states, np.array([0]), np.array([1], np.int32), 0.0, 1)
    for n in range(matched[0], 0, -1):
        end = stream[len(stream) - n :]
        places = [(h, i + n) for h in history for i in range(len(h) - n) if h[i : i + n] == end]
        if places:
            counts = np.bincount([h[at] for h, at in places])
            assert num[0] == 1 and counts[draft[0, 0]] == counts.max()
            return
    assert num[0] == 0


# --- windows and acceptance


def test_a_window_grows_by_two_when_all_that_was_proposed_is_accepted():
    window = replay.Window("aimd", 4)
    rows = np.arange(4)
    window.update(rows, drafted=np.array([2, 1, 2, 0]), accepted=np.array([2, 1, 1, 0]))
    assert window.sizes.tolist() == [4, 4, 2, 2]
    for _ in range(20):
        window.update(rows, drafted=np.array([9, 9, 9, 0]), accepted=np.array([9, 9, 0, 0]))
    assert window.sizes.tolist() == [32, 32, 2, 2]
    window.update(rows, drafted=np.array([32, 0, 2, 0]), accepted=np.array([31, 0, 2, 0]))
    assert window.sizes.tolist() == [2, 32, 4, 2]


def test_a_fixed_window_stays():
    window = replay.Window("fixed:5", 2)
    window.update(np.arange(2), np.array([5, 5]), np.array([5, 0]))
    assert window.sizes.tolist() == [5, 5]


def test_a_chain_is_accepted_up_to_its_first_wrong_token():
    truth = np.array([4, 5, 6])
    drafts = ([4, 5, 7], [4, 5, 6, 9], [9], [])
    assert [replay.accept_chain(d, truth) for d in drafts] == [2, 3, 0, 0]


def test_a_tree_is_accepted_along_its_best_branch_in_each_form():
    truth = np.array([4, 5, 6])
    #      4 - 7
    #        \ 5 - 6
    tokens, parents = [4, 7, 5, 6], [-1, 0, 0, 2]
    assert replay.accept_tree((tokens, parents), truth) == (4, 3)
    mask = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    )
    assert replay.accept_tree((np.array([3, *tokens]), mask), truth) == (4, 3)
    assert replay.accept_tree([[4, 7, -2, -2], [4, 5, 6]], truth) == (4, 3)
    assert replay.accept_tree((tokens, parents), np.array([5])) == (4, 0)


class Oracle(Drafter):
    """Drafts the truth, with a wrong token after `right` right ones; counts what it is told."""

    def __init__(self, w, right):
        super().__init__()
        self.right, self.at, self.told = right, {}, []
        self.truths = replay.choose(w, 2, 30).truths

    def start(self, requests, prompts, texts):
        self.at = dict.fromkeys(requests.tolist(), 0)

    def append(self, request, tokens):
        at = self.at[request]
        assert np.array_equal(tokens, self.truths[request][at : at + len(tokens)])
        self.at[request] += len(tokens)

    def verified(self, requests, accepted):
        self.told += accepted.tolist()

    def speculate(self, request, context, window):
        at = self.at[request]
        draft = self.truths[request][at : at + self.right].tolist()
        return [*draft, -1][:window]


def test_a_replay_counts_what_is_accepted_and_hands_on_every_token(small):
    """30 tokens, 4 right ones and the bonus a step: 6 steps of 5, all of them rejecting one."""
    oracle = Oracle(small, right=4)
    run = replay.replay(oracle, replay.choose(small, 2, 30), "fixed:8")
    assert (run.tok_per_step, run.accepted_per_step) == (5, 4)
    assert run.drafted_per_step == 5 and run.precision == pytest.approx(0.8)
    assert oracle.told == [4] * 10  # the last step ends both: nobody is told
    assert run.rounds == 5 and run.batch_p50_us >= run.draft_p50_us > 0


def test_a_replay_holds_drafts_to_the_window(small):
    run = replay.replay(Oracle(small, right=40), replay.choose(small, 2, 30), "aimd")
    # All accepted: windows 2, 4, 6, 8, 10 and a bonus each make 35, so 30 end in the fifth step.
    assert run.tok_per_step == 6


# --- the comparison


def test_a_front_keeps_what_no_mix_of_other_points_beats():
    points = [(4, 3.4), (2, 2.0), (3, 1.5), (4, 2.5), (5, 3.5), (6, 2.9), (8, 5.0), (9, 5.0)]
    assert equal.front(points) == [(2, 2.0), (4, 3.4), (8, 5.0)]
    assert equal.front([(2, 2.0), (3, 2.4), (5, 3.5)]) == [(2, 2.0), (5, 3.5)]


def test_between_two_settings_a_front_is_straight_and_outside_it_says_nothing():
    line = [(2.0, 2.0), (4.0, 3.0)]
    assert [equal.at(line, x) for x in (1.9, 2, 3, 4, 4.1)] == [None, 2.0, 2.5, 3.0, None]


def test_the_margin_is_the_least_lead_in_the_common_range():
    ours = [(1.0, 2.0), (3.0, 4.0), (9.0, 5.0)]
    theirs = [(2.0, 2.0), (4.0, 4.5), (6.0, 4.6)]
    lead, x = equal.margin(ours, theirs)
    assert x == 4.0 and lead == pytest.approx(4 + 1 / 6 - 4.5)
    assert equal.margin(ours, [(10.0, 9.0)]) is None


def test_margins_compare_ours_with_every_arctic():
    def row(peer, drafted, tokens):
        return {"peer": peer, "drafted_per_step": drafted, "tok_per_step": tokens}

    rows = [row("rlcore", x, x / 2) for x in (2.0, 8.0)]
    rows += [row("arctic-prompt", x, x / 2 - 0.5) for x in (4.0, 8.0)] + [row("pld", 4.0, 1.1)]
    assert show.margins(rows) == ["rlcore over arctic-prompt: at least +0.50 tok/step (at 4.0)"]


# --- the command


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--peers", "rlcor"], "--peers rlcor: no such peer; did you mean rlcore?"),
        (["--peers", "rlcore=[1]"], "the settings must be a JSON object"),
        (["--peers", 'rlcore={"limits":0}'], "limits: not a setting"),
        (["--windows", "fixed:0"], "--windows fixed:0: aimd, or fixed:N with N from 1 to 64"),
        (["--windows", "fixed"], "--windows fixed: aimd, or fixed:N"),
        (["--batch", "0"], "--batch 0: from 1 to prompts x group = 1024"),
        (["--prompts", "1", "--batch", "17"], "--batch 17: from 1 to prompts x group = 16"),
        (["--prompts", "0"], "prompts 0: at least 1"),
        (["--max-len", "9"], "max_len 9: more than min_len 2048"),
        (["--replay-len", "0"], "--replay-len 0: at least 1"),
        (["--seed", "-1"], "seed -1: 0 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_sentence(arguments, said, capsys):
    assert bench.main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.native
def test_the_command_writes_rows_with_every_key_that_was_promised(tmp_path):
    pytest.importorskip("rlcore._C", reason="no native build (no compiler at set-up)")
    command = [sys.executable, ROOT / "tools" / "studies" / "bench_drafts.py", "--no-install"]
    for name, value in {**SMALL, "batch": 3, "replay_len": 40}.items():
        if name != "prompt_len":
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--peers", "rlcore", 'rlcore={"limit":0}', "--windows", "fixed:8", "aimd"]
    for name, ending in (("json", "json"), ("table", "txt"), ("plot", "png")):
        command += [f"--{name}", tmp_path / f"out.{ending}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(r["peer"], r["window"]) for r in rows] == [
        (peer, window)
        for peer in ("rlcore", 'rlcore={"limit":0}')
        for window in ("fixed:8", "aimd")
    ]
    promised = "batch_p50_us batch_p99_us build_mtok_s bytes_per_token tok_per_step"
    for row in rows:
        assert all(isinstance(row[key], float) for key in promised.split())
        assert row["tok_per_step"] >= 1 and 0 < row["drafted_per_step"] <= 8
    assert "advance + draft" in (tmp_path / "out.txt").read_text()
    assert (tmp_path / "out.png").stat().st_size > 1000
