"""Identify, inspect, decode to RGB, scale, and encode images.

libjpeg-turbo decodes JPEG without the GIL; Pillow decodes everything else, and JPEGs that
`shardkit.codecs.libjpeg` refuses or warns about. Both give equal pixels, but Pillow does not detect
damage in the middle of a JPEG.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from shardkit.codecs import libjpeg
from shardkit.codecs.decode_errors import as_bad_image, raise_interruption, require_memory
from shardkit.codecs.foreign import identify, open_foreign, refuse_unread
from shardkit.codecs.geometry import Mask, Region
from shardkit.codecs.image_type import RGB, ImageType, TypedPixels
from shardkit.codecs.libjpeg import JpegError, is_warning, jpeg_loss
from shardkit.codecs.limits import LEAST_PACKED, TIFF_RATIOS, check_size, in_turn_if_large
from shardkit.codecs.quiet import quiet, silence_libtiff
from shardkit.codecs.structure import (
    PlainPng,
    check_png,
    check_ppm,
    check_scans,
    jpeg_has_end,
    jpeg_header,
    plain_png,
    png_is_whole,
    png_says_more,
    tiff_frames,
    webp_size,
)
from shardkit.errors import BadImage
from shardkit.record import ARRAY_IMAGE, FOREIGN_FIELD, PLANES
from shardkit.system import compiled
from shardkit.system.late import load
from shardkit.system.npy import npy_header

Pixels = npt.NDArray[np.uint8]
"""RGB pixels: uint8, shape (height, width, 3)."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a box in an image, in pixels; possibly fractional."""

Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)

_PILLOW_NAMES = {
    "jpg": "JPEG",
    "png": "PNG",
    "webp": "WEBP",
    "bmp": "BMP",
    "gif": "GIF",
    "tiff": "TIFF",
    "ppm": "PPM",
}

_OPENERS: dict[str, Callable[[io.BytesIO], Image.Image]] = {
    "jpg": JpegImagePlugin.JpegImageFile,
    "png": PngImagePlugin.PngImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
    "ppm": PpmImagePlugin.PpmImageFile,
    FOREIGN_FIELD: open_foreign,
}
"""Pillow's readers, used directly because `Image.open` hides their errors."""

_MAGIC = re.compile(
    rb"(?P<jpg>\xff\xd8\xff)"
    rb"|(?P<png>\x89PNG\r\n\x1a\n)"
    rb"|(?P<webp>RIFF....WEBP)"
    rb"|(?P<gif>GIF8[79]a)"
    rb"|(?P<tiff>II[*+]\0|MM\0[*+])"
    rb"|(?P<ppm>P[1-6][ \t\r\n]+[#0-9])"
    # Text may start with "BM"; the size of the second header decides.
    rb"|(?P<bmp>BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0)",
    re.DOTALL,
)

SNIFF_BYTES = 32
"""Number of leading bytes that `sniff` needs."""

_BAND = 1 << 22
"""Pixels converted to RGB at a time, with up to 20 bytes of memory each."""

_TILE = 4096
"""Allowed width and height of TIFF tiles in an image of any size."""

_UINT16 = 65535

_ORIENTATION_TAG = 0x0112

_CODINGS = {PLANES: "shardkit.codecs.planes:CODING"}
"""Encodings of RGB that are no image files, by image field: each a `Coding`."""

FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}
"""Pillow's antialiased filters by name."""


_PNG16 = {"uint16": "shardkit.codecs.png16:encode_png16"}
"""Encoders of PNG files of a dtype that Pillow lacks."""

_PIXEL_CODECS = {
    "rgb": "shardkit.codecs.image:RGB_CODEC",
    "gray": "shardkit.codecs.typed:GRAY_CODEC",
    "keep": "shardkit.codecs.typed:TYPED_CODEC",
}
"""A `PixelCodec` for each way to choose channels and dtype of stored images."""


class WrongSizeError(BadImage):
    """The image's size differs from the expected one."""


