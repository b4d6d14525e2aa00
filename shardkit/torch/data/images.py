"""Read the images and masks of a batch, and decode them into one block where they fit."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from operator import mul
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image

from shardkit.codecs.geometry import Frame, Mask, move_mask
from shardkit.codecs.image import Decoding, WrongSizeError, decode_mask
from shardkit.codecs.image_type import TypedPixels
from shardkit.dataset.decode import decode_stored, require_stated_size
from shardkit.errors import UsageError, setting
from shardkit.record import ABSENT
from shardkit.system import compiled
from shardkit.system.scratch import scratch
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.ops import Crop, ImageOp, as_crop_table, render_views, select_crop_table
from shardkit.torch.data.read_context import new_block

_INFLATION = 64
"""Plausible bytes of pixels per stored byte: a JPEG photograph has 10 to 30."""
_INFLATED_BYTES = 1 << 20
"""Plausible bytes of pixels for any image."""

_PIL_CHANNELS = {"uint8": (1, 2, 3, 4), "uint16": (1,), "int32": (1,), "float32": (1,)}
"""Channels of the images that Pillow has a mode for, by dtype."""

DecodeName = Literal["pil", "numpy", "torch", "bytes"]
DECODES: tuple[DecodeName, ...] = get_args(DecodeName)
Decode = DecodeName | ImageOp
"""Type of decoded images, as `shardkit.torch.data.datasets.ShardDataset` takes it."""

Transform = Callable[..., Any] | None


class ImageReader:
    """Reads the images of one field of a batch, or of one view of it, in their channels and dtype.

    The compiled module reads RGB of 8 bits, and raw pixels of other types.
    """

    block: torch.Tensor | None = None
    """The images, of shape (N, height, width, channels), if they have one size and no transform."""
    values: Any = None
    """The images: the array of `block`, or a list."""

    def __init__(
        self,
        rows: BatchRows,
        name: str,
        decode: Decode,
        transform: Transform,
        decoding: Decoding,
    ) -> None:
        """Locate the images, and select the crop of each.

        Raises UsageError if Pillow has no images of their type, or the operation decodes RGB
        itself.
        """
        self.name = name
        self.rows = rows
        self.located = rows.located(name)
        self.pixels = self.located.pixels
        """Channels and dtype of the images."""
        self.decode = decode
        self.op = None if isinstance(decode, str) else decode
        self.transform = transform
        self.decoding = decoding
        self._buffer = memoryview(b"")
        if not self.pixels.is_rgb:
            self._require_possible()

    def _require_possible(self) -> None:
        """Refuse a ``decode`` that requires RGB images."""
        if self.decode == "pil" and self.pixels.channels not in _PIL_CHANNELS.get(
            self.pixels.dtype, ()
        ):
            raise UsageError(
                f"{setting('decode', 'pil')}: Pillow does not support {self.pixels}, the image "
                f"type of {self.name!r}",
                remedy=f"use {setting('decode', 'torch')} or {setting('decode', 'numpy')}",
            )
        if self.op is not None and type(self.op).render is not ImageOp.render:
            raise UsageError(
                f"{self.op} returns only RGB, but {self.name!r} is {self.pixels}",
                remedy=f"use {setting('decode', 'torch')} with a transform",
            )

    @cached_property
    def crops(self) -> list[Crop]:
        """The crop of each image; none if the whole images are samples."""
        return [] if self.op is None else self.rows.crops(self.op, self.located)

    @cached_property
    def crop_table(self) -> compiled.CropTable | None:
        """The `crops` for the compiled module, if it exists and they can be made all at once."""
        if self.op is None or self.located.survey is None:
            return None
        return select_crop_table(self.op, *self.located.sizes(), self.rows.draws)

    def sample_size(self) -> tuple[int, int] | None:
        """Return height and width of all samples if they fit one block, else None."""
        located = self.located
        survey = self.located.survey
        if self.op is not None:
            if self.crop_table is not None:
                return self.op.fixed_size
            sizes = {crop.size for crop in self.crops}
        elif self.decode == "pil":
            return None
        elif survey is not None and survey.width:
            return survey.height, survey.width
        else:
            sizes = set(zip(located.heights, located.widths, strict=True))
        # The survey accepts no row without an image, which has no place in a block.
        has_all = survey is not None or ABSENT not in located.fields
        return sizes.pop() if len(sizes) == 1 and has_all else None

    @staticmethod
    def read_views(readers: Sequence[ImageReader]) -> list[Values]:
        """Return the images of each view, in a block if they have one size and no transform.

        Each image is read and decoded once. The readers, one for each view, read the same rows.
        """
        first = readers[0]
        if first.decode == "bytes":
            return [Values(reader.stored()) for reader in readers]
        for reader in readers:
            size = reader.sample_size()
            reader.check_sizes(size)
            reader.allocate(size)
        views_of: dict[int, list[ImageReader]] = {}
        for reader, numbers in zip(readers, _fill(readers), strict=True):
            for number in numbers:
                views_of.setdefault(number, []).append(reader)
        if views_of:
            with first.buffered():
                for number in sorted(views_of):
                    views = views_of[number]
                    # Transforms run right after decoding, while the image is in the CPU cache.
                    for view, pixels in zip(views, first._pixels(number, views), strict=True):
                        if view.block is None:
                            view.values[number] = view._transformed(number, pixels)
        return [reader.result() for reader in readers]

    def stored(self) -> list[Any]:
        """Return the stored bytes, after the transform if there is one."""
        values = self.rows.stored(self.name)
        transform = self.transform
        if transform is None:
            return values
        numbered = enumerate(values)
        return [self.rows.transformed(self.name, transform, value, n) for n, value in numbered]

    def present(self) -> Sequence[int]:
        """Return the positions of the rows that have the image."""
        if self.located.survey is not None or ABSENT not in self.located.fields:
            return range(self.rows.count)
        return [number for number, kind in enumerate(self.located.fields) if kind != ABSENT]

    @contextlib.contextmanager
    def buffered(self) -> Iterator[None]:
        """Provide a buffer for the bytes of the longest image."""
        with scratch(self.located.longest) as self._buffer:
            yield

    def check_sizes(self, size: tuple[int, int] | None) -> None:
        """Compare implausible sizes in the index with the images, before allocating memory.

        The decoder compares all other sizes later.
        """
        # Otherwise, the sizes in the index do not determine how much memory is allocated.
        if self.decode == "pil" or self._all_small(size):
            return
        with self.buffered():
            for number in self._inflated():
                stored = self.located.read(number, self._buffer)
                with self.rows.naming_record(self.located, number):
                    require_stated_size(stored)

    def _inflated(self) -> Iterator[int]:
        """Yield positions of encoded images with implausibly many pixels for their bytes."""
        located = self.located
        sizes = zip(located.widths, located.heights, strict=True)
        for number, (width, height) in enumerate(sizes):
            pixels = width * height
            if self.crops:
                crop = self.crops[number]
                pixels = max(pixels, math.prod(crop.size), math.prod(crop.scaled or (0,)))
            likely = max(_INFLATED_BYTES, _INFLATION * located.lengths[number])
            is_encoded = located.fields[number] not in ("raw", ABSENT)
            if is_encoded and self.pixels.bytes * pixels > likely:
                yield number

    def _all_small(self, size: tuple[int, int] | None) -> bool:
        """Return whether no image or sample exceeds `_INFLATED_BYTES`, which is the usual case.

        It takes a few calls for a batch, where `_inflated` takes a few for each image.
        """
        located = self.located
        survey = self.located.survey
        if size is None or not self.rows.count:
            return False
        scaled = 0
        if self.op is not None and self.crop_table is not None:
            numbers = self.crop_table.numbers
            scaled = max((numbers[:, 5].astype(np.int64) * numbers[:, 6]).tolist())
        elif self.op is not None and any(crop.scaled for crop in self.crops):
            return False
        most: int = (
            max(map(mul, located.widths, located.heights)) if survey is None else survey.most_pixels
        )
        return self.pixels.bytes * max(most, scaled, math.prod(size)) <= _INFLATED_BYTES

    def allocate(self, size: tuple[int, int] | None) -> None:
        """Provide memory for the result, given the `sample_size`."""
        count = self.rows.count
        if size is None or self.transform is not None:
            self.values = [None] * count
            return
        dtype: torch.dtype = getattr(torch, self.pixels.dtype)
        self.block = new_block((count, *size, self.pixels.channels), shared=count > 1, dtype=dtype)
        self.values = self.block.numpy()

    def result(self) -> Values:
        """Return the images: in a block if they have one."""
        if self.block is None:
            return Values(self.values)
        if self.decode == "numpy":
            return Values(self.values, self.block)
        block = self.block.permute(0, 3, 1, 2)
        return Values(block, block)

    def compiled_view(self) -> compiled.View | None:
        """Return the block for the compiled module; None if the module cannot fill it."""
        if self.block is None:
            return None
        if self.op is None:
            return compiled.View(self.values, None)
        table = self.crop_table or as_crop_table(self.op, self.crops)
        return None if table is None else compiled.View(self.values, table)

    def fill_raw(self) -> Sequence[int]:
        """Fill the block with raw pixels by the compiled module; return the positions it leaves."""
        located = self.located
        is_whole = self.block is not None and self.op is None
        if not is_whole or any(kind != "raw" for kind in located.fields):
            return self.present()
        slots = self.values.view(np.uint8).reshape(self.rows.count, -1)
        return compiled.fill_values(located, slots, self.rows.context.mark)

    def _transformed(self, number: int, pixels: TypedPixels) -> Any:
        image: Any = pixels
        if self.decode == "pil":
            image = Image.fromarray(pixels[:, :, 0] if self.pixels.channels == 1 else pixels)
        elif self.decode != "numpy":
            image = torch.from_numpy(pixels).permute(2, 0, 1)
        return self.rows.transformed(self.name, self.transform, image, number)

    def _pixels(self, number: int, views: Sequence[ImageReader]) -> list[TypedPixels]:
        """Return one image as each view has it, in its block if there is one."""
        located = self.located
        self.rows.context.note(located.rows[number])
        outs = [None if view.block is None else view.values[number] for view in views]
        only = outs[0] if len(outs) == 1 and self.op is None else None
        is_raw = only is not None and located.fields[number] == "raw"
        if only is not None and is_raw and located.lengths[number] == only.nbytes:
            located.read(number, only.reshape(-1).view(np.uint8).data)
            return [only]
        stored = located.read(number, self._buffer)
        with self.rows.naming_record(located, number):
            if self.op is not None:
                ops = [view.op for view in views if view.op is not None]
                crops = [view.crops[number] for view in views]
                if len(ops) == 1:
                    return [ops[0].render(stored, crops[0], self.decoding, outs[0])]
                return render_views(stored, list(zip(ops, crops, outs, strict=True)), self.decoding)
            pixels = decode_stored(stored, self.decoding, out=outs[0])
            return [pixels, *(_copied(pixels, out) for out in outs[1:])]


def _fill(readers: Sequence[ImageReader]) -> list[Sequence[int]]:
    """Fill blocks with the compiled module; return the positions of each view left to Python."""
    first = readers[0]
    if not first.pixels.is_rgb:
        return [first.fill_raw()] if len(readers) == 1 else [first.present()] * len(readers)
    views = [reader.compiled_view() for reader in readers]
    blocks = [view for view in views if view is not None]
    if not blocks:
        return [reader.present() for reader in readers]
    mark = first.rows.context.mark
    background = first.decoding.background
    left = compiled.fill_views(first.located, blocks, background=background, mark=mark)
    numbered = zip(readers, views, strict=True)
    return [left.pop(0) if view is not None else reader.present() for reader, view in numbered]


def _copied(pixels: TypedPixels, out: TypedPixels | None) -> TypedPixels:
    """Return a copy of pixels, in ``out`` if given."""
    if out is None:
        return pixels.copy()
    out[:] = pixels
    return out


class MaskReader(ImageReader):
    """Reads the masks of one field of a batch: values, scaled by nearest neighbor."""

    @staticmethod
    def read_views(readers: Sequence[ImageReader]) -> list[Values]:
        """Return the masks of each view, in one block if they have one shape and dtype.

        They are uint8 or uint16; tensors are int32 instead of uint16.
        """
        masks = [reader for reader in readers if isinstance(reader, MaskReader)]
        first = masks[0]
        if first.decode == "bytes":
            return [Values(reader.stored()) for reader in masks]
        for reader in masks:
            reader.check_sizes(reader.sample_size())
            reader.values = [None] * reader.rows.count
        with first.buffered():
            for number in first.present():
                mask = first._mask(number)
                for reader in masks:  # a transform may change its mask
                    reader._keep(mask if len(masks) == 1 else mask.copy(), number)
        return [reader.result() for reader in masks]

    def _keep(self, mask: Mask, number: int) -> None:
        """Keep the view of a mask."""
        mask = self._moved(mask, number)
        listed = self.transform is not None or self.decode == "pil"
        value = self._typed(mask) if listed else mask
        self.values[number] = self.rows.transformed(self.name, self.transform, value, number)

    def result(self) -> Values:
        """Return the masks: in one array if they can be."""
        if self.transform is None and self.decode != "pil":
            return self._stacked(self.values)
        return Values(self.values)

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

    def _mask(self, number: int) -> Mask:
        located = self.located
        self.rows.context.note(located.rows[number])
        stored = located.read(number, self._buffer)
        with self.rows.naming_record(located, number):
            mask = decode_mask(stored.data, stored.field)
            if mask.shape[:2] != (stored.height, stored.width):
                raise WrongSizeError(f"{self.name!r} has the shape {mask.shape}")
        return mask

    def _moved(self, mask: Mask, number: int) -> Mask:
        if self.op is not None:
            mask = move_mask(mask, frame_of(self.crops[number], mask.shape[1], mask.shape[0]))
        if mask.dtype == np.uint16 and self.decode not in ("pil", "numpy"):
            mask = mask.astype(np.int32)  # PyTorch has few operations for uint16
        return mask

    def _typed(self, mask: Mask) -> Any:
        if self.decode == "pil":
            return Image.fromarray(mask)
        return mask if self.decode == "numpy" else torch.from_numpy(mask)


def require_one_size(rows: BatchRows, leading: str, name: str) -> None:
    """Refuse images that differ in size from the leading images, since both share crops."""
    lead = rows.located(leading)
    located = rows.located(name)
    if lead.widths == located.widths and lead.heights == located.heights:
        return
    for number in range(rows.count):
        if ABSENT in (lead.fields[number], located.fields[number]):
            continue
        size = _size(located, number)
        expected = _size(lead, number)
        if size != expected:
            raise UsageError(
                f"{rows.describe(number)}: {name!r} has {size[0]} x {size[1]} pixels but "
                f"{leading!r} has {expected[0]} x {expected[1]}, so no crop fits both",
                remedy=f"Set decode={{{leading!r}: ..., {name!r}: ...}} to treat them separately",
            )


def frame_of(crop: Crop, width: int, height: int) -> Frame:
    """Return the view of an image of ``width`` x ``height`` pixels that ``crop`` selects."""
    scaled = (width, height) if crop.scaled is None else crop.scaled[::-1]
    region = (crop.left, crop.top, crop.width, crop.height)
    return Frame((width, height), scaled, region, crop.size[::-1], crop.flip)


def _size(located: Any, number: int) -> tuple[int, int]:
    return located.widths[number], located.heights[number]
