"""The recipe: decides how a conversion checks and changes the images of each record.

`shardkit.codecs.image` does the work. Masks, boxes and keypoints follow the geometry of
the primary image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from operator import index
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from PIL import Image, ImageColor

from shardkit.codecs.geometry import Geometry, centered
from shardkit.codecs.image import (
    FILTERS,
    WHITE,
    Coding,
    Color,
    Decoding,
    ImageInfo,
    Pixels,
    apply_orientation,
    coding_of,
    decode,
    encode,
    inspect,
)
from shardkit.codecs.image_type import MOST_CHANNELS, RGB, ImageType, pixel_kind
from shardkit.codecs.jpeg_faults import jpeg_loss
from shardkit.codecs.limits import MAX_PIXELS, in_turn_if_large
from shardkit.codecs.quiet import quiet
from shardkit.codecs.reduced import reduction
from shardkit.codecs.structure import webp_is_lossless
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.kinds.mask import LOSSY, moved_mask
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
from shardkit.record import (
    ARRAY_IMAGE,
    FOREIGN_FIELD,
    IMAGE,
    META_FIELD,
    PLANES,
    Record,
    dump_json,
    image_field,
    image_kind,
    image_name,
)
from shardkit.system import compiled
from shardkit.system.late import load

_Size = tuple[int, int]
"""Width and height, in pixels."""

_ONE_IMAGE: Schema = {IMAGE: Field("image")}

PIXELS = ("rgb", "gray", "keep")
RESIZE_MODES = ("shorter", "longer", "crop", "pad", "stretch")
CHECKS = ("decode", "header", "none")
DEFAULT_QUALITY = 90

TOO_SMALL = "--enlarge or --resize-mode pad"
"""Options that accept images too small for raw pixels of one size, as messages name them."""

_TORCH_FILTERS = ("bicubic", "bilinear")
"""The `FILTERS` that torch has with antialiasing."""

ENCODED_AS = {"jpeg": "jpg", "png": "png", "webp": "webp", "raw": "raw", "planes": PLANES}
"""The image field of each encoding; ``keep`` keeps that of the file."""
_TYPED_ENCODINGS = {"gray": ("keep", "png", "jpeg", "raw"), "keep": ("keep", "png", "raw")}
"""Encodings of typed images: those that hold all of their types, or one that is checked later."""
_KEPT = ("jpg", "png", "webp")
"""Encodings that ``keep`` keeps if pixels change; others become PNG."""

NOTES = ("damaged", "dropped", "frames", "odd", "orientation", "small")
"""Notes on an image in its record's metadata: the source had lost data (only with
``tolerate_damage``), has boxes or keypoints outside of the crop (counted, but not in the metadata),
has several frames, has a harmless fault, has an EXIF orientation that is not applied, or is smaller
than the requested size."""

CHECK_NOTES = frozenset(("damaged", "odd"))
"""The `NOTES` that result from decoding an image."""

RE_ENCODE = "which cannot be stored as it is; --encode jpeg, png or webp re-encodes it"

TOLERATE = "--tolerate-damage stores it with the pixels that Pillow decodes"


def parse_size(resize: int | tuple[int, int] | str) -> int | tuple[int, int]:
    """Return a number of pixels, or height and width.

    Raises:
        UsageError: If ``resize`` is a text of neither.
    """
    if not isinstance(resize, (int, str)):
        return resize
    match = re.fullmatch(r"([0-9]{1,9})(?:[xX]([0-9]{1,9}))?", str(resize))
    if match is None:
        raise UsageError(
            f"resize={str(resize)[:40]!r} is neither a number of pixels (256) nor HxW (224x224)"
        )
    height, width = match.groups()
    return (int(height), int(width)) if width else int(height)


def spell_size(resize: int | tuple[int, int]) -> str:
    """Return the text that `parse_size` parses."""
    return str(resize) if isinstance(resize, int) else f"{resize[0]}x{resize[1]}"


def parse_color(color: str | Color) -> Color:
    """Return an RGB color, given as one or as a name or code.

    Raises:
        UsageError: If the name is unknown.
    """
    if not isinstance(color, str):
        return color
    try:
        return ImageColor.getrgb(color)[:3]
    except ValueError:
        raise UsageError(
            f"background={color!r} is not a color such as white, #808080 or rgb(124,116,104)"
        ) from None


def spell_color(color: Color) -> str:
    """Return the text that `parse_color` parses."""
    return "white" if color == WHITE else "#{:02x}{:02x}{:02x}".format(*color)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """The options of `Recipe`."""

    HEADING: ClassVar[str] = "Images"

    resize: int | tuple[int, int] | str | None = option(
        None,
        help="Scale images to N pixels, or to height x width.",
        metavar="N|HxW",
        parse=parse_size,
        spell=spell_size,
    )
    resize_mode: str | None = option(
        None,
        help="Scale the shorter or longer side to N (or cover or fit into HxW), fill HxW and crop "
        "the rest, fit and pad, or stretch.",
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
    resizer: str = option(
        "pillow",
        help="Library that scales images. torch (bicubic or bilinear) is faster for large folders, "
        "but each process needs 1 s and 200 MB to load it. A few values differ from Pillow's, by 1 "
        "or 2.",
        choices=("pillow", "torch"),
        requires="resize",
        left_out=True,
    )
    dct_scaling: bool = option(
        False,
        help="Decode JPEGs at reduced size if their sides are at least 4x the target's. 2.5x "
        "faster for 2000-pixel photographs, but not exact: PSNR compared with the default, over "
        "200 photographs, was at least 38 dB, and 50 dB or more in the median.",
        requires="resize",
        left_out=True,
    )
    enlarge: bool = option(
        False, help="Allow images to become larger than they are.", requires="resize"
    )
    encode: str = option(
        "keep",
        help="Encoding of stored images. keep: leave bytes unchanged unless pixels must change. "
        "raw: unencoded pixels, all of one size. planes: JPEGs as the planes of their decoder "
        "(Y4M), converted to RGB when read: the same pixels, about 4.5x the size, center crops 6x "
        "faster; other images keep their bytes unless pixels must change.",
        choices=("keep", "jpeg", "png", "webp", "raw", "planes"),
    )
    quality: int | None = option(
        None,
        help="JPEG and WebP quality. If given, all of these images are re-encoded.",
        metavar="1-100",
        shown=f"{DEFAULT_QUALITY} where an image must be encoded",
    )
    pixels: str = option(
        "rgb",
        help="Channels and values of stored images. rgb: RGB of 8 bits; of 16 bits, readers keep "
        "the upper eight. gray: one channel of 8 bits. keep: channels and dtype of the first "
        "image; any other image is a bad file.",
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
            raise UsageError(f"quality {self.quality} is not from 1 to 100")
        if self.quality is not None and self.encode in ("png", "raw", "planes"):
            raise UsageError(
                f"quality has no effect with the encoding {self.encode}: leave one out"
            )
        if self.resizer == "torch" and self.filter not in _TORCH_FILTERS:
            raise UsageError(
                f"the resizer torch has no filter {self.filter}: use "
                f"{' or '.join(_TORCH_FILTERS)}, or the resizer pillow"
            )
        self._check_pixels()
        if self.dct_scaling and self.resizer != "pillow":
            raise UsageError("dct_scaling requires a resize with the resizer pillow")
        if self.resize is not None and self.resize_mode is None:
            mode = "shorter" if isinstance(self.resize, int) else "crop"
            object.__setattr__(self, "resize_mode", mode)
        if type(self.resize) is int:
            object.__setattr__(self, "resize", (self.resize, self.resize))
        if self.resize is not None and (
            not isinstance(self.resize, tuple) or len(self.resize) != 2
        ):
            raise UsageError(f"resize={self.resize!r} is not a pair of height and width")
        if self.box is not None and not all(1 <= side <= 65535 for side in self.box):
            height, width = self.box
            raise UsageError(f"resize='{height}x{width}' is not from 1 to 65535 pixels")
        if not all(0 <= part <= 255 for part in self.fill):
            raise UsageError(f"background {self.background} is not three numbers from 0 to 255")
        if self.encode == "raw" and not self.has_fixed_size:
            raise UsageError(
                "the encoding raw requires images of one size: resize to HxW in the mode crop, "
                "pad or stretch"
            )
        if math.prod(self.raw_shape or ()) >= 2**32:
            raise UsageError("resize makes raw images of over 4 GiB each")

    def _check_pixels(self) -> None:
        if not 1 <= require_integer("channels", self.channels) <= MOST_CHANNELS:
            raise UsageError(f"channels {self.channels} is not from 1 to {MOST_CHANNELS}")
        if self.pixels == "rgb":
            return
        encodings = _TYPED_ENCODINGS[self.pixels]
        if self.encode not in encodings:
            raise UsageError(
                f"encode={self.encode!r} does not hold the images of pixels={self.pixels!r}: use "
                f"{' or '.join(encodings)}, or pixels='rgb'"
            )
        if self.quality is not None and self.encode != "jpeg":
            raise UsageError(f"quality with pixels={self.pixels!r} requires encode='jpeg'")
        if self.resizer != "pillow" or self.dct_scaling:
            raise UsageError(
                f"resizer='torch' and dct_scaling are for pixels='rgb': leave them out with "
                f"pixels={self.pixels!r}"
            )
        if self.pixels == "keep" and self.fill != WHITE:
            raise UsageError(
                "background has no effect with pixels='keep', which pads with 0 and keeps alpha: "
                "leave it out"
            )

    @property
    def box(self) -> _Size | None:
        """Height and width of `resize`, in pixels."""
        return cast("_Size | None", self.resize)

    @property
    def fill(self) -> Color:
        """The color `background`."""
        return cast(Color, self.background)

    @property
    def has_fixed_size(self) -> bool:
        """Whether all images get the same size, unless some are smaller."""
        return self.resize is not None and self.resize_mode in ("crop", "pad", "stretch")

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
    def _coding(self) -> Coding | None:
        """The encoding, if it is no image file; it may replace that of a JPEG."""
        return coding_of(ENCODED_AS.get(self.encode, ""))

    @property
    def scaling(self) -> dict[str, Any]:
        """The options that require ``resize``, by name."""
        return {item.name: getattr(self, item.name) for item in _SCALING}

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, for the manifest."""
        value = describe(self)
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
        """Refuse to convert without the libraries that the encoding needs.

        Raises:
            UsageError: If one is missing.
        """
        if coding := self._coding:
            coding.require()

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context manager in which to apply the recipe to many images.

        It loads the library that scales, and keeps that library from starting threads.
        """
        if self.resizer == "pillow":
            return nullcontext()
        context: AbstractContextManager[None] = _scaling().one_thread()
        return context

    def apply(self, record: Record, schema: Schema = _ONE_IMAGE) -> Record:
        """Return the record to store, with each image's size and notes in its metadata.

        Args:
            record: The record, as its source returned it.
            schema: The fields of all records.

        Raises:
            BadImage: If an image fails the check, or cannot be converted as requested.
        """
        return self.apply_with_notes(record, schema)[0]

    def apply_with_notes(
        self, record: Record, schema: Schema = _ONE_IMAGE, *, proven: bool = False
    ) -> tuple[Record, dict[str, int]]:
        """Return the result of `apply` and the `NOTES` on the images.

        Args:
            record: The record, as its source returned it.
            schema: The fields of all records.
            proven: Whether its image certainly decodes without a warning.

        Raises:
            BadImage: As for `apply`.
        """
        others = _others(schema)
        if self.copy:
            return record, _notes_in(record.meta, others)
        field = record.image_field or FOREIGN_FIELD
        typed = schema[IMAGE].pixels if IMAGE in schema else None
        simple = field in record.fields and image_kind(field) not in ("raw", PLANES, ARRAY_IMAGE)
        if not others and simple and typed is None:
            image = self._convert_file(record.fields[field], image_kind(field), proven=proven)
            return _stored(record, field, image), image.notes
        fields = dict(record.fields)
        meta = {name: value for name, value in record.meta.items() if name not in NOTES}
        view = None
        notes = dict[str, int]()
        if field in fields:
            original = Original(fields.pop(field), image_kind(field), record.meta, typed)
            image = self._convert(original)
            fields[image_name(IMAGE, image.field)] = image.content
            meta |= image.described
            notes |= image.notes
            view = image.view
        for name in others:
            try:
                notes |= self._convert_other(fields, meta, name, schema[name], view)
            except BadImage as error:
                raise BadImage(f"{name}: {error}") from error
        return Record(record.key, {**fields, META_FIELD: dump_json(meta)}), notes

    def _convert_other(
        self,
        fields: dict[str, bytes],
        meta: dict[str, Any],
        name: str,
        field: Field,
        view: Geometry | None,
    ) -> dict[str, int]:
        """Convert an image other than the primary one, or what follows that; return the notes."""
        if not field.type.is_picture:
            if name not in meta or view is None or view.is_identity:
                return {}
            meta[name], lacking = field.type.move(field, meta[name], view)
            return {"dropped": 1} if lacking else {}
        stored = image_field(fields, name) or f"{name}.{FOREIGN_FIELD}"
        if stored not in fields:
            return {}
        original = Original(fields.pop(stored), image_kind(stored), meta.get(name), field.pixels)
        if field.type.follows:
            image = self._mask(*original.as_file(), view)
        else:
            image = self._convert(original)
        fields[f"{name}.{image.field}"] = image.content
        meta[name] = image.described
        return image.notes

    def _mask(self, data: bytes, field: str, view: Geometry | None) -> ConvertedImage:
        """Return a mask under the geometry of its image."""
        info = self._inspect(data, field)
        if field in LOSSY:
            raise BadImage(f"a mask cannot be a {field} file, which changes values: use PNG")
        size = info.width, info.height
        if view is None:
            view = Geometry(size, info.orientation, *self.geometry(*info.upright))
        if size != view.stored and not (view.is_identity and self.keeps_bytes):
            raise BadImage(
                f"the mask is {size[0]} x {size[1]} pixels; its image is {view.stored[0]} x "
                f"{view.stored[1]}"
            )
        if view.is_identity and field != FOREIGN_FIELD:
            if self.check == "decode" and not info.surely_decodes:
                self._decode(data, field, {})
            return ConvertedImage(field, data, size, {}, view)
        content = moved_mask(data, field, view)
        return ConvertedImage("png", content, view.canvas, {}, view)

    def _convert(self, original: Original) -> ConvertedImage:
        """Check an image, and change it if the recipe says so."""
        # An array becomes RGB of 8 bits in no way that suits all.
        is_array = original.field == ARRAY_IMAGE
        kind = "typed" if is_array else pixel_kind(original.pixels)
        convert: Conversion = load(_CONVERSIONS[kind])
        return convert(self, original)

    def _convert_file(
        self, data: bytes, field: str, turned: int = 1, *, proven: bool = False
    ) -> ConvertedImage:
        """Check an image, unless it is ``proven``, and change it if the recipe says so."""
        info = self._inspect(data, field)
        if field == PLANES:
            info = replace(info, orientation=turned)
        with in_turn_if_large(info.width, info.height):
            return self._convert_inspected(data, field, info, proven=proven)

    def _convert_inspected(
        self, data: bytes, field: str, info: ImageInfo, *, proven: bool
    ) -> ConvertedImage:
        if info.kind and self.keeps_bytes:
            decode(data, field, Decoding(self.fill))  # raises if re-encoding would fail too
            raise BadImage(f"it is an image of the format {info.kind}, {RE_ENCODE}")
        plan = self._plan(info, field)
        notes = self.header_notes(info)
        if plan is None:
            stored = field, data
            if field == "jpg" and (coding := self._coding):
                stored = self._recode(data, coding, notes)
            elif self.check == "decode" and not (
                proven or info.surely_decodes or (field == "jpg" and compiled.jpeg_decodes(data))
            ):
                self._decode(data, field, notes)
            if info.orientation != 1:
                notes["orientation"] = info.orientation
            size = info.width, info.height
            return ConvertedImage(*stored, size, notes, Geometry(size, 1, size, size))
        check_size(plan.size, plan.canvas)
        image = self._change(data, field, info, plan, notes)
        self.require_raw_size(image.width, image.height, info)
        content = encode(image, plan.field, self._quality_for(data, field))
        view = Geometry((info.width, info.height), info.orientation, plan.size, plan.canvas)
        return ConvertedImage(plan.field, content, image.size, notes, view)

    def _quality_for(self, data: bytes, field: str) -> int | None:
        """Return the quality of a changed image; None to keep a lossless WebP lossless."""
        if (
            field == "webp"
            and self.encode == "keep"
            and not self.quality
            and webp_is_lossless(data)
        ):
            return None
        return self.quality or DEFAULT_QUALITY

    def header_notes(self, info: ImageInfo) -> dict[str, int]:
        """Return the notes on an image that its header decides."""
        notes: dict[str, int] = {}
        if self.resize_mode != "pad" and not self.enlarge and self._enlarges(*info.upright):
            notes["small"] = 1
        if info.frames > 1:
            notes["frames"] = info.frames
        return notes

    def require_raw_size(self, width: int, height: int, info: ImageInfo) -> None:
        """Refuse a changed image that is too small for raw pixels of one size."""
        if self.raw_shape and (height, width) != self.box:
            raise BadImage(
                f"it has {info.width} x {info.height} pixels, too few without enlarging or padding "
                f"({TOO_SMALL})"
            )

    def _recode(self, data: bytes, coding: Coding, notes: dict[str, int]) -> tuple[str, bytes]:
        """Return field and content: a JPEG recoded if that has its pixels, or else the JPEG."""
        pixels = self._decode(data, "jpg", notes)
        content = None if CHECK_NOTES & notes.keys() else coding.from_jpeg(data)
        if content is None or not np.array_equal(coding.decode(content, None, None), pixels):
            return "jpg", data
        return ENCODED_AS[self.encode], content

    def _decode(
        self, data: bytes, field: str, notes: dict[str, int], at_least: _Size = (0, 0)
    ) -> Pixels:
        """Decode an image; note its faults, or raise for them."""
        warnings: list[str] = []
        how = Decoding(self.fill, at_least=at_least)
        pixels = decode(data, field, how, warnings=warnings)
        self.judge(data, warnings, notes)
        return pixels

    def judge(self, data: bytes, warnings: list[str], notes: dict[str, int]) -> None:
        """Note what libjpeg warned about a JPEG, or raise for it."""
        for warning in warnings:
            loss = jpeg_loss(data, warning)
            if loss and not self.tolerate_damage:
                raise BadImage(f"it is damaged: {loss} ({TOLERATE})")
            notes["damaged" if loss else "odd"] = 1

    def _inspect(self, data: bytes, field: str) -> ImageInfo:
        try:
            return inspect(data, field)
        except BadImage:
            if self.check == "none" and self.keeps_bytes and field != FOREIGN_FIELD:
                return ImageInfo(0, 0)
            raise

    def _enlarges(self, width: int, height: int) -> bool:
        """Return whether the box is larger than an upright image of this size."""
        if self.box is None:
            return False
        box_height, box_width = self.box
        if self.resize_mode in ("longer", "pad"):
            return width < box_width and height < box_height
        return width < box_width or height < box_height

    def _plan(self, info: ImageInfo, field: str) -> _Change | None:
        """Return the change that an image needs, or None if its bytes can be stored unchanged."""
        if self.keeps_bytes and field != FOREIGN_FIELD:
            return None
        geometry = self.geometry(*info.upright)
        turned = self.orient and info.orientation != 1
        unchanged = geometry == (info.upright, info.upright) and not turned
        wanted = ENCODED_AS.get(self.encode, field)
        if unchanged and self._coding:  # which does not change the pixels of a JPEG
            wanted = field
        if unchanged and self.quality is None and wanted == field != FOREIGN_FIELD:
            return None
        if (self.encode == "keep" and field not in _KEPT) or wanted == FOREIGN_FIELD:
            wanted = "png"
        return _Change(wanted, *geometry)

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

    def _change(
        self, data: bytes, field: str, info: ImageInfo, plan: _Change, notes: dict[str, int]
    ) -> Image.Image:
        if self.dct_scaling and field == "jpg" and plan.size != info.upright:
            image = self._scale_by_dct(data, notes, info, plan.size)
        else:
            image = self._scale(self._decode(data, field, notes), info.orientation, plan.size)
        if plan.canvas != plan.size:
            image = _crop_or_pad(image, plan.canvas, self.fill)
        return image

    def _scale(self, pixels: Pixels, orientation: int, size: _Size) -> Image.Image:
        """Return ``pixels`` as an upright, scaled image."""
        if orientation != 1:
            pixels = np.array(apply_orientation(Image.fromarray(pixels), orientation))
        height, width = pixels.shape[:2]
        if size == (width, height):
            return Image.fromarray(pixels)
        if self.resizer == "torch":
            return Image.fromarray(_scaling().scale(pixels, size, self.filter))
        return self._resize(pixels, size, (0.0, 0.0, float(width), float(height)))

    def _resize(
        self, pixels: Pixels, size: _Size, box: tuple[float, float, float, float]
    ) -> Image.Image:
        """Scale a box of an image as Pillow does, with the compiled module if possible."""
        scaled = compiled.resize(pixels, box, (size[1], size[0]), self.filter)
        if scaled is not None:
            return Image.fromarray(scaled)
        return Image.fromarray(pixels).resize(size, FILTERS[self.filter], box)

    def _scale_by_dct(
        self, data: bytes, notes: dict[str, int], info: ImageInfo, size: _Size
    ) -> Image.Image:
        """Return a JPEG scaled to ``size``, from a reduced decode with at least twice its sides."""
        width, height = size if info.orientation < 5 else size[::-1]
        pixels = self._decode(data, "jpg", notes, (2 * width, 2 * height))
        scale = reduction(pixels.shape, (info.height, info.width))
        if scale is None:  # pragma: no cover - both decoders read the size from the same header
            raise BadImage(f"it decodes to {pixels.shape}, but its header describes {info}")
        box = (0.0, 0.0, info.width * scale, info.height * scale)
        image = self._resize(pixels, (width, height), box)
        return apply_orientation(image, info.orientation)


_SCALING = [item for item in options_of(RecipeOptions) if item.requires == "resize"]


class Original(NamedTuple):
    """An image before its conversion."""

    data: bytes
    field: str
    """Its kind: a name in `shardkit.record.IMAGE_FIELDS`, `ARRAY_IMAGE`, or a foreign one."""
    described: Any
    """What the metadata of its record state of it, if that is a dataset's."""
    pixels: ImageType | None
    """Its type in the schema; None for RGB of 8 bits."""

    @property
    def size(self) -> _Size:
        """Width and height of raw pixels, from the metadata.

        Raises:
            BadImage: If they are missing.
        """
        try:
            return index(self.described["width"]), index(self.described["height"])
        except (KeyError, TypeError) as error:
            raise BadImage(f"its metadata lacks the size of its pixels: {error!r}") from error

    @property
    def orientation(self) -> int:
        """The EXIF orientation that the metadata note."""
        noted = self.described.get("orientation") if isinstance(self.described, dict) else None
        return noted if type(noted) is int and 2 <= noted <= 8 else 1

    def as_file(self) -> tuple[bytes, str]:
        """Return an image of RGB and its kind; raw pixels as a file.

        Raises:
            BadImage: If their size is missing.
        """
        if self.field != "raw":
            return self.data, self.field
        return b"P6 %d %d 255\n" % self.size + self.data, "ppm"


