"""The recipe: decides how a conversion checks and changes each image.

`shardkit.pipeline` carries it out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

from PIL import ImageColor

from shardkit.codecs.image import FILTERS, WHITE, Coding, Color, ImageInfo, coding_of
from shardkit.codecs.image_type import MOST_CHANNELS, RGB, ImageType
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.errors import UsageError, setting
from shardkit.options import (
    changed,
    describe,
    option,
    options_of,
    require_integer,
    require_valid,
    restored,
    words,
)
from shardkit.record import ARRAY_IMAGE, FOREIGN_FIELD, PLANES

Size = tuple[int, int]
"""Width and height, in pixels."""

PIXELS = ("rgb", "gray", "keep")
RESIZE_MODES = ("shorter", "longer", "crop", "pad", "stretch")
CHECKS = ("decode", "header", "none")
DEFAULT_QUALITY = 90

TOO_SMALL = f"{setting('enlarge', True)} or {setting('resize_mode', 'pad')}"
"""Options that accept images too small for raw pixels of one size."""

ENCODED_AS = {"jpeg": "jpg", "png": "png", "webp": "webp", "raw": "raw", "planes": PLANES}
"""The image field of each encoding; ``keep`` keeps that of the file."""
_TYPED_ENCODINGS = {"gray": ("keep", "png", "jpeg", "raw"), "keep": ("keep", "png", "raw")}
"""Encodings of typed images: each holds all of their types, or every image is checked."""
_KEPT = ("jpg", "png", "webp")
"""Encodings that ``keep`` keeps if pixels change; others become PNG."""

NOTES = ("damaged", "dropped", "frames", "odd", "orientation", "small")
"""Notes on an image in its record's metadata: the source had lost data (only with
``tolerate_damage``), has boxes or keypoints outside of the crop (counted, but not in the metadata),
has several frames, has a harmless fault, has an EXIF orientation that is not applied, or is smaller
than the requested size."""

CHECK_NOTES = frozenset(("damaged", "odd"))
"""The `NOTES` that result from decoding an image."""

RE_ENCODE = (
    f"which cannot be stored unchanged; {setting('encode', 'jpeg')}, png or webp re-encodes it"
)

MORE_PIXELS = f"{setting('max_pixels')} raises it for {setting('resize')}"

TOLERATE = f"{setting('tolerate_damage', True)} stores it with the pixels that Pillow decodes"


def parse_size(resize: int | tuple[int, int] | str) -> int | tuple[int, int]:
    """Return a number of pixels, or height and width; UsageError for other texts."""
    if not isinstance(resize, (int, str)):
        return resize
    match = re.fullmatch(r"([0-9]{1,9})(?:[xX]([0-9]{1,9}))?", str(resize))
    if match is None:
        raise UsageError(
            f"{setting('resize', str(resize)[:40])} must be a number of pixels (256) or HxW "
            "(224x224)"
        )
    height, width = match.groups()
    return (int(height), int(width)) if width else int(height)


def spell_size(resize: int | tuple[int, int]) -> str:
    """Return the text that `parse_size` parses."""
    return str(resize) if isinstance(resize, int) else f"{resize[0]}x{resize[1]}"


def parse_color(color: str | Color) -> Color:
    """Return an RGB color, given as one or as a name or code."""
    if not isinstance(color, str):
        return color
    try:
        return ImageColor.getrgb(color)[:3]
    except ValueError:
        raise UsageError(
            f"{setting('background', color)} must be a color such as white, #808080 or "
            "rgb(124,116,104)"
        ) from None


def _are_integers(value: Any, count: int) -> bool:
    is_tuple = isinstance(value, tuple) and len(value) == count
    return is_tuple and all(type(number) is int for number in value)


def spell_color(color: Color) -> str:
    """Return the text that `parse_color` parses."""
    return "white" if color == WHITE else "#{:02x}{:02x}{:02x}".format(*color)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of `Recipe`."""

    HEADING: ClassVar[str] = "Images"

    resize: int | tuple[int, int] | str | None = option(
        None,
        help="Scale one side of each image to N pixels, or the image to height x width.",
        metavar="N|HxW",
        parse=parse_size,
        spell=spell_size,
    )
    resize_mode: str | None = option(
        None,
        help="shorter, longer: scale that side to N, or cover HxW or fit into it. crop: cover "
        "HxW and crop the excess. pad: fit into HxW and pad. stretch: ignore the aspect ratio.",
        choices=RESIZE_MODES,
        shown="shorter for N, crop for HxW",
        requires="resize",
    )
    filter: str = option(
        "bicubic",
        help="Interpolation; all filters are antialiased.",
        choices=tuple(FILTERS),
        requires="resize",
    )
    dct_scaling: bool = option(
        False,
        help="Decode JPEGs at reduced size if their sides are at least 4x the target's. This is "
        "2.5x faster for 2000-pixel photographs, but not exact: over 200 photographs, the PSNR "
        "was at least 38 dB, with a median of at least 50 dB.",
        requires="resize",
        left_out=True,
    )
    enlarge: bool = option(
        False, help="Enlarge images that are smaller than the target.", requires="resize"
    )
    max_pixels: int | None = option(
        None,
        help="Read images of up to N pixels, if memory allows.",
        metavar="N",
        minimum=MAX_PIXELS,
        shown=f"{MAX_PIXELS}",
        requires="resize",
        left_out=True,
    )
    encode: str = option(
        "keep",
        help="Encoding of stored images. keep: leave bytes unchanged unless pixels must change. "
        "raw: store unencoded pixels; all images must have one size. planes: store JPEGs as "
        "decoded Y4M planes, which readers convert to RGB. The pixels are the same, the files "
        "are about 4.5x as large, and center crops are 6x faster. Other images keep their bytes "
        "unless pixels must change.",
        choices=("keep", "jpeg", "png", "webp", "raw", "planes"),
    )
    quality: int | None = option(
        None,
        help="JPEG and WebP quality; re-encodes all JPEG and WebP images.",
        metavar="1-100",
        shown=f"{DEFAULT_QUALITY} where an image must be encoded",
    )
    pixels: str = option(
        "rgb",
        help="Channels and dtype of stored images. rgb: 8-bit RGB, with the upper eight bits of "
        "16-bit images. gray: one 8-bit channel. keep: as in the first image; images of another "
        "type count as bad files.",
        choices=PIXELS,
        left_out=True,
    )
    background: str | Color = option(
        WHITE,
        help="Color under transparent pixels and around padded images.",
        metavar="COLOR",
        parse=parse_color,
        spell=spell_color,
    )
    orient: bool = option(False, help="Apply the EXIF orientation, even if nothing else changes.")
    check: str = option("decode", help="Depth of image validation.", choices=CHECKS)
    tolerate_damage: bool = option(
        False,
        help="Store damaged JPEGs that Pillow can decode; readers return Pillow's pixels.",
        left_out=True,
    )


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeOptions):
    """Checks and changes of each image. By default, bytes are stored unchanged.

    Raises:
        UsageError: If options contradict each other or are out of range.
    """

    copy: bool = False
    """Whether records come from a dataset and are stored unchanged and unchecked."""

    channels: int = RGB.channels
    """Channels of stored images, which a plan sets for typed ones."""

    def __post_init__(self) -> None:
        require_valid(self)
        if self.quality is not None and not 1 <= require_integer("quality", self.quality) <= 100:
            raise UsageError(f"{setting('quality', self.quality)} must be from 1 to 100")
        if self.quality is not None and self.encode in ("png", "raw", "planes"):
            raise UsageError(
                f"quality has no effect with the {self.encode} encoding",
                remedy="leave out one of them",
            )
        self._check_pixels()
        if self.resize is not None and self.resize_mode is None:
            mode = "shorter" if isinstance(self.resize, int) else "crop"
            object.__setattr__(self, "resize_mode", mode)  # manifests state what was done
        if type(self.resize) is int:
            object.__setattr__(self, "resize", (self.resize, self.resize))
        elif self.resize is not None and not _are_integers(self.resize, 2):
            raise UsageError(f"{setting('resize', self.resize)} must be a pair of height and width")
        # A JPEG states its sides in 16 bits.
        if self.box is not None and not all(1 <= side <= 65535 for side in self.box):
            size = "{}x{}".format(*self.box)
            raise UsageError(f"{setting('resize', size)} must be from 1 to 65535 pixels")
        if not _are_integers(self.fill, 3) or not all(0 <= channel <= 255 for channel in self.fill):
            raise UsageError(f"background {self.background} must be three numbers from 0 to 255")
        has_one_size = self.resize is not None and self.resize_mode in ("crop", "pad", "stretch")
        if self.encode == "raw" and not has_one_size:
            raise UsageError(
                "the raw encoding requires images of one size: resize to HxW with mode crop, pad "
                "or stretch"
            )
        if math.prod(self.raw_shape or ()) >= 2**32:  # the index has 32 bits for a length
            raise UsageError("resize would produce raw images of over 4 GiB each")

    def _check_pixels(self) -> None:
        if not 1 <= require_integer("channels", self.channels) <= MOST_CHANNELS:
            raise UsageError(f"channels {self.channels} must be from 1 to {MOST_CHANNELS}")
        if self.pixels == "rgb":
            return
        encodings = _TYPED_ENCODINGS[self.pixels]
        if self.encode not in encodings:
            raise UsageError(
                f"{setting('encode', self.encode)} cannot store images with "
                f"{setting('pixels', self.pixels)}",
                remedy=f"use {' or '.join(encodings)}, or {setting('pixels', 'rgb')}",
            )
        if self.quality is not None and self.encode != "jpeg":
            raise UsageError(
                f"quality with {setting('pixels', self.pixels)} requires "
                f"{setting('encode', 'jpeg')}"
            )
        if self.dct_scaling:
            raise UsageError(
                f"{setting('dct_scaling', True)} requires {setting('pixels', 'rgb')}",
                remedy=f"leave it out with {setting('pixels', self.pixels)}",
            )
        if self.pixels == "keep" and self.fill != WHITE:
            raise UsageError(
                f"background has no effect with {setting('pixels', 'keep')}, which pads with 0 "
                "and keeps alpha",
                remedy="leave it out",
            )

    @property
    def box(self) -> Size | None:
        """Height and width of `resize`, in pixels."""
        return cast("Size | None", self.resize)

    @property
    def fill(self) -> Color:
        """The color `background`."""
        return cast(Color, self.background)

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of every image stored as raw pixels, or None."""
        return (*self.box, self.channels) if self.box and self.encode == "raw" else None

    @property
    def keeps_bytes(self) -> bool:
        """Whether no image can change, so the stored sizes equal the file sizes."""
        unchanged = not (self.resize or self.orient or self.quality)
        return self.copy or (self.encode == "keep" and unchanged and self.pixels != "gray")

    @property
    def coding(self) -> Coding | None:
        """The encoding, if it is not an image file; it may replace a JPEG's encoding."""
        return coding_of(ENCODED_AS.get(self.encode, ""))

    @property
    def scaling(self) -> dict[str, Any]:
        """The options that require ``resize``, by name."""
        return {item.name: getattr(self, item.name) for item in _SCALING}

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, for the manifest."""
        value = describe(self)
        # Left out at their defaults, so that the manifests of other datasets keep their bytes.
        if not self.copy:
            del value["copy"]
        if self.channels == RGB.channels:
            del value["channels"]
        return {**value, "resize_mode": self.resize_mode or "shorter"}

    @classmethod
    def restored(cls, value: Mapping[str, Any]) -> Recipe:
        """Return the recipe that `describe` described as ``value``.

        Raises:
            UsageError: If an option in ``value`` is out of range.
            TypeError: If ``value`` does not describe a recipe.
        """
        # `describe` states a resize mode even without a resize, which `Recipe` refuses.
        has_no_effect = () if value.get("resize") else ("resize", "resize_mode")
        return restored(cls, {name: value[name] for name in value if name not in has_no_effect})

    def words(self) -> list[str]:
        """Return the words of the command `shardkit convert` that give this recipe."""
        values = changed(self)
        if self.box is not None:
            height, width = self.box
            if self.resize_mode == "shorter" and height == width:
                values["resize"] = height
                del values["resize_mode"]
            elif self.resize_mode == "crop":
                del values["resize_mode"]
        return words(Recipe, values)

    def require_codecs(self) -> None:
        """Check that the libraries that the encoding needs are installed.

        Raises:
            UsageError: If one is missing.
        """
        if coding := self.coding:
            coding.require()

    def header_notes(self, info: ImageInfo) -> dict[str, int]:
        """Return the notes on an image that its header decides."""
        notes: dict[str, int] = {}
        if self.resize_mode != "pad" and not self.enlarge and self._enlarges(*info.upright):
            notes["small"] = 1
        if info.frames > 1:
            notes["frames"] = info.frames
        return notes

    def _enlarges(self, width: int, height: int) -> bool:
        """Return whether the box is larger than an upright image of this size."""
        if self.box is None:
            return False
        box_height, box_width = self.box
        if self.resize_mode in ("longer", "pad"):
            return width < box_width and height < box_height
        return width < box_width or height < box_height

    def plan(self, info: ImageInfo, field: str, wanted: ImageType | None) -> Change | None:
        """Return the change that an image needs, or None if its bytes can be stored unchanged.

        Args:
            info: What its header declares.
            field: Its kind: a name in `shardkit.record.IMAGE_FIELDS`, or a foreign one.
            wanted: Its type in the schema; None if it becomes 8-bit RGB.
        """
        geometry = self.geometry(*info.upright)
        # Photographs are upright by one rule, whatever their size: also those that --resize keeps.
        turns = self.orient or self.box is not None or self.quality is not None
        turned = turns and info.orientation != 1
        unchanged = geometry == (info.upright, info.upright) and not turned
        # A coding does not change the pixels of a JPEG, and is for no other file.
        keeps = self.encode == "keep" or (unchanged and self.coding is not None)
        encoding = ENCODED_AS.get(self.encode, "")
        if keeps:
            as_it_is = wanted is None and field in _KEPT
            encoding = field if as_it_is else (wanted or RGB).lossless
        # An array from Python is not a file of the user's: PNG is smaller.
        stays = encoding == field or (keeps and field not in (ARRAY_IMAGE, FOREIGN_FIELD))
        if unchanged and stays and info.pixels == (wanted or RGB) and self.quality is None:
            return None
        return Change(encoding, *geometry)

    def geometry(self, width: int, height: int) -> _Geometry:
        """Return the size to scale an upright image to, and the canvas to crop or pad it to."""
        if self.box is None:
            return _Geometry((width, height), (width, height))
        box_height, box_width = self.box
        if self.resize_mode == "stretch":
            size = box_width, box_height
            if not self.enlarge:
                size = min(width, box_width), min(height, box_height)
            return _Geometry(size, size)
        cover = self.resize_mode in ("shorter", "crop")
        # One side is scaled to the box exactly. The other is rounded down, as in
        # torchvision.transforms.Resize.
        by_width = (box_width * height >= box_height * width) == cover
        if by_width:
            size = box_width, max(1, box_width * height // width)
        else:
            size = max(1, box_height * width // height), box_height
        if not self.enlarge and self._enlarges(width, height):
            size = width, height
        canvas = size
        if self.resize_mode == "crop":
            canvas = min(size[0], box_width), min(size[1], box_height)
        elif self.resize_mode == "pad":
            canvas = box_width, box_height
        return _Geometry(size, canvas)


_SCALING = [item for item in options_of(RecipeOptions) if item.requires == "resize"]


class _Geometry(NamedTuple):
    """Size to scale an upright image to, and canvas to crop or pad it to."""

    size: Size
    canvas: Size


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one image: scale to ``size``, crop or pad to ``canvas``, encode as ``field``."""

    field: str
    size: Size
    canvas: Size
