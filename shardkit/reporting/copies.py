"""Choose which copies of a picture to keep: the same ones for all lists of keys to leave out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardkit.record import STORED_KINDS
from shardkit.reporting.collection import Collection
from shardkit.reporting.identical import Identical

RowPairs = npt.NDArray[np.int64]
"""Rows of the collection: shape (P, 2)."""


class Copies:
    """The copies of each picture, in order of preference, and those to leave out.

    Preferred are images without other findings, then those of the smallest or last dataset or
    split, then those with the most pixels, then JPEGs, then the first. An image is left out only if
    a similar one is preferred. So each picture keeps one, even if all lists are used. ``crowds``
    are pairs that connect similar pictures of one dataset, of which one is kept. ``faulty`` are the
    rows with other findings.
    """

    def __init__(
        self, images: Collection, same: Identical, crowds: RowPairs, faulty: list[int]
    ) -> None:
        is_faulty = np.zeros(len(images), np.bool_)
        is_faulty[faulty] = True
        sizes = np.array([len(member.shards) for member in images.members])
        preferred = np.lexsort((-np.arange(len(sizes)), sizes))
        is_jpeg = images.index["field"] == STORED_KINDS.index("jpg")
        pixels = images.sizes.prod(1)
        order = np.lexsort((~is_jpeg, -pixels, np.argsort(preferred)[images.member], is_faulty))
        self._rank = np.argsort(order)
        pictures = (same.pixels * len(sizes) + images.member)[order]
        _, best, number = np.unique(pictures, return_index=True, return_inverse=True)
        self._pictures = best[number.reshape(-1)][self._rank]
        """For each row: the rank of the preferred one with its pixels, in its dataset."""
        groups = np.arange(len(images))
        for members in connected(self._pictures[crowds]):
            groups[members] = members[0]
        self._groups = groups[self._pictures]
        """For each row: the same of its crowd."""
        self._left_out: set[int] = set()
        """Groups of which nothing is kept."""

    def leave_out(self, pairs: RowPairs) -> None:
        """Separate pairs: leave out the group of one of each pair."""
        groups = np.unique(np.sort(self._groups[pairs], axis=1), axis=0)
        for preferred, other in groups.tolist():
            if preferred != other and preferred not in self._left_out:
                self._left_out.add(other)

    def excluded(self, pairs: RowPairs) -> list[int]:
        """Return the rows to leave out so that no pair remains; all pairs were separated."""
        groups = self._groups[pairs]
        pictures = self._pictures[pairs]
        apart = groups[:, 0] != groups[:, 1]
        equal = pictures[:, 0] == pictures[:, 1]
        preferred, other = np.sort(groups[apart], axis=1).T
        left_out = np.isin(other, list(self._left_out))
        rows = np.isin(self._groups, np.where(left_out, other, preferred))
        rows |= np.isin(self._pictures, pictures[equal]) & (self._rank != self._pictures)
        crowded = np.isin(self._pictures, pictures[~apart & ~equal])
        rows |= crowded & (self._rank != self._groups)
        listed: list[int] = np.flatnonzero(rows).tolist()
        return listed


def connected(pairs: RowPairs) -> list[list[int]]:
    """Return the groups of rows that pairs connect, ascending, in order of their first row."""
    above: dict[int, int] = {}

    def top(row: int) -> int:
        while (next_one := above.setdefault(row, row)) != row:
            above[row] = row = above[next_one]
        return row

    for pair in pairs.tolist():
        first, second = sorted(map(top, pair))
        above[second] = first
    members: dict[int, list[int]] = {}
    for row in sorted(above):
        members.setdefault(top(row), []).append(row)
    return list(members.values())
