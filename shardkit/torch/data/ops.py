"""`ImageOp`: an operation that decodes only what it needs; passed to a dataset as ``decode``.

It selects a crop of an image and its target size (`Crop`) from the image size alone. One function
decodes, crops, scales and flips, directly into the batch. RGB of 8 bits may be decoded in part and
at reduced size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard, get_args

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import Region, crop_or_pad
from shardkit.codecs.image import Box, Decoding, pixel_codec, resize
from shardkit.codecs.image_type import TypedPixels
from shardkit.codecs.libjpeg import same_scale
from shardkit.dataset.decode import DecodedRegion, decode_region, enclosing
from shardkit.dataset.located import EncodedImage
from shardkit.errors import UsageError, setting
from shardkit.sampling.order import BatchDraws, Draws
from shardkit.system.compiled import CropTable

Filter = Literal["bilinear", "bicubic"]
FILTERS = get_args(Filter)

Sides = npt.NDArray[np.int64]
"""Widths or heights of images in pixels: shape (N,)."""

MakeDraws = Callable[[], BatchDraws]
"""Returns the random numbers of the samples of a batch."""

CropNumbers = npt.NDArray[np.integer[Any]]
"""Crops as in `shardkit.system.compiled.CropTable`."""

_MOST = 2**31 - 1
"""The largest number of a crop for the compiled module."""


class Crop(NamedTuple):
    """The crop of an image that becomes a sample, in pixels."""

    left: int
    top: int
    """May be negative: pixels outside the image are black."""
    width: int
    height: int
    size: tuple[int, int]
    """Height and width that the crop is scaled to."""
    flip: bool = False
    """Whether it is flipped horizontally."""
    scaled: tuple[int, int] | None = None
    """Height and width that the image is scaled to before the crop is cut from it."""


@dataclass(frozen=True, kw_only=True)
class ImageOp(ABC):
    """An operation from a stored image to pixels; subclasses select the crop."""

    random: ClassVar[bool] = True
    """Whether the crop depends on random numbers; if not, it depends only on the image size."""

    filter: Filter = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """Minimum size of a crop, relative to its target, when a JPEG is decoded at 1/2, 3/8, 1/4 or
    1/8 of its size. 1.0 is fastest; ``inf`` always decodes all pixels. On photographs, the PSNR
    compared with ``inf`` is at least 28 dB for 1.0 (median over 41 dB), and 37 dB for 2.0 (median
    over 51 dB)."""

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise UsageError(
                f"{setting('filter', self.filter)} is unknown;",
                remedy=f"choose from {', '.join(FILTERS)}",
            )
        if not is_number(self.oversample) or not self.oversample >= 1:
            raise UsageError(f"oversample must be at least 1, not {self.oversample!r}")

    @property
    @abstractmethod
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of every sample, or None if they depend on the image."""

    @abstractmethod
    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the crop of an image of ``width`` x ``height`` pixels that becomes a sample.

        Args:
            width: Width of the stored image.
            height: Height of the stored image.
            draws: The sample's random numbers.
        """

    def crops(
        self, widths: list[int], heights: list[int], draws: Callable[[int], Draws]
    ) -> list[Crop]:
        """Return the crops of a batch of images.

        Args:
            widths: Widths of the stored images.
            heights: Heights of the stored images.
            draws: Returns the random numbers of the image at a position in the batch.
        """
        sizes = list(zip(widths, heights, strict=True))
        if self.random:
            return [self.crop(*size, draws(position)) for position, size in enumerate(sizes)]
        none = Draws(0, 0)  # not used
        crop_of = {size: self.crop(*size, none) for size in set(sizes)}
        return [crop_of[size] for size in sizes]

    def numbers(self, widths: Sides, heights: Sides, draws: MakeDraws) -> CropNumbers | None:
        """Return `crops` as `shardkit.system.compiled.CropTable` has them, all at once.

        Args:
            widths: Widths of the stored images, from 1 on.
            heights: Heights of the stored images, from 1 on.
            draws: Returns the random numbers of the samples.

        Returns:
            None if this is not implemented, or the samples may differ in size.
        """
        return None

    def render(
        self, image: EncodedImage, crop: Crop, how: Decoding, out: TypedPixels | None = None
    ) -> TypedPixels:
        """Return ``crop`` of ``image``, in its dtype: shape (height, width, channels).

        Args:
            image: The stored image; its bytes are valid only during the call.
            crop: A crop that `crop` returned.
            how: Decoding options.
            out: Destination of the pixels, with the crop's size; None allocates it.

        Raises:
            BadImage: If the image cannot be decoded, or its size differs from the index.
        """
        shown = _shown(image, crop)
        decoded = decode_region(image, shown, how._replace(at_least=self._enough(image, crop)))
        return self._finish(decoded, shown, crop, out)

    def _finish(
        self, decoded: DecodedRegion, shown: Region, crop: Crop, out: TypedPixels | None
    ) -> TypedPixels:
        """Return ``crop`` from the decoded region ``shown`` of the image."""
        if out is None:
            out = np.empty((*crop.size, decoded.pixels.shape[2]), decoded.pixels.dtype)
        if crop.scaled is not None:
            box = (0.0, 0.0, shown.width * decoded.scale, shown.height * decoded.scale)
            pixels = _scaled(decoded.pixels, box, crop.scaled, self.filter)
            decoded = DecodedRegion(pixels, 0, 0, 1.0)
        pixels, box = _cut(decoded, crop) if decoded.scale == 1 else _reduced(decoded, shown)
        pixels = _scaled(pixels, box, crop.size, self.filter)
        out[:] = pixels[:, ::-1] if crop.flip else pixels
        return out

    def _enough(self, image: EncodedImage, crop: Crop) -> tuple[int, int]:
        """Return the minimum width and height to decode at; (0, 0) decodes all pixels."""
        unscaled = crop.size == (crop.height, crop.width)
        if crop.scaled is None and (unscaled or not _is_inside(image, crop)):
            return 0, 0
        if math.isinf(self.oversample) or 0 in (image.width, image.height):
            return 0, 0
        if crop.scaled is not None:
            needed = max(crop.scaled[1] / image.width, crop.scaled[0] / image.height)
        else:
            needed = max(crop.size[1] / crop.width, crop.size[0] / crop.height)
        needed *= self.oversample
        return math.ceil(image.width * needed), math.ceil(image.height * needed)


def render_views(
    image: EncodedImage, views: Sequence[tuple[ImageOp, Crop, TypedPixels | None]], how: Decoding
) -> list[TypedPixels]:
    """Return several views of an image, which is decoded once for each scale that they need.

    The image's bytes are valid only during the call. ``views`` are arguments of `ImageOp.render`.
    Raises BadImage if the image cannot be decoded, or its size differs from the index.
    """
    if any(type(op).render is not ImageOp.render for op, _, _ in views):
        return [op.render(image, crop, how, out) for op, crop, out in views]
    sizes = [op._enough(image, crop) for op, crop, _ in views]
    full = image.width, image.height
    reduces = image.field == "jpg" and image.pixels.is_rgb
    keys = [same_scale(full, size) if reduces else (8, 1) for size in sizes]
    regions = [_shown(image, crop) for _, crop, _ in views]
    around: dict[tuple[int, int], Region] = {}
    for key, region in zip(keys, regions, strict=True):
        around[key] = _around(around.get(key, region), region)
    decodings = {key: how._replace(at_least=size) for key, size in zip(keys, sizes, strict=True)}
    decoded = {key: decode_region(image, around[key], decodings[key]) for key in around}
    return [
        op._finish(decoded[key], region, crop, out)
        for key, region, (op, crop, out) in zip(keys, regions, views, strict=True)
    ]


def _around(first: Region, second: Region) -> Region:
    """Return the smallest region that has both."""
    left = min(first.left, second.left)
    top = min(first.top, second.top)
    right = max(first.left + first.width, second.left + second.width)
    bottom = max(first.top + first.height, second.top + second.height)
    return Region(left, top, right - left, bottom - top)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, which a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(pixels: TypedPixels, box: Box, size: tuple[int, int], name: str) -> TypedPixels:
    """Return a box of an image, scaled to ``size``."""
    height, width = pixels.shape[:2]
    if pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        return pixel_codec("keep").scale(pixels, box, size, name)
    return resize(pixels, (*box[:2], min(box[2], width), min(box[3], height)), size, name)


def as_crop_table(op: ImageOp, crops: list[Crop]) -> CropTable | None:
    """Return ``crops`` for the compiled module; None if it does not apply."""
    if type(op).render is not ImageOp.render:
        return None
    are_equal = crops.count(crops[0]) == len(crops)  # as for images of one size
    try:
        wide = np.array([_numbers(crop) for crop in crops[: 1 if are_equal else None]], np.int64)
    except OverflowError:
        return None
    numbers = wide.astype(np.int32)
    if (numbers != wide).any():
        return None
    if are_equal:
        numbers = np.tile(numbers, (len(crops), 1))
    return CropTable(numbers, op.filter == "bicubic", float(op.oversample))


def select_crop_table(
    op: ImageOp,
    widths: npt.NDArray[np.uint32],
    heights: npt.NDArray[np.uint32],
    draws: MakeDraws,
) -> CropTable | None:
    """Return the crops of images for the compiled module, all at once; None if `op` cannot."""
    if type(op).render is not ImageOp.render or not len(widths):
        return None
    if 0 in widths.tolist() or 0 in heights.tolist():  # not checked when they were converted
        return None
    numbers = op.numbers(widths.astype(np.int64), heights.astype(np.int64), draws)
    if numbers is None:
        return None
    if numbers.dtype != np.int32 and (numbers.max() > _MOST or numbers.min() < -_MOST):
        return None
    return CropTable(numbers.astype(np.int32), op.filter == "bicubic", float(op.oversample))


def _numbers(crop: Crop) -> tuple[int, ...]:
    return (*crop[:4], crop.flip, *(crop.scaled or (0, 0)))


def _is_inside(image: EncodedImage, crop: Crop) -> bool:
    """Return whether a crop is entirely inside the image."""
    across = 0 <= crop.left <= image.width - crop.width
    return across and 0 <= crop.top <= image.height - crop.height


def _shown(image: EncodedImage, crop: Crop) -> Region:
    """Return the region of the image to decode: the crop, or the whole image."""
    if crop.scaled is None and _is_inside(image, crop):
        return Region(*crop[:4])
    return Region(0, 0, image.width, image.height)


def _cut(decoded: DecodedRegion, crop: Crop) -> tuple[TypedPixels, Box]:
    """Return the pixels of ``crop``, black outside the image; a view if it is inside."""
    region = (crop.left - decoded.left, crop.top - decoded.top, crop.width, crop.height)
    box = (0.0, 0.0, float(crop.width), float(crop.height))
    return crop_or_pad(decoded.pixels, region), box


def _reduced(decoded: DecodedRegion, region: Region) -> tuple[TypedPixels, Box]:
    """Return the pixels of a reduced image that show ``region``, and its box among them."""
    height, width = decoded.pixels.shape[:2]
    reduced = decoded.left + width, decoded.top + height
    shown = enclosing(region, reduced, decoded.scale)
    left = shown.left - decoded.left
    top = shown.top - decoded.top
    pixels = decoded.pixels[top : top + shown.height, left : left + shown.width]
    x = region.left * decoded.scale - shown.left
    y = region.top * decoded.scale - shown.top
    right = x + region.width * decoded.scale
    bottom = y + region.height * decoded.scale
    return pixels, (x, y, right, bottom)
