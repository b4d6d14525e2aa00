"""Labels of sources: from the numbers or names that a source states to positions in the classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.errors import BadImage, UsageError
from shardkit.options import option
from shardkit.record import NO_LABEL
from shardkit.system.files import read_small
from shardkit.system.text import quoted

CLASSES_HELP = "Class names, one per line: of label 0, 1, ..., or in the order of labels."

MAX_LABEL = (1 << 20) - 1
"""Maximum number that is a label itself; larger ones are most likely identifiers."""

Value = int | str
"""The label that a source states: a number or a name."""


class LabelValues:
    """The distinct labels of a source, to number them while listing its images.

    Labels that are all decimal numbers are positions: the class of 3 is called ``3``, or has the
    name in line 4 of a file of names. All others are names of classes, sorted.
    """

    def __init__(self) -> None:
        self._codes: dict[Value, int] = {}

    def code(self, value: Value) -> int:
        """Return the code of a label, in the order of first use, for `Labels.of`."""
        return self._codes.setdefault(value, len(self._codes))

    def texts(self) -> list[str]:
        """Return the labels as texts, in the order of their codes."""
        return [str(value) for value in self._codes]

    def assign(
        self, classes: Sequence[str] | None, names: Sequence[str] | bool | None = None
    ) -> Labels:
        """Return the classes and the label of each code.

        Args:
            classes: Class names of an earlier conversion.
            names: Class names that the user gave: the name of each number, or all names. True means
                that the user gave ``classes`` then.

        Raises:
            UsageError: If a label is out of range, or ``names`` lack one.
        """
        values = list(self._codes)
        if not values:
            return Labels(tuple(classes) if classes else None, ())
        if isinstance(names, bool):
            names = classes
        numbers = _numbers(values)
        if numbers is None:
            texts = [str(value) for value in values]
            ordered = list(names) if names is not None else sorted(set(texts))
        else:
            texts = _named(numbers, names)
            in_order = [str(number) for number in range(max(numbers) + 1)]
            ordered = list(names) if names is not None else in_order
        lacking = sorted(set(texts).difference(ordered))
        if lacking:
            first = ", ".join(map(repr, lacking[:5])) + (" ..." if len(lacking) > 5 else "")
            raise UsageError(f"the file of classes= lacks {len(lacking)} classes: {first}")
        if classes is not None:
            there = set(classes)
            ordered = [*classes, *(name for name in ordered if name not in there)]
        position = {name: label for label, name in enumerate(ordered)}
        return Labels(tuple(ordered), tuple(position[text] for text in texts))

    def describe(self) -> str:
        """Return a short description: numbers from 0 to 9, or 3 names."""
        values = list(self._codes)
        numbers = _numbers(values)
        if not values:
            return "none"
        if numbers is None:
            return f"{len(values)} names"
        return f"{len(values)} numbers from {min(numbers)} to {max(numbers)}"


class Labels(NamedTuple):
    """Classes in the order of their labels, and the label of each code of `LabelValues`."""

    classes: tuple[str, ...] | None
    labels: tuple[int, ...]

    def of(self, code: int) -> int:
        """Return the label of a code; that of `NO_LABEL` is itself."""
        return NO_LABEL if code == NO_LABEL else self.labels[code]


def _numbers(values: Iterable[Value]) -> list[int] | None:
    """Return all labels as numbers, or None if some are names."""
    numbers = []
    for value in values:
        if isinstance(value, str):
            if not (value.isascii() and value.isdecimal() and str(int(value[:20])) == value):
                return None
            value = int(value)  # noqa: PLW2901
        numbers.append(value)
    return numbers


def _named(numbers: Sequence[int], names: Sequence[str] | None) -> list[str]:
    low = min(numbers)
    high = max(numbers)
    if low < 0:
        raise UsageError(f"the label {low} is negative; label_offset= adds a number to all labels")
    if names is not None and high >= len(names):
        raise UsageError(
            f"the label {high} has no name: classes= gives {len(names)}, for 0 to {len(names) - 1}"
        )
    if high > MAX_LABEL:
        raise UsageError(f"the label {high} is over {MAX_LABEL}; is it an identifier?")
    return [names[number] if names is not None else str(number) for number in numbers]


def checked_label(value: object, where: str) -> Value:
    """Return a label that a source states at ``where``.

    Raises:
        BadImage: If it is neither an integer nor a text.
    """
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise BadImage(f"its label at {where} is {quoted(value)}, neither an integer nor a text")
    return value


def classes_option(help: str = CLASSES_HELP, *, stored: str = "class_names") -> Any:  # noqa: A002
    """Return the option of a file of class names; descriptions only state that there was one."""
    return option(None, help=help, metavar="FILE", stored=stored, store=bool)


def read_classes(path: str | bool | None) -> tuple[str, ...] | bool | None:
    """Return the class names in a text file, one in each line.

    Args:
        path: The file; None for none. True, from a description, is returned as it is.

    Raises:
        UsageError: If it cannot be read, or names a class twice.
    """
    if path is None or isinstance(path, bool):
        return path
    try:
        content = read_small(Path(path).resolve())
        lines = content.decode("utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UsageError(
            f"classes={str(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    names = [line.rstrip("\r") for line in lines if line.strip()]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise UsageError(f"classes={str(path)!r} lists {len(twice)} classes twice: {twice[0]!r}")
    if not names:
        raise UsageError(f"classes={str(path)!r} lists no class")
    return tuple(names)
