"""Reports stored with the shards: the files left out and the reasons, one per line."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from shardkit.dataset.manifest import FileEntry
from shardkit.errors import Problem, UsageError
from shardkit.record import dump_json, load_json
from shardkit.system.files import open_regular, read_small
from shardkit.system.safe_paths import UNFIT
from shardkit.system.text import fault

SKIPPED = "skipped.jsonl"
"""Report of bad files that were skipped."""

IGNORED = "ignored.jsonl"
"""Report of everything in the source that is not an image, and of images left out on request."""

EXCLUDED = "excluded"
"""Reason of the images that a conversion left out because a list names them."""


def render_report(problems: Iterable[Problem]) -> bytes:
    """Return the report of ``problems``: one JSON object per line."""
    return b"".join(report_lines(problems))


def report_lines(problems: Iterable[Problem]) -> Iterator[bytes]:
    """Yield the lines of the report of ``problems``."""
    return (dump_json(problem.spelled()) + b"\n" for problem in problems)


class StoredReport(Collection[Problem]):
    """The problems in a report, read while they are iterated; UsageError if it is damaged.

    Links below ``root`` are refused.
    """

    def __init__(self, path: Path, count: int, root: Path) -> None:
        self._path = path
        self._count = count
        self._root = root

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Problem]:
        count = 0
        try:
            with io.BufferedReader(open_regular(self._path, self._root)) as lines:
                for line in islice(lines, self._count):
                    value = load_json(line)
                    yield Problem(path=str(value["path"]), reason=str(value["reason"]))
                    count += 1
            if count != self._count:
                raise ValueError(f"it has {count:,} lines, not {self._count:,}")
        except (*UNFIT, ValueError, KeyError) as error:
            raise UsageError(
                f"{self._path} is damaged ({fault(error)})", remedy="Start over with --force."
            ) from error

    def __contains__(self, problem: object) -> bool:
        return any(problem == stored for stored in self)


def excluded_paths(directory: Path, files: Iterable[FileEntry]) -> set[str] | None:
    """Return the paths of images that were left out on request; None if the report is damaged."""
    for entry in files:
        if entry.name == IGNORED:
            try:
                content = read_small(directory / IGNORED, entry.bytes, root=directory)
                if hashlib.sha256(content).hexdigest() != entry.sha256:
                    return None
                problems = map(load_json, content.splitlines())
                return {problem["path"] for problem in problems if problem["reason"] == EXCLUDED}
            except (*UNFIT, ValueError, KeyError, TypeError):
                return None
    return set()
