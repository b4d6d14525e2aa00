"""Named columns of a source: which one is the image, which the label, and which are kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import SourceOptions
from shardkit.errors import UsageError, setting
from shardkit.kinds.field import Field, check_schema
from shardkit.options import option
from shardkit.sources.images import AS_ARRAYS
from shardkit.sources.kept import Kept, parse_keep
from shardkit.sources.labels import classes_option
from shardkit.system.text import name_list, quoted

NONE = "none"
_USUAL_IMAGES = ("image", "images", "img", "jpg", "jpeg", "png", "x")
_USUAL_LABELS = ("label", "labels", "class", "cls", "target", "targets", "y")
_LABEL = re.compile(
    r"(class_?)?labels?|class(es|_?names?|_?ids?)?|cls|categor(y|ies)|targets?|diagnosis|dx|breed|"
    r"species|y",
    re.IGNORECASE,
)
_LONGEST = 32
"""Characters of a field's name."""
_LABELS = ("integer", "text", "float")
"""What columns of labels hold."""
PARSED = ("text", "json", "bytes")
"""What columns hold whose bytes can be read as other kinds."""


def usual_label(names: Iterable[str]) -> str:
    """Return the column called label, or the only one with a usual name; "" if there is none."""
    usual = [name for name in names if _LABEL.fullmatch(name)]
    called = [name for name in usual if name.lower() == "label"]
    return (called or usual)[0] if 1 in (len(called), len(usual)) else ""


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

    def __str__(self) -> str:
        return f"{self.name} ({self.type})"


@dataclass(frozen=True, kw_only=True)
class ColumnOptions(SourceOptions):
    """The options of these sources."""

    image: str | None = option(
        None, help="Column of images.", metavar="NAME", stored="image_field", shown="the only one"
    )
    label: str | None = option(
        None,
        help="Column of labels, integers or text; none: no labels.",
        metavar="NAME",
        stored="label_field",
        shown="label, or the only integers",
    )
    keep: str | None = option(
        None,
        help="More columns to keep, such as weight,caption=info:/caption:text; none: no column.",
        metavar="[NAME=]COLUMN[:KIND],...",
        shown="all",
    )
    classes: str | None = classes_option()


class Columns:
    """What a user chose of the columns of a source.

    Args:
        path: The source, for messages.
        columns: Its columns.
        options: The choice. Without, the image has a usual name or is the only one, and the label
            has names of classes or a usual name.
        images: What columns of images may hold.
        eager: Whether a label may be the only column of integers, and all others are kept, unless
            the user chose.

    Raises:
        UsageError: If a column is missing, or cannot be what was chosen.
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
        self.label = "" if options.label == NONE else self._choose_label(options.label)
        """"" if there is none."""
        self.keep = self._kept(options.keep)
        self.schema = {kept.name: self._field(kept) for kept in self.keep}

    def describe(self, image: str, name: str | None = None) -> dict[str, str]:
        """Return how columns are used, for `Scan.understood`.

        Args:
            image: What the column of images holds.
            name: The column of images' names.
        """
        used = {self.image, self.label, name, *(kept.source for kept in self.keep)}
        unused = [str(column) for column in self._columns.values() if column.name not in used]
        return {
            "image": f"{self.image}: {image}",
            "label": self.label or "no column",
            **{
                kept.name: f"{self._columns[kept.source]}: {self.schema[kept.name]}"
                for kept in self.keep
            },
            "unused": ", ".join(unused) or "no column",
        }

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
                is_text = name in self._columns and self._columns[name].holds == "text"
                remedy = "; for a table of paths, use `shardkit convert table`" if is_text else ""
                raise UsageError(
                    f"{self._path} has no column {quoted(name)} of images; it has {self._listed}"
                    f"{remedy}"
                )
            return name
        usual = [known for known in _USUAL_IMAGES if known in files + others]
        names = files or others
        if len(names) > 1 and not usual:
            raise UsageError(
                f"{self._path} has {len(names)} columns that may be images",
                remedy=f"choose with {setting('image')} from {name_list(names)}",
            )
        if not names:
            raise UsageError(
                f"{self._path} has no column of images; it has {self._listed}; for arrays without "
                f"images, {AS_ARRAYS}"
            )
        return (usual or names)[0]

    def _choose_label(self, name: str | None) -> str:
        """Return the column of labels; "" if the user named none and there is none."""
        columns = self._columns.values()
        if name is not None:
            if name not in self._columns or self._columns[name].holds not in _LABELS:
                raise UsageError(
                    f"{self._path} has no column {quoted(name)} of integers or text; it has "
                    f"{self._listed}"
                )
            return name
        named = [column.name for column in columns if column.field.kind == "label"]
        if len(named) == 1:
            return named[0]
        usable = named or [column.name for column in columns if column.holds in _LABELS[:2]]
        usual = next((known for known in _USUAL_LABELS if known in usable), "")
        if named and not usual:
            raise UsageError(
                f"{self._path}",
                remedy=f"choose the label with {setting('label')} from {name_list(named)}, or none",
            )
        integers = [column.name for column in columns if column.holds == "integer"]
        return usual or (integers[0] if self._eager and len(integers) == 1 else "")

    def _kept(self, keep: str | None) -> list[Kept]:
        """Return the columns to keep; by default all but image and label."""
        if keep == NONE or (keep is None and not self._eager):
            return []
        if keep is not None:
            kept = parse_keep(keep)
            for one in kept:
                if one.source not in self._columns:
                    raise UsageError(
                        f"{self._path} has no column {quoted(one.source)}; it has {self._listed}"
                    )
            return kept
        others = [name for name in self._columns if name not in (self.image, self.label)]
        names = [_field_name(name) for name in others]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"{self._path} has several columns for a field {twice!r};",
                remedy="give them names with "
                f"{setting('keep', f'other={others[names.index(twice)]}')}, or leave all out "
                f"with {setting('keep', 'none')}",
            )
        return [Kept(*pair, None, None, False) for pair in zip(names, others, strict=True)]

    def _field(self, kept: Kept) -> Field:
        column = self._columns[kept.source]
        if not column.holds:
            raise UsageError(
                f"{self._path}: the column {quoted(column.name)} ({column.type}) cannot be "
                f"stored: {column.why};",
                remedy=f"name the others with {setting('keep')}, or leave all out with "
                f"{setting('keep', 'none')}",
            )
        if kept.pointer is not None and column.holds not in PARSED:
            raise UsageError(f"{setting('keep', str(kept))}: only JSON has parts, not {column}")
        if kept.pointer is None and kept.kind in (None, column.field.kind):
            return column.field
        field = kept.field(column.field.kind)
        others = column.holds in ("integer", "float") and field.kind in ("number", "json")
        others |= column.holds == "image" and column.decode is as_is and field.kind == "mask"
        others |= column.holds == "array" and field.kind in ("json", "boxes", "keypoints")
        if column.holds not in PARSED and not others:
            raise UsageError(
                f"{setting('keep', str(kept))}: the column {column} becomes {column.field}"
            )
        return field


def _field_name(column: str) -> str:
    """Return a name that a field can have, as near as can be to that of its column."""
    name = re.sub("[^a-z0-9_]", "_", column.lower())[:_LONGEST]
    try:
        check_schema({name: Field("json")})
    except ValueError:
        return f"column_{name}"[:_LONGEST]
    return name
