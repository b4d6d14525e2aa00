"""Find all pairs of 64-bit hashes that differ in few bits: exactly, and without comparing all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_BITS = 64


_CHUNK = 1 << 16
"""Pairs compared at a time: few enough for the CPU cache."""


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
    hashes at distance 3 take 0.5 s and 0.1 GB (tests/campaigns/test_report_scale.py).

    ``hashes`` are uint64 of shape (N,), and ``distance`` is 0 to 16. ``queries``, uint64 of shape
    (N, K), are other hashes of the same objects: a pair also counts if the hash of one is near a
    query of the other. The search stops at ``limit`` pairs.
    """
    every = hashes[:, None] if queries is None else np.column_stack([hashes, queries])
    count, variants = every.shape
    keys = np.ascontiguousarray(every.T).reshape(-1)  # all hashes first, then each query
    codes = np.zeros(0, np.int64)  # first * count + second
    fresh: list[npt.NDArray[np.int64]] = []
    bands, kept = _bands(distance, len(keys))
    chosen = itertools.combinations(range(len(bands)), kept)
    pairs = (pair for agreeing in chosen for pair in _near(keys, count, bands, agreeing, distance))
    for rows, twins in pairs:
        fresh.append(np.minimum(rows, twins) * count + np.maximum(rows, twins))
        if sum(map(len, fresh)) > limit:
            codes = np.unique(np.concatenate([codes, *fresh]))
            fresh = []
            if len(codes) > limit:
                break
    codes = np.unique(np.concatenate([codes, *fresh]))
    first, second = np.divmod(codes[:limit], max(count, 1))
    least = np.full(len(first), _BITS, np.uint8)
    for variant in range(variants):
        for query, target in ((first, second), (second, first)):
            np.minimum(least, different_bits(every[query, 0], every[target, variant]), out=least)
    return Pairs(first, second, least, len(codes) <= limit)


def different_bits(first: Hashes, second: Hashes) -> npt.NDArray[np.uint8]:
    """Return the number of bits in which hashes differ."""
    return _ones(first ^ second)


def _ones(values: Hashes) -> npt.NDArray[np.uint8]:
    """Return the number of bits that are set."""
    if hasattr(np, "bitwise_count"):
        return np.asarray(np.bitwise_count(values))
    words = values.view(np.uint16).reshape(-1, 4)  # NumPy 1
    return np.asarray(_COUNTS[words].sum(1, dtype=np.uint8))


_COUNTS = np.array([value.bit_count() for value in range(1 << 16)], np.uint8)


class _Band(NamedTuple):
    """Some adjacent bits of a hash."""

    start: int
    length: int

    @property
    def mask(self) -> np.uint64:
        return np.uint64((1 << self.start + self.length) - (1 << self.start))


def _bands(distance: int, count: int) -> tuple[list[_Band], int]:
    """Return bands of all bits, and the number of them in which any near pair agrees.

    With more bands, those in which a pair agrees have more bits, so fewer hashes agree by chance,
    but there are more choices of bands to sort by.
    """
    wanted = math.log2(max(count, 2)) - 2
    kept = next(n for n in range(1, 9) if n * _BITS / (distance + n) >= wanted or n == 8)
    edges = [_BITS * band // (distance + kept) for band in range(distance + kept + 1)]
    return [_Band(start, stop - start) for start, stop in itertools.pairwise(edges)], kept


def _near(
    keys: Hashes, count: int, bands: Sequence[_Band], chosen: tuple[int, ...], distance: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the objects of all near pairs whose first bands without a difference are ``chosen``.

    So two keys are one pair only once.
    """
    ordinal_bits = np.uint64(max(len(keys) - 1, 1).bit_length())
    packed = np.zeros(len(keys), np.uint64)
    for number in chosen:
        packed <<= np.uint64(bands[number].length)
        packed |= (keys & bands[number].mask) >> np.uint64(bands[number].start)
    packed <<= ordinal_bits  # may drop bits, so that more keys agree
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()  # faster than argsort; keys that agree: hashes before queries
    order = (packed & np.uint64((1 << int(ordinal_bits)) - 1)).astype(np.int64)
    packed >>= ordinal_bits
    ranked = keys[order]
    same = packed[1:] == packed[:-1]
    starts = np.flatnonzero(same & (order[:-1] < count))
    stops = np.append(np.flatnonzero(~same) + 1, len(keys))
    lengths = stops[np.searchsorted(stops, starts, "right")] - 1 - starts  # later keys that agree
    totals = np.cumsum(lengths)
    low = 0
    while low < len(starts):
        high = max(low + 1, int(np.searchsorted(totals, totals[low] - lengths[low] + _CHUNK)))
        counts = lengths[low:high]
        lower = np.repeat(starts[low:high], counts)
        upper = lower + 1 + np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts)
        different = ranked[lower] ^ ranked[upper]
        near = np.flatnonzero(_ones(different) <= distance)
        for number in range(chosen[-1] + 1):
            agree = different[near] & bands[number].mask == 0
            near = near[agree if number in chosen else ~agree]
        first = order[lower[near]]
        second = order[upper[near]] % count
        yield first[first != second], second[first != second]
        low = high
