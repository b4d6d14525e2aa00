"""Map-style datasets: from a row to its fields; by default image and label, as ``ImageFolder``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from shardkit.codecs.image import Decoding
from shardkit.dataset.manifest import Manifest
from shardkit.dataset.shardset import SelectedTexts, ShardSet, as_array, resolve_rows, selected_rows
from shardkit.errors import UsageError
from shardkit.kinds.field import Schema
from shardkit.options import check_integer, takes
from shardkit.system.late import load
from shardkit.torch.data.batch_rows import BatchRows, WindowReader
from shardkit.torch.data.collate import PAIR, BatchView, Sample, SeveralViews
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import BatchContext, EpochCell
from shardkit.torch.data.reader_options import Function, ReaderOptions, Transforms, choose_fields
from shardkit.torch.data.sample_reader import FieldTransforms, SampleReader

_Self = TypeVar("_Self", bound="ShardDataset")

_CHANGEABLE = ("transform", "target_transform", "decode", "view")  # as in a new dataset


class ShardDataset(Dataset[Sample]):
    """The rows of a dataset of any format: images and labels, or any other fields.

    It opens shards on first use and holds only its path and options. So it is cheap to pickle, and
    works in threads and under fork, spawn and forkserver.

    ``dataset[row]`` returns ``(image, label)``; the label is an int, -1 in an unlabeled dataset.
    Negative rows count from the end. A list, an array or a slice of rows returns a `BatchView`, as
    ``__getitems__`` does for PyTorch's ``DataLoader``.

    With ``fields`` it returns those fields: images and masks as set by ``decode``; arrays as
    tensors; boxes as float64 of shape (N, 4), or (N, 5) with labels; keypoints as float64 of shape
    (N, 3), or (objects, points, 3) with names; several labels as float32 with 1 for each class; one
    label as an int; numbers as NumPy scalars; text as str, JSON values and bytes. A missing value
    is None, and a missing label is -1.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    # Under spawn and forkserver, PyTorch pickles the dataset once per worker. A list of a million
    # paths takes more than a second each time: hence the index in files.

    format: str | None = None
    """The only format that a subclass opens; None opens any."""

    @takes(ReaderOptions)
    def __init__(self, options: ReaderOptions, path: str | PathLike[str]) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory, or the directory of its splits; or its URL in an object
                store: ``s3://``, ``gs://``, ``az://`` or ``https://``.
        """
        self._set_up(options, options.open(path))
        if self.format not in (None, self.manifest.format):
            raise UsageError(
                f"{path} has the format {self.manifest.format!r}; "
                f"{type(self).__name__} reads {self.format!r}",
                remedy="Use shardkit.open_dataset, which opens every format",
            )

    def _set_up(self, options: ReaderOptions, shards: ShardSet) -> None:
        """Prepare to read the shards as the options say."""
        self.shards = shards
        """The stored dataset."""
        self.selected: npt.NDArray[np.int64] | None = None
        """The stored row of each row of this dataset; None if it has all rows, in their order."""
        self._opened_with = replace(options, split=None)  # the path of the shards has the split
        self._fields = choose_fields(shards, options)
        self.layout = self._fields.layout
        """The fields of samples, and how a batch holds them."""
        self._windows: WindowReader | None = None
        if (windows := options.windows) is not None:
            self.layout = windows.layout(self.layout)
            self._windows = windows.reader(shards)
        transform = options.transform
        decode = options.decode
        if isinstance(transform, ImageOp):
            decode = transform
            transform = None
        elif windows is not None and decode == "pil":
            decode = "torch"
        self.transform: Function | Transforms | None = transform
        self.target_transform = options.target_transform
        self.decode = dict(decode) if isinstance(decode, Mapping) else decode
        self.view = check_integer("view", options.view, 0)
        self._epoch = EpochCell()
        self._decoding = Decoding(self.manifest.made_with.fill)
        self.reader.require_valid()

    if not TYPE_CHECKING:  # type checkers would then permit any attribute

        def __setattr__(self, name: str, value: object) -> None:
            if name not in _CHANGEABLE or name not in vars(self):
                super().__setattr__(name, value)
                return
            opened = object.__new__(type(self))
            opened._set_up(replace(self.options, **{name: value}), self.shards)
            vars(self).update({name: vars(opened)[name] for name in _CHANGEABLE})

    @property
    def reader(self) -> SampleReader:
        """The reader of samples, with the current values of the attributes."""
        transforms = FieldTransforms(self.transform, self.target_transform)
        return SampleReader(self._fields, self.decode, transforms, self._windows, self._decoding)

    @property
    def options(self) -> ReaderOptions:
        """The options that it was opened with, and the current values of the attributes."""
        return replace(self._opened_with, **{name: getattr(self, name) for name in _CHANGEABLE})

    def reopened(self, path: str | PathLike[str] | None = None, **changes: Any) -> ShardDataset:
        """Return the stored dataset with all of its rows, opened with the same options.

        Args:
            path: A copy or conversion of the dataset to open instead.
            **changes: Options that differ.

        Raises:
            UsageError: As for a new dataset.
        """
        path = self.shards.location if path is None else path
        return open_dataset(path, **vars(replace(self.options, **changes)))

    def __len__(self) -> int:
        return len(self.shards) if self.selected is None else len(self.selected)

    def __getitem__(self, row: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(len(self))))
        if isinstance(row, int) or not as_array(row).ndim:
            return self.__getitems__([cast(int, row)])[0]
        return self.__getitems__(row)

    def __getitems__(self, rows: Sequence[int] | npt.NDArray[Any]) -> BatchView:
        """Return the samples of ``rows``, in the same order, including duplicates.

        For a loader with ``views=[op, ...]`` each is a tuple of samples, one for each view.

        Raises:
            IndexError: If a row is out of range.
            CorruptRecord: If the bytes of a field changed; it is never skipped or replaced.
            CorruptShard: If a shard is missing or truncated.
            BadImage: If an image cannot be decoded (it was converted with ``--check none``).
        """
        context = BatchContext(self._epoch, self.view, rows)
        first, *others = context.of_views()
        batch = BatchRows(self.shards, self.stored_rows(rows), first)
        reader = self.reader
        with context.globals_kept(*reader.transforms.named.values()):
            views = reader.read_views([batch, *map(batch.with_context, others)])
        samples = [BatchView([*view.values()], self.layout, batch.describe) for view in views]
        return SeveralViews(samples) if context.views else samples[0]

    def select(self: _Self, rows: Sequence[int] | npt.NDArray[Any]) -> _Self:
        """Return a dataset of some rows, with the same options and methods.

        A record keeps its random numbers. To select by values:
        ``dataset.select(dataset.column("price") > 10)``.

        Args:
            rows: Rows in any order, or a mask: whether to select each row, bool of shape (N,).

        Raises:
            IndexError: If a row is out of range, or a mask does not have one value per row.
            UsageError: If ``rows`` are strings.
        """
        epoch = EpochCell()
        if (current := self._epoch.get()) is not None:
            epoch.set(*current)
        chosen = copy.copy(self)
        chosen.selected = self.stored_rows(selected_rows(rows, len(self)))
        chosen._epoch = epoch
        return chosen

    def stored_rows(self, rows: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the stored row of each of ``rows``: int64 of shape (N,).

        Raises:
            IndexError: If a row is out of range.
        """
        if self.selected is None:
            return self.shards.resolve_rows(rows)
        name = f"this selection of {self.shards.location}"
        return self.selected[resolve_rows(rows, len(self), name)]

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Set the epoch, so that random operations depend on (seed, epoch, view, row) only.

        This reaches persistent workers too. A shardkit loader calls it automatically; with a plain
        ``DataLoader``, call it before each epoch, as for ``DistributedSampler``. Without it, random
        operations follow PyTorch's global generator.

        Args:
            epoch: An integer of at least 0.
            seed: Any 64-bit integer.

        Raises:
            UsageError: If a number is out of range.
        """
        self._epoch.set(epoch, seed)

    @property
    def epoch(self) -> int | None:
        """The epoch that `set_epoch` set, or None."""
        current = self._epoch.get()
        return None if current is None else current[0]

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Issue readahead for the images of ``rows``, and return without waiting.

        For a dataset in an object store, fetch their shards into the cache.

        Args:
            rows: Non-negative rows; int64 of shape (N,).
        """
        stored = self.stored_rows(rows)
        for name, kind in self._fields.kinds.items():
            if kind.stored_apart:
                self.shards.announce(stored, name)

    def __repr__(self) -> str:
        options = f", view={self.view}" if self.view else ""
        size = f"{len(self)} images, {len(self.classes)} classes"
        if self.layout != PAIR:
            options += f", fields={self.fields}"
            options += ", as_dict=True" if self.layout.as_dict else ""
            size = f"{len(self)} rows"
        return (
            f"{type(self).__name__}({self.shards.location!r}, decode={self.decode!r}{options}): "
            f"{size}, {self.manifest.format}"
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a sample, in their order."""
        return self._fields.layout.names

    @property
    def schema(self) -> Schema:
        """All fields of the dataset, by name."""
        return self.shards.schema

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a small field in all rows, from the index only.

        Args:
            name: A number, label, labels, text, JSON, boxes or keypoints.

        Returns:
            One element per row. Numbers and labels are masked where a row has no value. Other kinds
            are an array of objects, with None where a row has no value.

        Raises:
            UsageError: If there is no such field, or its values are bytes in the records.
        """
        values = self.shards.column(name)
        return values if self.selected is None else values[self.selected]

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each row has a field, from the index only: bool of shape (N,).

        Raises:
            UsageError: If there is no such field.
        """
        present = self.shards.present(name)
        return present if self.selected is None else present[self.selected]

    @property
    def path(self) -> Path:
        """The dataset's directory."""
        return self.shards.directory

    @property
    def shard_paths(self) -> list[Path]:
        """The shards: files in `path`, or the archives or files of an attached dataset."""
        return [*self.shards.files.paths()]

    @property
    def manifest(self) -> Manifest:
        """Description of the dataset and of its conversion."""
        return self.shards.manifest

    @cached_property
    def classes(self) -> list[str]:
        """Class names, by label; empty for an unlabeled dataset."""
        return list(self.manifest.classes or ())

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """Labels, by class name."""
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The label of each row, int64 of shape (N,), read-only, without ``target_transform``.

        Raises:
            CorruptDataset: If the labels in the index contradict the manifest.
        """
        return self.shards.labels if self.selected is None else self.shards.labels[self.selected]

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each row, as in ``ImageFolder``; a new list on each access."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))

    @property
    def keys(self) -> Sequence[str]:
        """The key of each row."""
        keys = self.shards.keys
        return keys if self.selected is None else SelectedTexts(keys, self.selected)

    @property
    def paths(self) -> Sequence[str]:
        """The path of each row's source file, relative to the source."""
        paths = self.shards.paths
        return paths if self.selected is None else SelectedTexts(paths, self.selected)


class LMDBDataset(ShardDataset):
    """`ShardDataset` for LMDB files."""

    format = "lmdb"


class HDF5Dataset(ShardDataset):
    """`ShardDataset` for HDF5 files."""

    format = "hdf5"


class TarDataset(ShardDataset):
    """`ShardDataset` for WebDataset tar files."""

    format = "webdataset"


_IN_PLACE = "shardkit.attaching.in_place:index_of"
"""Makes the index of a folder of images."""


@takes(ReaderOptions)
def open_dataset(options: ReaderOptions, path: str | PathLike[str]) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Args:
        path: The dataset's directory, the directory of its splits, or its URL. A folder of images
            is read in place, as after ``shardkit attach imagefolder``. Its index is in the
            ``shardkit`` folder of ``$XDG_CACHE_HOME``, and is rebuilt if a name, size or time
            changes.

    Returns:
        A dataset of its format's class, or a `ShardDataset` for a format from another package.

    Raises:
        UsageError: If there is no dataset at ``path``, an option is unknown, or an object store
            denies access.
        CorruptDataset: If the dataset's manifest is damaged.
        ShardkitError: If an object store cannot be read.
    """
    try:
        shards = options.open(path)
    except UsageError:
        is_plain = (options.root or options.cache) is None
        if not is_plain or (index := load(_IN_PLACE)(path, options.split)) is None:
            raise
        shards = replace(options, root=path).open(index)
    kinds = {kind.format: kind for kind in (LMDBDataset, HDF5Dataset, TarDataset)}
    kind = kinds.get(shards.manifest.format, ShardDataset)
    dataset = kind.__new__(kind)  # not `kind(path)`, which would open the shards again
    dataset._set_up(options, shards)
    return dataset
