"""The recipe: what a conversion does to an image, and to which image it does nothing at all.

It decides; `shardkit.codecs.image` carries out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from shardkit.codecs.image import (
    MAX_PIXELS,
    WHITE,
    Colour,
    ImageInfo,
    Pixels,
    decode,
    encode,
    inspect,
    turn_upright,
)
from shardkit.codecs.quiet import quiet
from shardkit.errors import BadImage, UsageError
from shardkit.record import META_FIELD, Record, dump_json

_Size = tuple[int, int]
"""Width and height, in pixels."""

ENCODINGS = ("keep", "jpeg", "png", "webp", "raw")
RESIZE_MODES = ("shorter", "longer", "crop", "pad", "stretch")
CHECKS = ("decode", "header", "none")
FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}
RESIZERS = ("pillow", "torch")
DEFAULT_QUALITY = 90

TOO_SMALL = "--enlarge or --resize-mode pad"
"""What helps an image that is too small for raw pixels of one size; every message names it so."""

_TORCH_FILTERS = ("bicubic", "bilinear")
"""Those of `FILTERS` that torch has with antialiasing."""

_ENCODED_AS = {"jpeg": "jpg", "png": "png", "webp": "webp", "raw": "raw"}
_KEPT = ("jpg", "png", "webp")
"""Kinds that an image keeps under ``keep`` if its pixels change; others become PNG."""

NOTES = ("frames", "orientation", "small")
"""What a record's metadata may note of its image: it has several frames, lies on its side, or is
smaller than asked for."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is done to each image. The default does nothing: bytes pass through untouched.

    Raises:
        UsageError: If options contradict each other or are out of range.
    """

    encode: str = "keep"
    """One of `ENCODINGS`. An image that already has this encoding, and of which no pixel has to
    change, passes through untouched unless ``quality`` is given."""
    quality: int | None = None
    """Quality of JPEG and WebP, 1 to 100; None is `DEFAULT_QUALITY` where something is encoded."""
    resize: tuple[int, int] | None = None
    """Height and width of the box that ``resize_mode`` refers to, in pixels."""
    resize_mode: str = "shorter"
    """One of `RESIZE_MODES`: cover the box, fit into it, cover and cut to it from the centre, fit
    and fill up with the background, or take its shape regardless of the image's. (On the command
    line HxW means ``crop``.)"""
    filter: str = "bicubic"
    """One of `FILTERS`; all are antialiased."""
    resizer: str = "pillow"
    """One of `RESIZERS`: the library that scales. ``torch`` has the filters ``bicubic`` and
    ``bilinear`` and is faster, but takes a second and 200 MB in each process to load: for large
    folders. Sizes are the same; few values differ, by one, rarely by two."""
    enlarge: bool = False
    """Whether an image may become larger than it is."""
    background: Colour = WHITE
    """RGB under transparent pixels, and around images in the mode ``pad``."""
    orient: bool = False
    """Whether an EXIF orientation makes an image be turned and re-encoded. Where pixels change for
    another reason it is always applied."""
    check: str = "decode"
    """One of `CHECKS`: how far an image that passes through untouched is read to prove it whole."""

    def __post_init__(self) -> None:
        _choose("encode", self.encode, ENCODINGS)
        _choose("resize_mode", self.resize_mode, RESIZE_MODES)
        _choose("filter", self.filter, FILTERS)
        _choose("check", self.check, CHECKS)
        _choose("resizer", self.resizer, RESIZERS)
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UsageError(f"quality {self.quality} is not from 1 to 100")
        if self.quality is not None and self.encode in ("png", "raw"):
            raise UsageError(
                f"quality has no meaning for the encoding {self.encode}, which loses nothing"
            )
        if self.resizer == "torch" and self.filter not in _TORCH_FILTERS:
            raise UsageError(
                f"the resizer torch has no filter {self.filter}; it has "
                f"{' and '.join(_TORCH_FILTERS)}, and the resizer pillow has all"
            )
        if self.resizer != "pillow" and self.resize is None:
            raise UsageError(f"the resizer {self.resizer} has nothing to do without a resize")
        if self.resize is not None and (
            not isinstance(self.resize, tuple) or len(self.resize) != 2
        ):
            raise UsageError(f"resize={self.resize!r} is not a pair of height and width")
        if self.resize is not None and not all(1 <= side <= 65535 for side in self.resize):
            height, width = self.resize
            raise UsageError(f"resize {height}x{width} is not from 1 to 65535 pixels")
        if not all(0 <= part <= 255 for part in self.background):
            raise UsageError(f"background {self.background} is not three numbers from 0 to 255")
        if self.encode == "raw" and not self.has_fixed_size:
            raise UsageError(
                "the encoding raw needs images of one size: resize to HxW, in the mode crop, "
                "pad or stretch"
            )
        if self.raw_shape and self.raw_shape[0] * self.raw_shape[1] * 3 >= 2**32:
            raise UsageError("resize makes raw images of over 4 GiB each")

    @property
    def has_fixed_size(self) -> bool:
        """Whether all images come out in the same size, if none is smaller than it."""
        return self.resize is not None and self.resize_mode in ("crop", "pad", "stretch")

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of every image stored as raw pixels, or None."""
        return (*self.resize, 3) if self.resize and self.encode == "raw" else None

    @property
    def keeps_bytes(self) -> bool:
        """Whether no image can change at all: the stored sizes are then those of the files."""
        return self.encode == "keep" and not (self.resize or self.orient or self.quality)

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, for the manifest.

        The resizer stands there unless it is Pillow, as in manifests from before the choice.
        """
        value = asdict(self)
        if self.resizer == "pillow":
            del value["resizer"]
        value["resize"] = list(self.resize) if self.resize else None
        value["background"] = list(self.background)
        return value

    @classmethod
    def restored(cls, value: Mapping[str, Any]) -> Recipe:
        """Return the recipe that `describe` gave ``value`` of.

        Raises:
            UsageError: If a value of it is out of range.
            TypeError: If it is no description of a recipe.
        """
        parts = dict(value)
        parts["resize"] = tuple(parts["resize"]) if parts.get("resize") else None
        parts["background"] = tuple(parts.get("background", WHITE))
        return cls(**parts)

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context to apply the recipe to many images in; leave it when they are done.

        It loads what the recipe needs, and keeps that from starting threads of its own.
        """
        if self.resizer == "pillow":
            return nullcontext()
        context: AbstractContextManager[None] = _scaling().one_thread()
        return context

    def apply(self, record: Record) -> Record:
        """Return ``record`` as it is to be stored; its metadata gain the size and what was noticed.

        Raises:
            BadImage: If the image fails the check, or cannot be turned into what is asked for.
        """
        field = record.image_field
        assert field is not None
        data = record.fields[field]
        info = self._inspect(data, field)
        plan = self._plan(info, field)
        notes = {}
        if self.resize_mode != "pad" and not self.enlarge and self._enlarges(*info.upright):
            notes["small"] = 1
        if info.frames > 1:
            notes["frames"] = info.frames
        if plan is None:
            if self.check == "decode":
                decode(data, field)
            if info.orientation != 1:
                notes["orientation"] = info.orientation
            return _stored(record, field, data, (info.width, info.height), notes)
        _check_size(plan)
        image = self._change(data, field, info, plan)
        if self.raw_shape and (image.height, image.width) != self.resize:
            raise BadImage(
                f"it is {info.width} x {info.height} pixels, too small to be resized "
                f"without enlarging or padding it ({TOO_SMALL})"
            )
        content = encode(image, plan.field, self.quality or DEFAULT_QUALITY)
        return _stored(record, plan.field, content, image.size, notes)

    def _inspect(self, data: bytes, field: str) -> ImageInfo:
        try:
            return inspect(data, field)
        except BadImage:
            if self.check == "none" and self.keeps_bytes:
                return ImageInfo(0, 0)
            raise

    def _enlarges(self, width: int, height: int) -> bool:
        """Tell whether the box asks for more pixels than an upright image of this size has."""
        if self.resize is None:
            return False
        box_height, box_width = self.resize
        if self.resize_mode in ("longer", "pad"):
            return width < box_width and height < box_height
        return width < box_width or height < box_height

    def _plan(self, info: ImageInfo, field: str) -> _Change | None:
        """Return what has to be done to an image, or None where its bytes can stay."""
        geometry = self._geometry(*info.upright)
        wanted = _ENCODED_AS.get(self.encode, field)
        if (
            geometry == (info.upright, info.upright)
            and wanted == field
            and self.quality is None
            and not (self.orient and info.orientation != 1)
        ):
            return None
        if self.encode == "keep" and field not in _KEPT:
            wanted = "png"
        return _Change(wanted, *geometry)

    def _geometry(self, width: int, height: int) -> _Geometry:
        """Return the size an upright image is scaled to, and of the canvas it is then cut to."""
        if self.resize is None:
            return _Geometry((width, height), (width, height))
        box_height, box_width = self.resize
        if self.resize_mode == "stretch":
            size = box_width, box_height
            if not self.enlarge:
                size = min(width, box_width), min(height, box_height)
            return _Geometry(size, size)
        cover = self.resize_mode in ("shorter", "crop")
        # The side that is scaled to the box exactly; the other follows, rounded down as in
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

    def _change(self, data: bytes, field: str, info: ImageInfo, plan: _Change) -> Image.Image:
        width, height = plan.size
        # Twice the target keeps the reduced JPEG within 51 dB of the full decode; less does not.
        enough = (2 * height, 2 * width) if info.orientation >= 5 else (2 * width, 2 * height)
        scaled = plan.size != info.upright
        pixels = decode(
            data, field, background=self.background, at_least=enough if scaled else (0, 0)
        )
        image = self._scale(pixels, info.orientation, plan.size)
        if plan.canvas != plan.size:
            image = _cut(image, plan.canvas, self.background)
        return image

    def _scale(self, pixels: Pixels, orientation: int, size: _Size) -> Image.Image:
        """Return ``pixels`` as an image, turned upright and then scaled."""
        if self.resizer == "torch":
            if orientation != 1:
                pixels = np.array(turn_upright(Image.fromarray(pixels), orientation))
            return Image.fromarray(_scaling().scale(pixels, size, self.filter))
        image = turn_upright(Image.fromarray(pixels), orientation)
        return image if image.size == size else image.resize(size, FILTERS[self.filter])


