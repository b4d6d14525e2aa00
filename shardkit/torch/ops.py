"""Image operations that decode no more than they need: passed to a dataset as its ``decode``.

Each decides, from an image's size alone, which piece of it becomes the sample and in which size
(`Piece`); one function decodes, cuts, scales and mirrors, straight into the batch. The geometry is
that of torchvision's operations of the same names, so that a model trained with those may go on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from shardkit.codecs.image import Colour, Pixels
from shardkit.decode import decode_stored
from shardkit.errors import UsageError
from shardkit.order import Draws
from shardkit.shardset import StoredImage

FILTERS = ("bilinear", "bicubic")

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


@dataclass(frozen=True, kw_only=True)
class ImageOp(ABC):
    """An operation from a stored image to uint8 pixels; a subclass says which piece it takes."""

    filter: str = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """How much larger than its target a piece must stay when a JPEG is decoded at a half, 3/8, a
    quarter or an eighth of its size. 1.0 is fastest; 2.0 stays within 51 dB of decoding all pixels;
    ``inf`` always decodes all."""

    def __post_init__(self) -> None:
        if self.filter not in FILTERS:
            raise UsageError(f"filter={self.filter!r} is unknown; known are {', '.join(FILTERS)}")
        if not self.oversample >= 1:
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

    def render(
        self, image: StoredImage, piece: Piece, background: Colour, out: Pixels | None = None
    ) -> Pixels:
        """Return ``piece`` of ``image``: uint8 of shape (height, width, 3).

        Args:
            image: The image.
            piece: As `piece` chose it.
            background: RGB colour under transparent pixels.
            out: Where to put the pixels; of the piece's size.

        Raises:
            BadImage: If the image cannot be decoded, or has not the size that the index gives.
        """
        if out is None:
            out = np.empty((*piece.size, 3), np.uint8)
        pixels = decode_stored(image, background=background, at_least=self._enough(image, piece))
        height, width = pixels.shape[:2]
        if (height, width) != (image.height, image.width):
            piece = _scaled(piece, width / image.width, height / image.height)
        pixels = _cut(pixels, piece)
        if pixels.shape[:2] == piece.size:
            out[:] = pixels[:, ::-1] if piece.flip else pixels
            return out
        source = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
        scaled = functional.interpolate(source, piece.size, mode=self.filter, antialias=True)[0]
        torch.from_numpy(out).permute(2, 0, 1).copy_(scaled.flip(2) if piece.flip else scaled)
        return out

    def _enough(self, image: StoredImage, piece: Piece) -> tuple[int, int]:
        """Return the width and height at which the image may be decoded; (0, 0) for all pixels."""
        height, width = piece.size
        if math.isinf(self.oversample):
            return 0, 0
        scale = self.oversample * max(width / piece.width, height / piece.height)
        return math.ceil(image.width * scale), math.ceil(image.height * scale)


@dataclass(frozen=True)
class Resize(ImageOp):
    """Scale the whole image, as ``torchvision.transforms.Resize`` does.

    Raises:
        UsageError: If ``size`` is no size.
    """

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

    ``CenterCrop(224, resize=256)`` is ``Resize(256)`` and ``CenterCrop(224)`` in one step that
    scales no pixel twice and none outside the crop. What a smaller image lacks is black.

    Raises:
        UsageError: If a size is no size.
    """

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    resize: int | None = None
    """The shorter side that the image is scaled to before; None leaves it as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_size(self.size, "CenterCrop")
        if self.resize is not None:
            _check_size(self.resize, "CenterCrop(resize)")

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
        left = _centre(whole_width, crop_width)
        top = _centre(whole_height, crop_height)
        # From pixels of the scaled image back to those of the stored one.
        across, down = width / whole_width, height / whole_height
        return Piece(
            round(left * across),
            round(top * down),
            max(1, round(crop_width * across)),
            max(1, round(crop_height * down)),
            (crop_height, crop_width),
        )


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
            if len(value) != 2 or not 0 < value[0] <= value[1]:
                raise UsageError(f"{name}={value!r} is not a range of numbers above 0")
        if not 0 <= self.flip <= 1:
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
            down = round(width / self.ratio[0])
        elif width > self.ratio[1] * height:
            across = round(height * self.ratio[1])
        return Piece((width - across) // 2, (height - down) // 2, across, down, size, flip)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_size(size: object, where: str) -> None:
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= 65535 for side in sides):
        raise UsageError(
            f"{where}: {size!r} is neither a number of pixels nor a pair of height and width"
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


def _scaled(piece: Piece, across: float, down: float) -> Piece:
    """Return the piece in the pixels of an image that was decoded smaller."""
    left, top = round(piece.left * across), round(piece.top * down)
    right = round((piece.left + piece.width) * across)
    bottom = round((piece.top + piece.height) * down)
    return piece._replace(
        left=left, top=top, width=max(1, right - left), height=max(1, bottom - top)
    )


def _cut(pixels: Pixels, piece: Piece) -> Pixels:
    """Return the pixels of ``piece``, black where it lies outside: a view where it does not."""
    right, bottom = piece.left + piece.width, piece.top + piece.height
    inside = pixels[max(0, piece.top) : bottom, max(0, piece.left) : right]
    if inside.shape[:2] == (piece.height, piece.width):
        return inside
    whole = np.zeros((piece.height, piece.width, 3), np.uint8)
    top, left = max(0, -piece.top), max(0, -piece.left)
    whole[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return whole
