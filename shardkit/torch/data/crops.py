"""The operations on images. Each selects a crop from the size of an image.

Their geometry is that of torchvision's operations of the same names, so models trained with those
can continue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from shardkit.errors import UsageError, setting
from shardkit.sampling.order import Draws, below, uniform
from shardkit.system import compiled
from shardkit.system.compiled import CROP_NUMBERS
from shardkit.torch.data.ops import Crop, CropNumbers, ImageOp, MakeDraws, Sides, is_number

MOST_SIDE = 65535
"""Maximum side of a crop: that of a JPEG."""

_ATTEMPTS = 10
"""Random crops to try before using the center crop, as in torchvision."""


@dataclass(frozen=True)
class Resize(ImageOp):
    """Scale the whole image, as ``torchvision.transforms.Resize`` does.

    Raises:
        UsageError: If ``size`` is invalid.
    """

    random: ClassVar[bool] = False

    size: int | tuple[int, int]
    """The shorter side, or height and width, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "Resize")

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of every sample if both are set, else None."""
        return None if isinstance(self.size, int) else self.size

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the whole image, scaled."""
        return Crop(0, 0, width, height, _resized(self.size, width, height))

    def numbers(self, widths: Sides, heights: Sides, draws: MakeDraws) -> CropNumbers | None:
        """Return the whole images, scaled to one size."""
        if self.fixed_size is None or type(self).crop is not Resize.crop:
            return None
        numbers = np.zeros((len(widths), CROP_NUMBERS), np.int64)
        numbers[:, 2], numbers[:, 3] = widths, heights
        return numbers


