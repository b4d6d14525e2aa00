"""Image operations that decode only what they need; passed to a dataset as ``decode``.

Each selects a piece of an image and its target size (`Piece`) from the image size alone. One
function decodes, crops, scales and flips, directly into the batch. The geometry is that of
torchvision's operations of the same names, so models trained with those can continue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import Pixels
from shardkit.codecs.resize import resize
from shardkit.codecs.scaling import scale
from shardkit.codecs.turbo import Region
from shardkit.dataset.decode import Decoding, Part, decode_part, enclosing
from shardkit.dataset.filling import PIECE_NUMBERS, Pieces
from shardkit.dataset.located import EncodedImage
from shardkit.errors import UsageError
from shardkit.sampling.order import BatchDraws, Draws
from shardkit.system import native

FILTERS = ("bilinear", "bicubic")
_PILLOW_FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}

_MOST = 2**31 - 1
"""The largest number of a piece for the compiled module."""

_ATTEMPTS = 10
"""Random crops to try before using the center crop, as in torchvision."""


class Piece(NamedTuple):
    """The piece of an image that becomes a sample, in pixels."""

    left: int
    top: int
    """May be negative: pixels outside the image are black."""
    width: int
    height: int
    size: tuple[int, int]
    """Height and width that the piece is scaled to."""
    flip: bool = False
    """Whether it is flipped horizontally."""
    whole: tuple[int, int] | None = None
    """Height and width that the image is scaled to before the piece is cut from it."""


@dataclass(frozen=True, kw_only=True)
class ImageOp(ABC):
    """An operation from a stored image to uint8 pixels; subclasses select the piece."""

    random: ClassVar[bool] = True
    """Whether the piece depends on random numbers; if not, it depends only on the image size."""

    filter: str = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """Minimum size of a piece, relative to its target, when a JPEG is decoded at 1/2, 3/8, 1/4 or
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
    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the piece of an image of ``width`` x ``height`` pixels that becomes a sample.

        Args:
            width: Width of the stored image.
            height: Height of the stored image.
            draws: The sample's random numbers.
        """

    def pieces(
        self, widths: list[int], heights: list[int], draws: Callable[[int], Draws]
    ) -> list[Piece]:
        """Return the pieces of a batch of images.

        Args:
            widths: Widths of the stored images.
            heights: Heights of the stored images.
            draws: Returns the random numbers of the image at a position in the batch.
        """
        sizes = list(zip(widths, heights, strict=True))
        if self.random:
            return [self.piece(*size, draws(position)) for position, size in enumerate(sizes)]
        none = Draws(0, 0)  # not used
        known = {size: self.piece(*size, none) for size in set(sizes)}
        return [known[size] for size in sizes]

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.integer[Any]] | None:
        """Return `pieces` as `shardkit.dataset.filling.Pieces` has them, all at once.

        Args:
            widths: Widths of the stored images, from 1 on.
            heights: Heights of the stored images, from 1 on.
            draws: Returns the random numbers of the samples.

        Returns:
            None if this is not implemented, or the samples may differ in size.
        """
        return None

    def render(
        self, image: EncodedImage, piece: Piece, how: Decoding, out: Pixels | None = None
    ) -> Pixels:
        """Return ``piece`` of ``image``: uint8 of shape (height, width, 3).

        Args:
            image: The stored image; its bytes are valid only during the call.
            piece: A piece that `piece` returned.
            how: Decoding options.
            out: Destination of the pixels, with the piece's size; None allocates it.

        Raises:
            BadImage: If the image cannot be decoded, or its size differs from the index.
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

    def _enough(self, image: EncodedImage, piece: Piece) -> tuple[int, int]:
        """Return the minimum width and height to decode at; (0, 0) decodes all pixels."""
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

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the whole image, scaled."""
        return Piece(0, 0, width, height, _resized(self.size, width, height))

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int64] | None:
        """Return the whole images, scaled to one size."""
        if self.fixed_size is None or type(self).piece is not Resize.piece:
            return None
        found = np.zeros((len(widths), PIECE_NUMBERS), np.int64)
        found[:, 2], found[:, 3] = widths, heights
        return found


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

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the center."""
        crop_height, crop_width = _pair(self.size)
        whole_height, whole_width = height, width
        if self.resize is not None:
            whole_height, whole_width = _resized(self.resize, width, height)
        left, top = _center(whole_width, crop_width), _center(whole_height, crop_height)
        size = crop_height, crop_width
        whole = None if self.resize is None else (whole_height, whole_width)
        return Piece(left, top, crop_width, crop_height, size, whole=whole)

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int64] | None:
        """Return the centers."""
        if type(self).piece is not CenterCrop.piece:
            return None
        found = np.zeros((len(widths), PIECE_NUMBERS), np.int64)
        if self.resize is not None:  # as `_resized`
            short = np.minimum(widths, heights)
            widths = np.maximum(1, (self.resize * widths / short).astype(np.int64))
            heights = np.maximum(1, (self.resize * heights / short).astype(np.int64))
            found[:, 5], found[:, 6] = heights, widths
        found[:, 3], found[:, 2] = _pair(self.size)
        for column, whole in ((0, widths), (1, heights)):  # as `_center`
            rest = whole - found[:, column + 2]
            found[:, column] = np.where(rest < 0, -(-rest // 2), np.rint(rest / 2))
        return found


@dataclass(frozen=True)
class RandomResizedCrop(ImageOp):
    """Crop a random piece and scale it, as ``torchvision.transforms.RandomResizedCrop`` does.

    The piece is a function of seed, epoch and row: the same in every worker, rank and resumed run.

    Raises:
        UsageError: If ``size`` is no size, or a range or probability is none.
    """

    size: int | tuple[int, int]
    """Side of the square, or height and width, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the piece's area, as a fraction of the image area."""
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
        if not _is_number(self.flip) or not 0 <= self.flip <= 1:
            raise UsageError(f"flip={self.flip!r} is not a probability, from 0 to 1")

    @property
    def fixed_size(self) -> tuple[int, int]:
        """Height and width of every sample."""
        return _pair(self.size)

    def piece(self, width: int, height: int, draws: Draws) -> Piece:
        """Return the first of ten random pieces that fits, or else the largest center piece."""
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

    def numbers(
        self,
        widths: npt.NDArray[np.int64],
        heights: npt.NDArray[np.int64],
        draws: Callable[[], BatchDraws],
    ) -> npt.NDArray[np.int32] | None:
        """Return the pieces that `piece` draws, from the compiled module."""
        compiled = native.module()
        if compiled is None or type(self).piece is not RandomResizedCrop.piece:
            return None
        (key, samples), found = draws(), np.empty((len(widths), PIECE_NUMBERS), np.int32)
        logs = math.log(self.ratio[0]), math.log(self.ratio[1])
        done = compiled.draw_crops(
            key,
            np.array([sample % 2**64 for sample in samples], np.uint64),
            widths,
            heights,
            tuple(self.scale),
            tuple(self.ratio),
            logs,
            self.flip,
            found,
        )
        return found if done else None


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
    if 0 in (width, height):  # an unchecked image; decoding reports what is wrong with it
        return size, size
    if width <= height:
        return max(1, int(size * height / width)), size
    return size, max(1, int(size * width / height))


def _center(whole: int, crop: int) -> int:
    """Return the start of a center crop; negative if it is larger than the image."""
    return -((crop - whole) // 2) if crop > whole else round((whole - crop) / 2)


def _is_number(value: object) -> bool:
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
    whole = box == (0.0, 0.0, float(width), float(height))
    if whole and size == (height, width):
        return pixels
    fitting = box if whole else (*box[:2], min(box[2], width), min(box[3], height))
    compiled = resize(pixels, fitting, size, name)
    if compiled is not None:
        return compiled
    if not whole:
        image = Image.fromarray(pixels).resize(size[::-1], _PILLOW_FILTERS[name], fitting)
        return np.asarray(image)
    return scale(pixels, size[::-1], name)


def compiled_pieces(op: ImageOp, pieces: list[Piece]) -> Pieces | None:
    """Return ``pieces`` for the compiled module; None if it does not apply."""
    if type(op).render is not ImageOp.render:
        return None
    try:
        if pieces.count(pieces[0]) == len(pieces):  # as for images of one size
            numbers = np.tile(np.array([_numbers(pieces[0])], np.int32), (len(pieces), 1))
        else:
            numbers = np.array([_numbers(piece) for piece in pieces], np.int32)
    except OverflowError:
        return None
    return Pieces(numbers, op.filter == "bicubic", float(op.oversample))


def numbered_pieces(
    op: ImageOp,
    widths: npt.NDArray[np.uint32],
    heights: npt.NDArray[np.uint32],
    draws: Callable[[], BatchDraws],
) -> Pieces | None:
    """Return the pieces of images for the compiled module, all at once; None if `op` cannot."""
    if type(op).render is not ImageOp.render or not len(widths):
        return None
    if not widths.all() or not heights.all():  # not checked when they were converted
        return None
    found = op.numbers(widths.astype(np.int64), heights.astype(np.int64), draws)
    if found is None or found.max() > _MOST or found.min() < -_MOST:
        return None
    return Pieces(found.astype(np.int32), op.filter == "bicubic", float(op.oversample))


def _numbers(piece: Piece) -> tuple[int, ...]:
    return (*piece[:4], piece.flip, *(piece.whole or (0, 0)))


def _is_inside(image: EncodedImage, piece: Piece) -> bool:
    """Return whether a piece is entirely inside the image."""
    across = 0 <= piece.left <= image.width - piece.width
    return across and 0 <= piece.top <= image.height - piece.height


def _shown(image: EncodedImage, piece: Piece) -> Region:
    """Return the region of the image to decode: the piece, or the whole image."""
    if piece.whole is None and _is_inside(image, piece):
        return Region(*piece[:4])
    return Region(0, 0, image.width, image.height)


def _cut(part: Part, piece: Piece) -> tuple[Pixels, Box]:
    """Return the pixels of ``piece``, black outside the image; a view if it is inside."""
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
