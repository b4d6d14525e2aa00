"""The header that makes raw pixels an ``.npy`` file, so that ``numpy.load`` opens what we store."""

from __future__ import annotations

import io
import math

import numpy as np


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the bytes that stand before C-ordered uint8 values of ``shape`` in an .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": "|u1", "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def npy_values(content: bytes) -> tuple[int, tuple[int, ...]]:
    """Return where the values of an .npy file begin, and their shape.

    Raises:
        ValueError: If ``content`` is not a whole .npy file of C-ordered uint8 values.
    """
    buffer = io.BytesIO(content)
    if np.lib.format.read_magic(buffer) != (1, 0):
        raise ValueError("not version 1.0 of the .npy format")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(buffer)
    start = buffer.tell()
    if fortran_order or dtype != np.uint8 or start + math.prod(shape) != len(content):
        raise ValueError("not a whole array of C-ordered uint8 values")
    return start, shape
