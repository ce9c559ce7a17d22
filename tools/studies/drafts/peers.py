"""Every drafter, by name. Other projects' code is imported where it is installed, never copied."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from drafts.drafter import Absent, Chains, Drafter
from drafts.ours import Rlcore
from drafts.workload import VOCAB, Texts

BUFFER = 1 << 15  # tokens that a live request may add to its own text


class Empty(Drafter):
    """What the loop over requests costs, that every peer without a batch API pays."""

    def speculate(self, request: int, context: np.ndarray, window: int) -> list[int]:
        return []


class ArcticGlobal(Drafter):
    """ArcticInference's SuffixDecodingCache as vLLM drives it: one tree of all prompts, which live
    requests write to as well, and one of each live request."""

    modules = ("arctic_inference.suffix_decoding",)
    knobs = (
        {},
        {"factor": 2.0},
        {"factor": 4.0},
        {"factor": 8.0},
        {"factor": 4.0, "min_prob": 0.3},
        {"factor": 8.0, "min_prob": 0.02},
    )

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"depth": 24, "min_prob": 0.1, "factor": 1.0}

    def build(self, history: Texts) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self.wants_context = self.depth
        self.cache = SuffixDecodingCache(max_tree_depth=self.depth, max_cached_requests=-1)
        nothing = np.zeros(0, np.int32)
        for prompt in range(history.num_prompts):
            for g, response in enumerate(history.responses(prompt)):
                name = ("history", prompt, g)
                self.cache.start_request(name, nothing)
                # Straight to the shared tree: the request's own would be dropped at once.
                sequence = self.cache._req_to_seq_id[name]
                self.cache._global_tree.extend_ndarray(sequence, response)
                self.cache.stop_request(name)

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        for request, text in zip(requests.tolist(), texts, strict=True):
            self.cache.start_request(request, text)

    def append(self, request: int, tokens: np.ndarray) -> None:
        self.cache.add_active_response(request, tokens)

    def stop(self, requests: np.ndarray) -> None:
        for request in requests.tolist():
            self.cache.stop_request(request)
            self.cache.evict_cached_response(request)  # else the next run finds its own answers

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        return self.cache.speculate(
            request,
            context,
            max_spec_tokens=window,
            max_spec_factor=self.factor,
            min_token_prob=self.min_prob,
        ).token_ids

    def nbytes(self) -> int:
        return self.cache._global_tree.estimate_memory()


class ArcticTree(ArcticGlobal):
    """The same with draft trees."""

    tree = True

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        draft = self.cache.speculate(
            request,
            context,
            max_spec_tokens=window,
            max_spec_factor=self.factor,
            min_token_prob=self.min_prob,
            use_tree_spec=True,
        )
        return draft.token_ids, draft.parents


class ArcticPrompt(Drafter):
    """One arctic tree per prompt, the layout of RhymeRL and DAS, and one per live request."""

    modules = ("arctic_inference.suffix_decoding",)
    knobs = ArcticGlobal.knobs

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"depth": 64, "min_prob": 0.1, "factor": 1.0}

    def build(self, history: Texts) -> None:
        from arctic_inference.suffix_decoding._C import SuffixTree

        self.wants_context, self.new_tree = self.depth, SuffixTree
        self.trees = []
        for prompt in range(history.num_prompts):
            tree = SuffixTree(self.depth)
            for g, response in enumerate(history.responses(prompt)):
                tree.extend_ndarray(g, response)
            self.trees.append(tree)
        self.live: dict[int, tuple[Any, Any]] = {}

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        for request, prompt, text in zip(requests.tolist(), prompts.tolist(), texts, strict=True):
            own = self.new_tree(self.depth)
            own.extend_ndarray(0, text)
            self.live[request] = (self.trees[prompt], own)

    def append(self, request: int, tokens: np.ndarray) -> None:
        self.live[request][1].extend_ndarray(0, tokens)

    def stop(self, requests: np.ndarray) -> None:
        for request in requests.tolist():
            del self.live[request]

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        history, own = self.live[request]
        how = (window, self.factor, 0.0, self.min_prob, False)
        a, b = own.speculate_ndarray(context, *how), history.speculate_ndarray(context, *how)
        return (a if a.score >= b.score else b).token_ids

    def nbytes(self) -> int:
        return sum(tree.estimate_memory() for tree in self.trees)


class SglangTrie(Drafter):
    """SGLang's NGRAM trie, one for all prompts as SGLang has it, never forgetting. Its drafts are
    trees of a fixed number of nodes; a smaller window takes the first nodes."""

    modules = ("drafts.sgl_ngram",)
    tree = True
    one_per_prompt = False
    automaton = False

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"depth": 18, "nodes": 16, "breadth": 10, "match": "BFS", "nodes_per_token": 8}

    def build(self, history: Texts) -> None:
        from drafts.sgl_ngram import Ngram

        self.wants_context = self.depth
        node_bytes = 430  # of this trie, seen
        wanted = history.num_tokens * self.nodes_per_token * node_bytes
        if not self.automaton and wanted > 6e9:
            raise Absent(
                f"its trie of {history.num_tokens} tokens takes about {wanted / 1e9:.0f} GB; "
                "use fewer prompts (12) or a smaller nodes_per_token"
            )
        groups = [[i] for i in range(history.num_prompts)]
        if not self.one_per_prompt:
            groups = [list(range(history.num_prompts))]
        self.indexes = []
        for group in groups:
            responses = [r for prompt in group for r in history.responses(prompt)]
            capacity = max(4096, sum(map(len, responses)) * self.nodes_per_token)
            budget = self.nodes if self.automaton else 0
            index = Ngram(
                4096 if self.automaton else capacity,
                self.depth,
                self.breadth,
                self.nodes + 1,
                self.match,
                budget,
            )
            (index.load if self.automaton else index.insert)(responses)
            self.indexes.append(index)
        self.prompt_of: dict[int, int] = {}
        self.length: dict[int, int] = {}

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        for request, prompt, text in zip(requests.tolist(), prompts.tolist(), texts, strict=True):
            self.prompt_of[request] = prompt if self.one_per_prompt else 0
            self.length[request] = len(text)

    def append(self, request: int, tokens: np.ndarray) -> None:
        self.length[request] += len(tokens)

    def stop(self, requests: np.ndarray) -> None:
        for request in requests.tolist():
            self.indexes[self.prompt_of.pop(request)].erase(request)

    def speculate_batch(
        self, requests: np.ndarray, contexts: list[np.ndarray], windows: np.ndarray
    ) -> list[Any]:
        rows_of: dict[int, list[int]] = {}
        for i, request in enumerate(requests.tolist()):
            rows_of.setdefault(self.prompt_of[request], []).append(i)
        drafts: list[Any] = [None] * len(requests)
        for index, rows in rows_of.items():
            tokens, mask = self.indexes[index].match(
                requests[rows],
                [contexts[i] for i in rows],
                np.array([self.length[r] for r in requests[rows].tolist()]),
            )
            for i, t, m in zip(rows, tokens, mask, strict=True):
                w = int(windows[i]) + 1
                drafts[i] = t[:w], m[:w, :w]
        return drafts

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        return self.speculate_batch(np.array([request]), [context], np.array([window]))[0]


class SglangTriePrompt(SglangTrie):
    """One trie per prompt."""

    one_per_prompt = True


class SglangSamPrompt(SglangTrie):
    """SGLang's suffix automaton ("external corpus"), one per prompt, without the trie."""

    one_per_prompt = True
    automaton = True


