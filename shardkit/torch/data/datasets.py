"""Map-style datasets: from a row to its fields; by default image and label, as ``ImageFolder``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from shardkit.codecs.image import WHITE, Decoding
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.opened import Fetching
from shardkit.dataset.shardset import ShardSet, as_array, open_shards, resolve_rows
from shardkit.errors import CorruptDataset, TransformFailed, UsageError, setting
from shardkit.kinds.field import BFLOAT16, Field, Kind, Schema, get_kind
from shardkit.options import option, require_names, require_valid, takes
from shardkit.record import IMAGE, LABEL
from shardkit.sampling.order import Draws, check_integer
from shardkit.system.text import name_list, quoted
from shardkit.torch.data.batch_rows import BatchRows, RowWindows, WindowReader, describe_row
from shardkit.torch.data.collate import PAIR, BatchView, Layout, Sample, SeveralViews, Values
from shardkit.torch.data.images import DECODES, Decode, ImageReader, MaskReader, require_one_size
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import BatchContext, EpochCell
from shardkit.torch.data.values import move_arrays, read_apart, read_column

if TYPE_CHECKING:
    from shardkit.orders.windows import Windows

_ATTRIBUTES = {"transform", "target_transform", "decode", "windows", "view"}
"""Options that a dataset has as attributes."""

_ENTRIES_AT_ONCE = 1 << 18
"""Entries of the index to read at once, which bounds memory."""

Function = Callable[..., Any]
Transforms = Mapping[Any, Function]
"""Transforms by field, or by a tuple of fields. (The keys of a `Mapping` have no common type.)"""

_Self = TypeVar("_Self", bound="ShardDataset")


@dataclass(frozen=True)
class ReaderOptions:
    """The options of datasets: what is read, and how it is decoded.

    Raises:
        UsageError: If an option is unknown.
    """

    transform: Function | ImageOp | Transforms | None = option(
        None,
        help="Applied to each image. An `ImageOp` works as if passed as ``decode``. A mapping "
        'sets the transform of each field, or of several together: ``{("image", "mask"): '
        "function}`` calls ``function(image, mask)``, which returns both.",
    )
    target_transform: Function | None = option(None, help="Applied to each label.")
    decode: Decode | Mapping[str, Decode] = option(
        "pil",
        help="Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape (height, "
        "width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last memory, "
        "``bytes`` for the stored bytes. Images of other types (``--pixels``) keep their channels "
        "and dtype, in operations, too; ``pil`` requires a mode of Pillow. An `ImageOp`, such as "
        "``RandomResizedCrop(224)``, "
        "crops while decoding and returns images as ``torch`` does; it selects one crop for "
        "all images, masks, boxes and keypoints of a row. A mapping sets each field "
        "separately; boxes and keypoints then follow ``image``. Masks have the shape "
        "(height, width) and keep their values.",
    )
    _: KW_ONLY
    fields: Sequence[str] | None = option(
        None,
        help="Names of the fields that are read, in this order. None means image and label, or "
        "all fields of a dataset without images.",
    )
    follow: Sequence[str] = option(
        (),
        help="Fields of arrays of shape (channels, height, width), such as latents and heat maps, "
        "that an `ImageOp` crops, scales and flips along with the image. They keep their grid: a "
        "latent of one value per 8 x 8 pixels has one per 8 x 8 pixels of the crop.",
    )
    as_dict: bool = option(
        False, help="Whether samples and batches are dicts by field name instead of tuples."
    )
    verify: bool | None = option(
        None,
        help="Whether each read compares the record's checksum. None does so for encoded images, "
        "which costs about 3%, but not for raw pixels and arrays of one shape.",
    )
    view: int = option(
        0,
        help="Number of this view, from 0 on. Datasets over the same images draw different random "
        "numbers if their views differ, such as two crops of each image.",
    )
    windows: Windows | None = option(
        None,
        help="Neighboring rows that each sample holds, see `Windows`. Samples are then dicts, "
        "images are tensors, and a transform gets a window.",
    )
    split: str | None = option(
        None, help="Name of a split, such as ``train``: the folder of that name in ``path``."
    )
    cache: str | PathLike[str] | None = option(
        None,
        help="A local folder, for a dataset in an object store: whole shards are fetched there, "
        "ahead of need and once for all processes.",
    )
    cache_limit: int | str | None = option(
        None,
        help='Bytes of shards in the cache, as a number or as ``"50GB"``. Shards not used for the '
        "longest time are evicted. None means no limit.",
    )
    root: str | PathLike[str] | None = option(
        None,
        help="Folder of the archives of an attached dataset; None means where `shardkit.attach` "
        "found them.",
    )

    def __post_init__(self) -> None:
        require_valid(self)
        if isinstance(self.transform, ImageOp) and self.decode not in ("pil", "torch"):
            raise UsageError(
                f"{setting('transform', self.transform)} decodes images itself, and "
                f"{setting('decode', self.decode)} is set too",
                remedy="leave one of them out",
            )
        if self.windows is not None and not isinstance(self.windows, RowWindows):
            raise UsageError(f"windows={self.windows!r} is not a shardkit.Windows(...)")
        require_names("fields", self.fields)
        require_names("follow", self.follow)
        if self.split is not None and not isinstance(self.split, str):
            raise UsageError(
                f"{setting('split', self.split)} is not a name, such as 'train'",
                remedy="open each split by itself",
            )

    def open(self, path: str | PathLike[str]) -> ShardSet:
        """Open the shards, in a local folder or in an object store.

        Raises:
            UsageError: If there are none, or an option is invalid.
        """
        if not isinstance(path, (str, PathLike)):
            raise UsageError(f"{quoted(path)} is not a path of a dataset")
        fetching = Fetching(self.cache, self.cache_limit)
        return open_shards(path, self.split, verify=self.verify, root=self.root, fetching=fetching)


class ShardDataset(Dataset[Sample]):
    """The rows of a dataset of any format: images and labels, or any other fields.

    It opens shards on first use and holds only its path and options. So it is cheap to pickle, and
    works in threads and under fork, spawn and forkserver.

    ``dataset[row]`` returns ``(image, label)``; the label is an int, -1 in an unlabeled dataset.
    Negative rows count from the end. A list, an array or a slice of rows returns a `BatchView`, as
    ``__getitems__`` does for PyTorch's ``DataLoader``.

    With ``fields`` it returns those fields: images and masks as ``decode`` sets; arrays as tensors;
    boxes as float64 of shape (N, 4), or (N, 5) with labels; keypoints as float64 of shape (N, 3),
    or (objects, points, 3) with names; several labels as float32 with 1 for each class; one label
    as an int; numbers as NumPy scalars; str, JSON values and bytes. A value that the row lacks is
    None, and a label -1.

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
                f"{type(self).__name__} reads {self.format!r}. shardkit.open_dataset opens any "
                "format."
            )

    def _set_up(self, options: ReaderOptions, shards: ShardSet) -> None:
        """Prepare to read the shards as the options say."""
        transform = options.transform
        decode = options.decode
        if isinstance(transform, ImageOp):
            decode = transform
            transform = None
        self.transform: Function | Transforms | None = transform
        self.target_transform = options.target_transform
        self.decode = dict(decode) if isinstance(decode, Mapping) else decode
        self._shards = shards
        self._opened_with = replace(options, split=None)  # the place has the split
        self.selected: npt.NDArray[np.int64] | None = None
        """The stored row of each row of this dataset; None if it has all rows, in their order."""
        self.windows: RowWindows | None = options.windows
        fields = options.fields
        if self.windows is not None:
            fields = self.windows.names(fields)
            self.decode = "torch" if self.decode == "pil" else self.decode
        as_dict = options.as_dict or self.windows is not None
        self._layout = _layout(self.schema, fields, as_dict, self._shards.place)
        self.layout = self._layout if self.windows is None else self.windows.layout(self._layout)
        """The fields of samples, and how a batch holds them."""
        self.follow = _following(self.schema, self._layout.names, options.follow)
        self._reach: WindowReader | None = None
        if self.windows is not None:
            self._reach = self.windows.reader(self._shards)
        self._check_options()
        self.view = check_integer("view", options.view, 0)
        self._epoch = EpochCell()

    @property
    def options(self) -> ReaderOptions:
        """The options with which it was opened, but for attributes that were set since."""
        return replace(self._opened_with, **{name: getattr(self, name) for name in _ATTRIBUTES})

    def reopened(self, path: str | PathLike[str] | None = None, **changes: Any) -> ShardDataset:
        """Return the stored dataset with all of its rows, opened with the same options.

        Args:
            path: A copy or conversion of the dataset to open instead.
            **changes: Options that differ.

        Raises:
            UsageError: As for a new dataset.
        """
        place = self._shards.place if path is None else path
        return open_dataset(place, **vars(replace(self.options, **changes)))

    def _check_options(self) -> None:
        for decode in self._decodes():
            if not isinstance(decode, ImageOp) and decode not in DECODES:
                raise UsageError(
                    f"{setting('decode', decode)} is unknown;",
                    remedy=f"choose from {', '.join(DECODES)}, or pass an operation, without "
                    "quotes: decode=shardkit.CenterCrop(224)",
                )
        if isinstance(self.decode, Mapping):
            pictures = [name for name in self.fields if self._kinds[name].is_picture]
            _require_known("decode", self.decode, pictures)
        if isinstance(self.transform, Mapping):
            names = [name for key in self.transform for name in _names(key)]
            _require_known("transform", names, self.fields)
            if self.target_transform is not None and LABEL in names:
                raise UsageError(
                    f"{setting('transform')} and target_transform= both apply to the label",
                    remedy="leave one out",
                )
            if len(set(names)) < len(names):
                raise UsageError(
                    f"{setting('transform')} applies twice to a field: {', '.join(names)}"
                )
        for name, function in self.functions().items():
            if not callable(function):
                raise UsageError(f"{setting(name, function)} is not a function")
        for keyword, name in (("transform", IMAGE), ("target_transform", LABEL)):
            value = getattr(self, keyword)
            if value is not None and not isinstance(value, Mapping) and name not in self.fields:
                raise UsageError(
                    f"{setting(keyword)} applies to the field {name!r}, which is not read: "
                    f"fields= is {self.fields}",
                    remedy="Use transform={NAME: function} for other fields",
                )

    def __len__(self) -> int:
        return len(self._shards) if self.selected is None else len(self.selected)

    def __getitem__(self, row: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(len(self))))
        if as_array(row).ndim:
            return self.__getitems__(cast(Sequence[int], row))
        return self.__getitems__([cast(int, row)])[0]

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
        batch = BatchRows(self._shards, self._stored(rows), first)
        batches = [batch, *map(batch.with_context, others)]
        functions = self.functions().values()
        with context.globals_kept(*functions) if functions else nullcontext():
            views = self._read_views(batches)
        samples = [BatchView([*view.values()], self.layout, batch.describe) for view in views]
        return SeveralViews(samples) if context.views else samples[0]

    def _read_views(self, batches: list[BatchRows]) -> list[dict[str, Values]]:
        """Return the fields of each view of the rows of a batch."""
        ops = [batch.context.op for batch in batches]
        datasets = [self if op is None else self.with_decode(op) for op in ops]
        parts = list(zip(datasets, batches, strict=True))
        views: list[dict[str, Values]] = [{} for _ in batches]
        for name in self._layout.names:
            for columns, values in zip(views, self._read(parts, name), strict=True):
                columns[name] = values
        for batch, columns in zip(batches, views, strict=True):
            if self.windows is not None and self._reach is not None:
                for name in self.windows.fields:
                    columns[f"{name}_is_pad"] = self._reach.padding(name, batch)
            joint = self._joint_functions() if self.transform is not None else {}
            for names, function in joint.items():
                columns.update(_transformed_together(batch, columns, names, function))
        return views

    def select(self: _Self, rows: Sequence[int] | npt.NDArray[Any]) -> _Self:
        """Return a dataset of some rows, with the same options and methods.

        A record keeps its random numbers. To select by values:
        ``dataset.select(dataset.column("price") > 10)``.

        Args:
            rows: Rows in any order, or a mask: whether to select each row, bool of shape (N,).

        Raises:
            IndexError: If a row is out of range, or a mask does not have one value for each row.
            UsageError: If ``rows`` are texts.
        """
        places = np.ma.filled(rows, False) if np.ma.isMaskedArray(rows) else as_array(rows)
        if places.dtype.kind == "U":
            raise UsageError(
                f"select({quoted(rows)}): rows are numbers or a mask",
                remedy='Compare a column with a value, as in select(dataset.column("label") == '
                'dataset.class_to_idx["cat"])',
            )
        if places.dtype == np.bool_:
            if places.shape != (len(self),):
                raise IndexError(
                    f"the mask has the shape {places.shape}; this dataset has {len(self)} rows"
                )
            places = np.flatnonzero(places)
        epoch = EpochCell()
        if (current := self._epoch.get()) is not None:
            epoch.set(*current)
        chosen = copy.copy(self)
        chosen.selected = self._stored(places)
        chosen._epoch = epoch
        return chosen

    def _stored(self, rows: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the stored rows of ``rows``."""
        if self.selected is None:
            return self._shards.resolve_rows(rows)
        return self.selected[
            resolve_rows(rows, len(self), f"this selection of {self._shards.place}")
        ]

    def with_decode(self: _Self, op: ImageOp) -> _Self:
        """Return this dataset with ``decode=op``; both have the same epoch.

        Raises:
            UsageError: If the dataset sets ``decode`` itself, or reads no images.
        """
        if self.decode not in ("pil", "torch"):
            raise UsageError(
                "views= and Buckets set the operation of images, and the dataset has "
                f"{setting('decode', self.decode)} too",
                remedy=f"open it without {setting('decode')}",
            )
        if not any(kind.is_picture for kind in self._kinds.values()):
            raise UsageError(
                f"views= and Buckets set an operation for images, and the dataset reads none: "
                f"fields= is {self.fields}"
            )
        other = copy.copy(self)
        vars(other).pop("_followers", None)
        other.decode = op
        return other

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """Set the epoch, so that random operations depend on (seed, epoch, view, row) only.

        This reaches persistent workers too. A shardkit loader calls it itself; with a plain
        ``DataLoader``, call it before each epoch, as for ``DistributedSampler``. Without it, random
        operations follow PyTorch's global generator.

        Args:
            epoch: An integer from 0 on.
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

    @property
    def lookahead(self) -> int:
        """Samples to `announce` before they are read: 0 unless they come from an object store."""
        return self._shards.files.lookahead

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Issue readahead for the images of ``rows``, and return without waiting.

        Of a dataset in an object store, fetch their shards into the cache.

        Args:
            rows: Rows, from 0 on; int64 of shape (N,).
        """
        for name in self.fields:
            if self._kinds[name].stored_apart:
                self._shards.announce(self._stored(rows), name)

    def __repr__(self) -> str:
        more = f", view={self.view}" if self.view else ""
        what = f"{len(self)} images, {len(self.classes)} classes"
        if self._layout != PAIR:
            more += f", fields={self.fields}"
            more += ", as_dict=True" if self._layout.as_dict else ""
            what = f"{len(self)} rows"
        return (
            f"{type(self).__name__}({self._shards.place!r}, decode={self.decode!r}{more}): {what}, "
            f"{self.manifest.format}"
        )

    def describe_row(self, row: int) -> str:
        """Return the name of a sample in errors: its key, stored row and source file."""
        return describe_row(self._shards, int(self._stored([row])[0]))

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields of a sample, in their order."""
        return self._layout.names

    @property
    def schema(self) -> Schema:
        """All fields of the dataset, by name."""
        return self._shards.schema

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a small field in all rows, from the index alone.

        Args:
            name: A number, label, labels, text, JSON, boxes or keypoints.

        Returns:
            One element for each row: a masked array where rows lack the number or label, and an
            array of objects, None where a row has no value, for the other kinds.

        Raises:
            UsageError: If there is no such field, or its values are bytes in the records.
        """
        field = _require_field(self.schema, name, self._shards.place)
        if field.type.stored_apart:
            raise UsageError(
                f"{name!r} is a field of kind {field.kind}, whose values are in the records",
                remedy=f"read them with fields=({name!r},)",
            )
        values = self._shards.column(name)
        return values if self.selected is None else values[self.selected]

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each row has a field, from the index alone: bool of shape (N,).

        Raises:
            UsageError: If there is no such field.
        """
        _require_field(self.schema, name, self._shards.place)
        present = self._shards.present(name)
        return present if self.selected is None else present[self.selected]

    @property
    def path(self) -> Path:
        """The dataset's directory."""
        return self._shards.directory

    @property
    def shard_paths(self) -> list[Path]:
        """The shards: files in `path`, or the archives of an attached dataset."""
        return [self._shards.files.path(shard) for shard in range(len(self.manifest.shards))]

    @property
    def manifest(self) -> Manifest:
        """Description of the dataset and of its conversion."""
        return self._shards.manifest

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
        return self._shards.labels if self.selected is None else self._shards.labels[self.selected]

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each row, as in ``ImageFolder``; a new list on each access."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))

    def sample_sizes(self, name: str) -> list[tuple[int, int]]:
        """Return the sizes of all samples of an image field, from the index alone.

        Args:
            name: The field; its ``decode`` does not draw random numbers.

        Returns:
            Height and width, each size once, ascending.
        """
        entries = self._shards.entries_of(name).read(self._stored(np.arange(len(self))))
        stored = np.unique(np.stack([entries["height"], entries["width"]], axis=1), axis=0).tolist()
        decode = self._decode_of(name)
        if not isinstance(decode, ImageOp):
            return [(height, width) for height, width in stored]
        return sorted({decode.crop(width, height, Draws(0, 0)).size for height, width in stored})

    def stored_sizes(self, name: str = IMAGE) -> npt.NDArray[np.int64]:
        """Return the size of each row's image from the index: shape (N, 2), height and width.

        Both are 0 where a row lacks the image, or its header was not read.
        """
        sizes = np.empty((len(self), 2), np.int64)
        for start in range(0, len(self), _ENTRIES_AT_ONCE):
            rows = np.arange(start, min(start + _ENTRIES_AT_ONCE, len(self)))
            entries = self._shards.entries_of(name).read(self._stored(rows))
            sizes[rows, 0], sizes[rows, 1] = entries["height"], entries["width"]
        return sizes

    def mean_pixels(self, rows: int, name: str = IMAGE) -> int:
        """Return the mean number of pixels of the first ``rows`` images of a field."""
        first = self._stored(np.arange(min(rows, len(self))))
        sizes = self._shards.entries_of(name).read(first)
        return int((sizes["width"].astype(np.int64) * sizes["height"]).mean()) if len(sizes) else 0

    def stored_bytes(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the stored bytes of each row, of the fields that are read; int64 of shape (N,)."""
        places = self._stored(rows)
        total = np.zeros(len(places), np.int64)
        for name in self.fields:
            if self._kinds[name].stored_apart:
                total += self._shards.entries_of(name).read(places)["length"]
        return total

    def sample_bytes(self, rows: int) -> int:
        """Return the estimated bytes of a sample, given the mean size of the first ``rows`` images.

        A transform is assumed to return float32 of the same number of pixels.
        """
        total = 0
        frames = self._reach.frames if self._reach is not None else lambda _: 1
        joint = {name for names in self._joint_functions() for name in names}
        for name in self.fields:
            kind = self._kinds[name]
            if kind.is_picture:
                decode = self._decode_of(name)
                fixed = decode.fixed_size if isinstance(decode, ImageOp) else None
                pixels = fixed[0] * fixed[1] if fixed else self.mean_pixels(rows, name)
                values = pixels * (1 if kind.follows else self.schema[name].image_type.bytes)
                plain = self._function(name) is None and name not in joint
                total += values * (1 if plain else 4) * frames(name)
            elif name in self.schema and self.schema[name].is_uniform:
                total += self.schema[name].bytes * frames(name)
        return total

    @property
    def stores_samples(self) -> bool:
        """Whether samples are stored as they are, or as raw pixels: nothing has to be decoded."""
        pictures = any(kind.is_picture for kind in self._kinds.values())
        return not pictures or self.manifest.raw_shape is not None

    @property
    def keys(self) -> Sequence[str]:
        """The key of each row."""
        return self._texts(self._shards.keys)

    @property
    def paths(self) -> Sequence[str]:
        """The path of each row's source file, relative to the source."""
        return self._texts(self._shards.paths)

    def _texts(self, stored: Sequence[str]) -> Sequence[str]:
        return stored if self.selected is None else _Taken(stored, self.selected)

    def functions(self) -> dict[str, Function]:
        """Return the transforms, by option or field."""
        transform = self.transform
        if transform is None and self.target_transform is None:
            return {}
        by_name: dict[str, Any] = {"transform": transform}
        if isinstance(transform, Mapping):
            by_name = {", ".join(_names(key)): function for key, function in transform.items()}
        by_name["target_transform"] = self.target_transform
        return {name: function for name, function in by_name.items() if function is not None}

    def _function(self, name: str) -> Function | None:
        """Return the transform of a field, unless it applies to other fields too."""
        if self.transform is None and self.target_transform is None:
            return None
        if name == LABEL and self.target_transform is not None:
            return self.target_transform
        if isinstance(self.transform, Mapping):
            return self.transform.get(name)
        return self.transform if name == IMAGE else None

    def _joint_functions(self) -> dict[tuple[str, ...], Function]:
        """Return the transforms of several fields together."""
        if not isinstance(self.transform, Mapping):
            return {}
        return {key: function for key, function in self.transform.items() if isinstance(key, tuple)}

    @property
    def picture_decodes(self) -> dict[str, Decode]:
        """The type of the images of each field of images or masks."""
        return {n: self._decode_of(n) for n, kind in self._kinds.items() if kind.is_picture}

    def without_crops(self: _Self) -> tuple[_Self, dict[str, ImageOp]]:
        """Return this dataset with decoded images instead of random operations, and those."""
        decodes = self.picture_decodes
        ops = {n: op for n, op in decodes.items() if isinstance(op, ImageOp) and op.random}
        if not ops:
            return self, ops
        other = copy.copy(self)
        other.decode = decodes | dict.fromkeys(ops, "torch")
        return other, ops

    def _decodes(self) -> list[Decode]:
        return list(self.decode.values()) if isinstance(self.decode, Mapping) else [self.decode]

    def _decode_of(self, name: str) -> Decode:
        """Return the type of the images of a field."""
        decode = self.decode
        if isinstance(decode, (str, ImageOp)):
            return decode
        return decode.get(name, "pil")

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        """The kind of each field that is read; labels of an unlabeled dataset are -1."""
        schema = self.schema
        return {
            name: schema[name].type if name in schema else get_kind(LABEL) for name in self.fields
        }

    @cached_property
    def _leading(self) -> str | None:
        """The images that share their crops with other images, masks, boxes and keypoints."""
        pictures = [name for name in self.fields if self._kinds[name].is_picture]
        return IMAGE if IMAGE in self.schema else next(iter(pictures), None)

    def _read(self, views: list[tuple[ShardDataset, BatchRows]], name: str) -> list[Values]:
        """Return the values of a field in each view of a batch, given the view's dataset."""
        kind = self._kinds[name]
        if self.windows is not None and name in self.windows.fields:
            return [dataset._read_window(batch, name, kind) for dataset, batch in views]
        if not kind.is_picture:
            return [dataset._read_value(batch, name, kind) for dataset, batch in views]
        readers = [dataset._reader(batch, name, kind) for dataset, batch in views]
        return type(readers[0]).read_views(readers)

    def _read_window(self, batch: BatchRows, name: str, kind: Kind) -> Values:
        """Return the windows of a field, transformed."""
        assert self._reach is not None
        plain = copy.copy(self)  # reads frames as rows, without transforms
        plain.windows = plain.transform = plain.target_transform = None
        op = self._decode_of(name if kind.is_picture else self._leading or name)
        moves = kind.is_picture or kind.follows or name in self.follow
        drawn = isinstance(op, ImageOp) and op.random and moves
        values = self._reach.read(
            name, batch, lambda frames: plain._read([(plain, frames)], name)[0], drawn=drawn
        )
        function = self._function(name)
        if function is None:
            return values
        numbered = enumerate(values.values)
        return Values([batch.transformed(name, function, value, n) for n, value in numbered])

    def _reader(self, batch: BatchRows, name: str, kind: Kind) -> ImageReader:
        """Return a reader of images or masks."""
        if name in self._followers:
            require_one_size(batch, self._leading or name, name)
        reader = MaskReader if kind.follows else ImageReader
        return reader(batch, name, self._decode_of(name), self._function(name), self._decoding)

    @cached_property
    def _followers(self) -> frozenset[str]:
        """The images and masks that are cropped like the leading images."""
        if not isinstance(self.decode, ImageOp):
            return frozenset()
        pictures = {name for name, kind in self._kinds.items() if kind.is_picture}
        return frozenset(pictures - {self._leading})

    def _read_value(self, batch: BatchRows, name: str, kind: Kind) -> Values:
        """Return the values of a field without pixels, transformed."""
        values = self._stored_value(batch, name, kind)
        function = self._function(name)
        if function is None:
            return values
        numbered = enumerate(values.values)
        return Values([batch.transformed(name, function, value, n) for n, value in numbered])

    def _stored_value(self, batch: BatchRows, name: str, kind: Kind) -> Values:
        if name == LABEL:
            labels = batch.labels()
            return Values(labels.tolist(), torch.from_numpy(labels))
        decode = "pil" if self._leading is None else self._decode_of(self._leading)
        op = decode if isinstance(decode, ImageOp) else None
        if not kind.stored_apart:
            return read_column(batch, name, op, self._leading)
        values = read_apart(batch, name, self.schema[name])
        if op is None or self._leading is None or name not in self.follow:
            return values
        return move_arrays(batch, name, values, op, self._leading)

    @cached_property
    def _decoding(self) -> Decoding:
        color = self.manifest.recipe.get("background", WHITE)
        if not _is_color(color):
            raise CorruptDataset(
                f"{self.path / MANIFEST_NAME} is damaged: background {color!r} is not an RGB color"
            )
        red, green, blue = color
        return Decoding((red, green, blue))


def _names(key: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that a key of ``transform`` names."""
    return key if isinstance(key, tuple) else (key,)


def _transformed_together(
    batch: BatchRows, columns: Mapping[str, Values], names: tuple[str, ...], function: Function
) -> dict[str, Values]:
    """Return the values of several fields after the transform of all of them."""
    what = ", ".join(names)
    results = []
    for number, values in enumerate(zip(*(columns[name].values for name in names), strict=True)):
        result = batch.apply(what, function, values, number)
        if not isinstance(result, (tuple, list)) or len(result) != len(names):
            raise TransformFailed(
                f"the transform of {what} must return a tuple of {len(names)} values, in this "
                f"order; it returned {type(result).__name__} for {batch.describe(number)}"
            )
        results.append(result)
    return {name: Values([row[place] for row in results]) for place, name in enumerate(names)}


class _Taken(Sequence[str]):
    """The texts of some rows."""

    def __init__(self, texts: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        self._texts = texts
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._texts[place] for place in self._rows[row].tolist()]
        return self._texts[int(self._rows[row])]


def _layout(schema: Schema, fields: Sequence[str] | None, as_dict: bool, place: str) -> Layout:
    """Return the fields of samples."""
    if fields is None:
        names = PAIR.names if IMAGE in schema else tuple(schema)
    else:
        names = tuple(fields)
        for name in names:
            _require_field(schema, name, place)
        if not names or len(set(names)) != len(names):
            raise UsageError(f"fields={names} must name one field or more, each once")
    if names == PAIR.names and not as_dict:
        return PAIR
    return Layout(names, as_dict, frozenset(name for name in names if _is_listed(schema, name)))


def _following(schema: Schema, read: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the fields of arrays that follow the image."""
    for name in names:
        if name not in read:
            raise UsageError(f"follow= has {name!r}, which is not read: fields= is {tuple(read)}")
        field = schema[name]
        movable = field.dtype in (None, BFLOAT16) or field.values.kind in "biuf"
        if field.kind != "array" or not movable or len(field.shape or range(3)) != 3:
            raise UsageError(
                f"follow= has {name!r}, {field}: only arrays of numbers of shape (channels, "
                "height, width) follow an image; masks, boxes and keypoints do so anyway"
            )
    return tuple(names)


def _is_listed(schema: Schema, name: str) -> bool:
    field = schema.get(name)
    if field is None:
        return False
    return not field.type.is_picture and field.type.is_listed(field)


def _require_field(schema: Schema, name: str, place: str) -> Field:
    """Return a field of the schema."""
    if name not in schema:
        fields = name_list(f"{other} ({field.kind})" for other, field in schema.items())
        raise UsageError(f"{place} has no field {quoted(name)}; it has {fields}")
    return schema[name]


def _require_known(option: str, names: Iterable[str], choices: Sequence[str]) -> None:
    for name in names:
        if name not in choices:
            raise UsageError(
                f"{option}={{{name!r}: ...}}",
                remedy=f"choose from {name_list(choices) or 'no field'}, of the fields that are "
                "read",
            )


def _is_color(value: Any) -> bool:
    """Return whether a value of the manifest is an RGB color."""
    parts = value if isinstance(value, list | tuple) else ()
    return len(parts) == 3 and all(type(part) is int and 0 <= part <= 255 for part in parts)


class LMDBDataset(ShardDataset):
    """`ShardDataset` for LMDB files."""

    format = "lmdb"


class HDF5Dataset(ShardDataset):
    """`ShardDataset` for HDF5 files."""

    format = "hdf5"


class TarDataset(ShardDataset):
    """`ShardDataset` for WebDataset tar files."""

    format = "webdataset"


@takes(ReaderOptions)
def open_dataset(options: ReaderOptions, path: str | PathLike[str]) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Args:
        path: The dataset's directory, the directory of its splits, or its URL.

    Returns:
        A dataset of the class of its format, or a `ShardDataset` for a format of another package.

    Raises:
        UsageError: If there is no dataset at ``path``, an option is unknown, or an object store
            denies access.
        CorruptDataset: If the dataset's manifest is damaged.
        ShardkitError: If an object store cannot be read.
    """
    shards = options.open(path)
    kinds = {kind.format: kind for kind in (LMDBDataset, HDF5Dataset, TarDataset)}
    kind = kinds.get(shards.manifest.format, ShardDataset)
    dataset = kind.__new__(kind)  # not `kind(path)`, which would open the shards again
    dataset._set_up(options, shards)
    return dataset
