"""Masks, boxes and keypoints under the changes that a recipe makes to their image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.geometry import (
    Boxes,
    Frame,
    Mask,
    move_boxes,
    move_mask,
    move_points,
    swap_sides,
)
from shardkit.codecs.image import decode_mask, encode_mask
from shardkit.errors import BadImage
from shardkit.record import Field

LOSSY = ("jpg", "webp")
"""Kinds of images that may change values, and thus hold no mask."""


class View(NamedTuple):
    """What becomes of an image: it is turned upright, scaled, then cropped or padded."""

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
    def frame(self) -> Frame:
        """What becomes of the upright image."""
        upright = self.stored[::-1] if self.orientation >= 5 else self.stored
        left, top = centered(self.size, self.canvas)
        return Frame(upright, self.size, (left, top, *self.canvas), self.canvas)


def centered(size: tuple[int, int], canvas: tuple[int, int]) -> tuple[int, int]:
    """Return left and top of a canvas around the center of an image; negative to pad it."""
    return round((size[0] - canvas[0]) / 2), round((size[1] - canvas[1]) / 2)


def moved_coordinates(
    field: Field, stated: list[list[Any]], view: View
) -> tuple[list[list[Any]], bool]:
    """Return boxes or keypoints as metadata state them, and whether the canvas lacks any of them.

    Args:
        field: The boxes or keypoints.
        stated: Left, top, right and bottom of each box, in pixels of the source image, and perhaps
            a label; or left, top and visibility of each keypoint.
        view: What becomes of the image.
    """
    if field.kind == "boxes":
        boxes = _moved_boxes(stated, view)
        return boxes, len(boxes) < len(stated)
    points = _moved_points(stated, view, field.classes or ("",))
    labeled, seen = (sum(point[2] > 0 for point in each) for each in (stated, points))
    return points, seen < labeled


def _moved_points(stated: list[list[Any]], view: View, names: Sequence[str]) -> list[list[Any]]:
    points = np.array(stated, np.float64).reshape(-1, 3)
    points[:, :2] = _upright(points[:, [0, 1, 0, 1]], view)[:, :2]
    objects = points.reshape(-1, len(names), 3)
    if view.orientation in _MIRRORED:
        objects = swap_sides(objects, names)
    moved = move_points(objects, view.frame).reshape(-1, 3)
    return [[x, y, int(visibility)] for x, y, visibility in moved.tolist()]


def _moved_boxes(stated: list[list[Any]], view: View) -> list[list[Any]]:
    corners = np.array([box[:4] for box in stated], np.float64).reshape(-1, 4)
    moved, kept = move_boxes(_upright(corners, view), view.frame)
    labels = [stated[row][4:] for row in np.flatnonzero(kept).tolist()]
    return [[*box, *label] for box, label in zip(moved.tolist(), labels, strict=True)]


def _upright(boxes: Boxes, view: View) -> Boxes:
    """Return boxes in pixels of the upright image."""
    left, top, right, bottom = boxes.T
    width, height = view.stored
    turned = {
        2: (width - right, top, width - left, bottom),
        3: (width - right, height - bottom, width - left, height - top),
        4: (left, height - bottom, right, height - top),
        5: (top, left, bottom, right),
        6: (height - bottom, left, height - top, right),
        7: (height - bottom, width - right, height - top, width - left),
        8: (top, width - right, bottom, width - left),
    }
    return np.stack(turned.get(view.orientation, (left, top, right, bottom)), axis=1)


def moved_mask(data: bytes, field: str, view: View) -> bytes:
    """Return a mask as a PNG file, with no value that it did not have; padding is 0.

    Args:
        data: The encoded mask.
        field: Kind of the image: a name in `shardkit.record.IMAGE_FIELDS`, or a foreign one.
        view: What becomes of its image.

    Raises:
        BadImage: If it cannot be decoded, or PNG cannot store its values.
    """
    mask = decode_mask(data, field)
    try:
        return encode_mask(move_mask(_TURNS[view.orientation](mask), view.frame))
    except (ValueError, TypeError) as error:
        raise BadImage(f"it cannot be stored as PNG: {error}") from error


_MIRRORED = (2, 4, 5, 7)
"""The EXIF orientations of mirrored images."""

_TURNS: dict[int, Callable[[Mask], Mask]] = {
    1: lambda mask: mask,
    2: np.fliplr,
    3: lambda mask: np.rot90(mask, 2),
    4: np.flipud,
    5: lambda mask: mask.swapaxes(0, 1),
    6: lambda mask: np.rot90(mask, 3),
    7: lambda mask: np.rot90(mask, 2).swapaxes(0, 1),
    8: np.rot90,
}
"""What turns the pixels of an image upright, by its EXIF orientation."""
