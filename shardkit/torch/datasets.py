"""Map-style datasets: a row to its image and label, as torchvision's ``ImageFolder`` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from shardkit.codecs.image import Colour, Pixels
from shardkit.decode import common_size, decode_stored
from shardkit.errors import BadImage, UsageError
from shardkit.manifest import Manifest, load_manifest
from shardkit.shardset import ShardSet, StoredImage
from shardkit.torch.collate import BatchView, Sample, new_block

DECODES = ("pil", "numpy", "torch", "bytes")


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

    def __init__(
        self,
        path: str | PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        decode: str = "pil",
        *,
        verify: bool | None = None,
    ) -> None:
        """Open a dataset.

        Args:
            path: The dataset's directory.
            transform: Applied to each image.
            target_transform: Applied to each label.
            decode: What an image is: ``pil`` an RGB image, ``numpy`` uint8 of shape (height, width,
                3), ``torch`` uint8 of shape (3, height, width) in channels-last memory, ``bytes``
                the stored bytes.
            verify: Whether each read compares the record's checksum; None does so for encoded
                images (it costs some 3 %) and not for raw pixels.
        """
        if decode not in DECODES:
            raise UsageError(f"decode={decode!r} is unknown; known are {', '.join(DECODES)}")
        self.transform = transform
        self.target_transform = target_transform
        self.decode = decode
        self._shards = ShardSet(Path(path), verify=verify)
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
        stored = self._shards.read(positions)
        labels: list[Any] = [image.label for image in stored]
        if self.target_transform is not None:
            labels = [self.target_transform(label) for label in labels]
        size = common_size(stored)
        if size is not None and self.transform is None and self.decode in ("numpy", "torch"):
            return self._block(stored, positions, size, labels)
        images = [
            self._image(image, int(row)) for image, row in zip(stored, positions, strict=True)
        ]
        return BatchView(images, labels)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}, decode={self.decode!r}): {len(self)} "
            f"images, {len(self.classes)} classes, {self.manifest.format}"
        )

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

    @property
    def keys(self) -> Sequence[str]:
        """The key of each row."""
        return self._shards.keys

    @property
    def paths(self) -> Sequence[str]:
        """The path of each row's file, relative to the source."""
        return self._shards.paths

    @cached_property
    def _background(self) -> Colour:
        red, green, blue = self.manifest.recipe.get("background", (255, 255, 255))
        return red, green, blue

    def _block(
        self,
        stored: list[StoredImage],
        rows: npt.NDArray[np.int64],
        size: tuple[int, int],
        labels: list[Any],
    ) -> BatchView:
        """Return a batch of images of one size, decoded straight into one block."""
        block = new_block((len(stored), *size, 3), shared=len(stored) > 1)
        slots = block.numpy()
        for image, row, slot in zip(stored, rows, slots, strict=True):
            self._pixels(image, int(row), slot)
        if self.decode == "numpy":
            return BatchView(slots, labels, block)
        block = block.permute(0, 3, 1, 2)
        return BatchView(block, labels, block)

    def _image(self, stored: StoredImage, row: int) -> Any:
        """Return one image as ``decode`` and ``transform`` ask for it.

        The transform follows at once: 64 decoded images that wait for it would leave the cache.
        """
        image: Any = stored.data
        if self.decode != "bytes":
            image = self._pixels(stored, row)
        if self.decode == "pil":
            image = Image.fromarray(image)
        elif self.decode == "torch":
            image = torch.from_numpy(image).permute(2, 0, 1)
        return image if self.transform is None else self.transform(image)

    def _pixels(self, image: StoredImage, row: int, out: Pixels | None = None) -> Pixels:
        try:
            return decode_stored(image, background=self._background, out=out)
        except BadImage as error:
            raise BadImage(
                f"record {self.keys[row]!r} (row {row}, from {self.paths[row]!r}) of "
                f"{self.path}: {error}"
            ) from error


class LMDBDataset(ShardDataset):
    """The images and labels of a dataset of LMDB files; see `ShardDataset`."""

    format = "lmdb"


class HDF5Dataset(ShardDataset):
    """The images and labels of a dataset of HDF5 files; see `ShardDataset`."""

    format = "hdf5"


class TarDataset(ShardDataset):
    """The images and labels of a dataset of WebDataset tar files; see `ShardDataset`."""

    format = "webdataset"


def open_dataset(
    path: str | PathLike[str],
    transform: Callable[[Any], Any] | None = None,
    target_transform: Callable[[Any], Any] | None = None,
    decode: str = "pil",
    *,
    verify: bool | None = None,
) -> ShardDataset:
    """Open a dataset of any format; the arguments are those of `ShardDataset`.

    Returns:
        The class of the dataset's format; for a format of another package a `ShardDataset`.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    name = load_manifest(Path(path).expanduser()).format
    kinds = {kind.format: kind for kind in (LMDBDataset, HDF5Dataset, TarDataset)}
    return kinds.get(name, ShardDataset)(path, transform, target_transform, decode, verify=verify)
