"""Synthetic RL rollouts whose next epoch resembles the last one.

The responses of epoch e + 1 are made of spans copied from epoch e's responses of the same prompt
(rewarded ones first), with substitutions, insertions, jumps between siblings and fresh text in
between. Fresh text is made of phrases, some shared by all prompts and some the prompt's own, so
that short n-grams are ambiguous as they are in language. It ranks drafters; it does not predict
the acceptance of a model.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCAB = 151_936
VERSION = 1  # of the text: part of the name of the cached file


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    prompts: int = 64
    group: int = 16
    """Responses per prompt and epoch."""
    min_len: int = 2048
    max_len: int = 8192
    """Lengths are log-uniform between the two."""
    prompt_len: int = 256
    epochs: int = 1
    """Epochs of history; the one after them is replayed."""
    span_mean: float = 48.0
    """Copied tokens in a row, geometric."""
    novel_mean: float = 9.0
    """Fresh tokens between copied spans, geometric."""
    p_sub: float = 0.006
    """Probability that a copied token is replaced."""
    p_jump: float = 0.35
    """Probability that the next span comes from a sibling, at the same relative place."""
    reward_pull: float = 0.85
    """Probability that the sibling is a rewarded one, where there is one."""
    global_phrases: int = 4000
    local_phrases: int = 160
    zipf: float = 1.05
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "group", "min_len", "prompt_len", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: at least 1")
        if self.max_len <= self.min_len:
            raise ValueError(f"max_len {self.max_len}: more than min_len {self.min_len}")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed}: 0 or more")


@dataclass(frozen=True, slots=True)
class Texts:
    """Responses of all prompts, prompt after prompt, in flat arrays."""

    tokens: np.ndarray  # int32 [N]
    response_offsets: np.ndarray  # int64 [R + 1], into tokens
    prompt_offsets: np.ndarray  # int64 [P + 1], into responses
    rewards: np.ndarray  # float32 [R]

    def responses(self, prompt: int) -> list[np.ndarray]:
        """Views of the responses of one prompt."""
        o = self.response_offsets
        lo, hi = self.prompt_offsets[prompt : prompt + 2]
        return [self.tokens[o[r] : o[r + 1]] for r in range(lo, hi)]

    def of(self, prompt: int) -> np.ndarray:
        """All tokens of one prompt's responses, one after the other (a view)."""
        lo, hi = self.response_offsets[self.prompt_offsets[prompt : prompt + 2]]
        return self.tokens[lo:hi]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    prompts: np.ndarray  # int32 [P, prompt_len]
    history: Texts
    truth: Texts
    """What the replay emits: the epoch after the history."""
    copied: float
    """Share of the truth's tokens that were copied unchanged from the epoch before."""


def load(cfg: Config, folder: Path) -> Workload:
    """The workload of `cfg`, from `folder` where an earlier call left it."""
    path = location(cfg, folder)
    if not path.is_file():
        save(generate(cfg), path)
    return read(path)


def location(cfg: Config, folder: Path) -> Path:
    """Where `load` keeps the workload of `cfg`."""
    said = json.dumps([VERSION, dataclasses.asdict(cfg)])
    return folder / f"workload-{hashlib.sha256(said.encode()).hexdigest()[:16]}.npz"