class Coding(NamedTuple):
    """An encoding of RGB that is no image file."""

    stated_size: Callable[[bytes | memoryview], tuple[int, int]]
    """Returns the width and height that a header states; raises `BadImage`."""
    decode: Callable[[bytes | memoryview, Region | None, Pixels | None], Pixels]
    """Returns a region, or all, in the given array if there is one; raises `BadImage`."""
    check: Callable[[bytes | memoryview], None]
    """Raises `BadImage` for damage that decoding does not find."""
    encode: Callable[[Pixels], bytes]
    from_jpeg: Callable[[bytes], bytes | None]
    """Returns what should decode to the pixels of a JPEG; None if it has no such form."""
    require: Callable[[], None]
    """Raises `UsageError` if a library for `from_jpeg` is missing."""


class PixelCodec(NamedTuple):
    """Reads and scales images of one kind of pixels."""

    inspect: Callable[[bytes, str], ImageInfo]
    """Returns what the header of an image states; raises `BadImage`."""
    require: Callable[[ImageInfo, str, ImageType | None], None]
    """Raises `BadImage` if an image does not become one of a type; None is RGB of 8 bits."""
    decode: Callable[[bytes | memoryview, str, Decoding, list[str] | None], TypedPixels]
    """Returns the pixels, as `decode` does."""
    scale: Callable[[TypedPixels, Box, tuple[int, int], str], TypedPixels]
    """Returns a box of an image, as `resize` does."""
    display: Callable[[TypedPixels], Pixels]
    """Returns pixels as they are shown: RGB of 8 bits."""


def coding_of(field: str) -> Coding | None:
    """Return the coding of an image field; None for image files and raw pixels."""
    target = _CODINGS.get(field)
    coding: Coding | None = None if target is None else load(target)
    return coding


def pixel_codec(pixels: str) -> PixelCodec:
    """Return what decodes images to ``rgb``, ``gray`` or, with ``keep``, their own type."""
    codec: PixelCodec = load(_PIXEL_CODECS[pixels])
    return codec


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Information from an image's header."""

    width: int
    height: int
    """Pixels as stored, before any orientation is applied."""
    orientation: int = 1
    """EXIF orientation, 1 to 8; 1 is upright."""
    frames: int = 1
    """Frames of an animation or pages; shardkit uses the first."""
    kind: str = ""
    """Pillow's format name for a `FOREIGN_FIELD`; "" for others."""
    pixels: ImageType = RGB
    """Type of the decoded image."""
    plain: PlainPng | None = field(default=None, repr=False, compare=False)
    """Content of an ordinary PNG."""

    @property
    def surely_decodes(self) -> bool:
        """Whether `decode` certainly accepts the image; False means unknown.

        Only ordinary PNG files have such a cheap proof.
        """
        return self.plain is not None and self.plain.is_whole()

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height once the orientation is applied."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def sniff(head: bytes) -> str | None:
    """Return the image field for content that starts with ``head``, or None."""
    match = _MAGIC.match(head)
    return match.lastgroup if match else None


def image_field_of(file: BinaryIO) -> str:
    """Return the image field for the content of a file, from its first bytes.

    Raises BadImage if it is not an image, or one of a type that is not read (`UnreadImage`).
    """
    head = file.read(SNIFF_BYTES)
    kind = sniff(head) or (FOREIGN_FIELD if head and identify(file) else None)
    if kind in (None, "tiff"):
        refuse_unread(file)
    if kind is None:
        raise BadImage("its content is not an image" if head else "it is empty")
    return kind


