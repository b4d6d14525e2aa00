"""Datasets inside ``Subset`` and ``ConcatDataset``: the dataset and row of each sample."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from shardkit.torch.data.datasets import ShardDataset

_ORIGIN_STEP = 1 << 40
"""Distance between the origins of two datasets, larger than any dataset."""


class Piece(NamedTuple):
    """The samples of a batch that come from one dataset."""

    dataset: Any
    rows: list[int]
    """Rows of `dataset`."""
    places: Sequence[int]
    """Positions of the samples in the batch."""


def pieces(dataset: Any, rows: list[int]) -> list[Piece]:
    """Return the datasets that hold ``rows`` of ``dataset``, each with its own rows.

    A subclass of ``Subset`` or ``ConcatDataset`` may read differently, so it is not taken apart.
    """
    if type(dataset) is Subset:
        return pieces(dataset.dataset, [dataset.indices[row] for row in rows])
    if type(dataset) is not ConcatDataset:
        return [Piece(dataset, rows, range(len(rows)))]
    ends = dataset.cumulative_sizes
    rows = [int(row) + ends[-1] if row < 0 else int(row) for row in rows]
    parts: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        parts.setdefault(bisect_right(ends, row), []).append(place)
    found: list[Piece] = []
    for part, places in parts.items():
        start = ends[part - 1] if part else 0
        inner = pieces(dataset.datasets[part], [rows[place] - start for place in places])
        found += [each._replace(places=[places[n] for n in each.places]) for each in inner]
    return found


def parts(dataset: Any) -> Iterator[Any]:
    """Yield the datasets inside a ``Subset`` or ``ConcatDataset``, or the dataset itself."""
    if isinstance(dataset, Subset):
        yield from parts(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from parts(part)
    else:
        yield dataset


def origins(dataset: Any) -> npt.NDArray[np.int64]:
    """Return a number for each row, equal where rows are the same record in the same view."""
    return _origins(dataset, {})


def row_repeats(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return for each row how many earlier rows are the same record; None if all differ."""
    whole = not isinstance(dataset, ShardDataset) or dataset.selected is None
    if type(dataset) not in (Subset, ConcatDataset) and whole:
        return None
    return repeats(origins(dataset))


def repeats(origin: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return for each entry how many earlier entries equal it; None if all differ."""
    if not len(origin):
        return None
    order = np.argsort(origin, kind="stable")
    ordered = origin[order]
    again = np.concatenate([[False], ordered[1:] == ordered[:-1]])
    if not again.any():
        return None
    places = np.arange(len(origin))
    counts = np.empty_like(places)
    counts[order] = places - np.maximum.accumulate(np.where(again, 0, places))
    return counts


def dataset_rows(dataset: Any, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows in the dataset behind a ``Subset``; other rows unchanged."""
    while type(dataset) is Subset:
        rows = np.array([dataset.indices[row] for row in rows.tolist()], np.int64)
        dataset = dataset.dataset
    return rows


def _origins(dataset: Any, bases: dict[Any, int]) -> npt.NDArray[np.int64]:
    if type(dataset) is Subset:
        return _origins(dataset.dataset, bases)[np.asarray(dataset.indices, np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_origins(part, bases) for part in dataset.datasets])
    shards = isinstance(dataset, ShardDataset)
    key = (dataset.manifest.digest, dataset.view) if shards else id(dataset)
    rows = np.arange(len(dataset))
    if shards and dataset.selected is not None:
        rows = dataset.selected
    return bases.setdefault(key, len(bases) * _ORIGIN_STEP) + rows
