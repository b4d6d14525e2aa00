"""The choice of the copies to keep: any lists together leave the best row of each picture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from shardkit.record import STORED_KINDS
from shardkit.reporting.copies import Copies, RowPairs, connected
from shardkit.reporting.identical import Identical

PARTS, PICTURES = 3, 12


class Drawn:
    """Rows of several datasets with copies, crowds and similar pairs, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = int(rng.integers(5, 40))
        self.part = np.sort(rng.integers(0, PARTS, self.rows))
        self.parts = [SimpleNamespace(shards=[0] * int(size)) for size in rng.integers(1, 4, PARTS)]
        self.sizes = rng.integers(1, 3, (self.rows, 2))
        kinds = [STORED_KINDS.index(name) for name in ("jpg", "png")]
        self.index = {"field": rng.choice(kinds, self.rows)}
        picture = rng.integers(0, PICTURES, self.rows)
        first = np.array([np.flatnonzero(picture == each)[0] for each in picture])
        self.same = Identical(first, first)
        self.faulty: list[int] = np.flatnonzero(rng.random(self.rows) < 0.4).tolist()
        pairs = np.sort(rng.integers(0, self.rows, (int(rng.integers(0, 30)), 2)), axis=1)
        pairs = pairs[first[pairs[:, 0]] != first[pairs[:, 1]]]
        equal = np.argwhere((first[:, None] == first) & np.tri(self.rows, k=-1, dtype=bool).T)
        across = self.part[pairs[:, 0]] != self.part[pairs[:, 1]]
        inside, crowded = pairs[~across], rng.random((~across).sum()) < 0.3
        apart = self.part[equal[:, 0]] != self.part[equal[:, 1]]
        self.crowds = inside[crowded]
        self.lists = [
            np.concatenate([pairs[across], equal[apart]]),
            equal[~apart],
            inside[inside.sum(1) % 2 == 0],
            inside[inside.sum(1) % 2 == 1],
        ]

    def __len__(self) -> int:
        return self.rows


def test_each_list_removes_its_pairs_and_all_lists_keep_the_best_row() -> None:
    for seed in range(200):
        _require_best_rows(seed)


def _require_best_rows(seed: int) -> None:
    drawn: Any = Drawn(seed)
    copies = Copies(drawn, drawn.same, drawn.crowds, drawn.faulty)
    leak, *others = drawn.lists
    copies.leave_out(leak)
    copies.leave_out(np.concatenate(others))
    excluded = [set(copies.excluded(pairs)) for pairs in drawn.lists]
    left_out = set[int]().union(*excluded)

    for pairs, rows in zip(drawn.lists, excluded, strict=True):
        assert all(rows & {*pair} for pair in pairs.tolist()), seed
    every: RowPairs = np.concatenate(drawn.lists)
    for members in connected(every):
        kept = [row for row in members if row not in left_out]
        assert kept, seed
        assert {*kept} - {*drawn.faulty} or {*members} <= {*drawn.faulty}


def test_lists_agree_on_a_chain() -> None:
    """Both lists leave out its middle, so both ends stay."""
    drawn: Any = Drawn(0)
    rows = np.arange(drawn.rows)
    drawn.part[:], drawn.sizes[:], drawn.index["field"][:] = 0, 1, 0
    copies = Copies(drawn, Identical(rows, rows), np.zeros((0, 2), np.int64), [])
    first, second = np.array([[0, 1]]), np.array([[1, 2]])
    copies.leave_out(np.concatenate([first, second]))

    assert copies.excluded(first) == copies.excluded(second) == [1]
