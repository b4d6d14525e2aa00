"""Masks, boxes and keypoints under the geometry of an image: crop, scale and flip."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

VISIBLE = 0.1
"""Minimum fraction of a box's area inside a crop; boxes below are dropped."""

Boxes = npt.NDArray[np.float64]
"""Left, top, right and bottom of each box, in pixels: shape (N, 4)."""

Keypoints = npt.NDArray[np.float64]
"""Left, top and visibility of each point: shape (..., 3). The origin is the corner of the image, so
the center of its first pixel is at (0.5, 0.5)."""

Mask = npt.NDArray[Any]
"""A value for each pixel: shape (height, width), or (height, width, channels)."""


class Region(NamedTuple):
    """A rectangle of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


_TURNS: dict[int, Callable[[Mask], Mask]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, 3),
    7: lambda pixels: np.rot90(pixels, 2).swapaxes(0, 1),
    8: np.rot90,
}


def upright(pixels: Mask, orientation: int) -> Mask:
    """Return a view of pixels with their EXIF orientation (1 to 8) applied."""
    return _TURNS[orientation](pixels)


def turn(pixels: Mask, orientation: int) -> Mask:
    """Return pixels with an EXIF orientation (1 to 8) applied."""
    return np.ascontiguousarray(upright(pixels, orientation))


class Frame(NamedTuple):
    """A crop of an image: it is scaled, and a crop of the result is scaled again and flipped."""

    image: tuple[int, int]
    """Width and height of the image."""
    scaled: tuple[int, int]
    """Width and height that the image is scaled to."""
    crop: tuple[int, int, int, int]
    """Left, top, width and height of the crop of the scaled image; it may exceed the image."""
    size: tuple[int, int]
    """Width and height that the crop is scaled to."""
    flip: bool = False
    """Whether it is flipped horizontally."""


class Geometry(NamedTuple):
    """The changes of a conversion to an image: turned upright, scaled, then cropped or padded."""

    stored: tuple[int, int]
    """Width and height of the source image, before its orientation is applied."""
    orientation: int
    """EXIF orientation to apply, 1 to 8."""
    size: tuple[int, int]
    """Width and height to scale the upright image to."""
    canvas: tuple[int, int]
    """Width and height to crop or pad to, around the center."""

    @property
    def is_identity(self) -> bool:
        """Whether no pixel moves."""
        return self.orientation == 1 and self.stored == self.size == self.canvas

    @property
    def is_mirrored(self) -> bool:
        """Whether the EXIF orientation is one of mirrored images."""
        return self.orientation in (2, 4, 5, 7)

    @property
    def frame(self) -> Frame:
        """The scaling and crop of the upright image."""
        upright = self.stored[::-1] if self.orientation >= 5 else self.stored
        left, top = centered(self.size, self.canvas)
        return Frame(upright, self.size, (left, top, *self.canvas), self.canvas)

    def upright(self, boxes: Boxes) -> Boxes:
        """Return boxes in pixels of the upright image."""
        left, top, right, bottom = boxes.T
        width, height = self.stored
        turned = {
            2: (width - right, top, width - left, bottom),
            3: (width - right, height - bottom, width - left, height - top),
            4: (left, height - bottom, right, height - top),
            5: (top, left, bottom, right),
            6: (height - bottom, left, height - top, right),
            7: (height - bottom, width - right, height - top, width - left),
            8: (top, width - right, bottom, width - left),
        }
        return np.stack(turned.get(self.orientation, (left, top, right, bottom)), axis=1)


def centered(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return left and top of a canvas around the center of an image; negative to pad it."""
    return round((size[0] - canvas[0]) / 2), round((size[1] - canvas[1]) / 2)


