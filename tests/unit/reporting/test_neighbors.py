"""Near pairs of hashes: exactly those that comparing all pairs finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shardkit.reporting import neighbors
from shardkit.reporting.neighbors import Hashes, near_pairs


def planted(distance: int, count: int = 300) -> Hashes:
    """Return random hashes, and for each another one with up to ``distance`` + 2 other bits."""
    rng = np.random.default_rng(distance)
    hashes = rng.integers(0, 1 << 64, count, dtype=np.uint64)
    for number in range(0, count - 1, 2):
        bits = rng.choice(64, rng.integers(0, distance + 3), replace=False).tolist()
        hashes[number + 1] = hashes[number] ^ np.uint64(sum(1 << bit for bit in bits))
    return hashes


def differing(one: int, other: int) -> int:
    return (int(one) ^ int(other)).bit_count()


@pytest.mark.parametrize("distance", [0, 1, 3, 6, 10])
def test_all_near_pairs_are_found(distance: int) -> None:
    hashes = planted(distance)
    found = near_pairs(hashes, distance)
    expected = {
        (i, j, differing(hashes[i], hashes[j]))
        for i, j in itertools.combinations(range(len(hashes)), 2)
        if differing(hashes[i], hashes[j]) <= distance
    }

    assert len(expected) > 40
    assert {*zip(found.first, found.second, found.distance, strict=True)} == expected
    assert found.complete


def test_a_hash_may_be_near_a_query_of_the_other() -> None:
    hashes = np.array([0, 0xFFFF, 0xFFFF << 20], np.uint64)
    queries = np.array([[7 << 40, 9 << 50], [1, 5 << 40], [5 << 40, 6 << 30]], np.uint64)
    found = near_pairs(hashes, 2, queries=queries)

    # The queries 5 << 40 of two objects are equal, which does not count.
    assert [*zip(found.first, found.second, found.distance, strict=True)] == [(0, 1, 1), (0, 2, 2)]


def test_long_runs_of_equal_hashes_are_searched_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbors, "_CHUNK", 7)
    hashes = np.repeat(planted(2, 6), 20)
    queries = hashes[:, None] ^ np.uint64(1 << 63)
    found = near_pairs(hashes, 2, queries=queries)
    expected = [
        (i, j)
        for i, j in itertools.combinations(range(len(hashes)), 2)
        if min(differing(hashes[i], each) for each in (hashes[j], queries[j, 0])) <= 2
    ]

    assert [*zip(found.first, found.second, strict=True)] == expected


def test_a_search_for_too_many_pairs_stops() -> None:
    found = near_pairs(np.zeros(5000, np.uint64), 3, limit=500)

    assert not found.complete
    assert len(found.first) == 500


@pytest.mark.parametrize("count", [0, 1])
def test_few_hashes_have_no_pairs(count: int) -> None:
    assert len(near_pairs(np.zeros(count, np.uint64), 3).first) == 0


def test_numpy_1_counts_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = planted(5)
    expected = near_pairs(hashes, 5)
    monkeypatch.delattr(np, "bitwise_count", raising=False)

    found = near_pairs(hashes, 5)
    assert [each.tolist() for each in found[:3]] == [each.tolist() for each in expected[:3]]
