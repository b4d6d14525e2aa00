"""Map-style datasets: from a row to its image and label, as in torchvision's ``ImageFolder``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import mul
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from shardkit.codecs.image import WHITE, Pixels, WrongSizeError
from shardkit.codecs.turbo import available
from shardkit.dataset.decode import Decoding, decode_stored, require_stated_size
from shardkit.dataset.filling import Pieces, fill
from shardkit.dataset.manifest import MANIFEST_NAME, Manifest
from shardkit.dataset.shardset import LocatedRows, ShardSet
from shardkit.errors import BadImage, CorruptDataset, TransformFailed, UsageError
from shardkit.sampling.order import check_integer
from shardkit.system import native
from shardkit.system.scratch import scratch
from shardkit.torch.data.collate import BatchView, Sample
from shardkit.torch.data.ops import ImageOp, Piece, compiled_pieces, numbered_pieces
from shardkit.torch.data.read_context import Context, EpochCell, new_block, raised

DECODES = ("pil", "numpy", "torch", "bytes")
JPEG_DECODING = ("exact", "fast")

_INFLATION = 64
"""Plausible bytes of pixels per stored byte: a JPEG photograph has 10 to 30."""
_INFLATED_BYTES = 1 << 20
"""Plausible bytes of pixels for any image."""


class ShardDataset(Dataset[Sample]):
    """The images and labels of a dataset of any format.

    It opens shards on first use and holds only its path and options. So it is cheap to pickle, and
    works in threads and under fork, spawn and forkserver.

    ``dataset[row]`` returns ``(image, label)``; the label is an int, -1 in an unlabeled dataset.
    Negative rows count from the end. A list, an array or a slice of rows returns a `BatchView`, as
    ``__getitems__`` does for PyTorch's ``DataLoader``.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    format: str | None = None
    """The only format that a subclass opens; None opens any."""

    def __init__(  # noqa: PLR0913 - the arguments of ImageFolder, and those of decoding
        self,
        path: str | PathLike[str],
        transform: Callable[[Any], Any] | ImageOp | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: str | ImageOp = "pil",
        *,
        jpeg: str = "exact",
        verify: bool | None = None,
        view: int = 0,
        split: str | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory, or the directory of its splits.
            transform: Applied to each image. An `ImageOp` works as if passed as ``decode``.
            target_transform: Applied to each label.
            decode: Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape
                (height, width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last
                memory, ``bytes`` for the stored bytes. An `ImageOp`, such as
                ``RandomResizedCrop(224)``, crops while decoding and returns images as ``torch``
                does.
            jpeg: ``exact`` decodes JPEGs to Pillow's pixels. ``fast`` uses libjpeg's fast inverse
                DCT for JPEGs of quality 90 or lower: about 4% faster, and off by less than 1.5
                levels of 255 on average per photograph.
            verify: Whether each read compares the record's checksum. None does so for encoded
                images, which costs about 3%, but not for raw pixels.
            view: Number of this view, from 0 on. Datasets over the same images draw different
                random numbers if their views differ, such as two crops of each image.
            split: Name of a split, such as ``train``: the folder of that name in ``path``.
        """
        if split is not None:
            path = Path(path) / split
        if isinstance(transform, ImageOp):
            if decode not in ("pil", "torch"):
                raise UsageError(
                    f"transform={transform!r} decodes images itself, and decode={decode!r} is set "
                    "too: leave one of them out"
                )
            decode, transform = transform, None
        if not isinstance(decode, ImageOp) and decode not in DECODES:
            raise UsageError(
                f"decode={decode!r} is unknown; choose from {', '.join(DECODES)}, and operations "
                "such as shardkit.CenterCrop(224)"
            )
        if jpeg not in JPEG_DECODING:
            raise UsageError(f"jpeg={jpeg!r} is unknown; choose from {', '.join(JPEG_DECODING)}")
        functions: dict[str, Any] = {"transform": transform, "target_transform": target_transform}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise UsageError(f"{name}={function!r} is not a function")
        self.transform: Callable[[Any], Any] | None = transform
        self.target_transform = target_transform
        self.decode = decode
        self.jpeg = jpeg
        self._shards = ShardSet(Path(path), verify=verify)
        self.view = check_integer("view", view, 0)
        self._epoch = EpochCell()
        if isinstance(decode, ImageOp):
            available()  # report a wrong setting now, not with the first batch
        if self.format not in (None, self.manifest.format):
            raise UsageError(
                f"{path} has the format {self.manifest.format!r}; {type(self).__name__} reads "
                f"{self.format!r}. shardkit.open_dataset opens any format."
            )

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, row: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(row, slice):
            return self.__getitems__(range(*row.indices(len(self))))
        if np.ndim(row):
            return self.__getitems__(cast(Sequence[int], row))
        return self.__getitems__([cast(int, row)])[0]

    def __getitems__(self, rows: Sequence[int] | npt.NDArray[Any]) -> BatchView:
        """Return the samples of ``rows``, in the same order, including duplicates.

        Raises:
            IndexError: If a row is out of range.
            CorruptRecord: If the bytes of an image changed; it is never skipped or replaced.
            CorruptShard: If a shard is missing or truncated.
            BadImage: If an image cannot be decoded (it was converted with ``--check none``).
        """
        positions = self._shards.resolve_rows(rows)
        found = self._shards.find(positions)
        images = _Images(found, Context(self._epoch, self.view, rows), self.decode)
        kept = images.context.globals_kept(self.transform, self.target_transform)
        with kept, scratch(found.longest) as images.buffer:
            self._check_sizes(images)
            labels = self._labels(images)
            if images.size is not None and self.transform is None:
                return self._block(images, images.size, labels)
            return BatchView([self._image(images, number) for number in range(len(labels))], labels)

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
        stated = self._epoch.get()
        return None if stated is None else stated[0]

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Issue readahead for the images of ``rows``, and return without waiting.

        Args:
            rows: Rows, from 0 on; int64 of shape (N,).
        """
        self._shards.announce(rows)

    def __repr__(self) -> str:
        more = ", jpeg='fast'" if self.jpeg == "fast" else ""
        more += f", view={self.view}" if self.view else ""
        return (
            f"{type(self).__name__}({str(self.path)!r}, decode={self.decode!r}{more}): "
            f"{len(self)} images, {len(self.classes)} classes, {self.manifest.format}"
        )

    def describe_row(self, row: int) -> str:
        """Return the name of a sample in errors: its key, row and source file."""
        return f"record {self.keys[row]!r} (row {row}, from {self.paths[row]!r}) of {self.path}"

    @property
    def path(self) -> Path:
        """The dataset's directory."""
        return self._shards.directory

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
        return self._shards.labels

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each row, as in ``ImageFolder``; a new list on each access."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))

    imgs = samples

    def mean_pixels(self, rows: int) -> int:
        """Return the mean number of pixels of the first ``rows`` stored images."""
        sizes = self._shards.entries.read(np.arange(min(rows, len(self))))
        return int((sizes["width"].astype(np.int64) * sizes["height"]).mean()) if len(sizes) else 0

    def stored_bytes(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the stored size in bytes of each row; both int64 of shape (N,)."""
        entries = self._shards.entries.read(rows)
        return entries["length"].astype(np.int64)

    @property
    def keys(self) -> Sequence[str]:
        """The key of each row."""
        return self._shards.keys

    @property
    def paths(self) -> Sequence[str]:
        """The path of each row's source file, relative to the source."""
        return self._shards.paths

    @cached_property
    def _decoding(self) -> Decoding:
        color = self.manifest.recipe.get("background", WHITE)
        if not _is_color(color):
            raise CorruptDataset(
                f"{self.path / MANIFEST_NAME} is damaged: background {color!r} is not an RGB color"
            )
        red, green, blue = color
        return Decoding((red, green, blue), fast=self.jpeg == "fast")

    def _check_sizes(self, images: _Images) -> None:
        """Compare implausible sizes in the index with the images, before allocating memory.

        The decoder compares all other sizes later.
        """
        for number in images.inflated():
            stored = images.found.read(number, images.buffer)
            with self._naming_record(images, number):
                require_stated_size(stored)

    def _block(self, images: _Images, size: tuple[int, int], labels: list[Any]) -> BatchView:
        """Return a batch of images of one size, decoded directly into one block."""
        block = new_block((len(labels), *size, 3), shared=len(labels) > 1)
        slots = block.numpy()
        for number in self._left(images, slots):
            self._pixels(images, number, slots[number])
        targets = (
            torch.from_numpy(images.found.targets()) if self.target_transform is None else None
        )
        if self.decode == "numpy":
            return BatchView(slots, labels, block, targets)
        block = block.permute(0, 3, 1, 2)
        return BatchView(block, labels, block, targets)

    def _left(self, images: _Images, slots: Pixels) -> Sequence[int]:
        """Fill ``slots`` with the compiled module, and return the positions that it left."""
        if native.module() is None:
            return range(len(slots))
        pieces = images.numbered
        if isinstance(self.decode, ImageOp) and pieces is None:
            pieces = compiled_pieces(self.decode, images.pieces)
            if pieces is None:
                return range(len(slots))
        return fill(images.found, slots, self._decoding, pieces, images.context.mark)

    def _image(self, images: _Images, number: int) -> Any:
        """Return one decoded and transformed image.

        The transform runs right after decoding, while the image is in the CPU cache.
        """
        image: Any
        if self.decode == "bytes":
            image = bytes(images.found.read(number, images.buffer).data)
        else:
            image = self._pixels(images, number)
        if self.decode == "pil":
            image = Image.fromarray(image)
        elif self.decode == "torch" or isinstance(self.decode, ImageOp):
            image = torch.from_numpy(image).permute(2, 0, 1)
        if self.transform is None:
            return image
        row = images.found.rows[number]
        try:
            return images.context.apply(self.transform, image, images.samples[number])
        except (Exception, SystemExit) as error:  # a worker must not exit silently
            raise TransformFailed(
                f"the transform failed on {self.describe_row(row)}: {raised(error)}"
            ) from error

    def _labels(self, images: _Images) -> list[Any]:
        labels: list[Any] = images.found.labels
        if self.target_transform is None:
            return labels
        made = []
        numbered = zip(labels, images.found.rows, images.samples, strict=True)
        for label, row, sample in numbered:
            images.context.note(row)
            try:
                made.append(images.context.apply(self.target_transform, label, sample, label=True))
            except (Exception, SystemExit) as error:
                raise TransformFailed(
                    f"the target_transform failed on label {label!r} of {self.describe_row(row)}: "
                    f"{raised(error)}"
                ) from error
        return made

    def _pixels(self, images: _Images, number: int, out: Pixels | None = None) -> Pixels:
        found, row = images.found, images.found.rows[number]
        images.context.note(row)
        if out is not None and not images.pieces and images.is_raw(number, out.nbytes):
            found.read(number, out.reshape(-1).data)
            return out
        stored = found.read(number, images.buffer)
        with self._naming_record(images, number):
            if isinstance(self.decode, ImageOp):
                return self.decode.render(stored, images.pieces[number], self._decoding, out)
            return decode_stored(stored, self._decoding, out=out)

    @contextlib.contextmanager
    def _naming_record(self, images: _Images, number: int) -> Iterator[None]:
        """Add the record's name to errors of its image."""
        try:
            yield
        except WrongSizeError as error:
            raise images.found.corrupt(number, str(error)) from error
        except BadImage as error:
            raise BadImage(f"{self.describe_row(images.found.rows[number])}: {error}") from error


def _is_color(value: Any) -> bool:
    """Return whether a value of the manifest is an RGB color."""
    parts = value if isinstance(value, list | tuple) else ()
    return len(parts) == 3 and all(type(part) is int and 0 <= part <= 255 for part in parts)


class _Images:
    """The images of a batch, and the piece of each that becomes a sample."""

    def __init__(self, found: LocatedRows, context: Context, decode: str | ImageOp) -> None:
        self.found = found
        self.context = context
        self._decode = decode
        self.buffer = memoryview(b"")
        """Scratch memory for the bytes of one image: at least `LocatedRows.longest`."""
        self.sized = decode not in ("pil", "bytes")
        """Whether the sizes in the index determine how much memory is allocated."""

    @cached_property
    def samples(self) -> list[int]:
        """The sample number of each image."""
        return self.context.samples(self.found.rows)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The piece of each image; none if the whole images are samples."""
        if not isinstance(self._decode, ImageOp):
            return []
        found, draws = self.found, lambda place: self.context.draws(self.samples[place])
        return self._decode.pieces(found.widths, found.heights, draws)

    @cached_property
    def numbered(self) -> Pieces | None:
        """The `pieces` for the compiled module, if it exists and they can be made all at once."""
        if not isinstance(self._decode, ImageOp) or self.found.survey is None:
            return None
        return numbered_pieces(self._decode, *self.found.sizes())

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all samples if they fit one block, else None."""
        survey, sizes = self.found.survey, set[tuple[int, int]]()
        if isinstance(self._decode, ImageOp):
            if self.numbered is not None:
                return self._decode.fixed_size
            sizes = {piece.size for piece in self.pieces}
        elif self._decode in ("numpy", "torch"):
            if survey is not None and survey.width:
                return survey.height, survey.width
            sizes = set(zip(self.found.heights, self.found.widths, strict=True))
        return sizes.pop() if len(sizes) == 1 else None

    def inflated(self) -> Iterator[int]:
        """Yield positions of encoded images with implausibly many pixels for their bytes."""
        found = self.found
        if not self.sized or self._all_small():
            return
        sizes = zip(found.widths, found.heights, strict=True)
        for number, (width, height) in enumerate(sizes):
            pixels = width * height
            if self.pieces:
                piece = self.pieces[number]
                pixels = max(pixels, math.prod(piece.size), math.prod(piece.whole or (0,)))
            likely = max(_INFLATED_BYTES, _INFLATION * found.lengths[number])
            if 3 * pixels > likely and found.fields[number] != "raw":
                yield number

    def _all_small(self) -> bool:
        """Return whether no image or sample exceeds `_INFLATED_BYTES`, which is the usual case.

        It takes a few calls for a batch, where `inflated` takes a few for each image.
        """
        found, survey = self.found, self.found.survey
        if self.size is None or not len(found):
            return False
        if self.numbered is not None:
            numbers = self.numbered.numbers.astype(np.int64)
            whole = int((numbers[:, 5] * numbers[:, 6]).max())
        elif any(piece.whole for piece in self.pieces):
            return False
        else:
            whole = 0
        most: int = (
            max(map(mul, found.widths, found.heights)) if survey is None else survey.most_pixels
        )
        return 3 * max(most, whole, math.prod(self.size)) <= _INFLATED_BYTES

    def is_raw(self, number: int, size: int) -> bool:
        """Return whether an image is stored as ``size`` bytes of pixels."""
        return self.found.fields[number] == "raw" and self.found.lengths[number] == size


class LMDBDataset(ShardDataset):
    """`ShardDataset` for LMDB files."""

    format = "lmdb"


class HDF5Dataset(ShardDataset):
    """`ShardDataset` for HDF5 files."""

    format = "hdf5"


class TarDataset(ShardDataset):
    """`ShardDataset` for WebDataset tar files."""

    format = "webdataset"


def open_dataset(  # noqa: PLR0913 - the arguments of ShardDataset
    path: str | PathLike[str],
    transform: Callable[[Any], Any] | ImageOp | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    decode: str | ImageOp = "pil",
    *,
    jpeg: str = "exact",
    verify: bool | None = None,
    view: int = 0,
    split: str | None = None,
) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Args:
        path: The dataset's directory, or the directory of its splits.
        transform: Applied to each image.
        target_transform: Applied to each label.
        decode: Type of the images.
        jpeg: ``exact`` or ``fast``.
        verify: Whether each read compares the record's checksum.
        view: Number of this view.
        split: Name of a split, such as ``train``: the folder of that name in ``path``.

    Returns:
        A dataset of the class of its format, or a `ShardDataset` for a format of another package.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    dataset = ShardDataset(
        path,
        transform,
        target_transform,
        decode,
        jpeg=jpeg,
        verify=verify,
        view=view,
        split=split,
    )
    kinds = {kind.format: kind for kind in (LMDBDataset, HDF5Dataset, TarDataset)}
    # They differ in their names only; creating another would read the manifest twice.
    dataset.__class__ = kinds.get(dataset.manifest.format, ShardDataset)
    return dataset
