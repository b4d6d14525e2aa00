"""Neighbors of a row: the rows before and after it in its episode, from two columns alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError
from shardkit.system.text import amount

Column = npt.NDArray[np.generic]
"""One value for each row. Missing values are masked, or None in an array of objects."""

_NAMED = 3
"""Maximum rows to name in an error."""


class Neighbors:
    """The rows of each episode in their order.

    Rows of an episode need not be adjacent. It holds 8 bytes for each row (16 from 2**31 rows on)
    and 8 for each run of neighbors; creating it takes several times as much for a moment.
    """

    def __init__(
        self,
        episodes: Column,
        order: Column,
        describe: Callable[[int], str],
        *,
        strict: bool = False,
    ) -> None:
        """Sort the rows by episode and ``order``, both numbers or texts.

        ``describe`` returns the name of a row, for errors. With ``strict``, a gap in ``order``,
        which then holds integers, ends a run of neighbors, as the end of an episode does. Raises
        UsageError if a row lacks a value, or two rows of an episode have one ``order``.
        """
        for name, column in (("episode", episodes), ("order", order)):
            _require_all(name, _missing(column), describe)
        values = np.ma.getdata(order)
        if strict and values.dtype.kind not in "iu":
            raise UsageError("strict=True needs integers in the order")
        codes = _codes(episodes)
        ranks = _codes(order)
        rows = np.lexsort((ranks, codes))
        same = codes[rows[1:]] == codes[rows[:-1]]
        repeated = np.flatnonzero(same & (ranks[rows[1:]] == ranks[rows[:-1]]))
        if len(repeated):
            first, second = (describe(int(rows[repeated[0] + step])) for step in (0, 1))
            raise UsageError(
                f"{first} and {second} have the same episode and "
                f"order{_more(len(repeated) - 1, 'pair')}",
                remedy="choose a field that numbers the frames",
            )
        if strict:  # unsigned differences of ascending values cannot overflow
            ordered = values[rows].astype(np.uint64)
            same &= ordered[1:] - ordered[:-1] == 1
        kind = np.int32 if len(rows) < 2**31 else np.int64
        self._rows = rows.astype(kind)
        self._positions = np.empty(len(rows), kind)
        self._positions[rows] = np.arange(len(rows), dtype=kind)
        starts = np.flatnonzero(~same) + 1
        self._bounds = np.concatenate([[0], starts, [len(rows)]]).astype(np.int64)
        """Position of the first row of each run of neighbors, and the number of rows."""

    def of(
        self, rows: npt.NDArray[np.int64], offsets: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the window of each of B rows, and whether each of its frames is padded.

        ``offsets`` are T frames from the row, such as ``(-2, -1, 0)``. Both results have the shape
        (B, T), int64 and bool. Where the episode has no such frame, its edge frame is repeated, and
        padded is True.
        """
        positions = self._positions[rows].astype(np.int64)
        runs = np.searchsorted(self._bounds, positions, side="right") - 1
        wanted = positions[:, None] + np.asarray(offsets, np.int64)
        first = self._bounds[runs][:, None]
        last = self._bounds[runs + 1][:, None] - 1
        inside = np.clip(wanted, first, last)
        return self._rows[inside].astype(np.int64), inside != wanted


def _missing(column: Column) -> npt.NDArray[np.bool_]:
    """Return whether each row lacks the value."""
    missing = np.ma.getmaskarray(column).copy()
    values = np.ma.getdata(column)
    if values.dtype == object:
        missing |= np.array([value is None for value in values], np.bool_)
    elif values.dtype.kind == "f":
        missing |= np.isnan(values)
    return missing


def _require_all(name: str, missing: npt.NDArray[np.bool_], describe: Callable[[int], str]) -> None:
    rows = np.flatnonzero(missing)
    if len(rows):
        named = ", ".join(describe(int(row)) for row in rows[:_NAMED])
        raise UsageError(
            f"no {name} in {named}{_more(len(rows) - _NAMED, 'row')}",
            remedy="leave out such rows when converting, or choose another field",
        )


def _codes(column: Column) -> npt.NDArray[np.generic]:
    """Return numbers in the order of the values; one for each row."""
    values = np.ma.getdata(column)
    if values.dtype != object:
        return values
    # An array of fixed-width texts would make each as large as the longest.
    texts = values.tolist()
    numbers = {text: number for number, text in enumerate(sorted(set(texts)))}
    return np.array([numbers[text] for text in texts], np.int64)


def _more(count: int, noun: str) -> str:
    return f", and {amount(count, f'more {noun}')}" if count > 0 else ""
