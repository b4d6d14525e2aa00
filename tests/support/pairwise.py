"""Covering combinations, for tests of almost independent options."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of different axes meet at least once.

    Three axes of 4, 3 and 3 values have 36 combinations; 12 of them are enough.
    """
    values = [list(axis) for axis in axes]
    pairs = list(itertools.combinations(range(len(values)), 2))
    every = list(itertools.product(*(range(len(each)) for each in values)))
    missing = {(i, j, row[i], row[j]) for row in every for i, j in pairs}
    chosen = []
    while missing:
        met = [{(i, j, row[i], row[j]) for i, j in pairs} & missing for row in every]
        best = max(range(len(every)), key=lambda number: len(met[number]))
        chosen.append(every[best])
        missing -= met[best]
    return [tuple(map(list.__getitem__, values, row)) for row in sorted(chosen)]
