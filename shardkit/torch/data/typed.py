"""Read images of other channels or dtypes than RGB of 8 bits, and keep these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from shardkit.codecs.image_type import ImageType, TypedPixels
from shardkit.codecs.typed import crop_or_pad, scale_typed
from shardkit.dataset.typed import decode_stored_type
from shardkit.errors import UsageError
from shardkit.system import compiled
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import ImageReader
from shardkit.torch.data.ops import Crop, ImageOp
from shardkit.torch.data.read_context import new_block

_PIL = {
    "uint8": (1, 2, 3, 4),
    "uint16": (1,),
    "int32": (1,),
    "float32": (1,),
}
"""Channels of the images that Pillow has a mode for, by dtype."""


class TypedReader(ImageReader):
    """Reads the images of one field of a batch in their channels and dtype.

    Crops and flips move pixels without changing them. Scaling is
    `shardkit.codecs.typed.scale_typed`.
    """

    def __init__(self, *arguments: Any) -> None:
        """Locate the images: the arguments of `ImageReader`.

        Raises:
            UsageError: If Pillow has no images of this type, or the operation decodes RGB itself.
        """
        super().__init__(*arguments)
        kind = self.rows.shards.schema[self.name].own_pixels
        assert kind is not None, "others have an ImageReader"
        self.kind: ImageType = kind
        self.pixel_bytes = kind.bytes
        if self.decode == "pil" and kind.channels not in _PIL.get(kind.dtype, ()):
            raise UsageError(
                f"decode='pil': Pillow has no images of {kind}, as in {self.name!r}: use "
                "decode='torch' or decode='numpy'"
            )
        if isinstance(self.decode, ImageOp) and type(self.decode).render is not ImageOp.render:
            raise UsageError(
                f"{self.decode} renders RGB itself, and {self.name!r} is of {kind}: use "
                "decode='torch' with a transform"
            )

    @staticmethod
    def read_views(readers: Sequence[ImageReader]) -> list[Values]:
        """Return the images of each view, in a block if they have one size and no transform.

        Each image is read and decoded once.

        Raises:
            CorruptRecord: If the bytes of an image changed, or its type is another one.
            BadImage: If an image cannot be decoded.
        """
        typed = [reader for reader in readers if isinstance(reader, TypedReader)]
        first = typed[0]
        if first.decode == "bytes":
            return [Values(reader.stored()) for reader in typed]
        for reader in typed:
            reader.check_sizes()
            reader.allocate()
        left = first._copy_raw() if len(typed) == 1 else first.present()
        with first.buffered():
            for number in left:
                pixels = first._decoded(number)
                for reader in typed:
                    reader._keep(pixels, number)
        return [reader.result() for reader in typed]

    def allocate(self) -> None:
        """Provide memory for the result."""
        if self.size is None or self.transform is not None:
            self.values = [None] * len(self.rows)
            return
        shape = len(self.located), *self.size, self.kind.channels
        dtype = torch.from_numpy(np.empty(0, self.kind.dtype)).dtype
        self.block = new_block(shape, shared=len(self.located) > 1, dtype=dtype)
        self.values = self.block.numpy()

    def _copy_raw(self) -> Sequence[int]:
        """Read raw pixels directly into the block; return the positions of all other images."""
        present = self.present()
        located = self.located
        whole = self.block is not None and not isinstance(self.decode, ImageOp)
        if not whole or not all(kind == "raw" for kind in located.fields):
            return present
        slots = self.values.view(np.uint8).reshape(len(located), -1)
        for number in compiled.fill_values(located, slots, self.rows.context.mark):
            self.rows.context.note(located.rows[number])
            located.read(number, slots[number].data)  # `examine` has compared its length
        return ()

    def _decoded(self, number: int) -> TypedPixels:
        located = self.located
        self.rows.context.note(located.rows[number])
        stored = located.read(number, self._buffer)
        with self.rows.naming_record(located, number):
            return decode_stored_type(stored)

    def _keep(self, pixels: TypedPixels, number: int) -> None:
        """Keep the view of an image."""
        if isinstance(self.decode, ImageOp):
            pixels = render_typed(pixels, self.crops[number], self.decode.filter)
        if self.block is not None:
            self.values[number] = pixels
            return
        pixels = np.array(pixels, order="C")  # a transform may change it
        if self.decode == "pil":
            value: Any = Image.fromarray(pixels[:, :, 0] if self.kind.channels == 1 else pixels)
        elif self.decode == "numpy":
            value = pixels
        else:
            value = torch.from_numpy(pixels).permute(2, 0, 1)
        self.values[number] = self.rows.transformed(self.name, self.transform, value, number)


def render_typed(pixels: TypedPixels, crop: Crop, filter_: str) -> TypedPixels:
    """Return a crop of an image, in its dtype; pixels outside the image are 0.

    Args:
        pixels: Shape (height, width, channels).
        crop: The crop.
        filter_: ``bilinear`` or ``bicubic``.
    """
    if crop.scaled is not None:
        pixels = _scaled(pixels, crop.scaled, filter_)
    pixels = crop_or_pad(pixels, (crop.left, crop.top, crop.width, crop.height))
    pixels = _scaled(pixels, crop.size, filter_)
    return pixels[:, ::-1] if crop.flip else pixels


def _scaled(pixels: TypedPixels, size: tuple[int, int], filter_: str) -> TypedPixels:
    box = (0.0, 0.0, float(pixels.shape[1]), float(pixels.shape[0]))
    return scale_typed(pixels, box, size, filter_)
