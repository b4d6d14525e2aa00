"""Data sets of Hugging Face's ``datasets`` as a source: saved folders, and Parquet files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, SourceKind
from shardkit.errors import CHANGED, BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.options import same_option
from shardkit.sources import arrow_reader
from shardkit.sources.column_source import Cells, ColumnSource, Known, RowFile
from shardkit.sources.columns import Column, ColumnOptions, plain_column
from shardkit.sources.driver import Listing, SplitOptions, split_names
from shardkit.sources.huggingface_files import find_splits, recognize
from shardkit.sources.inputs import OpenedFile, refusing, require_rows, stamp_of
from shardkit.sources.library_process import call
from shardkit.system.text import quoted, size


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOptions(ColumnOptions):
    """The options of this source."""

    name: str | None = same_option(
        ColumnOptions,
        "name",
        help="Column with image names. If it is the image column, image paths are the names.",
        shown="row number",
    )
    label: str | None = same_option(
        ColumnOptions, "label", shown="the only column with class names, or label"
    )
    keep: str | None = same_option(ColumnOptions, "keep", shown="none")
    split: str | None = same_option(SplitOptions, "split", metavar="NAME", shown="")


class HuggingFace(ColumnSource):
    """A folder from ``save_to_disk``, or Parquet files, read by pyarrow in a child process.

    The pattern is a folder with ``dataset_dict.json`` or ``state.json``; a Parquet file, or a
    folder of them; or names with ``{000..999}``, ``*`` or ``?``.
    """

    kind = "huggingface"

    def __init__(self, pattern: str | Path, options: HuggingFaceOptions) -> None:
        if find_spec("pyarrow") is None:
            raise UsageError(f"{pattern} needs pyarrow", remedy="pip install 'shardkit[parquet]'")
        files_of = find_splits(pattern)
        names = {"": ""}
        if options.split or "" not in files_of:
            names = split_names(options.split, tuple(files_of))
        files = [
            RowFile(path, name, "", ours)
            for ours, theirs in names.items()
            for path, name in files_of[theirs]
        ]
        with refusing(files[0].path):
            columns = _describe(files[0].path)[1]
        super().__init__(pattern, options, files, columns)
        self._groups: list[int] = []
        """Bytes of images in each group of rows."""

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the rows of all files, in order."""
        self._groups = []
        understood = super().list_images(listings)
        most = max(self._groups, default=0)
        if not most or self.paths()[0].suffix != ".parquet":
            return understood
        groups = (
            f"{len(self._groups):,} row groups, each with up to {size(most)} of images; over 256 "
            "MiB in total, --no-shuffle is faster"
        )
        return {**understood, "groups": groups}

    def rows(self, file: RowFile, view: OpenedFile) -> Iterator[Cells]:
        """Yield the rows of a file; their values are label and name."""
        full = os.path.abspath(file.path)
        counts, columns = _describe(file.path)
        there = {column.name: column for column in columns}
        for column in (self.image, self.label):
            if column.name and there.get(column.name) != column:
                raise BadImage(f"its {quoted(column.name)} column differs from the first file's")
        row = 0
        wanted = (self.image.name, self.label.name or None, self.name)
        for group in range(len(counts)):
            listed = call(arrow_reader.listing, full, view.stamp, group, wanted)
            sizes, paths, labels, names = listed
            for length, path, label, name in zip(sizes, paths, labels, names, strict=True):
                only = f", only the path {quoted(path)}" if path else ""
                why = f"row {row} of the file has no image bytes{only}"
                values = {self.name: name, self.label.name: label}
                yield Known(row, values, length, why=why)
                row += 1
            self._groups.append(sum(length or 0 for length in sizes))

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a row."""
        names = [self.image.name, *(kept.source for kept in self.keep)]
        at = os.path.abspath(file.path), entry.stamp, entry.place
        answer = call(arrow_reader.read, *at, names)
        head, _, blobs = answer.partition(b"\n")
        values: list[Any] = []
        for item in json.loads(head):
            if isinstance(item, int):
                values.append(blobs[:item])
                blobs = blobs[item:]
            else:
                values.append(item["value"])
        if not isinstance(values[0], bytes):
            raise BadImage(CHANGED)
        return Known(entry.place, dict(zip(names, values, strict=True)))


def _describe(path: str) -> tuple[list[int], list[Column]]:
    """Return the number of rows of each group of a file, and its columns."""
    rows, columns = call(arrow_reader.describe, os.path.abspath(path), stamp_of(path))
    require_rows(path, sum(rows))
    return rows, [_column(*column) for column in columns]


def _column(name: str, kind: str, classes: list[str] | None) -> Column:
    """Return a column; its kind is as in `shardkit.sources.arrow_reader.describe`."""
    if classes is not None:
        holds = "integer" if kind == "label" else "json"
        words = f"{kind} with {len(classes)} classes"
        return Column(name, words, holds, field=Field(kind, classes=tuple(classes)))
    if kind == "images":
        return Column(name, kind, "", why="it contains several images")
    return plain_column(name, kind, kind)


SOURCE = SourceKind(
    name=HuggingFace.kind,
    title="Convert Hugging Face datasets: saved folders or Parquet.",
    help="""Convert the images of a Hugging Face dataset to a dataset in DST.

    SRC is a folder written by save_to_disk, or Parquet files with an image column {bytes, path}:
    one file, a folder, or a quoted pattern with {000..999}, * or ?. Files named
    train-00000-of-00001 and test-... become splits. Class names come from the files' metadata. This
    needs pyarrow, which runs in a separate process, so a damaged file cannot crash the conversion.

    \b
    Examples:
      shardkit convert huggingface saved dataset --to lmdb --dry-run
      shardkit convert huggingface 'data/*.parquet' dataset --to lmdb --keep caption=text
    """,
    options=HuggingFaceOptions,
    of_files=True,
    recognize=recognize,
    source=HuggingFace,
)
