"""Image operations that decode only what they need; passed to a dataset as ``decode``.

Each selects a crop of an image and its target size (`Crop`) from the image size alone. One
function decodes, crops, scales and flips, directly into the batch. The geometry is that of
torchvision's operations of the same names, so models trained with those can continue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import Decoding, Pixels
from shardkit.codecs.reduced import same_scale
from shardkit.codecs.scaling import scale
from shardkit.codecs.turbo import Region
from shardkit.dataset.decode import DecodedPart, decode_part, enclosing
from shardkit.dataset.located import EncodedImage
from shardkit.errors import UsageError
from shardkit.sampling.order import BatchDraws, Draws, below, uniform
from shardkit.system import compiled
from shardkit.system.compiled import CROP_NUMBERS, CropTable

FILTERS = ("bilinear", "bicubic")
_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

MOST_SIDE = 65535
"""Maximum side of a crop: that of a JPEG."""

_MOST = 2**31 - 1
"""The largest number of a crop for the compiled module."""

_ATTEMPTS = 10
"""Random crops to try before using the center crop, as in torchvision."""


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
    """An operation from a stored image to uint8 pixels; subclasses select the crop."""

    random: ClassVar[bool] = True
    """Whether the crop depends on random numbers; if not, it depends only on the image size."""

    filter: str = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """Minimum size of a crop, relative to its target, when a JPEG is decoded at 1/2, 3/8, 1/4 or
    1/8 of its size. 1.0 is fastest; ``inf`` always decodes all pixels. On photographs, the PSNR
    compared with ``inf`` is at least 28 dB for 1.0 (median over 41 dB), and 37 dB for 2.0 (median
    over 51 dB)."""

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise UsageError(f"filter={self.filter!r} is unknown; choose from {', '.join(FILTERS)}")
        if not _is_number(self.oversample) or not self.oversample >= 1:
            raise UsageError(f"oversample={self.oversample!r} is not a number from 1 on")

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

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.integer[Any]] | None:
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
        self, image: EncodedImage, crop: Crop, how: Decoding, out: Pixels | None = None
    ) -> Pixels:
        """Return ``crop`` of ``image``: uint8 of shape (height, width, 3).

        Args:
            image: The stored image; its bytes are valid only during the call.
            crop: A crop that `crop` returned.
            how: Decoding options.
            out: Destination of the pixels, with the crop's size; None allocates it.

        Raises:
            BadImage: If the image cannot be decoded, or its size differs from the index.
        """
        shown = _shown(image, crop)
        part = decode_part(image, shown, how._replace(at_least=self._enough(image, crop)))
        return self._finish(part, shown, crop, out)

    def _finish(self, part: DecodedPart, shown: Region, crop: Crop, out: Pixels | None) -> Pixels:
        """Return ``crop`` from a part of the image that has the region ``shown``."""
        if out is None:
            out = np.empty((*crop.size, 3), np.uint8)
        if crop.scaled is not None:
            box = (0.0, 0.0, shown.width * part.scale, shown.height * part.scale)
            part = DecodedPart(_scaled(part.pixels, box, crop.scaled, self.filter), 0, 0, 1.0)
        pixels, box = _cut(part, crop) if part.scale == 1 else _reduced(part, shown)
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

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int64] | None:
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
        scaled_height, scaled_width = height, width
        if self.resize is not None:
            scaled_height, scaled_width = _resized(self.resize, width, height)
        left, top = _center(scaled_width, crop_width), _center(scaled_height, crop_height)
        size = crop_height, crop_width
        scaled = None if self.resize is None else (scaled_height, scaled_width)
        return Crop(left, top, crop_width, crop_height, size, scaled=scaled)

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int64] | None:
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
            rest = sides - numbers[:, column + 2]
            numbers[:, column] = np.where(rest < 0, -(-rest // 2), np.rint(rest / 2))
        return numbers


@dataclass(frozen=True)
class RandomResizedCrop(ImageOp):
    """Crop a random region and scale it, as ``torchvision.transforms.RandomResizedCrop`` does.

    The crop is a function of seed, epoch and row: the same in every worker, rank and resumed run.

    Raises:
        UsageError: If ``size`` is no size, or a range or probability is none.
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
                raise UsageError(f"{name}={value!r} is not a range of numbers above 0")
        check_probability("flip", self.flip)

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the first of ten random crops that fits, or else the largest center crop."""
        size, flip = _pair(self.size), draws.uniform() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = width * height * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(low, high))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = draws.below(width - across + 1), draws.below(height - down + 1)
                return Crop(left, top, across, down, size, flip)
        across, down = width, height
        if width < self.ratio[0] * height:
            down = max(1, round(width / self.ratio[0]))
        elif width > self.ratio[1] * height:
            across = max(1, round(height * self.ratio[1]))
        return Crop((width - across) // 2, (height - down) // 2, across, down, size, flip)

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int32] | None:
        """Return the crops that `crop` draws, from the compiled module."""
        if type(self).crop is not RandomResizedCrop.crop:
            return None
        sizes, drawn = (widths, heights), draws()
        return compiled.draw_crops(
            (drawn.key, drawn.numbers), sizes, self.scale, self.ratio, self.flip
        )


@dataclass(frozen=True)
class RandomCrop(ImageOp):
    """Crop a random region without scaling, as ``torchvision.transforms.RandomCrop`` does.

    ``RandomCrop(32, padding=4)`` is the usual augmentation of CIFAR, with its flip. An image that
    is smaller than the crop, even with its padding, is at a random place in a black crop, as with
    torchvision's ``pad_if_needed``. The crop is a function of seed, epoch and row.

    Raises:
        UsageError: If ``size`` or ``padding`` is no number of pixels, or ``flip`` no probability.
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
            raise UsageError(f"padding={self.padding!r} is not a number of pixels, from 0 on")
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
        """Return a random crop; all places are equally likely."""
        (crop_height, crop_width), flip = self.fixed_size, draws.uniform() < self.flip
        across, down = self.margins(width, height)
        left = draws.below(width + 2 * across - crop_width + 1) - across
        top = draws.below(height + 2 * down - crop_height + 1) - down
        return Crop(left, top, crop_width, crop_height, (crop_height, crop_width), flip)

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int64] | None:
        """Return the crops that `crop` draws."""
        if type(self).crop is not RandomCrop.crop:
            return None
        numbers = np.zeros((len(widths), CROP_NUMBERS), np.int64)
        numbers[:, 3], numbers[:, 2] = self.fixed_size
        flips, *places = draws().bits(3)
        numbers[:, 4] = uniform(flips) < self.flip
        for column, sides in ((0, widths), (1, heights)):
            crops = numbers[:, column + 2]
            margins = np.maximum(self.padding, crops - sides - self.padding)
            rooms = sides + 2 * margins - crops + 1
            numbers[:, column] = below(places[column], rooms) - margins
        return numbers


