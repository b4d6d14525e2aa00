"""What images and masks have in common: their values are image files."""

from __future__ import annotations

import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit.codecs.image import image_field_of
from shardkit.kinds.field import Field, Kind
from shardkit.kinds.values import as_numpy, is_tensor
from shardkit.record import image_field, image_name


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

        A file's bytes and the file at a path are stored unchanged. PIL images, arrays (height,
        width[, channels]) and tensors ([channels, ]height, width) become PNG files,
        or .npy files where PNG does not hold them.
        """
        if isinstance(value, (str, Path)):
            value = Path(value).read_bytes()
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            return image_name(name, image_field_of(io.BytesIO(data))), data
        if not isinstance(value, Image.Image):
            array = np.asarray(as_numpy(value))
            value = np.moveaxis(array, 0, -1) if is_tensor(value) and array.ndim == 3 else array
        kind, content = self.encode(value)
        return image_name(name, kind), content

    def encode(self, value: Any) -> tuple[str, bytes]:
        """Return the kind and the content of the file of a PIL image, or of an array.

        Args:
            value: The image; an array has the shape (height, width[, channels]).
        """
        raise NotImplementedError

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "Image"}


def as_png(image: Image.Image) -> bytes:
    """Return an image as a PNG file with Pillow's defaults."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
