"""Map-style datasets: a row to its image and label, as torchvision's ``ImageFolder`` does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from shardkit.codecs.image import WHITE, Pixels
from shardkit.codecs.turbo import available
from shardkit.decode import Decoding, decode_stored
from shardkit.errors import BadImage, CorruptDataset, TransformFailed, UsageError
from shardkit.manifest import MANIFEST_NAME, Manifest
from shardkit.scratch import scratch
from shardkit.shardset import Found, ShardSet
from shardkit.torch.collate import BatchView, Sample
from shardkit.torch.ops import ImageOp, Piece
from shardkit.torch.reading import Context, EpochCell, new_block, raised

DECODES = ("pil", "numpy", "torch", "bytes")
JPEG_DECODING = ("exact", "fast")


class ShardDataset(Dataset[Sample]):
    """The images and labels of a dataset of any format.

    It opens shards when they are read and carries only its path and options: it is cheap to pickle,
    works under fork, spawn and forkserver, in threads, and any number of times in one process.

    ``dataset[row]`` gives ``(image, label)``; a label is an int, -1 in an unlabelled dataset.
    Negative rows count from the end. A list, an array or a slice of rows gives a `BatchView`, as
    ``__getitems__`` does for PyTorch's DataLoader: same order, duplicates and all.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """

    format: str | None = None
    """The one format that a subclass opens; None opens any."""

    def __init__(  # noqa: PLR0913 - what ImageFolder takes, and what decides on decoding
        self,
        path: str | PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: str | ImageOp = "pil",
        *,
        jpeg: str = "exact",
        verify: bool | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory.
            transform: Applied to each image.
            target_transform: Applied to each label.
            decode: What an image is: ``pil`` an RGB image, ``numpy`` uint8 of shape (height, width,
                3), ``torch`` uint8 of shape (3, height, width) in channels-last memory, ``bytes``
                the stored bytes; or an `ImageOp`, such as ``RandomResizedCrop(224)``: what it
                makes of the image, as ``torch`` gives it.
            jpeg: ``exact`` decodes JPEGs to the very pixels that Pillow gives; ``fast`` takes
                libjpeg's fast inverse DCT and upsampling: sooner by a tenth, and off by a level or
                two in the mean, at sharp edges of colour by up to some 60.
            verify: Whether each read compares the record's checksum; None does so for encoded
                images (it costs some 3 %) and not for raw pixels.
        """
        if not isinstance(decode, ImageOp) and decode not in DECODES:
            raise UsageError(
                f"decode={decode!r} is unknown; known are {', '.join(DECODES)}, and operations "
                "such as shardkit.CenterCrop(224)"
            )
        if jpeg not in JPEG_DECODING:
            raise UsageError(f"jpeg={jpeg!r} is unknown; known are {', '.join(JPEG_DECODING)}")
        functions: dict[str, Any] = {"transform": transform, "target_transform": target_transform}
        for name, function in functions.items():
            if function is not None and not callable(function):
                hint = "; pass it as decode=" if isinstance(function, ImageOp) else ""
                raise UsageError(f"{name}={function!r} is not a function{hint}")
        self.transform = transform
        self.target_transform = target_transform
        self.decode = decode
        self.jpeg = jpeg
        self._shards = ShardSet(Path(path), verify=verify)
        self._epoch = EpochCell()
        if isinstance(decode, ImageOp):
            available()  # a wrong setting shows here, and not with the first batch
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
        """Return the samples of ``rows``: same order, duplicates and all.

        Raises:
            IndexError: If a row is outside of the dataset.
            CorruptRecord: If an image is not what was written; it is never skipped or replaced.
            CorruptShard: If a shard is missing or cut.
            BadImage: If an image cannot be decoded (it was converted with ``--check none``).
        """
        positions = self._shards.normalise(rows)
        found = self._shards.find(positions)
        images = _Images(found, Context(self._epoch), self.decode)
        with images.context.globals_kept(self.transform, self.target_transform), images.lent():
            labels = self._labels(images)
            if images.size is not None and self.transform is None:
                return self._block(images, images.size, labels)
            return BatchView([self._image(images, number) for number in range(len(labels))], labels)

    def set_epoch(self, epoch: int, seed: int = 0) -> None:
        """State the epoch, so that random operations draw from (seed, epoch, row) alone.

        It reaches persistent workers too. A loader of shardkit does it by itself; with a plain
        DataLoader call it before each epoch, as for ``DistributedSampler``. Until it is called,
        random operations follow PyTorch's global generator.

        Args:
            epoch: From 0 on.
            seed: Any integer of 64 bits.

        Raises:
            UsageError: If ``epoch`` is no such number.
        """
        self._epoch.set(epoch, seed)

    @property
    def epoch(self) -> int | None:
        """The epoch that `set_epoch` stated, or None."""
        stated = self._epoch.get()
        return None if stated is None else stated[0]

    def announce(self, rows: npt.NDArray[np.int64]) -> None:
        """Have the kernel read the images of ``rows`` into its cache, and do not wait for it.

        Args:
            rows: From 0 on.
        """
        self._shards.announce(rows)

    def __repr__(self) -> str:
        fast = ", jpeg='fast'" if self.jpeg == "fast" else ""
        return (
            f"{type(self).__name__}({str(self.path)!r}, decode={self.decode!r}{fast}): "
            f"{len(self)} images, {len(self.classes)} classes, {self.manifest.format}"
        )

    def describe_row(self, row: int) -> str:
        """Return how errors call the sample at ``row``: its key, row and source file."""
        return f"record {self.keys[row]!r} (row {row}, from {self.paths[row]!r}) of {self.path}"

    @property
    def path(self) -> Path:
        """The dataset's directory."""
        return self._shards.directory

    @property
    def manifest(self) -> Manifest:
        """What the dataset is and how it was made."""
        return self._shards.manifest

    @cached_property
    def classes(self) -> list[str]:
        """Class names; a label is a position here. Empty for an unlabelled dataset."""
        return list(self.manifest.classes or ())

    @cached_property
    def class_to_idx(self) -> dict[str, int]:
        """Class name to label."""
        return {name: label for label, name in enumerate(self.classes)}

    @property
    def targets(self) -> npt.NDArray[np.int64]:
        """The label of each row, int64 of shape (N,), read-only, without ``target_transform``.

        Raises:
            CorruptDataset: If the index has labels other than the manifest counts.
        """
        return self._shards.labels

    @property
    def samples(self) -> list[tuple[str, int]]:
        """Path and label of each row, as ``ImageFolder`` has them; made anew at each access."""
        return list(zip(self.paths, self.targets.tolist(), strict=True))

    imgs = samples

    def mean_pixels(self, rows: int) -> int:
        """Return the mean number of pixels of the first ``rows`` images, as stored."""
        sizes = self._shards.entries.read(np.arange(min(rows, len(self))))
        return int((sizes["width"].astype(np.int64) * sizes["height"]).mean()) if len(sizes) else 0

    def stored_bytes(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the stored bytes of the images of some rows; both int64 of shape (N,)."""
        entries = self._shards.entries.read(rows)
        return entries["length"].astype(np.int64)

    @property
    def keys(self) -> Sequence[str]:
        """The key of each row."""
        return self._shards.keys

    @property
    def paths(self) -> Sequence[str]:
        """The path of each row's file, relative to the source."""
        return self._shards.paths

    @cached_property
    def _decoding(self) -> Decoding:
        colour = self.manifest.recipe.get("background", WHITE)
        if not _is_colour(colour):
            raise CorruptDataset(
                f"{self.path / MANIFEST_NAME} is damaged: {colour!r} is no colour of a background"
            )
        red, green, blue = colour
        return Decoding((red, green, blue), fast=self.jpeg == "fast")

    def _block(self, images: _Images, size: tuple[int, int], labels: list[Any]) -> BatchView:
        """Return a batch of images of one size, decoded straight into one block."""
        block = new_block((len(labels), *size, 3), shared=len(labels) > 1)
        slots = block.numpy()
        for number, slot in enumerate(slots):
            self._pixels(images, number, slot)
        if self.decode == "numpy":
            return BatchView(slots, labels, block)
        block = block.permute(0, 3, 1, 2)
        return BatchView(block, labels, block)

    def _image(self, images: _Images, number: int) -> Any:
        """Return one image as ``decode`` and ``transform`` ask for it.

        The transform follows at once: 64 decoded images that wait for it would leave the cache.
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
            return images.context.apply(self.transform, image, row)
        except (Exception, SystemExit) as error:  # a worker that exits leaves nobody to say so
            raise TransformFailed(
                f"the transform failed on {self.describe_row(row)}: {raised(error)}"
            ) from error

    def _labels(self, images: _Images) -> list[Any]:
        labels: list[Any] = images.found.labels
        if self.target_transform is None:
            return labels
        made = []
        for label, row in zip(labels, images.found.rows, strict=True):
            images.context.note(row)
            try:
                made.append(images.context.apply(self.target_transform, label, row, label=True))
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
        try:
            if isinstance(self.decode, ImageOp):
                return self.decode.render(stored, images.pieces[number], self._decoding, out)
            return decode_stored(stored, self._decoding, out=out)
        except BadImage as error:
            raise BadImage(f"{self.describe_row(row)}: {error}") from error


def _is_colour(value: Any) -> bool:
    """Tell whether what a manifest says is red, green and blue."""
    parts = value if isinstance(value, list | tuple) else ()
    return len(parts) == 3 and all(type(part) is int and 0 <= part <= 255 for part in parts)


class _Images:
    """The images of a batch, and what is to become of each."""

    def __init__(self, found: Found, context: Context, decode: str | ImageOp) -> None:
        self.found = found
        self.context = context
        self.pieces: list[Piece] = []
        self.buffer = memoryview(b"")
        """Where the bytes of one image after the other stand, within `lent`."""
        self.size: tuple[int, int] | None = None
        """Height and width of all samples, if they can be decoded into one block."""
        sizes: set[tuple[int, int]] = set()
        if isinstance(decode, ImageOp):
            self.pieces = decode.pieces(
                found.widths, found.heights, lambda position: context.draws(found.rows[position])
            )
            sizes = {piece.size for piece in self.pieces}
        elif decode in ("numpy", "torch"):
            sizes = set(zip(found.heights, found.widths, strict=True))
        if len(sizes) == 1:
            self.size = sizes.pop()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Have a `buffer` for the bytes of the longest image, until the end of the block."""
        with scratch(max(self.found.lengths, default=0)) as self.buffer:
            yield

    def is_raw(self, number: int, size: int) -> bool:
        """Tell whether an image is stored as its pixels, ``size`` bytes of them."""
        return self.found.fields[number] == "raw" and self.found.lengths[number] == size


class LMDBDataset(ShardDataset):
    """The images and labels of a dataset of LMDB files; see `ShardDataset`."""

    format = "lmdb"


class HDF5Dataset(ShardDataset):
    """The images and labels of a dataset of HDF5 files; see `ShardDataset`."""

    format = "hdf5"


class TarDataset(ShardDataset):
    """The images and labels of a dataset of WebDataset tar files; see `ShardDataset`."""

    format = "webdataset"


def open_dataset(  # noqa: PLR0913 - those of ShardDataset
    path: str | PathLike[str],
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    decode: str | ImageOp = "pil",
    *,
    jpeg: str = "exact",
    verify: bool | None = None,
) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Returns:
        The class of the dataset's format; for a format of another package a `ShardDataset`.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    dataset = ShardDataset(path, transform, target_transform, decode, jpeg=jpeg, verify=verify)
    kinds = {kind.format: kind for kind in (LMDBDataset, HDF5Dataset, TarDataset)}
    # They differ in their names alone; to make another would read the manifest twice.
    dataset.__class__ = kinds.get(dataset.manifest.format, ShardDataset)
    return dataset
