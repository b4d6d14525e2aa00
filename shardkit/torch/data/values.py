"""Read arrays, bytes and small values of a batch: all fields that are not images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.kinds.field import BFLOAT16, Field
from shardkit.record import ABSENT
from shardkit.system import compiled
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import frame_of
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import new_block


def read_apart(rows: BatchRows, name: str, field: Field) -> Values:
    """Return values with bytes of their own; in one block if they have one shape and all exist.

    Arrays are tensors. Types that PyTorch lacks, such as texts and times, stay NumPy arrays.
    """
    located = rows.located(name)
    if field.is_uniform and (located.survey is not None or ABSENT not in located.fields):
        block = new_block((rows.count, field.bytes), shared=rows.count > 1)
        slots = block.numpy()
        for number in compiled.fill_values(located, slots, rows.context.mark):
            rows.context.note(located.rows[number])
            if located.lengths[number] != field.bytes:
                raise located.corrupt(number, f"{name!r} does not have the shape {field.shape}")
            located.read(number, slots[number].data)
        arrays = _shaped(block, field)
        return Values(arrays, arrays)
    values: list[Any] = []
    for number, data in enumerate(rows.stored(name)):
        try:
            value = None if data is None else field.type.load(field, data)
        except ValueError as error:
            raise located.corrupt(number, f"{name!r} is damaged: {error}") from error
        values.append(_as_tensor(value, field) if isinstance(value, np.ndarray) else value)
    return Values(values)


def read_column(rows: BatchRows, name: str, op: ImageOp | None, leading: str | None) -> Values:
    """Return the values of a small field, where the operation moves them.

    ``op`` crops the images of the field ``leading``, which the values follow, if any.
    """
    column = rows.shards.values(name, rows.array)
    kind = column.field.type
    field = column.field
    present = column.present
    lacks = present is not None and not present.all()
    stack = kind.stack(field, column.values, column.ends)
    if stack is not None and present is not None and lacks:
        filled = kind.fill_missing(stack, present)
        stack = filled or stack
        lacks = filled is None
    if stack is not None:
        array = torch.from_numpy(stack.array)
        samples: Any = array if stack.samples is None else stack.samples
        if not lacks:
            return Values(samples, array)
        return Values([samples[n] if column.has(n) else None for n in range(column.rows)])
    located = rows.located(leading) if kind.follows and op and leading is not None else None
    crops = rows.crops(op, located) if op is not None and located is not None else []
    values: list[Any] = []
    for number in range(rows.count):
        value = column.value(number)
        frame = None
        if located is not None and located.fields[number] != ABSENT:
            frame = frame_of(crops[number], located.widths[number], located.heights[number])
        if value is not None and kind.follows:
            value = torch.from_numpy(np.array(kind.sample(field, value, frame)))
        values.append(value)
    return Values(values)


def _shaped(block: torch.Tensor, field: Field) -> Any:
    """Return bytes of shape (N, bytes) as N arrays; as a tensor if PyTorch has the type."""
    shape = len(block), *(field.shape or ())
    values = block.numpy().view(field.values).reshape(shape)
    typed = _as_tensor(values, field)
    # Not `typed` itself: PyTorch knows pinned memory, and copies in progress from it, by the
    # storage, and that of `typed` is NumPy's.
    return block.view(typed.dtype).view(shape) if isinstance(typed, torch.Tensor) else values


def _as_tensor(values: npt.NDArray[Any], field: Field) -> Any:
    """Return an array as a tensor in the same memory, or unchanged if PyTorch lacks its type."""
    if field.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values) if values.dtype.kind in "biufc" else values
