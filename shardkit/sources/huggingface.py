"""Data sets of Hugging Face's ``datasets`` as a source: saved folders, and Parquet files."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.contracts import (
    Entry,
    Recognition,
    SourceKind,
)
from shardkit.errors import BadImage, UsageError
from shardkit.kinds.field import Field
from shardkit.kinds.packing import with_fields
from shardkit.options import option, same_option
from shardkit.record import NO_LABEL, Record, load_json
from shardkit.sources import arrow_reader
from shardkit.sources.columns import NONE, Column, ColumnOptions, Columns
from shardkit.sources.driver import ListedSource, Listing, Row, SplitOptions, split_names
from shardkit.sources.image_files import CHANGED
from shardkit.sources.images import image_record
from shardkit.sources.inputs import (
    InputFiles,
    file_at,
    find_files,
    place,
    place_of,
    require_rows,
    stamp_of,
)
from shardkit.sources.kept import Kept
from shardkit.sources.labels import label_of, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.places import below
from shardkit.system.files import read_small
from shardkit.system.formatting import size
from shardkit.system.safe_paths import parts_of
from shardkit.system.text import name_list, quoted

if TYPE_CHECKING:
    from shardkit.sources.recognize import Overview

_DICT = "dataset_dict.json"
_STATE = "state.json"
"""Files of a folder from ``save_to_disk``: one lists the splits, the other the files of a split."""

_SPLIT = re.compile(r"(?P<split>\w+)-[0-9]{5}-of-[0-9]{5}(-[0-9a-f]+)?\.parquet")
"""The name of a file of one split, as on the Hub."""


class _Column(NamedTuple):
    """A column of the files."""

    kind: str
    """As in `shardkit.sources.arrow_reader.describe`."""
    classes: list[str] | None

    def __str__(self) -> str:
        return self.kind if self.classes is None else f"{self.kind} of {len(self.classes)} classes"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceOptions(ColumnOptions):
    """The options of this source."""

    name: str | None = option(
        None,
        help="Column with the image's name; the column of images means its path.",
        metavar="COLUMN",
        shown="number of the row",
        stored="image_name",
    )
    label: str | None = same_option(
        ColumnOptions, "label", shown="the only one with class names, or label"
    )
    keep: str | None = same_option(ColumnOptions, "keep", shown="none")
    split: str | None = same_option(SplitOptions, "split", metavar="NAME", shown="")


class HuggingFace(ListedSource):
    """A folder from ``save_to_disk``, or Parquet files, read by pyarrow in a child process.

    Args:
        pattern: A folder with ``dataset_dict.json`` or ``state.json``; a Parquet file, or a folder
            of them; or names with ``{000..999}``, ``*`` or ``?``.
        options: The options.
    """

    kind = "huggingface"

    def __init__(self, pattern: str | Path, options: HuggingFaceOptions) -> None:
        if find_spec("pyarrow") is None:
            raise UsageError(f"{pattern} needs pyarrow", remedy="pip install 'shardkit[parquet]'")
        super().__init__(pattern, options)
        files_of = _find_splits(pattern)
        names = {"": ""}
        if options.split or "" not in files_of:
            names = split_names(options.split, tuple(files_of))
        self.splits = self._files = {ours: files_of[theirs] for ours, theirs in names.items()}
        self._columns = self._first_columns()
        columns = itertools.starmap(_column, self._columns.items())
        self._chosen = Columns(self.path, columns, options, eager=False)
        self.schema = self._chosen.schema
        self.settle(image=self._chosen.image, label=self._chosen.label or NONE)
        self._name = options.name
        if self._name is not None and self._name not in self._columns:
            raise UsageError(
                f"{pattern} has no column {quoted(self._name)}; it has {name_list(self._columns)}"
            )
        self.class_names = read_classes(options.classes)
        if self._chosen.label and self.class_names is None:
            self.class_names = self._columns[self._chosen.label].classes

    def paths(self) -> Sequence[Path]:
        """Return the files."""
        return [Path(path) for files in self._files.values() for path in files.paths]

    def locate(self, split: str, entry: Entry) -> str:
        """Return the file and row of an image."""
        number, row = place_of(entry.place)
        return f"{self._files[split].paths[number]} at row {row}"

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        files = self._files.get(split)
        path, row = file_at(files.paths if files else (), entry.place)
        if stamp_of(path) != entry.stamp:
            raise BadImage(CHANGED)
        columns = [self._chosen.image, *(kept.source for kept in self._chosen.keep)]
        answer = call(arrow_reader.read, os.path.abspath(path), entry.stamp, row, columns)
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
        record = image_record(entry, values[0])
        kept = {
            kept.name: self._kept(kept, value)
            for kept, value in zip(self._chosen.keep, values[1:], strict=True)
            if value is not None or not kept.optional
        }
        return with_fields(record, self.schema, kept) if kept else record

    def _kept(self, kept: Kept, value: Any) -> Any:
        """Return the value of a field to keep."""
        if value is None:
            raise BadImage(f"its row has no {kept.source}; {kept.source}? accepts it")
        return self._chosen.value(kept, value)

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the rows of all files, in order."""
        groups: list[int] = []
        for split, files in self._files.items():
            for number, path in enumerate(files.paths):
                try:
                    groups += self._list(listings[split], number, path)
                except BadImage as error:
                    listings[split].blame_rest(files.names[number], str(error))
        self.notes += self._chosen.notes
        count = sum(map(len, listings.values()))
        understood = {
            "files": f"{sum(len(f.paths) for f in self._files.values()):,}, with {count:,} images",
            **self._chosen.describe(self._columns[self._chosen.image].kind, self._name),
        }
        if max(groups, default=0) and self.paths()[0].suffix == ".parquet":
            understood["groups"] = (
                f"{len(groups):,} of rows, up to {size(max(groups))} of images each; with over 256 "
                "MiB in all, --no-shuffle is faster"
            )
        return understood

    def _list(self, listing: Listing, number: int, path: str) -> list[int]:
        """List the rows of a file; return the bytes of images in each of its groups."""
        stamp = stamp_of(path)
        full = os.path.abspath(path)
        counts, columns_of_file = _describe(path)
        for name in filter(None, (self._chosen.image, self._chosen.label)):
            if columns_of_file.get(name) != self._columns[name]:
                raise BadImage(f"its column {quoted(name)} differs from that of the first file")
        groups = []
        row = 0
        for group in range(len(counts)):
            columns = (self._chosen.image, self._chosen.label or None, self._name)
            sizes, places, labels, names = call(arrow_reader.listing, full, stamp, group, columns)
            for length, original, label, name in zip(sizes, places, labels, names, strict=True):
                path = f"{listing.logged:08d}"
                if self._name is not None:
                    path = str(name).strip("/") if name not in (None, "") else path
                if length is None:
                    only = f", only the path {quoted(original)}" if original else ""
                    listing.blame(path, f"row {row} of the file has no image bytes{only}")
                else:
                    code = NO_LABEL
                    if self._chosen.label:
                        code = listing.code(label_of(label, self._chosen.label))
                    listing.add(Row(path, code, length, stamp, place(number, row)))
                row += 1
            groups.append(sum(length or 0 for length in sizes))
        return groups

    def _first_columns(self) -> dict[str, _Column]:
        files = next(iter(self._files.values()))
        try:
            return _describe(files.paths[0])[1]
        except BadImage as error:
            raise UsageError(f"{files.paths[0]}: {error.problem}", remedy=error.remedy) from error


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
    matches = [_SPLIT.fullmatch(os.path.basename(path)) for path in files.paths]
    splits_of = [match["split"] for match in matches if match]
    if len(splits_of) < len(matches) or len(set(splits_of)) == 1:
        return {"": files}
    result = {}
    for split in dict.fromkeys(splits_of):
        places = [place for place, its in enumerate(splits_of) if its == split]
        paths, names = (tuple(map(part.__getitem__, places)) for part in (files.paths, files.names))
        result[split] = InputFiles(paths, names, ())
    return result


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
    raise UsageError(f"{where} names {quoted(name)}, which is not a name in its folder")


