"""The kind ``text``: a text in UTF-8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kinds.field import Field, Kind, Packed
from shardkit.record import Record


class _Text(Kind):
    name = "text"
    suffix = "txt"
    column_type = np.dtype(np.uint8)
    is_variable = True
    compares = (str,)

    def infer(self, value: Any) -> Field | None:
        """Return the field of a text."""
        return Field("text") if isinstance(value, str) else None

    def pack(self, name: str, field: Field, value: Any) -> tuple[str, bytes]:
        """Return the stored name and the text in UTF-8."""
        if not isinstance(value, str):
            raise TypeError(f"its type is {type(value).__name__}, not text")
        return str(self.stored_name(name)), value.encode()

    def parse(self, field: Field, data: bytes) -> str:
        """Return the text in a file."""
        return data.decode()

    def in_record(self, record: Record, meta: Mapping[str, Any], name: str) -> str | None:
        """Return the text, which is not in the metadata but a field of the record."""
        content = record.fields.get(str(self.stored_name(name)))
        return None if content is None else content.decode()

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return the text in UTF-8."""
        if value is None:  # of metadata that state the field
            raise TypeError("it is not text")
        return Packed(value.encode())

    def pack_stored(self, field: Field, values: Sequence[bytes]) -> Sequence[Packed]:
        """Return the bytes of several texts as they are, if they are UTF-8."""
        if not b"".join(values).isascii():
            for value in values:
                value.decode()
        return [*map(Packed, values)]

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> str:
        """Return the text of a row."""
        return values.tobytes().decode()

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str]:
        """Return the length of each text."""
        return [len(value) for value in values], "characters"


KIND = _Text()
