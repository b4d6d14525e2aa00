"""Values of new fields for the rows of a dataset: from a table, an array, or a function.

Each provider has the fields of its values, and returns the values of one row at a time.
"""

from __future__ import annotations

import copy
import math
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.dataset.opened import OpenedDataset
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field, check_schema
from shardkit.kinds.packing import infer_field
from shardkit.kinds.values import as_numpy
from shardkit.record import LABEL
from shardkit.sources.npy_files import Array, opened, parse_header, values
from shardkit.sources.spool import Spool
from shardkit.system.text import shortened

_LONGEST = 200
"""Maximum characters of a message of an exception of the user's code."""


class FieldValues(ABC):
    """The values of some fields for all rows of a dataset, in the order of its splits and rows.

    It is pickled to worker processes, so it holds no open files.
    """

    schema: Mapping[str, Field]
    """The fields."""

    @abstractmethod
    def read(self, row: int) -> Mapping[str, Any]:
        """Return the values of a row, by field; None, or nothing, where it lacks one.

        BadImage if they cannot be read.
        """

    def read_together(self, rows: Sequence[int]) -> Mapping[str, Sequence[Any]] | None:
        """Return a value of each row, or None, by field; None if that takes no less time."""
        return None

    @abstractmethod
    def sizes(self, rows: range) -> Sequence[int]:
        """Return the approximate bytes of the values of neighboring rows."""

    @abstractmethod
    def stamps(self, rows: range) -> Sequence[int]:
        """Return a number for each row that changes with its values; 0 if that is unknown."""

    def only(self, rows: Sequence[int]) -> FieldValues:
        """Return an object with the values of some rows alone, for a worker process."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the origin of the values as JSON values: ``name``, and options."""


def checked(schema: Mapping[str, Field]) -> dict[str, Field]:
    """Return a schema of new fields, none of which may be an image."""
    try:
        check_schema(schema)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for name, field in schema.items():
        if field.type.is_picture:
            raise UsageError(
                f"{name} is an image field, and images cannot be added to a dataset",
                remedy="create a source with both, and convert it",
            )
    return dict(schema)


def as_json(value: object, encode: Callable[[object], str]) -> str:
    """Return a value as JSON, as ``encode`` does; numbers in a tenth of the time."""
    is_plain = type(value) is int or (type(value) is float and math.isfinite(value))
    return repr(value) if is_plain else encode(value)


class _NpyFile(NamedTuple):
    """An .npy file with a row for each of a dataset's."""

    path: str
    stamp: int
    array: Array

    def read(self, rows: Iterable[int]) -> list[Any]:
        """Return rows."""
        with opened(self.path, "", self.stamp) as view:
            return [values(view, self.array, row, 1)[0] for row in rows]


class FileValues(FieldValues):
    """The rows of .npy files, one for each dataset, in its order. Nothing is unpickled.

    ``path`` is the file, or the folder with the file of each split, such as ``train.npy``.
    UsageError if one is not such a file, has another number of rows, or rows of another kind.
    """

    def __init__(self, path: Path, name: str, datasets: Sequence[OpenedDataset]) -> None:
        self._source = path.absolute().name
        self._name = name
        paths = _npy_paths(path, datasets)
        self._files = [_open(*each) for each in zip(paths, datasets, strict=True)]
        first, *others = self._files
        for file in others:
            if (file.array.dtype, file.array.shape[1:]) != (
                first.array.dtype,
                first.array.shape[1:],
            ):
                raise UsageError(
                    f"{file.path} contains {file.array}, but {first.path} contains {first.array}",
                    remedy="save rows with the same dtype and shape",
                )
        self._stops = [*accumulate(dataset.manifest.rows for dataset in datasets)]
        field = (
            _label_field(datasets[0]) if name == LABEL else infer_field(name, first.read([0])[0])
        )
        if field is None:
            raise UsageError(f"{first.path}: no field can store {first.array}")
        self.schema = checked({name: field})

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the value of a row."""
        return {name: value for name, (value,) in self.read_together([row]).items()}

    def read_together(self, rows: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return the values of rows; a file is opened once for neighbors in it."""
        found: list[Any] = []
        for number, group in groupby(rows, partial(bisect_right, self._stops)):
            file = self._files[number]
            first = self._stops[number] - file.array.rows
            found += file.read(row - first for row in group)
        return {self._name: found}

    def sizes(self, rows: range) -> Sequence[int]:
        """Return the bytes of rows."""
        return [self._files[0].array.row_bytes] * len(rows)

    def stamps(self, rows: range) -> Sequence[int]:
        """Return numbers that change with the files."""
        return [self._files[bisect_right(self._stops, row)].stamp for row in rows]

    def describe(self) -> dict[str, Any]:
        """Return the name of the file or folder."""
        return {"name": self._source, "fields": self._name}


