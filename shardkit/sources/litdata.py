"""LitData chunks as a source."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from shardkit.sources.columns import Column, ColumnOptions
from shardkit.sources.recognize import having_index
from shardkit.system.text import quoted

_NUMPY = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
"""Types of arrays by their number; those that follow cannot be stored."""
_TORCH = {0: "f4", 1: "f4", 2: "f8", 3: "f8", 8: "f2", 9: "f2", 11: "u1", 12: "i1", 13: "i2"}
_TORCH |= {14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8", 19: "?", 20: "u2"}
_DEEPEST = 32
_MOST_AXES = 32
_NUMBERS = {"int": "<i8", "float": "<f8", "bool": "?"}
_PLAIN = dict.fromkeys(("jpeg", "image", "tiff", "tifffile"), "image")
_PLAIN |= {"str": "text", "text": "text", "json": "json", "bytes": "bytes", "file": "bytes"}


class LitData(ColumnShards):
    """A folder of LitData's chunks with their index, or of such folders, which are splits."""

    kind = "litdata"
    format = "LitData"

    def parse_index(
        self, folder: Path, index: Mapping[str, Any]
    ) -> tuple[Sequence[Column], Sequence[Shard]]:
        """Return the columns and chunks that an index states."""
        config = checked(dict, index["config"], "config")
        if config.get("encryption"):
            raise UsageError(f"{folder} is encrypted", remedy="write it again without encryption")
        loader = config.get("item_loader") or "PyTreeLoader"
        if loader != "PyTreeLoader":
            raise UsageError(f"{folder} has items for {quoted(loader)}; only samples can be read")
        level = config.get("compression_level")
        if config.get("ipc_compression") or level in ("batch", "sample"):
            raise UsageError(
                f"{folder} is compressed by {quoted(level or 'Arrow')}",
                remedy="write it again with compression_level='chunk', or without compression",
            )
        formats = [checked(str, name, "a format") for name in config["data_format"]]
        names = [*_names(json.loads(checked(str, config["data_spec"], "data_spec")))]
        columns = [_column(*pair) for pair in zip(names, formats, strict=True)]
        return columns, [
            Shard(
                checked(str, chunk["filename"], "filename"),
                checked(int, chunk["chunk_size"], "chunk_size"),
                checked(int, chunk["chunk_bytes"], "chunk_bytes"),
            )
            for chunk in (checked(dict, entry, "a chunk") for entry in index["chunks"])
        ]


def _names(spec: Any) -> Iterator[str]:
    """Yield the name of each column: ``image``, or ``meta.0`` of a list in a dictionary.

    The index states a sample's structure as PyTorch does: its version, and a tree of types.
    """
    version, tree = spec
    if version != 1:
        raise ValueError(f"data_spec has version {quoted(version)}")
    yield from _below(tree, ())


def _below(tree: Any, path: tuple[str, ...]) -> Iterator[str]:
    if len(path) > _DEEPEST:
        raise ValueError("data_spec is nested too deeply")
    if tree["type"] is None:
        yield ".".join(path) or "sample"
        return
    children = tree["children_spec"]
    names: Sequence[Any] = range(len(children))
    if tree["type"] in ("builtins.dict", "collections.OrderedDict"):
        context = tree["context"]
        names = json.loads(context) if isinstance(context, str) else context
    elif tree["type"] not in ("builtins.list", "builtins.tuple"):
        raise UsageError(f"samples of type {quoted(tree['type'])} cannot be read")
    for name, child in zip(names, children, strict=True):
        yield from _below(child, (*path, str(name)))


def _column(name: str, type_name: str) -> Column:
    kind, _, more = type_name.partition(":")
    if kind in _NUMBERS:
        return number_column(name, type_name, _NUMBERS[kind])
    decode: Callable[[bytes], Any] | None = None
    if kind in ("no_header_numpy", "no_header_tensor"):
        if dtype := _dtype_of(int(more), kind == "no_header_tensor"):
            decode = partial(array_of, dtype, (-1,))
    elif kind in ("numpy", "tensor"):
        decode = partial(_array, kind == "tensor")
    if decode:
        return Column(name, type_name, "array", decode, Field("array"))
    return column_of(name, type_name, kind, _PLAIN)


def _dtype_of(number: int, torch: bool) -> str | None:
    return (_TORCH if torch else dict(enumerate(_NUMPY))).get(number)


def _array(torch: bool, data: bytes) -> npt.NDArray[Any]:
    """Return an array whose type, axes and sides come first: uint32, big-endian for tensors."""
    order = ">" if torch else "<"
    number, axes = struct.unpack_from(f"{order}II", data)
    dtype = _dtype_of(number, torch)
    if dtype is None or axes > _MOST_AXES:
        raise ValueError(f"its type is {number}, with {axes} axes")
    shape = struct.unpack_from(f"{order}{axes}I", data, 8)
    content = data[8 + 4 * axes :]
    if math.prod(shape) * np.dtype(dtype).itemsize != len(content):
        raise ValueError(f"{len(content):,} bytes are not an array of shape {shape}")
    return array_of(dtype, shape, content)


SOURCE = SourceKind(
    name=LitData.kind,
    title="Convert LitData chunks.",
    help="""Convert a folder of LitData chunks to a dataset in DST.

    SRC contains index.json, or a folder with one for each split. LitData is not needed. JPEG and
    other files keep their bytes; pixels (pil) become PNG files. Numbers, text, JSON, bytes, arrays
    and tensors become fields. Columns of nested samples have names such as meta.caption, and
    columns of tuples are named 0, 1, and so on. Pickles, encryption and custom serializers are
    refused. Compressed chunks need `pip install 'shardkit[compressed]'`.

    \b
    Examples:
      shardkit convert litdata optimized dataset --to lmdb --dry-run
      shardkit convert litdata optimized dataset --to lmdb --image 0 --label 1 --keep caption=2
    """,
    options=ColumnOptions,
    attaching=Attaching(
        title="A folder of LitData chunks.",
        help="""Index the images in LitData's chunks where they are, as a dataset in INDEX_DIR.

        ARCHIVES is a folder with index.json. Its chunks must not be compressed, and its images must
        be encoded files, not pixels (pil).

        \b
        Example:
          shardkit attach litdata optimized/train train-index
        """,
    ),
    recognize=having_index(b'"chunks"'),
    source=LitData,
)