class _Geometry(NamedTuple):
    """What an upright image is scaled to, and the canvas it is then cut or filled to."""

    size: _Size
    canvas: _Size


@dataclass(frozen=True, slots=True)
class _Change:
    """What happens to one image: scaled to ``size``, cut or filled to ``canvas``, encoded."""

    field: str
    size: _Size
    canvas: _Size


def parse_size(text: str) -> tuple[tuple[int, int], str]:
    """Return the box, height and width, that ``N`` or ``HxW`` stands for, and its usual mode.

    Raises:
        UsageError: If it is neither.
    """
    match = re.fullmatch(r"([0-9]{1,9})(?:[xX]([0-9]{1,9}))?", text)
    if match is None:
        raise UsageError(
            f"--resize {text[:40]!r} is neither a number of pixels (256) nor HxW (224x224)"
        )
    height, width = match.groups()
    return (int(height), int(width or height)), "crop" if width else "shorter"


def _scaling() -> Any:
    """Return the module that loads torch: not before a recipe asks for it."""
    return import_module("shardkit.codecs.scaling")


def _check_size(plan: _Change) -> None:
    """Refuse what enlarging would make of a long strip: 60,000 x 1 pixels at 256 rows are 4e9."""
    for width, height in (plan.size, plan.canvas):
        if width * height > MAX_PIXELS:
            raise BadImage(
                f"it would become {width} x {height} pixels, over the limit of {MAX_PIXELS}"
            )


def _cut(image: Image.Image, canvas: tuple[int, int], background: Colour) -> Image.Image:
    """Return the centre of ``image``, or ``image`` in the centre, on a canvas of the given size."""
    left = round((image.width - canvas[0]) / 2)
    top = round((image.height - canvas[1]) / 2)
    if left >= 0 and top >= 0:
        with quiet():  # Pillow warns of large pieces as of bombs
            return image.crop((left, top, left + canvas[0], top + canvas[1]))
    ground = Image.new("RGB", canvas, background)
    ground.paste(image, (-left, -top))
    return ground


def _stored(
    record: Record,
    field: str,
    content: bytes,
    size: _Size,
    notes: dict[str, int],
) -> Record:
    fields = {name: value for name, value in record.fields.items() if name != record.image_field}
    meta = {**record.meta, "width": size[0], "height": size[1], **notes}
    return Record(record.key, {**fields, field: content, META_FIELD: dump_json(meta)})


def _choose(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"{option}={value!r} is unknown; known are {', '.join(known)}")
