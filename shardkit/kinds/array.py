"""The kind ``array``: values of one dtype, of one shape or any.

A record holds an array of one shape without its header: dtype and shape are in the shard's
metadata. So the index locates the values, and a batch of arrays is read into one block, as raw
pixels are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import BFLOAT16, Field, Kind, Need
from shardkit.kinds.values import BFloat16, as_bits, as_numpy
from shardkit.system.npy import npy_header, read_npy
from shardkit.system.text import shortened

_LONGEST_REASON = 200
"""Maximum characters of a message of NumPy."""


class _Array(Kind):
    name = "array"
    dtype = Need.OPTIONAL
    shape = Need.OPTIONAL
    stored_apart = True
    suffix = "npy"

    def infer(self, value: Any) -> Field | None:
        """Return the field of an array that has axes; if one is empty, the shape varies."""
        if not isinstance(value, np.ndarray) or not value.ndim:
            return None
        return Field("array", _dtype(value), None if 0 in value.shape else value.shape)

    def pack(self, name: str, field: Field, value: Any) -> tuple[str, bytes]:
        """Return the stored name and values of an array or tensor, or of an .npy file's path."""
        # Without a dtype in the schema, only the .npy file states one, and it knows no bfloat16.
        array = as_numpy(value) if field.dtype is None else as_bits(value)
        if isinstance(array, (str, Path)):
            array = np.load(array, allow_pickle=False)
        array = np.asanyarray(array)
        if isinstance(array, np.ma.MaskedArray):
            raise ValueError("it is a masked array; fill it, or store its mask as another field")
        dtype = Field("array", _dtype(array)).dtype
        if field.dtype is not None and dtype != field.dtype:
            raise ValueError(f"it is {dtype}; the schema has {field.dtype}")
        if field.shape is not None and array.shape != field.shape:
            raise ValueError(f"it has the shape {array.shape}; the schema has {field.shape}")
        values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        # The shard's metadata state dtype and shape of arrays that are all alike.
        header = b"" if field.is_uniform else npy_header(array.shape, values.dtype)
        return str(field.stored_name(name)), header + values.tobytes()

    def parse(self, field: Field, data: bytes) -> npt.NDArray[Any]:
        """Return the array in an .npy file."""
        return read_npy(data)

    def fault(self, field: Field, data: bytes) -> str:
        """Return why the bytes of an .npy file are not an array of the field, or ""."""
        if field.is_uniform:
            return ""  # the index states their number, and any bytes are values
        try:
            dtype = read_npy(data).dtype
        except ValueError as error:
            return f"it is not an array: {shortened(str(error), _LONGEST_REASON)}"
        if field.dtype is not None and dtype != field.values:
            return f"it is {dtype}; the schema has {field.dtype}"
        return ""

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``: an .npy file."""
        return {"_type": "Value", "dtype": "binary"}

    def is_listed(self, field: Field) -> bool:
        """Return whether a batch is a list of arrays: not if all have one shape."""
        return not field.is_uniform

    def load(self, field: Field, data: bytes) -> npt.NDArray[Any]:
        """Return an array of the field's dtype; of bfloat16 its bits, as uint16."""
        if field.is_uniform:
            return np.frombuffer(bytearray(data), field.values).reshape(field.shape or ())
        return read_npy(data)


def _dtype(array: npt.NDArray[Any]) -> str:
    return BFLOAT16 if isinstance(array, BFloat16) else str(array.dtype)


KIND = _Array()
