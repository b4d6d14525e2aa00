"""Datasets inside ``Subset`` and ``ConcatDataset``: the dataset and row of each sample."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from shardkit.torch.data.datasets import ShardDataset

_ORIGIN_STEP = 1 << 40
"""Distance between the origins of two datasets, larger than any dataset."""


class Portion(NamedTuple):
    """The samples of a batch that come from one dataset."""

    dataset: Any
    rows: list[int]
    """Rows of `dataset`."""
    positions: Sequence[int]
    """Positions of the samples in the batch."""


def has_rows(dataset: Any) -> bool:
    """Return whether an object is a dataset with a length and rows. A text is not."""
    if isinstance(dataset, (str, bytes, IterableDataset)):
        return False
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def portions(dataset: Any, rows: list[int]) -> list[Portion]:
    """Return the datasets that hold ``rows`` of ``dataset``, with the rows of each.

    A subclass of ``Subset`` or ``ConcatDataset`` may read differently, so it is not taken apart.
    """
    if type(dataset) is Subset:
        return portions(dataset.dataset, [dataset.indices[row] for row in rows])
    if type(dataset) is not ConcatDataset:
        return [Portion(dataset, rows, range(len(rows)))]
    ends = dataset.cumulative_sizes
    rows = [int(row) + ends[-1] if row < 0 else int(row) for row in rows]
    positions_of: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        positions_of.setdefault(bisect_right(ends, row), []).append(position)
    result: list[Portion] = []
    for number, positions in positions_of.items():
        start = ends[number - 1] if number else 0
        inner = portions(dataset.datasets[number], [rows[n] - start for n in positions])
        result += [p._replace(positions=[positions[n] for n in p.positions]) for p in inner]
    return result


def in_order(portions: list[Portion], samples: list[Sequence[Any]]) -> list[Any]:
    """Return the samples of several portions in the order of the batch."""
    by_position: dict[int, Any] = {}
    for portion, values in zip(portions, samples, strict=True):
        by_position.update(zip(portion.positions, values, strict=True))
    return [by_position[position] for position in range(len(by_position))]


def inner_datasets(dataset: Any) -> Iterator[Any]:
    """Yield the datasets inside a ``Subset`` or ``ConcatDataset``, or the dataset itself."""
    if isinstance(dataset, Subset):
        yield from inner_datasets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for inner in dataset.datasets:
            yield from inner_datasets(inner)
    else:
        yield dataset


def row_repeats(dataset: Any) -> npt.NDArray[np.int64] | None:
    """Return a number for each row, so that no two draw the same random numbers.

    It is how many earlier rows have the same row number and view; None if all differ. A wrapper may
    read any row, so next to other datasets each row has its own number.
    """
    plain = isinstance(dataset, ShardDataset) and dataset.selected is None
    if plain or not (isinstance(dataset, ShardDataset) or type(dataset) in (Subset, ConcatDataset)):
        return None
    datasets = {id(leaf): leaf for leaf in leaves(dataset)}.values()
    wrapped = any(not isinstance(leaf, ShardDataset) for leaf in datasets)
    if wrapped and len(datasets) > 1 and any(map(has_shards, datasets)):
        return np.arange(len(dataset))
    return repeats(_origins(dataset, {}))


def leaves(dataset: Any) -> Iterator[Any]:
    """Yield the datasets that `portions` does not take apart."""
    inner = [dataset.dataset] if type(dataset) is Subset else []
    inner = dataset.datasets if type(dataset) is ConcatDataset else inner
    for member in inner:
        yield from leaves(member)
    if not inner:
        yield dataset


def has_shards(dataset: Any) -> bool:
    """Return whether a dataset is one of shardkit, or has one in an attribute."""
    return _has_shards(dataset, set())


def _has_shards(dataset: Any, seen: set[int]) -> bool:
    if isinstance(dataset, ShardDataset):
        return True
    seen.add(id(dataset))
    held = list(getattr(dataset, "__dict__", {}).values())
    for value in list(held):
        if isinstance(value, (list, tuple, dict)):
            held += value.values() if isinstance(value, dict) else value
    inner = (value for value in held if isinstance(value, Dataset) and id(value) not in seen)
    return any(_has_shards(value, seen) for value in inner)


def repeats(origin: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return for each entry how many earlier entries equal it; None if all differ."""
    if not len(origin):
        return None
    order = np.argsort(origin, kind="stable")
    ordered = origin[order]
    again = np.concatenate([[False], ordered[1:] == ordered[:-1]])
    if not again.any():
        return None
    positions = np.arange(len(origin))
    counts = np.empty_like(positions)
    counts[order] = positions - np.maximum.accumulate(np.where(again, 0, positions))
    return counts


def dataset_rows(dataset: Any, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows in the dataset behind a ``Subset``; other rows unchanged."""
    while type(dataset) is Subset:
        rows = np.array([dataset.indices[row] for row in rows.tolist()], np.int64)
        dataset = dataset.dataset
    return rows


def _origins(dataset: Any, bases: dict[Any, int]) -> npt.NDArray[np.int64]:
    """Return a number for each row, equal where rows would draw the same random numbers."""
    if type(dataset) is Subset:
        return _origins(dataset.dataset, bases)[np.asarray(dataset.indices, np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_origins(member, bases) for member in dataset.datasets])
    if not isinstance(dataset, ShardDataset):
        return bases.setdefault(id(dataset), len(bases) * _ORIGIN_STEP) + np.arange(len(dataset))
    rows = np.arange(len(dataset)) if dataset.selected is None else dataset.selected
    return bases.setdefault(f"view {dataset.view}", len(bases) * _ORIGIN_STEP) + rows
