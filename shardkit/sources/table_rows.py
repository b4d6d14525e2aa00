"""The rows of tables: CSV, TSV, JSON lines and Parquet."""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardkit.contracts import Range
from shardkit.errors import BadImage, UsageError
from shardkit.sources.library_process import call
from shardkit.system.files import open_regular
from shardkit.system.text import quoted

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

Row = tuple[int, dict[str, Any] | str]
"""A row's line (its number, in Parquet), and its values by column, or what is wrong with it."""

_READER = "shardkit.sources.arrow_reader"
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
    found: Sequence[str]
    if not path.endswith(SUFFIXES):
        raise UsageError(
            f"{path} is not a table: its name must end in one of {', '.join(SUFFIXES)}"
        )
    if path.endswith(".parquet"):
        if find_spec("pyarrow") is None:
            raise UsageError(f"{path} needs pyarrow: pip install 'shardkit[parquet]'")
        found = [name for name, *_ in json.loads(_parquet(path, "describe"))["columns"]]
    elif is_text(path):
        with _opened(path) as file:
            try:
                found = next(_parsed(path, file), [])
            except csv.Error as error:
                raise UsageError(f"{path} cannot be parsed: {error}") from error
    else:
        found = next((list(row) for _, row in _json_rows(path) if isinstance(row, dict)), [])
    if not found or "" in found:
        raise UsageError(f"{path} has no {'name for a column' if found else 'rows'}")
    twice = [name for name, count in Counter(found).items() if count > 1]
    if twice:
        raise UsageError(f"{path} has two columns {quoted(twice[0])}")
    return list(found)


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
        rows = _parsed(path, file)
        header: list[str] = next(rows, [])
        try:
            for row in rows:
                if len(row) == len(header):
                    yield rows.line_num, dict(zip(header, row, strict=True))
                elif row:
                    counts = f"it has {len(row)} values; the header has {len(header)}"
                    yield rows.line_num, counts
        except csv.Error as error:
            yield rows.line_num, f"{error}; this and all later rows are not read"


def _parsed(path: str, file: io.TextIOWrapper) -> Any:
    return csv.reader(file, delimiter="\t" if path.endswith(".tsv") else ",", strict=True)


def _json_rows(path: str) -> Iterator[Row]:
    with _opened(path) as file:
        lines: Iterator[bytes] = iter(file.buffer)  # type: ignore[call-overload]
        for number, line in enumerate(lines, 1):
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
    for group, count in enumerate(json.loads(_parquet(path, "describe"))["rows"]):
        for start in range(0, count, _ROWS):
            rows = _parquet(path, "rows", group, Range(start, _ROWS), list(columns))
            for values in zip(*json.loads(rows), strict=True):
                number += 1
                yield number, dict(zip(columns, values, strict=True))


def _parquet(path: str, function: str, *arguments: object) -> bytes:
    try:
        return call(_READER, function, os.path.abspath(path), os.stat(path).st_mtime_ns, *arguments)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except BadImage as error:
        raise UsageError(f"{path}: {error}") from error
