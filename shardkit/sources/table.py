"""Tables of image files as a source: CSV, TSV, JSON lines, Parquet."""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar, cast

from shardkit.contracts import SourceKind
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.options import option
from shardkit.record import NO_LABEL
from shardkit.sources.columns import NONE, bit_of, lost_labels, ones_of, usual_label
from shardkit.sources.driver import Listing
from shardkit.sources.images import has_image_suffix
from shardkit.sources.inputs import place, place_of
from shardkit.sources.kept import Kept, kind_of_suffix, parse_keep, value_at
from shardkit.sources.labels import (
    LabelValues,
    Value,
    checked_label,
    classes_option,
    label_of,
    labels_of,
    read_classes,
)
from shardkit.sources.named_files import NamedListing, Names, corners
from shardkit.sources.named_source import NamedOptions, NamedSource
from shardkit.sources.recognize import Overview, splits_in
from shardkit.sources.table_layout import SIDES, recognize_table, refuse_pixels
from shardkit.sources.table_rows import Row, columns_of, find_tables, is_text, rows_of
from shardkit.sources.table_text import Dialect, dialect_of, stated
from shardkit.sources.zip_file import ZipFolder, file_of
from shardkit.system.text import name_list, quoted

FILE_NAME = "file_name"
"""The column of images in Hugging Face's metadata files; ``mask_file_name`` is a mask's."""

