"""Values of new fields for the rows of a dataset: from a table, an array, or a function.

Each provider has the fields of its values, and returns the values of one row at a time.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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

        Raises:
            BadImage: If they cannot be read.
        """

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
    """Return a schema of new fields, none of which may be an image.

    Raises:
        UsageError: If one cannot be a new field.
    """
    try:
        check_schema(schema)
    except ValueError as error:
        raise UsageError(str(error)) from error
    for name, field in schema.items():
        if field.type.is_picture:
            raise UsageError(
                f"{name} is a field of images, which can only be converted: make a source with "
                "both, and convert it"
            )
    return dict(schema)


class FileValues(FieldValues):
    """The rows of an .npy file, in the order of the dataset's. Nothing is unpickled.

    Raises:
        UsageError: If it is not such a file, or has another number of rows.
    """

    def __init__(self, path: Path, name: str, dataset: OpenedDataset) -> None:
        self.path, self._name = str(path), name
        try:
            self._stamp = path.stat().st_mtime_ns
            with opened(self.path, "", self._stamp) as view:
                self._array: Array = parse_header(view)
                if self._array.fortran or not self._array.shape:
                    raise BadImage("its rows are not stored one after another (Fortran order)")
                rows = dataset.manifest.rows
                if self._array.rows != rows:
                    raise BadImage(f"it has {self._array.rows:,} rows, the dataset has {rows:,}")
                first = values(view, self._array, 0, 1)[0]
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        except BadImage as error:
            raise UsageError(f"{path}: {error}") from error
        field = infer_field(name, first) if name != LABEL else None
        if name == LABEL:
            field = _label_field(dataset)
        if field is None:
            raise UsageError(f"{path}: no field can hold {self._array}")
        self.schema = checked({name: field})

    def read(self, row: int) -> Mapping[str, Any]:
        """Return the value of a row."""
        with opened(self.path, "", self._stamp) as view:
            return {self._name: values(view, self._array, row, 1)[0]}

    def sizes(self, rows: range) -> Sequence[int]:
        """Return the bytes of rows."""
        return [self._array.row_bytes] * len(rows)

    def stamps(self, rows: range) -> Sequence[int]:
        """Return numbers that change with the file."""
        return [self._stamp] * len(rows)

    def describe(self) -> dict[str, Any]:
        """Return the name of the file."""
        return {"name": Path(self.path).name, "fields": self._name}


def _label_field(dataset: OpenedDataset) -> Field:
    """Return the field of labels given as numbers or names of the dataset's classes.

    Raises:
        UsageError: If the dataset has no classes.
    """
    classes = dataset.manifest.classes
    if not classes:
        raise UsageError(
            f"{dataset.path} has no classes: pass schema={{'label': Field('label', classes=...)}}"
        )
    return Field("label", classes=classes)


class SequenceValues(FieldValues):
    """A Python sequence, array or tensor with a value of each row; an iterable is read once.

    Raises:
        UsageError: If it has another number of values, or its field is unknown.
    """

    def __init__(
        self, name: str, given: Any, datasets: Sequence[OpenedDataset], field: Field | None
    ) -> None:
        self._name, self._type = name, type(given).__name__
        if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
            given = Spool(given)
        self._values: Any = given
        rows = sum(dataset.manifest.rows for dataset in datasets)
        if len(given) != rows:
            raise UsageError(f"{name} has {len(given):,} values, and the dataset {rows:,} rows")
        self._bytes = int(getattr(as_numpy(given[0]), "nbytes", 64))
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
        part = SequenceValues.__new__(SequenceValues)
        vars(part).update(vars(self))
        if isinstance(self._values, Spool):
            part._values = self._values.only(rows)
        else:
            part._values = {row: self._values[row] for row in rows}
        return part

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
            f"the first value of {name} is a {type(value).__name__}: pass schema={{{name!r}: "
            "Field(...)}"
        )
    return field


def _failed(name: str, error: Exception) -> BadImage:
    reason = shortened(f"{type(error).__name__}: {error}", _LONGEST)
    return BadImage(f"{name}: {reason}")


class FunctionValues(FieldValues):
    """A field that a function computes from each sample.

    Args:
        name: Name of the field.
        function: Called with a dict of the sample's fields. It is pickled to worker processes.
        read: Returns the sample of a row.
        field: The field; None infers it from the first sample.
        dataset: The first dataset.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Mapping[str, Any]], Any],
        read: Callable[[int], Mapping[str, Any]],
        field: Field | None,
        dataset: OpenedDataset,
    ) -> None:
        self._name, self._function, self._sample = name, function, read
        try:
            first = self.read(0)[name]
        except BadImage as error:
            raise UsageError(f"the first sample: {error}") from error
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
