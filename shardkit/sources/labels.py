"""Labels of sources: from the numbers or names that a source states to positions in the classes."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.errors import BadImage, UsageError, setting
from shardkit.options import option
from shardkit.record import NO_LABEL
from shardkit.sources.folders import LocalFolder
from shardkit.system.files import read_small
from shardkit.system.text import amount, quoted

CLASSES_HELP = (
    "File with one class name per line, for labels 0, 1, ... or in label order; or a folder of "
    "class folders."
)

MAX_LABEL = (1 << 20) - 1
"""Maximum number that is a label itself; larger ones are most likely identifiers."""

Value = int | str
"""The label that a source states: a number or a name; "" if it is missing."""

_POSITION = re.compile(r"(0|[1-9][0-9]{0,19})\Z")
_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]{0,19}))(?:\.0*)?\Z")
"""pandas writes 3 as 3.0 if another value of the column is missing."""
_PADDED = re.compile(r"0[0-9]+\Z")
_FRACTION = re.compile(r"[+-]?[0-9]*(\.[0-9]+|(\.[0-9]*)?[eE][+-]?[0-9]+)\Z")
_LIST = re.compile(r"\[\s*['\"0-9\[\]-]|\(\s*['\"]")
"""The start of a list of texts or numbers, as JSON, Python and NumPy write it."""
_ITEM = re.compile(
    r"""\s*(?:("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([0-9.-]+|nan|None))\s*(?:,|(?<=\s)|\Z)\s*"""
)
"""A text or number in a list, in which NumPy writes no commas."""
_MISSING = ("", "nan", "null", "<na>", "-1")
"""How pandas, SQL, JSON and PyTorch's users write a missing label, in lower case."""
_SHOWN = 5
"""Odd labels that a message shows."""


class LabelValues:
    """The distinct labels of a source, to number them while listing its images.

    Empty texts, NaN, null and -1 are missing labels. If all others are integers, also as ``3.0``,
    they are positions: the class of 3 is called ``3``, or has the name in line 4 of a file of
    names. If none is an integer, they are names of classes, sorted. A file that lists them makes
    any labels names.
    """

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}
        self._counts = array("q")
        """Images of each code."""
        self._are_names = False

    def __len__(self) -> int:
        return len(self._codes)

    def code(self, value: Value) -> int:
        """Return the code of a label, in the order of first use, for `Labels.of`."""
        code = self._codes.setdefault(str(value), len(self._codes))
        if code == len(self._counts):
            self._counts.append(0)
        self._counts[code] += 1
        return code

    def code_of_name(self, name: str) -> int:
        """Return the code of a name, such as a folder's: never missing, and fine among numbers."""
        self._are_names = True
        return self.code(name)

    def texts(self) -> list[str]:
        """Return the labels that are not missing as texts, in the order of their codes."""
        return [str(value) for value in self._read() if value is not None]

    def assign(
        self, classes: Sequence[str] | None, names: Sequence[str] | bool | None = None
    ) -> Labels:
        """Return the classes and the label of each code.

        ``classes`` are those of an earlier conversion. ``names`` are those that the user gave: the
        name of each number, or all names. True means that the user gave ``classes`` then.
        """
        if isinstance(names, bool):
            names = classes
        values = self._read(names or ())
        numbers = sorted({value for value in values if isinstance(value, int)})
        texts = sorted({value for value in values if isinstance(value, str)})
        lost = f", {count:,} missing" if (count := self._images(values, [None])) else ""
        if not numbers and not texts:
            labels = (NO_LABEL,) * len(values)
            return Labels(tuple(classes) if classes else None, labels, f"none{lost}")
        name_of: dict[Value | None, str] = {text: text for text in texts}
        if numbers:
            name_of |= zip(numbers, _named(numbers, names), strict=True)
        ordered = list(names) if names is not None else texts or [*map(str, range(numbers[-1] + 1))]
        _require_names(name_of.values(), ordered)
        if names is None:
            _require_distinct([*(classes or ()), *texts])
        if classes is not None:
            there = set(classes)
            ordered = [*classes, *(name for name in ordered if name not in there)]
        position = {name: label for label, name in enumerate(ordered)}
        labels = tuple(NO_LABEL if v is None else position[name_of[v]] for v in values)
        words = amount(len(texts), "name")
        if numbers:
            words = f"{amount(len(numbers), 'integer')} from {numbers[0]} to {numbers[-1]}"
        if texts or names is not None:
            first = min(label for label in labels if label != NO_LABEL)
            words += f", first {ordered[first]}={first}"
        return Labels(tuple(ordered), labels, words + lost)

    def _read(self, names: Sequence[str] = ()) -> list[Value | None]:
        """Return the integer or name of each code, all of one kind, or None if it is missing."""
        if self._are_names:
            are_positions = all(map(_POSITION.match, self._codes))
            return [int(text) if are_positions else text for text in self._codes]
        values = [_read_one(text) for text in self._codes]
        texts = {value for value in values if isinstance(value, str)}
        fractions = {text for text in texts if _FRACTION.match(text)}
        numbers = {value for value in values if isinstance(value, int)} | fractions
        missing = {text for text in self._codes if _read_one(text) is None}
        listed = {text for text in missing if text in names or _plain(text) in names}
        if listed or (names and texts) or (texts and all(map(_PADDED.match, texts))):
            plain = {text: text if text in names else _plain(text) for text in self._codes}
            return [plain[text] if text not in missing - listed else None for text in self._codes]
        if fractions and fractions == texts:
            raise UsageError(
                f"the labels are numbers, but not integers: {self._listed(values, texts)}",
                remedy=f"keep them as a field with {setting('keep')}, {_OR_NAMES}",
            )
        texts -= fractions
        if texts and numbers:
            are_names = self._images(values, texts) > self._images(values, numbers)
            odd = self._listed(values, numbers if are_names else texts)
            raise UsageError(
                f"the labels are {'names' if are_names else 'numbers'}, except {odd}",
                remedy=f"correct these labels or leave them empty, {_OR_NAMES}",
            )
        minus = {text for text in missing if _plain(text) == "-1"}
        if not names and numbers == {1} and minus:
            count = sum(self._counts[self._codes[text]] for text in minus)
            raise UsageError(
                f"the labels are 1 ({amount(self._images(values, numbers), 'image')}) and -1 "
                f"({amount(count, 'image')}), which may be a class or mean a missing label",
                remedy=f"choose with a file for {setting('classes')}: with the lines -1 and 1, "
                "both are classes; with the lines 0 and 1, -1 means a missing label",
            )
        return values

    def _images(self, values: Iterable[Value | None], chosen: Collection[Value | None]) -> int:
        """Return the number of images whose label is one of ``chosen``."""
        return sum(n for n, value in zip(self._counts, values, strict=True) if value in chosen)

    def _listed(self, values: Sequence[Value | None], chosen: Collection[Value | None]) -> str:
        """Return labels for a message, with the number of their images."""
        shown = [text for text, value in zip(self._codes, values, strict=True) if value in chosen]
        more = " ..." if len(shown) > _SHOWN else ""
        count = amount(self._images(values, chosen), "image")
        return f"{', '.join(map(quoted, shown[:_SHOWN]))}{more} ({count})"


