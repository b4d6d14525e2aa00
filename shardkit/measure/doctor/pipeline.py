"""The loader to diagnose, and variants of it; runs in the measurement process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate

from shardkit.errors import ShardkitError, UsageError, setting
from shardkit.measure.doctor.lines import SampledCollate
from shardkit.measure.doctor.stored import innermost, open_converted
from shardkit.measure.runner.session import Session
from shardkit.recipe import Recipe
from shardkit.system.machine import free_memory
from shardkit.torch.data.collate import collate
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.engine.options import ENGINE_KINDS, EngineKind, LoaderOptions
from shardkit.torch.engine.resident_rows import resident_bytes
from shardkit.torch.loader import Loader, make_loader

_EPOCH_BATCHES = 256
"""Maximum batches in an epoch of a variant."""

_RESIDENT_PART = 0.5
"""Fraction of the free memory that a resident dataset may take: training needs the rest."""

_WORKER_ARGUMENTS = (
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that may make loading faster; without one, the loader as it is."""

    name: str = ""
    """The change in a few words."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `LoaderOptions` to change, such as ``num_workers``."""
    default_collate: bool = False
    """Whether shardkit's collate function replaces the loader's."""
    torch_threads: int | None = None
    """Threads that PyTorch uses for one operation, if it changes."""
    recipe: Recipe | None = None
    """The conversion, if it is one."""
    code: str = ""
    """Python code of the change; empty for a conversion."""
    price: str = ""
    """Its drawback or its cost, such as disk space; empty without one."""
    decode: str = ""
    """Image type of a converted dataset, if the loader's dataset has none."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Properties of the loader to diagnose."""

    stock: bool
    """Whether it is PyTorch's DataLoader."""
    engine: str
    """``main`` without workers, else one of `shardkit.torch.engine.options.ENGINE_KINDS`."""
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
    converted: bool = False
    """Whether the dataset is a converted one of shardkit."""
    is_ours: bool = False
    """Whether the dataset is one of shardkit, or a plain folder: its code is not the user's."""

    @property
    def has_own_code(self) -> bool:
        """Whether the loader runs code of the user."""
        return not self.is_ours or bool(self.transform or self.collate)

    @property
    def kind(self) -> EngineKind | None:
        """The kind of the engine; None without workers."""
        return ENGINE_KINDS.get(self.engine)


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Options of the loader, unless the user gives one."""

    batch_size: int = 64
    """Maximum samples in a batch, also of the user's loader."""
    workers: int | None = None
    """None uses as many as `make_loader` does."""


class Pipeline:
    """A dataset and a loader of it, which can be rebuilt with changes."""

    def __init__(self, session: Session, loading: Loading) -> None:
        """Take the session's loader apart, or create one."""
        loader = session.loader
        self.dataset = session.dataset
        if loader is None:
            loader = make_loader(self.dataset, loading.batch_size, num_workers=loading.workers)
        if not isinstance(loader, Loader | DataLoader):
            raise UsageError(
                f"{setting('loader', session.subject.loader)} returns {type(loader).__name__}, not "
                "a torch.utils.data.DataLoader or the result of shardkit.make_loader"
            )
        self.stock = loader if isinstance(loader, DataLoader) else None
        self.options = LoaderOptions() if isinstance(loader, DataLoader) else loader.options
        order = OrderOptions() if isinstance(loader, DataLoader) else loader.order
        self.order = order.of_any_rows
        any_loader: Any = loader  # the two state other types of this function
        self.collate = any_loader.collate_fn
        if self.collate is not default_collate:
            self.options = replace(self.options, collate_fn=self.collate)
        self.collects = self.stock is None or self.stock.batch_sampler is not None
        """Whether the loader makes batches of samples, instead of taking those of the dataset."""
        inner = innermost(self.dataset)
        ours = (default_collate, collate)
        transform = getattr(inner, "transform", None)
        self.setup = Setup(
            stock=self.stock is not None,
            engine=getattr(loader, "engine", "process") if loader.num_workers else "main",
            workers=loader.num_workers,
            batch_size=min(loading.batch_size, loader.batch_size or _sampled(loader)),
            dataset=type(inner).__name__,
            mapped=self.collects and not isinstance(self.dataset, IterableDataset),
            collate="" if self.collate in ours else _name(self.collate),
            transform="" if transform is None else _name(transform),
            converted=isinstance(inner, ShardDataset),
            is_ours=type(inner).__module__.startswith("shardkit."),
        )

    def stream(self) -> Iterator[Any]:
        """Return the items of a dataset that is not mapped."""
        if isinstance(self.dataset, IterableDataset):
            return iter(self.dataset)
        stock: Any = self.stock
        return (self.dataset[row] for row in stock.sampler)

    def resident_bytes(self, side: int) -> int:
        """Return the memory that the decoded dataset would take; 0 if it cannot be resident.

        ``side`` is the shorter side of the loaded images, in pixels.
        """
        if self.options.resident or not isinstance(innermost(self.dataset), ShardDataset):
            return 0
        most = int(_RESIDENT_PART * free_memory())
        if not 0 < len(self.dataset) * 3 * side**2 <= most:  # do not list the rows of a huge one
            return 0
        try:
            needed = resident_bytes(self.dataset)
        except ShardkitError:
            return 0
        return needed if needed <= most else 0

    def loader(
        self, remedy: Remedy, data: str, rows: Sequence[int], sampled: str = ""
    ) -> Iterable[Any]:
        """Return the loader with a remedy, of ``rows`` again and again, or all, or of ``data``.

        Its stacks are sampled into the folder ``sampled``, if there is one.
        """
        dataset = self.dataset
        size = self.setup.batch_size
        if data:
            dataset = open_converted(innermost(dataset), data, remedy.decode or "pil")
        rows = range(len(dataset)) if data else rows
        if self.setup.mapped and len(rows):
            count = min(max(len(self.dataset), _EPOCH_BATCHES * size // 8), _EPOCH_BATCHES * size)
            dataset = Subset(dataset, (list(rows) * math.ceil(count / len(rows)))[:count])
        changed = dict(remedy.options)
        if remedy.default_collate:
            changed["collate_fn"] = collate
        if sampled:
            function = changed.get("collate_fn") or self.collate
            is_stock = self.stock is not None
            changed["collate_fn"] = SampledCollate(function, sampled, is_stock)
        if self.stock is None or data or "engine" in changed:
            options = vars(self.options) | changed
            if self.stock is not None and not data:
                options = {**options, "num_workers": self.stock.num_workers} | changed
            if sampled and self.setup.kind:  # a collate function could be a reason for another one
                options["engine"] = self.setup.engine
            if "engine" in changed and ENGINE_KINDS[changed["engine"]].starts_processes:
                options["resident"] = None
            return make_loader(dataset, size, **vars(self.order), **options)
        same = ("num_workers", "collate_fn", "pin_memory")
        changed = {name: getattr(self.stock, name) for name in same} | changed
        if changed["num_workers"]:
            changed |= {name: getattr(self.stock, name) for name in _WORKER_ARGUMENTS}
        if self.setup.mapped:
            changed |= {"shuffle": True, "drop_last": self.stock.drop_last}
        elif not self.collects and not isinstance(dataset, IterableDataset):
            changed["sampler"] = self.stock.sampler
        return DataLoader(dataset, size if self.collects else None, **changed)


def _sampled(loader: Any) -> int:
    """Return the size of a batch sampler's batches; 1 if the dataset makes batches."""
    batches = loader.batch_sampler
    if batches is None:
        return 1
    return getattr(batches, "batch_size", None) or len(next(iter(batches)))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
