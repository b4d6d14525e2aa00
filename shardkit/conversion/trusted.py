"""Compare the indexes of other tools with the archives that they describe.

Attaching walks the archives nevertheless: it reads all their bytes for checksums, and only the walk
finds repeated members and a truncated end.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import load_json
from shardkit.sources.tar_samples import SampleFile, sample_files
from shardkit.system.files import as_text, open_regular, read_small
from shardkit.system.pool import run_tasks
from shardkit.system.text import quoted

_LONGEST = 1 << 16
"""Bytes of a value in a database, and of a statement in its schema: names are shorter."""

_LONG_NAMES = "index.sqlite has far longer names than the archive"

_STEPS = 10_000_000
"""Steps of SQLite's virtual machine for any database, in addition to one per byte of the file."""


class _Entry(NamedTuple):
    """A member, as an index states it."""

    name: str
    """Its name; "" if the index does not state it."""
    offset: int
    """Offset of its content."""
    size: int


class _Stated(NamedTuple):
    """What one file of a tool states about an archive."""

    file: str
    entries: Sequence[_Entry] | None = None
    """All members; None if it states none."""
    starts: Sequence[int] | None = None
    """Offsets of the first header of each sample; None if it states none."""
    end: int | None = None
    """Offset after the last sample."""


class _Task(NamedTuple):
    """One archive, for a worker process."""

    tool: str
    folder: Path
    """Folder of the tool's files."""
    path: Path
    name: str
    """Its path below the folder, or below that of all archives."""

    @property
    def index_path(self) -> Path:
        """The tool's file for this archive."""
        name = self.name if self.tool == "energon" else self.name.removesuffix(".tar")
        return self.folder / f"{name}.{'json' if self.tool == 'webshart' else 'idx'}"


class Trust(NamedTuple):
    """The tool whose indexes a user wants to be compared, and where they are."""

    tool: str
    folder: str
    """Their folder; "" means that of the archives."""

    @classmethod
    def parse(cls, text: str) -> Trust:
        """Parse ``TOOL`` or ``TOOL=DIR``.

        Raises:
            UsageError: If the tool is unknown, or the folder does not exist.
        """
        tool, _, folder = text.partition("=")
        if tool not in _READERS:
            raise UsageError(
                f"trust={text!r} names no known tool; choose from {', '.join(_READERS)}"
            )
        if folder and not os.path.isdir(folder):
            raise UsageError(f"trust={text!r}: {folder} is not a folder")
        return cls(tool, folder)

    def compare(self, archives: Sequence[Path], *, workers: int = 1) -> list[Problem]:
        """Return every difference between the indexes and the archives.

        Raises:
            UsageError: If no archive has an index.
        """
        paths = [os.path.abspath(path) for path in archives]
        top = os.path.commonpath([os.path.dirname(path) for path in paths])
        folder = os.path.abspath(self.folder) if self.folder else top
        if os.path.commonpath([top, folder]) == folder:
            top = folder
        tasks = [
            _Task(self.tool, Path(folder), Path(path), as_text(os.path.relpath(path, top)))
            for path in paths
        ]
        if tasks and not any(os.path.lexists(task.index_path) for task in tasks):
            raise UsageError(
                f"trust={self.tool!r}: no archive has an index of {self.tool}, such as "
                f"{tasks[0].index_path}. Name their folder, trust='{self.tool}=DIR', or omit "
                "trust="
            )
        findings = dict(run_tasks(_compare, tasks, workers=workers))
        return [problem for task in tasks for problem in findings[task]]


def _compare(task: _Task) -> list[Problem]:
    """Return the differences in one archive, by member."""
    findings: list[tuple[str, str]] = []
    try:
        parts = list(sample_files(task.path))
        for stated in _READERS[task.tool](task, parts):
            if stated.entries is not None:
                findings.extend(_compare_entries(stated.file, stated.entries, parts))
            if stated.starts is not None:
                findings.extend(_compare_starts(stated, parts, task.path.stat().st_size))
    except BadImage as error:
        findings.append(("", f"the archive cannot be compared with its index: {error}"))
    except OSError as error:
        file = Path(error.filename or "").name
        findings.append(("", f"its index {file} cannot be read: {error.strerror}"))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        findings.append(("", f"its index is damaged: {error or type(error).__name__}"))
    except (MemoryError, sqlite3.Error) as error:
        findings.append(("", f"its index is damaged: {error or type(error).__name__}"))
    return [
        Problem(path=f"{task.name}{name and ':'}{name} ({task.tool})", reason=reason)
        for name, reason in findings
    ]


def _compare_entries(
    file: str, entries: Sequence[_Entry], parts: Sequence[SampleFile]
) -> Iterator[tuple[str, str]]:
    at = {part.offset: part for part in parts if part.offset >= 0}
    wrong: set[str] = set()
    seen: set[int] = set()
    for entry in entries:
        part = at.get(entry.offset)
        if part is None or entry.name not in ("", part.name):
            wrong.add(entry.name)
            there = quoted(part.name) if part else "no content of a file"
            yield (
                entry.name or f"byte {entry.offset}",
                f"{file} has it at byte {entry.offset}, where the archive has {there}",
            )
            continue
        if entry.offset in seen:
            yield part.name, f"{file} has it twice"
        elif entry.size != part.size:
            yield part.name, f"{file} has {entry.size} bytes of it, the archive {part.size}"
        seen.add(entry.offset)
    for part in parts:
        if part.key and part.offset not in seen and part.offset >= 0 and part.name not in wrong:
            yield part.name, f"{file} lacks it"


