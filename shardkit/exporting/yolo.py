"""The layout of Ultralytics: images, a file of labels for each, and data.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from shardkit.codecs.geometry import Geometry
from shardkit.codecs.image import ImageInfo, inspect
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import UsageError, setting
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting
from shardkit.kinds.field import Field
from shardkit.record import IMAGE, Record
from shardkit.sources.annotated import turned
from shardkit.sources.folders import is_split_name
from shardkit.system.text import name_list, quoted

_FIELDS = {"boxes": "boxes", "keypoints": "keypoints", "polygons": "json"}
"""The kind of each field that labels hold."""

_OUTSIDE = 0.01
"""How far a coordinate may be outside of the picture: Ultralytics accepts no more."""


def write_yolo(exporting: Exporting, output: OutputFolder) -> None:
    """Write images and labels; with the first split, also data.yaml.

    Numbers are fractions of the upright picture, which Ultralytics reads. UsageError if there are
    no boxes, a field is none that labels hold, or a box is outside of its picture.
    """
    fields = exporting.others
    wrong = [name for name, field in fields.items() if _FIELDS.get(name) != field.kind]
    if wrong or "boxes" not in fields or not fields["boxes"].classes:
        raise UsageError(
            f"{exporting.shards.directory} has the fields {name_list(exporting.shards.schema)}, "
            "but YOLO labels store only boxes with classes, keypoints and polygons;",
            remedy=f"use {setting('layout', 'csv')}, or `shardkit fields remove` for others",
        )
    dataset = exporting.shards.dataset
    splits = [*OpenedDirectory(dataset.top).splits] if dataset.split else [""]
    if dataset.split == splits[0]:
        output.write("data.yaml", _description(fields, splits).encode())
    for record in exporting.records():
        image = exporting.stored_bytes(record, IMAGE)
        if image is not None:
            stored, content = image
            path = PurePosixPath(exporting.file_name(record, stored))
            folders = [
                name for name in path.parts[:-1] if name != "images" and not is_split_name(name)
            ]
            inside = "/".join(filter(None, [dataset.split, *folders]))
            folder = f"{inside}/" if inside else ""
            output.write(f"images/{folder}{path.name}", content)
            rows = _rows(fields, record, inspect(content, stored))
            text = "".join(f"{' '.join(row)}\n" for row in rows)
            output.write(f"labels/{folder}{path.stem}.txt", text.encode())


def _description(fields: dict[str, Field], splits: Sequence[str]) -> str:
    lines = []
    for split in splits:
        name = "val" if re.match("val", split) else split or "train"
        lines.append(f"{name}: {json.dumps(f'images/{split}'.rstrip('/'), ensure_ascii=False)}")
    points = list(fields["keypoints"].classes or ()) if "keypoints" in fields else []
    if points:
        lines.append(f"kpt_shape: {[len(points), 3]}")
        lines.append(f"kpt_names: {json.dumps({0: points}, ensure_ascii=False)}")
    lines.append("names:")
    for number, name in enumerate(fields["boxes"].classes or ()):
        lines.append(f"  {number}: {json.dumps(name, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _rows(fields: dict[str, Field], record: Record, info: ImageInfo) -> Iterator[list[str]]:
    """Yield the words of each line of labels."""
    size = info.width, info.height
    turn = Geometry(size, info.orientation, size, size)
    boxes = turned(record.meta.get("boxes") or [], turn, 4)
    points = turned(record.meta.get("keypoints") or [], turn, 2)
    polygons = record.meta.get("polygons") or [[] for _ in boxes]
    points_per_box = len(fields["keypoints"].classes or ()) if "keypoints" in fields else 0
    width, height = info.upright
    for number, (box, polygon) in enumerate(zip(boxes, polygons, strict=True)):
        left, right, top, bottom = box[0] / width, box[2] / width, box[1] / height, box[3] / height
        numbers = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
        if polygon:
            numbers = [value for point in polygon for value in point]
        for x, y, seen in points[number * points_per_box : (number + 1) * points_per_box]:
            numbers += [x / width, y / height, seen]
        is_inside = all(-_OUTSIDE <= side <= 1 + _OUTSIDE for side in (left, top, right, bottom))
        if not is_inside or len(points) != points_per_box * len(boxes):
            problem = (
                "it lacks keypoints for some boxes" if is_inside else "a box extends beyond it"
            )
            raise UsageError(
                f"{quoted(record.meta['path'])}: {problem}, which YOLO labels cannot express;",
                remedy=f"use {setting('layout', 'csv')}",
            )
        yield [str(int(box[4])), *map(_plain, numbers)]


def _plain(value: Any) -> str:
    return f"{value:.10f}".rstrip("0").rstrip(".")
