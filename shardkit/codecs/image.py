"""Images: what kind they are, how large, their pixels as RGB, and back to bytes.

JPEG goes through simplejpeg (libjpeg-turbo without the GIL), all else and whatever it refuses
through Pillow; at the settings used here the two give equal pixels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass

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

from shardkit.codecs.blame import blaming, require_memory
from shardkit.codecs.quiet import quiet
from shardkit.codecs.structure import (
    check_png,
    check_ppm,
    jpeg_header,
    png_is_whole,
    png_says_more,
    tiff_frames,
    webp_size,
)
from shardkit.errors import BadImage

try:
    import simplejpeg
except ImportError:  # no wheel for this Python: Pillow does it all, more slowly
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]
"""RGB pixels: uint8, shape (height, width, 3)."""

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)

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
}
"""Pillow's own readers; `Image.open` would ask them too, and keep to itself what they say."""

_MAGIC = re.compile(
    rb"(?P<jpg>\xff\xd8\xff)"
    rb"|(?P<png>\x89PNG\r\n\x1a\n)"
    rb"|(?P<webp>RIFF....WEBP)"
    rb"|(?P<gif>GIF8[79]a)"
    rb"|(?P<tiff>II[*+]\0|MM\0[*+])"
    rb"|(?P<ppm>P[1-6][ \t\r\n]+[#0-9])"
    # "BM" alone begins many a text; the size of the second header tells.
    rb"|(?P<bmp>BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0)",
    re.DOTALL,
)

SNIFF_BYTES = 32
"""As many of a file's first bytes as `sniff` looks at."""

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""A larger image is taken for a decompression bomb: Pillow's own limit."""

_BAND = 1 << 22
"""Pixels that are turned into RGB at a time, which takes up to 20 bytes for each."""

_TILE = 4096
"""Width and height of tiles in a TIFF file that are never too large, whatever the image's size."""

