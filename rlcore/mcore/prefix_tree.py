"""Find common prefixes of sequences, and put sequences that share one into the same micro-batch,
which computes its tokens once.

The samples of a group share the prompt, and rows of one episode may share its history. The
sequences of a micro-batch form a tree: a node is a run of tokens that the same sequences share, and
a sequence is a path from a root. A token attends to the tokens before it in its node and to the
nodes above (attention.py). Log-probs and gradients equal those of separate sequences; the gradients
of shared tokens are sums.

The model's output at a token predicts one next token and has one weight in the loss. Therefore

- the last shared token is computed again in each branch, where it predicts the branch's own token;
- tokens that two sequences train on are not shared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

LEAST = 8
"""Minimum number of tokens of a shared node: attention of one more node costs time, too."""


@dataclass(frozen=True, slots=True)
class Node:
    """Consecutive tokens that belong to the same sequences."""

    parent: int
    """Index of the node with the tokens before; -1: none."""
    start: int
    """Position of the first token in its sequences."""
    size: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prefix tree of sequences: nodes in depth-first order, and the path of each sequence."""

    nodes: tuple[Node, ...]
    paths: tuple[tuple[int, ...], ...]
    """Indices of the nodes of each sequence, from the root. A sequence may end inside its last
    node."""

    @property
    def num_tokens(self) -> int:
        return sum(node.size for node in self.nodes)

    def order(self) -> list[int]:
        """Return the indices of the sequences such that sequences with a common prefix are
        neighbours."""
        return sorted(range(len(self.paths)), key=lambda row: self.paths[row])

    def common(self, one: int, other: int, lengths: Sequence[int]) -> int:
        """Return the number of tokens that two sequences share."""
        pairs = zip(self.paths[one], self.paths[other], strict=False)
        same = [a for a, b in pairs if a == b]
        end = self.nodes[same[-1]].start + self.nodes[same[-1]].size if same else 0
        return min(end, lengths[one], lengths[other])

    def rows(self, offsets: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
        """Return the row of each token of the sequences, [T] int64, if node i begins at row
        `offsets[i]`."""
        pieces = []
        for path, length in zip(self.paths, lengths, strict=True):
            for index in path:
                node = self.nodes[index]
                size = min(node.size, length - node.start)
                pieces.append(np.arange(offsets[index], offsets[index] + size))
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)


def apart(lengths: Sequence[int]) -> PrefixTree:
    """Return the tree of sequences that share nothing: a node for each."""
    nodes = tuple(Node(-1, 0, length) for length in lengths)
    return PrefixTree(nodes, tuple((i,) for i in range(len(nodes))))


def of_groups(groups: Sequence[str], prompts: Sequence[int], lengths: Sequence[int]) -> PrefixTree:
    """Return the tree of samples of which the tokens are not known: those of a group share its
    prompt and train on their responses. `prompts`, `lengths`: tokens without and with response."""
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = [()] * len(lengths)
    for rows in members.values():
        kept = prompts[rows[0]] - 1
        above: tuple[int, ...] = ()
        if len(rows) > 1 and kept >= LEAST:
            above = (len(nodes),)
            nodes.append(Node(-1, 0, kept))
        parent, start = (above[0], kept) if above else (-1, 0)
        for row in sorted(rows, key=lambda r: (-lengths[r], r)):
            paths[row] = (*above, len(nodes))
            nodes.append(Node(parent, start, lengths[row] - start))
    return PrefixTree(tuple(nodes), tuple(paths))


def groups(lengths: Sequence[int], budget: int, tree: PrefixTree | None = None) -> list[list[int]]:
    """Divide sequences into micro-batches of at most `budget` tokens, longest sequences first, each
    into the first micro-batch with room. A sequence longer than `budget` gets its own. Sequences
    that share a root of `tree` stay together, unless their nodes have more than `budget` tokens."""
    tree = tree or apart(lengths)
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for row in tree.order():
        common = tree.common(pieces[-1][-1], row, lengths) if pieces else 0
        if not common or sizes[-1] + lengths[row] - common > budget:
            pieces.append([])
            sizes.append(0)
            common = 0
        pieces[-1].append(row)
        sizes[-1] += lengths[row] - common
    longest = [max(lengths[row] for row in piece) for piece in pieces]
    found: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(pieces)), key=lambda i: (-longest[i], pieces[i][0])):
        place = next((p for p, left in enumerate(room) if sizes[i] <= left), len(found))
        if place == len(found):
            found.append([])
            room.append(budget)
        found[place] += pieces[i]
        room[place] -= sizes[i]
    return found