def inspect(data: bytes, field: str) -> ImageInfo:
    """Read the header of an encoded image, ignoring damaged metadata.

    Raises BadImage if the header is damaged, or states more than `MAX_PIXELS`.
    """
    if field == "jpg" and (size := compiled.inspect_jpeg(data)):
        return ImageInfo(*size)  # it has no EXIF and no further frames
    if field == "jpg":
        with as_bad_image("it cannot be identified"):
            header = jpeg_header(data)
        data = header.content
        if not header.speaks and libjpeg.is_available():
            # Pillow supports more kinds and gives better errors.
            with contextlib.suppress(JpegError):
                width, height, _ = libjpeg.read_header(data)
                check_size(width, height)
                return ImageInfo(width, height)
    if field in _CODINGS:
        return ImageInfo(*stated_size(data, field))
    if field == "png" and (plain := plain_png(data)):
        check_size(plain.width, plain.height)
        return ImageInfo(plain.width, plain.height, plain=plain)
    with opened(data, field) as image:
        with as_bad_image("its frames cannot be counted"):
            frames = _frames(image, data, field)
        kind = ""
        if field == FOREIGN_FIELD:
            kind = image.format or ""
            with as_bad_image("it cannot be decoded", image.width * image.height):
                image.load()  # before this, icons state another size
            check_size(image.width, image.height)
        turned = _orientation(image, data, field)
        return ImageInfo(image.width, image.height, turned, frames, kind)


def stated_size(data: bytes | memoryview, field: str) -> tuple[int, int]:
    """Return the width and height that an encoded image's header states; errors as `inspect`."""
    if field == "jpg" and libjpeg.is_available():
        with contextlib.suppress(JpegError):  # Pillow supports more kinds
            return libjpeg.read_header(data)[:2]
    if coding := coding_of(field):
        width, height = coding.stated_size(data)
        check_size(width, height)
        return width, height
    with opened(data, field) as image:
        return image.size


class Decoding(NamedTuple):
    """Options of decoding."""

    background: Color = WHITE
    """RGB color under transparent pixels."""
    at_least: tuple[int, int] = (0, 0)
    """Minimum width and height. A JPEG of at least twice that size may be decoded reduced, but not
    below; (0, 0) decodes all pixels."""


EXACT = Decoding()


def decode(
    data: bytes | memoryview,
    field: str,
    how: Decoding = EXACT,
    warnings: list[str] | None = None,
    *,
    out: Pixels | None = None,
) -> Pixels:
    """Decode an encoded image to RGB without applying its EXIF orientation.

    Gray, palette and CMYK images become RGB, 16-bit images keep their upper eight bits, and
    transparent images are composited over a background. Of an animation, decodes the first frame. A
    JPEG with libjpeg warnings, even of data loss, gives the same pixels as in Pillow: ``warnings``
    receives the first one, for `shardkit.codecs.libjpeg.jpeg_loss`.

    ``field`` is not ``raw``. ``out`` is C-contiguous and has exactly the image's shape. The result
    is uint8 of shape (height, width, 3). Raises BadImage if the image cannot be decoded completely.
    """
    if warnings is None:
        warnings = []
    if coding := coding_of(field):
        return _decode_coding(data, field, coding, out)
    if field == "jpg" and libjpeg.is_available():
        pixels = _decode_jpeg(data, how, out, warnings)
        if pixels is not None:
            return pixels
    if field == "png" and out is None:
        pixels = compiled.decode_png(data, how.background)
        if pixels is not None:
            return pixels
    if warnings and not jpeg_has_end(bytes(data)):  # Pillow accepts some of these
        loss = jpeg_loss(bytes(data), warnings[0])
        raise BadImage(f"it is damaged: {loss or 'it has no end marker'}")
    try:
        return _decode_by_pillow(data, field, how, out)
    except BadImage as error:
        if field != "jpg" or isinstance(error, WrongSizeError):
            raise
        if warnings and (loss := jpeg_loss(bytes(data), warnings[0])):
            raise BadImage(f"it is damaged: {loss}") from error
        raise BadImage(f"{error} ({jpeg_header(bytes(data)).coding})") from error


