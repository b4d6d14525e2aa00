"""The kind ``label``: one of the field's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import Field, Kind, Need, Packed, Stack
from shardkit.kinds.values import class_number, pack_classes
from shardkit.record import LABEL, LABEL_FIELD, NO_LABEL


class _Label(Kind):
    name = "label"
    classes = Need.REQUIRED
    column_type = np.dtype("<i4")
    holds_classes = True
    compares = (str,)

    def stored_name(self, name: str) -> str | None:
        """Return `LABEL_FIELD` for the primary label; others are in the metadata."""
        return LABEL_FIELD if name == LABEL else None

    def pack(self, name: str, field: Field, value: Any) -> tuple[str | None, Any]:
        """Return the number of a class, given as a number or name."""
        label = class_number(field, value)
        stored = self.stored_name(name)
        return stored, label if stored is None else b"%d" % label

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the number of a class as int32."""
        return Packed(pack_classes(field, [value]))

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> int:
        """Return the number of a row's class."""
        return int(values[0])

    def as_json(self, field: Field, value: Any) -> Any:
        """Return the name of a class."""
        return (field.classes or ())[value]

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str]:
        """Return one for each value."""
        return [1.0] * len(values), "labels per image"

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "ClassLabel", "names": list(field.classes or ())}

    def is_listed(self, field: Field) -> bool:
        """Return whether a batch is a list of values: it is one array."""
        return False

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack:
        """Return the labels as int64."""
        labels = values.astype(np.int64)
        return Stack(labels, labels.tolist())

    def fill_missing(self, stack: Stack, present: npt.NDArray[np.bool_]) -> Stack:
        """Return the labels with `NO_LABEL` for each missing one."""
        labels = np.where(present, stack.array, NO_LABEL)
        return Stack(labels, labels.tolist())


KIND = _Label()
