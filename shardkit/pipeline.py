"""The pipeline: checks and changes the images of a record, as its recipe plans.

Masks, boxes and keypoints follow the geometry of the primary image.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from shardkit.codecs.geometry import Geometry, centered, crop_or_pad, turn
from shardkit.codecs.image import Coding, Color, Decoding, ImageInfo, encode, pixel_codec, resize
from shardkit.codecs.image_type import RGB, ImageType, TypedPixels
from shardkit.codecs.libjpeg import LEAST_SIDE, jpeg_loss, reduction, sufficient_eighths
from shardkit.codecs.limits import MAX_PIXELS, TooManyPixels, in_turn_if_large, pixels_up_to
from shardkit.codecs.structure import webp_is_lossless
from shardkit.errors import BadImage
from shardkit.kinds.field import Field, Schema
from shardkit.kinds.mask import LOSSY, moved_mask
from shardkit.recipe import (
    CHECK_NOTES,
    DEFAULT_QUALITY,
    ENCODED_AS,
    MORE_PIXELS,
    NOTES,
    RE_ENCODE,
    TOLERATE,
    TOO_SMALL,
    Change,
    Recipe,
    Size,
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
from shardkit.system.npy import npy_header

if TYPE_CHECKING:
    from shardkit.record_columns import RecordColumns

_NOTED = re.compile(b'"(?:%b)"' % "|".join(NOTES).encode())
"""Metadata that may have notes; parsing them takes longer than copying a small record."""

_ONE_IMAGE: Schema = {IMAGE: Field("image")}


class ConvertedRecord(NamedTuple):
    """A record to store."""

    record: Record
    """With each image's size and notes in its metadata."""
    notes: dict[str, int]
    """The `NOTES` on its images."""


def convert_record(
    recipe: Recipe, record: Record, schema: Schema = _ONE_IMAGE, *, proven: bool = False
) -> ConvertedRecord:
    """Check the images of a record, and change them if the recipe says so.

    ``schema`` has the fields of all records; ``proven`` states that the image certainly decodes
    without a warning. BadImage if an image fails the check, or cannot be converted as requested.
    """
    if recipe.copy:
        noted = _NOTED.search(record.fields.get(META_FIELD, b""))
        return ConvertedRecord(record, _notes_in(record.meta, _others(schema)) if noted else {})
    others = _others(schema)
    if recipe.max_pixels is None:
        return _convert(recipe, record, schema, others, proven=proven)
    with pixels_up_to(recipe.max_pixels):
        return _convert(recipe, record, schema, others, proven=proven)


def stores_unchanged(recipe: Recipe, schema: Schema, records: RecordColumns) -> bool:
    """Return whether `convert_record` returns these records as they are, without notes."""
    if recipe.copy:
        return not _NOTED.search(b"".join(filter(None, records.values(META_FIELD))))
    names = [name for name, _ in records.columns]
    return not (_others(schema) or image_field(names) or FOREIGN_FIELD in names)


def _convert(
    recipe: Recipe, record: Record, schema: Schema, others: list[str], *, proven: bool
) -> ConvertedRecord:
    field = record.image_field or FOREIGN_FIELD
    pixels = schema[IMAGE].pixels if IMAGE in schema else None
    image = None
    if field in record.fields:
        kind = image_kind(field)
        meta = record.meta if kind in _DESCRIBED else None
        original = Original(record.fields[field], kind, meta, pixels)
        image = _Conversion(recipe, original).image(proven=proven)
        if not others:
            return ConvertedRecord(_stored(record, field, image), image.notes)
    elif not others:
        return ConvertedRecord(record, {})
    return _convert_others(recipe, record, {name: schema[name] for name in others}, image)


