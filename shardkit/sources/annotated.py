"""Annotated pictures: boxes, points and masks whose source states, or implies, a picture's size.

Some tools annotate the pixels as stored, and others the upright picture, after the orientation in
EXIF. A stated size that is the file's swapped one shows which. Fields are stored in pixels of the
file, so that `--orient` turns them together with the image.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

from shardkit.codecs.geometry import Geometry, turn
from shardkit.codecs.image import ImageInfo, decode_mask, encode_mask, image_field_of, inspect
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Schema
from shardkit.options import option
from shardkit.record import Record
from shardkit.sources.kept import Kept
from shardkit.sources.named_source import NamedOptions, NamedSource

SIZE = "size"
"""Name among the values of an entry of the width and height that the source states."""

STORED = "stored"
UPRIGHT = "upright"

_PROBED = 4096
"""Images to look at, at most, for one that shows which pixels annotations refer to."""

_HEAD = 1 << 18
_INVERSE = {6: 8, 8: 6}
"""The orientations that are not their own inverse."""


@dataclass(frozen=True, kw_only=True)
class AnnotatedOptions(NamedOptions):
    """The options of sources of annotated pictures."""

    annotated: str | None = option(
        None,
        help="Pixels that annotations and masks refer to if an image has an EXIF orientation: as "
        "stored in the file, or upright.",
        metavar="stored|upright",
        shown="inferred from the declared sizes",
    )

    def __post_init__(self) -> None:
        if self.annotated not in (None, STORED, UPRIGHT):
            raise UsageError(
                f"{setting('annotated', self.annotated)} must be {STORED} or {UPRIGHT}"
            )


class AnnotatedSource(NamedSource):
    """Images with boxes, points or masks, in pixels of a picture of a stated size."""

    options: AnnotatedOptions

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._probed = 0
        self._outside = 0

    def probe(self, name: str, size: Sequence[int] | Callable[[], Sequence[int]] | None) -> None:
        """Learn from the stated size of an image which pixels annotations refer to.

        All images of a dataset follow one rule, also those whose size does not show it, such as
        square ones. So a scan looks at the first images until one does.
        """
        if self.options.annotated or size is None or self._probed >= _PROBED:
            return
        self._probed += 1
        with contextlib.suppress(BadImage, OSError, ValueError):
            info = self.info_of(name)
            rules = {(info.width, info.height): STORED, info.upright: UPRIGHT}
            if len(rules) == 2:
                width, height = size() if callable(size) else size
                self.settle(annotated=rules.get((width, height)))

    def info_of(self, name: str) -> ImageInfo:
        """Return what an image's header states; BadImage, OSError, ValueError if unreadable."""
        head = self.content.head(name, _HEAD)
        return inspect(head, image_field_of(BytesIO(head)))

    def count_outside(self, boxes: Sequence[Sequence[float]], size: Sequence[float] | None) -> None:
        """Count the boxes that reach outside of a picture, for a note."""
        if size is not None:
            width, height = size
            self._outside += sum(
                left < 0 or top < 0 or right > width or bottom > height
                for left, top, right, bottom, *_ in boxes
            )

    def settle_fields(
        self, schema: Schema, numbers: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Set the fields that a scan found, and note what is odd about them."""
        super().settle_fields(schema, numbers)
        if self._outside:
            verb = "box extends" if self._outside == 1 else "boxes extend"
            self.notes.append(f"{self._outside:,} {verb} beyond the image")

    def fit(self, values: dict[str, Any], record: Record) -> dict[str, Any]:
        """Return boxes and points in stored pixels; BadImage if the image has another size."""
        size = values.pop(SIZE, None)
        if not size and self.options.annotated != UPRIGHT:
            return values  # without a look at the image
        info = header_of(record)
        if info is None:
            return values
        if self._is_upright(size and tuple(size), info) and info.orientation != 1:
            inverse = _INVERSE.get(info.orientation, info.orientation)
            turn = Geometry(info.upright, inverse, info.upright, info.upright)
            values |= {
                name: turned(values[name], turn, 4 if name == "boxes" else 2)
                for name in ("boxes", "keypoints")
                if name in values
            }
        return values

    def value_of(self, kept: Kept, content: bytes, record: Record) -> Any:
        """Return the value in a file; a mask in stored pixels."""
        info = header_of(record) if self.schema[kept.name].kind == "mask" else None
        if info is None:
            return super().value_of(kept, content, record)
        if info.orientation == 1:
            return content
        kind = image_field_of(BytesIO(content))
        mask = inspect(content, kind)
        if not self._is_upright((mask.width, mask.height), info):
            return content
        inverse = _INVERSE.get(info.orientation, info.orientation)
        return encode_mask(turn(decode_mask(content, kind), inverse))

    def _is_upright(self, size: tuple[int, int] | None, info: ImageInfo) -> bool:
        """Return whether annotations refer to the upright picture."""
        stored = info.width, info.height
        rule = self.options.annotated
        if size is None or stored == info.upright == size:
            return rule == UPRIGHT
        if size not in (stored, info.upright):
            raise BadImage(
                f"its annotations are for {size[0]} x {size[1]} pixels, but the image is "
                f"{stored[0]} x {stored[1]}"
            )
        shows = STORED if size == stored else UPRIGHT
        if rule not in (None, shows):
            raise BadImage(
                f"its annotations are for {size[0]} x {size[1]} pixels, the {shows} image, but "
                f"the dataset's annotations refer to the {rule} image "
                f"({setting('annotated', rule)})"
            )
        return shows == UPRIGHT


def header_of(record: Record) -> ImageInfo | None:
    """Return what the header of a record's image states; None without an image."""
    field = record.image_field
    return None if field is None else inspect(record.fields[field], field)


def turned(values: Sequence[Sequence[Any]], turn: Geometry, width: int) -> list[list[Any]]:
    """Return boxes, or points with a visibility, after a turn; points without one stay."""
    if not values:
        return []
    corners = np.array([[*value[:width], *value[:width]][:4] for value in values], np.float64)
    moved = turn.upright(corners)[:, :width].tolist()
    return [
        [*(corner if width == 4 or value[2] else value[:2]), *value[width:]]
        for corner, value in zip(moved, values, strict=True)
    ]
