"""The kind ``labels``: any number of the field's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import Field, Kind, Need, Packed, Stack
from shardkit.kinds.values import as_list, class_number, pack_classes


class _Labels(Kind):
    name = "labels"
    classes = Need.REQUIRED
    column_type = np.dtype("<i4")
    is_variable = True
    holds_classes = True
    compares = (str,)

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        """Return the numbers of classes, given as numbers or names, ascending."""
        return None, sorted({class_number(field, label) for label in as_list(value)})

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the numbers of classes as int32."""
        return Packed(pack_classes(field, value))

    def as_json(self, field: Field, value: Any) -> Any:
        """Return the names of classes."""
        return [(field.classes or ())[label] for label in value]

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str]:
        """Return the number of labels of each row."""
        return [len(value) for value in values], "labels per image"

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        label = {"_type": "ClassLabel", "names": list(field.classes or ())}
        return {"_type": "Sequence", "feature": label}

    def is_listed(self, field: Field) -> bool:
        """Return whether a batch is a list of values: it is one array."""
        return False

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack:
        """Return float32 of shape (rows, classes): 1 for each class that a row has."""
        counts = np.diff(np.zeros(0, np.int64) if ends is None else ends, prepend=0)
        hot = np.zeros((len(counts), len(field.classes or ())), np.float32)
        hot[np.repeat(np.arange(len(counts)), counts), values] = 1
        return Stack(hot)


KIND = _Labels()