class VllmNgram(Drafter):
    """The rule of vLLM's ngram proposer on the request's own prompt and response."""

    modules = ("numba",)
    with_history = False

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"min_n": 2, "max_n": 5}

    def build(self, history: Texts) -> None:
        self.text: dict[int, np.ndarray] = {}
        self.length: dict[int, int] = {}
        self.history = None
        if self.with_history:
            self.history = [history.of(i).copy() for i in range(history.num_prompts)]

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        for request, prompt, text in zip(requests.tolist(), prompts.tolist(), texts, strict=True):
            before = np.concatenate([self.history[prompt], text]) if self.history else text
            self.text[request] = np.zeros(len(before) + BUFFER, np.int32)
            self.text[request][: len(before)] = before
            self.length[request] = len(before)

    def append(self, request: int, tokens: np.ndarray) -> None:
        n = self.length[request]
        self.text[request][n : n + len(tokens)] = tokens
        self.length[request] = n + len(tokens)

    def stop(self, requests: np.ndarray) -> None:
        for request in requests.tolist():
            del self.text[request], self.length[request]

    def speculate(self, request: int, context: np.ndarray, window: int) -> np.ndarray:
        text = self.text[request][: self.length[request]]
        at = self.where(text)
        return text[at : at + window] if at >= 0 else text[:0]

    def where(self, text: np.ndarray) -> int:
        """Where the draft starts; -1: nowhere."""
        from drafts import ngram

        return ngram.vllm_rule(text, self.min_n, self.max_n)

    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.history or ())


class VllmNgramHistory(VllmNgram):
    """The same with the prompt's whole history before the text: what a plain port would do."""

    with_history = True


