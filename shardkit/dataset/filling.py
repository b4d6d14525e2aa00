"""Fill a block with the images or arrays of a batch in one call of the compiled module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import Pixels
from shardkit.codecs.resize import TALL_FIRST
from shardkit.dataset.decode import Decoding
from shardkit.dataset.located import LocatedRows
from shardkit.system import native

PIECE_NUMBERS = 7
"""Numbers of a piece: left, top, width, height, flip, and height and width of the scaled whole."""

_MOST_SIDE = 65535
"""Maximum side of a sample: that of a JPEG."""


class Pieces(NamedTuple):
    """The pieces of a batch of images, and how they are scaled."""

    numbers: npt.NDArray[np.int32]
    """One row of `PIECE_NUMBERS` for each image, C-contiguous."""
    bicubic: bool
    oversample: float
    """As in `shardkit.torch.data.ops.ImageOp`."""


def fill(
    found: LocatedRows,
    out: Pixels,
    how: Decoding,
    pieces: Pieces | None = None,
    mark: npt.NDArray[np.int64] | None = None,
) -> list[int]:
    """Read, check, decode, crop and scale images into ``out``, and return those left to Python.

    These are images that the compiled module does not support, and all that are damaged. Their
    places in ``out`` are undefined.

    Args:
        found: The images.
        out: uint8 of shape (N, height, width, 3), C-contiguous.
        how: Decoding options.
        pieces: The piece of each image; None for whole images of the size of ``out``.
        mark: Receives the row being read, shape (1,).

    Returns:
        Positions in the batch, ascending; all without the compiled module.
    """
    compiled = native.module()
    if compiled is None or not all(0 < side <= _MOST_SIDE for side in out.shape[1:3]):
        return list(range(len(found)))
    codes = np.empty(len(found), np.uint8)
    numbers, bicubic, oversample = (None, False, 1.0) if pieces is None else pieces
    compiled.fill(
        out,
        *out.shape[1:3],
        found.entries,
        found.descriptors(),
        found.maps() if out.nbytes >= compiled.LEAST_MAPPED else None,
        numbers,
        None if mark is None else np.ascontiguousarray(found.array),
        mark,
        found.verifies,
        found.verifies,
        how.fast,
        bicubic,
        TALL_FIRST,
        oversample,
        codes,
    )
    return np.flatnonzero(codes).tolist() if codes.any() else []


def read_stored(
    found: LocatedRows, mark: npt.NDArray[np.int64] | None = None
) -> tuple[list[bytes | None], Sequence[int]]:
    """Return the stored bytes of a batch, and the positions left to Python, whose bytes are wrong.

    Args:
        found: Images, or other fields of bytes.
        mark: As for `fill`.
    """
    compiled = native.module()
    if compiled is None or found.survey is None:
        return [None] * len(found), range(len(found))
    codes = np.empty(len(found), np.uint8)
    values = compiled.read_stored(
        found.entries,
        found.descriptors(),
        None if mark is None else np.ascontiguousarray(found.array),
        mark,
        found.verifies,
        codes,
    )
    return values, np.flatnonzero(codes).tolist() if codes.any() else []


def fill_values(
    found: LocatedRows, out: npt.NDArray[np.uint8], mark: npt.NDArray[np.int64] | None = None
) -> Sequence[int]:
    """Read and check arrays of one size into ``out``, and return those left to Python.

    Args:
        found: The arrays.
        out: uint8 of shape (N, bytes), C-contiguous.
        mark: As for `fill`.

    Returns:
        Positions in the batch, ascending; all without the compiled module.
    """
    compiled = native.module()
    if compiled is None:
        return range(len(found))
    codes = np.empty(len(found), np.uint8)
    compiled.fill_values(
        out,
        out.shape[1],
        found.entries,
        found.descriptors(),
        found.maps() if out.nbytes >= compiled.LEAST_MAPPED else None,
        None if mark is None else np.ascontiguousarray(found.array),
        mark,
        found.verifies,
        codes,
    )
    return np.flatnonzero(codes).tolist() if codes.any() else []