def decode_mask(data: bytes | memoryview, field: str) -> Mask:
    """Return the values of a mask as stored: classes, positions in a palette, or 16-bit numbers.

    The result is uint8, or uint16 for 16-bit images, of shape (height, width), or
    (height, width, channels) for images with several channels. Raises BadImage if the image cannot
    be decoded completely.
    """
    if field == "png" and (mask := compiled.decode_png(data, None)) is not None:
        return mask
    with loaded(data, field) as image:
        values = np.asarray(image)
        if image.mode.startswith("I"):  # of 16 or 32 bits
            if values.min(initial=0) < 0 or values.max(initial=0) > _UINT16:
                raise BadImage("its values are not from 0 to 65535")
            return values.astype(np.uint16)
        if image.mode == "F":
            raise BadImage("its values are fractions;", remedy="store them as an array")
        return values.astype(np.uint8)


def encode_mask(mask: Mask) -> bytes:
    """Encode the values of `decode_mask` as a PNG without loss.

    Raises ValueError if they are not uint8 or uint16, or no PNG has that many channels.
    """
    fits = mask.dtype == np.uint8 or (mask.dtype == np.uint16 and mask.ndim == 2)
    if not fits or mask.ndim not in (2, 3):
        raise ValueError(f"a mask cannot be {mask.dtype} of shape {mask.shape}")
    buffer = io.BytesIO()
    Image.fromarray(mask).save(buffer, "PNG")
    return buffer.getvalue()


def to_rgb(image: Image.Image, background: Color = WHITE) -> Image.Image:
    """Return ``image`` in mode RGB, with transparent pixels composited over ``background``.

    Raises BadImage if it cannot be loaded, or its pixels have no defined range (float, 32-bit).
    """
    with as_bad_image("it cannot be decoded", image.width * image.height):
        image.load()
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            # Pillow would clip at 255; the upper byte is the value shown on an 8-bit screen.
            values = np.asarray(image).astype(np.int32)
            key = image.info.get("transparency")
            image = Image.fromarray((values >> 8).astype(np.uint8))
            if isinstance(key, int):
                image.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
        if image.mode in ("I", "F"):
            raise BadImage(f"pixels of mode {image.mode!r} (32 bits) have no defined range")
        if image.has_transparency_data:
            layer = image.convert("RGBA")
            ground = Image.new("RGBA", layer.size, (*background, 255))
            return Image.alpha_composite(ground, layer).convert("RGB")
        return image if image.mode == "RGB" else image.convert("RGB")


def resize(pixels: Pixels, box: Box, size: tuple[int, int], filter_: str) -> Pixels:
    """Return a box of an RGB image, scaled as Pillow does, with the compiled module if possible.

    ``box`` is inside the image; ``size`` is height and width. The result is ``pixels`` itself if
    nothing changes.
    """
    height, width = pixels.shape[:2]
    if size == (height, width) and box == (0.0, 0.0, float(width), float(height)):
        return pixels
    scaled = compiled.resize(pixels, box, size, filter_)
    if scaled is None:
        scaled = np.asarray(Image.fromarray(pixels).resize(size[::-1], FILTERS[filter_], box))
    return scaled


def encode(pixels: TypedPixels, field: str, quality: int | None = None) -> bytes:
    """Encode an image without metadata.

    ``pixels`` are of an `ImageType` that the encoding holds. ``field`` is ``png``, ``npy``, ``raw``
    (plain pixels), ``jpg`` (4:2:0, baseline), ``webp`` or that of a `Coding`. ``quality`` is 1 to
    100, for jpg and webp; None stores webp without loss. Raises BadImage if the encoding does not
    support an image of this size.
    """
    height, width = pixels.shape[:2]
    if field in (ARRAY_IMAGE, "raw"):
        values = np.ascontiguousarray(pixels, ImageType.of(pixels).values)
        header = npy_header(values.shape, values.dtype) if field == ARRAY_IMAGE else b""
        return header + values.tobytes()
    if coding := coding_of(field):
        return coding.encode(np.ascontiguousarray(pixels))
    with as_bad_image(f"{width} x {height} pixels cannot be stored as {field}", width * height):
        if encoder := _PNG16.get(pixels.dtype.name):
            encoded: bytes = load(encoder)(pixels)
            return encoded
        # Not simplejpeg: below quality 96 it uses libjpeg's fast DCT, which costs 0.06 dB.
        if field == "jpg" and quality and _encodes_as_pillow():
            jpeg = compiled.encode_jpeg(pixels, quality)
            if jpeg is not None:
                return jpeg
        return _encode_by_pillow(pixels, field, quality)


