"""How a table of text is written: its encoding, its delimiter, and whether it quotes.

What a user does not state is detected, in bounded memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, AnyStr, Generic, NamedTuple

from shardkit.errors import ConversionFailed, UsageError, setting
from shardkit.sources.images import has_image_suffix
from shardkit.sources.zip_file import file_of, open_member, zip_folder
from shardkit.system.files import open_regular
from shardkit.system.text import quoted, size

_UTF8 = "utf-8-sig"
_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars", " ": "spaces"}
LISTS = (".txt", ".lst")
"""Suffixes of tables that may be lists without a header, such as Caffe's."""
_SPELLED = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";"}
_MOST_LINE = 16 << 20
"""Maximum characters of a row, or bytes of a line of JSON."""
csv.field_size_limit(max(_MOST_LINE, csv.field_size_limit()))  # 128 KiB are few for polygons
_CHUNK = 1 << 20
_FIRST = 11
"""Rows from which a column without a name is detected."""
_SAMPLE = 1 << 16
"""Characters from which the delimiter is detected."""
_SEPARATOR = re.compile(r'"?sep=(.?)"?\r?\n?\Z')
"""The first line that Excel writes to state the delimiter."""
_CHARACTER = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
)
"""A character of several bytes in UTF-8."""
_DIGITS = re.compile(r"\d+")
_HIGH = bytes(range(0x80, 0x100))
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{4}|[\x81-\x84\x86-\x90\x98\x9a-\x9f]")
"""Many letters that are not ASCII in a row, or letters that Windows-1252 has in no common word."""


class Dialect(NamedTuple):
    """How a table of text is written; None is detected."""

    delimiter: str | None = None
    encoding: str | None = None
    quotes: bool | None = None
    """Whether quotation marks enclose values; otherwise they are text."""
    header: bool = True
    """Whether the first line names columns. Otherwise they are 1, 2, ..., and only the values of
    the last one may contain the delimiter."""

    def describe(self) -> str:
        """Return it in words: ``commas, UTF-8``."""
        delimiter = _DELIMITERS.get(self.delimiter or "", quoted(self.delimiter))
        encoding = "UTF-8" if self.encoding == _UTF8 else str(self.encoding)
        quotes = "" if self.quotes else ", quotation marks are text"
        return f"{delimiter}, {encoding}{quotes}{'' if self.header else ', no header'}"

    def note(self, path: str) -> str:
        """Return what is unusual for a file, or ""."""
        usual = Dialect(_usual(path), _UTF8, True)
        return "" if self == usual else f"{os.path.basename(path)}: {self.describe()}"


DETECTED = Dialect()