class ConvertedImage(NamedTuple):
    """An image to store."""

    field: str
    """Its kind: a name in `shardkit.record.IMAGE_FIELDS`."""
    content: bytes
    size: _Size
    notes: dict[str, int]
    view: Geometry
    """What became of the pixels."""

    @property
    def described(self) -> dict[str, Any]:
        """Size and notes as stored in the metadata."""
        return {"width": self.size[0], "height": self.size[1], **self.notes}


class _Geometry(NamedTuple):
    """Size to scale an upright image to, and canvas to crop or pad it to."""

    size: _Size
    canvas: _Size


Conversion = Callable[[Recipe, Original], ConvertedImage]
"""Checks an image of one kind of pixels, and changes it if the recipe says so."""

_CONVERSIONS = {
    "rgb": "shardkit.recipe:convert_rgb",
    "typed": "shardkit.conversion.typed:convert_typed",
}
"""A `Conversion` for each `pixel_kind`."""


def convert_rgb(recipe: Recipe, original: Original) -> ConvertedImage:
    """Check an image that becomes RGB of 8 bits, and change it if the recipe says so."""
    return recipe._convert_file(*original.as_file(), original.orientation)


@dataclass(frozen=True, slots=True)
class _Change:
    """Change of one image: scale to ``size``, crop or pad to ``canvas``, encode as ``field``."""

    field: str
    size: _Size
    canvas: _Size


