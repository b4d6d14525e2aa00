"""What it means that a library failed: that an image is bad, or that memory is short."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from shardkit.errors import BadImage

_WORKING_BYTES = 12
"""Bytes that libraries take for a pixel while they decode it, about."""

_CARELESS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, struct.error)
"""What Pillow raises where it did not expect what it found."""


_NO_MEMORY = re.compile(r"out of memory|Insufficient memory|Memory allocation failure")
"""How Pillow, libjpeg and TurboJPEG begin to say it. Pillow's "decoder error -9" of a TIFF should
mean it too, but stands for numbers out of range as well."""


@contextmanager
def blaming(what: str, pixels: int = 0) -> Iterator[None]:
    """Turn what a library raises into `BadImage`, unless the machine is short of memory.

    Args:
        what: What is said of the image.
        pixels: Its size, as far as it is known.

    Raises:
        BadImage: If the image is to blame.
        MemoryError: If the machine is.
    """
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        require_memory(str(error), pixels)
        raise BadImage(f"{what}: {_reason(error)}") from error


def require_memory(reason: str, pixels: int = 0) -> None:
    """Raise `MemoryError` if that is why a library failed: it is not the image's fault then.

    Not all of them say so; but where an image of that size has no room, none could be decoded.
    """
    if _NO_MEMORY.match(reason):
        raise MemoryError(reason)
    np.empty(_WORKING_BYTES * pixels, np.uint8)


def _reason(error: Exception) -> str:
    """Return what an exception of Pillow says, in words that do not speak of Python."""
    text = re.sub(r" ?<_io\.BytesIO[^>]*>|^b(?=['\"])", "", str(error)).strip()
    if isinstance(error, _CARELESS) or not text:
        name = ": ".join(filter(None, (type(error).__name__, text)))
        return f"its parts contradict each other ({name})"
    return re.sub(r"^decoder error -\d+$", "its data are damaged", text)
