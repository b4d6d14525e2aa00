"""The kind ``bytes``: any bytes, such as a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardkit.kinds.field import Field, Kind


class _Bytes(Kind):
    name = "bytes"
    stored_apart = True
    suffix = "bin"

    def infer(self, value: Any) -> Field | None:
        """Return the field of bytes, or of a path."""
        is_bytes = isinstance(value, (bytes, bytearray, memoryview, Path))
        return Field("bytes") if is_bytes else None

    def pack(self, name: str, field: Field, value: Any) -> tuple[str, bytes]:
        """Return the stored name and the bytes, or those of the file at a path."""
        data = value.read_bytes() if isinstance(value, Path) else bytes(memoryview(value))
        return str(field.stored_name(name)), data

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "Value", "dtype": "binary"}


KIND = _Bytes()
