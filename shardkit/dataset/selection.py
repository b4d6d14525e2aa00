"""Choose rows of a dataset: by an expression over its columns, or by a list in a file."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError, setting
from shardkit.kinds.field import Field
from shardkit.system.files import read_small
from shardkit.system.text import name_list, quoted

Mask = npt.NDArray[np.bool_]
"""Whether each row is chosen: shape (N,)."""

_LONGEST = 2000
"""Maximum characters of an expression; a far longer one could exhaust Python's parser."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, group: value in group,
    ast.NotIn: lambda value, group: value not in group,
}

LIST_HEAD = "# rows of the dataset with the content digest "
"""Start of a list of rows: the digest follows, so that the list fits no other dataset."""

KEY_MARK = "key:"
"""Before a key, tells it from a row number."""


def matching(shards: ShardSet, expression: str) -> Mask:
    """Return the rows for which an expression is true: ``label in ("cat", "dog") and width > 99``.

    It consists of comparisons of a column with literals, ``in``, ``and``, ``or``, ``not`` and
    parentheses. Columns are the fields of the kinds label (the class name), labels (class names,
    as in ``"cat" in tags``), number and text, and also ``key``, ``path``, ``width`` and ``height``.
    A comparison is false where a row lacks the value. Nothing is evaluated as Python.
    """
    try:
        if len(expression) > _LONGEST:
            raise ValueError(f"it has over {_LONGEST} characters")
        tree = ast.parse(expression.strip(), mode="eval")
        return _Expression(shards).of(tree.body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(
            f"--where {quoted(expression)}: {reason}",
            remedy='Compare columns with values, as in --where \'label in ("cat", "dog") and '
            "width >= 64'",
        ) from error


def column_values(shards: ShardSet, name: str) -> Sequence[Any]:
    """Return the value of each row in a column of `matching`; None where it is missing."""
    try:
        return _Expression(shards).values(name)
    except ValueError as error:
        raise UsageError(f"{shards.directory}: {error}") from error


class _Expression:
    """Finds the rows for which an expression, or an operand of it, is true."""

    def __init__(self, shards: ShardSet) -> None:
        self._shards = shards
        self._known: dict[str, Sequence[Any]] = {}

    def of(self, node: ast.expr) -> Mask:
        if isinstance(node, ast.BoolOp):
            join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            joined: Mask = join.reduce([self.of(value) for value in node.values])
            return joined
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self.of(node.operand)
        if not isinstance(node, ast.Compare):
            raise ValueError(f"{ast.unparse(node)} is not a comparison")
        operands = [node.left, *node.comparators]
        pairs = zip(operands, node.ops, operands[1:], strict=False)
        chain: Mask = np.logical_and.reduce([self._compare(*pair) for pair in pairs])
        return chain

    def _compare(self, left: ast.expr, operation: ast.cmpop, right: ast.expr) -> Mask:
        compare = _COMPARISONS.get(type(operation))
        if compare is None or isinstance(left, ast.Name) == isinstance(right, ast.Name):
            text = ast.unparse(ast.Compare(left, [operation], [right]))
            raise ValueError(f"{text} does not compare a column with a value (put texts in quotes)")
        within = isinstance(operation, (ast.In, ast.NotIn))
        if isinstance(left, ast.Name):
            value = ast.literal_eval(right)
            group = value if within else (value,)
            if isinstance(group, str) or not isinstance(group, Collection):
                raise ValueError(f"{group!r} is not a list of values")
            self._require_values(left.id, group)
            return self._rows_where(left.id, lambda item: compare(item, value))
        value = ast.literal_eval(left)
        self._require_values(right.id, (value,))  # type: ignore[attr-defined]
        if within and not self._field(right.id).type.is_variable:  # type: ignore[attr-defined]
            raise ValueError(f"{right.id} has a single value in each row")  # type: ignore[attr-defined]
        return self._rows_where(right.id, lambda item: compare(value, item))  # type: ignore[attr-defined]

    def _rows_where(self, name: str, is_true: Callable[[Any], Any]) -> Mask:
        values = self.values(name)
        return np.array([value is not None and bool(is_true(value)) for value in values], np.bool_)

    def _field(self, name: str) -> Field:
        """Return the field of a column."""
        schema = {**self._shards.schema, **_PROPERTIES}
        columns = [name for name, field in schema.items() if field.type.compares]
        if name not in columns:
            raise ValueError(f"{quoted(name)} is not one of its columns: {name_list(columns)}")
        return schema[name]

    def values(self, name: str) -> Sequence[Any]:
        """Return the value of each row, None where it is missing; class names for labels."""
        if name not in self._known:
            self._known[name] = self._read(name, self._field(name))
        return self._known[name]

    def _read(self, name: str, field: Field) -> Sequence[Any]:
        shards = self._shards
        if name in ("key", "path"):
            return list(shards.keys if name == "key" else shards.paths)
        if name in ("width", "height"):
            return list(shards.rows[name].tolist())
        values = list(shards.column(name).tolist())
        if not field.type.holds_classes:
            return values
        return [None if value is None else field.type.as_json(field, value) for value in values]

    def _require_values(self, name: str, values: Collection[Any]) -> None:
        """Refuse values that no row can have: another type, or an unknown class."""
        field = self._field(name)
        for value in values:
            if not isinstance(value, field.type.compares):
                kinds = "class names" if field.type.holds_classes else f"{field.kind}s"
                raise ValueError(f"{value!r} has the wrong type for {name}: its values are {kinds}")
        if field.type.holds_classes:
            classes = field.classes or ()
            unknown = sorted(set(values).difference(classes))
            if unknown:
                names = ", ".join(map(quoted, classes[:10])) + (" ..." if len(classes) > 10 else "")
                raise ValueError(f"{name} has no class {quoted(unknown[0])}; it has {names}")


_PROPERTIES = {
    **dict.fromkeys(("key", "path"), Field("text")),
    **dict.fromkeys(("width", "height"), Field("number", "int64")),
}
"""The columns that every dataset has, as fields."""


class Listed(NamedTuple):
    """The content of a file that lists rows or keys."""

    where: str
    """The option and the file, for errors."""
    names: list[str]
    """The lines: decimal numbers of rows, or keys."""
    are_rows: bool
    """Whether all lines are row numbers."""
    digest: str | None
    """The content digest of the only dataset whose rows the file may list; None for any."""

    def require_known(self, existing: Container[str], location: object) -> None:
        """Refuse names that do not exist."""
        unknown = [name for name in self.names if name not in existing]
        if unknown:
            examples = ", ".join(map(quoted, unknown[:3])) + " ..." * (len(unknown) > 3)
            raise UsageError(
                f"{self.where}: no match in {location} for {len(unknown):,} of {len(self.names):,} "
                f"lines: {examples}"
            )

    def require_digest(self, digest: object) -> None:
        """Refuse a list of the rows of another dataset."""
        if self.digest not in (None, digest):
            raise UsageError(
                f"{self.where} lists rows of another dataset, with the content digest "
                f"{str(self.digest)[:64]}"
            )


def read_list(path: str | Path, option: str) -> Listed:
    """Read a text file that lists row numbers or keys, one per line.

    Lines that start with ``#`` are comments. If all lines are decimal numbers without leading
    zeros, they are rows. ``key:`` before a key tells it from a number or a comment.
    """
    where = setting(option, str(path))
    try:
        text = read_small(Path(path).resolve()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"{where} cannot be read: {reason}") from error
    lines = text.splitlines()
    digests = {line.removeprefix(LIST_HEAD) for line in lines if line.startswith(LIST_HEAD)}
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not names:
        raise UsageError(f"{where} lists nothing")
    are_rows = all(
        name.isascii() and name.isdecimal() and str(int(name[:19])) == name for name in names
    )
    names = [name.removeprefix(KEY_MARK) for name in names]
    return Listed(where, names, are_rows, min(digests, default=None))


def listed(shards: ShardSet, path: str | Path) -> Mask:
    """Return the rows that a text file lists; see `read_list`.

    Raises UsageError if the file cannot be read or is empty, names an unknown row or key, names one
    twice, or is a list of the rows of another dataset.
    """
    lines = read_list(path, "rows")
    lines.require_digest(shards.manifest.content_digest)
    names = lines.names
    if lines.are_rows:
        rows = {name: int(name) for name in names if int(name) < len(shards)}
    else:
        keys = set(names)
        rows = {key: row for row, key in enumerate(shards.keys) if key in keys}
    lines.require_known(rows, shards.directory)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"{lines.where} lists some names twice, such as {quoted(twice[0])}")
    chosen = np.zeros(len(shards), np.bool_)
    chosen[[rows[name] for name in names]] = True
    return chosen


def select(
    shards: ShardSet,
    *,
    where: str | None = None,
    rows: str | Path | None = None,
) -> Mask:
    """Return the rows that all options choose: see `matching` and `listed`."""
    chosen = np.ones(len(shards), np.bool_)
    if where is not None:
        chosen &= matching(shards, where)
    if rows is not None:
        chosen &= listed(shards, rows)
    return chosen
