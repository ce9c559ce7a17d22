"""SGLang's NGRAM index through ctypes; the library is made by install.py. ImportError without."""

import ctypes
from pathlib import Path

import numpy as np

LIBRARY = Path(__file__).resolve().parents[3] / ".venvs" / "drafts" / "libsgl_ngram.so"

try:
    _lib = ctypes.CDLL(str(LIBRARY))
except OSError as error:
    raise ImportError(f"{LIBRARY.name}: {error}") from error
_lib.sgl_error.restype = ctypes.c_char_p
_lib.sgl_new.restype = ctypes.c_void_p
_lib.sgl_new.argtypes = [ctypes.c_int64] * 4 + [ctypes.c_int, ctypes.c_int64]
_ARRAYS, _SELF, _N = [ctypes.c_void_p] * 2, [ctypes.c_void_p], [ctypes.c_int64]
_lib.sgl_delete.argtypes = _SELF
_lib.sgl_insert.argtypes = _lib.sgl_load.argtypes = _SELF + _ARRAYS + _N
_lib.sgl_match.argtypes = _SELF + [ctypes.c_void_p] * 4 + _N + _ARRAYS
_lib.sgl_erase.argtypes = _SELF + [ctypes.c_void_p] + _N


class Ngram:
    """One index: a trie of `capacity` nodes and `depth`, or an automaton of `automaton` nodes per
    draft (then `load` instead of `insert`). Drafts have `nodes` rows, the first the last token."""

    def __init__(
        self, capacity: int, depth: int, breadth: int, nodes: int, match: str, automaton: int
    ) -> None:
        self.nodes = nodes
        by_frequency = int(match == "PROB")
        self.self = _lib.sgl_new(capacity, depth, breadth, nodes, by_frequency, automaton)
        if not self.self:
            raise MemoryError(_lib.sgl_error().decode())

    def __del__(self) -> None:
        if getattr(self, "self", None):
            _lib.sgl_delete(self.self)

    def insert(self, texts: list[np.ndarray]) -> None:
        """Add texts to the trie, and wait until they are in it."""
        tokens, offsets = _flat(texts)
        _check(_lib.sgl_insert(self.self, _at(tokens), _at(offsets), len(texts)))

    def load(self, texts: list[np.ndarray]) -> None:
        """Build the automaton of texts."""
        tokens, offsets = _flat(texts)
        _check(_lib.sgl_load(self.self, _at(tokens), _at(offsets), len(texts)))

    def match(
        self, ids: np.ndarray, tails: list[np.ndarray], lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 [B, nodes] and ancestor mask uint8 [B, nodes, nodes]."""
        tokens, offsets = _flat(tails)
        out = np.zeros((len(ids), self.nodes), np.int32)
        mask = np.zeros((len(ids), self.nodes, self.nodes), np.uint8)
        ids, lengths = np.ascontiguousarray(ids, np.int64), lengths.astype(np.int64)
        arrays = map(_at, (ids, tokens, offsets, lengths))
        _check(_lib.sgl_match(self.self, *arrays, len(ids), _at(out), _at(mask)))
        return out, mask

    def erase(self, request: int) -> None:
        """Forget the match state of a request."""
        _check(_lib.sgl_erase(self.self, _at(np.array([request], np.int64)), 1))


def _flat(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return np.concatenate(texts).astype(np.int32, copy=False), offsets


def _at(array: np.ndarray) -> int:
    return array.ctypes.data


def _check(code: int) -> None:
    if code:
        raise RuntimeError(_lib.sgl_error().decode())
