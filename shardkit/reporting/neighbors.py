"""Find all pairs of 64-bit hashes that differ in few bits: exactly, and without comparing all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_BITS = 64

_CHUNK = 1 << 20
"""Pairs compared at a time: few enough to need only some 50 MB."""


class Pairs(NamedTuple):
    """Pairs of hashes, ordered by position."""

    first: npt.NDArray[np.int64]
    second: npt.NDArray[np.int64]
    """Positions of the two hashes, the lower one first."""
    distance: npt.NDArray[np.uint8]
    """Number of bits in which they differ."""
    complete: bool
    """Whether these are all pairs; otherwise there were more than the limit."""


def near_pairs(
    hashes: Hashes, distance: int, *, queries: Hashes | None = None, limit: int = 1 << 20
) -> Pairs:
    """Return all pairs of hashes that differ in at most ``distance`` bits.

    The bits are divided into bands. Two hashes that differ in d bits agree in all but d bands, so
    sorting by each choice of the remaining bands brings all pairs next to each other. A million
    hashes at distance 3 take 0.7 s and 0.4 GB (tests/campaigns/test_report_scale.py).

    Args:
        hashes: uint64 of shape (N,).
        distance: Maximum number of different bits, 0 to 16.
        queries: uint64 of shape (N, K): other hashes of the same objects. A pair also counts if
            the hash of one is near a query of the other.
        limit: Maximum number of pairs; searching stops there.
    """
    every = hashes[:, None] if queries is None else np.column_stack([hashes, queries])
    count, variants = every.shape
    keys = np.ascontiguousarray(every.T).reshape(-1)  # all hashes first, then each query
    codes = np.zeros(0, np.int64)  # first * count + second
    fresh: list[npt.NDArray[np.int64]] = []
    candidates = (each for mask in _masks(distance, len(keys)) for each in _agreeing(keys, mask))
    for one, other in candidates:
        if variants > 1:  # no pairs of two queries, or of one object
            useful = (np.minimum(one, other) < count) & (one % count != other % count)
            one, other = one[useful], other[useful]  # noqa: PLW2901
        near = _differing(keys[one], keys[other]) <= distance
        one, other = one[near] % count, other[near] % count  # noqa: PLW2901
        fresh.append(np.minimum(one, other) * count + np.maximum(one, other))
        if sum(map(len, fresh)) > limit:
            codes, fresh = np.unique(np.concatenate([codes, *fresh])), []
            if len(codes) > limit:
                break
    codes = np.unique(np.concatenate([codes, *fresh]))
    first, second = np.divmod(codes[:limit], max(count, 1))
    least = np.full(len(first), _BITS, np.uint8)
    for variant in range(variants):
        for one, other in ((first, second), (second, first)):
            np.minimum(least, _differing(every[one, 0], every[other, variant]), out=least)
    return Pairs(first, second, least, len(codes) <= limit)


def _differing(one: Hashes, other: Hashes) -> npt.NDArray[np.uint8]:
    """Return the number of different bits of each pair of hashes."""
    different = one ^ other
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(different))
    words = different.view(np.uint16).reshape(-1, 4)  # NumPy 1
    return np.asarray(_COUNTS[words].sum(1, dtype=np.uint8))


_COUNTS = np.array([value.bit_count() for value in range(1 << 16)], np.uint8)


def _masks(distance: int, count: int) -> list[np.uint64]:
    """Return one mask for each choice of bands: any near pair agrees in the bits of one of them.

    More bands make longer masks, so fewer hashes agree by chance, but more masks to sort by.
    """
    wanted = math.log2(max(count, 2)) - 2
    kept = next(n for n in range(1, 9) if n * _BITS / (distance + n) >= wanted or n == 8)
    bands = distance + kept
    edges = [_BITS * band // bands for band in range(bands + 1)]
    parts = [(1 << stop) - (1 << start) for start, stop in itertools.pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in itertools.combinations(parts, kept)]


def _agreeing(
    keys: Hashes, mask: np.uint64
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield all pairs of positions whose keys agree in the bits of ``mask``, in chunks."""
    masked = keys & mask
    order = np.argsort(masked)
    ranked = masked[order]
    lengths = _ends(ranked) - np.arange(1, len(keys) + 1)  # later hashes that agree with each
    starts = np.flatnonzero(lengths)
    lengths = lengths[starts]
    totals = np.cumsum(lengths)
    low = 0
    while low < len(starts):
        high = max(low + 1, int(np.searchsorted(totals, totals[low] - lengths[low] + _CHUNK)))
        some = lengths[low:high]
        left = np.repeat(starts[low:high], some)
        ordinal = np.arange(len(left)) - np.repeat(np.cumsum(some) - some, some)
        yield order[left], order[left + 1 + ordinal]
        low = high


def _ends(ranked: Hashes) -> npt.NDArray[np.int64]:
    """Return for each of the sorted values the position after the last equal one."""
    borders = np.flatnonzero(ranked[1:] != ranked[:-1]) + 1
    stops = np.append(borders, len(ranked))
    return np.repeat(stops, np.diff(stops, prepend=0))