def _load(path: Path) -> dict[str, Any]:
    try:
        return load_json(read_small(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _describe(path: str) -> tuple[list[int], dict[str, _Column]]:
    """Return the number of rows of each group of a file, and its columns."""
    rows, columns = call(arrow_reader.describe, os.path.abspath(path), stamp_of(path))
    require_rows(path, sum(rows))
    return rows, {name: _Column(kind, names) for name, kind, names in columns}


def _column(name: str, stored: _Column) -> Column:
    """Return a column of the files as one of a source."""
    kind = stored.kind
    if stored.classes is not None:
        holds = "integer" if kind == "label" else "json"
        return Column(name, str(stored), holds, field=Field(kind, classes=stored.classes))
    if kind in ("image", "text", "bytes", "json"):
        return Column(name, kind, kind, field=Field(kind))
    if kind == "images":
        return Column(name, kind, "", why="it holds several images")
    holds = "float" if kind.startswith("float") else "integer"
    return Column(name, kind, holds, field=Field("number", kind))


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if not seen.is_folder:
        if seen.path.suffix == ".parquet":
            yield Recognition("a Parquet file", certain=b"huggingface" in seen.ends())
    elif seen.has("dataset_dict.json") or seen.has("state.json"):
        yield Recognition("a folder from save_to_disk")
    else:
        for top in ("", "data"):
            if (files := seen.files(top, ".parquet")) and not seen.images(top):
                of_hub = b"huggingface" in seen.ends(below(top, files[0]))
                yield Recognition(f"Parquet files such as {files[0]}", of_hub, top)


SOURCE = SourceKind(
    name=HuggingFace.kind,
    title="Convert Hugging Face datasets: saved folders or Parquet.",
    help="""Convert the images of a Hugging Face dataset to a dataset in DST.

    SRC is a folder from save_to_disk, or Parquet files with a column of images {bytes, path}: one
    file, a folder, or quoted names with {000..999}, * or ?. Files called train-00000-of-00001 and
    test-... are splits. Class names come from the files' metadata. Needs pyarrow, which runs in a
    separate process, so that a damaged file cannot crash the conversion.

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
