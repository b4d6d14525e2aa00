"""From a request to a batch: the reading code of all engines, and the interface of an engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from shardkit.errors import UsageError
from shardkit.sampling.order import Draws, derive_key, sample_number
from shardkit.torch.data import nested
from shardkit.torch.data.batch_rows import describe_row
from shardkit.torch.data.collate import BatchView, collate
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import (
    Allocate,
    NumberedRows,
    ReadContext,
    globals_kept,
    read_at_once,
    reading,
    seed_globals,
)
from shardkit.torch.data.schedule import BatchSchedule, Request
from shardkit.torch.engine.options import LoaderOptions, Settings
from shardkit.torch.engine.preflight import sample_bytes

_AT_ONCE_BYTES = 8 << 20
_COPIED_BYTES = 20 << 20
_MOST_AT_ONCE = 16
"""Batches to read at once: their bytes, their bytes if nothing is decoded, and their number.
Looking up a batch, filling it and handing it over takes Python 0.2 ms, as long as copying 1 MiB,
and other threads wait for the GIL meanwhile. A message from a worker takes 1 ms."""


class Fetch:
    """Reads batches of a dataset; picklable if the dataset and the collate function are."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Any],
        *,
        with_rows: bool,
        op: ImageOp | None = None,
        views: Sequence[ImageOp | None] = (),
    ) -> None:
        """Create a reader of batches of a dataset, preferably with ``__getitems__``.

        With ``with_rows``, a batch ends with the rows of its samples, -1 for padding. ``op``, or
        that of each of ``views``, replaces the dataset's own ``decode``; None keeps it. Samples of
        ``op`` may have another size in each batch. With views, a batch is a tuple with a batch for
        each.
        """
        self.op = op
        self.ops = tuple(views)
        self.views = max(1, len(self.ops))
        """Number of views."""
        self.blocks = self.views * max(map(_blocks, nested.inner_datasets(dataset)), default=1)
        """Maximum number of blocks of memory in a batch."""
        self.dataset = dataset
        self.collate = collate
        self._with_rows = with_rows

    @classmethod
    def suited(cls, options: LoaderOptions, reason: str) -> tuple[LoaderOptions, str]:
        """Return options that suit this reader, and the reason for their engine.

        ``reason`` is the reason for the engine that ``options`` set.
        """
        return options, reason

    def __call__(
        self,
        request: Request,
        *,
        allocate: Allocate | None = None,
        alone: bool = True,
        mark: npt.NDArray[np.int64] | None = None,
    ) -> Any:
        """Return the batch of ``request``; the other arguments are those of `ReadContext`."""
        self._prefetch(request)
        context = ReadContext(request.seed, request.epoch, allocate, alone, mark, op=self.op)
        with globals_kept() if alone else nullcontext():
            if not self.ops:
                return self._read(request, context)
            return tuple(self._read_views(request, context))

    def batches_at_once(self, batch_size: int) -> int:
        """Return how many batches to read at once: several if they are small."""
        dataset = self.dataset
        if self.ops or self.op or not _reads_together(dataset):
            return 1
        reader = dataset.reader
        if reader.transforms.named:
            return 1
        decodes = reader.fields.pictures and dataset.manifest.raw_shape is None
        most = _AT_ONCE_BYTES if decodes else _COPIED_BYTES
        size = batch_size * sample_bytes(dataset)
        return max(1, min(_MOST_AT_ONCE, most // max(1, size)))

    def read_several(
        self,
        requests: Sequence[Request],
        *,
        allocate: Allocate | None,
        alone: bool = False,
        mark: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[Any]:
        """Yield the batch of each request; read at once if possible.

        An error is raised for the batch that has it. The other arguments are those of
        `ReadContext`.
        """
        for _, same_epoch in itertools.groupby(requests, attrgetter("epoch", "seed")):
            group = list(same_epoch)
            first = group[0]
            context = ReadContext(first.seed, first.epoch, allocate, alone, mark)
            samples = self._read_at_once(group, context) if len(group) > 1 else None
            if samples is None:
                for request in group:
                    yield self(request, allocate=allocate, alone=alone, mark=mark)
                continue
            stop = 0
            for request in group:
                start = stop
                stop = stop + len(request.rows)
                if alone and self.collate is not collate:
                    _GlobalGenerators(request).seed_for_collate()
                with reading(context):
                    batch = self.collate(samples.span(start, stop))
                yield self._with_rows_added(batch, request)

    def accepted(
        self, batches: Batches, bad: dict[int, str], most: int, schedule: BatchSchedule
    ) -> Batches:
        """Return the batches to yield, of those that arrive in the training process.

        ``bad`` receives the rows that were left out, with the reasons. Raises LoaderFailed if they
        are more than ``most``, or all of a batch that other ranks wait for.
        """
        return batches

    def _read_at_once(self, requests: Sequence[Request], context: ReadContext) -> BatchView | None:
        """Return the samples of requests of one epoch; None if they must be read one by one."""
        try:
            samples = read_at_once(self.dataset, requests, context)
        except Exception:  # raised again for the batch that has the fault
            return None
        return samples if isinstance(samples, BatchView) else None

    def _read_views(self, request: Request, context: ReadContext) -> Iterator[Any]:
        """Yield the batch of each view; shardkit's datasets read all views at once."""
        requests = [request.of_view(view, self.views) for view in range(self.views)]
        portions = nested.portions(self.dataset, request.rows.tolist())
        if not all(_reads_together(portion.dataset) for portion in portions):
            for view, op in zip(requests, self.ops, strict=True):
                yield self._read(view, context._replace(op=op))
            return
        context, samples = _read_portions(portions, request, context._replace(views=self.ops))
        for number, view in enumerate(requests):
            yield self._collated(portions, [part.views[number] for part in samples], view, context)

    def _read(self, request: Request, context: ReadContext) -> Any:
        """Return the batch of one view: its samples are read, put in order and collated."""
        portions = nested.portions(self.dataset, request.rows.tolist())
        context, samples = _read_portions(portions, request, context)
        return self._collated(portions, samples, request, context)

    def _collated(
        self,
        portions: list[nested.Portion],
        samples: list[Sequence[Any]],
        request: Request,
        context: ReadContext,
    ) -> Any:
        in_order = samples[0] if len(portions) == 1 else nested.in_order(portions, samples)
        if context.alone and self.collate is not collate:
            _GlobalGenerators(request).seed_for_collate()
        # The context is set again, since the rows of each portion have set their own.
        with reading(context):
            batch = self.collate(in_order)
        return self._with_rows_added(batch, request)

    def _with_rows_added(self, batch: Any, request: Request) -> Any:
        if not self._with_rows:
            return batch
        rows = torch.from_numpy(nested.dataset_rows(self.dataset, request.rows).copy())
        if request.padding:
            rows[-request.padding :] = -1
        if isinstance(batch, dict):
            if "rows" in batch:
                raise UsageError(
                    "with_rows=True adds 'rows' to a batch, which already has a field with this "
                    "name",
                    remedy="leave out the field with fields=, or set as_dict=False",
                )
            return {**batch, "rows": rows}
        return (*batch, rows) if isinstance(batch, (tuple, list)) else (batch, rows)

    def _prefetch(self, request: Request) -> None:
        announce = getattr(self.dataset, "announce", None)
        if announce is not None and len(request.ahead):
            announce(request.ahead)

    def name(self, row: int) -> str:
        """Return the name of the sample at ``row`` for errors."""
        if not isinstance(self.dataset, ShardDataset):
            return f"row {row}"
        return describe_row(self.dataset.shards, int(self.dataset.stored_rows([row])[0]))


Batches = Generator[tuple[Request, Any], None, None]
"""Requests with their batches."""


class Engine:
    """Turns requests into batches. `ENGINE_KINDS` lists all engines."""

    def __init__(self, fetch: Fetch, settings: Settings) -> None:
        """Create an engine; its workers start with the first iteration."""

    @classmethod
    def problem(cls, fetch: Fetch, settings: Settings) -> str | None:
        """Return why this engine may fail on this machine, or None."""
        return None

    def start_problem(self) -> str | None:
        """Return why workers cannot start now, or None."""
        return None

    def run(self, requests: Iterator[Request]) -> Batches:
        """Yield each request with its batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop workers that survive an iteration; the next one starts others."""


class _GlobalGenerators:
    """Seeds the global generators of Python, NumPy and PyTorch from the samples of a batch.

    Only datasets of others and collate functions use them: a shardkit dataset seeds them itself for
    each of its transforms. If other threads use the generators too, nobody seeds them.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._key = derive_key("fetch", request.seed, request.epoch)

    def seed_for_sample(self, position: int) -> None:
        """Seed them for the sample at a position of the batch."""
        seed_globals(Draws(self._key, self._number(position)).bits())

    def seed_for_collate(self) -> None:
        """Seed them for the collate function."""
        seed_globals(Draws(~self._key, self._number(0)).bits())

    def _number(self, position: int) -> int:
        rows = self._request.rows
        repeats = self._request.repeats
        return sample_number(int(rows[position]), 0 if repeats is None else int(repeats[position]))


@contextmanager
def seeded_for_collate(request: Request, *, alone: bool) -> Iterator[None]:
    """Seed the global generators for a collate function and restore them, if ``alone``."""
    with globals_kept() if alone else nullcontext():
        if alone:
            _GlobalGenerators(request).seed_for_collate()
        yield


def _read_portions(
    portions: list[nested.Portion], request: Request, context: ReadContext
) -> tuple[ReadContext, list[Any]]:
    """Return the samples of all portions, and the context to collate them in."""
    if len(portions) > 1:  # several blocks: the batch cannot be sent as one
        context = context._replace(allocate=_allocate)
    generators = _GlobalGenerators(request) if context.alone else None
    with reading(context):
        samples = [_read_portion(portion, request, context, generators) for portion in portions]
    return context, samples


def _read_portion(
    portion: nested.Portion,
    request: Request,
    context: ReadContext,
    generators: _GlobalGenerators | None,
) -> Sequence[Any]:
    """Return the samples that come from one dataset: in one call if it reads batches."""
    dataset = portion.dataset
    positions = portion.positions
    rows = NumberedRows(portion.rows, context._replace(repeats=_repeats(portion, request)))
    if _reads_batches(dataset):
        if generators is not None and not _reads_together(dataset):
            generators.seed_for_sample(positions[0])
        return cast(Sequence[Any], dataset.__getitems__(rows))
    samples = []
    for row, position in zip(rows, positions, strict=True):
        if generators is not None:
            generators.seed_for_sample(position)
        samples.append(dataset[row])
    return samples


def _repeats(portion: nested.Portion, request: Request) -> list[int] | None:
    """Return `ReadContext.repeats` of a portion."""
    if request.repeats is not None:
        return list(request.repeats[portion.positions].tolist())
    # Another dataset may read one row of ours for several of its own, so repeats are unknown there.
    return [] if isinstance(portion.dataset, ShardDataset) else None


def _reads_batches(dataset: Any) -> bool:
    """Return whether a dataset has ``__getitems__``, and all datasets that it passes rows to.

    A subclass of ``Subset`` always has the method, but its dataset may lack it.
    """
    datasets = (dataset, *nested.inner_datasets(dataset))
    return all(getattr(inner, "__getitems__", None) for inner in datasets)


def _reads_together(dataset: Any) -> bool:
    """Return whether a dataset returns all views, and several batches, of its samples at once."""
    unchanged = ShardDataset.__getitems__
    return isinstance(dataset, ShardDataset) and type(dataset).__getitems__ is unchanged


def _blocks(dataset: Any) -> int:
    """Return how many blocks the fields of a batch have: small values have none."""
    if not isinstance(dataset, ShardDataset):
        return 1
    return max(1, sum(kind.stored_apart for kind in dataset.reader.fields.kinds.values()))


def _allocate(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8)
