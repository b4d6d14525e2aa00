"""Tables of image files as a source: CSV, TSV, JSON lines, Parquet."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import NO_LABEL, Field
from shardkit.sources.inputs import find_files, place, place_of
from shardkit.sources.kept import Kept, kind_of_suffix, parse_keep, value_at
from shardkit.sources.labels import LabelValues, Value, checked_label, read_classes
from shardkit.sources.listing import scan_of
from shardkit.sources.named_files import NamedListing, NamedSource, Names, corners, find_root
from shardkit.sources.table_rows import SUFFIXES, columns_of, is_text, rows_of
from shardkit.system.text import quoted

FILE_NAME = "file_name"
"""The column of images in Hugging Face's metadata files; ``mask_file_name`` is a mask's."""

_COLUMN = re.compile(r"([^:]+)(?::/([^:]*))?\Z")
_BOXES = re.compile(r"(.+):(xyxy|xywh)\Z")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*([eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)\Z")
_ANY_TEXT = "any text"
"""The kind of a text in a table of texts: all values of the column are texts then."""

_IN_FILES = ("image", "mask", "bytes")
"""Kinds of fields that are files of their own."""


class _Column(NamedTuple):
    """A column, or a part of the JSON in one."""

    source: str
    pointer: str | None


class _Found:
    """What a scan finds in the rows, other than the rows themselves."""

    def __init__(self, root: str) -> None:
        self.names = Names(root)
        self.labels = {name: LabelValues() for name in ("label", "labels", "boxes")}
        self.kinds: defaultdict[str, set[str]] = defaultdict(set)
        """The kinds of the values of each field whose kind the user did not give."""
        self.rows = 0

    def field(self, kept: Kept) -> Field:
        """Return a field, now that all of its values are known."""
        kinds = self.kinds[kept.name]
        if _ANY_TEXT in kinds:
            return kept.field("text")
        if len(kinds) < 2:
            return kept.field(next(iter(kinds), "text"))
        return kept.field("float64" if kinds == {"int64", "float64"} else "json")


class Table(NamedSource):
    """A table with a row for each image file.

    Args:
        pattern: A table, a folder of tables, or names with ``{000..999}``, ``*`` or ``?``. The
            suffix states the format. ``TABLE@ROOT`` also names the folder.
        root: The folder that file names are relative to; None means that of the table.
        image: Column with the names of images; None means ``file_name``, and then also uses columns
            such as ``mask_file_name`` as ``file``.
        label: Column with the label, an integer or text. It may be a part of JSON: ``info:/class``.
        labels: Column with any number of labels: a list, or a text divided by ``separator``.
        separator: Text between labels.
        boxes: Column with a list of boxes and the order of their numbers: ``COL:xyxy`` (left, top,
            right, bottom) or ``COL:xywh``. A fifth number or text is the box's label.
        box_labels: Column with a list of the labels of boxes.
        file: Fields in files of their own, as ``NAME=COLUMN[:KIND][?]`` with commas between.
        keep: Fields in the table, as ``[NAME=]COLUMN[:/PATH][:KIND][?]`` with commas between.
        classes: A text file with a class name in each line.
    """

    kind = "table"

    def __init__(  # noqa: PLR0913 - the options of its command
        self,
        pattern: str | Path,
        *,
        root: str | Path | None = None,
        image: str | None = None,
        label: str | None = None,
        labels: str | None = None,
        separator: str = "|",
        boxes: str | None = None,
        box_labels: str | None = None,
        file: str | None = None,
        keep: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        super().__init__(pattern, root, {})
        self._lists = find_files(self.pattern, SUFFIXES)
        columns = columns_of(self._lists.paths[0])
        if image is None and FILE_NAME in columns:
            image = FILE_NAME
            more = [name for name in columns if name.endswith(f"_{FILE_NAME}")]
            file = file or ",".join(f"{name[: -len(FILE_NAME) - 1]}={name}" for name in more)
        if image is None:
            known = ", ".join(columns)
            raise UsageError(
                f"{self._lists.paths[0]}: choose the column of images with --image from {known}"
            )
        if label and labels:
            raise UsageError("--label and --labels exclude each other")
        self._image = image
        self._label, self._labels = _column(label, "--label"), _column(labels, "--labels")
        self._separator = separator
        order = _BOXES.match(boxes) if boxes else None
        if boxes and order is None:
            raise UsageError(f"--boxes {boxes} is not COLUMN:xyxy or COLUMN:xywh")
        self._boxes = _column(order[1], "--boxes") if order else None
        self._order = order[2] if order else ""
        self._box_labels = _column(box_labels, "--box-labels")
        self._keep, self._files = parse_keep(keep), parse_keep(file)
        self._require_fields()
        self._class_names = read_classes(classes)
        self._reopened = _reopened
        self._describe(
            image=image,
            label=label,
            labels=labels,
            separator=separator if labels else None,
            boxes=boxes,
            box_labels=box_labels,
            class_names=True if classes or _reopened else None,
        )

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Table:
        """Open the table that a dataset was made from."""
        (options,) = described.values()
        names = ("image", "label", "labels", "separator", "boxes", "box_labels", "file", "keep")
        found = cls(
            path,
            root=find_root(path, options),
            _reopened=bool(options.get("class_names")),
            **{name: options[name] for name in names if name in options},
        )
        found._restore(options)
        return found

    def paths(self) -> Sequence[Path]:
        """Return the tables and the folder of images."""
        return [*map(Path, self._lists.paths), Path(self._root)]

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the rows of all tables, in order.

        Raises:
            UsageError: If a table cannot be read or lacks a column, or labels are out of range.
        """
        found = _Found(self._root)
        listing = NamedListing(found.labels["label"], found.names)
        unused: dict[str, None] = {}
        for number, path in enumerate(self._lists.paths):
            columns = columns_of(path)
            used = self._used(columns, path)
            unused.update(dict.fromkeys(name for name in columns if name not in used))
            for line, row in rows_of(path, used):
                self._list(listing, found, place(number, line), row, is_text(path))
        listing.ignored += [*self._lists.others, *found.names.unused(self._lists.paths)]
        labels = found.labels["label"].assign(classes, self._class_names, reopened=self._reopened)
        self._complete(found)
        understood = {
            "rows": f"{found.rows:,}",
            "image": f"{self._image}, below {self._root}",
            "label": f"{_name(self._label)}: {found.labels['label'].describe()}",
            **{name: f"{self._column_of(name)}: {each}" for name, each in self._schema.items()},
            "unused": ", ".join(unused) or "no column",
        }
        return scan_of(self, {"": listing}, labels, understood, more=self._schema)

    def _list(
        self,
        listing: NamedListing,
        found: _Found,
        spot: int,
        row: dict[str, Any] | str,
        text: bool,
    ) -> None:
        """List the image of one row, or say what is wrong with the row."""
        found.rows += 1
        number, line = place_of(spot)
        where = f"{self._lists.names[number]}:{line}"
        name = None if isinstance(row, str) else row.get(self._image)
        try:
            if isinstance(row, str):
                raise BadImage(row)
            _require_utf8(name)
            code, values = self._values_of(row, text, found)
        except BadImage as error:
            listing.blame_row(where, name, str(error))
        else:
            listing.add_file(where, name, code, spot, values)

    def _values_of(
        self, row: Mapping[str, Any], text: bool, found: _Found
    ) -> tuple[int, dict[str, Any]]:
        """Return the code of the label, and the values of the other fields."""
        code = NO_LABEL
        values: dict[str, Any] = {}
        if self._label:
            value = _cell(row, self._label, text)
            value = value.strip() if isinstance(value, str) else value
            code = found.labels["label"].code(checked_label(value, _name(self._label)))
        if self._labels:
            stated = self._several(_cell(row, self._labels, text), _name(self._labels))
            values["labels"] = list(map(found.labels["labels"].code, stated))
        if self._boxes:
            values["boxes"] = self._boxes_of(row, text, found.labels["boxes"])
        for kept in self._files:
            name = _cell(row, kept, text)
            if _is_there(kept, name):
                try:
                    plain, status = found.names.find(name)
                except BadImage as error:
                    raise BadImage(f"its {_name(kept)} {quoted(name)}: {error}") from error
                values[kept.name] = [plain, status.st_size, status.st_mtime_ns]
                if kept.kind is None:
                    kind = "mask" if kept.name == "mask" else kind_of_suffix(plain)
                    found.kinds[kept.name].add(kind)
        for kept in self._keep:
            value = _cell(row, kept, text)
            if not _is_there(kept, value):
                continue
            values[kept.name] = value
            of_text = text and kept.pointer is None
            if kept.kind is None:
                found.kinds[kept.name] |= _kinds_of_text(value) if of_text else {_kind_of(value)}
            elif of_text:
                values[kept.name] = _typed(kept.kind, value, kept.source)
        return code, values

    def _several(self, value: Any, where: str) -> list[Value]:
        """Return the labels in a cell: a list, or a text of them."""
        if isinstance(value, str):
            if value.lstrip().startswith("["):
                value = _json(value, where)
            else:
                value = [part.strip() for part in value.split(self._separator) if part.strip()]
        listed = [] if value is None else value if isinstance(value, list) else [value]
        return [checked_label(each, where) for each in listed]

    def _boxes_of(self, row: Mapping[str, Any], text: bool, labels: LabelValues) -> list[Any]:
        """Return boxes as left, top, right and bottom, and the code of the label of each."""
        assert self._boxes is not None
        where = _name(self._boxes)
        stated = _list(_cell(row, self._boxes, text), where)
        if self._box_labels:
            cell = _cell(row, self._box_labels, text)
            known = self._several(cell, _name(self._box_labels))
            if len(known) != len(stated):
                raise BadImage(f"it has {len(stated)} boxes and {len(known)} labels of boxes")
            pairs = zip(stated, known, strict=True)
            stated = [[*_list(box, where)[:4], label] for box, label in pairs]
        boxes = []
        for box in stated:
            if not isinstance(box, list):
                raise BadImage(f"a box is a list of four numbers, not {quoted(box)}")
            code = [labels.code(checked_label(each, where)) for each in box[4:5]]
            boxes.append([*corners(box[:4], self._order), *code])
        return boxes

    def _complete(self, found: _Found) -> None:
        """Set the fields, now that all values are known."""
        schema: dict[str, Field] = {}
        numbers = {}
        for name, column in (("labels", self._labels), ("boxes", self._boxes)):
            if column is None:
                continue
            names = self._class_names if self._label is None else None
            values = found.labels[name]
            assigned = values.assign(self._known(name), names, reopened=self._reopened)
            if assigned.classes is None and name == "labels":
                raise UsageError(f"the column {_name(column)} has no labels")
            numbers[name] = assigned.labels
            schema[name] = Field(name, classes=assigned.classes)
        for name, fields in (("file", self._files), ("keep", self._keep)):
            schema |= {kept.name: found.field(kept) for kept in fields}
            kinds = [kept._replace(kind=_word(schema[kept.name])) for kept in fields]
            self._describe(**{name: ",".join(map(str, kinds)) or None})
        self._settle(schema, numbers)

    def _values(self, stated: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an entry, with numbers for texts."""
        stated = super()._values(stated)
        for kept in self._keep:
            dtype = self._schema[kept.name].dtype
            if dtype and isinstance(stated.get(kept.name), str):
                stated[kept.name] = _typed(dtype, stated[kept.name], kept.source)
        return stated

    def _require_fields(self) -> None:
        """Refuse fields that share a name, or whose values cannot be in a table."""
        fields = [kept.name for kept in (*self._keep, *self._files)]
        fields += ["labels"] * bool(self._labels) + ["boxes"] * bool(self._boxes)
        twice = [name for name, count in Counter(fields).items() if count > 1]
        if twice:
            raise UsageError(f"two fields are called {twice[0]}: rename one with NAME=COLUMN")
        for kept in self._keep:
            if kept.kind in _IN_FILES:
                raise UsageError(f"--keep {kept}: a {kept.kind} is a file of its own: use --file")

    def _used(self, columns: Sequence[str], path: str) -> list[str]:
        """Return the columns that are used."""
        named = [self._label, self._labels, self._boxes, self._box_labels]
        required = [self._image, *(each.source for each in named if each)]
        fields = (*self._files, *self._keep)
        required += [kept.source for kept in fields if not kept.optional]
        lacking = [name for name in required if name not in columns]
        if lacking:
            raise UsageError(f"{path} has no column {lacking[0]}; it has {', '.join(columns)}")
        used = {*required, *(kept.source for kept in fields)}
        return [name for name in columns if name in used]

    def _column_of(self, name: str) -> str:
        """Return the column of a field."""
        if name in self._numbers:
            return _name(self._labels if name == "labels" else self._boxes)
        (kept,) = (kept for kept in (*self._files, *self._keep) if kept.name == name)
        return f"{'files of ' if kept in self._files else ''}{_name(kept)}"


def _column(text: str | None, option: str) -> _Column | None:
    if text is None:
        return None
    match = _COLUMN.match(text)
    if match is None:
        raise UsageError(f"{option} {text} is not a column, or COLUMN:/PATH for a part of its JSON")
    return _Column(match[1], match[2])


def _name(column: _Column | Kept | None) -> str:
    if column is None:
        return "no column"
    return column.source if column.pointer is None else f"{column.source}:/{column.pointer}"


def _cell(row: Mapping[str, Any], column: _Column | Kept, text: bool) -> Any:
    """Return the value of a row in a column, or None."""
    value = row.get(column.source)
    _require_utf8(value)
    if column.pointer is None:
        return value
    if text:
        value = _json(value, _name(column)) if value else None
    try:
        return value_at(value, column.pointer)
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def _require_utf8(value: object) -> None:
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadImage(f"it is not UTF-8: {quoted(value)}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadImage(f"its {where} is not JSON: {quoted(text)}") from error


def _list(value: Any, where: str) -> list[Any]:
    if value is None or value == "":
        return []
    value = _json(value, where) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise BadImage(f"its {where} is not a list: {quoted(value)}")
    return value


def _is_there(kept: Kept, value: object) -> bool:
    """Return whether a row has a value; an empty text is one if the field may be a text."""
    if value is None or (value == "" and (kept.optional or kept.kind not in (None, "text"))):
        if kept.optional:
            return False
        raise BadImage(f"it has no {_name(kept)}; {kept.source}? accepts it")
    return True


def _kind_of(value: object) -> str:
    """Return the kind of a JSON value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, float):
        return "float64"
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return "int64" if whole else "json"


