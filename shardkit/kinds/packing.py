"""Users' values packed into records, and the fields that they need."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.errors import BadImage
from shardkit.kinds.field import Field, Schema, all_kinds
from shardkit.kinds.values import as_bits, as_numpy
from shardkit.record import IMAGE, META_FIELD, Record, dump_json
from shardkit.system.text import shortened

_LONGEST = 200
"""Maximum characters of a message of an exception of a library."""


def infer_field(name: str, value: Any) -> Field | None:
    """Return the field of a value, or None if that is unclear; ValueError if none can store it."""
    bits = as_bits(value)
    value = bits if np.ndim(bits) else as_numpy(value)  # a number of bfloat16 is a float32
    for kind in all_kinds():
        if kind.is_named_so and kind.name == name:
            return Field(name)
    fields = (kind.infer(value) for kind in all_kinds())
    return next((field for field in fields if field is not None), None)


def pack(name: str, field: Field, value: Any) -> tuple[str | None, Any]:
    """Return the stored name and bytes of a value, or None and its value in the metadata.

    Raises BadImage if the value is not one of the field.
    """
    try:
        return field.type.pack(name, field, value)
    except BadImage as error:
        raise BadImage(f"{name}: {error.problem}", remedy=error.remedy) from error
    except (ValueError, TypeError, OverflowError, OSError) as error:
        raise_interruption(error)
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename} cannot be read: {error.strerror}"
        raise BadImage(f"{name}: {shortened(reason, _LONGEST)}") from error


def pack_together(name: str, field: Field, values: Sequence[Any]) -> list[Any]:
    """Return what `pack` does, without the name, of several values; None stays None.

    Raises BadImage as `pack`.
    """
    if field.kind == "text":
        with contextlib.suppress(TypeError, UnicodeEncodeError):  # `pack` raises them with the name
            return [None if value is None else str.encode(value) for value in values]
    return [None if value is None else pack(name, field, value)[1] for value in values]


def with_fields(record: Record, schema: Schema, values: Mapping[str, Any]) -> Record:
    """Return a record with more fields; BadImage if a value is not one of its field."""
    fields = dict(record.fields)
    meta: dict[str, Any] = {}
    for name, value in values.items():
        field = schema[name]
        if isinstance(value, str) and field.type.stored_apart:  # `pack` would take it for a path
            raise BadImage(f"{name}: it is text, not a value of kind {field.kind}")
        stored, content = pack(name, field, value)
        if stored:
            fields[stored] = content
        else:
            meta[name] = content
    if meta:
        fields[META_FIELD] = dump_json({**record.meta, **meta})
    return Record(record.key, fields)


def only_fields(record: Record, schema: Schema, names: Collection[str]) -> Record:
    """Return a record with some of its fields; ``schema`` has all of them."""
    fields = {
        stored: content
        for stored, content in record.fields.items()
        if _field_of(stored, schema) in names
    }
    meta = record.meta
    facts = meta.keys() - schema.keys() if IMAGE in names else {"path"}
    kept = {name: value for name, value in meta.items() if name in facts or name in names}
    return Record(record.key, {**fields, META_FIELD: dump_json(kept)})


def _field_of(stored: str, schema: Schema) -> str:
    """Return the field that a stored name is of; the metadata are of none."""
    for name, field in schema.items():
        if stored == field.stored_name(name):
            return name
    return "" if stored == META_FIELD else stored.rpartition(".")[0] or IMAGE