_ORIENTATION_TAG = 0x0112
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_CMYK = ("CMYK", "YCCK")


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What an image's header tells."""

    width: int
    height: int
    """Pixels as stored, before any orientation is applied."""
    orientation: int = 1
    """EXIF orientation, 1 to 8; 1 is upright."""
    frames: int = 1
    """Frames of an animation or pages; shardkit uses the first."""

    @property
    def upright(self) -> tuple[int, int]:
        """Width and height once the orientation is applied."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


def sniff(head: bytes) -> str | None:
    """Return the image field that content beginning with ``head`` belongs to, or None."""
    match = _MAGIC.match(head)
    return match.lastgroup if match else None


def inspect(data: bytes, field: str) -> ImageInfo:
    """Read the header of an encoded image.

    Metadata that are damaged count for none.

    Raises:
        BadImage: If the header is damaged, or states more than `MAX_PIXELS`.
    """
    if field == "jpg":
        with blaming("it cannot be identified"):
            header = jpeg_header(data)
        data = header.content
        if not header.speaks and simplejpeg is not None:
            try:
                height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            except (ValueError, KeyError):
                pass  # Pillow knows more kinds, and says better what is wrong
            else:
                _check_size(width, height)
                return ImageInfo(width, height)
    with quiet(), _open(data, field) as image:
        with blaming("its frames cannot be counted"):
            frames = _frames(image, data, field)
        return ImageInfo(image.width, image.height, _orientation(image, data, field), frames)


def decode(  # noqa: PLR0913 - each says one thing of one image
    data: bytes | memoryview,
    field: str,
    *,
    background: Colour = WHITE,
    at_least: tuple[int, int] = (0, 0),
    out: Pixels | None = None,
    fast: bool = False,
) -> Pixels:
    """Decode an encoded image to RGB; the orientation in its EXIF data is not applied.

    Grey, palette and CMYK images become RGB, 16-bit ones keep their upper eight bits, transparent
    ones are laid over ``background``; of an animation it is the first frame.

    Args:
        data: The encoded image.
        field: Its kind, a name of `shardkit.record.IMAGE_FIELDS` but ``raw``.
        background: RGB colour under transparent pixels.
        at_least: Width and height that suffice. A JPEG of at least twice that size may come
            reduced, but not below; (0, 0) gives all pixels.
        out: Where to put the pixels: C-contiguous, of exactly the image's shape.
        fast: Whether a JPEG takes libjpeg's fast inverse DCT and upsampling, where simplejpeg is
            there: sooner, and off by a few levels, at edges of colour by many.

    Returns:
        uint8 of shape (height, width, 3); ``out`` if it was given.

    Raises:
        BadImage: If the image cannot be decoded whole.
    """
    if field == "jpg" and simplejpeg is not None:
        pixels = _decode_jpeg(data, at_least, out, fast)
        if pixels is not None:
            return pixels
    try:
        return _decode_by_pillow(data, field, background, at_least, out)
    except BadImage as error:
        if field != "jpg":
            raise
        raise BadImage(f"{error} ({jpeg_header(bytes(data)).coding})") from error


def to_rgb(image: Image.Image, background: Colour = WHITE) -> Image.Image:
    """Return ``image`` in mode RGB, transparent pixels laid over ``background``.

    Raises:
        BadImage: If it cannot be loaded, or its pixels have no defined range (float, 32-bit).
    """
    with blaming("it cannot be decoded", image.width * image.height):
        image.load()
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            # Pillow would clip at 255; the upper byte is the value that an 8-bit screen shows.
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


def turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    """Return ``image`` turned and mirrored as its EXIF ``orientation`` (1 to 8) asks."""
    method = _TRANSPOSITIONS.get(orientation)
    return image if method is None else image.transpose(method)


def encode(image: Image.Image, field: str, quality: int) -> bytes:
    """Encode an RGB image, without any metadata.

    Args:
        image: In mode RGB.
        field: ``jpg`` (4:2:0, baseline), ``png``, ``webp`` (lossy) or ``raw`` (pixels as they are).
        quality: 1 to 100; for jpg and webp.

    Raises:
        BadImage: If the encoding has no room for an image of this size.
    """
    if field == "raw":
        return image.tobytes()
    # Not simplejpeg for JPEG: below quality 96 it takes libjpeg's fast DCT, for 0.06 dB less.
    buffer = io.BytesIO()
    options = {"png": {}}.get(field, {"quality": quality})
    size = f"{image.width} x {image.height}"
    with blaming(f"{size} pixels cannot be stored as {field}", image.width * image.height):
        image.save(buffer, _PILLOW_NAMES[field], **options)
    return buffer.getvalue()


def _orientation(image: Image.Image, data: bytes, field: str) -> int:
    if field == "tiff" or (field == "png" and not png_says_more(data)):
        return 1  # Pillow turns TIFF files by itself
    if field == "png" and "exif" not in image.info:
        with blaming("it cannot be decoded", image.width * image.height):
            image.load()  # they may stand behind the pixels
    try:
        orientation = image.getexif().get(_ORIENTATION_TAG, 1)
    except MemoryError:
        raise
    except Exception:  # damaged, in one of many ways
        return 1
    return int(orientation) if orientation in _TRANSPOSITIONS else 1


def _frames(image: Image.Image, data: bytes, field: str) -> int:
    if field == "tiff":
        return tiff_frames(data)
    if field == "jpg":
        return _jpeg_frames(image)
    frames = int(getattr(image, "n_frames", 1))
    # A PNG states how many it has; they need not be there.
    return min(frames, 1 + data.count(b"fcTL")) if field == "png" else frames


def _jpeg_frames(image: Image.Image) -> int:
    """Return the number of images in a JPEG file: more than one if it is an MPO file."""
    try:
        index = image._getmp()  # type: ignore[attr-defined]
        frames = index and index[0xB001]
        return frames if isinstance(frames, int) and 0 < frames == len(index[0xB002]) else 1
    except MemoryError:
        raise
    except Exception:  # damaged, in one of many ways
        return 1


def _decode_by_pillow(
    data: bytes | memoryview,
    field: str,
    background: Colour,
    at_least: tuple[int, int],
    out: Pixels | None,
) -> Pixels:
    if field == "png":
        with blaming("it cannot be decoded"):
            check_png(data)
    with quiet(), _open(data, field) as image:
        if field == "jpg" and min(at_least) > 0:
            image.draft(None, at_least)
        with blaming("it cannot be decoded", image.width * image.height):
            image.load()
        if field == "png" and _may_lack_rows(image, data) and not png_is_whole(data):
            raise BadImage("it is damaged: its packed data end before its last row")
        shape = (image.height, image.width, 3)
        if out is not None and out.shape != shape:
            raise BadImage(f"it is {shape[1]} x {shape[0]} pixels, not of the size given")
        return _put(image, background, np.empty(shape, np.uint8) if out is None else out)


def _decode_jpeg(
    data: bytes | memoryview, at_least: tuple[int, int], out: Pixels | None, fast: bool
) -> Pixels | None:
    """Decode with simplejpeg; None leaves the image to Pillow."""
    width, height = at_least
    try:
        stated_height, stated_width, space, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(stated_width, stated_height)
        cmyk = space in _CMYK
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            colorspace="CMYK" if cmyk else "RGB",
            fastdct=fast,
            fastupsample=fast,
            min_height=height,
            min_width=width,
            min_factor=2 if height else 1,
            buffer=None if cmyk else out,
        )
    except BadImage:
        raise
    except (ValueError, KeyError) as error:  # a KeyError for subsampling that it has no name for
        reason = str(error)
        require_memory(reason)
        if reason.startswith(("Corrupt", "Premature")) and not _is_padded(bytes(data), reason):
            raise BadImage(f"it is damaged: {reason}") from error
        return None
    return None if cmyk else pixels  # Pillow's differ by one


def _is_padded(data: bytes, warning: str) -> bool:
    """Tell whether libjpeg's warning is of nothing but padding before the end of the image."""
    match = re.search(r": (\d+) extraneous bytes before marker 0xd9", warning)
    end = data.rfind(b"\xff\xd9")
    return match is not None and len(set(data[max(0, end - int(match[1])) : end])) == 1


