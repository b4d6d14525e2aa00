"""Data sets of Hugging Face's ``datasets`` as a source: saved folders, and Parquet files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit.contracts import Entry, Recognition, SourceKind
from shardkit.errors import CHANGED, BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.options import same_option
from shardkit.record import load_json
from shardkit.sources import arrow_reader
from shardkit.sources.column_source import Cells, ColumnSource, Known, RowFile
from shardkit.sources.columns import Column, ColumnOptions, plain_column
from shardkit.sources.driver import Listing, SplitOptions, split_names
from shardkit.sources.folders import below, is_split_name
from shardkit.sources.inputs import (
    InputFiles,
    OpenedFile,
    find_files,
    refusing,
    require_rows,
    stamp_of,
)
from shardkit.sources.library_process import call
from shardkit.system.files import read_small
from shardkit.system.safe_paths import parts_of
from shardkit.system.text import quoted, size

if TYPE_CHECKING:
    from shardkit.sources.recognize import Overview

_DICT = "dataset_dict.json"
_STATE = "state.json"
"""Files of a folder from ``save_to_disk``: one lists the splits, the other the files of a split."""

_SPLIT = re.compile(r"(?P<split>\w+)-[0-9]{5}-of-[0-9]{5}(-[0-9a-f]+)?\.parquet")
"""The name of a file of one split, as on the Hub."""


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
        files_of = _find_splits(pattern)
        names = {"": ""}
        if options.split or "" not in files_of:
            names = split_names(options.split, tuple(files_of))
        files = [
            RowFile(path, name, "", ours)
            for ours, theirs in names.items()
            for path, name in zip(files_of[theirs].paths, files_of[theirs].names, strict=True)
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


def _find_splits(pattern: str | Path) -> dict[str, InputFiles]:
    """Return the files of each split; the only name is "" without splits."""
    folder = Path(pattern)
    if (folder / _DICT).exists():
        splits = _load(folder / _DICT).get("splits")
        if not isinstance(splits, list) or not splits:
            raise UsageError(f"{folder / _DICT} lists no splits")
        return {str(split): _saved(folder / _plain(split, folder / _DICT)) for split in splits}
    if (folder / _STATE).exists():
        return {"": _saved(folder)}
    if folder.is_dir() and not any(folder.glob("*.parquet")) and (folder / "data").is_dir():
        pattern = folder / "data"
    files = find_files(pattern, (".parquet",))
    splits_of = [_split_of(os.path.basename(path)) for path in files.paths]
    if "" in splits_of or len(set(splits_of)) == 1:
        return {"": files}
    result = {}
    for split in dict.fromkeys(splits_of):
        chosen = [number for number, its in enumerate(splits_of) if its == split]
        paths, names = (
            tuple(map(column.__getitem__, chosen)) for column in (files.paths, files.names)
        )
        result[split] = InputFiles(paths, names, ())
    return result


def _split_of(file: str) -> str:
    """Return the split of a file by its name, or ""."""
    match = _SPLIT.fullmatch(file)
    stem = file.removesuffix(".parquet")
    return match["split"] if match else stem * is_split_name(stem)


def _saved(folder: Path) -> InputFiles:
    """Return the files of a folder that ``Dataset.save_to_disk`` wrote."""
    state = folder / _STATE
    listed = _load(state).get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(file, dict) for file in listed):
        raise UsageError(f"{state} lists no files")
    names = [_plain(file.get("filename"), state) for file in listed]
    for name in names:
        if not (folder / name).is_file() or (folder / name).is_symlink():
            raise UsageError(f"{folder / name} is not a file, but {state} lists it")
    return InputFiles(tuple(str(folder / name) for name in names), tuple(names), ())


def _plain(name: object, where: Path) -> str:
    """Return a file name from an untrusted file."""
    try:
        if isinstance(name, str) and len(parts_of(name)) == 1:
            return name
    except ValueError:
        pass
    raise UsageError(f"{where} lists {quoted(name)}, which is not a file name in its folder")


def _load(path: Path) -> dict[str, Any]:
    try:
        return load_json(read_small(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


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


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if not seen.is_folder:
        if seen.path.suffix == ".parquet":
            yield Recognition("a Parquet file", certain=b"huggingface" in seen.ends())
    elif seen.has("dataset_dict.json") or seen.has("state.json"):
        yield Recognition("a folder from save_to_disk")
    else:
        for top in ("", "data", *filter(is_split_name, seen.folders())):
            if (files := seen.files(top, ".parquet")) and not seen.images(top):
                of_hub = b"huggingface" in seen.ends(below(top, files[0]))
                yield Recognition(f"Parquet files such as {below(top, files[0])}", of_hub, top)


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
    recognize=_recognize,
    source=HuggingFace,
)
