"""The rows of tables: CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, cast

from shardkit.contracts import Range
from shardkit.errors import UsageError
from shardkit.sources import arrow_reader
from shardkit.sources.inputs import InputFiles, find_files, refusing, require_rows
from shardkit.sources.library_process import call
from shardkit.sources.table_text import (
    DETECTED,
    LISTS,
    Dialect,
    Lines,
    dialect_of,
    opened,
    rows_of_text,
)
from shardkit.sources.zip_file import Member, ZipFolder, zip_folder
from shardkit.system.text import amount, name_list, quoted

_P = ParamSpec("_P")
_R = TypeVar("_R")

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of tables in a folder."""
_NAMED = (*SUFFIXES, *LISTS, ".json", ".odgt")
"""Suffixes of tables that a user names."""
_SHEETS = (".xlsx", ".xls", ".ods")
_MOST_JSON = 1 << 28

Row = tuple[int, dict[str, Any] | str]
"""A row's line (its number, in Parquet), and its values by column, or what is wrong with it."""

_ROWS = 10_000
"""Rows of a Parquet file to read at once."""


def find_tables(path: str | Path) -> InputFiles:
    """Return the tables that a path names: files, or one in a zip archive."""
    folder = zip_folder(path)
    if folder is None:
        return find_files(path, SUFFIXES)
    if isinstance(folder.content(), Member):
        return InputFiles((str(path),), (os.path.basename(path),), ())
    tables = [name for name, _ in ZipFolder(folder.path).members() if name.endswith(_NAMED)]
    raise UsageError(
        f"{path} is not a table; {folder.path} contains {name_list(tables) or 'none'}",
        remedy=f"pass one, such as {folder.path}/{tables[0]}" if tables else None,
    )


def is_text(path: str) -> bool:
    """Return whether all values of a table are texts."""
    return path.endswith((".csv", ".tsv", *LISTS))


def columns_of(path: str, given: Dialect = DETECTED) -> list[str]:
    """Return the columns of a table; of JSON lines, those of the first row."""
    columns: Sequence[str]
    if not path.endswith(_NAMED):
        csv_file = os.path.splitext(path)[0] + ".csv"
        as_csv = f"save it as CSV: pandas.read_excel({path!r}).to_csv({csv_file!r})"
        raise UsageError(
            f"{path} is not a table: its name must end in one of {', '.join(_NAMED)}",
            remedy=as_csv if path.endswith(_SHEETS) else None,
        )
    if path.endswith(".parquet"):
        if find_spec("pyarrow") is None:
            raise UsageError(f"{path} needs pyarrow", remedy="pip install 'shardkit[parquet]'")
        columns = [name for name, *_ in _parquet(path, arrow_reader.describe)[1]]
    elif is_text(path):
        try:
            columns = _header(rows_of_text(path, dialect_of(path, given)))
        except csv.Error as error:
            raise UsageError(f"{path} cannot be parsed: {error.args[0]}") from error
    else:
        bad = ""
        for number, row in _json_rows(path):
            if isinstance(row, dict):
                columns = list(row)
                break
            bad = bad or f"{path}:{number}: {row}"
        else:
            raise UsageError(bad or f"{path} has no rows")
    if not columns:
        raise UsageError(f"{path} has no rows")
    twice = [name for name, count in Counter(columns).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns called {quoted(twice[0])}")
    return list(columns)


def rows_of(path: str, columns: Sequence[str], given: Dialect = DETECTED) -> Iterator[Row]:
    """Yield the rows of a table; a row with ``columns`` may have others."""
    if path.endswith(".parquet"):
        return _parquet_rows(path, columns)
    return _text_rows(path, given) if is_text(path) else _json_rows(path)


def _header(rows: Iterator[tuple[int, list[str]]]) -> list[str]:
    """Return the columns of a table of text; those without a name, as of an index, get one."""
    _, header = next(rows, (0, []))
    return [name.strip() or f"unnamed_{number}" for number, name in enumerate(header)]


def _text_rows(path: str, given: Dialect) -> Iterator[Row]:
    rows = rows_of_text(path, dialect_of(path, given))
    header = _header(rows)
    try:
        for line, row in rows:
            if len(row) == len(header):
                yield line, dict(zip(header, row))  # noqa: B905 - strict takes 40% more time
            else:
                yield line, f"it has {amount(len(row), 'value')}, but the header has {len(header)}"
    except csv.Error as error:
        reason, line = error.args
        yield line, f"{reason}; this and all later rows are not read"


def _records(path: str) -> Iterator[Row]:
    """Yield the objects in a list, the whole of a JSON file."""
    try:
        with opened(path) as file:
            text = bytes(file.buffer.read(_MOST_JSON + 1))
        if len(text) > _MOST_JSON:
            raise ValueError(f"it is larger than {_MOST_JSON:,} bytes")
        rows = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read: {error}",
            remedy="write it as JSON lines, with the suffix .jsonl",
        ) from error
    if not isinstance(rows, list):
        raise UsageError(
            f"{path} is not a list of objects",
            remedy="write one object for each image, for example with pandas' to_json(path, "
            "orient='records')",
        )
    require_rows(path, len(rows))
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, dict) else "it is not a JSON object"


def _json_rows(path: str) -> Iterator[Row]:
    if path.endswith(".json"):
        yield from _records(path)
        return
    with opened(path) as file:
        lines = Lines(path, cast("IO[bytes]", file.buffer))
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
    if zip_folder(path):
        raise UsageError(f"{path} is in an archive", remedy="unpack this file and pass it")
    try:
        with refusing(path):
            stamp = os.stat(path).st_mtime_ns
            return call(function, os.path.abspath(path), stamp, *args, **kwargs)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