def _scaling() -> Any:
    """Return the module that loads torch, only for recipes that need it."""
    return import_module("shardkit.codecs.scaling")


def check_size(*sizes: _Size) -> None:
    """Refuse sizes over the limit: 60,000 x 1 pixels enlarged to 256 rows would be 4e9 pixels."""
    for width, height in sizes:
        if width * height > MAX_PIXELS:
            raise BadImage(
                f"it would become {width} x {height} pixels, over the limit of {MAX_PIXELS}"
            )


def _crop_or_pad(image: Image.Image, canvas: _Size, background: Color) -> Image.Image:
    """Return an image of the canvas's size: the center of ``image``, or ``image`` centered."""
    left, top = centered(image.size, canvas)
    if canvas[0] <= image.width and canvas[1] <= image.height:
        with quiet():  # Pillow takes large pieces for decompression bombs
            return image.crop((left, top, left + canvas[0], top + canvas[1]))
    padded = Image.new("RGB", canvas, background)
    padded.paste(image, (-left, -top))
    return padded


def _others(schema: Schema) -> list[str]:
    """Return the fields that a recipe can change, except the primary image."""
    return [
        name
        for name, field in schema.items()
        if name != IMAGE and (field.type.is_picture or field.type.follows)
    ]


def _notes_in(meta: Mapping[str, Any], others: Iterable[str]) -> dict[str, int]:
    """Return the notes in the metadata of a record of a dataset."""
    described = [meta, *(meta[name] for name in others if isinstance(meta.get(name), dict))]
    return {name: 1 for values in described for name in NOTES if name in values}


def _stored(record: Record, field: str, image: ConvertedImage) -> Record:
    """Return a record with one image, changed; ``field`` is that of the image before."""
    fields = {name: value for name, value in record.fields.items() if name != field}
    size = image.size
    notes = image.notes
    meta = fields.get(META_FIELD, b"{}")
    if not notes and meta.startswith(b'{"path":"') and meta.count(b'":') == 1:
        # Parsing and encoding again takes twice as long as all other work on a small file.
        meta = b'{"height":%d,%b,"width":%d}' % (size[1], meta[1:-1], size[0])
    else:
        kept = {name: value for name, value in record.meta.items() if name not in NOTES}
        meta = dump_json({**kept, **image.described})
    return Record(record.key, {**fields, image.field: image.content, META_FIELD: meta})