def _open(data: bytes | memoryview, field: str) -> Image.Image:
    size = webp_size(data) if field == "webp" else None
    if size is not None:
        _check_size(*size)
    if field == "ppm":
        check_ppm(data)
    with blaming("it cannot be identified", size[0] * size[1] if size else 0):
        image = _OPENERS[field](io.BytesIO(data))
    _check_size(image.width, image.height)
    if field == "tiff":
        _check_tiles(image)
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImage(f"it states {width} x {height} pixels, over the limit of {MAX_PIXELS}")


def _check_tiles(image: Image.Image) -> None:
    """Refuse tiles that are larger than the image: libtiff makes room for a whole one."""
    tags = image.tag_v2  # type: ignore[attr-defined]
    for tag, side in (322, image.width), (323, image.height):
        stated = tags.get(tag, 0)
        if isinstance(stated, int) and stated > max(_TILE, side + 15):
            raise BadImage(f"it states tiles of {stated} pixels for a side of {side} pixels")


def _put(image: Image.Image, background: Colour, out: Pixels) -> Pixels:
    """Put the pixels of a loaded image into ``out``, a few rows at a time if it is large."""
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = image
        if rows < image.height:
            band = image.crop((0, top, image.width, min(top + rows, image.height)))
            band.format = image.format
        out[top : top + rows] = np.asarray(to_rgb(band, background))
    return out


def _may_lack_rows(image: Image.Image, data: bytes | memoryview) -> bool:
    """Tell whether rows of a PNG may be missing: Pillow leaves them as they were, all zero."""
    interlaced = data[28]
    last = image.crop((0, image.height - 1, image.width, image.height))
    return bool(interlaced) or not np.asarray(last).any()