def _npy_paths(path: Path, datasets: Sequence[OpenedDataset]) -> list[Path]:
    """Return the .npy file of each dataset."""
    top = datasets[0].top
    if not datasets[0].split:
        if path.is_dir():
            raise UsageError(
                f"{path} is a folder, but {top} has no splits", remedy="pass an .npy file"
            )
        return [path]
    names = [f"{dataset.split}.npy" for dataset in datasets]
    if not path.is_dir():
        raise UsageError(
            f"{top} has splits, so pass a folder with {' and '.join(names)}, or a table with a key "
            "column"
        )
    for name in names:
        if not (path / name).is_file():
            raise UsageError(f"{path} has no {name}: each split of {top} needs its own file")
    return [path / name for name in names]


def _open(path: Path, dataset: OpenedDataset) -> _NpyFile:
    """Return the file of a dataset."""
    try:
        stamp = path.stat().st_mtime_ns
        with opened(str(path), "", stamp) as view:
            array = parse_header(view)
        if not array.shape:
            raise BadImage("it holds a single value, not rows")
        if array.fortran:
            raise BadImage("its rows are not stored one after another (Fortran order)")
        rows = dataset.manifest.rows
        if array.rows != rows:
            raise BadImage(f"it has {array.rows:,} rows, but the dataset has {rows:,}")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except BadImage as error:
        raise UsageError(f"{path}: {error.problem}", remedy=error.remedy) from error
    return _NpyFile(str(path), stamp, array)


def _label_field(dataset: OpenedDataset) -> Field:
    """Return the field of labels given as numbers or names of the dataset's classes."""
    classes = dataset.manifest.classes
    if not classes:
        raise UsageError(
            f"{dataset.path} has no classes",
            remedy="pass schema={'label': Field('label', classes=...)}",
        )
    return Field("label", classes=classes)


def _field_of_labels(values: Any, dataset: OpenedDataset, keep_classes: bool) -> Field:
    """Return the field of labels, whose new classes follow those of the dataset."""
    texts = {
        value if isinstance(value, str) else "" for value in _each(values) if value is not None
    }
    if texts <= {""}:
        return _label_field(dataset)
    classes = dataset.manifest.classes or ()
    has_numbers = "" in texts  # positions of classes
    kept = [name for name in classes if keep_classes or has_numbers or name in texts]
    return Field("label", classes=[*kept, *sorted(map(str, texts - {"", *classes}))])


def _each(values: Any) -> Iterator[Any]:
    return (values[row] for row in range(len(values)))