def _encode_by_pillow(pixels: TypedPixels, field: str, quality: int | None) -> bytes:
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    options = {"lossless": True} if quality is None else {"quality": quality}
    image.save(buffer, _PILLOW_NAMES[field], **({} if field == "png" else options))
    return buffer.getvalue()


@functools.cache
def _encodes_as_pillow() -> bool:
    """Return whether the compiled module gives the bytes of Pillow: MozJPEG would not."""
    pixels = (np.arange(3 * 41 * 37) % 251).astype(np.uint8).reshape(41, 37, 3)
    return compiled.encode_jpeg(pixels, 90) == _encode_by_pillow(pixels, "jpg", 90)


def _orientation(image: Image.Image, data: bytes, field: str) -> int:
    if field == "tiff" or (field == "png" and not png_says_more(data)):
        return 1  # Pillow itself rotates TIFF files
    if field == "png" and "exif" not in image.info:
        with as_bad_image("it cannot be decoded", image.width * image.height):
            image.load()  # EXIF data may follow the pixels
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except MemoryError:
        raise
    except Exception as error:  # damaged, in one of many ways
        raise_interruption(error)
        return 1
    return int(orientation) if orientation in range(2, 9) else 1


def _frames(image: Image.Image, data: bytes, field: str) -> int:
    if field == "tiff":
        return tiff_frames(data)
    if field == "jpg":
        return _jpeg_frames(image)
    frames = int(getattr(image, "n_frames", 1))
    # A PNG may state more frames than it contains.
    return min(frames, 1 + data.count(b"fcTL")) if field == "png" else frames


def _jpeg_frames(image: Image.Image) -> int:
    """Return the number of images in a JPEG file: more than one if it is an MPO file."""
    try:
        index = image._getmp()  # type: ignore[attr-defined]
        frames = index and index[0xB001]
        return frames if isinstance(frames, int) and 0 < frames == len(index[0xB002]) else 1
    except MemoryError:
        raise
    except Exception as error:  # damaged, in one of many ways
        raise_interruption(error)
        return 1


def _decode_by_pillow(
    data: bytes | memoryview,
    field: str,
    how: Decoding,
    out: Pixels | None,
) -> Pixels:
    with loaded(data, field, how.at_least) as image:
        shape = (image.height, image.width, 3)
        if out is not None and out.shape != shape:
            raise WrongSizeError(f"it is {shape[1]} x {shape[0]} pixels, not the expected size")
        return _put(image, how.background, np.empty(shape, np.uint8) if out is None else out)


def _decode_coding(
    data: bytes | memoryview, field: str, coding: Coding, out: Pixels | None
) -> Pixels:
    width, height = stated_size(data, field)
    if out is not None and out.shape != (height, width, 3):
        raise WrongSizeError(f"it is {width} x {height} pixels, not the expected size")
    return coding.decode(data, None, out)


@contextlib.contextmanager
def loaded(
    data: bytes | memoryview, field: str, at_least: tuple[int, int] = (0, 0)
) -> Iterator[Image.Image]:
    """Open an image with Pillow and decode it completely; BadImage if that fails."""
    if field == "png":
        with as_bad_image("it cannot be decoded"):
            check_png(data)
    with opened(data, field) as image:
        if field == "jpg" and min(at_least) > 0:
            image.draft(None, at_least)
        with as_bad_image("it cannot be decoded", image.width * image.height):
            image.load()
        if field == "png" and _may_lack_rows(image, data) and not png_is_whole(data):
            raise BadImage("it is damaged: its data ends before its last row")
        yield image


