"""Rows of Arrow and Parquet files; runs in the child of `library_process`."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardkit.contracts import Range
from shardkit.errors import BadImage
from shardkit.system.helper import Library

pa = Library("pyarrow")
pc = Library("pyarrow.compute")
pq = Library("pyarrow.parquet")

_HELD = 256 << 20
"""Maximum bytes of decompressed row groups to hold, unless one has more."""

_MOST_OPEN = 64

_IMAGE = {"bytes", "path"}
"""Fields of a column of images."""


class _File:
    """An open file, as groups of rows: the record batches of Arrow, the row groups of Parquet."""

    def __init__(self, path: str) -> None:
        kind = "a Parquet file" if path.endswith(".parquet") else "an Arrow stream"
        try:
            self._open(path)
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # not the content's fault
                raise
            raise BadImage(f"it is damaged or is not {kind}") from error
        self._held: OrderedDict[tuple[int, tuple[str, ...]], Any] = OrderedDict()

    def _open(self, path: str) -> None:
        self._parquet: Any = None
        self._batches: list[Any] = []
        if path.endswith(".parquet"):
            self._parquet = pq.ParquetFile(path)
            self.schema = self._parquet.schema_arrow
            metadata = self._parquet.metadata
            self.rows = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        else:
            source = pa.memory_map(path)
            reader = pa.ipc.open_stream(source)
            self.schema = reader.schema
            self._batches = list(reader)
            self.rows = [len(batch) for batch in self._batches]

    def group(self, number: int, columns: Sequence[str]) -> Any:
        """Return columns of a group, whose offsets and texts are valid."""
        key = number, tuple(columns)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if self._parquet is not None:
            table = self._parquet.read_row_group(number, columns=list(columns), use_threads=False)
            table = table.combine_chunks()
        else:
            table = pa.Table.from_batches([self._batches[number].select(list(columns))])
        table.validate(full=True)
        self._held[key] = table
        while sum(held.nbytes for held in self._held.values()) > _HELD and len(self._held) > 1:
            self._held.popitem(last=False)
        return table


_OPEN: dict[str, tuple[int, _File]] = {}
"""Open files by path, each with its stamp when it was opened."""


def _open(path: str, stamp: int) -> _File:
    if _OPEN.get(path, (None,))[0] != stamp:
        if len(_OPEN) == _MOST_OPEN:
            _OPEN.pop(next(iter(_OPEN)))
        _OPEN[path] = stamp, _File(path)
    return _OPEN[path][1]


def describe(path: str, stamp: int) -> tuple[list[int], list[tuple[str, str, list[str] | None]]]:
    """Return the rows of each group, and name, kind and class names of each column.

    The kind is ``image``, ``images``, ``label``, ``labels``, ``text``, ``bytes``, ``json``, or the
    NumPy name of a type of numbers.
    """
    file = _open(path, stamp)
    features = _features(file.schema)
    columns = [
        (column.name, *_kind(column.type, features.get(column.name)))
        for column in file.schema
        if file.schema.names.count(column.name) == 1
    ]
    return file.rows, columns


def listing(path: str, stamp: int, group: int, columns: Sequence[str | None]) -> list[list[Any]]:
    """Return, for each row of a group: size and path of the image, label and name.

    ``columns`` are those of images, labels and names, or None. The column of images stands for the
    path in it.
    """
    image, label, name = columns
    wanted = [column for column in columns if column is not None]
    table = _open(path, stamp).group(group, list(dict.fromkeys(wanted)))
    images = table.column(image)
    none = paths = [None] * len(images)
    if pa.types.is_struct(images.type):
        if "path" in [images.type.field(number).name for number in range(len(images.type))]:
            paths = pc.struct_field(images, "path").to_pylist()
        images = pc.struct_field(images, "bytes")
    sizes = pc.binary_length(images).to_pylist()
    labels = none if label is None else table.column(label).to_pylist()
    names = none if name is None else table.column(name).to_pylist()
    return [sizes, paths, labels, paths if name == image else names]


def rows(path: str, stamp: int, group: int, span: Range, columns: list[str]) -> bytes:
    """Return as JSON the values of some rows of a group, as a list for each column."""
    table = _open(path, stamp).group(group, columns).slice(*span)
    values = [table.column(name).to_pylist() for name in columns]
    return json.dumps(values, default=_plain).encode()


def read(path: str, stamp: int, row: int, columns: Sequence[str]) -> bytes:
    """Return the values of a row: a line of JSON, then all bytes end to end.

    In the line, an object with ``value`` is a value; a number is the length of bytes.
    """
    file = _open(path, stamp)
    group = 0
    while group < len(file.rows) and row >= file.rows[group]:
        row -= file.rows[group]
        group += 1
    if group == len(file.rows):
        raise BadImage("the file has fewer rows")
    table = file.group(group, list(dict.fromkeys(columns)))
    head: list[Any] = []
    blobs = []
    for name in columns:
        value = table.column(name)[row].as_py()
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            value = value["bytes"]
        if isinstance(value, bytes):
            head.append(len(value))
            blobs.append(value)
        else:
            head.append({"value": value})
    return json.dumps(head, default=_plain).encode() + b"\n" + b"".join(blobs)


def _plain(value: object) -> object:
    if isinstance(value, np.floating):
        return float(value)
    if isinstance(value, bytes):
        raise BadImage(
            "a value contains bytes, not text",
            remedy="if it is an image, use `shardkit convert huggingface`",
        )
    return str(value)  # dates, times and decimals


def _features(schema: Any) -> dict[str, Any]:
    """Return what ``datasets`` states about the columns, if anything."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _kind(type_: Any, feature: Any) -> tuple[str, list[str] | None]:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = feature[0] if isinstance(feature, list) and feature else feature
        inner = inner.get("feature", inner) if isinstance(inner, Mapping) else inner
        if _plain_kind(type_.value_type) == "image":
            return "images", None
        names = _class_names(type_.value_type, inner)
        return ("json" if names is None else "labels"), names
    names = _class_names(type_, feature)
    if names is not None:
        return "label", names
    return _plain_kind(type_.value_type if pa.types.is_dictionary(type_) else type_), None


def _plain_kind(type_: Any) -> str:
    if pa.types.is_struct(type_):
        types = {type_.field(number).name: type_.field(number).type for number in range(len(type_))}
        return "image" if _is_bytes(types.get("bytes")) and types.keys() <= _IMAGE else "json"
    if pa.types.is_boolean(type_) or pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return str(np.dtype(type_.to_pandas_dtype()).name)
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "text"
    return "bytes" if _is_bytes(type_) else "json"


def _is_bytes(type_: Any) -> bool:
    return type_ is not None and (pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


def _class_names(type_: Any, feature: Any) -> list[str] | None:
    """Return the names of a column of class labels; None for any other."""
    if not isinstance(feature, Mapping) or feature.get("_type") != "ClassLabel":
        return None
    names = feature.get("names")
    return list(map(str, names)) if pa.types.is_integer(type_) and names else None
