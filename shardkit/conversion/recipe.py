"""The recipe: what a conversion does to an image, and to which image it does nothing at all.

It decides; `shardkit.codecs.image` carries out.
"""

from __future__ import annotations

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
    Color,
    ImageInfo,
    Pixels,
    apply_orientation,
    decode,
    encode,
    inspect,
)
from shardkit.codecs.jpeg import jpeg_loss
from shardkit.codecs.quiet import quiet
from shardkit.codecs.reduced import reduction
from shardkit.errors import BadImage, UsageError
from shardkit.record import FOREIGN_FIELD, META_FIELD, Record, dump_json

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

NOTES = ("damaged", "frames", "odd", "orientation", "small")
"""What a record's metadata may note of its image: its source had lost data (only with
``tolerate_damage``), it has several frames, its source has a harmless fault, it lies on its side,
or is smaller than asked for."""

CHECK_NOTES = frozenset(("damaged", "odd"))
"""Those of `NOTES` that decoding an image finds."""

RE_ENCODE = "which cannot be stored as it is; --encode jpeg, png or webp re-encodes it"

TOLERATE = "--tolerate-damage stores it with the pixels that Pillow decodes"


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
    resize: int | tuple[int, int] | None = None
    """Box that ``resize_mode`` refers to, in pixels: height and width, or the side of a square."""
    resize_mode: str = "shorter"
    """One of `RESIZE_MODES`: cover the box, fit into it, cover and cut to it from the centre, fit
    and fill up with the background, or take its shape regardless of the image's. (On the command
    line HxW means ``crop``.)"""
    filter: str = "bicubic"
    """One of `FILTERS`; all are antialiased."""
    resizer: str = "pillow"
    """One of `RESIZERS`: the library that scales. ``torch`` has the filters ``bicubic`` and
    ``bilinear`` and is faster, but takes a second and 200 MB in each process to load: for large
    folders. Sizes are equal; few values differ, by one, rarely by two."""
    dct_scaling: bool = False
    """Decode a JPEG at 1/8 to 4/8 of its size if that leaves twice the target's sides: 2.5x faster
    for 2000-pixel photographs, but only within 38 dB of the default, which decodes all pixels.
    Requires the resizer ``pillow``."""
    enlarge: bool = False
    """Whether an image may become larger than it is."""
    background: Color = WHITE
    """RGB under transparent pixels, and around images in the mode ``pad``."""
    orient: bool = False
    """Whether an EXIF orientation makes an image be turned and re-encoded. Where pixels change for
    another reason it is always applied."""
    check: str = "decode"
    """One of `CHECKS`: how far an image that passes through untouched is read to prove it whole."""
    tolerate_damage: bool = False
    """Whether to store a JPEG that lost data, if Pillow decodes it."""

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
        if self.dct_scaling and (self.resize is None or self.resizer != "pillow"):
            raise UsageError("dct_scaling requires a resize with the resizer pillow")
        if type(self.resize) is int:
            object.__setattr__(self, "resize", (self.resize, self.resize))
        if self.resize is not None and (
            not isinstance(self.resize, tuple) or len(self.resize) != 2
        ):
            raise UsageError(f"resize={self.resize!r} is not a pair of height and width")
        if self.box is not None and not all(1 <= side <= 65535 for side in self.box):
            height, width = self.box
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
    def box(self) -> tuple[int, int] | None:
        """Height and width of `resize`, in pixels."""
        return (self.resize, self.resize) if isinstance(self.resize, int) else self.resize

    @property
    def has_fixed_size(self) -> bool:
        """Whether all images come out in the same size, if none is smaller than it."""
        return self.resize is not None and self.resize_mode in ("crop", "pad", "stretch")

    @property
    def raw_shape(self) -> tuple[int, int, int] | None:
        """Height, width and channels of every image stored as raw pixels, or None."""
        return (*self.box, 3) if self.box and self.encode == "raw" else None

    @property
    def keeps_bytes(self) -> bool:
        """Whether no image can change at all: the stored sizes are then those of the files."""
        return self.encode == "keep" and not (self.resize or self.orient or self.quality)

    def describe(self) -> dict[str, Any]:
        """Return the recipe as JSON values, for the manifest.

        ``resizer``, ``dct_scaling`` and ``tolerate_damage`` are omitted at their defaults.
        """
        value = asdict(self)
        omitted = (("resizer", "pillow"), ("dct_scaling", False), ("tolerate_damage", False))
        for name, default in omitted:
            if value[name] == default:
                del value[name]
        value["resize"] = list(self.box) if self.box else None
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
        """Return ``record`` as it is to be stored; its metadata gain the size and the notes.

        Raises:
            BadImage: If the image fails the check, or cannot be converted as requested.
        """
        return self.apply_with_notes(record)[0]

    def apply_with_notes(self, record: Record) -> tuple[Record, dict[str, int]]:
        """Return what `apply` returns, and the `NOTES` of the image.

        Raises:
            BadImage: As `apply`.
        """
        field = record.image_field or FOREIGN_FIELD
        data = record.fields[field]
        info = self._inspect(data, field)
        if info.kind and self.keeps_bytes:
            decode(data, field, background=self.background)  # the remedy works
            raise BadImage(f"it is an image of the format {info.kind}, {RE_ENCODE}")
        plan = self._plan(info, field)
        notes: dict[str, int] = {}
        if self.resize_mode != "pad" and not self.enlarge and self._enlarges(*info.upright):
            notes["small"] = 1
        if info.frames > 1:
            notes["frames"] = info.frames
        if plan is None:
            if self.check == "decode" and not info.surely_decodes:
                self._decode(data, field, notes)
            if info.orientation != 1:
                notes["orientation"] = info.orientation
            return _stored(record, field, data, (info.width, info.height), notes), notes
        _check_size(plan)
        image = self._change(data, field, info, plan, notes)
        if self.raw_shape and (image.height, image.width) != self.box:
            raise BadImage(
                f"it is {info.width} x {info.height} pixels, too small to be resized "
                f"without enlarging or padding it ({TOO_SMALL})"
            )
        content = encode(image, plan.field, self.quality or DEFAULT_QUALITY)
        return _stored(record, plan.field, content, image.size, notes), notes

    def _decode(
        self, data: bytes, field: str, notes: dict[str, int], at_least: _Size = (0, 0)
    ) -> Pixels:
        """Decode an image, and note its faults, or refuse it for them."""
        warnings: list[str] = []
        pixels = decode(
            data, field, background=self.background, at_least=at_least, warnings=warnings
        )
        for warning in warnings:
            loss = jpeg_loss(data, warning)
            if loss and not self.tolerate_damage:
                raise BadImage(f"it is damaged: {loss} ({TOLERATE})")
            notes["damaged" if loss else "odd"] = 1
        return pixels

    def _inspect(self, data: bytes, field: str) -> ImageInfo:
        try:
            return inspect(data, field)
        except BadImage:
            if self.check == "none" and self.keeps_bytes and field != FOREIGN_FIELD:
                return ImageInfo(0, 0)
            raise

    def _enlarges(self, width: int, height: int) -> bool:
        """Tell whether the box asks for more pixels than an upright image of this size has."""
        if self.box is None:
            return False
        box_height, box_width = self.box
        if self.resize_mode in ("longer", "pad"):
            return width < box_width and height < box_height
        return width < box_width or height < box_height

    def _plan(self, info: ImageInfo, field: str) -> _Change | None:
        """Return what has to be done to an image, or None where its bytes can stay."""
        if self.keeps_bytes and field != FOREIGN_FIELD:
            return None
        geometry = self._geometry(*info.upright)
        wanted = _ENCODED_AS.get(self.encode, field)
        if (
            geometry == (info.upright, info.upright)
            and wanted == field != FOREIGN_FIELD
            and self.quality is None
            and not (self.orient and info.orientation != 1)
        ):
            return None
        if self.encode == "keep" and field not in _KEPT:
            wanted = "png"
        return _Change(wanted, *geometry)

    def _geometry(self, width: int, height: int) -> _Geometry:
        """Return the size an upright image is scaled to, and of the canvas it is then cut to."""
        if self.box is None:
            return _Geometry((width, height), (width, height))
        box_height, box_width = self.box
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

    def _change(
        self, data: bytes, field: str, info: ImageInfo, plan: _Change, notes: dict[str, int]
    ) -> Image.Image:
        if self.dct_scaling and field == "jpg" and plan.size != info.upright:
            image = self._scale_by_dct(data, notes, info, plan.size)
        else:
            image = self._scale(self._decode(data, field, notes), info.orientation, plan.size)
        if plan.canvas != plan.size:
            image = _cut(image, plan.canvas, self.background)
        return image

    def _scale(self, pixels: Pixels, orientation: int, size: _Size) -> Image.Image:
        """Return ``pixels`` as an image, turned upright and then scaled."""
        if self.resizer == "torch":
            if orientation != 1:
                pixels = np.array(apply_orientation(Image.fromarray(pixels), orientation))
            return Image.fromarray(_scaling().scale(pixels, size, self.filter))
        image = apply_orientation(Image.fromarray(pixels), orientation)
        return image if image.size == size else image.resize(size, FILTERS[self.filter])

    def _scale_by_dct(
        self, data: bytes, notes: dict[str, int], info: ImageInfo, size: _Size
    ) -> Image.Image:
        """Return a JPEG scaled to ``size`` from a reduced decode with twice its pixels."""
        width, height = size if info.orientation < 5 else size[::-1]
        pixels = self._decode(data, "jpg", notes, (2 * width, 2 * height))
        scale = reduction(pixels.shape, (info.height, info.width))
        if scale is None:
            raise BadImage(f"it decodes to {pixels.shape}, its header says {info}")
        box = (0.0, 0.0, info.width * scale, info.height * scale)
        image = Image.fromarray(pixels).resize((width, height), FILTERS[self.filter], box)
        return apply_orientation(image, info.orientation)


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


def _cut(image: Image.Image, canvas: tuple[int, int], background: Color) -> Image.Image:
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
    image = record.image_field or FOREIGN_FIELD
    fields = {name: value for name, value in record.fields.items() if name != image}
    meta = fields.get(META_FIELD, b"{}")
    if not notes and meta.startswith(b'{"path":"') and meta.count(b'":') == 1:
        # Parsing and encoding again takes twice as long as all other work on a small file.
        meta = b'{"height":%d,%b,"width":%d}' % (size[1], meta[1:-1], size[0])
    else:
        meta = dump_json({**record.meta, "width": size[0], "height": size[1], **notes})
    return Record(record.key, {**fields, field: content, META_FIELD: meta})


def _choose(option: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise UsageError(f"{option}={value!r} is unknown; known are {', '.join(known)}")