def _decode_jpeg(
    data: bytes | memoryview,
    how: Decoding,
    out: Pixels | None,
    warnings: list[str],
) -> Pixels | None:
    """Decode with libjpeg; None means to use Pillow instead."""
    try:
        width, height, is_cmyk = libjpeg.read_header(data)
        check_size(width, height)
        check_scans(data)
        with in_turn_if_large(width, height):
            pixels = libjpeg.decode_jpeg(
                data,
                "CMYK" if is_cmyk else "RGB",
                at_least=how.at_least,
                out=None if is_cmyk else out,
            )
    except JpegError as error:
        reason = str(error)
        require_memory(reason)
        if is_warning(reason):
            warnings.append(reason)
        return None
    return None if is_cmyk else pixels  # Pillow's CMYK conversion differs by one


@contextlib.contextmanager
def opened(data: bytes | memoryview, field: str) -> Iterator[Image.Image]:
    """Open an encoded image with Pillow, after the checks that Pillow lacks; decode nothing.

    Errors are those of `inspect`.
    """
    size = (webp_size(data) if field == "webp" else None) or (0, 0)  # opening allocates a canvas
    with (
        quiet(),
        in_turn_if_large(*size),
        _open_image(data, field) as image,
        in_turn_if_large(image.width, image.height),
    ):
        yield image


def _open_image(data: bytes | memoryview, field: str) -> Image.Image:
    size = webp_size(data) if field == "webp" else None
    if size is not None:
        check_size(*size)
    if field not in _OPENERS:
        raise BadImage(f"it cannot be stored as {field}")
    if field == "jpg":
        check_scans(data)
    if field == "ppm":
        check_ppm(data)
    if field == "tiff":
        silence_libtiff()
    with as_bad_image("it cannot be identified", size[0] * size[1] if size else 0):
        image = _OPENERS[field](io.BytesIO(data))
    least = _least_packed(image, field)
    check_size(image.width, image.height, packed=len(data), least_packed=least)
    if field == "tiff":
        _check_tiles(image)
    return image


def _least_packed(image: Image.Image, field: str) -> float:
    """Return the fewest packed bytes of a pixel; 0 for no limit."""
    if field == "bmp":
        return 0 if image.info.get("compression") else 1 / 8  # run lengths may skip pixels
    if field == "tiff":
        ratio = TIFF_RATIOS.get(image.tag_v2.get(259, 1))  # type: ignore[attr-defined]
        return 1 / 8 / ratio if ratio else 0
    return LEAST_PACKED.get(field, 0)


def _check_tiles(image: Image.Image) -> None:
    """Refuse tiles that are larger than the image: libtiff allocates a whole tile."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    for tag, side in (322, image.width), (323, image.height):
        tile = tags.get(tag, 0)
        if isinstance(tile, int) and tile > max(_TILE, side + 15):
            raise BadImage(f"it declares {tile}-pixel tiles for a side of {side} pixels")


def _put(image: Image.Image, background: Color, out: Pixels) -> Pixels:
    """Convert a loaded image to RGB in ``out``, a few rows at a time if it is large."""
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image
        if rows < image.height:
            band = image.crop((0, top, image.width, min(top + rows, image.height)))
            band.format = image.format
        out[top : top + rows] = np.asarray(to_rgb(band, background))
    return out


def _may_lack_rows(image: Image.Image, data: bytes | memoryview) -> bool:
    """Return whether rows of a PNG may be missing: Pillow leaves them all zero."""
    interlaced = data[28]
    last = image.crop((0, image.height - 1, image.width, image.height))
    return bool(interlaced) or not np.asarray(last).any()


RGB_CODEC = PixelCodec(
    inspect=inspect,
    require=lambda *_: None,  # all become RGB
    decode=decode,
    scale=resize,
    display=lambda pixels: pixels,
)