def stated(delimiter: str | None, encoding: str | None, no_quotes: bool) -> Dialect:
    """Return the dialect that a user states."""
    delimiter = _SPELLED.get(delimiter or "", delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n\0'):
        raise UsageError(
            f"{setting('delimiter', delimiter)} must be one character, such as ; or tab"
        )
    try:
        text = encoding is None or isinstance(codecs.decode(b"", encoding), str)
    except (LookupError, UnicodeError):
        text = False
    if not text:
        raise UsageError(
            f"{setting('encoding', encoding)} is unknown",
            remedy="use one that Python supports, such as cp1252",
        )
    return Dialect(delimiter, encoding, False if no_quotes else None)


def dialect_of(path: str, given: Dialect) -> Dialect:
    """Return how a file is written."""
    try:
        status = os.stat(file_of(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return _detect(path, given, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=64)
def _detect(path: str, given: Dialect, _: object) -> Dialect:
    encoding = given.encoding or _encoding_of(path)
    sample = _sample_of(path, encoding)
    header = _has_header(sample, path)
    delimiter = given.delimiter or _delimiter_in(sample, path, header)
    if not header:
        return Dialect(delimiter, encoding, True, header)
    quotes = _is_quoted(path, encoding, delimiter) if given.quotes is None else given.quotes
    return Dialect(delimiter, encoding, quotes)


def rows_of_text(path: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the values of each row that is not empty; the first one is the header.

    If a row cannot be parsed, the second argument of csv.Error is the line.
    """
    if not dialect.header:
        yield from _rows_of_list(path, dialect)
        return
    quoting: Any = csv.QUOTE_MINIMAL if dialect.quotes else csv.QUOTE_NONE
    delimiter = dialect.delimiter or ","
    with opened(path, dialect.encoding) as file:
        lines = Lines(path, file)
        rows = csv.reader(lines, delimiter=delimiter, strict=True, quoting=quoting)
        try:
            yield from _with_whole_header(_filled(rows, lines))
        except csv.Error as error:
            raise csv.Error(str(error), rows.line_num) from error


def _rows_of_list(path: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    width = min((len(values) for _, values in _split_lines(path, dialect)), default=0)
    yield 0, _numbered(width)
    yield from _split_lines(path, dialect, width - 1)


def _split_lines(path: str, dialect: Dialect, most: int = -1) -> Iterator[tuple[int, list[str]]]:
    """Yield line and values of each row of a list."""
    with opened(path, dialect.encoding) as file:
        lines = Lines(path, file)
        for number, line in enumerate(lines, 1):
            lines.row = 0
            if values := _split(line, dialect.delimiter, most):
                yield number, values


def _split(line: str, delimiter: str | None, most: int = -1) -> list[str]:
    """Return the values in a line of a list; none of a comment."""
    if not line.strip() or line.startswith("#"):
        return []
    return [*map(str.strip, line.strip().split(delimiter if delimiter != " " else None, most))]


def _numbered(width: int) -> list[str]:
    return [str(number) for number in range(1, width + 1)]


def _filled(rows: Any, lines: Lines[str]) -> Iterator[tuple[int, list[str]]]:
    for row in rows:
        lines.row = 0
        if row and not (rows.line_num == 1 and _SEPARATOR.match("".join(row))):
            yield rows.line_num, row


def _with_whole_header(rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    """Yield rows; R and pandas may write no name for the index, Excel none for an empty column."""
    first: list[tuple[int, list[str]]] = []
    failed = None
    try:
        first.extend(itertools.islice(rows, _FIRST))
    except csv.Error as error:  # rows before it are good
        failed = error
    if len(first) > 1 and all(len(row) == len(first[0][1]) + 1 for _, row in first[1:]):
        line, header = first[0]
        ends_empty = not any(row[-1] for _, row in first[1:])
        first[0] = line, [*header, ""] if ends_empty else ["", *header]
    yield from first
    if failed:
        raise failed
    yield from rows


def opened(path: str, encoding: str | None = _UTF8) -> io.TextIOWrapper:
    """Open a text file, perhaps in an archive; bytes that are not UTF-8 become lone surrogates."""
    try:
        archive = zip_folder(path)
        raw = open_member(archive) if archive else open_regular(Path(os.path.realpath(path)))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    errors = "surrogateescape" if encoding == _UTF8 else "strict"
    return io.TextIOWrapper(io.BufferedReader(raw, 1 << 18), encoding, errors, newline="")


class Lines(Generic[AnyStr]):
    """The lines of a file, of which a parser may join several to a row.

    A row that is too long raises `ConversionFailed`: a file may have no line end at all.
    """

    def __init__(self, path: str, file: IO[AnyStr]) -> None:
        self._path = path
        self._file: IO[AnyStr] = file
        self.row = 0
        """Characters of the row so far; reset by the reader of rows."""

    def __iter__(self) -> Iterator[AnyStr]:
        number = 1
        readline = self._file.readline
        try:
            while line := readline(_MOST_LINE + 1):
                self.row += len(line)
                if self.row > _MOST_LINE:
                    raise ConversionFailed(
                        f"{self._path}: the row at line {number} is longer than {size(_MOST_LINE)}"
                    )
                yield line
                number += 1
        except UnicodeError as error:
            raise UsageError(
                f"{self._path}:{number} does not match its encoding ({error})",
                remedy=f"set another with {setting('encoding')}",
            ) from error


def _usual(path: str) -> str:
    return "\t" if path.endswith(".tsv") else ","


def _encoding_of(path: str) -> str:
    """Return the encoding of a file: UTF-8, UTF-16, or Windows-1252 if nothing contradicts it."""
    with opened(path) as file:
        if wide := _wide(bytes(file.buffer.read(_SAMPLE))):
            return wide
    if _is_utf8(path):
        return _UTF8
    fitting = sum(len(found) for data in _chunks(path) for found in _CHARACTER.findall(data))
    others = sum(len(data) - len(data.translate(None, _HIGH)) for data in _chunks(path)) - fitting
    if fitting > others:
        return _UTF8  # rows with other bytes are bad
    if any(map(_NOT_WESTERN.search, _chunks(path))):
        raise UsageError(
            f"{path} is not in UTF-8, UTF-16 or cp1252",
            remedy=f"set its encoding with {setting('encoding')}, such as gbk, cp1251 or mac_roman",
        )
    return "cp1252"


def _wide(head: bytes) -> str:
    """Return the kind of UTF-16 of a file that starts like this, or ""."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = [head[start::2].count(0) * 4 > len(head[start::2]) for start in (0, 1)]
    return {(False, True): "utf-16-le", (True, False): "utf-16-be"}.get((zeros[0], zeros[1]), "")


def _chunks(path: str) -> Iterator[bytes]:
    with opened(path) as file:
        while data := file.buffer.read(_CHUNK):
            yield bytes(data)


def _is_utf8(path: str) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for chunk in _chunks(path):
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _sample_of(path: str, encoding: str) -> str:
    """Return the start of a file."""
    sample = ""
    with opened(path, encoding) as file:
        lines = Lines(path, file)
        for line in lines:
            lines.row = 0
            sample += line
            if len(sample) >= _SAMPLE:
                break
    return sample


def _has_header(sample: str, path: str) -> bool:
    """Return whether the first line names columns, and not an image or its number."""
    lines = filter(None, map(str.strip, sample.splitlines()))
    first, second = itertools.islice(
        itertools.chain((re.split(r"[\s,;|]", line)[0] for line in lines), ("", "")), 2
    )
    is_numbered = any(map(str.isdigit, first)) and _DIGITS.sub("", first) == _DIGITS.sub("", second)
    is_row = first[:1] == "#" or first[:1].isdigit() or is_numbered or has_image_suffix(first)
    return not (path.endswith(LISTS) and (is_row or path.endswith(LISTS[1])))


def first_rows(data: bytes, path: str) -> list[list[str]]:
    """Return the rows at the start of a table of text; none if they cannot be parsed."""
    lines = data.decode(_wide(data) or _UTF8, "replace").splitlines(keepends=True)
    text = "".join(lines[: -1 if len(data) >= _SAMPLE else None])
    if not _has_header(text, path):
        mark = _delimiter_in(text, path, header=False)
        width = min(map(len, filter(None, (_split(line, mark) for line in lines))), default=0)
        listed = (_split(line, mark, width - 1) for line in text.splitlines())
        return [_numbered(width), *filter(None, listed)]
    try:
        rows = csv.reader(
            io.StringIO(text, newline=""), delimiter=_delimiter_in(text, path, header=True)
        )
        return [
            [*map(str.strip, row)] for row in rows if row and not _SEPARATOR.match("".join(row))
        ]
    except csv.Error:
        return []


def _delimiter_in(sample: str, path: str, header: bool) -> str:
    """Return the delimiter of the start of a table; of a list, what is in each line."""
    if not header:
        lines = [line for line in sample.splitlines() if _split(line, None)]
        return next((mark for mark in "\t;,|" if all(mark in line for line in lines)), " ")
    match = _SEPARATOR.match(sample[: sample.find("\n") + 1])
    if match and match[1]:
        return match[1]
    usual = _usual(path)
    widths = {mark: _widths(sample, mark) for mark in (usual, *_DELIMITERS)}
    if len(set(widths[usual])) == 1 and widths[usual][0] > 1:
        return usual
    fitting = [mark for mark, all_ in widths.items() if len(set(all_)) == 1 and all_[0] > 1]
    if fitting:
        return max(fitting, key=lambda mark: widths[mark][0])
    return usual if widths[usual][:1] > [1] else max(widths, key=lambda mark: widths[mark][:1])


def _is_quoted(path: str, encoding: str, delimiter: str) -> bool:
    """Return whether quotation marks enclose values.

    They are text if rows do not fit the header with them, or span lines, and all fit without.
    """
    if not any(b'"' in chunk for chunk in _chunks(path)):
        return True
    dialect = Dialect(delimiter, encoding, True)
    return _fits(path, dialect) or not _fits(path, dialect._replace(quotes=False), least=2)


def _fits(path: str, dialect: Dialect, least: int = 1) -> bool:
    """Return whether all rows are as long as the header, and one line each."""
    rows = rows_of_text(path, dialect)
    try:
        _, header = next(rows, (0, []))
        return len(header) >= least and all(
            len(row) == len(header) and "\n" not in "".join(row) for _, row in rows
        )
    except (csv.Error, ConversionFailed):
        return False


def _widths(sample: str, delimiter: str) -> list[int]:
    try:
        rows = csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter)
        return [len(row) for row in rows if row]
    except csv.Error:
        return []
