"""Read the images and masks of a batch, and decode them into one block where they fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import mul
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardkit.codecs.geometry import Frame, Mask, move_mask
from shardkit.codecs.image import Pixels, WrongSizeError, decode_mask
from shardkit.dataset.decode import Decoding, decode_stored, require_stated_size
from shardkit.dataset.filling import Pieces, fill
from shardkit.errors import UsageError
from shardkit.record import ABSENT
from shardkit.system import native
from shardkit.system.scratch import scratch
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.ops import ImageOp, Piece, compiled_pieces, numbered_pieces
from shardkit.torch.data.read_context import new_block

_INFLATION = 64
"""Plausible bytes of pixels per stored byte: a JPEG photograph has 10 to 30."""
_INFLATED_BYTES = 1 << 20
"""Plausible bytes of pixels for any image."""

Decode = str | ImageOp
"""Type of decoded images, as `shardkit.torch.data.datasets.ShardDataset` takes it."""

Transform = Callable[..., Any] | None


class ImageReader:
    """Reads the images of one field of a batch."""

    def __init__(
        self,
        rows: BatchRows,
        name: str,
        decode: Decode,
        transform: Transform,
        decoding: Decoding,
    ) -> None:
        """Locate the images, and select the piece of each.

        Args:
            rows: The batch.
            name: The field.
            decode: Type of the images.
            transform: Applied to each image.
            decoding: Decoding options.
        """
        self.name = name
        self.rows = rows
        self.found = rows.located(name)
        self.decode = decode
        self.transform = transform
        self.decoding = decoding
        self._buffer = memoryview(b"")

    @cached_property
    def pieces(self) -> list[Piece]:
        """The piece of each image; none if the whole images are samples."""
        return self.rows.pieces(self.decode, self.found) if isinstance(self.decode, ImageOp) else []

    @cached_property
    def numbered(self) -> Pieces | None:
        """The `pieces` for the compiled module, if it exists and they can be made all at once."""
        if not isinstance(self.decode, ImageOp) or self.found.survey is None:
            return None
        return numbered_pieces(self.decode, *self.found.sizes(), self.rows.draws)

    @cached_property
    def size(self) -> tuple[int, int] | None:
        """Height and width of all samples if they fit one block, else None."""
        found, survey, sizes = self.found, self.found.survey, set[tuple[int, int]]()
        if isinstance(self.decode, ImageOp):
            if self.numbered is not None:
                return self.decode.fixed_size
            sizes = {piece.size for piece in self.pieces}
        elif self.decode in ("numpy", "torch"):
            if survey is not None and survey.width:
                return survey.height, survey.width
            sizes = set(zip(found.heights, found.widths, strict=True))
        # The survey accepts no row without an image, which has no place in a block.
        whole = survey is not None or ABSENT not in found.fields
        return sizes.pop() if len(sizes) == 1 and whole else None

    def read(self) -> Values:
        """Return the images, in a block if they have one size and no transform follows.

        Raises:
            CorruptRecord: If the bytes of an image changed.
            BadImage: If an image cannot be decoded.
        """
        if self.decode == "bytes":
            return Values(self._stored())
        self._check_sizes()
        if self.size is not None and self.transform is None:
            return self._block((len(self.found), *self.size, 3))
        with self._lent():
            return Values(self._each(self._image))

    def _stored(self) -> list[Any]:
        """Return the stored bytes, or what the transform makes of them."""
        values, transform = self.rows.stored(self.name), self.transform
        if transform is None:
            return values
        numbered = enumerate(values)
        return [self.rows.transformed(self.name, transform, each, n) for n, each in numbered]

    def _each(self, read: Callable[[int], Any]) -> list[Any]:
        """Return what ``read`` returns for each position; None where the row lacks the image."""
        if self.found.survey is not None or ABSENT not in self.found.fields:
            return list(map(read, range(len(self.rows))))
        kinds = enumerate(self.found.fields)
        return [None if kind == ABSENT else read(number) for number, kind in kinds]

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Provide a buffer for the bytes of the longest image."""
        with scratch(self.found.longest) as self._buffer:
            yield

    def _check_sizes(self) -> None:
        """Compare implausible sizes in the index with the images, before allocating memory.

        The decoder compares all other sizes later.
        """
        # Otherwise, the sizes in the index do not determine how much memory is allocated.
        if self.decode == "pil" or self._all_small():
            return
        with self._lent():
            for number in self._inflated():
                stored = self.found.read(number, self._buffer)
                with self.rows.naming_record(self.found, number):
                    require_stated_size(stored)

    def _inflated(self) -> Iterator[int]:
        """Yield positions of encoded images with implausibly many pixels for their bytes."""
        found = self.found
        sizes = zip(found.widths, found.heights, strict=True)
        for number, (width, height) in enumerate(sizes):
            pixels = width * height
            if self.pieces:
                piece = self.pieces[number]
                pixels = max(pixels, math.prod(piece.size), math.prod(piece.whole or (0,)))
            likely = max(_INFLATED_BYTES, _INFLATION * found.lengths[number])
            if 3 * pixels > likely and found.fields[number] not in ("raw", ABSENT):
                yield number

    def _all_small(self) -> bool:
        """Return whether no image or sample exceeds `_INFLATED_BYTES`, which is the usual case.

        It takes a few calls for a batch, where `_inflated` takes a few for each image.
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

    def _block(self, shape: tuple[int, ...]) -> Values:
        """Return images of one size, decoded directly into one block."""
        block = new_block(shape, shared=shape[0] > 1)
        slots = block.numpy()
        if left := self._left(slots):
            with self._lent():
                for number in left:
                    self._pixels(number, slots[number])
        if self.decode == "numpy":
            return Values(slots, block)
        block = block.permute(0, 3, 1, 2)
        return Values(block, block)

    def _left(self, slots: Pixels) -> Sequence[int]:
        """Fill ``slots`` with the compiled module, and return the positions that it left."""
        if native.module() is None:
            return range(len(slots))
        pieces = self.numbered
        if isinstance(self.decode, ImageOp) and pieces is None:
            pieces = compiled_pieces(self.decode, self.pieces)
            if pieces is None:
                return range(len(slots))
        return fill(self.found, slots, self.decoding, pieces, self.rows.context.mark)

    def _image(self, number: int) -> Any:
        """Return one decoded and transformed image.

        The transform runs right after decoding, while the image is in the CPU cache.
        """
        image: Any = self._pixels(number)
        if self.decode == "pil":
            image = Image.fromarray(image)
        elif self.decode == "torch" or isinstance(self.decode, ImageOp):
            image = torch.from_numpy(image).permute(2, 0, 1)
        if self.transform is None:
            return image
        return self.rows.transformed(self.name, self.transform, image, number)

    def _pixels(self, number: int, out: Pixels | None = None) -> Pixels:
        found = self.found
        self.rows.context.note(found.rows[number])
        if out is not None and not self.pieces and self._is_raw(number, out.nbytes):
            found.read(number, out.reshape(-1).data)
            return out
        stored = found.read(number, self._buffer)
        with self.rows.naming_record(found, number):
            if isinstance(self.decode, ImageOp):
                return self.decode.render(stored, self.pieces[number], self.decoding, out)
            return decode_stored(stored, self.decoding, out=out)

    def _is_raw(self, number: int, size: int) -> bool:
        """Return whether an image is stored as ``size`` bytes of pixels."""
        return self.found.fields[number] == "raw" and self.found.lengths[number] == size


class MaskReader(ImageReader):
    """Reads the masks of one field of a batch: values, scaled by nearest neighbor."""

    def read(self) -> Values:
        """Return the masks: uint8 or uint16 (as tensors int32), in a block if they fit one.

        Raises:
            CorruptRecord: If the bytes of a mask changed.
            BadImage: If a mask cannot be decoded.
        """
        if self.decode == "bytes":
            return Values(self._stored())
        self._check_sizes()
        with self._lent():
            if self.transform is None and self.decode != "pil":
                return self._stacked(self._each(self._mask))
            return Values(self._each(self._image))

    def _stacked(self, masks: list[Mask | None]) -> Values:
        """Return masks in one block if they have one shape and type."""
        kinds = {None if mask is None else (mask.shape, mask.dtype) for mask in masks}
        first = masks[0] if len(kinds) == 1 else None
        if first is None:
            return Values([None if mask is None else self._typed(mask) for mask in masks])
        dtype = torch.from_numpy(first[:0]).dtype
        block = new_block((len(masks), *first.shape), shared=len(masks) > 1, dtype=dtype)
        np.stack([mask for mask in masks if mask is not None], out=block.numpy())
        return Values(block.numpy() if self.decode == "numpy" else block, block)

    def _image(self, number: int) -> Any:
        mask = self._typed(self._mask(number))
        return self.rows.transformed(self.name, self.transform, mask, number)

    def _mask(self, number: int) -> Mask:
        found = self.found
        self.rows.context.note(found.rows[number])
        stored = found.read(number, self._buffer)
        with self.rows.naming_record(found, number):
            mask = decode_mask(stored.data, stored.field)
            if mask.shape[:2] != (stored.height, stored.width):
                raise WrongSizeError(f"{self.name!r} has the shape {mask.shape}")
        if isinstance(self.decode, ImageOp):
            mask = move_mask(mask, frame_of(self.pieces[number], stored.width, stored.height))
        if mask.dtype == np.uint16 and self.decode not in ("pil", "numpy"):
            mask = mask.astype(np.int32)  # PyTorch has few operations for uint16
        return mask

    def _typed(self, mask: Mask) -> Any:
        if self.decode == "pil":
            return Image.fromarray(mask)
        return mask if self.decode == "numpy" else torch.from_numpy(mask)


def require_one_size(rows: BatchRows, leading: str, name: str) -> None:
    """Refuse images that differ in size from the leading ones, whose crops they share.

    Raises:
        UsageError: If there is one.
    """
    lead, found = rows.located(leading), rows.located(name)
    if lead.widths == found.widths and lead.heights == found.heights:
        return
    for number in range(len(rows)):
        if ABSENT in (lead.fields[number], found.fields[number]):
            continue
        size, expected = _size(found, number), _size(lead, number)
        if size != expected:
            raise UsageError(
                f"{rows.describe(number)}: {name!r} has {size[0]} x {size[1]} pixels, and "
                f"{leading!r} {expected[0]} x {expected[1]}, so no crop fits both. Set "
                f"decode={{{leading!r}: ..., {name!r}: ...}} to treat them separately"
            )


def frame_of(piece: Piece, width: int, height: int) -> Frame:
    """Return the view of an image of ``width`` x ``height`` pixels that ``piece`` selects."""
    whole = (width, height) if piece.whole is None else piece.whole[::-1]
    place = (piece.left, piece.top, piece.width, piece.height)
    return Frame((width, height), whole, place, piece.size[::-1], piece.flip)


def _size(found: Any, number: int) -> tuple[int, int]:
    return found.widths[number], found.heights[number]
