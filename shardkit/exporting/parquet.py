"""The layout of Parquet files for Hugging Face's ``datasets``, which needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.exporting.folder import as_file
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting, is_apart
from shardkit.record import LABEL, NO_LABEL, Field, Record, dump_json

_GROUP_ROWS = 100
"""Rows of a row group, as ``datasets`` writes columns of images."""

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_parquet(exporting: Exporting, output: OutputFolder) -> None:
    """Write one file for each shard, with the features of ``datasets`` in its metadata."""
    split = exporting.split or "train"
    count = len(exporting.shards.manifest.shards)
    fields = dict(exporting.shards.schema)
    described = {name: _feature(field) for name, field in fields.items()}
    schema = pa.schema(
        [(name, _type(field)) for name, field in fields.items()],
        metadata={"huggingface": dump_json({"info": {"features": described}})},
    )
    for number in range(count):
        name = f"data/{split}-{number:05d}-of-{count:05d}.parquet"
        with output.create(name) as file, pq.ParquetWriter(file, schema) as writer:
            records = exporting.of_shard(number)
            for group in _groups(records):
                rows = [
                    {field: _value(exporting, record, field) for field in fields}
                    for record in group
                ]
                writer.write_table(pa.Table.from_pylist(rows, schema))
        output.count(name)


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _GROUP_ROWS)):
        yield group


def _value(exporting: Exporting, record: Record, name: str) -> Any:
    field = exporting.shards.schema[name]
    if is_apart(field):
        found = exporting.stored_bytes(record, name)
        if found is None or field.kind in ("array", "bytes"):
            return found and as_file(field, found[1])
        return {"bytes": found[1], "path": exporting.file_name(record, found[0])}
    if name == LABEL:
        return None if record.label == NO_LABEL else record.label
    if field.kind in ("label", "labels"):
        return record.meta.get(name)
    value = exporting.value(record, name)
    if value is None or field.kind in ("number", "text"):
        return value
    return dump_json(value).decode()


def _type(field: Field) -> pa.DataType:
    if field.kind in ("image", "mask"):
        return _IMAGE
    if field.kind == "number":
        return pa.from_numpy_dtype(field.values)
    return {
        "label": pa.int64(),
        "labels": pa.list_(pa.int64()),
        "array": pa.binary(),
        "bytes": pa.binary(),
    }.get(field.kind, pa.string())


def _feature(field: Field) -> dict[str, Any]:
    """Return a field as a feature of ``datasets``."""
    if field.kind in ("image", "mask"):
        return {"_type": "Image"}
    if field.kind == "label":
        return {"_type": "ClassLabel", "names": list(field.classes or ())}
    if field.kind == "labels":
        names = list(field.classes or ())
        return {"_type": "Sequence", "feature": {"_type": "ClassLabel", "names": names}}
    return {"_type": "Value", "dtype": str(_type(field))}
