"""Image operations that decode no more than they need: passed to a dataset as its ``decode``.

Each decides, from an image's size alone, which piece of it becomes the sample and in which size
(`Piece`); one function decodes, cuts, scales and mirrors, straight into the batch. The geometry is
that of torchvision's operations of the same names, so that a model trained with those may go on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from shardkit.codecs.image import Pixels
from shardkit.codecs.scaling import scale
from shardkit.codecs.turbo import Region
from shardkit.decode import Decoding, Part, decode_part, enclosing
from shardkit.errors import UsageError
from shardkit.order import Draws
from shardkit.shardset import StoredImage

FILTERS = ("bilinear", "bicubic")
_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

_ATTEMPTS = 10
"""As many crops as torchvision tries before it takes the central one."""


class Piece(NamedTuple):
    """What of an image becomes a sample, in pixels."""

    left: int
    top: int
    """May be negative: what lies outside the image is black."""
    width: int
    height: int
    size: tuple[int, int]
    """Height and width that the piece is scaled to."""
    flip: bool = False
    """Whether it is mirrored, left to right."""
    whole: tuple[int, int] | None = None
    """Height and width that the image is scaled to first; the piece is then one of that."""


@dataclass(frozen=True, kw_only=True)
class ImageOp(ABC):
    """An operation from a stored image to uint8 pixels; a subclass says which piece it takes."""

    random: ClassVar[bool] = True
    """Whether the piece depends on random numbers; else images of one size share theirs."""

    filter: str = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """How much larger than its target a piece must stay when a JPEG is decoded at a half, 3/8, a
    quarter or an eighth of its size. 1.0 is fastest; 2.0 stays within 46 dB of decoding all pixels
    (1.0: 38 dB); ``inf`` always decodes all."""

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise UsageError(f"filter={self.filter!r} is unknown; known are {', '.join(FILTERS)}")
        if not _is_number(self.oversample) or not self.oversample >= 1:
            raise UsageError(f"oversample={self.oversample!r} is not a number from 1 on")

    @property
    @abstractmethod
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of every sample, or None if they depend on the image."""

    @abstractmethod
    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the piece of an image of ``width`` x ``height`` pixels that becomes a sample.

        Args:
            width: Of the stored image.
            height: Of the stored image.
            draws: The sample's random numbers.
        """

    def pieces(
        self, widths: list[int], heights: list[int], draws: Callable[[int], Draws]
    ) -> list[Piece]:
        """Return the pieces of a batch of images.

        Args:
            widths: Of the stored images.
            heights: Of the stored images.
            draws: Gives the random numbers of the image at a position in the batch.
        """
        sizes = list(zip(widths, heights, strict=True))
        if self.random:
            return [self.piece(*size, draws(position)) for position, size in enumerate(sizes)]
        known = {size: self.piece(*size, Draws(0, 0)) for size in set(sizes)}
        return [known[size] for size in sizes]

    def render(
        self, image: StoredImage, piece: Piece, how: Decoding, out: Pixels | None = None
    ) -> Pixels:
        """Return ``piece`` of ``image``: uint8 of shape (height, width, 3).

        Args:
            image: The image; its bytes are valid during the call only.
            piece: As `piece` chose it.
            how: How the image is decoded.
            out: Where to put the pixels; of the piece's size.

        Raises:
            BadImage: If the image cannot be decoded, or has not the size that the index gives.
        """
        if out is None:
            out = np.empty((*piece.size, 3), np.uint8)
        shown = _shown(image, piece)
        part = decode_part(image, shown, how, self._enough(image, piece))
        if piece.whole is not None:
            box = (0.0, 0.0, image.width * part.scale, image.height * part.scale)
            part = Part(_scaled(part.pixels, box, piece.whole, self.filter), 0, 0, 1.0)
        pixels, box = _cut(part, piece) if part.scale == 1 else _reduced(part, shown)
        pixels = _scaled(pixels, box, piece.size, self.filter)
        out[:] = pixels[:, ::-1] if piece.flip else pixels
        return out

    def _enough(self, image: StoredImage, piece: Piece) -> tuple[int, int]:
        """Return the width and height at which the image may be decoded; (0, 0) for all pixels."""
        unscaled = piece.size == (piece.height, piece.width)
        if piece.whole is None and (unscaled or not _is_inside(image, piece)):
            return 0, 0
        if math.isinf(self.oversample) or 0 in (image.width, image.height):
            return 0, 0
        if piece.whole is not None:
            needed = max(piece.whole[1] / image.width, piece.whole[0] / image.height)
        else:
            needed = max(piece.size[1] / piece.width, piece.size[0] / piece.height)
        needed *= self.oversample
        return math.ceil(image.width * needed), math.ceil(image.height * needed)


@dataclass(frozen=True)
class Resize(ImageOp):
    """Scale the whole image, as ``torchvision.transforms.Resize`` does.

    Raises:
        UsageError: If ``size`` is no size.
    """

    random: ClassVar[bool] = False

    size: int | tuple[int, int]
    """The shorter side, or height and width, in pixels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "Resize")

    @property
    def fixed_size(self) -> tuple[int, int] | None:
        """Height and width of every sample, if both are given."""
        return None if isinstance(self.size, int) else self.size

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the whole image, scaled."""
        return Piece(0, 0, width, height, _resized(self.size, width, height))


@dataclass(frozen=True)
class CenterCrop(ImageOp):
    """Cut out the centre, as ``torchvision.transforms.CenterCrop`` does; with ``resize`` after it.

    ``CenterCrop(224, resize=256)`` is ``Resize(256)`` and ``CenterCrop(224)`` after it. What a
    smaller image lacks is black.

    Raises:
        UsageError: If a size is no size.
    """

    random: ClassVar[bool] = False

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    resize: int | None = None
    """The shorter side that the image is scaled to before; None leaves it as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "CenterCrop")
        if self.resize is not None:
            _check_size(self.resize, "CenterCrop(resize)", pair=False)

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the centre."""
        crop_height, crop_width = _pair(self.size)
        whole_height, whole_width = height, width
        if self.resize is not None:
            whole_height, whole_width = _resized(self.resize, width, height)
        left, top = _centre(whole_width, crop_width), _centre(whole_height, crop_height)
        size = crop_height, crop_width
        whole = None if self.resize is None else (whole_height, whole_width)
        return Piece(left, top, crop_width, crop_height, size, whole=whole)


@dataclass(frozen=True)
class RandomResizedCrop(ImageOp):
    """Cut out a random piece and scale it, as ``torchvision.transforms.RandomResizedCrop`` does.

    The piece is a function of seed, epoch and row: the same in every worker, rank and resumed run.

    Raises:
        UsageError: If ``size`` is no size, or a range or probability is none.
    """

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the piece's area, as a part of the image's."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of width divided by height, drawn evenly on a logarithmic scale."""
    flip: float = 0.5
    """Probability that it is mirrored, left to right, as ``RandomHorizontalFlip`` would."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "RandomResizedCrop")
        for name in ("scale", "ratio"):
            value = getattr(self, name)
            if not _is_range(value):
                raise UsageError(f"{name}={value!r} is not a range of numbers above 0")
        if not _is_number(self.flip) or not 0 <= self.flip <= 1:
            raise UsageError(f"flip={self.flip!r} is not a probability, from 0 to 1")

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return a random piece: the first of ten that fits, or else the largest central one."""
        size, flip = _pair(self.size), draws.uniform() < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(_ATTEMPTS):
            area = width * height * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(low, high))
            across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < across <= width and 0 < down <= height:
                left, top = draws.below(width - across + 1), draws.below(height - down + 1)
                return Piece(left, top, across, down, size, flip)
        across, down = width, height
        if width < self.ratio[0] * height:
            down = max(1, round(width / self.ratio[0]))
        elif width > self.ratio[1] * height:
            across = max(1, round(height * self.ratio[1]))
        return Piece((width - across) // 2, (height - down) // 2, across, down, size, flip)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_size(size: object, where: str, *, pair: bool = True) -> None:
    sides = size if isinstance(size, tuple) and pair else (size, size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= 65535 for side in sides):
        raise UsageError(
            f"{where}: {size!r} is not a number of pixels"
            + (" and not a pair of height and width" if pair else "")
        )


def _resized(size: int | tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """Return height and width after torchvision's ``Resize``: the longer side is rounded down."""
    if not isinstance(size, int):
        return size
    if width <= height:
        return max(1, int(size * height / width)), size
    return size, max(1, int(size * width / height))


def _centre(whole: int, crop: int) -> int:
    """Return where a central crop begins; negative if it is larger than the whole."""
    return -((crop - whole) // 2) if crop > whole else round((whole - crop) / 2)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_range(value: Any) -> bool:
    """Tell whether this is a pair of finite numbers above 0, the lower one first."""
    if not isinstance(value, (tuple, list)) or not all(map(_is_number, value)):
        return False
    return len(value) == 2 and bool(0 < value[0] <= value[1] < math.inf)


Box = tuple[float, float, float, float]
"""Left, top, right and bottom, maybe at fractions of pixels."""


def _scaled(pixels: Pixels, box: Box, size: tuple[int, int], name: str) -> Pixels:
    """Return a box of an image, scaled to ``size``.

    A JPEG that was decoded at some eighths of its size has its box at fractions of pixels, which
    Pillow can take; for whole pixels PyTorch takes a third of the time.
    """
    height, width = pixels.shape[:2]
    if box != (0.0, 0.0, float(width), float(height)):
        fitting = (*box[:2], min(box[2], width), min(box[3], height))
        image = Image.fromarray(pixels).resize(size[::-1], _PILLOW_FILTERS[name], fitting)
        return np.asarray(image)
    return scale(pixels, size[::-1], name)


def _is_inside(image: StoredImage, piece: Piece) -> bool:
    """Tell whether no part of a piece lies outside the image."""
    across = 0 <= piece.left <= image.width - piece.width
    return across and 0 <= piece.top <= image.height - piece.height


def _shown(image: StoredImage, piece: Piece) -> Region:
    """Return the region of the image that must be decoded: the piece, or else all of it."""
    if piece.whole is None and _is_inside(image, piece):
        return Region(*piece[:4])
    return Region(0, 0, image.width, image.height)


def _cut(part: Part, piece: Piece) -> tuple[Pixels, Box]:
    """Return the pixels of ``piece``, black where it lies outside: a view where it does not."""
    left, top = piece.left - part.left, piece.top - part.top
    box = (0.0, 0.0, float(piece.width), float(piece.height))
    inside = part.pixels[max(0, top) : top + piece.height, max(0, left) : left + piece.width]
    if inside.shape[:2] == (piece.height, piece.width):
        return inside, box
    whole = np.zeros((piece.height, piece.width, 3), np.uint8)
    top, left = max(0, -top), max(0, -left)
    whole[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return whole, box


def _reduced(part: Part, region: Region) -> tuple[Pixels, Box]:
    """Return the pixels of a reduced image that show ``region``, and its box among them."""
    height, width = part.pixels.shape[:2]
    reduced = part.left + width, part.top + height
    shown = enclosing(region, reduced, part.scale)
    left, top = shown.left - part.left, shown.top - part.top
    pixels = part.pixels[top : top + shown.height, left : left + shown.width]
    x, y = region.left * part.scale - shown.left, region.top * part.scale - shown.top
    right, bottom = x + region.width * part.scale, y + region.height * part.scale
    return pixels, (x, y, right, bottom)
