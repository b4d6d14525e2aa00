"""Helpers of the tests that other tests rely on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from pairwise import pairwise


def test_all_pairs_of_values_are_covered() -> None:
    axes: list[Iterable[Any]] = ["abcdef", range(3), [None, 1, 2], {"x": 0, "y": 1}]
    rows = pairwise(*axes)
    for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(one, other))
    assert len(rows) < 25
