"""The kind ``json``: any JSON value."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import Field, Kind, Packed
from shardkit.kinds.values import parse_json
from shardkit.record import dump_json


class _Json(Kind):
    name = "json"
    column_type = np.dtype(np.uint8)
    is_variable = True

    def infer(self, value: Any) -> Field | None:
        """Return the field of a dict, list or tuple."""
        return Field("json") if isinstance(value, (dict, list, tuple)) else None

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        """Return a value that JSON can state."""
        json.dumps(value, allow_nan=False)
        return None, value

    def parse(self, field: Field, data: bytes) -> Any:
        """Return the value in a file."""
        return parse_json(data)

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the value as canonical JSON."""
        return Packed(dump_json(value))

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> Any:
        """Return the value of a row."""
        return json.loads(values.tobytes().decode())


KIND = _Json()
