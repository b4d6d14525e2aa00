"""The type of an image: its number of channels and their dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32"),
    *("float16", "float32", "float64"),
)
"""The dtypes of typed images, by NumPy's names."""

MOST_CHANNELS = 4096
"""Maximum channels: hyperspectral images have hundreds."""

MOST_BYTES = 1 << 32
"""Exclusive limit of a decoded image's bytes."""

_HELD: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "png": (("uint8", "uint16"), (1, 2, 3, 4)),
    "jpg": (("uint8",), (1, 3)),
}
"""Dtypes and channels that an encoding holds; ``npy`` and ``raw`` hold all."""

_ANY = ("npy", "raw")

TypedPixels = npt.NDArray[Any]
"""Pixels of an `ImageType`: shape (height, width, channels)."""


@dataclass(frozen=True)
class ImageType:
    """Channels and dtype of an image's pixels; ValueError if there are no such images."""

    channels: int
    dtype: str
    """One of `DTYPES`."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"an image cannot be {self.dtype}; use {', '.join(DTYPES)}")
        if not 1 <= self.channels <= MOST_CHANNELS:
            raise ValueError(f"an image has 1 to {MOST_CHANNELS} channels, not {self.channels}")

    def __str__(self) -> str:
        return f"{self.dtype}, {self.channels} channel{'s' * (self.channels != 1)}"

    @classmethod
    def of(cls, pixels: TypedPixels) -> ImageType:
        """Return the type of pixels of shape (height, width, channels)."""
        return cls(pixels.shape[2], pixels.dtype.name)

    @cached_property
    def is_rgb(self) -> bool:
        """Whether they are RGB of 8 bits."""
        return self.channels == 3 and self.dtype == "uint8"

    @property
    def values(self) -> np.dtype[Any]:
        """The dtype of stored values; little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def bytes(self) -> int:
        """Bytes of one pixel."""
        return self.channels * self.values.itemsize

    def is_held_by(self, field: str) -> bool:
        """Return whether an encoding, such as ``png``, stores such pixels without changing them.

        JPEG counts, although it is lossy: it holds the type.
        """
        dtypes, channels = _HELD.get(field, ((), ()))
        return field in _ANY or (self.dtype in dtypes and self.channels in channels)

    @property
    def lossless(self) -> str:
        """The encoding of changed images: ``png`` where it holds the type, else ``npy``."""
        return "png" if self.is_held_by("png") else "npy"


GRAY = ImageType(1, "uint8")
RGB = ImageType(3, "uint8")