_OR_NAMES = f"or, to treat all labels as names, list them in a file for {setting('classes')}"


class Labels(NamedTuple):
    """Classes in the order of their labels, and the label of each code of `LabelValues`."""

    classes: tuple[str, ...] | None
    labels: tuple[int, ...]
    words: str
    """How they were read, for the user to check: ``3 integers from 0 to 9, 1 missing``."""

    def of(self, code: int) -> int:
        """Return the label of a code; that of `NO_LABEL` is itself."""
        return NO_LABEL if code == NO_LABEL else self.labels[code]


def _plain(text: str) -> str:
    """Return an integer without the fraction that pandas adds; other texts as they are."""
    match = _INTEGER.match(text)
    return match[1] if match else text


def _read_one(text: str) -> Value | None:
    if text.lower() in _MISSING:
        return None
    match = _INTEGER.match(text)
    number = int(match[1]) if match else None
    return text if number is None else number if number != -1 else None


def _named(numbers: Sequence[int], names: Sequence[str] | None) -> list[str]:
    """Return the name of each of some numbers in ascending order."""
    low = numbers[0]
    high = numbers[-1]
    if low < 0:
        raise UsageError(
            f"the label {low} is negative: only -1 means a missing label;",
            remedy=f"keep the numbers as a field with {setting('keep')}, without labels",
        )
    if names is not None and high >= len(names):
        raise UsageError(
            f"the label {high} has no name",
            remedy=f"{setting('classes')} lists {len(names)} names, for 0 to {len(names) - 1}",
        )
    if high > MAX_LABEL:
        raise UsageError(f"the label {high} is over {MAX_LABEL}; is it an ID?")
    return [names[number] if names is not None else str(number) for number in numbers]


