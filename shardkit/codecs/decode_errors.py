"""Interpret decoder failures: a bad image, or lack of memory."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from shardkit.errors import BadImage

_WORKING_BYTES = 12
"""Approximate bytes per pixel that libraries allocate to decode an image."""

_CARELESS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, struct.error)
"""Exceptions that Pillow raises for unexpected content."""


_NO_MEMORY = re.compile(r"out of memory|Insufficient memory|Memory allocation failure")
"""Out-of-memory messages of Pillow, libjpeg and TurboJPEG. Pillow's "decoder error -9" for TIFF is
ambiguous: it also means numbers out of range."""


@contextmanager
def as_bad_image(what: str, pixels: int = 0) -> Iterator[None]:
    """Turn a library's exceptions into `BadImage`, unless memory is short.

    Args:
        what: Start of the error message.
        pixels: Number of pixels of the image, or 0 if unknown.

    Raises:
        BadImage: If the image is bad.
        MemoryError: If memory is short.
    """
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        require_memory(str(error), pixels)
        raise BadImage(f"{what}: {_reason(error)}") from error


def require_memory(reason: str, pixels: int = 0) -> None:
    """Raise `MemoryError` if a library failed for lack of memory, not because of the image.

    Not all libraries report it, so this also tries to allocate the memory for ``pixels``.
    """
    if _NO_MEMORY.match(reason):
        raise MemoryError(reason)
    np.empty(_WORKING_BYTES * pixels, np.uint8)


def _reason(error: Exception) -> str:
    """Return the message of a Pillow exception without Python details."""
    text = re.sub(r" ?<_io\.BytesIO[^>]*>|^b(?=['\"])", "", str(error)).strip()
    if isinstance(error, _CARELESS) or not text:
        name = ": ".join(filter(None, (type(error).__name__, text)))
        return f"its parts contradict each other ({name})"
    return re.sub(r"^decoder error -\d+$", "its data are damaged", text)
