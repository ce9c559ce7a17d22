"""Plan a weight update: which rank sends which shards of the weights to which ranks.

Every rank computes the same plan. Ranks are grouped in sites: nodes or clusters with a fast network
inside. If several ranks hold a shard, one of these ranks is chosen as owner for each site:

    a rank of the site holds the shard     the owner is in the site and broadcasts the shard there
    no rank of the site holds the shard    the owner sends the shard to a rank of the site (the
                                           root), which broadcasts the shard there

A slow link between sites thus carries one copy of each shard that the other site lacks. Owners and
roots are chosen by least load. Buckets of whole tensors bound the memory. All shards of a bucket
with the same site, owner and root are sent together, as a `BucketPart`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.records import Shard, TensorMeta
from rlcore.utils.buckets import ALIGN


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of a shard in a `BucketPart`."""

    shard: Shard
    tensor: int
    """Index of the shard's tensor in the bucket."""
    offset: int
    """Offset from the start of the part in bytes, a multiple of `ALIGN`."""


@dataclass(frozen=True, slots=True)
class BucketPart:
    """Shards of a bucket that are sent to one site in one message."""

    site: int
    owner: int
    """Rank whose shards are sent."""
    root: int
    """Rank that broadcasts the shards in the site: the owner, or the rank that receives the shards
    over the slow link."""
    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Plan of one bucket: the tensors that an engine gets, and the parts in which they arrive."""

    tensors: tuple[TensorMeta, ...]
    num_bytes: int
    parts: tuple[BucketPart, ...]
    """Parts sorted by (site, root, owner), the order in which a site broadcasts the parts."""


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """Plan of a whole weight update."""

    sites: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    """Ranks that receive all weights."""
    loads: tuple[BucketPlan, ...]

    def members(self, site: int) -> tuple[int, ...]:
        """Return the ranks that take part in a site's broadcasts: the ranks that need weights, and
        the roots of parts. Return () if no rank of the site needs weights."""
        inside = set(self.sites[site]) & set(self.needs)
        inside |= {p.root for load in self.loads for p in load.parts if p.site == site}
        return tuple(sorted(inside))

    def linked(self) -> tuple[int, ...]:
        """Return the ranks that send or receive between sites."""
        crossing = [p for load in self.loads for p in load.parts if p.owner != p.root]
        return tuple(sorted({rank for p in crossing for rank in (p.owner, p.root)}))

    @property
    def is_two_way(self) -> bool:
        """Whether some rank both sends and receives between sites."""
        crossing = [p for load in self.loads for p in load.parts if p.owner != p.root]
        return bool({p.owner for p in crossing} & {p.root for p in crossing})

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together, which every engine receives."""
        return sum(load.num_bytes for load in self.loads)

    @property
    def slow_bytes(self) -> int:
        """Bytes sent between sites, summed over all links."""
        every = (p for load in self.loads for p in load.parts)
        return sum(p.num_bytes for p in every if p.owner != p.root)

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((load.num_bytes for load in self.loads), default=0)


