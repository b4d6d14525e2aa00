"""Compare stored images with the pixels that a user gave in Python.

Nothing here is used to store them: a mistake in `shardkit.kinds` must show.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import decode_mask
from shardkit.codecs.typed import decode_typed
from shardkit.kinds.field import Field, Schema
from shardkit.record import Record, image_field, image_kind

_FILES = (str, Path, bytes, bytearray, memoryview)
"""Types of values that are image files or their paths."""

_Pixels = npt.NDArray[Any]


def other_pixels(values: Mapping[str, Any], record: Record, schema: Schema) -> str:
    """Return which image of a record lacks the pixels that were given in Python, or "".

    The images of the record are encoded without loss; BadImage if one cannot be decoded.
    """
    for name, value in values.items():
        field = schema.get(name)
        stored = image_field(record.fields, name)
        if field is None or stored is None or not _is_given(field, value):
            continue
        if not _has_pixels(field, value, record.fields[stored], image_kind(stored)):
            return f"the pixels of its {name} differ from those of the sample"
    return ""


def _is_given(field: Field, value: Any) -> bool:
    """Return whether a value is the pixels of an image or mask, rather than its file."""
    return field.type.is_picture and value is not None and not isinstance(value, _FILES)


def _has_pixels(field: Field, value: Any, content: bytes, kind: str) -> bool:
    """Return whether a file has the pixels that a user gave."""
    if field.type.follows:
        return _equal(_with_channels(_array(value)), _with_channels(decode_mask(content, kind)))
    if not isinstance(value, Image.Image):
        return _equal(_with_channels(_array(value)), decode_typed(content, kind))
    if value.mode[0] in "IF":  # a transparent color of 16 bits becomes a second channel
        return _equal(np.asarray(value), decode_typed(content, kind)[:, :, 0])
    # Palettes, transparent colors and modes that PNG lacks: as Pillow shows both.
    with Image.open(io.BytesIO(content)) as stored:
        return _equal(_rgba(value), _rgba(stored))


def _array(value: Any) -> _Pixels:
    """Return the pixels that were given, with channels last."""
    is_tensor = hasattr(value, "permute") and hasattr(value, "is_floating_point")
    if is_tensor:
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    array = np.asarray(value)
    if array.ndim != 3:
        return array
    first, _, last = (side in (1, 3, 4) for side in array.shape)
    has_channels_first = first or (is_tensor and not last)
    return array.transpose(1, 2, 0) if has_channels_first else array


def _with_channels(pixels: _Pixels) -> _Pixels:
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _rgba(image: Image.Image) -> _Pixels:
    return np.asarray((image.convert("LA") if image.mode == "La" else image).convert("RGBA"))


def _equal(first: _Pixels, second: _Pixels) -> bool:
    return np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
