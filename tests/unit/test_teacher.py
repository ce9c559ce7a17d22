"""Teachers of distillation: what they score, from a folder and behind a URL.

Not covered: copies of layers on CUDA (tests/gpu/test_judge.py), SGLang and vLLM themselves.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcore.config.schema import TeacherConfig
from rlcore.teacher.model import TeacherModel
from rlcore.teacher.scores import TeacherRow, TeacherScores, TokenScorer
from rlcore.teacher.server import TeacherServer
from rlcore.teacher.teachers import Teachers
from rlcore.tensors import Batch, cumulative
from rlcore.utils.errors import ConfigError
from tests import kit

CPU = torch.device("cpu")
VOCAB = kit.SIZES["vocab_size"]


def row(length: int, seed: int = 0) -> TeacherRow:
    """The last half of the tokens is scored, but for one of an environment."""
    g = torch.Generator().manual_seed(seed + length)
    mask = torch.arange(length) >= length // 2
    mask[-2] = False
    return TeacherRow(torch.randint(0, VOCAB - 3, (length,), generator=g), mask)


ROWS = [row(9), row(21), row(4), row(21, seed=1)]


def model_of(folder: Path, **settings: Any) -> TeacherModel:
    usual: dict[str, Any] = {
        "dtype": torch.float32,
        "device": CPU,
        "vocab_size": VOCAB,
        "temperature": 0.8,
        "top_k": 5,
        "batch_tokens": 1000,
    }
    return TeacherModel(folder, **(usual | settings))


def scored(folder: Path, **settings: Any) -> list[TeacherScores]:
    model = model_of(folder, **settings)
    with model.loaded():
        found = model.score(ROWS)
    model.close()
    return found


# ---- from a folder


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe"])
def test_a_folder_gives_the_log_probs_of_transformers(arch: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = kit.tiny_hf_folder(tmp_path / "m", arch)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for given, found in zip(ROWS, scored(folder), strict=True):
        with torch.no_grad():
            logits = theirs(given.tokens[None]).logits[0, :-1] / 0.8
        want = logits.log_softmax(-1)[given.mask[1:]]
        tokens = given.tokens[given.mask]
        chosen = want.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        assert len(found.log_probs) == int(given.mask.sum())
        assert torch.allclose(found.log_probs, chosen, atol=1e-4)
        top = want.topk(5)
        assert torch.allclose(found.top_log_probs, top.values, atol=1e-4)
        assert torch.equal(found.top_ids, top.indices)


def test_streamed_layers_and_other_batches_give_the_same(tmp_path: Path) -> None:
    folder = kit.tiny_hf_folder(tmp_path / "m")
    want = scored(folder)
    for settings, limit in (
        ({"resident_ratio": 0.0}, 0.0),
        ({"resident_ratio": 0.5}, 0.0),
        ({"free": lambda: 0.0}, 0.0),  # no room for a resident layer
        ({"batch_tokens": 1}, 1e-5),  # row by row
    ):
        for ours, theirs in zip(scored(folder, **settings), want, strict=True):
            assert torch.allclose(ours.log_probs, theirs.log_probs, rtol=0, atol=limit)
            assert torch.equal(ours.top_ids, theirs.top_ids)


def test_the_number_of_streamed_layers_is_told_and_memory_is_given_back(tmp_path: Path) -> None:
    model = model_of(kit.tiny_hf_folder(tmp_path / "m"), resident_ratio=0.5)
    for _ in range(2):
        with model.loaded():
            assert model.streamed_layers == 2 and model._layers.num_buffers == 4
            first = model.score(ROWS[:1])
        assert model._layers.num_buffers == 0 and not model._model.allocated
    assert model.streamed_layers == 2
    with pytest.raises(AssertionError, match="freed"):
        model.score(ROWS[:1])
    assert len(first) == 1
    model.close()


def test_columns_that_the_policy_lacks_have_no_probability(tmp_path: Path) -> None:
    folder = kit.tiny_hf_folder(tmp_path / "m")
    whole, cut = scored(folder, top_k=VOCAB), scored(folder, vocab_size=VOCAB - 3, top_k=VOCAB - 3)
    for ours, theirs in zip(cut, whole, strict=True):
        inside = theirs.top_ids < VOCAB - 3
        mass = torch.where(inside, theirs.top_log_probs.exp(), 0.0).sum(-1)
        assert (mass < 1).all()
        assert torch.allclose(ours.top_log_probs.exp().sum(-1), torch.ones(len(mass)), atol=1e-5)
        assert torch.allclose(ours.top_log_probs[:, 0].exp() * mass, _best(theirs, inside))


def _best(scores: TeacherScores, inside: torch.Tensor) -> torch.Tensor:
    return torch.where(inside, scores.top_log_probs.exp(), 0.0).amax(-1)


def test_a_row_longer_than_the_positions_is_refused(tmp_path: Path) -> None:
    model = model_of(kit.tiny_hf_folder(tmp_path / "m", max_position_embeddings=16))
    with model.loaded(), pytest.raises(ValueError, match="21 tokens, and the teacher has 16"):
        model.score(ROWS)


# ---- all teachers of a run


class Fixed:
    """Gives the same log-prob to every token."""

    def __init__(self, value: float) -> None:
        self.value, self.lengths, self.is_loaded, self.loads = value, [], False, 0

    @contextmanager
    def loaded(self) -> Iterator[None]:
        self.is_loaded, self.loads = True, self.loads + 1
        yield
        self.is_loaded = False

    def score(self, rows: Any) -> list[TeacherScores]:
        assert self.is_loaded
        self.lengths += [len(r.tokens) for r in rows]
        counts = [int(r.mask.sum()) for r in rows]
        return [
            TeacherScores(
                torch.full((n,), self.value),
                torch.arange(2).expand(n, 2),
                torch.tensor([self.value, self.value - 1]).expand(n, 2),
            )
            for n in counts
        ]


def batch() -> Batch:
    mask = torch.tensor([True, True, False, True, False, False, False, True])
    return Batch(
        tokens=torch.arange(8),
        cu_seqlens=cumulative([3, 2, 3]),
        mask=mask,
        ids=("a", "b", "c"),
    )


def test_each_dataset_is_scored_by_its_teacher() -> None:
    of_math, rest = Fixed(-1.0), Fixed(-2.0)
    teachers = Teachers({"math": of_math, "": rest}, 2)
    (found,) = teachers.add([batch()], {"a": "code", "b": "code", "c": "math"})
    # the first token of a row is predicted by nothing, and so is not scored
    want = torch.tensor([0, -2.0, 0, 0, 0, 0, 0, -1.0])
    assert found.teacher_log_probs is not None and torch.equal(found.teacher_log_probs, want)
    assert found.teacher_top_log_probs is not None and found.teacher_top_ids is not None
    assert found.teacher_top_ids[7].tolist() == [0, 1]
    assert found.teacher_top_log_probs[7].tolist() == [-1.0, -2.0]
    assert rest.lengths == [3] and of_math.lengths == [3]  # row b has nothing to score


def test_a_teacher_reads_the_prompt_that_is_meant_for_it(tmp_path: Path) -> None:
    """Row b has the same prompt as the policy; the scores of the others are those of their tokens
    behind another prompt."""
    model = model_of(kit.tiny_hf_folder(tmp_path / "m"))
    given = batch().with_(mask=torch.tensor([False, True, True, False, True, False, True, True]))
    other = torch.tensor([5, 6, 7, 8])
    both = given.with_(teacher_prompts=(other, None, other))
    (found,) = Teachers({"": model}, 5).add([both], dict.fromkeys("abc", ""))
    with model.loaded():
        for first, row, start in ((0, [1, 2], other), (3, [4], torch.tensor([3]))):
            tokens = torch.cat([start, given.tokens[row]])
            mask = torch.arange(len(tokens)) >= len(start)
            (want,) = model.score([TeacherRow(tokens, mask)])
            assert found.teacher_log_probs is not None and found.teacher_top_ids is not None
            assert torch.allclose(found.teacher_log_probs[row], want.log_probs, atol=1e-5)
            assert torch.equal(found.teacher_top_ids[row], want.top_ids), first
    assert found.teacher_prompts == ()
    model.close()


def test_a_rank_without_rows_gets_scores_of_nothing() -> None:
    (found,) = Teachers({"": Fixed(-1.0)}, 2).add([batch().select([])], {})
    assert found.teacher_log_probs is not None and found.teacher_log_probs.shape == (0,)
    assert found.teacher_top_ids is not None and found.teacher_top_ids.shape == (0, 2)


def test_a_teacher_is_loaded_once_for_all_batches_and_not_at_all_for_none() -> None:
    used, idle, alive = Fixed(-1.0), Fixed(-2.0), []
    teachers = Teachers({"": used, "code": idle}, 2)
    found = teachers.add([batch(), batch()], dict.fromkeys("abc", "x"), lambda: alive.append(1))
    assert (used.loads, idle.loads, len(alive)) == (1, 0, 2)
    assert all(b.teacher_log_probs is not None and b.teacher_log_probs[7] == -1 for b in found)


def test_a_dataset_without_a_teacher_is_named() -> None:
    teachers = Teachers({"math": Fixed(-1.0)}, 0)
    with pytest.raises(ValueError, match=r"no teacher for the dataset 'code'.*`code=MODEL`"):
        teachers.add([batch()], {"a": "math", "b": "code", "c": "math"})


def test_a_score_that_is_not_finite_is_refused_with_the_sample() -> None:
    teachers = Teachers({"": Fixed(float("nan"))}, 2)
    with pytest.raises(ValueError, match="sample a: teacher_log_probs of token 1 is nan"):
        teachers.add([batch()], dict.fromkeys("abc", ""))


# ---- behind a URL


def table(ids: list[int], t: int) -> torch.Tensor:
    """What a server says about place t: log-probs that depend on the tokens before it."""
    g = torch.Generator().manual_seed(sum(ids[:t]) + t)
    return torch.randn(VOCAB, generator=g).log_softmax(-1)


class Handler(BaseHTTPRequestHandler):
    """SGLang's /generate and vLLM's completions, as far as log-probs of prompts go."""

    server: "Server"

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        self.server.seen.append((self.path, dict(self.headers), body))
        if self.server.failures:
            status, text = self.server.failures.pop(0)
            self.answer(status, text.encode())
            return
        reply = self.sglang(body) if self.path == "/generate" else self.vllm(body)
        self.answer(200, json.dumps(self.server.change(reply)).encode())

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def sglang(self, body: dict[str, Any]) -> Any:
        ids, k = body["input_ids"], body["top_logprobs_num"]
        assert body["return_logprob"] and body["logprob_start_len"] == 0
        logps: list[Any] = [[None, ids[0], None]]
        tops: list[Any] = [None]
        for t in range(1, len(ids)):
            row = table(ids, t)
            logps.append([row[ids[t]].item(), ids[t], None])
            best = row.topk(k)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            tops.append([[p, i, None] for p, i in pairs])
        meta = {"input_token_logprobs": logps}
        return {"text": "", "meta_info": meta | ({"input_top_logprobs": tops} if k else {})}

    def vllm(self, body: dict[str, Any]) -> Any:
        ids, k = body["prompt"], body["prompt_logprobs"]
        found: list[Any] = [None]
        for t in range(1, len(ids)):
            row = table(ids, t)
            chosen = {*row.topk(k).indices.tolist(), ids[t]} if k else {ids[t]}
            entries = {str(i): {"logprob": row[i].item(), "rank": 1} for i in sorted(chosen)}
            found.append(entries)
        return {"choices": [{"text": "", "prompt_logprobs": found}]}

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str], Any]] = []
        self.failures: list[tuple[int, str]] = []
        self.change = lambda reply: reply

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


FAST = TeacherConfig(backoff_s=0.01, workers=3, served_name="big", timeout_s=60)


def by_server(server: Server, path: str, top_k: int, cfg: TeacherConfig = FAST) -> Any:
    scorer: TokenScorer = TeacherServer(server.url(path), cfg, top_k=top_k)
    try:
        with scorer.loaded():
            return scorer.score(ROWS)
    finally:
        assert isinstance(scorer, TeacherServer)
        scorer.close()


@pytest.mark.parametrize("path", ["/generate", "/v1", "/v1/"])
@pytest.mark.parametrize("top_k", [0, 4])
def test_a_server_gives_the_log_probs_of_what_was_sampled(
    server: Server, path: str, top_k: int
) -> None:
    server.failures = [(503, "busy"), (429, "")]  # tried again
    for given, found in zip(ROWS, by_server(server, path, top_k), strict=True):
        ids, where = given.tokens.tolist(), given.mask.nonzero().flatten().tolist()
        rows = torch.stack([table(ids, t) for t in where])
        chosen = rows.gather(-1, given.tokens[given.mask].unsqueeze(-1)).squeeze(-1)
        assert torch.allclose(found.log_probs, chosen, atol=1e-6)
        top = rows.topk(top_k)
        assert found.top_ids.tolist() == top.indices.tolist()
        assert torch.allclose(found.top_log_probs, top.values, atol=1e-6)
    assert len(server.seen) == len(ROWS) + 2
    if path != "/generate":
        assert server.seen[0][0] == "/v1/completions" and server.seen[0][2]["model"] == "big"


def test_the_key_of_a_server_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = TeacherConfig(api_key_env="OUR_KEY")
    with pytest.raises(ConfigError, match="--teacher.api_key_env OUR_KEY: is not set"):
        TeacherServer(server.url("/v1"), cfg, top_k=0)
    monkeypatch.setenv("OUR_KEY", "secret")
    by_server(server, "/v1", 0, cfg)
    assert {seen[1]["authorization"] for seen in server.seen} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("failures", "what"),
    [
        ([(400, "no")] * 9, r"no log-probs after 1 tries \(status 400: no\)"),
        ([(500, "down")] * 99, r"no log-probs after 5 tries \(status 500: down\)"),
    ],
)
def test_a_server_that_refuses_ends_the_run(server: Server, failures: Any, what: str) -> None:
    server.failures = failures
    with pytest.raises(RuntimeError, match=what):
        by_server(server, "/generate", 0)


def test_a_server_that_is_not_there_is_named() -> None:
    cfg = TeacherConfig(retries=1, backoff_s=0.01)
    scorer = TeacherServer("http://127.0.0.1:1/generate", cfg, top_k=0)
    with pytest.raises(RuntimeError, match=r"after 2 tries \(ConnectError.*check that the server"):
        scorer.score(ROWS[:1])
    scorer.close()


def short_of(reply: Any) -> Any:
    return [entries and entries[:2] for entries in reply["meta_info"]["input_top_logprobs"]]


@pytest.mark.parametrize(
    ("path", "change", "what"),
    [
        ("/generate", lambda r: {"text": ""}, "lacks log-probs of the prompt"),
        ("/v1", lambda r: {"choices": [{"text": ""}]}, "lacks log-probs of the prompt"),
        ("/v1", lambda r: {"choices": []}, "lacks log-probs of the prompt"),
        ("/v1", lambda r: [], "lacks log-probs of the prompt"),
        (
            "/generate",
            lambda r: {"meta_info": {k: v[:-1] for k, v in r["meta_info"].items()}},
            "must have the policy's tokenizer",
        ),
        (
            "/generate",
            lambda r: {"meta_info": r["meta_info"] | {"input_top_logprobs": short_of(r)}},
            "fewer than --teacher.top_k 4",
        ),
    ],
)
def test_a_reply_that_is_no_score_is_refused(
    server: Server, path: str, change: Any, what: str
) -> None:
    server.change = change
    with pytest.raises(ValueError, match=what):
        by_server(server, path, 4)