def plan(
    holdings: Mapping[int, Sequence[Shard]],
    sites: Sequence[Sequence[int]],
    needs: Iterable[int],
    max_bytes: int,
) -> UpdatePlan:
    """Make the plan of a weight update.

    Args:
        holdings: shards that each rank holds.
        sites: ranks of each site. A rank that needs no weights may be outside all sites.
        needs: ranks that receive all tensors.
        max_bytes: maximum bytes of a bucket; a larger tensor gets its own bucket.

    Raises:
        ValueError: a rank is in two sites, a rank that needs weights is in no site, or the shards
            of a tensor leave a gap or overlap.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes {max_bytes}: must be at least 1")
    needed = tuple(sorted(set(needs)))
    ordered = tuple(tuple(sorted(site)) for site in sites)
    _check_sites(ordered, needed)
    holders = _holders(holdings)
    places = _Places(ordered, needed)
    loads = []
    for bucket in _buckets(holders, max_bytes):
        metas = _metas(bucket, holders)
        tensors = [(i, holders[name]) for i, name in enumerate(bucket)]
        end = metas[-1].offset + _num_bytes(metas[-1].shape, metas[-1].dtype)
        loads.append(BucketPlan(metas, end, places.parts(tensors)))
    return UpdatePlan(ordered, needed, tuple(loads))


def shard_shape(shard: Shard) -> tuple[int, ...]:
    """Return the shape of the shard itself, not of the whole tensor."""
    size = shard.stop - shard.start
    return (*shard.shape[: shard.dim], size, *shard.shape[shard.dim + 1 :])


def shard_bytes(shard: Shard) -> int:
    """Return the bytes of the shard itself, not of the whole tensor."""
    return _num_bytes(shard_shape(shard), shard.dtype)


# ---- owners and roots


_Holders = dict[str, list[tuple[Shard, list[int]]]]
"""For each tensor, its shards by start index, each with the ranks that hold the shard."""


class _Places:
    """Chooses the owner and root of each shard by the bytes already assigned to each rank."""

    def __init__(self, sites: Sequence[tuple[int, ...]], needs: Sequence[int]):
        inside = [tuple(r for r in site if r in set(needs)) for site in sites]
        self._sites = [(i, set(site), inside[i]) for i, site in enumerate(sites) if inside[i]]
        self._broadcast: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def parts(
        self, tensors: Iterable[tuple[int, list[tuple[Shard, list[int]]]]]
    ) -> tuple[BucketPart, ...]:
        """Split one bucket, given the shards of its tensors, into parts."""
        found: dict[tuple[int, int, int], list[tuple[int, Shard]]] = {}
        for number, shards in tensors:
            for shard, ranks in shards:
                for site, everyone, inside in self._sites:
                    owner, root = self._choose(shard, ranks, everyone, inside)
                    found.setdefault((site, root, owner), []).append((number, shard))
        return tuple(
            _part(site, owner, root, shards)
            for (site, root, owner), shards in sorted(found.items())
        )

    def _choose(
        self, shard: Shard, ranks: Sequence[int], site: set[int], inside: Sequence[int]
    ) -> tuple[int, int]:
        """Choose the owner and the root of a shard for one site."""
        size = shard_bytes(shard)
        here = [rank for rank in ranks if rank in site]
        if here:
            owner = _least(self._broadcast, here, size)
            return owner, owner
        return _least(self._sent, ranks, size), _least(self._received, inside, size)


def _least(load: dict[int, int], ranks: Sequence[int], more: int) -> int:
    """Choose the rank with the least load (ties: the lowest rank) and add `more` to its load."""
    chosen = min(ranks, key=lambda rank: (load.get(rank, 0), rank))
    load[chosen] = load.get(chosen, 0) + more
    return chosen


def _part(site: int, owner: int, root: int, shards: Sequence[tuple[int, Shard]]) -> BucketPart:
    slots, end = [], 0
    for number, shard in shards:
        slots.append(Slot(shard, number, _aligned(end)))
        end = slots[-1].offset + shard_bytes(shard)
    return BucketPart(site, owner, root, tuple(slots), end)


# ---- tensors and buckets


def _holders(holdings: Mapping[int, Sequence[Shard]]) -> _Holders:
    """Collect the shards of every tensor. Keep the order in which the ranks list the tensors."""
    found: dict[str, dict[Shard, list[int]]] = {}
    for rank in sorted(holdings):
        for shard in holdings[rank]:
            ranks = found.setdefault(shard.name, {}).setdefault(shard, [])
            if rank in ranks:
                raise ValueError(f"tensor {shard.name}: rank {rank} provides {_words(shard)} twice")
            ranks.append(rank)
    ordered = {}
    for name, shards in found.items():
        rows = sorted(shards.items(), key=lambda item: (item[0].dim, item[0].start, item[0].stop))
        _check_tiles(name, rows)
        ordered[name] = rows
    return ordered


def _buckets(holders: _Holders, max_bytes: int) -> list[list[str]]:
    """Divide the tensors, in order, into buckets; return the tensor names of each bucket."""
    buckets: list[list[str]] = []
    end = 0
    for name, shards in holders.items():
        size = _num_bytes(shards[0][0].shape, shards[0][0].dtype)
        start = _aligned(end)
        if not buckets or start + size > max_bytes:
            buckets.append([])
            start = 0
        buckets[-1].append(name)
        end = start + size
    return buckets


def _metas(bucket: Sequence[str], holders: _Holders) -> tuple[TensorMeta, ...]:
    metas: list[TensorMeta] = []
    end = 0
    for name in bucket:
        shard = holders[name][0][0]
        meta = TensorMeta(name=name, dtype=shard.dtype, shape=shard.shape, offset=_aligned(end))
        end = meta.offset + _num_bytes(meta.shape, meta.dtype)
        metas.append(meta)
    return tuple(metas)


def _num_bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize


def _aligned(end: int) -> int:
    return math.ceil(end / ALIGN) * ALIGN


# ---- checks


def _check_sites(sites: Sequence[tuple[int, ...]], needs: Sequence[int]) -> None:
    seen: set[int] = set()
    for site in sites:
        for rank in site:
            if rank in seen:
                raise ValueError(f"sites: rank {rank} appears twice; assign each rank to one site")
            seen.add(rank)
    if lost := sorted(set(needs) - seen):
        raise ValueError(
            f"sites: ranks {lost[:8]} need weights but are in no site; assign each rank to one site"
        )


def _check_tiles(name: str, rows: Sequence[tuple[Shard, list[int]]]) -> None:
    """Raise ValueError unless a tensor's shards cover one dimension without gap or overlap."""
    first, end = rows[0][0], 0
    for shard, ranks in rows:
        if (shard.shape, shard.dtype, shard.dim) != (first.shape, first.dtype, first.dim):
            raise ValueError(
                f"tensor {name}: rank {rows[0][1][0]} has {_words(first)}, rank {ranks[0]} "
                f"{_words(shard)}; shape, dtype and dimension must be equal on all ranks"
            )
        if shard.start != end or shard.stop <= end or shard.stop > shard.shape[shard.dim]:
            raise ValueError(
                f"tensor {name}: rank {ranks[0]} has {_words(shard)} but the next shard must begin "
                f"at {end}; shards must be equal or adjacent"
            )
        end = shard.stop
    if end != first.shape[first.dim]:
        raise ValueError(
            f"tensor {name}: no rank has {end}:{first.shape[first.dim]} of dimension {first.dim}; "
            "each index needs a rank"
        )


def _words(shard: Shard) -> str:
    return (
        f"{shard.start}:{shard.stop} of dimension {shard.dim} of {list(shard.shape)} {shard.dtype}"
    )
