"""From a request to a batch: the reading code of both engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.sampling.order import Draws, derive_key, sample_number
from shardkit.torch.data import nested
from shardkit.torch.data.collate import BatchView
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.read_context import (
    Allocate,
    ReadContext,
    globals_kept,
    reading,
    seed_globals,
)
from shardkit.torch.data.schedule import Request

_TOGETHER_BYTES, _MOST_TOGETHER = 8 << 20, 16
"""Bytes and number of batches to read at once. Python takes 0.2 ms for a read, as long as copying
1 MiB: docs/benchmarks.md."""

_SAMPLED_ROWS = 64
"""Rows whose mean size estimates that of a sample."""


class Fetch:
    """Reads batches of a dataset; picklable if the dataset and the collate function are."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Any],
        *,
        with_rows: bool,
        views: int = 1,
    ) -> None:
        """Create a reader of batches.

        Args:
            dataset: Any object with ``__getitem__``, preferably with ``__getitems__``.
            collate: Makes a batch of samples.
            with_rows: Whether to append the rows of the samples to a batch; -1 for padding.
            views: Random draws of each sample. If there are several, a batch is a tuple with a
                batch for each.
        """
        self.views = views
        self.dataset = dataset
        self.collate = collate
        self._with_rows = with_rows

    def __call__(
        self,
        request: Request,
        *,
        allocate: Allocate | None = None,
        alone: bool = True,
        mark: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        """Return the batch of ``request``; the other arguments are those of `ReadContext`."""
        announce = getattr(self.dataset, "announce", None)
        if announce is not None and len(request.ahead):
            announce(request.ahead)
        stated = ReadContext(request.seed, request.epoch, allocate, alone, mark)
        with globals_kept() if alone else nullcontext():
            if self.views == 1:
                return self._read(request, stated)
            several = (request.of_view(view, self.views) for view in range(self.views))
            return tuple(self._read(each, stated) for each in several)

    def group(self, batch_size: int) -> int:
        """Return how many batches to read at once: several if they are small."""
        dataset = self.dataset
        if self.views > 1 or not isinstance(dataset, ShardDataset) or dataset.functions():
            return 1
        size = batch_size * dataset.sample_bytes(_SAMPLED_ROWS)
        return max(1, min(_MOST_TOGETHER, _TOGETHER_BYTES // max(1, size)))

    def several(self, requests: Sequence[Request], *, allocate: Allocate | None) -> Iterator[Any]:
        """Yield the batch of each request, in a thread that is not alone; read at once if possible.

        An error is raised for the batch that has it.
        """
        for _, group in itertools.groupby(requests, lambda each: each[:2]):  # epoch and seed
            some = list(group)
            together = self._read_together(some, allocate) if len(some) > 1 else None
            end = 0
            for request in some:
                if together is None:
                    yield self(request, allocate=allocate, alone=False)
                    continue
                start, end = end, end + len(request.rows)
                with reading(_context(request, allocate)):
                    batch = self.collate(together.part(start, end))
                yield self._add_rows(batch, request) if self._with_rows else batch

    def _read_together(
        self, requests: Sequence[Request], allocate: Allocate | None
    ) -> BatchView | None:
        """Return the samples of requests of one epoch; None if they must be read one by one."""
        for each in requests:
            if len(each.ahead):
                self.dataset.announce(each.ahead)
        rows = np.concatenate([each.rows for each in requests])
        repeats = [number for each in requests for number in each.numbers]
        try:
            with reading(_context(requests[0], allocate)._replace(repeats=repeats)):
                samples = self.dataset.__getitems__(rows)
        except Exception:  # raised again for the batch that has the fault
            return None
        return samples if isinstance(samples, BatchView) else None

    def _read(self, request: Request, stated: ReadContext) -> Any:
        """Return the collated batch, with repeatable random numbers from global generators.

        A shardkit dataset seeds them for each sample. This method does so for other datasets and
        for the collate function.
        """
        if not stated.alone and isinstance(self.dataset, ShardDataset):  # the usual case
            with reading(stated._replace(repeats=request.numbers)):
                samples: Any = self.dataset.__getitems__(request.rows)
            with reading(stated):
                batch = self.collate(samples)
            return self._add_rows(batch, request) if self._with_rows else batch
        rows, key = request.rows.tolist(), derive_key("fetch", request.seed, request.epoch)
        repeats = request.numbers

        def seed(place: int, key: int = key) -> None:
            if stated.alone:
                number = sample_number(rows[place], repeats[place] if repeats else 0)
                seed_globals(Draws(key, number).bits())

        found = nested.pieces(self.dataset, rows)
        if len(found) > 1:  # several blocks: the batch cannot be sent as one
            stated = stated._replace(allocate=_allocate)
        samples = [None] * len(rows)
        for dataset, own, places in found:
            known = isinstance(dataset, ShardDataset)
            counts = [repeats[place] for place in places] if repeats else ()
            with reading(stated._replace(repeats=counts if known else None)):
                read = _read_rows(dataset, own, seed, places)
            if len(found) == 1:
                samples = read
            else:
                for place, sample in zip(places, read, strict=True):
                    samples[place] = sample
        seed(0, ~key)
        with reading(stated):
            batch = self.collate(samples)
        return self._add_rows(batch, request) if self._with_rows else batch

    def _add_rows(self, batch: Any, request: Request) -> Any:
        rows = torch.from_numpy(nested.dataset_rows(self.dataset, request.rows).copy())
        if request.padding:
            rows[-request.padding :] = -1
        if isinstance(batch, dict):
            return {**batch, "rows": rows}
        return (*batch, rows) if isinstance(batch, (tuple, list)) else (batch, rows)

    def name(self, row: int) -> str:
        """Return the name of the sample at ``row`` for errors."""
        name = getattr(self.dataset, "describe_row", None)
        return str(name(row)) if name is not None else f"row {row}"


def _read_rows(
    dataset: Any, rows: list[int], seed: Callable[[int], None], places: Sequence[int]
) -> Any:
    """Return the samples of ``rows``; ``seed`` seeds the generators for each of ``places``."""
    # A subclass of Subset always has __getitems__, but its dataset may lack it.
    if all(getattr(each, "__getitems__", None) for each in (dataset, *nested.parts(dataset))):
        seed(places[0])
        return dataset.__getitems__(rows)
    samples = []
    for row, place in zip(rows, places, strict=True):
        seed(place)
        samples.append(dataset[row])
    return samples


def _context(request: Request, allocate: Allocate | None) -> ReadContext:
    return ReadContext(request.seed, request.epoch, allocate, alone=False)


def _allocate(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)
