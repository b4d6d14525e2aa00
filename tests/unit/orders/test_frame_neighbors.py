"""Neighbors of rows, compared with loops over each episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pairwise import pairwise
from refusals import refused

from shardkit import UsageError
from shardkit.orders.neighbors import Neighbors


def _oracle(
    episodes: list[Any], order: list[Any], row: int, offset: int, strict: bool
) -> tuple[int, bool]:
    """Return the row of a frame and whether it is padded, one step at a time."""
    step, padded = (1 if offset > 0 else -1), False
    for _ in range(abs(offset)):
        others = [n for n in range(len(order)) if episodes[n] == episodes[row]]
        beyond = [n for n in others if (order[n] - order[row]) * step > 0]
        near = min(beyond, key=lambda n: abs(order[n] - order[row]), default=None)
        if near is None or (strict and abs(order[near] - order[row]) != 1):
            padded = True
            break
        row = near
    return row, padded


@pytest.mark.parametrize(("seed", "texts", "strict"), pairwise(range(3), *[[False, True]] * 2))
def test_windows_equal_those_of_a_loop(seed: Any, texts: Any, strict: Any) -> None:
    rng = np.random.default_rng(seed)
    count, offsets = 40, (-3, -1, 0, 2)
    frames = rng.permutation(60)[:count] - 20
    episodes = rng.integers(0, 4, count)
    names = np.array([f"e{n}" for n in episodes], object) if texts else episodes
    rows, padded = Neighbors(names, frames, str, strict=strict).of(np.arange(count), offsets)
    for row in range(count):
        for place, offset in enumerate(offsets):
            expected = _oracle(episodes.tolist(), frames.tolist(), row, offset, strict)
            assert (rows[row, place], padded[row, place]) == expected


def test_two_rows_with_one_order_are_named() -> None:
    with pytest.raises(UsageError, match="row 0 and row 2"):
        Neighbors(np.array([1, 1, 1]), np.array([5, 6, 5]), "row {}".format)


def test_rows_without_order_are_named() -> None:
    texts: Any = np.array(["a", None], object)
    for order in (np.ma.MaskedArray([1, 2], [False, True]), texts, np.array([1.0, np.nan])):
        with refused(UsageError, "row 1"):
            Neighbors(np.array([1, 1]), order, "row {}".format)


def test_strict_needs_integers() -> None:
    with refused(UsageError, "strict=True", "integers"):
        Neighbors(np.array([1, 1]), np.array([0.5, 1.5]), str, strict=True)


def test_no_rows_have_no_windows() -> None:
    empty = np.zeros(0, np.int64)
    rows, padded = Neighbors(empty, empty, str).of(empty, (-1, 0))
    assert rows.shape == padded.shape == (0, 2)