def build(tokens: np.ndarray, trained: np.ndarray, lengths: Sequence[int]) -> PrefixTree:
    """Return the prefix tree of packed sequences. `tokens`, `trained` [T]: the tokens, and whether
    each is trained on. No node with more than one sequence has fewer than `LEAST` tokens."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    root = _Branch(0, tokens[:0], trained[:0])
    # The longest sequences come first, so that a later one can end inside a node but not beyond it.
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        span = slice(starts[row], ends[row])
        root.insert(row, tokens[span], trained[span])
    nodes: list[Node] = []
    paths: list[list[int]] = [[] for _ in lengths]
    for branch in root.branches:
        branch.place(-1, 0, lengths, nodes, paths)
    return PrefixTree(tuple(nodes), tuple(map(tuple, paths)))


@dataclass(slots=True, eq=False)
class _Branch:
    """Node of the tree while it grows."""

    start: int
    tokens: np.ndarray
    trained: np.ndarray  # bool: whether any of the sequences trains on the token
    sequences: list[int] = field(default_factory=list)
    branches: list["_Branch"] = field(default_factory=list)

    def insert(self, row: int, tokens: np.ndarray, trained: np.ndarray) -> None:
        """Add a sequence whose tokens up to `start` are those above this node."""
        here, at = self, 0
        while at < len(tokens):
            common, below = here._closest(tokens[at:], trained[at:])
            if not common:
                here.branches.append(_Branch(at, tokens[at:], trained[at:].copy(), [row]))
                return
            if common < len(below.tokens) and at + common < len(tokens):
                below._split(common)  # all sequences in it are longer, so they go on
            below.sequences.append(row)
            below.trained[:common] |= trained[at : at + common]
            here, at = below, at + common

    def _closest(self, tokens: np.ndarray, trained: np.ndarray) -> tuple[int, "_Branch"]:
        """Return the branch that shares the most tokens, and their number."""
        best, found = 0, self
        for branch in self.branches:
            if branch.tokens[0] != tokens[0]:
                continue
            n = min(len(tokens), len(branch.tokens))
            apart = tokens[:n] != branch.tokens[:n]
            apart |= trained[:n] & branch.trained[:n]
            common = int(apart.argmax()) if apart.any() else n
            if common > best:
                best, found = common, branch
        return best, found

    def _split(self, size: int) -> None:
        """Cut this node after `size` tokens; the rest becomes its only branch."""
        rest = _Branch(
            start=self.start + size,
            tokens=self.tokens[size:],
            trained=self.trained[size:],
            sequences=list(self.sequences),
            branches=self.branches,
        )
        self.tokens, self.trained = self.tokens[:size], self.trained[:size]
        self.branches = [rest]

    def _end_in(self, rows: list[int]) -> None:
        """Add sequences that end in this node."""
        self.sequences += rows

    def place(
        self,
        parent: int,
        repeated: int,
        lengths: Sequence[int],
        nodes: list[Node],
        paths: list[list[int]],
    ) -> None:
        """Append this node and those below to `nodes`, and to the `paths` of its sequences.
        `repeated`: number of tokens above this node that it computes again."""
        start, end = self.start - repeated, self.start + len(self.tokens)
        kept = end - start
        if self.branches:
            kept -= 1
            if kept < LEAST:
                kept = 0
        if kept:
            for row in self.sequences:
                paths[row].append(len(nodes))
            nodes.append(Node(parent, start, kept))
            parent = len(nodes) - 1
        if self.branches:
            goes_on = set().union(*(branch.sequences for branch in self.branches))
            ends = (row for row in self.sequences if row not in goes_on)
            self.branches[0]._end_in([row for row in ends if lengths[row] > start + kept])
        for branch in self.branches:
            branch.place(parent, end - start - kept, lengths, nodes, paths)
