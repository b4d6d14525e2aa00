"""Interpret decoder failures: a bad image, or lack of memory."""

from __future__ import annotations

import inspect
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from shardkit.errors import BadImage, setting

_WORKING_BYTES = 12
"""Approximate bytes per pixel that libraries allocate to decode an image."""

_CARELESS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, struct.error)
"""Exceptions that Pillow raises for unexpected content."""


_NO_MEMORY = re.compile(r"out of memory|Insufficient memory|Memory allocation failure")
"""Out-of-memory messages of Pillow, libjpeg and TurboJPEG. Pillow's "decoder error -9" for TIFF is
ambiguous: it also means numbers out of range."""


@contextmanager
def as_bad_image(problem: str, pixels: int = 0) -> Iterator[None]:
    """Turn a library's exceptions into `BadImage`, unless memory is short: then MemoryError.

    ``problem`` starts the message; ``pixels`` is 0 if unknown. An exception from a signal handler
    passes unchanged.
    """
    handled = sys.exception()
    try:
        yield
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and cause is not handled:  # the library may have replaced it
            raise_interruption(cause)
            cause = cause.__context__
        require_memory(str(error), pixels)
        reason = _reason(error)
        keep = f"To store its own channels and type, pass {setting('pixels', 'keep')}"
        remedy = keep if re.search("samples per pixel|unknown pixel mode", reason) else None
        raise BadImage(f"{problem}: {reason}", remedy=remedy) from error


def raise_interruption(error: BaseException) -> None:
    """Raise ``error`` again if a signal handler raised it: the interrupted work is not at fault.

    Python calls a handler with the frame that it interrupts, from that frame.
    """
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        interrupted = entry.tb_frame
        entry = entry.tb_next
        code = entry.tb_frame.f_code
        values = entry.tb_frame.f_locals
        arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
        if code.co_flags & inspect.CO_VARARGS:
            arguments += values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
        if any(argument is interrupted for argument in arguments):
            raise error


def require_memory(reason: str, pixels: int = 0) -> None:
    """Raise `MemoryError` if a library failed for lack of memory, not because of the image.

    Otherwise, ``--on-error skip`` would leave out good images. Not all libraries report it, so this
    also tries to allocate the memory for ``pixels``.
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