def _require_names(texts: Iterable[str], names: Sequence[str]) -> None:
    lacking = sorted(set(texts).difference(names))
    if lacking:
        first = ", ".join(map(repr, lacking[:5])) + (" ..." if len(lacking) > 5 else "")
        raise UsageError(
            f"the {setting('classes')} file lacks {amount(len(lacking), 'class')}: {first}"
        )


def _require_distinct(texts: Iterable[str]) -> None:
    """Refuse names that look the same: they would be two classes."""
    seen: dict[str, str] = {}
    for text in texts:
        other = seen.setdefault(unicodedata.normalize("NFKC", text).casefold(), text)
        if other != text:
            raise UsageError(
                f"the labels {other!a} and {text!a} differ only in case or Unicode form",
                remedy=f"correct one, {_OR_NAMES}",
            )


def label_of(value: object, where: str) -> Value:
    """Return a label that a source states at ``where``; "" if it is missing.

    It raises BadImage if it is neither a number nor a text, or a list.
    """
    if isinstance(value, str):
        value = value.strip()
        if not _LIST.match(value):
            return value
        raise BadImage(
            f"its label at {where} is a list, {quoted(value)}; for several labels, use "
            f"{setting('labels')}"
        )
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return str(value)
    if not isinstance(value, int):
        raise BadImage(f"its label at {where} is {quoted(value)}, neither an integer nor text")
    return int(value)


def checked_label(value: object, where: str) -> Value:
    """Return a label of several, such as a box's; BadImage if missing, or as for `label_of`."""
    label = label_of(value, where)
    if label == "" or isinstance(value, bool):
        raise BadImage(f"its label at {where} is {quoted(value)}, neither an integer nor text")
    return label


def labels_of(value: object, where: str, separator: str) -> list[Value]:
    """Return the labels in a cell: a list, also as JSON, Python or NumPy writes it, or a text.

    It raises BadImage if it is not a list that can be read, or as for `label_of`.
    """
    if isinstance(value, str):
        text = value.strip()
        is_list = text.startswith("[") or _LIST.match(text)
        value = _items(text, where) if is_list else text.split(separator)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    labels = [label_of(item, where) for item in listed]
    return [label for label in labels if _read_one(str(label)) is not None]


def _items(text: str, where: str) -> list[Any]:
    """Return the items of a list of texts or numbers, separated by commas or spaces."""
    try:
        items = json.loads(text)
        return items if isinstance(items, list) else [items]
    except (ValueError, RecursionError):
        pass
    end = len(text) - 1
    position = 1
    values = []
    while match := _ITEM.match(text, position, end):
        position = match.end()
        values.append(ast.literal_eval(match[1]) if match[1] else match[2])
    if position < end:
        raise BadImage(f"its {where} is not a list: {quoted(text)}")
    return values


def classes_option(
    help: str = CLASSES_HELP,  # noqa: A002
    *,
    stored: str = "class_names",
    **details: Any,
) -> Any:
    """Return the option of a file of class names; descriptions only state that there was one."""
    return option(None, help=help, metavar="FILE", stored=stored, store=bool, **details)


def read_classes(path: str | os.PathLike[str] | bool | None) -> tuple[str, ...] | bool | None:
    """Return the class names in a text file, one in each line, or those of folders, sorted.

    True, from a description, is returned as it is.
    """
    if path is None or isinstance(path, bool):
        return path
    try:
        if os.path.isdir(path):
            return tuple(LocalFolder(Path(path)).folders())
        content = read_small(Path(path).resolve())
        lines = content.decode("utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UsageError(
            f"{setting('classes', str(path))} cannot be read: {error.strerror or error}"
        ) from error
    names = [line.rstrip("\r") for line in lines if line.strip()]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UsageError(
            f"{setting('classes', str(path))} lists {len(twice)} classes twice: {twice[0]!r}"
        )
    if not names:
        raise UsageError(f"{setting('classes', str(path))} lists no class")
    return tuple(names)