OPERATIONS = (CenterCrop, RandomCrop, RandomResizedCrop, Resize)
"""The operations that a text can name, such as ``decode`` of a command."""


def render_views(
    image: EncodedImage, views: Sequence[tuple[ImageOp, Crop, Pixels | None]], how: Decoding
) -> list[Pixels]:
    """Return several views of an image, which is decoded once for each scale that they need.

    Args:
        image: The stored image; its bytes are valid only during the call.
        views: The arguments of `ImageOp.render` for each view.
        how: Decoding options.

    Raises:
        BadImage: If the image cannot be decoded, or its size differs from the index.
    """
    if any(type(op).render is not ImageOp.render for op, _, _ in views):
        return [op.render(image, crop, how, out) for op, crop, out in views]
    sizes = [op._enough(image, crop) for op, crop, _ in views]
    full = image.width, image.height
    # Only JPEGs are decoded at reduced size.
    keys = [same_scale(full, size) if image.field == "jpg" else (8, 1) for size in sizes]
    regions = [_shown(image, crop) for _, crop, _ in views]
    around: dict[tuple[int, int], Region] = {}
    for key, region in zip(keys, regions, strict=True):
        around[key] = _around(around.get(key, region), region)
    decodings = {key: how._replace(at_least=size) for key, size in zip(keys, sizes, strict=True)}
    parts = {key: decode_part(image, around[key], decodings[key]) for key in around}
    return [
        op._finish(parts[key], region, crop, out)
        for key, region, (op, crop, out) in zip(keys, regions, views, strict=True)
    ]