def save(w: Workload, path: Path) -> None:
    """Write a workload; a reader finds the whole file or none."""
    arrays = {"prompts": w.prompts, "copied": np.array(w.copied)}
    for name, texts in (("history", w.history), ("truth", w.truth)):
        for f in dataclasses.fields(texts):
            arrays[f"{name}_{f.name}"] = getattr(texts, f.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez(temporary, **arrays)
    os.replace(temporary, path)


def read(path: Path) -> Workload:
    """The workload that `save` wrote."""
    with np.load(path) as file:
        texts = [
            Texts(*(file[f"{name}_{f.name}"] for f in dataclasses.fields(Texts)))
            for name in ("history", "truth")
        ]
        return Workload(file["prompts"], *texts, float(file["copied"]))


def generate(cfg: Config) -> Workload:
    """The same text for the same settings."""
    rng = np.random.default_rng(cfg.seed)
    bank = _phrases(rng, cfg.global_phrases, 2, 9, cfg.zipf)
    prompts, copied = [], 0
    texts: list[list[list[np.ndarray]]] = []  # [P][E + 1][G]
    rewards: list[list[np.ndarray]] = []  # [P][E + 1]
    for _ in range(cfg.prompts):
        local = _phrases(rng, cfg.local_phrases, 4, 24, cfg.zipf)
        writer = _Writer(rng, bank, local, cfg.zipf)
        prompts.append(writer.write(cfg.prompt_len))
        groups, group_rewards, unchanged = _prompt(rng, cfg, writer)
        texts.append(groups)
        rewards.append(group_rewards)
        copied += unchanged
    e = cfg.epochs
    history = _texts([sum(t[:e], []) for t in texts], [np.concatenate(r[:e]) for r in rewards])
    truth = _texts([t[e] for t in texts], [r[e] for r in rewards])
    share = min(1.0, copied / max(1, truth.num_tokens))
    return Workload(np.stack(prompts), history, truth, share)


def _prompt(
    rng: np.random.Generator, cfg: Config, writer: "_Writer"
) -> tuple[list[list[np.ndarray]], list[np.ndarray], int]:
    """All epochs of one prompt, their rewards, and the last epoch's tokens copied unchanged."""
    lo, hi = np.log(cfg.min_len), np.log(cfg.max_len)
    p_ok = rng.beta(1.2, 1.2)
    epochs: list[list[np.ndarray]] = []
    rewards: list[np.ndarray] = []
    copied = 0
    for e in range(cfg.epochs + 1):
        group: list[np.ndarray] = []
        reward = (rng.random(cfg.group) < p_ok).astype(np.float32)
        p_ok = min(0.98, p_ok + 0.04)
        for g in range(cfg.group):
            n = int(np.exp(rng.uniform(lo, hi)))
            if e == 0 and g == 0:
                outline = writer.write(cfg.max_len)
                group.append(outline[:n].copy())
                continue
            if e == 0:  # siblings of the first epoch share about half of an outline
                pool = _Pool(rng, [outline], np.ones(1, np.float32), cfg.reward_pull)
                novel_mean = cfg.novel_mean * 5
            else:
                pool = _Pool(rng, epochs[-1], rewards[-1], cfg.reward_pull)
                novel_mean = cfg.novel_mean
            response, unchanged = _response(rng, cfg, writer, pool, n, novel_mean)
            copied += unchanged if e == cfg.epochs else 0
            group.append(response)
        epochs.append(group)
        rewards.append(reward)
    return epochs, rewards, copied


def _response(
    rng: np.random.Generator,
    cfg: Config,
    writer: "_Writer",
    pool: "_Pool",
    length: int,
    novel_mean: float,
) -> tuple[np.ndarray, int]:
    """A response of `length` tokens, and how many of what was written were copied unchanged."""
    source, at, parts, got, copied = pool.pick(), 0, [], 0, 0
    while got < length:
        m = int(rng.geometric(1 / cfg.span_mean))
        if at >= len(source) - 4:
            source = pool.pick()
            at = int(rng.integers(max(1, len(source) // 2)))
        span, substituted = _mutate(rng, source[at : at + m], cfg.p_sub, cfg.zipf)
        parts.append(span)
        got += len(span)
        copied += len(span) - substituted
        at += len(span) + int(rng.integers(0, 6))
        if rng.random() < cfg.p_jump:
            share = at / max(1, len(source))
            source = pool.pick()
            at = min(int(share * len(source)), max(0, len(source) - 8))
        k = int(rng.geometric(1 / novel_mean))
        parts.append(writer.write(k))
        got += k
    return np.ascontiguousarray(np.concatenate(parts)[:length]), copied


def _texts(prompts: list[list[np.ndarray]], rewards: list[np.ndarray]) -> Texts:
    responses = [r for group in prompts for r in group]
    return Texts(
        np.concatenate(responses).astype(np.int32),
        np.cumsum([0, *(len(r) for r in responses)], dtype=np.int64),
        np.cumsum([0, *(len(group) for group in prompts)], dtype=np.int64),
        np.concatenate(rewards).astype(np.float32),
    )


class _Pool:
    """The responses that a new one copies from."""

    def __init__(
        self, rng: np.random.Generator, texts: list[np.ndarray], rewards: np.ndarray, pull: float
    ) -> None:
        self.rng, self.texts, self.pull = rng, texts, pull
        self.good = np.flatnonzero(rewards > 0)

    def pick(self) -> np.ndarray:
        if len(self.good) and self.rng.random() < self.pull:
            return self.texts[int(self.good[int(self.rng.integers(len(self.good)))])]
        return self.texts[int(self.rng.integers(len(self.texts)))]


class _Writer:
    """Fresh text: phrases of the global bank, of the prompt's own bank, or bare Zipf tokens."""

    def __init__(
        self,
        rng: np.random.Generator,
        bank: list[np.ndarray],
        local: list[np.ndarray],
        zipf: float,
    ) -> None:
        self.rng, self.bank, self.local, self.zipf = rng, bank, local, zipf

    def write(self, n: int) -> np.ndarray:
        out, got, rng = [], 0, self.rng
        while got < n:
            u = rng.random()
            if u < 0.45:
                part = self.bank[min(int(rng.pareto(0.9) * 8), len(self.bank) - 1)]
            elif u < 0.75 and self.local:
                part = self.local[int(rng.integers(len(self.local)))]
            else:
                part = _zipf_ids(rng, int(rng.integers(1, 7)), self.zipf)
            out.append(part)
            got += len(part)
        return np.concatenate(out)[:n]


def _zipf_ids(rng: np.random.Generator, n: int, s: float, vocab: int = VOCAB) -> np.ndarray:
    """Bounded Zipf through its inverse (continuous), ranks scattered by a fixed odd multiplier."""
    u = rng.random(n)
    k = ((1 - u) + u * vocab ** (1 - s)) ** (1 / (1 - s)) if s != 1 else vocab**u
    ranks = np.clip(k.astype(np.int64), 1, vocab) - 1
    return ((ranks * 48271) % vocab).astype(np.int32)


def _phrases(rng: np.random.Generator, count: int, lo: int, hi: int, s: float) -> list[np.ndarray]:
    lengths = rng.integers(lo, hi, count)
    flat = _zipf_ids(rng, int(lengths.sum()), s)
    return [flat[end - n : end] for end, n in zip(np.cumsum(lengths), lengths, strict=True)]


def _mutate(
    rng: np.random.Generator, span: np.ndarray, p_sub: float, zipf: float
) -> tuple[np.ndarray, int]:
    hits = np.flatnonzero(rng.random(len(span)) < p_sub)
    if len(hits):
        span = span.copy()
        span[hits] = _zipf_ids(rng, len(hits), zipf)
    return span, len(hits)
