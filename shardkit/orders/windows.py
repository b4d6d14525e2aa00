"""`Windows`: each sample holds neighboring frames of its episode, such as the last three images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError, setting
from shardkit.orders.neighbors import Neighbors
from shardkit.system.text import name_list
from shardkit.torch.data.batch_rows import BatchRows, RowWindows, describe_row
from shardkit.torch.data.collate import Layout, Values
from shardkit.torch.data.read_context import new_block

_MOST_FRAMES = 10_000
"""Maximum frames of a window."""

_FARTHEST = 1_000_000_000
"""Maximum distance of a frame, in frames; larger numbers could overflow when rows are counted."""

_COPIED = 1 / 8
"""Frames of several windows, as a fraction of all, from which on they are read once and copied."""

_KINDS = ("number", "text", "label")
"""Kinds of fields that name or order frames."""


@dataclass(frozen=True)
class Windows(RowWindows):
    """Selects the neighboring rows that a sample contains, field by field.

    ``Windows(by="episode", order="frame", fields={"image": (-2, -1, 0), "action": range(16)})``
    gives each sample three images, of shape (3, C, H, W), and 16 actions. Samples are dicts;
    ``image_is_pad`` and ``action_is_pad``, bool of shape (3,) and (16,), are True where the episode
    has no such frame, so the window repeats the first or last frame of the episode.

    Frames are counted in order, ignoring gaps. Rows of an episode need not be adjacent. A selection
    of rows (``dataset.select``) selects samples, whose windows still reach all rows.

    Raises:
        UsageError: If fields or offsets are invalid.
    """

    by: str
    """Field that names the episode of a row: a number, a text or a label."""
    order: str
    """Field that orders the frames of an episode."""
    fields: Mapping[str, Iterable[int]]
    """Offsets of the frames of each field, from the sample's own frame."""
    _: KW_ONLY
    strict: bool = False
    """Whether a gap in ``order``, which must then contain integers, ends a window like the end of
    an episode."""

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping) or not self.fields:
            raise UsageError(
                f"Windows(fields={self.fields!r}) must be {{field: offsets, ...}}, such as "
                '{"image": (-1, 0)}'
            )
        frames: dict[str, tuple[int, ...]] = {}
        for name, offsets in self.fields.items():
            try:
                frames[name] = tuple(offsets)
            except TypeError:
                frames[name] = ()
            numbers = all(isinstance(n, int) and abs(n) <= _FARTHEST for n in frames[name])
            if not numbers or not 1 <= len(frames[name]) <= _MOST_FRAMES:
                raise UsageError(
                    f"Windows(fields={{{name!r}: {str(offsets)[:40]}}}): offsets must be "
                    f"1 to {_MOST_FRAMES:,} integers of at most {_FARTHEST:,}, such as "
                    "(-2, -1, 0) or range(16)"
                )
        object.__setattr__(self, "fields", frames)

    def names(self, fields: Sequence[str] | None) -> Sequence[str]:
        """Return the fields to read: ``fields``, or by default the fields with windows."""
        if fields is None:
            return tuple(self.fields)
        for name in self.fields:
            if name not in fields:
                raise UsageError(
                    f"windows= has {name!r}, and fields= is {fields}", remedy="add it there"
                )
        return fields

    def layout(self, fields: Layout) -> Layout:
        """Return the fields of samples, given the fields that are read."""
        masks = tuple(f"{name}_is_pad" for name in self.fields)
        return Layout((*fields.names, *masks), as_dict=True, listed=fields.listed)

    def reader(self, shards: ShardSet) -> _Reader:
        """Return a reader for a dataset."""
        return _Reader(self, shards)


class _Reader:
    """Reads the windows of a batch; see `WindowReader`."""

    def __init__(self, windows: Windows, shards: ShardSet) -> None:
        """Find the neighbors of all rows."""
        for option in ("by", "order"):
            name = getattr(windows, option)
            field = shards.schema.get(name)
            if field is None or field.kind not in _KINDS:
                named = [n for n, f in shards.schema.items() if f.kind in _KINDS]
                raise UsageError(
                    f"Windows({setting(option, name)}): {shards.location} has no such field with "
                    "numbers, text or labels;",
                    remedy=f"choose from {name_list(named) or 'none'}",
                )
        self.fields: Mapping[str, tuple[int, ...]] = {
            name: tuple(offsets) for name, offsets in windows.fields.items()
        }
        self._neighbors = Neighbors(
            shards.column(windows.by),
            shards.column(windows.order),
            lambda row: describe_row(shards, row),
            strict=windows.strict,
        )

    def frames(self, name: str) -> int:
        """Return the number of frames of a field; 1 without a window."""
        return len(self.fields.get(name, (0,)))

    def padding(self, name: str, batch: BatchRows) -> Values:
        """Return which frames of each window are padded: bool of shape (N, frames)."""
        padded = torch.from_numpy(self._neighbors.of(batch.array, self.fields[name])[1])
        return Values(padded, padded)

    def read(
        self, name: str, batch: BatchRows, read: Callable[[BatchRows], Values], *, drawn: bool
    ) -> Values:
        """Return the windows of a field. A frame of several windows is read once unless drawn.

        The compiled module decodes it once, also if it is drawn.
        """
        rows = self._neighbors.of(batch.array, self.fields[name])[0]
        flat = rows.reshape(-1)
        positions = np.arange(rows.size)
        if drawn:
            samples = [sample for sample in batch.samples for _ in range(rows.shape[1])]
            values = read(batch.of_rows(flat, samples))
        else:
            unique, inverse = np.unique(flat, return_inverse=True)
            if len(flat) - len(unique) > len(flat) * _COPIED:
                flat = unique
                positions = inverse.reshape(-1)
            values = read(batch.of_rows(flat, flat.tolist()))
        return _grouped(values, positions, rows.shape)


def _grouped(values: Values, positions: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Values:
    """Return the values at positions, in windows of shape (N, frames)."""
    block = values.block
    if isinstance(block, torch.Tensor):
        if len(positions) > len(block):
            block = _gathered(block, torch.from_numpy(positions))
        block = block.reshape(*shape, *block.shape[1:])
        return Values(block, block)
    if block is not None:
        block = block[positions].reshape(*shape, *block.shape[1:])
        return Values(block, block)
    listed = [[values.values[n] for n in row] for row in positions.reshape(shape).tolist()]
    return Values([_stacked(window) for window in listed])


def _gathered(block: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the values at positions, in the memory of the batch."""
    is_image = block.dim() == 4 and not block.is_contiguous()
    if is_image:  # of shape (N, C, H, W), in memory (N, H, W, C)
        block = block.permute(0, 2, 3, 1)
    shape = (len(positions), *block.shape[1:])
    out = new_block(shape if len(shape) > 1 else (*shape, 1), shared=True, dtype=block.dtype)
    torch.index_select(block, 0, positions, out=out.view(shape))
    return out.permute(0, 3, 1, 2) if is_image else out.view(shape)


def _stacked(window: list[Any]) -> Any:
    """Return frames as one tensor if they are tensors of one shape, else as a list."""
    first = window[0]
    if isinstance(first, torch.Tensor) and all(
        isinstance(frame, torch.Tensor) and frame.shape == first.shape for frame in window
    ):
        return torch.stack(window)
    return window
