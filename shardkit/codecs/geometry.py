"""Masks and boxes under the geometry of an image: cropping, scaling and flipping."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VISIBLE = 0.1
"""Minimum fraction of a box's area inside a crop; boxes below are dropped."""

Boxes = npt.NDArray[np.float64]
"""Left, top, right and bottom of each box, in pixels: shape (N, 4)."""

Mask = npt.NDArray[Any]
"""A value for each pixel: shape (height, width), or (height, width, channels)."""


class Frame(NamedTuple):
    """The view of an image: it is scaled, and a piece of the result is scaled again and flipped."""

    image: tuple[int, int]
    """Width and height of the image."""
    whole: tuple[int, int]
    """Width and height that the image is scaled to."""
    piece: tuple[int, int, int, int]
    """Left, top, width and height of the piece of the scaled image; it may exceed the image."""
    size: tuple[int, int]
    """Width and height that the piece is scaled to."""
    flip: bool = False
    """Whether it is flipped horizontally."""


def move_boxes(boxes: Boxes, frame: Frame) -> tuple[Boxes, npt.NDArray[np.bool_]]:
    """Return boxes as they are seen in a frame, clipped to it.

    A box is dropped if less than `VISIBLE` of its area is inside the frame, or if it does not touch
    the frame.

    Args:
        boxes: Boxes in pixels of the image.
        frame: The view.

    Returns:
        The remaining boxes in pixels of the frame, and whether each box remains, shape (N,).
    """
    left, top, piece_width, piece_height = frame.piece
    moved = np.empty((len(boxes), 4))
    for axis, (start, length) in enumerate(((left, piece_width), (top, piece_height))):
        places = boxes[:, axis::2] * frame.whole[axis] / frame.image[axis] - start
        moved[:, axis::2] = places * frame.size[axis] / length
    if frame.flip:
        moved[:, 0::2] = frame.size[0] - moved[:, 2::-2]
    clipped = np.clip(moved, 0, np.tile(frame.size, 2))
    touches = (moved[:, :2] <= frame.size).all(1) & (moved[:, 2:] >= 0).all(1)
    kept: npt.NDArray[np.bool_] = touches & (_areas(clipped) >= VISIBLE * _areas(moved))
    return clipped[kept], kept


def move_mask(mask: Mask, frame: Frame) -> Mask:
    """Return a mask as it is seen in a frame, by nearest neighbor; zero outside the image.

    Each pixel takes the value at its center, as with Pillow's ``NEAREST``, whose rounding errors it
    does not have where a center is on the edge of two pixels.

    Args:
        mask: The mask, of the size of the frame's image.
        frame: The view.
    """
    left, top, piece_width, piece_height = frame.piece
    columns = _nearest(left, piece_width, frame.size[0], frame.whole[0], mask.shape[1])
    rows = _nearest(top, piece_height, frame.size[1], frame.whole[1], mask.shape[0])
    if frame.flip:
        columns = columns[::-1]
    inside = (rows >= 0) & (rows < mask.shape[0]), (columns >= 0) & (columns < mask.shape[1])
    if inside[0].all() and inside[1].all():
        return mask[rows[:, None], columns]
    moved = np.zeros((len(rows), len(columns), *mask.shape[2:]), mask.dtype)
    moved[np.ix_(*inside)] = mask[rows[inside[0]][:, None], columns[inside[1]]]
    return moved


def _nearest(start: int, length: int, size: int, whole: int, side: int) -> npt.NDArray[np.int64]:
    """Return the position in an image of each pixel of a frame, along one axis.

    An image of ``side`` pixels is scaled to ``whole`` pixels. ``length`` of these, beginning at
    ``start``, are then scaled to ``size``. Integers make ties exact.
    """
    # The center (n + 1/2) * length / size + start, times side / whole.
    centers = (2 * np.arange(size) + 1) * length + 2 * size * start
    return centers * side // (2 * size * whole)


def _areas(boxes: Boxes) -> npt.NDArray[np.float64]:
    areas: npt.NDArray[np.float64] = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas
