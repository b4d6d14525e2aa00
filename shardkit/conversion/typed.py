"""Convert to images of other channels or dtypes than RGB of 8 bits.

A plan decides channels and dtype of each image before a conversion starts.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from PIL import Image

from shardkit.codecs.geometry import Geometry, centered
from shardkit.codecs.image import Color, Decoding
from shardkit.codecs.image_type import GRAY, RGB, ImageType, TypedPixels
from shardkit.codecs.limits import in_turn_if_large
from shardkit.codecs.typed import (
    crop_or_pad,
    decode_gray,
    decode_typed,
    encode_typed,
    inspect_typed,
    lossless_encoding,
    scale_typed,
    turn,
)
from shardkit.contracts import Images, Scan
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, Schema
from shardkit.recipe import (
    DEFAULT_QUALITY,
    ENCODED_AS,
    ConvertedImage,
    Original,
    Recipe,
    check_size,
)
from shardkit.record import (
    ARRAY_IMAGE,
    FOREIGN_FIELD,
    IMAGE,
    PLANES,
    Record,
    image_field,
    image_kind,
    is_raw,
)
from shardkit.system.npy import npy_header

_TRIES = 1000
"""Records to read at most, until one has each image."""

_MOST_COLORS = 4
"""Maximum channels of an image of 8 bits, with transparency."""


def plan_typed(scan: Scan, recipe: Recipe, sources: Iterable[Images]) -> tuple[Scan, Recipe]:
    """Return a scan whose schema states channels and dtype of each image, and its recipe.

    Args:
        scan: The scan.
        recipe: The recipe.
        sources: The images of each split in the order of rows; the first one decides.

    Raises:
        UsageError: If no image can be read to take them from, or the encoding does not hold them.
    """
    images = {
        name: field
        for name, field in scan.schema.items()
        if field.type.is_picture and not field.type.follows
    }
    kinds = dict.fromkeys(images, GRAY) if recipe.pixels == "gray" else _kinds(images, sources)
    if missing := [name for name in images if name not in kinds]:
        raise UsageError(
            f"pixels='keep' takes channels and dtype from the first {missing[0]}, and none of the "
            f"first {_TRIES} records of {scan.source} has one"
        )
    fields = {name: Field("image", kind.dtype, (kind.channels,)) for name, kind in kinds.items()}
    words = {name: str(field) for name, field in fields.items()}
    for name, kind in kinds.items():
        if recipe.encode == "png" and not kind.is_held_by("png"):
            raise UsageError(
                f"encode='png' holds uint8 and uint16 of 1 to 4 channels, and {name} is of {kind}: "
                "use encode='keep' or 'raw'"
            )
    scan = replace(scan, fields={**scan.schema, **fields}, understood={**scan.understood, **words})
    return scan, replace(recipe, channels=kinds.get(IMAGE, RGB).channels)


def with_types(scan: Scan, schema: Schema) -> Scan:
    """Return a scan whose images have the types of a dataset, to which they are appended."""
    stated = {
        name: schema[name]
        for name, field in scan.schema.items()
        if name in schema and field == Field("image") and schema[name].pixels is not None
    }
    return replace(scan, fields={**scan.schema, **stated}) if stated else scan


def _kinds(images: Schema, sources: Iterable[Images]) -> dict[str, ImageType]:
    """Return the type of each image: that of the schema, or of the first record that has it.

    Bad images are reported when their shards are built.
    """
    kinds = {name: field.pixels for name, field in images.items() if field.pixels is not None}
    rows = ((source, row) for source in sources for row in range(len(source)))
    reasons: list[str] = []
    for source, row in itertools.islice(rows, _TRIES):
        if len(kinds) == len(images):
            return kinds
        with _bad_images(reasons, source, row):
            (record,) = source.read([row])
            for name in images.keys() - kinds.keys():
                with _bad_images(reasons, source, row):
                    _take_kind(kinds, name, record)
    if reasons and len(kinds) < len(images):
        raise UsageError(f"pixels='keep' finds no image that can be read: {reasons[0]}")
    return kinds


@contextmanager
def _bad_images(reasons: list[str], source: Images, row: int) -> Iterator[None]:
    """Return a context that notes why an image is bad."""
    try:
        yield
    except BadImage as error:
        reasons.append(f"{source.source.locate(source.split, source.entries[row])}: {error}")


def _take_kind(kinds: dict[str, ImageType], name: str, record: Record) -> None:
    """Add the type of a record's image, if it has one."""
    stored = image_field(record.fields, name) or (FOREIGN_FIELD if name == IMAGE else "")
    if stored not in record.fields:
        return
    if is_raw(stored):  # without a type in the schema, which would have been taken first
        kinds[name] = RGB
        return
    info, kinds[name] = inspect_typed(record.fields[stored], image_kind(stored))
    is_array = image_kind(stored) == ARRAY_IMAGE
    if is_array and (moved := _seems_moved(info.height, info.width, kinds[name].channels)):
        warnings.warn(f"{name} has {moved}", stacklevel=9)


def convert_typed(recipe: Recipe, original: Original) -> ConvertedImage:
    """Check and change an image of the type that the schema states.

    Raises:
        BadImage: If it fails the check, or is of another type.
    """
    expected = original.pixels
    data, field = _as_file(original)
    if expected is None:
        raise _not_rgb(decode_typed(data, field))
    info, kind = inspect_typed(data, field)
    if field == ARRAY_IMAGE and recipe.pixels == "gray" and kind != expected:
        raise _not_rgb(decode_typed(data, field))
    if field == PLANES:
        info = replace(info, orientation=original.orientation)
    if recipe.pixels == "keep" and kind != expected:
        raise BadImage(f"it is of {kind}; the first image is of {expected}")
    notes = recipe.header_notes(info)
    size = info.width, info.height
    geometry = recipe.geometry(*info.upright)
    turns = recipe.orient and info.orientation != 1
    unchanged = geometry == (info.upright, info.upright) and not turns
    wanted = _encoding(recipe, expected)
    # An array from Python is not a file of the user's: PNG is smaller.
    keeps = recipe.encode == "keep" and field not in (ARRAY_IMAGE, FOREIGN_FIELD)
    same_kind = kind == expected and (keeps or wanted == field)
    if unchanged and same_kind and recipe.quality is None:
        if recipe.check == "decode":
            _decode(recipe, data, field, expected, notes)
        if info.orientation != 1:
            notes["orientation"] = info.orientation
        return ConvertedImage(field, data, size, notes, Geometry(size, 1, size, size))
    check_size(*geometry)
    with in_turn_if_large(info.width, info.height):
        pixels = turn(_decode(recipe, data, field, expected, notes), info.orientation)
        whole = 0.0, 0.0, float(pixels.shape[1]), float(pixels.shape[0])
        pixels = scale_typed(pixels, whole, geometry.size[::-1], recipe.filter)
    place = (*centered(geometry.size, geometry.canvas), *geometry.canvas)
    fill = _luma(recipe.fill) if recipe.pixels == "gray" else 0
    pixels = crop_or_pad(pixels, place, fill)
    recipe.require_raw_size(pixels.shape[1], pixels.shape[0], info)
    content = encode_typed(pixels, wanted, recipe.quality or DEFAULT_QUALITY)
    view = Geometry(size, info.orientation, *geometry)
    return ConvertedImage(wanted, content, geometry.canvas, notes, view)


def _as_file(original: Original) -> tuple[bytes, str]:
    """Return an image and its kind; raw pixels of a type as an array."""
    if original.field != "raw" or original.pixels is None:
        return original.as_file()
    kind = original.pixels
    width, height = original.size
    stored = len(original.data)
    if stored == width * height * RGB.channels:  # of a dataset of RGB, to become of that type
        return original.as_file()
    if stored != width * height * kind.channels * kind.values.itemsize:
        raise BadImage(f"it is raw pixels of another type than {kind}: convert its source again")
    return npy_header((height, width, kind.channels), kind.values) + original.data, ARRAY_IMAGE


def _encoding(recipe: Recipe, kind: ImageType) -> str:
    """Return the encoding of an image of a type that changes."""
    if recipe.encode == "keep":
        return lossless_encoding(kind)
    wanted = ENCODED_AS[recipe.encode]
    if not kind.is_held_by(wanted):
        raise BadImage(
            f"{recipe.encode} does not hold images of {kind}: use --encode keep or --encode raw"
        )
    return wanted


def _decode(
    recipe: Recipe, data: bytes, field: str, kind: ImageType, notes: dict[str, int]
) -> TypedPixels:
    """Decode an image to its type; note its faults, or raise for them."""
    warnings: list[str] = []
    if recipe.pixels == "gray" and field != ARRAY_IMAGE:
        pixels: TypedPixels = decode_gray(data, field, Decoding(recipe.fill), warnings)
    else:
        pixels = decode_typed(data, field, warnings)
    recipe.judge(data, warnings, notes)
    if ImageType.of(pixels) != kind:
        raise BadImage(f"it is of {ImageType.of(pixels)}, not of {kind}")
    return pixels


def _luma(color: Color) -> int:
    """Return a color as Pillow's mode L has it."""
    return int(np.asarray(Image.new("RGB", (1, 1), color).convert("L"))[0, 0])


def _not_rgb(array: TypedPixels) -> BadImage:
    """Return the error of an array that is no image of 8 bits; ``array`` has channels last."""
    height, width, channels = array.shape
    if moved := _seems_moved(height, width, channels):
        return BadImage(f"it has {moved}")
    remedy = "store it with --pixels keep, or as a field of the kind array"
    if channels > _MOST_COLORS:
        return BadImage(f"it has {channels} channels, not 1 to 4: {remedy}")
    example = ", as in (255 * x).round().astype('uint8')" if array.dtype.kind == "f" else ""
    return BadImage(f"its values are {array.dtype}, not uint8: convert them{example}, or {remedy}")


def _seems_moved(height: int, width: int, channels: int) -> str:
    """Return what is odd about an image whose channels are probably another axis, or ""."""
    if channels <= _MOST_COLORS or min(height, width) > _MOST_COLORS:
        return ""
    expected = "arrays have channels last: numpy.moveaxis(array, 0, -1)"
    if width < height:
        expected = "tensors have channels first: tensor.permute(2, 0, 1)"
    return f"{height} x {width} pixels and {channels} channels, but {expected}"
