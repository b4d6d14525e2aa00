"""The layout of Parquet files for Hugging Face's ``datasets``, which needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.errors import UsageError
from shardkit.exporting.folder import as_file
from shardkit.exporting.output import OutputFolder
from shardkit.exporting.records import Exporting
from shardkit.kinds.field import Field
from shardkit.record import LABEL, NO_LABEL, Record, dump_json
from shardkit.system.text import quoted

_GROUP_ROWS = 100
"""Rows of a row group, as ``datasets`` writes columns of images."""

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_parquet(exporting: Exporting, output: OutputFolder) -> None:
    """Write one file for each shard, with the features of ``datasets`` in its metadata."""
    split = exporting.shards.dataset.split or "train"
    count = len(exporting.shards.manifest.shards)
    fields = dict(exporting.shards.schema)
    described = {name: _feature(field) for name, field in fields.items()}
    schema = pa.schema(
        [(name, _type(field.type.feature(field))) for name, field in fields.items()],
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
                writer.write_table(_table(rows, schema))
        output.count(name)


def _groups(records: Iterator[Record]) -> Iterator[list[Record]]:
    while group := list(islice(records, _GROUP_ROWS)):
        yield group


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return some rows as a table."""
    try:
        return pa.Table.from_pylist(rows, schema)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{quoted(error.object)} is not UTF-8, which Parquet requires: export with the "
            "imagefolder, csv or webdataset layout"
        ) from error


def _value(exporting: Exporting, record: Record, name: str) -> Any:
    field = exporting.shards.schema[name]
    if field.type.stored_apart:
        stored = exporting.stored_bytes(record, name)
        if stored is None or _feature(field)["_type"] != "Image":
            return stored and as_file(field, stored[1])
        return {"bytes": stored[1], "path": exporting.file_name(record, stored[0])}
    if name == LABEL:
        return None if record.label == NO_LABEL else record.label
    if field.type.holds_classes:
        return record.meta.get(name)  # Parquet states their names in its schema
    value = exporting.value(record, name)
    if value is None or field.type.compares:
        return value
    return dump_json(value).decode()


def _type(feature: Mapping[str, Any]) -> pa.DataType:
    """Return the type of the column of a feature of ``datasets``."""
    kind = feature["_type"]
    if kind == "Image":
        return _IMAGE
    if kind == "Sequence":
        return pa.list_(_type(feature["feature"]))
    if kind == "ClassLabel":
        return pa.int64()
    dtype = feature["dtype"]
    return {"binary": pa.binary(), "string": pa.string()}.get(dtype) or pa.from_numpy_dtype(dtype)


def _feature(field: Field) -> dict[str, Any]:
    """Return a field as a feature of ``datasets``, which calls types as Arrow does."""
    feature = field.type.feature(field)
    if "dtype" in feature:
        return {**feature, "dtype": str(_type(feature))}
    return feature