def crop_or_pad(
    pixels: Mask, rectangle: tuple[int, int, int, int], fill: int | tuple[int, ...] = 0
) -> Mask:
    """Return a rectangle of an image of shape (height, width, channels); outside it is ``fill``.

    ``rectangle`` is left, top, width and height. The result is a view if that is inside the
    image.
    """
    left, top, width, height = rectangle
    bottom = max(0, top + height)
    right = max(0, left + width)
    inside = pixels[max(0, top) : bottom, max(0, left) : right]
    if inside.shape[:2] == (height, width):
        return inside
    out = np.full((height, width, pixels.shape[2]), fill, pixels.dtype)
    top = max(0, -top)
    left = max(0, -left)
    out[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return out


def move_boxes(boxes: Boxes, frame: Frame) -> tuple[Boxes, npt.NDArray[np.bool_]]:
    """Return boxes as they are seen in a frame, clipped to it, and whether each box remains.

    A box is dropped if less than `VISIBLE` of its area is inside the frame, or if it does not touch
    the frame. Boxes are in pixels of the image, the remaining ones in pixels of the frame.
    """
    moved = _move(boxes, frame)
    if frame.flip:
        moved = moved[:, [2, 1, 0, 3]]
    clipped = np.clip(moved, 0, np.tile(frame.size, 2))
    touches = (moved[:, :2] <= frame.size).all(1) & (moved[:, 2:] >= 0).all(1)
    kept: npt.NDArray[np.bool_] = touches & (_areas(clipped) >= VISIBLE * _areas(moved))
    return clipped[kept], kept


def move_points(points: Keypoints, frame: Frame, names: Sequence[str] | None = None) -> Keypoints:
    """Return keypoints as they are seen in a frame.

    A point outside the frame, or of visibility 0, becomes (0, 0, 0): COCO's mark for a point
    without a label. So none is dropped. If the frame is flipped, names determine which points
    change places: see `swap_sides`. Points are in pixels of the image: shape (..., 3), or
    (..., names, 3).
    """
    framed = _move(points[..., :2].reshape(-1, 2), frame).reshape(*points.shape[:-1], 2)
    seen = (points[..., 2:] > 0) & ((framed >= 0) & (framed <= frame.size)).all(-1, keepdims=True)
    moved = np.where(seen, np.concatenate([framed, points[..., 2:]], axis=-1), 0.0)
    return swap_sides(moved, names) if frame.flip and names else moved


def swap_sides(points: Keypoints, names: Sequence[str]) -> Keypoints:
    """Exchange points whose names differ in left and right: a mirrored left hand is a right one.

    ``points`` have the shape (..., names, 3); a name is like ``left_hand``.
    """
    return points[..., _mirrored(tuple(names)), :]


@lru_cache(maxsize=64)
def _mirrored(names: tuple[str, ...]) -> list[int]:
    """Return the position of each name's opposite, or its own position if there is none."""
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers.get(_SIDE.sub(_opposite, name), n) for name, n in numbers.items()]


_SIDE = re.compile("left|right", re.IGNORECASE)


def _opposite(side: re.Match[str]) -> str:
    other = "right" if side[0].lower() == "left" else "left"
    return other.upper() if side[0].isupper() else other.title() if side[0].istitle() else other


def move_mask(mask: Mask, frame: Frame) -> Mask:
    """Return a mask as it is seen in a frame, by nearest neighbor; zero outside the image.

    Each pixel takes the value at its center, as with Pillow's ``NEAREST``, whose rounding errors it
    does not have where a center is on the edge of two pixels. The mask has the size of the frame's
    image.
    """
    left, top, crop_width, crop_height = frame.crop
    columns = _nearest(left, crop_width, frame.size[0], frame.scaled[0], mask.shape[1])
    rows = _nearest(top, crop_height, frame.size[1], frame.scaled[1], mask.shape[0])
    if frame.flip:
        columns = columns[::-1]
    inside = (rows >= 0) & (rows < mask.shape[0]), (columns >= 0) & (columns < mask.shape[1])
    if inside[0].all() and inside[1].all():
        return mask[rows[:, None], columns]
    moved = np.zeros((len(rows), len(columns), *mask.shape[2:]), mask.dtype)
    moved[np.ix_(*inside)] = mask[rows[inside[0]][:, None], columns[inside[1]]]
    return moved


def _nearest(start: int, length: int, size: int, scaled: int, side: int) -> npt.NDArray[np.int64]:
    """Return the position in an image of each pixel of a frame, along one axis.

    An image of ``side`` pixels is scaled to ``scaled`` pixels. ``length`` of these, beginning at
    ``start``, are then scaled to ``size``. Integers make ties exact.
    """
    # The center (n + 1/2) * length / size + start, times side / scaled.
    centers = (2 * np.arange(size) + 1) * length + 2 * size * start
    return centers * side // (2 * size * scaled)


def _move(points: npt.NDArray[np.float64], frame: Frame) -> npt.NDArray[np.float64]:
    """Return points in a frame, which may be outside it: shape (N, 2), or (N, 4) for boxes."""
    left, top, crop_width, crop_height = frame.crop
    moved = np.empty_like(points)
    for axis, (start, length) in enumerate(((left, crop_width), (top, crop_height))):
        scaled = points[:, axis::2] * frame.scaled[axis] / frame.image[axis] - start
        moved[:, axis::2] = scaled * frame.size[axis] / length
    if frame.flip:
        moved[:, 0::2] = frame.size[0] - moved[:, 0::2]
    return moved


def _areas(boxes: Boxes) -> npt.NDArray[np.float64]:
    areas: npt.NDArray[np.float64] = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas
