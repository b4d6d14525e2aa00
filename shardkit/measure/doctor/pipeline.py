"""The loader to diagnose, and variants of it; runs in the measurement process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from shardkit.errors import UsageError
from shardkit.measure.doctor.stored import innermost
from shardkit.measure.runner import steps
from shardkit.measure.runner.folder import PlainFolder
from shardkit.measure.runner.material import close_loader
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec, StopCondition
from shardkit.measure.runner.timing import measure
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import ShardDataset, open_dataset
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.loader import Loader, make_loader

_EPOCH_BATCHES = 256
"""Maximum batches in an epoch of a variant."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Changes to the loader; the default changes nothing."""

    data: str = ""
    """Path of a converted sample to read instead of the images."""
    jpeg: str = ""
    """JPEG decoding of a shardkit dataset."""
    engine: str = ""
    """``thread`` or ``process``."""
    workers: int | None = None
    default_collate: bool = False
    """Whether shardkit's collate function replaces the loader's."""
    torch_threads: int | None = None
    """Threads that PyTorch uses for one operation."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Properties of the loader to diagnose."""

    stock: bool
    """Whether it is PyTorch's DataLoader."""
    engine: str
    """``main``, ``thread`` or ``process``: where batches are made."""
    workers: int
    batch_size: int
    dataset: str
    """Type of the dataset within any ``Subset``."""
    mapped: bool = True
    """Whether the loader makes batches of the rows of a map-style dataset."""
    collate: str = ""
    """Name of a custom collate function; empty for a default one."""
    transform: str = ""
    """Name of the transform; empty without one."""
    decode: str = ""
    """Image type of a shardkit dataset or an image folder."""
    jpeg: str = ""
    """JPEG decoding of a shardkit dataset; empty for another one."""
    torch_threads: int = 1
    """Threads that PyTorch uses for one operation."""


