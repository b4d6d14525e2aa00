"""`Weighted`, `Balanced` and `Mixture`: which rows of a dataset a loader reads, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Subset

from shardkit.errors import UsageError, setting
from shardkit.orders.weighted import BLOCK, GroupedOrder, WeightedOrder, block_counts, check_weights
from shardkit.sampling.order import Order, Positions
from shardkit.torch.data.nested import has_rows, inner_datasets
from shardkit.torch.data.order_options import OrderSampler


class Weighted(OrderSampler):
    """Draw rows with replacement, with probabilities proportional to ``weights``.

    An epoch has as many samples as the dataset, unless ``samples_per_epoch`` is set.

    Raises:
        UsageError: If ``weights`` are not finite numbers of at least 0, or all are 0.
    """

    def __init__(self, weights: Any) -> None:
        """Create a sampler.

        Args:
            weights: A number for each row: a sequence, array or tensor of shape (N,).
        """
        self._cumulative = np.cumsum(check_weights("Weighted(weights)", weights))

    def order(self, dataset: Any, seed: int) -> Order:
        """Return the order of a dataset's rows.

        Raises:
            UsageError: If there is not one weight for each row.
        """
        if len(self._cumulative) != len(dataset):
            raise UsageError(
                f"Weighted(weights) has {len(self._cumulative)} weights for {len(dataset)} rows",
                remedy="pass one weight for each row of the dataset",
            )
        return WeightedOrder(size=len(dataset), seed=seed, cumulative=self._cumulative)


class Balanced(OrderSampler):
    """Read all classes equally often.

    In a dataset of N classes, each run of N samples contains every class once, in random order.
    Within a class, every sample comes once before any comes again. Classes without samples are left
    out.

    An epoch has as many samples as the dataset, unless ``samples_per_epoch`` is set.
    """

    def order(self, dataset: Any, seed: int) -> Order:
        """Return the order of a dataset's rows, by its stored labels (``targets``).

        Raises:
            UsageError: If the dataset has no labels, or its parts have different classes.
        """
        _require_same_classes(dataset)
        labels = gathered(dataset, _labels)
        unknown = np.flatnonzero(labels < 0)
        if len(unknown):
            raise UsageError(
                f"Balanced() needs the class of every row, and row {unknown[0]} has the label "
                f"{labels[unknown[0]]}",
                remedy="use a labeled dataset",
            )
        _, sizes = np.unique(labels, return_counts=True)
        members = np.argsort(labels, kind="stable")
        return _grouped("Balanced", seed, np.ones_like(sizes), sizes, members)


class Mixture(OrderSampler):
    """Read several datasets in given proportions.

    Each run of 10,000 samples contains the exact fraction of each dataset, in random order. Within
    a dataset, every sample comes once before any comes again.

    Read `dataset`, or another ``ConcatDataset`` of the same datasets::

        mixture = Mixture({photos: 3, sketches: 1})
        loader = make_loader(mixture.dataset, 64, sampler=mixture)

    An epoch has as many samples as all datasets together, unless ``samples_per_epoch`` is set.

    Raises:
        UsageError: If weights are not finite numbers of at least 0, all are 0, or one is too small.
    """

    def __init__(self, weights: Mapping[Any, float] | Iterable[tuple[Any, float]]) -> None:
        """Create a sampler.

        Args:
            weights: The weight of each dataset: a mapping, or pairs of a dataset and its weight.
        """
        try:
            pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
            self._datasets = [dataset for dataset, _ in pairs]
            raw_weights = [weight for _, weight in pairs]
        except (TypeError, ValueError):
            raise UsageError(
                f"Mixture(weights) must be {{dataset: weight, ...}}, not {str(weights)[:80]}"
            ) from None
        if len(set(map(id, self._datasets))) < len(self._datasets):
            raise UsageError(
                "Mixture(weights) contains a dataset twice", remedy="set one weight for it"
            )
        checked_weights = check_weights("Mixture(weights)", raw_weights)
        self._counts = block_counts(checked_weights)
        for number, dataset in enumerate(self._datasets):
            if not has_rows(dataset):
                raise UsageError(
                    "Mixture(weights) needs datasets with a length and rows, not "
                    f"{type(dataset).__name__}",
                    remedy="open paths with shardkit.open_dataset",
                )
            if checked_weights[number] and not self._counts[number]:
                raise UsageError(
                    f"with its weight {checked_weights[number]:g} in Mixture(weights), dataset "
                    f"{number} gets no sample out of {BLOCK}",
                    remedy=f"set at least 1/{BLOCK} of the sum, or leave it out",
                )
            if checked_weights[number] and not len(dataset):
                raise UsageError(
                    f"dataset {number} of Mixture(weights) is empty",
                    remedy="leave it out, or set its weight to 0",
                )

    @property
    def dataset(self) -> ConcatDataset[Any]:
        """All datasets as one."""
        return ConcatDataset(self._datasets)

    def order(self, dataset: Any, seed: int) -> Order:
        """Return the order of the rows of a ``ConcatDataset`` of the same datasets.

        Raises:
            UsageError: If it holds other datasets, or they have different classes.
        """
        datasets: list[Any] = (
            list(dataset.datasets) if isinstance(dataset, ConcatDataset) else [dataset]
        )
        count_by_id = dict(zip(map(id, self._datasets), self._counts, strict=True))
        if sorted(map(id, datasets)) != sorted(count_by_id):
            raise UsageError(
                "sampler=Mixture(...) and make_loader have different datasets",
                remedy="pass the mixture's own, as in make_loader(mixture.dataset, 64, "
                "sampler=mixture)",
            )
        _require_same_classes(dataset)
        lengths = np.array([len(inner) for inner in datasets], np.int64)
        counts = np.array([count_by_id[id(inner)] for inner in datasets], np.int64)
        used = counts > 0
        members = np.arange(lengths.sum())[np.repeat(used, lengths)]
        return _grouped("Mixture", seed, counts[used], lengths[used], members)


def _grouped(
    kind: str, seed: int, counts: Positions, sizes: Positions, members: Positions
) -> GroupedOrder:
    size = int(sizes.sum())
    return GroupedOrder(
        size=size, seed=seed, kind=kind, counts=counts, sizes=sizes, members=members
    )


def gathered(dataset: Any, values_of: Callable[[Any], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return a value for each row, given a function that returns those of an inner dataset."""
    if isinstance(dataset, Subset):
        return gathered(dataset.dataset, values_of)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([gathered(inner, values_of) for inner in dataset.datasets])
    return values_of(dataset)


def _labels(dataset: Any) -> Positions:
    """Return the label of each row of one dataset."""
    labels = np.asarray(getattr(dataset, "targets", None))
    if labels.shape != (len(dataset),) or labels.dtype.kind not in "iu":
        raise UsageError(
            f"Balanced() needs the class of every row: {type(dataset).__name__} has no `targets` "
            "with one integer per row"
        )
    return labels.astype(np.int64)


def _require_same_classes(dataset: Any) -> None:
    """Check that a label means the same class in all inner datasets."""
    first: list[str] | None = None
    for inner in inner_datasets(dataset):
        classes = getattr(inner, "classes", None)
        if classes is None or getattr(inner, "target_transform", None) is not None:
            continue
        if first is not None and list(classes) != first:
            raise UsageError(
                f"the datasets have different classes, {_show(first)} and "
                f"{_show(list(classes))}, so equal labels would differ in meaning",
                remedy=f"convert them with the same {setting('class_order')}, or set "
                f"{setting('target_transform')}",
            )
        first = list(classes)


def _show(classes: list[str]) -> str:
    return f"{len(classes)} ({', '.join(classes[:3])}{', ...' if len(classes) > 3 else ''})"