def _compare_starts(
    stated: _Stated, parts: Sequence[SampleFile], size: int
) -> Iterator[tuple[str, str]]:
    file, starts = stated.file, stated.starts or ()
    samples = itertools.groupby((part for part in parts if part.key), lambda part: part.key)
    firsts = {(first := next(group)).start: first for _, group in samples}
    for start in sorted({*starts} - firsts.keys()):
        yield f"byte {start}", f"{file} starts a sample there, the archive does not"
    for start in sorted(firsts.keys() - {*starts}):
        yield firsts[start].name, f"{file} starts no sample at byte {start}"
    if {*starts} == firsts.keys() and [*starts] != [*firsts]:
        yield "", f"{file} has the samples in another order, or twice"
    last = max((part.offset + part.size for part in parts if part.key), default=0)
    if stated.end is not None and not last <= stated.end <= size:
        yield "", f"{file} ends the samples at byte {stated.end}; they end at byte {last}"


def _read_dali(task: _Task, parts: Sequence[SampleFile]) -> Iterator[_Stated]:
    """Read ``X.idx``; until version 1.1 it had no names."""
    path = task.index_path
    lines = read_small(path).decode("utf-8", "surrogateescape").split("\n")
    head = lines[0].split(" ")
    width = {"v1.1": 3, "v1.2": 4}.get(head[0])
    if width is None:
        raise ValueError(f"{path.name} does not start with v1.1 or v1.2")
    if lines[1 + int(head[1]) :] != [""]:
        raise ValueError(f"{path.name} does not have the {head[1]} lines it states")
    entries = []
    for number, line in enumerate(lines[1:-1], start=2):
        words = line.split(" ")
        if len(words) % width:
            raise ValueError(
                f"{path.name}, line {number}: a name has a space, or a word is missing"
            )
        for place in range(0, len(words), width):
            _, offset, size, *name = words[place : place + width]
            entries.append(_Entry("".join(name), int(offset), int(size)))
    yield _Stated(path.name, entries)


def _read_energon(task: _Task, parts: Sequence[SampleFile]) -> Iterator[_Stated]:
    """Read ``X.tar.idx``, and the database that newer versions write."""
    path = task.index_path
    content = read_small(path)
    if not content or len(content) % 8:
        raise ValueError(f"{path.name} has {len(content)} bytes, not 8 for each sample")
    *starts, end = struct.unpack(f"={len(content) // 8}Q", content)
    yield _Stated(path.name, starts=starts, end=end)
    meta = task.folder / ".nv-meta"
    database = meta / "index.sqlite"
    if not os.path.lexists(database):
        return
    names = list(load_json(read_small(meta / ".info.json"))["shard_counts"])
    if task.name not in names:
        raise ValueError(f".nv-meta/.info.json does not name {task.name}")
    with open_regular(database) as file:  # which refuses links
        size = os.fstat(file.fileno()).st_size
    # The database is untrusted: nothing is written, and tables are read, but no views.
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro&immutable=1", uri=True)) as opened:
        opened.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
        _limit(opened, size)
        yield _in_database(opened, names.index(task.name), parts)


def _limit(database: sqlite3.Connection, size: int) -> None:
    """Bound the memory and time of all queries: a forged tree may use one page often."""
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    steps = itertools.count(_STEPS, _STEPS)
    database.set_progress_handler(lambda: next(steps) > _STEPS + size, _STEPS)


def _in_database(database: sqlite3.Connection, number: int, parts: Sequence[SampleFile]) -> _Stated:
    for table in ("samples", "sample_parts"):
        kinds = database.execute(
            "SELECT type FROM sqlite_master WHERE rootpage > 0 AND name = ?", (table,)
        )
        if kinds.fetchall() != [("table",)]:
            raise ValueError(f"index.sqlite lacks the table {table}")
        # Columns that are computed can be of any size, in a file of any size.
        columns = database.execute("SELECT max(hidden) FROM pragma_table_xinfo(?)", (table,))
        if columns.fetchone() != (0,):
            raise ValueError(f"index.sqlite has hidden or generated columns in {table}")

    most = _LONGEST + 2 * sum(len(part.name) for part in parts)

    def read(query: str) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, whose names are not much longer than those in the archive."""
        rest = most
        # One row more than there are members is enough to find a difference.
        for row in database.execute(f"{query} LIMIT ?", (number, len(parts) + 1)):
            rest -= len(row[1])
            if rest < 0:
                raise ValueError(_LONG_NAMES)
            yield row

    samples = [
        (index, key, int(start))
        for index, key, start in read(
            "SELECT sample_index, sample_key, byte_offset FROM samples WHERE tar_file_id = ? "
            "ORDER BY sample_index"
        )
    ]
    keys = {index: key for index, key, _ in samples}
    entries, rest = [], most
    for index, suffix, offset, length in read(
        "SELECT sample_index, part_name, content_byte_offset, content_byte_size FROM sample_parts "
        "WHERE tar_file_id = ?"
    ):
        name = f"{keys.get(index, '')}.{suffix}"
        rest -= len(name)
        if rest < 0:
            raise ValueError(_LONG_NAMES)
        entries.append(_Entry(name, int(offset), int(length)))
    return _Stated("index.sqlite", entries, [start for _, _, start in samples])


def _read_webshart(task: _Task, parts: Sequence[SampleFile]) -> Iterator[_Stated]:
    """Read ``X.json``."""
    path = task.index_path
    files = load_json(read_small(path))["files"]
    entries = [
        _Entry(name, int(value["offset"]), int(value["length"])) for name, value in files.items()
    ]
    yield _Stated(path.name, entries)


_READERS: dict[str, Callable[[_Task, Sequence[SampleFile]], Iterator[_Stated]]] = {
    "dali": _read_dali,
    "energon": _read_energon,
    "webshart": _read_webshart,
}
"""The function that reads the files of each tool for an archive, given its files."""