class SequenceValues(FieldValues):
    """A Python sequence, array or tensor with a value of each row; an iterable is read once."""

    def __init__(
        self,
        name: str,
        given: Any,
        datasets: Sequence[OpenedDataset],
        field: Field | None,
        *,
        keep_classes: bool = False,
    ) -> None:
        self._name = name
        self._type = type(given).__name__
        if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            given = Spool(given)
        self._values: Any = given
        rows = sum(dataset.manifest.rows for dataset in datasets)
        if len(given) != rows:
            raise UsageError(f"{name} has {len(given):,} values, but the dataset has {rows:,} rows")
        self._bytes = int(getattr(as_numpy(given[0]), "nbytes", 64))
        if field is None and name == LABEL:
            field = _field_of_labels(given, datasets[0], keep_classes)
        self.schema = checked({name: field or _inferred(name, given[0], datasets[0])})

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the value of a row."""
        try:
            return {self._name: self._values[row]}
        except Exception as error:
            raise_interruption(error)
            raise _failed(self._name, error) from error

    def sizes(self, rows: range) -> Sequence[int]:
        """Return the bytes of the first value, if it is an array, or a guess."""
        return [self._bytes] * len(rows)

    def stamps(self, rows: range) -> Sequence[int]:
        """Return the CRC-32 of each value."""
        return [_crc32(self._values[row]) for row in rows]

    def only(self, rows: Sequence[int]) -> FieldValues:
        """Return the values of some rows."""
        narrowed = copy.copy(self)
        if isinstance(self._values, Spool):
            narrowed._values = self._values.only(rows)
        else:
            narrowed._values = {row: self._values[row] for row in rows}
        return narrowed

    def describe(self) -> dict[str, Any]:
        """Return the name of the Python type."""
        return {"name": self._type, "fields": self._name}


def _crc32(value: Any) -> int:
    """Return the CRC-32 of a value: its bytes if it is an array, else its text."""
    array = as_numpy(value)
    if isinstance(array, (np.ndarray, np.generic)):
        return zlib.crc32(np.ascontiguousarray(array).tobytes())
    return zlib.crc32(repr(value).encode("utf-8", "replace"))


def _inferred(name: str, value: Any, dataset: OpenedDataset) -> Field:
    if name == LABEL:
        return _label_field(dataset)
    try:
        field = infer_field(name, value)
    except (ValueError, BadImage) as error:
        raise UsageError(f"{name}: {error}") from error
    if field is None:
        raise UsageError(
            f"the first value of {name} has type {type(value).__name__}",
            remedy=f"pass schema={{{name!r}: Field(...)}}",
        )
    return field


def _failed(name: str, error: Exception) -> BadImage:
    reason = shortened(f"{type(error).__name__}: {error}", _LONGEST)
    return BadImage(f"{name}: {reason}")


class FunctionValues(FieldValues):
    """A field that a function computes from each sample.

    The function is called with a dict of the sample's fields, and pickled to worker processes.
    ``read`` returns the sample of a row. Without ``field``, it is inferred from the first sample of
    ``dataset``, which is the first one.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Mapping[str, Any]], Any],
        read: Callable[[int], Mapping[str, Any]],
        field: Field | None,
        dataset: OpenedDataset,
    ) -> None:
        self._name = name
        self._function = function
        self._sample = read
        try:
            first = self.read(0)[name]
        except BadImage as error:
            raise UsageError(f"the first sample: {error.problem}", remedy=error.remedy) from error
        self.schema = checked({name: field or _inferred(name, first, dataset)})

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the value of a row, computed again each time."""
        sample = self._sample(row)
        try:
            return {self._name: self._function(sample)}
        except Exception as error:
            raise_interruption(error)
            raise _failed(self._name, error) from error

    def sizes(self, rows: range) -> Sequence[int]:
        """Return a guess."""
        return [1024] * len(rows)

    def stamps(self, rows: range) -> Sequence[int]:
        """Return a number that changes with the code of the function, if it is Python's."""
        code = getattr(self._function, "__code__", None)
        stamp = 0 if code is None else zlib.crc32(code.co_code + _constants(code.co_consts))
        return [stamp] * len(rows)

    def describe(self) -> dict[str, Any]:
        """Return the name of the function."""
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return {"name": name, "fields": self._name, "function": True}


def _constants(values: Sequence[Any]) -> bytes:
    """Return the constants of a function as text; inner functions have an address of memory."""
    return repr([value for value in values if not hasattr(value, "co_code")]).encode()
