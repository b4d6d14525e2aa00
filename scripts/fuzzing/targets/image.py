"""The image decoder, for every kind of image, and the recipe on top of it."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

from scripts.fuzzing.material import pictures
from scripts.fuzzing.pngs import outcome, random_png
from scripts.fuzzing.target import Target, broken
from shardkit.codecs.geometry import Region
from shardkit.codecs.image import Decoding, ImageInfo, decode, inspect, sniff
from shardkit.codecs.libjpeg import reduction
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.dataset.decode import decode_region
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import IMAGE_FIELDS, PLANES, Record

_LARGE = 1 << 20
"""Pixels above which an image is not decoded here, but only inspected: it takes too long."""

_KINDS = [kind for kind in IMAGE_FIELDS if kind != "raw"]
_RECIPES = (
    Recipe(resize=(6, 5), resize_mode="crop", encode="jpeg"),
    Recipe(resize=(7, 7), resize_mode="stretch", enlarge=True, encode="raw", filter="box"),
    Recipe(resize=(20, 20), resize_mode="pad", encode="png", orient=True),
    Recipe(orient=True),
)


class ImageTarget(Target):
    """An input is a byte for the kind, one for the recipe, and the encoded image."""

    name = "image"
    allowed = (BadImage,)
    tokens = (
        *(b"Exif\0\0MM\0*", b"Exif\0\0II*\0", b"\x12\x01\x03\0\x01\0\0\0"),
        *(b"VP8 ", b"P6 ", b"\x2c"),
        *b"MPF\0 \xff\xd8\xff \xff\xd9 \xff\xda \xff\xc4 GIF89a \x21\xf9\x04 \x3b".split(),
        *b"IHDR IDAT IEND PLTE tRNS iCCP zTXt acTL fcTL fdAT".split(),
        *b"VP8L VP8X ANIM ANMF ALPH EXIF II*\0 MM\0* BM 65535".split(),
        *(b"\xff" + bytes((0xC0 + kind,)) for kind in range(16)),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for number, kind in enumerate(_KINDS):
            for place, image in enumerate(pictures()[kind]):
                self.seeds.append(bytes((number, place)) + image)
        for number in range(40):
            image = random_png(random.Random(number))
            if outcome(image, (0, 0, 0)) != "refused":
                self.seeds.append(bytes((_KINDS.index("png"), 0)) + image)
        for seed in self.seeds:  # Pillow imports its plugins when they are first needed
            try:
                self.check(seed)
            except BadImage as error:
                raise AssertionError(seed) from error

    def check(self, data: bytes) -> str:
        field, choice, image = _KINDS[(data[0] if data else 0) % len(_KINDS)], data[1:2], data[2:]
        sniff(image[:32])
        if field == "png" and "different" in (outcome(image), outcome(image, (3, 200, 90))):
            broken("the compiled module decodes it to other pixels")
        info = inspect(image, field)
        self._check_info(info)
        if info.width * info.height > _LARGE:
            return "large"
        failed = self._recipe(image, field, choice[0] if choice else 0)
        pixels = decode(image, field)
        if pixels.shape != (info.height, info.width, 3):
            broken("it decodes to another size than its header states", (field, pixels.shape))
        if (decode(image, field) != pixels).any():
            broken("it decodes to other pixels each time", field)
        reduced = decode(image, field, Decoding(at_least=(3, 2)))
        if reduction(reduced.shape, pixels.shape) is None:
            broken("it is reduced to an impossible size", (field, reduced.shape))
        if field in ("jpg", PLANES) and pixels.shape[0] > 4 and pixels.shape[1] > 4:
            region = Region(1, 2, pixels.shape[1] - 3, pixels.shape[0] - 3)
            stored = EncodedImage(image, field, 0, info.width, info.height)
            part = decode_region(stored, region, Decoding())
            top, left = region.top - part.top, region.left - part.left
            piece = part.pixels[top : top + region.height, left : left + region.width]
            whole = pixels[region.top :, region.left :][: region.height, : region.width]
            # Of a progressive image that lacks its last scans each library smooths what is there.
            progressive = b"\xff\xc2" in image
            if piece.shape != whole.shape or not (progressive or (piece == whole).all()):
                broken("a piece decoded alone is another", region)
        return f"{field} refused by a recipe" if failed else field

    def _check_info(self, info: ImageInfo) -> None:
        if min(info.width, info.height, info.frames) < 1 or not 1 <= info.orientation <= 8:
            broken("its header is read as something impossible", info)
        if info.width * info.height > MAX_PIXELS:
            broken("it is over the limit of pixels", info)

    def _recipe(self, image: bytes, field: str, choice: int) -> bool:
        record = Record("a", {field: image, "json": b"{}"})
        try:
            made = convert_record(_RECIPES[choice % len(_RECIPES)], record).record
        except BadImage:
            return True
        if made.image_field is None:
            broken("the recipe made no image")
        return False

    def mend(self, data: bytes, rng: random.Random) -> bytes:
        """Make the checksums of a PNG's chunks fit."""
        at = data.find(b"\x89PNG\r\n\x1a\n") + 8
        if at < 8 or rng.random() < 0.2:
            return data
        mended = bytearray(data)
        while at + 12 <= len(mended):
            length = int.from_bytes(mended[at : at + 4], "big")
            end = at + 8 + length
            if end + 4 > len(mended):
                break
            mended[end : end + 4] = zlib.crc32(mended[at + 4 : end]).to_bytes(4, "big")
            at = end + 4
        return bytes(mended)
