"""Entries of the index with other labels, compared with those that a conversion would write."""

from __future__ import annotations

import numpy as np
import pytest

from shardkit.dataset.index import Rows, as_rows, damaged_rows, pack_row
from shardkit.dataset.layered import relabeled

LENGTHS = (0, 1, 7, 255, 256, 65537)


def entries(labels: list[int]) -> Rows:
    rng = np.random.default_rng(3)
    images = [rng.bytes(length) for length in LENGTHS]
    return as_rows(
        pack_row(offset=n * 9, image=image, label=label, size=(n + 1, 300), field="png")
        for n, (image, label) in enumerate(zip(images, labels, strict=True))
    )


@pytest.mark.parametrize("new", [[5, 0, -1, 3, 2, 1 << 19], [-1] * 6, [1, 2, 3, 1, 2, 3]])
def test_other_labels_give_the_entries_of_a_conversion_with_these_labels(new: list[int]) -> None:
    old = entries([1, 2, 3, 1, 2, 3])
    assert relabeled(old, entries(new)).tobytes() == entries(new).tobytes()
    assert old.tobytes() == entries([1, 2, 3, 1, 2, 3]).tobytes()


def test_no_labels_remove_them() -> None:
    assert relabeled(entries([1] * 6), None).tobytes() == entries([-1] * 6).tobytes()


def test_a_damaged_entry_stays_damaged() -> None:
    old, new = entries([1] * 6).copy(), entries([2] * 6).copy()
    old["width"][1] += 1
    new["label"][3] = 7
    found = damaged_rows(relabeled(old, new))
    assert np.flatnonzero(found).tolist() == [1, 3]
