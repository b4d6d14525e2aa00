"""The stages of a sample, each to be done by itself for a whole batch.

They call the functions that the reader calls; `profiling` times them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from shardkit.codecs.image import SNIFF_BYTES, inspect, sniff
from shardkit.dataset.decode import Decoding, decode_stored
from shardkit.dataset.index import HEAD, ROW, checksum
from shardkit.dataset.shardset import EncodedImage, ShardSet
from shardkit.errors import BadImage, UsageError
from shardkit.measure.runner.folder import PlainFolder
from shardkit.torch.data.collate import BatchView
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import Context, EpochCell

STAGES = ("read", "checksum", "decode", "transform", "collate", "transport", "copy to the device")
"""In the order in which a sample goes through them."""


@dataclass(kw_only=True)
class Batch:
    """Samples on their way."""

    rows: npt.NDArray[np.int64]
    stored: list[EncodedImage] = field(default_factory=list)
    samples: list[Any] = field(default_factory=list)
    block: torch.Tensor | None = None
    collated: Any = None

    @property
    def view(self) -> BatchView:
        """The samples, as a dataset of shardkit gives them to the collate function."""
        labels = [image.label for image in self.stored]
        if self.block is None:
            return BatchView(self.samples, labels)
        block = self.block.permute(0, 3, 1, 2)
        return BatchView(block, labels, block)


class StagedShards:
    """A dataset of shardkit."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.transform = dataset.transform
        self.verifies = dataset.manifest.raw_shape is None
        whole = self.transform is None and dataset.decode in ("numpy", "torch")
        self._shape = dataset.manifest.raw_shape if whole else None
        self.decodes = self._shape is None
        """False if pixels are read straight into the batch."""
        self._memory = memoryview(b"")
        self._dataset = dataset
        self._shards = ShardSet(dataset.path, verify=False)
        red, green, blue = dataset.manifest.recipe.get("background", (255, 255, 255))
        self.how = Decoding((red, green, blue), fast=dataset.jpeg == "fast")

    def read(self, batch: Batch) -> None:
        """Find the rows in the index, and read their bytes, which last until the next call."""
        found = self._shards.find(batch.rows)
        if self._shape is not None:
            slots = _block(batch, self._shape[:2]).numpy()
            batch.stored = [found.read(n, slot.reshape(-1).data) for n, slot in enumerate(slots)]
            return
        size = sum(found.lengths)
        if len(self._memory) < size:  # fresh memory costs more than reading into it
            self._memory = memoryview(bytearray(size))
        batch.stored, start = [], 0
        for number, length in enumerate(found.lengths):
            batch.stored.append(found.read(number, self._memory[start : start + length]))
            start += length

    def checksum(self, batch: Batch) -> None:
        """Compute the checksum of each image, and of its row's fields."""
        head = bytes(ROW.itemsize)[HEAD]
        for image in batch.stored:
            checksum(head, image.data)

    def decode(self, batch: Batch) -> None:
        """Decode as the dataset does: into one block if all samples have one size."""
        if not self.decodes:
            return
        decode_batch(batch, self._dataset.decode, self.how, alone=self.transform is not None)

    def apply(self, batch: Batch) -> None:
        """Apply the transform."""
        assert self.transform is not None
        context = Context(EpochCell())
        batch.samples = [
            context.apply(self.transform, sample, row)
            for sample, row in zip(batch.samples, batch.rows.tolist(), strict=True)
        ]


