"""Named columns of a source: which one is the image, which the label, and which are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.contracts import SourceOptions
from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field, check_schema
from shardkit.options import option
from shardkit.sources.images import AS_ARRAYS
from shardkit.sources.kept import Kept, parse_keep, value_of
from shardkit.sources.labels import Value, classes_option, label_of
from shardkit.system.text import name_list, quoted

NONE = "none"
_USUAL_IMAGES = ("image", "images", "img", "jpg", "jpeg", "png", "x")
_LABEL = re.compile(
    r"(class_?)?labels?|label_class|class(es|_?names?|_?ids?)?|cls|categor(y|ies)|targets?|"
    r"diagnosis|dx|breed|species|y"
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_MOST_LABEL = 4096
"""Bytes of a label or name."""
_LONGEST = 32
"""Characters of a field's name."""
_LABELS = ("integer", "text", "float")
"""Types of columns of labels."""
_OF_ARRAYS = ("json", "boxes", "keypoints", "mask")
"""Kinds of fields that an array can be."""
PARSED = ("text", "json", "bytes")
"""Types of columns whose bytes can be read as other kinds."""


def usual_label(names: Iterable[str], image: str = "") -> str:
    """Return the column called label, or the only one with a usual name; "" if there is none.

    Words in the name of the column ``image`` do not count: ``train_y`` goes with ``train_x``.
    """
    usual = {name: is_ for name in names if (is_ := _as_label(name, image))}
    called = [name for name, is_ in usual.items() if is_ == "label"]
    return (called or [*usual])[0] if 1 in (len(called), len(usual)) else ""


def _as_label(name: str, image: str) -> str:
    """Return a usual name of labels that a column has, perhaps among words of ``image``."""
    words = [word.lower() for word in _WORD.findall(image)]
    rest_of_name = "_".join(
        word for word in map(str.lower, _WORD.findall(name)) if word not in words
    )
    return next((text for text in (name.lower(), rest_of_name) if _LABEL.fullmatch(text)), "")


_REMEDIES = {
    "text": "; for a table of paths, use `shardkit convert table`",
    "array": "; images must be uint8, but in Python, convert(samples, pixels='keep', ...) stores "
    f"other types. For arrays without images, {AS_ARRAYS}",
}


def one_hot(rows: npt.NDArray[Any], where: str) -> list[Value]:
    """Return the position of the only 1 in each row.

    It raises BadImage if a row has another value than 0, several 1 or none.
    """
    bad = ~(((rows == 0) | (rows == 1)).all(1) & (rows.sum(1) == 1))
    if bad.any():
        raise BadImage(
            f"a row of {where} is {quoted(rows[bad.argmax()].tolist())}, not zeros and a single 1",
            remedy=f"to keep it as an array, pass {setting('keep', where)} and "
            f"{setting('label', 'none')}",
        )
    return [*rows.argmax(1).tolist()]


def lost_labels(
    unused: Iterable[str], image: str, others: Sequence[str] = (), option: str = "label"
) -> str:
    """Return that columns of a usual name, or others, may be labels; "" if there are none."""
    names = [name for name in unused if _as_label(name, image)]
    option = "label" if names else option
    names = names or [",".join(others)] * bool(others)
    ways = ", ".join(setting(option, name) for name in names)
    listed = " or ".join(names)
    none = setting("label", NONE)
    return f"labels may be in {listed}: pass {ways} or {none}" if names else ""


_BITS: dict[object, bool] = {0: False, "0": False, "0.0": False, "false": False}
_BITS |= {1: True, "1": True, "1.0": True, "true": True}


def bit_of(value: object) -> bool | None:
    """Return whether a cell is 1; None if it is neither that nor 0."""
    value = value.strip().lower() if isinstance(value, str) else value
    return _BITS.get(value) if isinstance(value, (str, int, float)) else None


def ones_of(columns: Mapping[str, Sequence[object]]) -> tuple[list[str], set[int]]:
    """Return the columns of 0 and 1, if there are several, and how many are 1 in the rows."""
    bits = {name: [*map(bit_of, cells)] for name, cells in columns.items()}
    bits = {name: cells for name, cells in bits.items() if None not in cells}
    counts = {sum(map(bool, row)) for row in zip(*bits.values(), strict=True)}
    return ([*bits], counts) if len(bits) > 1 else ([], set())


