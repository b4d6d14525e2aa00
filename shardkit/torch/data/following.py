"""Arrays that follow an image, such as latents: cropped, scaled and flipped with it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from shardkit.codecs.geometry import Frame
from shardkit.errors import UsageError
from shardkit.record import ABSENT
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import frame_of
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import new_block


def move_arrays(rows: BatchRows, name: str, values: Values, op: ImageOp, leading: str) -> Values:
    """Return arrays cropped, scaled and flipped like their image; unchanged where a row lacks it.

    ``values`` are tensors of shape (channels, height, width), or None. ``op`` crops the images of
    the field ``leading``. Raises UsageError if an array has another number of axes, or is larger
    than its image.
    """
    located = rows.located(leading)
    crops = rows.crops(op, located)
    moved = list[Any]()
    for number, value in enumerate(values.values):
        if value is None or located.fields[number] == ABSENT:
            moved.append(value)
            continue
        frame = frame_of(crops[number], located.widths[number], located.heights[number])
        numeric = value.float() if value.dtype == torch.bfloat16 else value  # NumPy lacks it
        try:
            array = move_array(np.asarray(numeric), frame, op.filter)
        except ValueError as error:
            raise UsageError(
                f"{rows.describe(number)}: {name!r} is {error};", remedy="leave it out of follow="
            ) from error
        moved.append(torch.from_numpy(array).to(value.dtype))
    shapes = {None if value is None else value.shape for value in moved}
    if len(shapes) > 1 or None in shapes:
        return Values(moved)
    block = new_block((len(moved), *moved[0].shape), shared=len(moved) > 1, dtype=moved[0].dtype)
    for slot, value in zip(block, moved, strict=True):
        slot.copy_(value)
    return Values(block, block)


Array = npt.NDArray[Any]
"""Values on a grid over an image, such as a latent: shape (channels, height, width)."""

_FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def move_array(array: Array, frame: Frame, filter_: str = "bilinear") -> Array:
    """Return an array as it is seen in a frame; zero where a value's center is outside the image.

    The array covers the image: a latent of 64 x 64 has one value for 8 x 8 pixels of an image of
    512 x 512. A crop on this grid that keeps its scale copies the values. Any other crop is scaled
    by Pillow's filter in float32; integers are rounded and clipped to their dtype. The shape is
    (channels, height, width), with the height and width of `moved_shape`. ``filter_`` is
    ``bicubic`` or ``bilinear``. Raises ValueError if the array has another number of axes or type,
    or is larger than its image.
    """
    if array.ndim != 3 or array.dtype.kind not in "biuf":
        raise ValueError(
            f"an array with dtype {array.dtype} and shape {array.shape}, but only numbers with "
            "shape (channels, height, width) can follow an image"
        )
    if array.shape[2] > frame.image[0] or array.shape[1] > frame.image[1]:
        raise ValueError(
            f"an array with shape {array.shape}, which is larger than its image, {frame.image[0]} "
            f"x {frame.image[1]} pixels"
        )
    height, width = moved_shape(array, frame)
    columns = _covered(frame, 0, array.shape[2], width)
    rows = _covered(frame, 1, array.shape[1], height)
    box = columns.start, rows.start, columns.end, rows.end
    size = columns.last - columns.first, rows.last - rows.first
    moved = np.zeros((len(array), height, width), array.dtype)
    if all(size):
        target = moved[:, rows.first : rows.last, columns.first : columns.last]
        if (
            box[2] - box[0] == size[0]
            and box[3] - box[1] == size[1]
            and not any(x % 1 for x in box)
        ):
            target[:] = array[:, int(box[1]) : int(box[3]), int(box[0]) : int(box[2])]
        else:
            target[:] = _resampled(array, tuple(map(float, box)), size, filter_)
    return np.ascontiguousarray(moved[..., ::-1]) if frame.flip else moved


def moved_shape(array: Array, frame: Frame) -> tuple[int, int]:
    """Return height and width of `move_array`: the array's fraction of the image's, at least 1."""
    width, height = (
        max(1, round(Fraction(size * side, image)))
        for size, side, image in zip(frame.size, array.shape[:0:-1], frame.image, strict=True)
    )
    return height, width


class _Covered(NamedTuple):
    """The values of a moved array whose centers are inside the image, along one axis."""

    first: int
    last: int
    """Their range in the moved array; the end is exclusive."""
    start: Fraction
    end: Fraction
    """The interval that they cover, in values of the array."""


def _covered(frame: Frame, axis: int, side: int, count: int) -> _Covered:
    """Return what a crop covers of an array with ``side`` values, scaled to ``count`` values.

    So memory is bounded by the result, even if the crop is far larger than the image.
    """
    unit = Fraction(side, frame.scaled[axis])
    begin = frame.crop[axis] * unit
    step = frame.crop[axis + 2] * unit / count
    half = Fraction(1, 2)
    first = min(max(math.ceil(-begin / step - half), 0), count)
    last = min(max(math.ceil((side - begin) / step - half), first), count)
    start = max(begin + first * step, Fraction(0))
    end = min(begin + last * step, Fraction(side))
    return _Covered(first, last, start, end)


def _resampled(array: Array, box: tuple[float, ...], size: tuple[int, int], filter_: str) -> Array:
    """Return a box of an array scaled to a width and height, in the array's dtype.

    Values outside do not count, as pixels outside of a crop do not.
    """
    left, top, right, bottom = box
    first = math.floor(left)
    above = math.floor(top)
    inside = array[:, above : math.ceil(bottom), first : math.ceil(right)]
    inner_box = left - first, top - above, right - first, bottom - above
    scaled = np.empty((len(array), *size[::-1]), np.float32)
    for channel, values in enumerate(inside):
        image = Image.fromarray(np.ascontiguousarray(values, np.float32))
        scaled[channel] = np.asarray(image.resize(size, _FILTERS[filter_], inner_box))
    if array.dtype.kind == "f":
        return scaled.astype(array.dtype)
    low = 0
    high = 1
    if array.dtype != bool:
        low = np.iinfo(array.dtype).min
        high = np.iinfo(array.dtype).max
    # Of 64 bits, the float nearest to the largest integer exceeds it.
    most = float(high) if int(float(high)) == high else math.nextafter(float(high), 0)
    return np.clip(np.rint(scaled.astype(np.float64)), low, most).astype(array.dtype)