class StagedFolder:
    """An image folder."""

    def __init__(self, dataset: PlainFolder) -> None:
        self.transform = dataset.transform
        self.verifies = False
        self.decodes = True
        self._dataset = dataset

    def read(self, batch: Batch) -> None:
        """Open and read each file."""
        entries = [self._dataset.entries[row] for row in batch.rows.tolist()]
        batch.stored = [
            EncodedImage(self._dataset.locate(each).read_bytes(), "", each.label, 0, 0)
            for each in entries
        ]

    def checksum(self, batch: Batch) -> None:
        """Do nothing: a file has none."""

    def decode(self, batch: Batch) -> None:
        """Decode with Pillow, and crop with it."""
        if self._dataset.decode == "bytes":
            batch.samples = [image.data for image in batch.stored]
            return
        batch.samples = []
        for row, stored in zip(batch.rows.tolist(), batch.stored, strict=True):
            try:
                image = Image.open(io.BytesIO(stored.data)).convert("RGB")
            except (OSError, ValueError, SyntaxError) as error:
                path = self._dataset.locate(self._dataset.entries[row])
                raise BadImage(f"{path} cannot be decoded: {error}") from error
            batch.samples.append(self._dataset.sample(image, row))

    def apply(self, batch: Batch) -> None:
        """Apply the transform."""
        batch.samples = [self.transform(sample) for sample in batch.samples]


Staged = StagedShards | StagedFolder


def staged(dataset: Any) -> Staged:
    """Return a dataset as stages.

    Raises:
        UsageError: If it is neither a dataset of shardkit nor an image folder.
    """
    if isinstance(dataset, ShardDataset):
        return StagedShards(dataset)
    if isinstance(dataset, PlainFolder):
        return StagedFolder(dataset)
    raise UsageError(f"{type(dataset).__name__} has no stages that could be timed")


def identified(image: EncodedImage) -> EncodedImage:
    """Return an image with its kind and size, which a file of a folder does not state.

    Raises:
        BadImage: If its bytes are those of no image.
    """
    if image.field:
        return image
    field = sniff(bytes(image.data[:SNIFF_BYTES])) or ""
    info = inspect(bytes(image.data), field)
    return image._replace(field=field, width=info.width, height=info.height)


def decode_batch(batch: Batch, decode: str | ImageOp, how: Decoding, *, alone: bool) -> None:
    """Decode the stored images of a batch, as `ShardDataset` does.

    Args:
        batch: With its ``stored``; gains ``samples``, or ``block``.
        decode: As a dataset takes it.
        how: How images are decoded.
        alone: Whether each is on its own, for a transform, and not a part of one block.
    """
    if decode == "bytes":
        batch.samples = [bytes(image.data) for image in batch.stored]
        return
    if not isinstance(decode, ImageOp):
        sizes = {(image.height, image.width) for image in batch.stored}
        if decode != "pil" and len(sizes) == 1 and not alone:
            _into_block(
                batch, sizes.pop(), lambda n, out: decode_stored(batch.stored[n], how, out=out)
            )
            return
        pixels = [decode_stored(image, how) for image in batch.stored]
    else:
        operation, context, rows = decode, Context(EpochCell()), batch.rows.tolist()
        widths = [image.width for image in batch.stored]
        heights = [image.height for image in batch.stored]
        pieces = operation.pieces(widths, heights, lambda place: context.draws(rows[place]))
        sizes = {piece.size for piece in pieces}
        if len(sizes) == 1 and not alone:
            _into_block(
                batch,
                sizes.pop(),
                lambda n, out: operation.render(batch.stored[n], pieces[n], how, out),
            )
            return
        pixels = [
            operation.render(image, piece, how)
            for image, piece in zip(batch.stored, pieces, strict=True)
        ]
    if decode == "pil":
        batch.samples = [Image.fromarray(each) for each in pixels]
    elif decode == "numpy":
        batch.samples = list(pixels)
    else:
        batch.samples = [torch.from_numpy(each).permute(2, 0, 1) for each in pixels]


def _into_block(batch: Batch, size: tuple[int, int], decode: Callable[[int, Any], Any]) -> None:
    for number, out in enumerate(_block(batch, size).numpy()):
        decode(number, out)


def _block(batch: Batch, size: tuple[int, int]) -> torch.Tensor:
    """Return the block of a batch: uint8 of shape (N, height, width, 3), used again as it is."""
    shape = (len(batch.rows), *size, 3)
    if batch.block is None or tuple(batch.block.shape) != shape:
        batch.block = torch.empty(shape, dtype=torch.uint8)
    return batch.block