def as_is(data: bytes) -> bytes:
    """Return the bytes of a value that is stored as it is."""
    return data


class Column(NamedTuple):
    """A column: what it holds, and how."""

    name: str
    type: str
    """As the format names it, such as ``ndarray:float16:2,3``."""
    holds: str
    """``image``, ``integer``, ``float``, ``text``, ``json``, ``bytes``, ``array``, or "" if
    nothing that can be stored."""
    decode: Callable[[bytes], Any] = as_is
    """Returns a value: an image as a file, an array as NumPy has it.

    Raises:
        ValueError, IndexError, TypeError, struct.error: If the bytes are not a value.
    """
    field: Field = Field("bytes")
    """The field that stores all its values."""
    size: int | None = None
    """Bytes of each value if samples do not state them."""
    why: str = ""
    """Why it cannot be stored, or what becomes of it."""
    rows: int = 0
    """Its values, if columns may differ in their number."""

    def __str__(self) -> str:
        return f"{self.name} ({self.type})"


def plain_column(
    name: str, type_: str, kind: str, decode: Callable[[bytes], Any] = as_is, **more: Any
) -> Column:
    """Return a column of images, text, JSON or bytes, or of NumPy's name of a type of numbers."""
    if kind in ("image", *PARSED):
        return Column(name, type_, kind, decode, Field(kind), **more)
    holds = "float" if kind.startswith("float") else "integer"
    return Column(name, type_, holds, decode, Field("number", kind), **more)


def label_in(column: Column, value: Any) -> Value:
    """Return the label that a column has for a row; "" if it is missing, BadImage if it is invalid.

    Of an array, it is the position of the only 1.
    """
    if isinstance(value, np.ndarray):
        value = value.item() if value.size == 1 else one_hot(value.reshape(1, -1), column.name)[0]
    if isinstance(value, bytes):
        if len(value) > _MOST_LABEL:
            raise BadImage(
                f"its {column.name} has {len(value):,} bytes, over the limit of {_MOST_LABEL:,}"
            )
        as_text = Kept(column.name, column.name)
        is_json = column.holds == "json"
        value = (
            value_of(as_text, Field("json"), value)
            if is_json
            else value.decode("utf-8", "surrogateescape")
        )
    return label_of(value, column.name)


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(SourceOptions):
    """The options of these sources."""

    image: str | None = option(
        None, help="Column of images.", metavar="NAME", stored="image_field", shown="the only one"
    )
    label: str | None = option(
        None,
        help="Column of labels (integers or text); none: no labels.",
        metavar="NAME",
        stored="label_field",
        shown="label, or the only integer column",
    )
    keep: str | None = option(
        None,
        help="Additional columns to keep, such as weight,caption=info:/caption:text; none: no "
        "columns.",
        metavar="[NAME=]COLUMN[:KIND],...",
        shown="all",
    )
    name: str | None = option(
        None,
        help="Column with image names.",
        metavar="NAME",
        shown="file name and row number",
        stored="image_name",
    )
    classes: str | None = classes_option()


