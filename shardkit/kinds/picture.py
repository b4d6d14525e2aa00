"""`Picture`, the base of images and masks, whose values are image files."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import image_field_of
from shardkit.errors import BadImage
from shardkit.kinds.field import Field, Kind
from shardkit.kinds.values import as_numpy, is_tensor
from shardkit.record import image_field, image_name

_CHANNELS = (1, 3, 4)
"""Numbers of channels that tell where they are."""


class Picture(Kind):
    """A kind whose values are image files."""

    is_named_so = True
    stored_apart = True
    is_picture = True

    def stored_in(self, names: Collection[str], name: str) -> str | None:
        """Return the stored name of a field among those of a record, or None."""
        return image_field(names, name)

    def pack(self, name: str, field: Field, value: Any) -> tuple[str, bytes]:
        """Return the stored name and the file of an image.

        A file's bytes and the file at a path are stored unchanged. PIL images, arrays and tensors
        become PNG files, or .npy files where PNG does not hold them. Of three axes, the first or
        the last one is the channels: that of 1, 3 or 4 values. If neither has so many, arrays have
        channels last, and tensors first; if both have, the value is refused.
        """
        if isinstance(value, (str, Path)):
            value = Path(value).read_bytes()
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            return image_name(name, image_field_of(io.BytesIO(data))), data
        if not isinstance(value, Image.Image):
            value = _channels_last(np.asarray(as_numpy(value)), first=is_tensor(value))
        kind, content = self.encode(value)
        return image_name(name, kind), content

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return the kind and the content of the file of a PIL image, or of an array.

        An array has the shape (height, width[, channels]).
        """
        raise NotImplementedError

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "Image"}


def _channels_last(array: npt.NDArray[Any], *, first: bool) -> npt.NDArray[Any]:
    """Return an image with its channels last; ``first`` is where they are if no size tells."""
    if array.ndim != 3:
        return array
    is_first, is_last = (array.shape[axis] in _CHANNELS for axis in (0, 2))
    if is_first and is_last and array.size > 1:
        raise BadImage(
            f"its shape {array.shape} may mean channels first or last",
            remedy="pass an image: PIL.Image.fromarray(ARRAY), with channels last",
        )
    moves = is_first if is_first or is_last else first
    return np.moveaxis(array, 0, -1) if moves else array


def as_png(image: Image.Image) -> bytes:
    """Return an image as a PNG file with Pillow's defaults."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