class PromptLookup(VllmNgram):
    """Prompt lookup decoding (PLD) on the request's own text."""

    modules = ()

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"max_n": 3}

    def where(self, text: np.ndarray) -> int:
        from drafts import ngram

        return ngram.lookup_rule(text, self.max_n)


class Rest(Drafter):
    """REST's DraftRetriever: a static suffix array on disk, one of all prompts; tree drafts of at
    most four tokens a path. The same query may get another answer the next time."""

    modules = ("draftretriever",)
    tree = True
    one_per_prompt = False

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"depth": 16, "choices": 64}

    def build(self, history: Texts) -> None:
        import draftretriever

        self.wants_context = self.depth
        self.folder = tempfile.TemporaryDirectory(prefix="rest-")
        everything = range(history.num_prompts)
        groups = [[i] for i in everything] if self.one_per_prompt else [list(everything)]
        self.readers = []
        for k, group in enumerate(groups):
            path = str(Path(self.folder.name) / f"{k}.idx")
            writer = draftretriever.Writer(path, vocab_size=VOCAB)
            for prompt in group:
                for response in history.responses(prompt):
                    writer.add_entry(response.tolist())
            writer.finalize()
            self.readers.append(draftretriever.Reader(index_file_path=path))
        self.prompt_of: dict[int, int] = {}

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        for request, prompt in zip(requests.tolist(), prompts.tolist(), strict=True):
            self.prompt_of[request] = prompt if self.one_per_prompt else 0

    def speculate(self, request: int, context: np.ndarray, window: int) -> Any:
        reader, suffix = self.readers[self.prompt_of[request]], context.tolist()
        for n in range(self.depth, 1, -1):
            paths = reader.search(suffix[-n:], choices=self.choices)[0]
            if paths:
                return [path[:window] for path in paths]
        return []

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in Path(self.folder.name).iterdir())


class RestPrompt(Rest):
    """One suffix array per prompt."""

    one_per_prompt = True


class ReferenceSam(Drafter):
    """Our plain yardstick, `ref_sam.py`: automata per prompt, one call per batch."""

    modules = ("numba",)
    knobs = ({}, *({"min_prob": p} for p in (0.02, 0.4, 0.6, 0.8)))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {"min_prob": 0.1, "min_match": 1, "factor": 0.0, "reward_weight": 4.0}

    def build(self, history: Texts) -> None:
        from drafts import ref_sam

        self.sam = ref_sam
        prompts = history.num_prompts
        prompt_of = np.repeat(np.arange(prompts), np.diff(history.prompt_offsets))
        weights = np.where(history.rewards > 0, self.reward_weight, 1.0)
        self.arena = ref_sam.build(
            history.tokens, history.response_offsets, prompt_of, weights, prompts
        )
        self.roots, self.states, self.matched = (np.zeros(0, np.int32) for _ in range(3))

    def start(self, requests: np.ndarray, prompts: np.ndarray, texts: list[np.ndarray]) -> None:
        size = max(len(self.roots), int(requests.max()) + 1)
        self.roots, self.states, self.matched = (
            np.resize(x, size) for x in (self.roots, self.states, self.matched)
        )
        self.roots[requests] = self.states[requests] = prompts
        self.matched[requests] = 0

    def append_batch(self, requests: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.sam.advance(
            self.arena, self.roots, self.states, self.matched, requests, tokens, offsets
        )

    def speculate_batch(
        self, requests: np.ndarray, contexts: list[np.ndarray], windows: np.ndarray
    ) -> Chains:
        if self.factor:  # arctic's rule: no more than factor x the matched tokens
            most = (self.matched[requests] * self.factor).astype(windows.dtype)
            windows = np.minimum(windows, most)
        return self.sam.draft(
            self.arena, self.states, requests, windows, self.min_prob, self.min_match
        )

    def speculate(self, request: int, context: np.ndarray, window: int) -> np.ndarray:
        one, size = np.array([request]), np.array([window], np.int32)
        tokens, lengths = self.speculate_batch(one, [context], size)
        return tokens[0, : lengths[0]]

    def nbytes(self) -> int:
        return self.arena.nbytes


PEERS: dict[str, type[Drafter]] = {
    "empty": Empty,
    "rlcore": Rlcore,
    "ref-sam": ReferenceSam,
    "arctic-global": ArcticGlobal,
    "arctic-global-tree": ArcticTree,
    "arctic-prompt": ArcticPrompt,
    "vllm-ngram": VllmNgram,
    "vllm-ngram-hist": VllmNgramHistory,
    "pld": PromptLookup,
    "rest": Rest,
    "rest-prompt": RestPrompt,
    "sglang-trie": SglangTrie,
    "sglang-trie-prompt": SglangTriePrompt,
    "sglang-sam-prompt": SglangSamPrompt,
}
