"""Images: what kind they are, how large, their pixels as RGB, and back to bytes.

JPEG goes through simplejpeg (libjpeg-turbo without the GIL), all else and whatever it refuses
through Pillow; at the settings used here the two give equal pixels.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

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

_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xda-\xfe]..", re.DOTALL)
"""How a segment of a JPEG's header begins: a marker, not one that stands alone, and a length."""

_START_OF_SCAN = 0xDA
_SPEAKING = (b"Exif\0", b"rientation", b"MPF\0")
"""What a JPEG's header has if it may say more than its size: EXIF, XMP, further images."""

SNIFF_BYTES = 32
"""As many of a file's first bytes as `sniff` looks at."""

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""A larger image is taken for a decompression bomb: Pillow's own limit."""

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

    Raises:
        BadImage: If the header is damaged, or states more than `MAX_PIXELS`.
    """
    header = _header_of(data) if field == "jpg" and simplejpeg is not None else None
    if header is not None:
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(header)
        except (ValueError, KeyError):
            pass  # Pillow knows more kinds, and says better what is wrong
        else:
            _check_size(width, height)
            return ImageInfo(width, height)
    with _open(data, field) as image:
        try:
            orientation = image.getexif().get(_ORIENTATION_TAG, 1)
            frames = getattr(image, "n_frames", 1)
        except Exception as error:
            raise BadImage(f"its metadata is damaged: {_reason(error)}") from error
        if field == "tiff" or orientation not in _TRANSPOSITIONS:
            orientation = 1  # Pillow turns TIFF files by itself
        return ImageInfo(image.width, image.height, int(orientation), frames)


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
    if field == "png":
        _check_chunks(data)
    with _open(data, field) as image:
        if field == "jpg" and min(at_least) > 0:
            image.draft(None, at_least)
        pixels = np.array(to_rgb(image, background))
    if out is None:
        return pixels
    if out.shape != pixels.shape:
        raise BadImage(f"it is {pixels.shape[1]} x {pixels.shape[0]} pixels, not of the size given")
    out[:] = pixels
    return out


def to_rgb(image: Image.Image, background: Colour = WHITE) -> Image.Image:
    """Return ``image`` in mode RGB, transparent pixels laid over ``background``.

    Raises:
        BadImage: If it cannot be loaded, or its pixels have no defined range (float, 32-bit).
    """
    try:
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
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(f"it cannot be decoded: {_reason(error)}") from error


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
    try:
        image.save(buffer, _PILLOW_NAMES[field], **options)
    except (OSError, ValueError) as error:
        raise BadImage(
            f"{image.width} x {image.height} pixels cannot be stored as {field}: {_reason(error)}"
        ) from error
    return buffer.getvalue()


def _header_of(jpeg: bytes) -> bytes | None:
    """Return a JPEG up to its first scan, or None if that may say more than its size.

    To look for EXIF data among its pixels as well would take longer than to copy them.
    """
    at = 2
    while _SEGMENT.match(jpeg, at):
        after = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if jpeg[at + 1] == _START_OF_SCAN:
            header = jpeg[:after]
            return None if any(mark in header for mark in _SPEAKING) else header
        at = after
    return None


def _decode_jpeg(
    data: bytes | memoryview, at_least: tuple[int, int], out: Pixels | None, fast: bool
) -> Pixels | None:
    """Decode with simplejpeg; None leaves the image to Pillow."""
    width, height = at_least
    try:
        stated_height, stated_width, space, _ = simplejpeg.decode_jpeg_header(data)
        _check_size(stated_width, stated_height)
        if space in ("CMYK", "YCCK"):
            return None  # differs from Pillow by one
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            fastdct=fast,
            fastupsample=fast,
            min_height=height,
            min_width=width,
            min_factor=2 if height else 1,
            buffer=out,
        )
    except BadImage:
        raise
    except (ValueError, KeyError) as error:  # a KeyError for subsampling that it has no name for
        reason = str(error)
        if reason.startswith(("Corrupt", "Premature")) and not _is_padded(bytes(data), reason):
            raise BadImage(f"it is damaged: {reason}") from error
        return None
    return pixels


def _is_padded(data: bytes, warning: str) -> bool:
    """Tell whether libjpeg's warning is of nothing but padding before the end of the image."""
    match = re.search(r": (\d+) extraneous bytes before marker 0xd9", warning)
    end = data.rfind(b"\xff\xd9")
    return match is not None and len(set(data[max(0, end - int(match[1])) : end])) == 1


def _check_chunks(data: bytes | memoryview) -> None:
    """Compare the checksums of all of a PNG's chunks; decoding skips those of the pixels."""
    with _open(data, "png") as image:
        try:
            image.verify()
        except Exception as error:
            raise BadImage(f"it is damaged: {_reason(error)}") from error


def _open(data: bytes | memoryview, field: str) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=[_PILLOW_NAMES[field]])
    except Exception as error:
        raise BadImage(f"it cannot be identified: {_reason(error)}") from error
    _check_size(image.width, image.height)
    return image


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImage(f"it states {width} x {height} pixels, over the limit of {MAX_PIXELS}")


def _reason(error: Exception) -> str:
    """Return what an exception of Pillow says, without the address of the buffer it read from."""
    text = re.sub(r" ?<_io\.BytesIO[^>]*>", "", str(error)).strip()
    return text or type(error).__name__