_COLUMN = re.compile(r"([^:]+)(?::/([^:]*))?\Z")
_BOXES = re.compile(r"(.+):(xyxy|xywh)\Z")
_INT = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]*([eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)\Z")
ANY_TEXT = "any text"
"""The kind of a text in a table of texts: all values of the column are texts then."""

_SUFFIXES = (".jpg", ".jpeg", ".png", ".JPG", ".webp", ".tif", ".bmp")
"""Suffixes to try if names have none."""

_FIRST = 1000
"""Rows that show whether columns may be labels."""

_IN_FILES = ("image", "mask", "bytes")
"""Kinds of fields that are files of their own."""

_BASE64 = re.compile(r"data:image/|(/9j/|iVBORw0KGgo|UklGR|R0lGOD)[A-Za-z0-9+/=\s]{250}")
"""Start of an image as text: of a data URL, JPEG, PNG, WebP or GIF, longer than a name may be."""


_V = TypeVar("_V")

_Rows = list[dict[str, Any]]
"""All rows of an image."""


class _Column(NamedTuple):
    """A column, a part of the JSON in one, or columns that are 1 for a class and 0 for others."""

    source: str
    pointer: str | None
    classes: Sequence[str] = ()
    """The columns, if there are several."""


class _Scan:
    """The state of a scan of rows."""

    def __init__(self, listing: NamedListing, labels: LabelValues) -> None:
        self.listing = listing
        self.labels = {"label": labels, "labels": LabelValues(), "boxes": LabelValues()}
        self.kinds: defaultdict[str, set[str]] = defaultdict(set)
        """The kinds of the values of each field whose kind the user did not give."""
        self.words: dict[str, str] = {}
        """How several labels of an image were read."""
        self.rows = 0
        self.most = 0.0
        """The largest coordinate of a box."""
        self.has_fractions = False

    def see(self, boxes: Sequence[Sequence[float]]) -> None:
        """Note whether boxes may be fractions of the width and height."""
        sides = [side for box in boxes for side in box[:4]]
        self.most = max([self.most, *sides])
        self.has_fractions |= any(side % 1 for side in sides)

    def field(self, kept: Kept) -> Field:
        """Return a field, now that all of its values are known."""
        return kept.field(kind_of_cells(self.kinds[kept.name]))


@dataclass(frozen=True, kw_only=True)
class TableOptions(NamedOptions):
    """The options of this source."""

    root: str | None = option(
        None,
        help="Folder or zip archive of the files.",
        metavar="DIR",
        shown="the folder of SRC",
        stored="",
    )
    image: str | None = option(None, help="Column of images.", metavar="COL", shown="file_name")
    label: str | None = option(
        None,
        help="Label column with integers or text, or one column per class, such as cat,dog, "
        "exactly one of which is 1 in each row; none: no label.",
        metavar="COL",
        shown="label, or the only column with a common label name",
    )
    labels: str | None = option(
        None,
        help="Column with any number of labels per row: a list, or text such as a|b; or one "
        "column of 0 and 1 per class.",
        metavar="COL",
    )
    separator: str = option("|", help="Text between labels.", metavar="TEXT")
    boxes: str | None = option(
        None,
        help="Column with a box or a list of boxes: left, top, then right, bottom or width, "
        "height. A fifth value is the label. Or four columns, such as xmin,ymin,xmax,ymax.",
        metavar="COL:xyxy|xywh",
    )
    box_labels: str | None = option(None, help="Column with lists of box labels.", metavar="COL")
    join_rows: bool = option(
        False,
        help="Join rows that name the same image: boxes and labels are combined, and kept values "
        "become lists.",
        store=lambda value: value or None,
    )
    file: str | None = option(
        None,
        help="Columns with the names of additional files, such as mask=mask_path. A file with ? "
        "may be missing.",
        metavar="NAME=COL[:KIND][?],...",
    )
    keep: str | None = option(
        None,
        help="Additional columns to keep, such as caption,age:int64,city=info:/city:text. Kinds "
        f"are inferred, and shown by {setting('dry_run')}.",
        metavar="[NAME=]COL[:KIND][?],...",
    )
    classes: str | None = classes_option()
    suffix: str | None = option(
        None, help="Suffix to add to file names in the table, such as .jpg.", metavar=".SUFFIX"
    )
    delimiter: str | None = option(
        None, help="Character between values, or tab.", metavar="CHAR", shown="detected"
    )
    encoding: str | None = option(
        None, help="Encoding, such as cp1252 or gbk.", metavar="NAME", shown="detected"
    )
    no_quotes: bool = option(
        False,
        help="Treat quotation marks as text.",
        store=lambda value: value or None,
        shown="detected",
    )

    def describe(self) -> dict[str, Any]:
        """Return JSON values for the manifest; a separator only if it has an effect."""
        described = super().describe()
        if self.labels is None and (self.box_labels is None or self.separator == "|"):
            del described["separator"]
        return described


class Table(NamedSource):
    """A table with a row for each image file.

    The path is a table, a folder of tables, or names with ``{000..999}``, ``*`` or ``?``. The
    suffix states the format. ``TABLE@ROOT`` also names the folder. Without ``image``, the column is
    ``file_name``, and columns such as ``mask_file_name`` are files, too. Columns may be a part of
    JSON: ``info:/class``.
    """

    kind = "table"
    reads_zip = True
    options: TableOptions

    def __init__(self, path: str | Path, options: TableOptions) -> None:
        super().__init__(path, options, options.root)
        self._lists = find_tables(self.path)
        tops = {find(self.root) for find in (os.path.abspath, os.path.realpath)}
        self._tops = [os.path.join(top, "") for top in sorted(tops)]
        self._dialect = stated(options.delimiter, options.encoding, options.no_quotes)
        columns = columns_of(self._lists.paths[0], self._dialect)
        if options.image is None and FILE_NAME in columns:
            more = [name for name in columns if name.endswith(f"_{FILE_NAME}")]
            files = ",".join(f"{name[: -len(FILE_NAME) - 1]}={name}" for name in more)
            self.settle(image=FILE_NAME, file=options.file or files or None)
        options = self.options
        if options.image is None:
            refuse_pixels(Overview(self._lists.paths[0]))
            listed = name_list(columns)
            raise UsageError(
                f"{self._lists.paths[0]}",
                remedy=f"choose the image column with {setting('image')} from {listed}",
            )
        self._image = options.image
        self._require_header()
        self._choose_label(columns)
        options = self.options
        if options.label and options.labels:
            raise UsageError(
                f"{setting('label')} and {setting('labels')} cannot be combined;",
                remedy="to store both, keep the label as another field: "
                f"{setting('labels', options.labels)} and "
                f"{setting('keep', f'label_value={options.label}')}",
            )
        self._nested: dict[str, str] = {}
        """The path of each file in a subfolder by its name, if the table names files by that."""
        label = None if options.label == NONE else options.label
        self._label = _column(label, "label", columns)
        self._labels = _column(options.labels, "labels", columns)
        order = _BOXES.match(options.boxes) if options.boxes else None
        if options.boxes and order is None:
            raise UsageError(f"{setting('boxes', options.boxes)} is not COLUMN:xyxy or COLUMN:xywh")
        self._boxes = _column(order[1], "boxes", columns) if order else None
        self._order = order[2] if order else ""
        self._box_labels = _column(options.box_labels, "box_labels")
        self._keep = parse_keep(options.keep)
        self.kept_files = parse_keep(options.file)
        self._require_fields()
        named = self._label or self._labels
        self.class_names = read_classes(options.classes) or (named and named.classes) or None
        known = options.label or options.labels or options.join_rows
        self._note = "" if known else self._lost_labels(columns)

    def _lost_labels(self, columns: Sequence[str]) -> str:
        """Return which unused columns may be labels, or ""."""
        options = self.options
        texts = [options.boxes, options.box_labels, options.file, self._image]
        left = [name for name in columns if not any(name in text for text in texts if text)]
        unused = [name for name in left if name not in (options.keep or "")]
        rows = islice(rows_of(self._lists.paths[0], columns, self._dialect), _FIRST)
        with suppress(UsageError):  # columns of bytes
            first = [row for _, row in rows if isinstance(row, dict)]
            ones, counts = ones_of({name: [row.get(name) for row in first] for name in left})
            option = "label" if counts == {1} else "labels"
            return lost_labels(unused, self._image, ones, option)
        return ""

    def _require_header(self, names: Collection[str] = ()) -> None:
        """Refuse a table without a header: its first row names a file, or one of some ``names``."""
        name = f"{self._image}{self.options.suffix or ''}".removeprefix("./")
        with suppress(BadImage):
            if name not in names:
                self.names().status(name if has_image_suffix(name) else "")
            raise UsageError(
                f"{self._lists.paths[0]} has no header: its first line contains the file name "
                f"{quoted(name)};",
                remedy="add a first line with column names, such as file_name,label",
            )

    def _choose_label(self, columns: Sequence[str]) -> None:
        """Take the column called label, unless the user chose one, or uses it otherwise."""
        options = self.options
        chosen = [options.label, options.labels, options.boxes, options.box_labels]
        texts = [text for text in (*chosen, options.keep, options.file) if text]
        label = usual_label(name for name in columns if name != self._image)
        if label and not any(chosen) and not any(label in text for text in texts):
            self.settle(label=label)

    def paths(self) -> Sequence[Path]:
        """Return the tables and the folder of images."""
        return [*map(file_of, self._lists.paths), file_of(self.root)]

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the rows of all tables, in order."""
        names = self.names()
        scan = _Scan(NamedListing(listings[""], names), listings[""].labels)
        unused: dict[str, None] = {}
        for number, path in enumerate(self._lists.paths):
            columns = columns_of(path, self._dialect)
            used = self._used(columns, path)
            unused.update(dict.fromkeys(name for name in columns if name not in used))
            rows = rows_of(path, used, self._dialect)
            for line, row in _joined(rows, self._image) if self.options.join_rows else rows:
                self._list(scan, place(number, line), row, is_text(path))
        listings[""].ignored += [*self._lists.others, *names.unused(self._lists.paths)]
        self._complete(scan)
        self.notes += [self._note] * bool(self._note)
        dialects = [dialect_of(path, self._dialect) for path in self._lists.paths if is_text(path)]
        notes = map(Dialect.note, dialects, self._lists.paths)
        self.notes += dict.fromkeys(filter(None, notes))
        return {
            "rows": f"{scan.rows:,}",
            "image": f"{self._image}, below {self.root}",
            "label": _name(self._label),
            **{
                name: f"{self._column_of(name)}: {scan.words.get(name, field)}"
                for name, field in self.schema.items()
            },
            "unused": ", ".join(unused) or "no column",
        }

    def _list(self, scan: _Scan, spot: int, row: dict[str, Any] | _Rows | str, text: bool) -> None:
        """List the image of one row, or say what is wrong with the row."""
        scan.rows += 1
        number, line = place_of(spot)
        where = f"{self._lists.names[number]}:{line}"
        name = None
        if not isinstance(row, str):
            named = row[0] if isinstance(row, list) else row
            name = self._file_name(named.get(self._image), scan.listing.names, self.options.suffix)
        if scan.rows == 1 and isinstance(name, str):
            self._look_for_first(name)
            name = self._nested.get(name, name)
        try:
            if isinstance(row, str):
                raise BadImage(row)
            _require_utf8(name)
            code, values = self._values_of(row, text, scan)
        except BadImage as error:
            scan.listing.blame_row(where, name, error.stated)
        else:
            scan.listing.add_file(where, name, spot, values, code)

    def _file_name(self, name: Any, names: Names, suffix: str | None = None) -> Any:
        """Return a name as relative to the root, if it leads there, and with slashes."""
        if isinstance(name, int) and suffix and not isinstance(name, bool):
            name = str(name)
        if not isinstance(name, str) or not name:
            return name
        if "\\" in name and "/" not in name and not names.has(name):
            name = name.replace("\\", "/")
        for folder in self._tops:
            name = name.removeprefix(folder)
        if name.startswith("/") and names.has(name[1:]) and not os.path.lexists(name):
            name = name[1:]  # as in the lists of Places365
        name = name if name.endswith(suffix or "") else f"{name}{suffix}"
        return self._nested.get(name, name)

    def _look_for_first(self, name: str) -> None:
        """Refuse names without the suffix of their files, and find files in subfolders."""
        if _BASE64.match(name):
            raise UsageError(
                f"{self._lists.paths[0]} contains images as base64 text, not the names of files",
                remedy="write each image to a file, with Python's base64.b64decode, and its name "
                "to the table",
            )
        names = self.names()
        for suffix in ("", *_SUFFIXES):
            with suppress(BadImage):
                names.status(name + suffix)
                if not suffix:
                    return
                self._refuse_without(name, name + suffix)
        # An image that the training set lacks must not come from the test set.
        splits = splits_in(Path(self._lists.paths[0]).stem)
        nested = [path for path in names.images() if "/" in path]
        if splits:
            nested = [
                path for path in nested if splits & (splits_in(path.partition("/")[0]) or splits)
            ]
        count = Counter(path.rpartition("/")[2] for path in nested)
        by_name = {path.rpartition("/")[2]: path for path in nested}
        self._nested = {of: path for of, path in by_name.items() if count[of] == 1}
        self._require_header(by_name)
        if file := next((of for of in by_name if of.rpartition(".")[0] == name), None):
            self._refuse_without(name, by_name[file])
        archive = "" if nested else self._archive_with(name.rpartition("/")[2])
        if archive:
            raise UsageError(
                f"{self._lists.paths[0]}: the file {quoted(name)} does not exist, but {archive} "
                "contains it",
                remedy=f"read the images from that archive: {setting('root', archive)}",
            )

    def _archive_with(self, name: str) -> str:
        """Return an archive in the root with a file of this name, perhaps with a suffix; or ""."""
        for path in sorted(glob.glob(os.path.join(glob.escape(self.root), "*.zip"))):
            with suppress(UsageError):
                files = ZipFolder(path).members()
                if any(PurePath(of).name == name or PurePath(of).stem == name for of, _ in files):
                    return path
        return ""

    def _refuse_without(self, name: str, file: str) -> None:
        """Refuse a name that lacks the suffix of its file."""
        raise UsageError(
            f"{self._lists.paths[0]}: the file {quoted(name)} does not exist, but {quoted(file)} "
            "does",
            remedy=f"add the suffix with {setting('suffix', os.path.splitext(file)[1])}",
        )

    def _values_of(
        self, row: dict[str, Any] | _Rows, text: bool, scan: _Scan
    ) -> tuple[int, dict[str, Any]]:
        """Return the code of the label, and the values of the other fields."""
        code = NO_LABEL
        values: dict[str, Any] = {}
        rows = row if isinstance(row, list) else [row]
        if self._label:
            label = _same((_label_in(of, self._label, text) for of in rows), self._label)
            code = scan.labels["label"].code(label)
        if self._labels:
            each = (_labels_in(of, self._labels, text, self.options.separator) for of in rows)
            labels = dict.fromkeys(chain.from_iterable(each)) if len(rows) > 1 else next(each)
            values["labels"] = list(map(scan.labels["labels"].code, labels))
        if self._boxes:
            boxes = [box for of in rows for box in self._boxes_of(of, text, scan.labels["boxes"])]
            values["boxes"] = boxes
            scan.see(boxes)
        for kept in self.kept_files:
            name = _same((cell(of, kept, text) for of in rows), kept)
            if _is_there(kept, name):
                try:
                    found = scan.listing.names.find(self._file_name(name, scan.listing.names))
                except BadImage as error:
                    raise BadImage(
                        f"its {_name(kept)} {quoted(name)}: {error.problem}", remedy=error.remedy
                    ) from error
                values[kept.name] = [*found]
                if kept.kind is None:
                    kind = "mask" if kept.name == "mask" else kind_of_suffix(found.name)
                    scan.kinds[kept.name].add(kind)
        for kept in self._keep:
            if self.options.join_rows and kept.kind in (None, "json"):
                values[kept.name] = [cell(of, kept, text) for of in rows]
                scan.kinds[kept.name].add("json")
                continue
            value = _same((cell(of, kept, text) for of in rows), kept)
            if not _is_there(kept, value):
                continue
            values[kept.name] = value
            of_text = text and kept.pointer is None
            if kept.kind is None:
                scan.kinds[kept.name] |= kinds_in(value, of_text)
            elif of_text:
                values[kept.name] = typed(kept.kind, value, kept.source)
        return code, values

    def _boxes_of(self, row: Mapping[str, Any], text: bool, labels: LabelValues) -> list[Any]:
        """Return boxes as left, top, right and bottom, and the code of the label of each."""
        assert self._boxes is not None
        where = _name(self._boxes)
        cells: list[Any]
        if self._boxes.classes:
            sides = [row.get(name) for name in self._boxes.classes]
            is_box = any(side not in (None, "") for side in sides)
            cells = [[_number(side, where) for side in sides]] if is_box else []
        else:
            cells = _list(cell(row, self._boxes, text), where)
            cells = [cells] if cells and isinstance(cells[0], int | float) else cells
        if not cells and self.options.join_rows:
            return []
        cells = [self._sides_in(box) if isinstance(box, dict) else box for box in cells]
        if self._box_labels:
            value = cell(row, self._box_labels, text)
            box_labels = labels_of(value, _name(self._box_labels), self.options.separator)
            if len(box_labels) != len(cells):
                raise BadImage(f"it has {len(cells)} boxes but {len(box_labels)} box labels")
            pairs = zip(cells, box_labels, strict=True)
            cells = [box and [*_list(box, where)[:4], label] for box, label in pairs]
        boxes: list[list[float]] = []
        for box in cells:
            if box is None:
                continue  # another object in the list has one
            if not isinstance(box, list):
                raise BadImage(f"a box must be a list of four numbers, not {quoted(box)}")
            code = [labels.code(checked_label(value, where)) for value in box[4:5]]
            boxes.append([*corners(box[:4], self._order), *code])
        return boxes

    def _sides_in(self, box: Mapping[str, Any]) -> list[Any]:
        """Return the sides of a box with a name for each."""
        names = (sides for sides, order in SIDES if order == self._order)
        return [box[side] for sides in names if {*sides} <= box.keys() for side in sides][:4]

    def _complete(self, scan: _Scan) -> None:
        """Set the fields, now that all values are known."""
        if scan.has_fractions and scan.most <= 1:
            raise UsageError(
                f"{self._lists.paths[0]}: the boxes in {_name(self._boxes)} are fractions of the "
                "width and height, not pixels;",
                remedy="multiply them by the size of each image, or keep them as values with "
                f"{setting('keep')}",
            )
        schema: dict[str, Field] = {}
        numbers = {}
        for name, column in (("labels", self._labels), ("boxes", self._boxes)):
            if column is None:
                continue
            names = self.class_names if self._label is None or self.class_names is True else None
            assigned = scan.labels[name].assign(self.known_classes(name), names)
            if assigned.classes is None and name == "labels":
                raise UsageError(f"the {_name(column)} column has no labels")
            numbers[name] = assigned.labels
            if name == "labels":
                scan.words[name] = assigned.words
            schema[name] = Field(name, classes=assigned.classes)
        for name, fields in (("file", self.kept_files), ("keep", self._keep)):
            schema |= {kept.name: scan.field(kept) for kept in fields}
            kinds = [kept._replace(kind=_word(schema[kept.name])) for kept in fields]
            self.settle(**{name: ",".join(map(str, kinds)) or None})
        self.settle_fields(schema, numbers)

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values of an entry, with numbers for texts."""
        values = super()._values(values)
        for kept in self._keep:
            dtype = self.schema[kept.name].dtype
            if dtype and isinstance(values.get(kept.name), str):
                values[kept.name] = typed(dtype, values[kept.name], kept.source)
        return values

    def _require_fields(self) -> None:
        """Refuse fields that share a name, or whose values cannot be in a table."""
        fields = [kept.name for kept in (*self._keep, *self.kept_files)]
        fields += ["labels"] * bool(self._labels) + ["boxes"] * bool(self._boxes)
        twice = [name for name, count in Counter(fields).items() if count > 1]
        if twice:
            raise UsageError(
                f"two fields are called {twice[0]}", remedy="rename one with NAME=COLUMN"
            )
        for kept in self._keep:
            if kept.kind in _IN_FILES:
                raise UsageError(
                    f"{setting('keep', str(kept))}: kind {kept.kind} needs a separate file",
                    remedy=f"use {setting('file')}",
                )

    def _used(self, columns: Sequence[str], path: str) -> list[str]:
        """Return the columns that are used."""
        named = [self._label, self._labels, self._boxes, self._box_labels]
        required = [self._image]
        for column in filter(None, named):
            required += column.classes or [column.source]
        fields = (*self.kept_files, *self._keep)
        required += [kept.source for kept in fields if not kept.optional]
        lacking = [name for name in required if name not in columns]
        if lacking:
            raise UsageError(f"{path} has no column {lacking[0]}; it has {name_list(columns)}")
        used = {*required, *(kept.source for kept in fields)}
        return [name for name in columns if name in used]

    def _column_of(self, name: str) -> str:
        """Return the column of a field."""
        if name in self.numbers:
            return _name(self._labels if name == "labels" else self._boxes)
        (kept,) = (kept for kept in (*self.kept_files, *self._keep) if kept.name == name)
        return f"{'files of ' if kept in self.kept_files else ''}{_name(kept)}"


def _column(text: str | None, option: str, columns: Sequence[str] = ()) -> _Column | None:
    if text is None:
        return None
    if "," in text and text not in columns:
        return _Column(text, None, [name.strip() for name in text.split(",")])
    match = _COLUMN.match(text)
    if match is None:
        raise UsageError(
            f"{setting(option, text)} must be a column, or COLUMN:/PATH for a part of its JSON"
        )
    return _Column(match[1], match[2])


def _ones(row: Mapping[str, Any], classes: Sequence[str]) -> list[int]:
    """Return the positions of columns that are 1."""
    values = [bit_of(row.get(name)) for name in classes]
    if None in values:
        name = classes[values.index(None)]
        raise BadImage(
            f"its {name} is {quoted(row.get(name))}, not 0 or 1",
            remedy=f"keep such columns as fields with {setting('keep')}",
        )
    return [position for position, value in enumerate(values) if value]


def _label_in(row: Mapping[str, Any], column: _Column, text: bool) -> Value:
    """Return the label of a row: of several columns, the position of the only one that is 1."""
    if not column.classes:
        return label_of(cell(row, column, text), _name(column))
    ones = _ones(row, column.classes)
    if len(ones) != 1:
        raise BadImage(
            f"{len(ones)} of its class columns are 1; exactly one must be",
            remedy="to read any number of labels, pass "
            f"{setting('labels', ','.join(column.classes))}",
        )
    return ones[0]


def _labels_in(
    row: Mapping[str, Any], column: _Column, text: bool, separator: str
) -> Sequence[Value]:
    """Return any number of labels of a row."""
    if column.classes:
        return _ones(row, column.classes)
    return labels_of(cell(row, column, text), _name(column), separator)


def _name(column: _Column | Kept | None) -> str:
    if column is None:
        return "no column"
    return column.source if column.pointer is None else f"{column.source}:/{column.pointer}"


def cell(row: Mapping[str, Any], column: _Column | Kept, text: bool) -> Any:
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
            raise BadImage(
                f"it is not UTF-8: {quoted(value)}; set another encoding with {setting('encoding')}"
            ) from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadImage(f"its {where} is not JSON: {quoted(text)}") from error


def _joined(rows: Iterator[Row], image: str) -> Iterator[tuple[int, _Rows | str]]:
    """Yield all rows of each image, at the line of the first one."""
    joined: dict[Any, tuple[int, _Rows]] = {}
    for line, row in rows:
        if isinstance(row, str):
            yield line, row
        else:
            joined.setdefault(row.get(image), (line, []))[1].append(row)
    yield from joined.values()


def _same(values: Iterable[_V], column: _Column | Kept) -> _V:
    """Return the value that all rows of an image share; of one row, its value."""
    first, *others = values
    if any(other != first for other in others):
        raise BadImage(
            f"its rows differ in {_name(column)}",
            remedy=f"read all values with {setting('labels')} or {setting('keep')}",
        )
    return first


def _number(side: object, where: str) -> float:
    try:
        return float(side) if isinstance(side, str) else cast("float", side)
    except ValueError:
        raise BadImage(f"its {where} has {quoted(side)}, not a number") from None


def _list(value: Any, where: str) -> list[Any]:
    if value is None or value == "":
        return []
    value = _json(value, where) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise BadImage(f"its {where} is not a list: {quoted(value)}")
    return value


def _is_there(kept: Kept, value: object) -> bool:
    """Return whether a row has a value; an empty text is one if the field may be a text."""
    if value is None or (value == "" and (kept.optional or not kept.may_be_text)):
        if kept.optional:
            return False
        raise BadImage(f"it has no {_name(kept)}; to allow this, write {kept.source}?")
    return True


def kind_of_cells(kinds: Set[str]) -> str:
    """Return the kind of a column, given what `kinds_in` found in its cells."""
    if ANY_TEXT in kinds:
        return "text"
    if len(kinds) < 2:
        return next(iter(kinds), "text")
    return "float64" if kinds == {"int64", "float64"} else "json"


def kinds_in(value: Any, of_text: bool) -> set[str]:
    """Return the kinds that a cell decides; ``of_text``: all values of the table are texts."""
    return _kinds_of_text(value) if of_text else {_kind_of(value)}


def _kind_of(value: object) -> str:
    """Return the kind of a JSON value."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, float):
        return "float64"
    is_int64 = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return "int64" if is_int64 else "json"


def _kinds_of_text(value: str) -> set[str]:
    """Return the kinds that a text decides: ``007`` is a text, and so are all others then."""
    if not value:
        return set()
    return {"int64" if _INT.match(value) else "float64" if _FLOAT.match(value) else ANY_TEXT}


def typed(kind: str, text: str, where: str) -> Any:
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
    title="Convert image files listed in a CSV, TSV, JSONL or Parquet table.",
    help="""Convert the images that the table SRC lists to a dataset in DST.

    SRC is a .csv, .tsv, .jsonl or .parquet file, or a folder of them; or a .txt file in such a
    format, or a .json file with a list of objects. SRC and --root may lead into a zip archive:
    photos.zip/train.csv. File names are relative to --root and must stay below it. Hugging Face's
    metadata files need no options: file_name is the image, and columns such as mask_file_name are
    files, too. Missing files, repeated rows and rows that cannot be read are reported, and so are
    files below --root that the table does not list. For verify and repair, write SRC@ROOT if the
    root folder is elsewhere.

    \b
    Examples:
      shardkit convert table photos/metadata.csv dataset --to lmdb --dry-run
      shardkit convert table train.csv dataset --to lmdb --root photos --image path --label class
      shardkit convert table boxes.jsonl dataset --to lmdb --root photos --image path \\
        --boxes objects:/bbox:xywh --box-labels objects:/category --keep caption,score:float64
    """,
    options=TableOptions,
    of_files=True,
    reads_zip=True,
    recognize=recognize_table,
    source=Table,
)
