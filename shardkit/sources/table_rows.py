"""The rows of tables: CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, AnyStr, Concatenate, Generic, ParamSpec, TypeVar, cast

from shardkit.contracts import Range
from shardkit.errors import BadImage, ConversionFailed, UsageError
from shardkit.sources import arrow_reader
from shardkit.sources.inputs import require_rows
from shardkit.sources.library_process import call
from shardkit.system.files import open_regular
from shardkit.system.formatting import size
from shardkit.system.text import quoted

_P = ParamSpec("_P")
_R = TypeVar("_R")

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

Row = tuple[int, dict[str, Any] | str]
"""A row's line (its number, in Parquet), and its values by column, or what is wrong with it."""

_MOST_LINE = 16 << 20
"""Maximum characters of a row, or bytes of a line of JSON."""

_ROWS = 10_000
"""Rows of a Parquet file to read at once."""


def is_text(path: str) -> bool:
    """Return whether all values of a table are texts."""
    return path.endswith((".csv", ".tsv"))


def columns_of(path: str) -> list[str]:
    """Return the columns of a table; of JSON lines, those of the first row.

    Raises:
        UsageError: If it cannot be read, or has no columns.
    """
    columns: Sequence[str]
    if not path.endswith(SUFFIXES):
        raise UsageError(
            f"{path} is not a table: its name must end in one of {', '.join(SUFFIXES)}"
        )
    if path.endswith(".parquet"):
        if find_spec("pyarrow") is None:
            raise UsageError(f"{path} needs pyarrow: pip install 'shardkit[parquet]'")
        columns = [name for name, *_ in _parquet(path, arrow_reader.describe)[1]]
    elif is_text(path):
        with _opened(path) as file:
            try:
                columns = next(_parsed(path, _Lines(path, file)), [])
            except csv.Error as error:
                raise UsageError(f"{path} cannot be parsed: {error}") from error
    else:
        bad = ""
        for number, row in _json_rows(path):
            if isinstance(row, dict):
                columns = list(row)
                break
            bad = bad or f"{path}:{number}: {row}"
        else:
            raise UsageError(bad or f"{path} has no rows")
    if not columns or "" in columns:
        raise UsageError(f"{path} has no {'name for a column' if columns else 'rows'}")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns {quoted(twice[0])}")
    return list(columns)


def rows_of(path: str, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table; a row with ``columns`` may have others.

    Raises:
        UsageError: If it cannot be read.
    """
    if path.endswith(".parquet"):
        return _parquet_rows(path, columns)
    return _text_rows(path) if is_text(path) else _json_rows(path)


def _text_rows(path: str) -> Iterator[Row]:
    with _opened(path) as file:
        lines = _Lines(path, file)
        rows = _parsed(path, lines)
        header: list[str] = next(rows, [])
        try:
            for row in rows:
                lines.row = 0
                if len(row) == len(header):
                    yield rows.line_num, dict(zip(header, row, strict=True))
                elif row:
                    counts = f"it has {len(row)} values; the header has {len(header)}"
                    yield rows.line_num, counts
        except csv.Error as error:
            yield rows.line_num, f"{error}; this and all later rows are not read"


def _parsed(path: str, lines: _Lines[str]) -> Any:
    return csv.reader(lines, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)


class _Lines(Generic[AnyStr]):
    """The lines of a file, of which a parser may join several to a row.

    Raises:
        ConversionFailed: If a row is too long to be one: a file may have no line end at all.
    """

    def __init__(self, path: str, file: IO[AnyStr]) -> None:
        self._path = path
        self._file: IO[AnyStr] = file
        self._number = 0
        self.row = 0
        """Characters of the row so far; reset by the reader of rows."""

    def __iter__(self) -> Iterator[AnyStr]:
        return self

    def __next__(self) -> AnyStr:
        line = self._file.readline(_MOST_LINE + 1)
        self._number += 1
        self.row += len(line)
        if self.row > _MOST_LINE:
            raise ConversionFailed(
                f"{self._path}: the row in line {self._number} is longer than {size(_MOST_LINE)}"
            )
        if not line:
            raise StopIteration
        return line


def _json_rows(path: str) -> Iterator[Row]:
    with _opened(path) as file:
        lines = _Lines(path, cast("IO[bytes]", file.buffer))
        for number, line in enumerate(lines, 1):
            lines.row = 0
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                yield number, "it is not UTF-8"
            except (ValueError, RecursionError) as error:
                yield number, f"it is not JSON: {error}"
            else:
                yield number, row if isinstance(row, dict) else "it is not a JSON object"


def _opened(path: str) -> io.TextIOWrapper:
    """Open a text file; bytes that are not UTF-8 become lone surrogates."""
    try:
        raw = open_regular(Path(os.path.realpath(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    buffered = io.BufferedReader(raw, 1 << 18)
    return io.TextIOWrapper(buffered, "utf-8-sig", "surrogateescape", newline="")


def _parquet_rows(path: str, columns: Sequence[str]) -> Iterator[Row]:
    number = 0
    counts, _ = _parquet(path, arrow_reader.describe)
    require_rows(path, sum(counts))
    for group, count in enumerate(counts):
        for start in range(0, count, _ROWS):
            rows = _parquet(path, arrow_reader.rows, group, Range(start, _ROWS), list(columns))
            for values in zip(*json.loads(rows), strict=True):
                number += 1
                yield number, dict(zip(columns, values, strict=True))


def _parquet(
    path: str,
    function: Callable[Concatenate[str, int, _P], _R],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _R:
    try:
        stamp = os.stat(path).st_mtime_ns
        return call(function, os.path.abspath(path), stamp, *args, **kwargs)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except BadImage as error:
        raise UsageError(f"{path}: {error}") from error
