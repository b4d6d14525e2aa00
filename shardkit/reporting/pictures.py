"""Small pictures of stored images, with their masks and boxes, and sheets of them."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from shardkit.codecs.image import Decoding
from shardkit.dataset.decode import decode_shown
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage
from shardkit.record import ABSENT
from shardkit.reporting.fields import read_mask
from shardkit.system.text import shortened

COLORS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Okabe and Ito's color-blind safe colors."""

_GAP = 4

_TILE = 160

_TEXT = 28
"""Sides of a sheet's pictures, and the height of two lines of text below, in pixels."""


def picture(shards: ShardSet, row: int, side: int) -> Image.Image:
    """Return a row's image, scaled down to fit into a square of ``side`` pixels.

    Masks are laid over it and boxes drawn, in the color of their class. An image that cannot be
    decoded is crossed out.
    """
    located = shards.find(np.array([row]))
    stored = located.read(0, memoryview(bytearray(max(1, located.longest))))
    try:
        if stored.field == ABSENT:
            raise BadImage("it has no image")
        shown = Image.fromarray(decode_shown(stored, Decoding(at_least=(side, side))))
    except BadImage:
        shown = Image.new("RGB", (side, side), "#888")
        draw = ImageDraw.Draw(shown)
        draw.line((0, 0, side, side), "#000", 2)
        draw.line((0, side, side, 0), "#000", 2)
        return shown
    size = stored.width, stored.height
    shown.thumbnail((side, side), Image.Resampling.BOX)
    for name, field in shards.schema.items():
        if field.type.is_picture and field.type.follows:
            shown = _with_mask(shown, read_mask(shards, name, row))
        elif field.kind == "boxes":
            _draw_boxes(shown, size, shards.values(name, [row]).value(0))
    return shown


def data_uri(shown: Image.Image) -> str:
    """Return a picture as the address of a page's embedded image."""
    buffer = io.BytesIO()
    shown.save(buffer, "WEBP", quality=60, method=2)  # half the time for 4% more bytes
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def sheet(shards: ShardSet, records: Sequence[Mapping[str, Any]]) -> Image.Image:
    """Return pictures of records that `describe_record` described, in about a square.

    Row and key are below each picture, and its class.
    """
    columns = max(1, int(np.ceil(np.sqrt(len(records)))))
    width, height = _TILE + _GAP, _TILE + _TEXT + _GAP
    size = columns * width + _GAP, -(-len(records) // columns) * height + _GAP
    canvas = Image.new("RGB", size, "white")
    for number, record in enumerate(records):
        line, column = divmod(number, columns)
        tile = _with_caption(picture(shards, record["row"], _TILE), record)
        canvas.paste(tile, (_GAP + column * width, _GAP + line * height))
    return canvas


def _with_caption(shown: Image.Image, record: Mapping[str, Any]) -> Image.Image:
    tile = Image.new("RGB", (_TILE, _TILE + _TEXT), "white")
    tile.paste(shown, ((_TILE - shown.width) // 2, (_TILE - shown.height) // 2))
    texts = f"{record['row']}: {record['key']}", record["class"] or ""
    lines = "\n".join(shortened(text, _TILE // 6) for text in texts)
    ImageDraw.Draw(tile).multiline_text((0, _TILE), lines, "black", ImageFont.load_default())
    return tile


def _with_mask(shown: Image.Image, mask: npt.NDArray[np.generic] | None) -> Image.Image:
    if mask is None or mask.ndim != 2:
        return shown
    # By nearest neighbor: values are classes.
    lines = np.arange(shown.height) * mask.shape[0] // shown.height
    columns = np.arange(shown.width) * mask.shape[1] // shown.width
    values = mask[lines[:, None], columns].astype(np.int64)
    palette = np.array([tuple(bytes.fromhex(color[1:])) for color in COLORS])
    pixels = np.asarray(shown).astype(np.int64)
    mixed = (pixels + palette[values % len(COLORS)]) // 2
    return Image.fromarray(np.where(values[..., None] > 0, mixed, pixels).astype(np.uint8))


def _draw_boxes(shown: Image.Image, size: tuple[int, int], value: Any) -> None:
    if value is None:
        return
    boxes, labels = value if isinstance(value, tuple) else (np.asarray(value), [0] * len(value))
    scale = np.tile(np.array(shown.size) / np.maximum(size, 1), 2)
    draw = ImageDraw.Draw(shown)
    for box, label in zip(np.nan_to_num(boxes) * scale, labels, strict=True):
        left, top, right, bottom = np.clip(box, -1, np.tile(shown.size, 2)).tolist()
        draw.rectangle(
            (left, top, max(left, right), max(top, bottom)),
            outline=COLORS[int(label) % len(COLORS)],
            width=2,
        )
