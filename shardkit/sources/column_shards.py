"""Shards of samples with columns: what MDS (MosaicML Streaming) and LitData have in common.

A shard is the number of samples, the offset of each sample and of the end, all uint32, perhaps more
of the writer's, and the samples. A sample is the size of each column, uint32, then the values.
"""

from __future__ import annotations

import json
import math
import struct
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.contracts import AttachableSource, Entry
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.picture import as_png
from shardkit.sources.column_source import Cells, ColumnSource, RowFile
from shardkit.sources.columns import PARSED, Column, ColumnOptions, plain_column
from shardkit.sources.images import require_pixels
from shardkit.sources.inputs import OpenedFile, require_rows
from shardkit.system import safe_paths
from shardkit.system.files import read_small
from shardkit.system.text import fault, quoted

_Json = TypeVar("_Json", dict[str, Any], str, int)

_INDEX = "index.json"
_MOST_INDEX = 1 << 27
_MOST_COLUMNS = 1024
_CHUNK = 1 << 14
"""Offsets to read at a time."""


class Shard(NamedTuple):
    """A shard, as the index states it."""

    name: str
    """Its path below the folder."""
    rows: int
    bytes: int
    """Its size, unpacked."""


class ColumnShards(ColumnSource, AttachableSource):
    """A folder of shards with their index, or of such folders, which are splits."""

    format: str
    """Name of the format in messages."""
    is_eager = True
    rows_are = "samples"

    def __init__(self, path: str | Path, options: ColumnOptions) -> None:
        self._rows: dict[str, int] = {}
        """Rows of each shard, by path."""
        self._columns: Sequence[Column] = ()
        files: list[RowFile] = []
        for split, folder in self._find_splits(Path(path)).items():
            columns, shards = self._read_index(folder)
            if not 0 < len(columns) == len({c.name for c in columns}) <= _MOST_COLUMNS:
                raise UsageError(
                    f"{folder / _INDEX} lists no columns, too many columns, or the "
                    "same column twice"
                )
            if files and _types(columns) != _types(self._columns):
                raise UsageError(
                    f"the folders in {path} have different columns",
                    remedy="convert each separately",
                )
            self._columns = columns
            for name, rows, size in shards:
                stem = name.partition(".mds")[0].removesuffix(".bin")
                files.append(RowFile(str(folder / name), name, stem, split, size))
                require_rows(files[-1].path, rows)
                self._rows[files[-1].path] = rows
        super().__init__(path, options, files, self._columns)

    @abstractmethod
    def parse_index(
        self, folder: Path, index: Mapping[str, Any]
    ) -> tuple[Sequence[Column], Sequence[Shard]]:
        """Return the columns and shards that an index states; UsageError for what is not supported.

        If it is not an index, it raises ValueError, KeyError or TypeError.
        """

    def _find_splits(self, path: Path) -> dict[str, Path]:
        try:
            if safe_paths.exists(path / _INDEX):
                return {"": path}
            folders = {
                child.name: child
                for child in sorted(path.iterdir())
                if child.is_dir() and not child.is_symlink() and safe_paths.exists(child / _INDEX)
            }
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read: {error.strerror or error}; {self.format} datasets are "
                f"folders with {_INDEX}"
            ) from error
        if not folders:
            raise UsageError(
                f"neither {path} nor its folders contain {_INDEX}: is it {self.format} data?"
            )
        return folders

    def _read_index(self, folder: Path) -> tuple[Sequence[Column], Sequence[Shard]]:
        path = folder / _INDEX
        try:
            index = checked(dict, json.loads(read_small(path, _MOST_INDEX)), "the index")
            columns, shards = self.parse_index(folder, index)
            for shard in shards:
                safe_paths.split_path(shard.name)
                safe_paths.status_of(folder, shard.name)
        except UsageError:
            raise
        except OSError as error:
            raise UsageError(f"{error.filename or path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            reason = f"{path} is not a valid {self.format} index: {fault(error)}"
            raise UsageError(reason) from error
        if not shards:
            raise UsageError(f"{path} lists no shards")
        return columns, shards

    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the samples of a shard."""
        count = self._rows[file.path]
        if view.size != file.size:
            raise BadImage(f"it has {view.size:,} bytes, but the index lists {file.size:,}")
        if view.read(0, 4) != struct.pack("<I", count):
            raise BadImage("the index lists a different number of samples")
        for first in range(0, count, _CHUNK):
            offsets = _offsets(view, first, min(_CHUNK, count - first))
            for row, (start, end) in enumerate(pairwise(offsets), first):
                yield _Sample(self._columns, view, row, (4 * (count + 2), start, end))

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a sample."""
        count = self._rows[file.path]
        if entry.place >= count:
            raise BadImage("its row is not in the shard")
        span = 4 * (count + 2), *_offsets(view, entry.place, 1)
        return _Sample(self._columns, view, entry.place, span)


class _Sample(Cells):
    """A sample: row ``row`` of the shard ``view``.

    ``span`` is the minimum offset of samples, the sample's own offset, and that of its end.
    """

    def __init__(
        self, columns: Sequence[Column], view: OpenedFile, row: int, span: tuple[int, ...]
    ) -> None:
        self.place = row
        self._columns = columns
        self._view = view
        self._span = span

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """The offset and size of each value."""
        least, start, end = self._span
        variable = sum(column.size is None for column in self._columns)
        at = start + 4 * variable
        if not least <= start <= at <= end <= self._view.size:
            raise BadImage("its offset is outside the samples")
        sizes = iter(struct.unpack(f"<{variable}I", self._view.read(start, 4 * variable)))
        spans = {}
        for column in self._columns:
            size = next(sizes) if column.size is None else column.size
            spans[column.name] = at, size
            at += size
        if at != end:
            raise BadImage("the sizes of its columns do not add up to the size of the sample")
        return spans

    def has(self, name: str) -> bool:
        return name in self._spans

    def size(self, name: str) -> int:
        return self._spans[name][1]

    def value(self, column: Column) -> Any:
        data = self._view.read(*self._spans[column.name])
        return data if column.holds in PARSED else _decoded(column, data)

    def offset(self, name: str) -> int | None:
        return self._spans[name][0]


def checked(kind: type[_Json], value: object, location: str) -> _Json:
    """Return a value of an index; ValueError if it is of another kind, or a negative number."""
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{location} is {quoted(value)}")
    return value


def number_column(name: str, type_name: str, dtype: str) -> Column:
    """Return a column of numbers of NumPy's type."""
    return plain_column(name, type_name, np.dtype(dtype).name, partial(_number_of, dtype))


def _number_of(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype).reshape(()).item()


def column_of(name: str, type_name: str, kind: str, plain: Mapping[str, str]) -> Column:
    """Return a column of values as they are, of pixels, or of what is not read.

    ``kind`` is the format's, ``plain`` has the kind of field for it.
    """
    if kind in plain:
        return plain_column(name, type_name, plain[kind])
    if kind == "pil":
        return plain_column(name, type_name, "image", png_of_pil, why="stored as PNG")
    is_pickle = kind in ("pkl", "pickle")
    why = "pickles can run code" if is_pickle else "its type is unknown to shardkit"
    return Column(name, type_name, "", why=why)


def array_of(dtype: str, shape: Sequence[int], data: bytes) -> npt.NDArray[Any]:
    """Return an array stored as its values; a side may be -1."""
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


_MODES = {"L": 1, "LA": 2, "I;16": 2, "RGB": 3, "RGBA": 4}
"""Modes of Pillow that PNG stores as they are, and the bytes of a pixel."""


def png_of_pil(data: bytes) -> bytes:
    """Return the PNG file of pixels that start with width, height and mode, as both formats do.

    It raises BadImage if PNG does not have their mode.
    """
    width, height, length = struct.unpack_from("<3I", data)
    mode = data[12 : 12 + min(length, 16)].decode("ascii", "replace")
    if mode not in _MODES:
        raise BadImage(f"its mode is {quoted(mode)}, not {', '.join(_MODES)}")
    require_pixels((height, width))
    pixels = data[12 + length :]
    if len(pixels) != math.prod((height, width, _MODES[mode])):
        raise BadImage(f"its pixels do not match its size, {width} x {height}, and mode, {mode}")
    return as_png(Image.frombytes(mode, (width, height), pixels))


def _types(columns: Any) -> list[tuple[str, str]]:
    return [(column.name, column.type) for column in columns]


def _offsets(view: OpenedFile, row: int, count: int) -> tuple[int, ...]:
    """Return the offsets of samples, and of the end of the last."""
    data = view.read(4 * (row + 1), 4 * (count + 1))
    if len(data) != 4 * (count + 1):
        raise BadImage("the file is truncated")
    return struct.unpack(f"<{count + 1}I", data)


def _decoded(column: Column, data: bytes) -> Any:
    try:
        return column.decode(data)
    except BadImage as error:
        raise BadImage(f"{column.name}: {error.problem}", remedy=error.remedy) from error
    except (ValueError, IndexError, TypeError, struct.error, RecursionError) as error:
        raise BadImage(
            f"its {column.name} is not a valid {column.type} value: {fault(error)}"
        ) from error
