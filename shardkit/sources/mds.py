"""Shards of MosaicML Streaming (MDS) as a source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.contracts import Attaching, SourceKind
from shardkit.errors import UsageError
from shardkit.kinds.field import Field
from shardkit.sources.column_shards import (
    ColumnShards,
    Shard,
    array_of,
    checked,
    column_of,
    number_column,
)
from shardkit.sources.columns import Column, ColumnOptions, plain_column
from shardkit.sources.recognize import having_index
from shardkit.system import safe_paths
from shardkit.system.text import quoted

_BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
_DTYPES = {f"{kind}{bits}": f"<{kind[0]}{bits // 8}" for kind in _BITS for bits in _BITS[kind]}
_NUMBERS = {"int": "<i8", **_DTYPES}
_CODES = {
    {"uint": 0, "int": 1, "float": 2}[kind] + bits: f"{kind}{bits}"
    for kind in _BITS
    for bits in _BITS[kind]
}
"""The byte that starts an array without a stated type: its bits, and the kind in the lowest two."""
_TEXTS = {"str_int": ("int64", int), "str_float": ("float64", float)}
_PLAIN = {"jpeg": "image", "png": "image", "str": "text", "str_decimal": "text"}
_PLAIN |= {"json": "json", "bytes": "bytes"}


class Mds(ColumnShards):
    """A folder of MDS shards with their index, or of such folders, which are splits."""

    kind = "mds"
    format = "MDS"

    def parse_index(
        self, folder: Path, index: Mapping[str, Any]
    ) -> tuple[Sequence[Column], Sequence[Shard]]:
        """Return the columns and shards that an index states."""
        if index["version"] != 2:
            raise UsageError(f"{folder} has MDS version {quoted(index['version'])}, not 2")
        shards = []
        shared_columns = None
        for shard in (checked(dict, entry, "a shard") for entry in index["shards"]):
            if shard["format"] != "mds" or shard["version"] != 2:
                raise UsageError(
                    f"{folder} has shards in format {quoted(shard['format'])}; only MDS version 2 "
                    "can be read"
                )
            columns = tuple(shard[f"column_{kind}"] for kind in ("names", "encodings", "sizes"))
            shared_columns = shared_columns or columns
            if columns != shared_columns:
                raise ValueError("its shards have different columns")
            raw = checked(dict, shard["raw_data"], "raw_data")
            name = checked(str, raw["basename"], "basename")
            packed = shard.get("zip_data")
            if packed and not _is_there(folder, name):
                name = checked(str, packed["basename"], "basename")
            rows = checked(int, shard["samples"], "samples")
            shards.append(Shard(name, rows, checked(int, raw["bytes"], "bytes")))
        names, encodings, sizes = shared_columns or ((), (), ())
        return [
            _column(checked(str, name, "a name"), checked(str, encoding, "an encoding"), size)
            for name, encoding, size in zip(names, encodings, sizes, strict=True)
        ], shards


def _is_there(folder: Path, name: str) -> bool:
    safe_paths.split_path(name)
    return safe_paths.is_file(folder, name)


def _column(name: str, encoding: str, size: Any) -> Column:
    column = _column_of(name, encoding)
    if (size or None) != column.size:
        raise ValueError(f"the size of {quoted(name)} is {quoted(size)}, not {column.size}")
    return column


def _column_of(name: str, encoding: str) -> Column:
    if dtype := _NUMBERS.get(encoding):
        return number_column(name, encoding, dtype)._replace(size=np.dtype(dtype).itemsize)
    if encoding in _TEXTS:
        return plain_column(name, encoding, *_TEXTS[encoding])
    if encoding.partition(":")[0] == "ndarray":
        return _array_column(name, encoding)
    if encoding.startswith(("list[", "jpeg_array", "jpegarray")):
        return Column(name, encoding, "", why="it contains several images")
    return column_of(name, encoding, encoding, _PLAIN)


def _array_column(name: str, encoding: str) -> Column:
    _, *details = encoding.split(":")
    dtype = details[0] if details and details[0] else None
    shape = tuple(map(int, details[1].split(","))) if len(details) > 1 else None
    if len(details) > 2 or (dtype and dtype not in _DTYPES) or (shape and min(shape) < 1):
        raise ValueError(f"the encoding {quoted(encoding)} is unknown")
    if dtype and shape:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        decode = partial(array_of, dtype, shape)
        return Column(name, encoding, "array", decode, Field("array", dtype, shape), size)
    return Column(name, encoding, "array", partial(_array, dtype, shape), Field("array"))


def _array(dtype: str | None, shape: Sequence[int] | None, data: bytes) -> npt.NDArray[Any]:
    """Return an array; what the encoding does not state, starts the value.

    One byte is the type, as `_CODES`. One byte is four times the axes plus the kind of integer of
    the sides, which follow.
    """
    at = 0
    if dtype is None:
        if data[0] not in _CODES:
            raise ValueError(f"its type is {data[0]}")
        dtype = _CODES[data[0]]
        at = 1
    if shape is None:
        axes = data[at] >> 2
        size = 1 << data[at] % 4
        sides = np.frombuffer(data, f"<u{size}", axes, at + 1)
        shape = tuple(map(int, sides))
        at = at + 1 + axes * size
    return array_of(dtype, shape, data[at:])


SOURCE = SourceKind(
    name=Mds.kind,
    title="Convert shards of MosaicML Streaming (MDS).",
    help="""Convert a folder of MDS shards to a dataset in DST.

    SRC contains index.json, or a folder with one for each split. Streaming is not needed. JPEG and
    PNG files keep their bytes; pixels (pil) become PNG files. Numbers, text, JSON, bytes and arrays
    become fields. Shards compressed with zstd, brotli or snappy need `pip install
    'shardkit[compressed]'`. Pickles are refused.

    \b
    Examples:
      shardkit convert mds imagenet-mds dataset --to lmdb --dry-run
      shardkit convert mds imagenet-mds dataset --to lmdb --image jpg --label class
    """,
    options=ColumnOptions,
    attaching=Attaching(
        title="A folder of MDS shards.",
        help="""Index the images in MDS shards where they are, as a dataset in INDEX_DIR.

        ARCHIVES is a folder with index.json. Its shards must not be compressed, and its images must
        be encoded files, not pixels (pil).

        \b
        Example:
          shardkit attach mds imagenet-mds/train train-index
        """,
    ),
    recognize=having_index(b'"shards"'),
    source=Mds,
)