def _convert_others(
    recipe: Recipe, record: Record, others: Schema, image: ConvertedImage | None
) -> ConvertedRecord:
    """Convert the images other than the primary one, and what follows that."""
    fields = dict(record.fields)
    meta = {name: value for name, value in record.meta.items() if name not in NOTES}
    notes = dict[str, int]()
    if image is not None:
        fields.pop(record.image_field or FOREIGN_FIELD)
        fields[image_name(IMAGE, image.field)] = image.content
        meta |= image.described
        notes |= image.notes
    view = None if image is None else image.view
    for name, field in others.items():
        try:
            if field.type.is_picture:
                picture = _convert_picture(recipe, _take(fields, meta, name, field), field, view)
                if picture is not None:
                    fields[f"{name}.{picture.field}"] = picture.content
                    meta[name] = picture.described
                    notes |= picture.notes
            elif name in meta and view is not None and not view.is_identity:
                meta[name], lacking = field.type.move(field, meta[name], view)
                notes |= {"dropped": 1} if lacking else {}
        except BadImage as error:
            raise BadImage(f"{name}: {error.problem}", remedy=error.remedy) from error
    return ConvertedRecord(Record(record.key, {**fields, META_FIELD: dump_json(meta)}), notes)


def _take(
    fields: dict[str, bytes], meta: Mapping[str, Any], name: str, field: Field
) -> Original | None:
    """Remove an image other than the primary one from the fields of a record, and return it."""
    stored = image_field(fields, name) or f"{name}.{FOREIGN_FIELD}"
    if stored not in fields:
        return None
    return Original(fields.pop(stored), image_kind(stored), meta.get(name), field.pixels)


def _convert_picture(
    recipe: Recipe, original: Original | None, field: Field, view: Geometry | None
) -> ConvertedImage | None:
    """Convert an image, or a mask under the geometry of its image."""
    if original is None:
        return None
    conversion = _Conversion(recipe, original)
    return conversion.mask(view) if field.type.follows else conversion.image()


_DESCRIBED = ("raw", PLANES)
"""Kinds of images that need their metadata."""


class Original(NamedTuple):
    """An image before its conversion."""

    data: bytes
    field: str
    """Its kind: a name in `shardkit.record.IMAGE_FIELDS`, `ARRAY_IMAGE`, or a foreign one."""
    described: Any
    """Its entry in the metadata of the record, if that comes from a dataset."""
    pixels: ImageType | None
    """Its type in the schema; None if it becomes 8-bit RGB."""

    @property
    def size(self) -> Size:
        """Width and height of raw pixels, from the metadata; BadImage if they are missing."""
        try:
            return index(self.described["width"]), index(self.described["height"])
        except (KeyError, TypeError) as error:
            raise BadImage("its metadata lacks its width or height") from error

    @property
    def orientation(self) -> int:
        """The EXIF orientation that the metadata note."""
        noted = self.described.get("orientation") if isinstance(self.described, dict) else None
        return noted if type(noted) is int and 2 <= noted <= 8 else 1

    def as_file(self) -> tuple[bytes, str]:
        """Return an image and its kind; raw pixels as a file.

        BadImage if their size is missing, or they are of another type.
        """
        if self.field != "raw":
            return self.data, self.field
        width, height = self.size
        kind = self.pixels
        if kind is None or len(self.data) == width * height * RGB.bytes:  # to become of that type
            return b"P6 %d %d 255\n" % (width, height) + self.data, "ppm"
        if len(self.data) != width * height * kind.bytes:
            raise BadImage(f"its raw pixels are not {kind}", remedy="convert its source again")
        return npy_header((height, width, kind.channels), kind.values) + self.data, ARRAY_IMAGE


class ConvertedImage(NamedTuple):
    """An image to store."""

    field: str
    """Its kind: a name in `shardkit.record.IMAGE_FIELDS`."""
    content: bytes
    size: Size
    notes: dict[str, int]
    view: Geometry
    """The changes to the pixels."""

    @property
    def described(self) -> dict[str, Any]:
        """Size and notes as stored in the metadata."""
        return {"width": self.size[0], "height": self.size[1], **self.notes}


