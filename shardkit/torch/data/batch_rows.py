"""The rows of one batch: where their fields are stored, and the random numbers of each.

A sample may hold neighbors of its row, too: `RowWindows`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.codecs.image import WrongSizeError
from shardkit.dataset.located import LocatedRows
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, TransformFailed
from shardkit.record import ABSENT, IMAGE, LABEL
from shardkit.sampling.order import BatchDraws
from shardkit.system import compiled
from shardkit.system.scratch import scratch
from shardkit.torch.data.collate import Layout, Values
from shardkit.torch.data.ops import Crop, ImageOp
from shardkit.torch.data.read_context import BatchContext, raised


class BatchRows:
    """The rows of one batch, shared by the readers of its fields."""

    def __init__(
        self, shards: ShardSet, rows: npt.NDArray[np.int64], context: BatchContext
    ) -> None:
        """Prepare to read fields of ``rows``, which are from `ShardSet.resolve_rows`."""
        self.shards = shards
        self.array = rows
        self.count = len(rows)
        self.context = context
        self._located: dict[str, LocatedRows] = {}
        self._selected: list[tuple[ImageOp, list[int], list[int], list[Crop]]] = []

    def of_rows(self, rows: npt.NDArray[np.int64], samples: list[int]) -> BatchRows:
        """Return other rows in the same context, given the sample number of each."""
        other = BatchRows(self.shards, rows, self.context)
        other.samples = samples
        return other

    def with_context(self, context: BatchContext) -> BatchRows:
        """Return the same rows with other random numbers."""
        other = BatchRows(self.shards, self.array, context)
        other._located = self._located
        return other

    @cached_property
    def rows(self) -> list[int]:
        """The rows as a list, which Python iterates faster than an array."""
        rows: list[int] = self.array.tolist()
        return rows

    @cached_property
    def samples(self) -> list[int]:
        """The sample number of each row, which determines its random numbers."""
        return self.context.samples(self.rows)

    def located(self, name: str) -> LocatedRows:
        """Return where a field of bytes is stored in each row; see `ShardSet.find`."""
        located = self._located.get(name)
        if located is None:
            located = self._located[name] = self.shards.find(self.array, name)
        return located

    def stored(self, name: str) -> list[bytes | None]:
        """Return the stored bytes of a field in each row, None where the row lacks it."""
        located = self.located(name)
        values: list[bytes | None] = [None] * len(located)
        unread: Sequence[int] = range(len(located))
        if located.survey is not None:  # else an entry is unusual
            values, unread = compiled.read_stored(located, self.context.mark)
        if unread:
            with scratch(located.longest) as buffer:
                for number in unread:
                    self.context.note(self.rows[number])
                    lacks = located.fields[number] == ABSENT
                    values[number] = None if lacks else bytes(located.read(number, buffer).data)
        return values

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label of each row, -1 where there is none; a new array."""
        located = self._located.get(IMAGE)
        return self.shards.labels_of(self.array) if located is None else located.targets()

    def draws(self) -> BatchDraws:
        """Return the random numbers of the samples."""
        return BatchDraws(self.context.key, self.samples)

    def crops(self, op: ImageOp, located: LocatedRows) -> list[Crop]:
        """Return the crop of each image that ``op`` selects.

        Fields of one size have the same crops, since they share the row's random numbers.
        """
        for earlier_op, widths, heights, crops in self._selected:
            if earlier_op is op and widths == located.widths and heights == located.heights:
                return crops
        samples = self.samples
        draws = self.context.draws
        crops = op.crops(located.widths, located.heights, lambda n: draws(samples[n]))
        self._selected.append((op, located.widths, located.heights, crops))
        return crops

    def describe(self, number: int) -> str:
        """Return the name of the record at a position, for errors."""
        return describe_row(self.shards, self.rows[number])

    def transformed(
        self, name: str, function: Callable[..., Any] | None, value: Any, number: int
    ) -> Any:
        """Return a value after its transform, if there is one."""
        if function is None or value is None:
            return value
        return self.apply(name, function, (value,), number)

    def apply(
        self, name: str, function: Callable[..., Any], values: Sequence[Any], number: int
    ) -> Any:
        """Return the result of a transform of one field or several.

        Raises TransformFailed if the transform raises or returns None.
        """
        self.context.note(self.rows[number])
        try:
            result = self.context.apply(function, values, self.samples[number], name)
        except (Exception, SystemExit) as error:  # a worker must not exit silently
            raise_interruption(error)
            on = f"label {values[0]!r} of " if name == LABEL else ""
            raise TransformFailed(
                f"the {_transform_of(name)} failed on {on}{self.describe(number)}: {raised(error)}"
            ) from error
        if result is None:
            raise TransformFailed(
                f"the {_transform_of(name)} returned None for {self.describe(number)}",
                remedy="end it with `return`. To leave out samples, use dataset.select(rows)",
            )
        return result

    @contextlib.contextmanager
    def naming_record(self, located: LocatedRows, number: int) -> Iterator[None]:
        """Add the record's name to errors of an image."""
        try:
            yield
        except WrongSizeError as error:
            raise located.corrupt(number, str(error)) from error
        except BadImage as error:
            raise BadImage(
                f"{self.describe(number)}: {error.problem}", remedy=error.remedy
            ) from error


def _transform_of(name: str) -> str:
    """Return the name of the transform of a field, for errors."""
    return {IMAGE: "transform", LABEL: "target_transform"}.get(name, f"transform of {name}")


def describe_row(shards: ShardSet, row: int) -> str:
    """Return the name of a record in errors: its key, row and source file."""
    return (
        f"record {shards.keys[row]!r} (row {row}, from {shards.paths[row]!r}) of {shards.location}"
    )


class RowWindows:
    """States which neighboring rows a sample holds; the base of `shardkit.Windows`."""

    fields: Mapping[str, Iterable[int]]
    """Fields with windows."""

    def names(self, fields: Sequence[str] | None) -> Sequence[str]:
        """Return the fields to read: the user's, which must include all that have windows."""
        raise NotImplementedError

    def layout(self, fields: Layout) -> Layout:
        """Return the fields of samples, given the fields that are read."""
        raise NotImplementedError

    def reader(self, shards: ShardSet) -> WindowReader:
        """Return a reader for a dataset."""
        raise NotImplementedError


class WindowReader(Protocol):
    """Reads the windows of a batch."""

    fields: Mapping[str, tuple[int, ...]]
    """Offsets of the rows of each field with windows."""

    def frames(self, name: str) -> int:
        """Return the number of rows in a window of a field; 1 without windows."""

    def padding(self, name: str, batch: BatchRows) -> Values:
        """Return a mask of the padded rows of each window."""

    def read(
        self, name: str, batch: BatchRows, read: Callable[[BatchRows], Values], *, drawn: bool
    ) -> Values:
        """Return the windows of a field, from the values that ``read`` returns without transforms.

        ``drawn`` states whether values depend on random numbers, which all rows of a window share.
        """