def _around(one: Region, other: Region) -> Region:
    """Return the smallest region that has both."""
    left, top = min(one.left, other.left), min(one.top, other.top)
    right = max(one.left + one.width, other.left + other.width)
    bottom = max(one.top + one.height, other.top + other.height)
    return Region(left, top, right - left, bottom - top)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_size(size: object, where: str, *, pair: bool = True) -> None:
    sides = size if isinstance(size, tuple) and pair else (size, size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= MOST_SIDE for side in sides):
        raise UsageError(
            f"{where}: {size!r} is not a number of pixels"
            + (" and not a pair of height and width" if pair else "")
        )


def check_probability(name: str, value: object) -> None:
    """Raise `UsageError` unless ``value`` is a probability."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise UsageError(f"{name}={value!r} is not a probability, from 0 to 1")


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


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    """Return whether this is an ascending pair of finite numbers above 0."""
    if not isinstance(value, (tuple, list)) or not all(map(_is_number, value)):
        return False
    return len(value) == 2 and bool(0 < value[0] <= value[1] < math.inf)


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, possibly fractional."""


def _scaled(pixels: Pixels, box: Box, size: tuple[int, int], name: str) -> Pixels:
    """Return a box of an image, scaled to ``size``.

    The compiled module computes what Pillow does. Without it, a JPEG that was decoded at reduced
    size has a fractional box, which only Pillow supports. For whole pixels, PyTorch takes a third
    of the time.
    """
    height, width = pixels.shape[:2]
    is_full = box == (0.0, 0.0, float(width), float(height))
    if is_full and size == (height, width):
        return pixels
    fitting = box if is_full else (*box[:2], min(box[2], width), min(box[3], height))
    scaled = compiled.resize(pixels, fitting, size, name)
    if scaled is not None:
        return scaled
    if not is_full:
        image = Image.fromarray(pixels).resize(size[::-1], _PILLOW_FILTERS[name], fitting)
        return np.asarray(image)
    return scale(pixels, size[::-1], name)


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
    draws: Callable[[], BatchDraws],
) -> CropTable | None:
    """Return the crops of images for the compiled module, all at once; None if `op` cannot."""
    if type(op).render is not ImageOp.render or not len(widths):
        return None
    if not widths.all() or not heights.all():  # not checked when they were converted
        return None
    numbers = op.numbers(widths.astype(np.int64), heights.astype(np.int64), draws)
    if numbers is None or numbers.max() > _MOST or numbers.min() < -_MOST:
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


def _cut(part: DecodedPart, crop: Crop) -> tuple[Pixels, Box]:
    """Return the pixels of ``crop``, black outside the image; a view if it is inside."""
    left, top = crop.left - part.left, crop.top - part.top
    box = (0.0, 0.0, float(crop.width), float(crop.height))
    bottom, right = max(0, top + crop.height), max(0, left + crop.width)
    inside = part.pixels[max(0, top) : bottom, max(0, left) : right]
    if inside.shape[:2] == (crop.height, crop.width):
        return inside, box
    pixels = np.zeros((crop.height, crop.width, 3), np.uint8)
    top, left = max(0, -top), max(0, -left)
    pixels[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return pixels, box


def _reduced(part: DecodedPart, region: Region) -> tuple[Pixels, Box]:
    """Return the pixels of a reduced image that show ``region``, and its box among them."""
    height, width = part.pixels.shape[:2]
    reduced = part.left + width, part.top + height
    shown = enclosing(region, reduced, part.scale)
    left, top = shown.left - part.left, shown.top - part.top
    pixels = part.pixels[top : top + shown.height, left : left + shown.width]
    x, y = region.left * part.scale - shown.left, region.top * part.scale - shown.top
    right, bottom = x + region.width * part.scale, y + region.height * part.scale
    return pixels, (x, y, right, bottom)