class Columns:
    """The columns of a source that a user chose; ``path`` is for messages.

    Without a choice, the image has a usual name or is the only one, and the label has names of
    classes or a usual name. Columns of images hold one of ``images``. ``eager``: a label may be the
    only column of integers, and all others are kept, unless the user chose.
    """

    def __init__(
        self,
        path: Path | str,
        columns: Iterable[Column],
        options: ColumnOptions,
        *,
        images: Sequence[str] = ("image", "bytes"),
        eager: bool = True,
    ) -> None:
        self._path = path
        self._eager = eager
        self._images = images
        self._columns = {column.name: column for column in columns}
        self.image = self._choose_image(options.image)
        self._require_rows(self._columns[self.image].rows)
        self.label = "" if options.label == NONE else self._choose_label(options.label)
        """"" if there is none."""
        if not (self.label or options.label):
            self._refuse_other_length()
        self.keep = self._kept(options.keep)
        self.schema = {kept.name: self._field(kept) for kept in self.keep}
        self.notes = [] if options.label else self._lost_labels()
        """Columns that may be labels, but are not used."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def column(self, name: str) -> Column:
        """Return a column; one that holds nothing if there is none, such as without labels."""
        return self._columns.get(name, Column(name, "", ""))

    def describe(self, image: str, name: str | None = None) -> dict[str, str]:
        """Return how columns are used, for `Scan.understood`.

        ``image`` is what the column of images holds, ``name`` the column of their names.
        """
        used = {self.image, self.label, name, *(kept.source for kept in self.keep)}
        unused = [str(column) for column in self._columns.values() if column.name not in used]
        return {
            "image": f"{self.image}: {image}",
            "label": self.label or "no column",
            **{
                name: f"{self._columns.get(source, source)}: {self.schema[name]}"
                for name, source, *_ in self.keep
            },
            "unused": ", ".join(unused) or "no column",
        }

    def value(self, kept: Kept, value: Any) -> Any:
        """Return a value as a field stores it: bytes, text, JSON, array; BadImage if invalid."""
        field = self.schema[kept.name]
        if isinstance(value, np.ndarray):
            if field.kind == "image":  # an array would not tell where its channels are
                return Image.fromarray(value)
            return value if field.kind in ("array", "mask") else value.tolist()
        of_json = self.column(kept.source).holds == "json" and kept.pointer is None
        if of_json and isinstance(value, bytes) and field.kind not in ("json", "bytes"):
            kept = kept._replace(pointer="")
        if (
            kept.pointer is not None
            or (isinstance(value, bytes) and field.kind != "bytes")
            or (isinstance(value, str) and field.kind not in ("text", "label"))
        ):
            content = value if isinstance(value, bytes) else _as_text(value).encode()
            return value_of(kept, field, content)
        if field.kind == "array":
            return np.array(value)
        return _as_text(value) if field.kind == "text" else value

    def _require_rows(self, rows: int) -> None:
        """Rule out columns of another length."""
        for name, column in self._columns.items():
            if column.rows != rows:
                why = f"it has {column.rows:,} values for {rows:,} images"
                self._columns[name] = column._replace(holds="", why=why)

    def _refuse_other_length(self) -> None:
        """Refuse labels of another number than the images: they would be lost."""
        rows = self._columns[self.image].rows
        names = [column.name for column in self._columns.values() if column.rows != rows]
        if name := usual_label(names, self.image):
            raise UsageError(
                f"{self._path}: {name} looks like labels: {self._columns[name].why};",
                remedy=f"to convert without labels, pass {setting('label', NONE)}",
            )

    def _lost_labels(self) -> list[str]:
        used = {self.image, self.label, *(kept.source for kept in self.keep)}
        if self.label:
            return []
        unread = [column for column in self._columns.values() if column.name not in used]
        lists = [column.name for column in unread if column.field.kind == "labels"]
        integers = [column.name for column in unread if column.holds == "integer"]
        names = [column.name for column in unread if self._may_be_labels(column)]
        note = lost_labels(names, self.image, integers * (len(integers) == 1))
        notes = [
            f"{name} may contain several labels per image: keep it with {setting('keep', name)}"
            for name in lists
        ]
        return [*notes, note] if note else notes

    @property
    def _listed(self) -> str:
        return name_list(map(str, self._columns.values()))

    def _choose_image(self, name: str | None) -> str:
        files, others = (
            [column.name for column in self._columns.values() if column.holds == holds]
            for holds in (*self._images, None)[:2]
        )
        if name is not None:
            if name not in files + others:
                if name in self._columns:
                    column = self._columns[name]
                    remedy = _REMEDIES.get(column.holds, f"; the columns are {self._listed}")
                    raise UsageError(f"{self._path}: {column} is not an image column{remedy}")
                raise UsageError(
                    f"{self._path} has no image column {quoted(name)}; it has {self._listed}"
                )
            return name
        usual = [name for name in _USUAL_IMAGES if name in files + others]
        names = files or others
        if len(names) > 1 and not usual:
            raise UsageError(
                f"{self._path} has {len(names)} columns that may contain images",
                remedy=f"choose with {setting('image')} from {name_list(names)}",
            )
        if not names:
            kinds = {column.holds for column in self._columns.values()}
            remedy = _REMEDIES["array"] if "array" in kinds else ""
            raise UsageError(f"{self._path} has no image column; it has {self._listed}{remedy}")
        return (usual or names)[0]

    def _choose_label(self, name: str | None) -> str:
        """Return the column of labels; "" if the user named none and there is none."""
        columns = self._columns.values()
        if name is not None:
            column = self._columns.get(name)
            if column is None or not self._may_be_labels(column):
                why = f": {column.why}" if column and column.why else ""
                raise UsageError(
                    f"{self._path} has no column {quoted(name)} of integers or text{why}; it has "
                    f"{self._listed}"
                )
            return name
        named = [column.name for column in columns if column.field.kind == "label"]
        if len(named) == 1:
            return named[0]
        usable = [*filter(self._may_be_labels, columns)]
        if self._eager:  # what is not the label is kept as what it is
            usable = [column for column in usable if column.holds in _LABELS[:2]]
        usual = usual_label(named or [column.name for column in usable], self.image)
        if named and not usual:
            raise UsageError(
                f"{self._path}",
                remedy=f"choose the label with {setting('label')} from {name_list(named)}, or none",
            )
        integers = [column.name for column in columns if column.holds == "integer"]
        return usual or (integers[0] if self._eager and len(integers) == 1 else "")

    def _may_be_labels(self, column: Column) -> bool:
        """Return whether a column holds one value, or several of which one may be 1."""
        is_row = column.holds == "array" and len(column.field.shape or ()) == 1
        return column.name != self.image and (column.holds in _LABELS or is_row)

    def _kept(self, keep: str | None) -> list[Kept]:
        """Return the columns to keep; by default all but image and label."""
        if keep == NONE or (keep is None and not self._eager):
            return []
        if keep is not None:
            kept = parse_keep(keep)
            for column in kept:
                if column.source not in self._columns and not (column.optional and column.kind):
                    raise UsageError(
                        f"{self._path} has no column {quoted(column.source)}; it has {self._listed}"
                    )
            return kept
        others = [name for name in self._columns if name not in (self.image, self.label)]
        names = [field_name(name) for name in others]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"{self._path} has several columns for one field, {twice!r};",
                remedy=f"name one with {setting('keep', f'other={others[names.index(twice)]}')}, "
                f"or store none with {setting('keep', 'none')}",
            )
        return [*map(Kept, names, others)]

    def _field(self, kept: Kept) -> Field:
        column = self._columns.get(kept.source)
        if column is None:
            return kept.field("")
        if not column.holds:
            raise UsageError(
                f"{self._path}: column {quoted(column.name)} ({column.type}) cannot be stored: "
                f"{column.why};",
                remedy=f"list the other columns in {setting('keep')}, or store none with "
                f"{setting('keep', 'none')}",
            )
        if kept.pointer is not None and column.holds not in PARSED:
            raise UsageError(
                f"{setting('keep', str(kept))} selects a part of JSON, but this column is {column}"
            )
        if kept.pointer is None and kept.kind in (None, column.field.kind):
            return column.field
        field = kept.field(column.field.kind)
        others = column.holds in ("integer", "float") and field.kind in ("number", "json")
        others |= column.holds == "image" and column.decode is as_is and field.kind == "mask"
        others |= column.field.kind == "array" and field.kind in _OF_ARRAYS
        if column.holds not in PARSED and not others:
            raise UsageError(
                f"{setting('keep', str(kept))}: column {column} becomes {column.field}"
            )
        return field


def field_name(column: str) -> str:
    """Return a name that a field can have, as near as can be to that of its column."""
    name = re.sub("[^a-z0-9_]", "_", column.lower())[:_LONGEST]
    try:
        check_schema({name: Field("json")})
    except ValueError:
        return f"column_{name}"[:_LONGEST]
    return name


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