def _kinds_of_text(value: str) -> set[str]:
    """Return the kinds that a text decides: ``007`` is a text, and so are all others then."""
    if not value:
        return set()
    return {"int64" if _INT.match(value) else "float64" if _FLOAT.match(value) else _ANY_TEXT}


def _typed(kind: str, text: str, where: str) -> Any:
    """Return the value of a text in a table of texts."""
    if kind == "text":
        return text
    if kind not in ("int64", "float64"):
        return _json(text, where)
    try:
        return int(text) if kind == "int64" else float(text)
    except ValueError as error:
        raise BadImage(f"its {where} is {quoted(text)}, not a number") from error


def _word(field: Field) -> str:
    """Return the kind of a field as users write it."""
    return field.dtype or field.kind


SOURCE = SourceKind(
    name=Table.kind,
    title="Convert image files that a CSV, TSV, JSONL or Parquet table lists.",
    help="""Convert the images that the table SRC lists to a dataset in DST.

    SRC is a .csv, .tsv, .jsonl or .parquet file, or a folder of them. File names are relative to
    --root and must stay below it. Hugging Face's metadata files need no options: file_name is the
    image, and columns such as mask_file_name are files, too. Missing files, repeated rows and rows
    that cannot be read are reported, and so are files below --root that the table does not list.
    For verify and repair, give a root folder elsewhere as SRC@ROOT.

    \b
    Examples:
      shardkit convert table photos/metadata.csv dataset --to lmdb --dry-run
      shardkit convert table train.csv dataset --to lmdb --root photos --image path --label class
      shardkit convert table boxes.jsonl dataset --to lmdb --root photos --image path \\
        --boxes objects:/bbox:xywh --box-labels objects:/category --keep caption,score:float64
    """,
    options=(
        SourceOption(
            flags="--root", metavar="DIR", help="Folder of the files.  [default: that of SRC]"
        ),
        SourceOption(
            flags="--image", metavar="COL", help="Column of images.  [default: file_name]"
        ),
        SourceOption(
            flags="--label", metavar="COL", help="Column of the label, an integer or text."
        ),
        SourceOption(
            flags="--labels",
            metavar="COL",
            help="Column of any number of labels: a list, or a text such as a|b.",
        ),
        SourceOption(flags="--separator", default="|", metavar="TEXT", help="Text between labels."),
        SourceOption(
            flags="--boxes",
            metavar="COL:xyxy|xywh",
            help="Column of lists of boxes: left, top, then right, bottom or width, height. A "
            "fifth value is the label.",
        ),
        SourceOption(
            flags="--box-labels", metavar="COL", help="Column of lists of the labels of boxes."
        ),
        SourceOption(
            flags="--file",
            metavar="NAME=COL[:KIND][?],...",
            help="Columns with the names of more files, such as mask=mask_path. Rows may lack "
            "those with ?.",
        ),
        SourceOption(
            flags="--keep",
            metavar="[NAME=]COL[:KIND][?],...",
            help="More columns to keep, such as caption,age:int64,city=info:/city:text. Kinds are "
            "inferred, and shown by --dry-run.",
        ),
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ..., or in the order of labels.",
        ),
    ),
    of_files=True,
    open=Table,
    find=Table.find,
)
