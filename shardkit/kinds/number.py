"""The kind ``number``: one number of the field's dtype."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import Field, Kind, Need, Packed, Stack
from shardkit.kinds.values import as_numpy
from shardkit.system.text import shortened

_FORMS = {"b1": "?", "f2": "e", "f4": "f", "f8": "d"} | {
    f"{kind}{size}": code if kind == "i" else code.upper()
    for kind in "iu"
    for size, code in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))
}
"""Codes of the `struct` module by type of number."""

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, as the metadata spell them."""


class _Number(Kind):
    name = "number"
    dtype = Need.REQUIRED
    compares = (int, float)

    def check(self, field: Field) -> None:
        """Refuse a dtype that is not one of numbers."""
        if np.dtype(field.dtype).kind not in "biuf":
            raise ValueError(f"a number cannot have the dtype {field.dtype}; use an array")

    def infer(self, value: Any) -> Field | None:
        """Return the field of a Python or NumPy number, or of an array without axes."""
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, (str, bytes)):
            return Field("number", str(value.dtype)) if not value.ndim else None
        for kind in (bool, int, float):
            if isinstance(value, kind):
                return Field("number", np.dtype(kind).name)
        return None

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        """Return a number as JSON has it, rounded to the field's floating-point type."""
        # Of these, the conversion below takes ten times as long and changes nothing.
        if (type(value), field.dtype) in ((float, "float64"), (bool, "bool")):
            return None, number_as_json(value)
        if type(value) is int and field.dtype == "int64" and value.bit_length() < 64:
            return None, value
        number = np.asarray(as_numpy(value))
        if number.size != 1 or number.dtype.kind not in "biuf":
            raise TypeError(f"it is not a number: {shortened(str(value), 40)}")
        with np.errstate(over="ignore", invalid="ignore"):
            stored = number.reshape(()).astype(field.values)
        rounds = field.values.kind == "f" and np.isfinite(stored)  # as in NumPy: 0.1 in float32
        if stored != number and not (rounds or np.isnan(stored)):
            raise ValueError(f"{value} is not a number of type {field.dtype}")
        return None, number_as_json(stored.item())

    def parse(self, field: Field, data: bytes) -> npt.NDArray[Any]:
        """Return the number in a text."""
        return np.array(data.decode().strip(), str).astype(field.values)

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the bytes of a number, which must be one of the field's dtype."""
        kind = field.values.kind
        form = struct.Struct("<" + _FORMS[field.values.str[1:]])
        if kind == "f":
            value = _SPECIAL.get(value, value) if isinstance(value, str) else value
            if type(value) not in (int, float):
                raise TypeError("it is not a number")
            packed = form.pack(value)
            (stored,) = form.unpack(packed)
            if stored != value and not math.isnan(value):
                raise ValueError(f"{value} is not a number of type {field.dtype}")
            return Packed(packed)
        if type(value) is not (bool if kind == "b" else int):
            raise TypeError(f"it does not have the type {field.dtype}")
        return Packed(form.pack(value))

    def pack_stored(self, field: Field, values: Sequence[Any]) -> Sequence[Packed]:
        """Return the bytes of several numbers, of plain ones in a fifth of the time."""
        types: dict[str, set[type]] = {"f": {int, float}, "b": {bool}}
        if {*map(type, values)} <= types.get(field.values.kind, {int}):
            form = struct.Struct(f"<{len(values)}{_FORMS[field.values.str[1:]]}")
            packed = form.pack(*values)
            if form.unpack(packed) == (*values,):
                size = field.values.itemsize
                return [Packed(packed[at : at + size]) for at in range(0, len(packed), size)]
        return super().pack_stored(field, values)

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> Any:
        """Return the NumPy number of a row."""
        return values[0]

    def as_json(self, field: Field, value: Any) -> Any:
        """Return a number of the metadata as a Python number."""
        return _SPECIAL[value] if isinstance(value, str) else value

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str]:
        """Return the numbers themselves."""
        return [float(value) for value in values], "value"

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "Value", "dtype": field.dtype}

    def is_listed(self, field: Field) -> bool:
        """Return whether a batch is a list of values: it is one array."""
        return False

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack:
        """Return the numbers."""
        return Stack(np.array(values), values)


def number_as_json(value: Any) -> Any:
    """Return a number as records state it: JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


KIND = _Number()