class _Conversion:
    """The conversion of one image or mask."""

    def __init__(self, recipe: Recipe, original: Original) -> None:
        """Read the header; BadImage if it is damaged, or no such image is wanted."""
        self.recipe = recipe
        self.data, self.field = original.as_file()
        self.wanted = original.pixels
        self.pixels = "keep" if recipe.pixels == "rgb" else recipe.pixels
        if self.wanted is None and self.field != ARRAY_IMAGE:  # arrays are refused: `require`
            self.pixels = "rgb"
        self.codec = pixel_codec(self.pixels)
        self.info = self._inspect()
        self.codec.require(self.info, self.field, self.wanted)
        if self.field == PLANES:
            self.info = replace(self.info, orientation=original.orientation)
        self.size = self.info.width, self.info.height
        self.notes = recipe.header_notes(self.info)

    def _inspect(self) -> ImageInfo:
        try:
            return self.codec.inspect(self.data, self.field)
        except BadImage as error:
            unchecked = self.recipe.check == "none" and self.recipe.keeps_bytes
            # Stored as it is; the size 0 x 0 in the index means that it is unknown.
            if unchecked and self.pixels == "rgb" and self.field != FOREIGN_FIELD:
                return ImageInfo(0, 0)
            if isinstance(error, TooManyPixels):
                raise BadImage(f"{error.stated} ({MORE_PIXELS})") from error
            raise

    def image(self, *, proven: bool = False) -> ConvertedImage:
        """Check an image, unless it is ``proven``, and change it if the recipe says so."""
        with in_turn_if_large(*self.size):
            if self.info.kind and self.recipe.keeps_bytes and self.pixels == "rgb":
                self._decode()  # raises if re-encoding would fail too
                raise BadImage(f"its format is {self.info.kind}, {RE_ENCODE}")
            change = self.recipe.plan(self.info, self.field, self.wanted)
            return self._kept(proven) if change is None else self._changed(change)

    def mask(self, view: Geometry | None) -> ConvertedImage:
        """Move a mask like its image."""
        recipe = self.recipe
        if self.field in LOSSY:
            raise BadImage(
                f"a mask cannot be a {self.field} file, because that changes values",
                remedy="use PNG, or the image kind, as in --masks masks:image",
            )
        if view is None:
            upright = self.info.upright
            view = Geometry(self.size, self.info.orientation, *recipe.geometry(*upright))
        if self.size != view.stored:
            raise BadImage(
                f"the mask is {self.size[0]} x {self.size[1]} pixels; its image is "
                f"{view.stored[0]} x {view.stored[1]}",
                remedy="if the sizes should differ, use the array or image kind",
            )
        _check_size(view.canvas)
        if not view.is_identity or self.field == FOREIGN_FIELD:
            content = moved_mask(self.data, self.field, view)
            return ConvertedImage("png", content, view.canvas, {}, view)
        if recipe.check == "decode" and not self.info.surely_decodes:
            self._decode()
        return ConvertedImage(self.field, self.data, self.size, {}, view)

    def _kept(self, proven: bool) -> ConvertedImage:
        """Check an image that is stored as it is; as JPEG, it may be recoded without loss."""
        _check_size(self.size)
        stored = self.field, self.data
        if self.field == "jpg" and (coding := self.recipe.coding):
            stored = self._recoded(coding)
        elif self.recipe.check == "decode" and not (proven or self._surely_decodes()):
            self._decode()
        if self.info.orientation != 1:
            self.notes["orientation"] = self.info.orientation
        view = Geometry(self.size, 1, self.size, self.size)
        return ConvertedImage(*stored, self.size, self.notes, view)

    def _surely_decodes(self) -> bool:
        is_jpeg = self.field == "jpg"
        return self.info.surely_decodes or (is_jpeg and compiled.jpeg_decodes(self.data))

    def _recoded(self, coding: Coding) -> tuple[str, bytes]:
        """Return field and content: a JPEG recoded if that has its pixels, or else the JPEG."""
        pixels = self._decode()
        # Another version of libjpeg may decode to other pixels; then the JPEG stays.
        content = None if CHECK_NOTES & self.notes.keys() else coding.from_jpeg(self.data)
        if content is None or not np.array_equal(coding.decode(content, None, None), pixels):
            return self.field, self.data
        return ENCODED_AS[self.recipe.encode], content

    def _changed(self, change: Change) -> ConvertedImage:
        """Scale, crop or pad, and encode an image."""
        _check_size(change.size, change.canvas)
        rectangle = (*centered(change.size, change.canvas), *change.canvas)
        pixels = crop_or_pad(self._scaled(change.size), rectangle, self._padding())
        if self.recipe.raw_shape and pixels.shape[:2] != self.recipe.box:
            raise BadImage(
                f"it has {self.size[0]} x {self.size[1]} pixels, which is too small without "
                f"enlarging or padding ({TOO_SMALL})"
            )
        content = encode(pixels, change.field, self._quality())
        view = Geometry(self.size, self.info.orientation, change.size, change.canvas)
        return ConvertedImage(change.field, content, change.canvas, self.notes, view)

    def _quality(self) -> int | None:
        """Return the quality of a changed image; None to keep a lossless WebP lossless."""
        quality = self.recipe.quality
        kept = self.recipe.encode == "keep" and not quality and self.field == "webp"
        return None if kept and webp_is_lossless(self.data) else quality or DEFAULT_QUALITY

    def _padding(self) -> int | Color:
        """Return the color around a padded image: of gray ones, its luma; of others, 0."""
        if self.pixels == "gray":
            return int(np.asarray(Image.new("RGB", (1, 1), self.recipe.fill).convert("L"))[0, 0])
        return self.recipe.fill if self.pixels == "rgb" else 0

    def _scaled(self, size: Size) -> TypedPixels:
        """Return the upright, scaled image."""
        recipe = self.recipe
        scales_jpeg = self.field == "jpg" and size != self.info.upright
        if scales_jpeg and (scaled := self._scaled_at_once(size)) is not None:
            return scaled
        if scales_jpeg and recipe.dct_scaling:
            return self._scaled_by_dct(size)
        pixels = turn(self._decode(), self.info.orientation)
        box = (0.0, 0.0, float(pixels.shape[1]), float(pixels.shape[0]))
        return self.codec.scale(pixels, box, size[::-1], recipe.filter)

    def _scaled_at_once(self, size: Size) -> TypedPixels | None:
        """Return a JPEG that is scaled while it is decoded; None if it is no ordinary one."""
        recipe = self.recipe
        if self.pixels != "rgb" or self.info.orientation != 1:
            return None
        if recipe.dct_scaling and min(self.size) < LEAST_SIDE:
            return None
        least = (2 * size[0], 2 * size[1]) if recipe.dct_scaling else (0, 0)
        eighths = sufficient_eighths(self.size, least)
        return compiled.scale_jpeg(self.data, self.size, eighths, size, recipe.filter)

    def _scaled_by_dct(self, size: Size) -> TypedPixels:
        """Return a JPEG scaled to ``size``, from a reduced decode with at least twice its sides."""
        info = self.info
        width, height = size if info.orientation < 5 else size[::-1]
        pixels = self._decode((2 * width, 2 * height))
        scale = reduction(pixels.shape, (info.height, info.width))
        if scale is None:  # pragma: no cover - both decoders read the size from the same header
            raise BadImage(f"it decodes to {pixels.shape}, but its header describes {info}")
        box = (0.0, 0.0, info.width * scale, info.height * scale)
        return turn(resize(pixels, box, (height, width), self.recipe.filter), info.orientation)

    def _decode(self, at_least: Size = (0, 0)) -> TypedPixels:
        """Decode an image; note its faults, or raise for them."""
        warnings: list[str] = []
        how = Decoding(self.recipe.fill, at_least)
        pixels = self.codec.decode(self.data, self.field, how, warnings)
        for warning in warnings:
            loss = jpeg_loss(self.data, warning)
            if loss and not self.recipe.tolerate_damage:
                raise BadImage(f"it is damaged: {loss} ({TOLERATE})")
            self.notes["damaged" if loss else "odd"] = 1
        return pixels


def _check_size(*sizes: Size) -> None:
    """Refuse sizes over the limit: 60,000 x 1 pixels enlarged to 256 rows would be 4e9 pixels."""
    for width, height in sizes:
        if width * height > MAX_PIXELS:
            raise BadImage(
                f"it would become {width} x {height} pixels, over the limit of {MAX_PIXELS}"
            )


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
    name = image_name(IMAGE, image.field)
    return Record(record.key, {**fields, name: image.content, META_FIELD: meta})
