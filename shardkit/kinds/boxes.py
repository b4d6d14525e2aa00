"""The kind ``boxes``: rectangles in pixels of the image, perhaps with a class each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import Frame, Geometry, move_boxes
from shardkit.kinds.field import Field, Kind, Need, Packed
from shardkit.kinds.values import (
    as_list,
    as_numpy,
    class_number,
    pack_classes,
    pack_coordinates,
    parse_json,
)


class _Boxes(Kind):
    name = "boxes"
    classes = Need.OPTIONAL
    is_named_so = True
    follows = True
    column_type = np.dtype("<f8")
    is_variable = True

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        """Return left, top, right and bottom of each box, and its class if the field has classes.

        A value is an array of shape (N, 4) or (N, 5), a pair of boxes and labels, or a mapping
        with ``boxes`` and ``labels``.
        """
        labels: Iterable[Any] = ()
        if isinstance(value, Mapping):
            value, labels = value["boxes"], value.get("labels", ())
        elif isinstance(value, tuple) and len(value) == 2 and field.classes is not None:
            value, labels = value
        corners = np.asarray(as_numpy(value), np.float64)
        corners = corners.reshape(0, 4) if not corners.size else corners
        with_labels = corners.ndim == 2 and corners.shape[1] == 5 and field.classes is not None
        if corners.ndim != 2 or (corners.shape[1] != 4 and not with_labels):
            raise ValueError(f"each box is four numbers, not an array of shape {corners.shape}")
        if not np.isfinite(corners).all():
            raise ValueError("a number of a box is NaN or infinite: leave out the box")
        if with_labels:
            corners, fifth = corners[:, :4], corners[:, 4]
            with np.errstate(invalid="ignore"):
                labels = fifth.astype(np.int64)
            if (labels != fifth).any():
                raise ValueError("the label of a box is not an integer")
        if (corners[:, :2] > corners[:, 2:]).any():
            raise ValueError("boxes are left, top, right, bottom: one ends before it starts")
        if field.classes is None:
            if as_list(labels):
                raise ValueError("the boxes have labels: use Field('boxes', classes=...)")
            return None, corners.tolist()
        numbers = [class_number(field, label) for label in as_list(labels)]
        if len(numbers) != len(corners):
            raise ValueError(f"{len(corners)} boxes have {len(numbers)} labels")
        return None, [[*box, label] for box, label in zip(corners.tolist(), numbers, strict=True)]

    def parse(self, field: Field, data: bytes) -> Any:
        """Return the boxes in a JSON file."""
        return parse_json(data)

    def width(self, field: Field) -> int:
        """Return four: the numbers of a box."""
        return 4

    def has_labels(self, field: Field) -> bool:
        """Return whether boxes have classes."""
        return field.classes is not None

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the corners of boxes as float64, and their classes as int32."""
        width = 4 + self.has_labels(field)
        corners: list[float] = []
        for box in value:
            if len(box) != width:
                raise ValueError(f"a box has {len(box)} numbers instead of {width}")
            corners += box[:4]
        labels = pack_classes(field, [box[4] for box in value]) if width > 4 else b""
        return Packed(pack_coordinates(corners), labels)

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> Any:
        """Return float64 of shape (N, 4); with classes a pair of that and int32 of shape (N,)."""
        boxes = values.reshape(-1, 4)
        return boxes if labels is None else (boxes, labels)

    def as_json(self, field: Field, value: Any) -> Any:
        """Return the boxes with the names of their classes."""
        if field.classes is None:
            return value
        return [[*box[:4], field.classes[box[4]]] for box in value]

    def plain(self, field: Field, value: Any) -> Any:
        """Return the boxes as lists."""
        if not isinstance(value, tuple):
            return super().plain(field, value)
        boxes, labels = (array.tolist() for array in value)
        return [[*box, label] for box, label in zip(boxes, labels, strict=True)]

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str]:
        """Return the number of boxes of each row."""
        counts = [len(value[0] if isinstance(value, tuple) else value) for value in values]
        return [*map(float, counts)], "boxes per image"

    def move(self, field: Field, value: Any, geometry: Geometry) -> tuple[Any, bool]:
        """Return the boxes on the canvas, and whether any box is outside it."""
        corners = np.array([box[:4] for box in value], np.float64).reshape(-1, 4)
        moved, shown = move_boxes(geometry.upright(corners), geometry.frame)
        labels = [value[row][4:] for row in np.flatnonzero(shown).tolist()]
        boxes = [[*box, *label] for box, label in zip(moved.tolist(), labels, strict=True)]
        return boxes, len(boxes) < len(value)

    def sample(self, field: Field, value: Any, frame: Frame | None) -> Any:
        """Return float64 of shape (N, 4), or (N, 5) with classes, of the boxes in a frame."""
        boxes, labels = value if isinstance(value, tuple) else (value, None)
        if frame is not None:
            boxes, shown = move_boxes(boxes, frame)
            labels = None if labels is None else labels[shown]
        return boxes if labels is None else np.column_stack([boxes, labels])


KIND = _Boxes()