@dataclass(frozen=True)
class CenterCrop(ImageOp):
    """Crop the center, as ``torchvision.transforms.CenterCrop`` does.

    ``CenterCrop(224, resize=256)`` is ``Resize(256)`` followed by ``CenterCrop(224)``. Pixels
    outside a smaller image are black.

    Raises:
        UsageError: If a size is invalid.
    """

    random: ClassVar[bool] = False

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    resize: int | None = None
    """Shorter side to scale the image to before cropping; None does not scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "CenterCrop")
        if self.resize is not None:
            _check_size(self.resize, "CenterCrop(resize)", pair=False)

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the center."""
        crop_height, crop_width = _pair(self.size)
        scaled_height = height
        scaled_width = width
        if self.resize is not None:
            scaled_height, scaled_width = _resized(self.resize, width, height)
        left = _center(scaled_width, crop_width)
        top = _center(scaled_height, crop_height)
        size = crop_height, crop_width
        scaled = None if self.resize is None else (scaled_height, scaled_width)
        return Crop(left, top, crop_width, crop_height, size, scaled=scaled)

    def numbers(self, widths: Sides, heights: Sides, draws: MakeDraws) -> CropNumbers | None:
        """Return the centers."""
        if type(self).crop is not CenterCrop.crop:
            return None
        numbers = np.zeros((len(widths), CROP_NUMBERS), np.int64)
        if self.resize is not None:  # as `_resized`
            short = np.minimum(widths, heights)
            widths = np.maximum(1, (self.resize * widths / short).astype(np.int64))
            heights = np.maximum(1, (self.resize * heights / short).astype(np.int64))
            numbers[:, 5], numbers[:, 6] = heights, widths
        numbers[:, 3], numbers[:, 2] = _pair(self.size)
        for column, sides in ((0, widths), (1, heights)):  # as `_center`
            margin = sides - numbers[:, column + 2]
            numbers[:, column] = np.where(margin < 0, -(-margin // 2), np.rint(margin / 2))
        return numbers


@dataclass(frozen=True)
class RandomResizedCrop(ImageOp):
    """Crop a random region and scale it, as ``torchvision.transforms.RandomResizedCrop`` does.

    The crop is a function of seed, epoch and row: the same in every worker, rank and resumed run.

    Raises:
        UsageError: If ``size``, a range or a probability is invalid.
    """

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the crop's area, as a fraction of the image area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of width divided by height, drawn uniformly on a logarithmic scale."""
    flip: float = 0.5
    """Probability of a horizontal flip, as in ``RandomHorizontalFlip``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "RandomResizedCrop")
        for name in ("scale", "ratio"):
            value = getattr(self, name)
            if not _is_range(value):
                raise UsageError(f"{setting(name, value)} must be a range of numbers above 0")
        check_probability("flip", self.flip)

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the first of ten random crops that fits, or else the largest center crop."""
        size = _pair(self.size)
        flip = draws.uniform() < self.flip
        low = math.log(self.ratio[0])
        high = math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = width * height * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(low, high))
            across = round(math.sqrt(area * ratio))
            down = round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left = draws.below(width - across + 1)
                top = draws.below(height - down + 1)
                return Crop(left, top, across, down, size, flip)
        across = width
        down = height
        if width < self.ratio[0] * height:
            down = max(1, round(width / self.ratio[0]))
        elif width > self.ratio[1] * height:
            across = max(1, round(height * self.ratio[1]))
        return Crop((width - across) // 2, (height - down) // 2, across, down, size, flip)

    def numbers(self, widths: Sides, heights: Sides, draws: MakeDraws) -> CropNumbers | None:
        """Return the crops that `crop` draws, from the compiled module."""
        if type(self).crop is not RandomResizedCrop.crop:
            return None
        sizes = (widths, heights)
        drawn = draws()
        return compiled.draw_crops(
            (drawn.key, drawn.numbers), sizes, self.scale, self.ratio, self.flip
        )


@dataclass(frozen=True)
class RandomCrop(ImageOp):
    """Crop a random region without scaling, as ``torchvision.transforms.RandomCrop`` does.

    ``RandomCrop(32, padding=4)`` is the usual augmentation of CIFAR, with its flip. An image that
    is smaller than the crop, even with its padding, is at a random position in a black crop, as
    with torchvision's ``pad_if_needed``. The crop is a function of seed, epoch and row.

    Raises:
        UsageError: If ``size`` or ``padding`` is not a number of pixels, or ``flip`` is not a
            probability.
    """

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    padding: int = 0
    """Black pixels to add on each side of the image before cropping."""
    flip: float = 0.5
    """Probability of a horizontal flip, as in ``RandomHorizontalFlip``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "RandomCrop")
        if type(self.padding) is not int or not 0 <= self.padding <= MOST_SIDE:
            raise UsageError(f"padding must be at least 0 pixels, not {self.padding!r}")
        check_probability("flip", self.flip)

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def margins(self, width: int, height: int) -> tuple[int, int]:
        """Return by how many pixels a crop may exceed an image: to each side, and up and down."""
        crop_height, crop_width = self.fixed_size
        across = max(self.padding, crop_width - width - self.padding)
        return across, max(self.padding, crop_height - height - self.padding)

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return a random crop; all positions are equally likely."""
        (crop_height, crop_width), flip = self.fixed_size, draws.uniform() < self.flip
        across, down = self.margins(width, height)
        left = draws.below(width + 2 * across - crop_width + 1) - across
        top = draws.below(height + 2 * down - crop_height + 1) - down
        return Crop(left, top, crop_width, crop_height, (crop_height, crop_width), flip)

    def numbers(self, widths: Sides, heights: Sides, draws: MakeDraws) -> CropNumbers | None:
        """Return the crops that `crop` draws."""
        if type(self).crop is not RandomCrop.crop:
            return None
        numbers = np.zeros((len(widths), CROP_NUMBERS), np.int64)
        numbers[:, 3], numbers[:, 2] = self.fixed_size
        flips, *offsets = draws().bits(3)
        numbers[:, 4] = uniform(flips) < self.flip
        for column, sides in ((0, widths), (1, heights)):
            crops = numbers[:, column + 2]
            margins = np.maximum(self.padding, crops - sides - self.padding)
            rooms = sides + 2 * margins - crops + 1
            numbers[:, column] = below(offsets[column], rooms) - margins
        return numbers


OPERATIONS = (CenterCrop, RandomCrop, RandomResizedCrop, Resize)
"""The operations that a text can name, such as ``decode`` of a command."""


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_size(size: object, where: str, *, pair: bool = True) -> None:
    sides = size if isinstance(size, tuple) and pair else (size, size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= MOST_SIDE for side in sides):
        pairs = " or a pair (height, width)" if pair else ""
        raise UsageError(f"{where}: the size must be a number of pixels{pairs}, not {size!r}")


def check_probability(name: str, value: object) -> None:
    """Raise `UsageError` unless ``value`` is a probability."""
    if not is_number(value) or not 0 <= value <= 1:
        raise UsageError(f"{setting(name, value)} must be a probability from 0 to 1")


def _resized(size: int | tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Return height and width after torchvision's ``Resize``: the longer side is rounded down."""
    if not isinstance(size, int):
        return size
    if 0 in (width, height):  # an unchecked image; decoding reports what is wrong with it
        return size, size
    if width <= height:
        return max(1, int(size * height / width)), size
    return size, max(1, int(size * width / height))


def _center(side: int, crop: int) -> int:
    """Return the start of a center crop; negative if it is larger than the image."""
    return -((crop - side) // 2) if crop > side else round((side - crop) / 2)


def _is_range(value: Any) -> bool:
    """Return whether this is an ascending pair of finite numbers above 0."""
    if not isinstance(value, (tuple, list)) or not all(map(is_number, value)):
        return False
    return len(value) == 2 and bool(0 < value[0] <= value[1] < math.inf)
