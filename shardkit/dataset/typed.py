"""Decode stored images of other channels or dtypes than RGB of 8 bits."""

from __future__ import annotations

import math

import numpy as np

from shardkit.codecs.image import EXACT, Decoding, WrongSizeError
from shardkit.codecs.image_type import TypedPixels
from shardkit.codecs.typed import decode_typed, display, inspect_typed
from shardkit.dataset.decode import Decoder
from shardkit.dataset.located import EncodedImage


def decode_stored_type(
    image: EncodedImage, how: Decoding = EXACT, warnings: list[str] | None = None
) -> TypedPixels:
    """Do what `shardkit.dataset.decode.decode_own` does, for a typed image.

    Decoding options are for RGB.
    """
    kind = image.pixels
    assert kind is not None
    shape = image.height, image.width, kind.channels
    if image.field == "raw":
        if len(image.data) != math.prod(shape) * kind.values.itemsize:
            raise WrongSizeError(f"it has {len(image.data)} bytes of raw pixels, not {shape}")
        raw = np.frombuffer(image.data, kind.values).reshape(shape)
        return raw.astype(kind.dtype)
    pixels = decode_typed(image.data, image.field, warnings)
    if pixels.shape != shape or pixels.dtype != kind.dtype:
        raise WrongSizeError(
            f"it decodes to {pixels.dtype} of shape {pixels.shape}; index and schema state "
            f"{kind.dtype} of shape {shape}"
        )
    return pixels if pixels.flags.writeable else pixels.copy()


def _stated_size(image: EncodedImage) -> tuple[int, int]:
    info, kind = inspect_typed(bytes(image.data), image.field)
    if kind != image.pixels:
        raise WrongSizeError(f"it is of {kind}; the schema states {image.pixels}")
    return info.width, info.height


TYPED_DECODER = Decoder(decode=decode_stored_type, display=display, stated_size=_stated_size)