class Pipeline:
    """A dataset and a loader of it, which can be rebuilt with changes."""

    def __init__(self, session: Session, batch_size: int, workers: int | None) -> None:
        """Take the session's loader apart, or create one.

        Args:
            session: The measurement process.
            batch_size: Samples per batch; an upper limit if the session has a loader.
            workers: Workers, unless the session has a loader.

        Raises:
            UsageError: If the session's loader is neither a DataLoader nor a shardkit loader.
        """
        given = session.loader
        self.stock: DataLoader[Any] | None = None
        self.options = LoaderOptions(num_workers=workers)
        self.dataset, self.batch_size = session.dataset, batch_size
        if isinstance(given, Loader):
            self.options, self.batch_size = given.options, min(batch_size, given.batch_size)
        elif isinstance(given, DataLoader):
            self.stock = given
            self.batch_size = min(batch_size, given.batch_size or _sampled(given.batch_sampler))
        elif given is not None:
            raise UsageError(
                f"--loader {session.subject.loader!r} returns a {type(given).__name__}: return a "
                "torch.utils.data.DataLoader or the result of shardkit.make_loader"
            )
        self.collects = self.stock is None or self.stock.batch_sampler is not None
        """Whether the loader makes batches of samples, instead of taking those of the dataset."""
        self.mapped = self.collects and not isinstance(self.dataset, IterableDataset)
        self.collate: Any = (given if self.stock is not None else self.options).collate_fn

    def sampler(self) -> Iterable[Any]:
        """Return what a loader without batches of rows passes to the dataset."""
        return self.stock.sampler if self.stock is not None else range(len(self.dataset))

    def setup(self) -> Setup:
        """Return the properties of the loader."""
        inner, _ = innermost(self.dataset)
        loader: Any = self.stock
        if loader is None:
            loader = make_loader(self.dataset, self.batch_size, options=self.options)
        engine = getattr(loader, "engine", "process") if loader.num_workers else "main"
        transform = getattr(inner, "transform", None)
        default = self.collate in (collate, default_collate)
        return Setup(
            stock=self.stock is not None,
            engine=engine,
            workers=loader.num_workers,
            batch_size=self.batch_size,
            dataset=type(inner).__name__,
            mapped=self.mapped,
            collate="" if default else _name(self.collate),
            transform="" if transform is None else _name(transform),
            decode=str(inner.decode) if isinstance(inner, ShardDataset | PlainFolder) else "",
            jpeg=inner.jpeg if isinstance(inner, ShardDataset) else "",
            torch_threads=torch.get_num_threads(),
        )

    def loader(self, variant: Variant, rows: Sequence[int]) -> Iterable[Any]:
        """Return the loader with changes.

        Args:
            variant: The changes.
            rows: The only rows to read, again and again, in random order; empty reads all.
        """
        dataset = self._dataset(variant)
        rows = range(len(dataset)) if variant.data else rows
        if self.mapped and len(rows):
            most = _EPOCH_BATCHES * self.batch_size
            count = min(max(len(self.dataset), most // 8), most)
            dataset = Subset(dataset, (list(rows) * math.ceil(count / len(rows)))[:count])
        if self.stock is not None and not variant.data and variant.engine != "thread":
            return self._stock_loader(self.stock, dataset, variant)
        options = self.options
        if self.stock is not None and self.collate is not default_collate:
            options = replace(options, collate_fn=self.collate)
        if variant.default_collate:
            options = replace(options, collate_fn=collate)
        engine = variant.engine or options.engine
        workers = options.num_workers if variant.workers is None else variant.workers
        options = replace(options, engine=engine, num_workers=workers)
        return make_loader(dataset, self.batch_size, shuffle=True, options=options)

    def _dataset(self, variant: Variant) -> Any:
        inner, _ = innermost(self.dataset)
        if not variant.data and not variant.jpeg:
            return self.dataset
        ours = isinstance(inner, ShardDataset)
        return open_dataset(
            variant.data or inner.path,
            transform=inner.transform,
            decode=inner.decode if ours or isinstance(inner, PlainFolder) else "pil",
            jpeg=variant.jpeg or (inner.jpeg if ours else "exact"),
        )

    def _stock_loader(
        self, given: DataLoader[Any], dataset: Any, variant: Variant
    ) -> DataLoader[Any]:
        workers = given.num_workers if variant.workers is None else variant.workers
        batches: dict[str, Any] = {"batch_size": given.batch_size}
        if self.mapped:
            batches = {"batch_size": self.batch_size, "shuffle": True, "drop_last": given.drop_last}
        return DataLoader(
            dataset,
            num_workers=workers,
            collate_fn=collate if variant.default_collate else given.collate_fn,
            pin_memory=given.pin_memory,
            timeout=given.timeout if workers else 0,
            worker_init_fn=given.worker_init_fn,
            multiprocessing_context=given.multiprocessing_context if workers else None,
            prefetch_factor=given.prefetch_factor if workers else None,
            persistent_workers=given.persistent_workers and workers > 0,
            **batches,
        )


def _sampled(batches: Any) -> int:
    """Return the size of a batch sampler's batches; 1 if the dataset makes batches."""
    if batches is None:
        return 1
    return getattr(batches, "batch_size", None) or len(next(iter(batches)))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def describe(session: Session, *, batch_size: int, workers: int | None) -> Setup:
    """Return the properties of the session's loader, or of the one that doctor would create."""
    return Pipeline(session, batch_size, workers).setup()


def step_seconds(
    session: Session, *, batch_size: int, workers: int | None, step: StepSpec
) -> float:
    """Return the time of a training step on a batch of the loader."""
    loader = Pipeline(session, batch_size, workers).loader(Variant(workers=0), [])
    batch = next(iter(loader))
    close_loader(loader)
    return steps.step_seconds(session.step(step), batch)


def variant_rate(  # noqa: PLR0913 - a request
    session: Session,
    *,
    batch_size: int,
    workers: int | None,
    variant: Variant,
    rows: Sequence[int],
    seconds: float,
) -> float:
    """Return the images per second of the loader with changes; arguments as for `Pipeline`."""
    pipeline = Pipeline(session, batch_size, workers)
    loader, threads = pipeline.loader(variant, rows), torch.get_num_threads()
    torch.set_num_threads(variant.torch_threads or threads)
    try:
        found = measure(loader, StopCondition(seconds=seconds), lambda batch: None)
        while not found.images:  # a busy machine delayed even the first batch
            seconds *= 2
            found = measure(loader, StopCondition(seconds=seconds), lambda batch: None)
        return found.rate
    finally:
        torch.set_num_threads(threads)
        close_loader(loader)
