"""The rows of one batch: where their fields are stored, and the random numbers of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import WrongSizeError
from shardkit.dataset.filling import read_stored
from shardkit.dataset.located import LocatedRows
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage, TransformFailed
from shardkit.record import ABSENT, IMAGE, LABEL
from shardkit.sampling.order import BatchDraws
from shardkit.system.scratch import scratch
from shardkit.torch.data.ops import ImageOp, Piece
from shardkit.torch.data.read_context import Context, raised


class BatchRows:
    """The rows of one batch, shared by the readers of its fields."""

    def __init__(self, shards: ShardSet, rows: npt.NDArray[np.int64], context: Context) -> None:
        """Prepare to read fields.

        Args:
            shards: The dataset.
            rows: From `ShardSet.resolve_rows`.
            context: The random numbers.
        """
        self.shards = shards
        self.array = rows
        self.context = context
        self._located: dict[str, LocatedRows] = {}
        self._selected: list[tuple[ImageOp, list[int], list[int], list[Piece]]] = []

    def __len__(self) -> int:
        return len(self.array)

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
        found = self._located.get(name)
        if found is None:
            found = self._located[name] = self.shards.find(self.array, name)
        return found

    def stored(self, name: str) -> list[bytes | None]:
        """Return the stored bytes of a field in each row, None where the row lacks it.

        Raises:
            CorruptRecord: If they changed.
        """
        found = self.located(name)
        values, left = read_stored(found, self.context.mark)
        if left:
            with scratch(found.longest) as buffer:
                for number in left:
                    self.context.note(self.rows[number])
                    lacks = found.fields[number] == ABSENT
                    values[number] = None if lacks else bytes(found.read(number, buffer).data)
        return values

    def labels(self) -> npt.NDArray[np.int64]:
        """Return the label of each row, -1 where there is none; a new array."""
        found = self._located.get(IMAGE)
        return self.shards.labels_of(self.array) if found is None else found.targets()

    def draws(self) -> BatchDraws:
        """Return the random numbers of the samples."""
        return BatchDraws(self.context.key, self.samples)

    def pieces(self, op: ImageOp, found: LocatedRows) -> list[Piece]:
        """Return the piece of each image that ``op`` selects.

        Fields of one size have the same pieces, since they share the row's random numbers.
        """
        for known, widths, heights, pieces in self._selected:
            if known is op and widths == found.widths and heights == found.heights:
                return pieces
        samples, draws = self.samples, self.context.draws
        pieces = op.pieces(found.widths, found.heights, lambda place: draws(samples[place]))
        self._selected.append((op, found.widths, found.heights, pieces))
        return pieces

    def describe(self, number: int) -> str:
        """Return the name of the record at a position, for errors."""
        return describe_row(self.shards, self.rows[number])

    def transformed(
        self, name: str, function: Callable[..., Any] | None, value: Any, number: int
    ) -> Any:
        """Return a value after its transform, if there is one.

        Raises:
            TransformFailed: If the transform raises.
        """
        if function is None or value is None:
            return value
        return self.apply(name, function, (value,), number)

    def apply(
        self, name: str, function: Callable[..., Any], values: Sequence[Any], number: int
    ) -> Any:
        """Return what a transform returns for the values of one field or several.

        Raises:
            TransformFailed: If the transform raises.
        """
        self.context.note(self.rows[number])
        try:
            return self.context.apply(function, values, self.samples[number], name)
        except (Exception, SystemExit) as error:  # a worker must not exit silently
            what = {IMAGE: "transform", LABEL: "target_transform"}.get(name, f"transform of {name}")
            on = f"label {values[0]!r} of " if name == LABEL else ""
            raise TransformFailed(
                f"the {what} failed on {on}{self.describe(number)}: {raised(error)}"
            ) from error

    @contextlib.contextmanager
    def naming_record(self, found: LocatedRows, number: int) -> Iterator[None]:
        """Add the record's name to errors of an image."""
        try:
            yield
        except WrongSizeError as error:
            raise found.corrupt(number, str(error)) from error
        except BadImage as error:
            raise BadImage(f"{self.describe(number)}: {error}") from error


def describe_row(shards: ShardSet, row: int) -> str:
    """Return the name of a record in errors: its key, row and source file."""
    return f"record {shards.keys[row]!r} (row {row}, from {shards.paths[row]!r}) of {shards.place}"
