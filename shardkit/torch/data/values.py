"""Read arrays, bytes and small values of a batch: all fields that are not images."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkit.codecs.geometry import move_boxes, move_points
from shardkit.dataset.columns import Column
from shardkit.dataset.filling import fill_values
from shardkit.record import ABSENT, BFLOAT16, NO_LABEL, Field
from shardkit.system.npy import read_npy
from shardkit.system.scratch import scratch
from shardkit.torch.data.batch_rows import BatchRows
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import frame_of
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.read_context import new_block

LISTED_KINDS = ("text", "json", "boxes", "keypoints", "bytes")
"""Kinds of fields of which a batch has a list; so has it of arrays of no common shape."""


def read_array(rows: BatchRows, name: str, field: Field) -> Values:
    """Return arrays as tensors: in one block if they have one shape and no row lacks it.

    Types that PyTorch lacks, such as texts and times, stay NumPy arrays.

    Raises:
        CorruptRecord: If the bytes of an array changed.
    """
    found = rows.located(name)
    if field.is_uniform and (found.survey is not None or ABSENT not in found.fields):
        block = new_block((len(rows), field.bytes), shared=len(rows) > 1)
        slots = block.numpy()
        for number in fill_values(found, slots, rows.context.mark):
            rows.context.note(found.rows[number])
            if found.lengths[number] != field.bytes:
                raise found.corrupt(number, f"{name!r} does not have the shape {field.shape}")
            found.read(number, slots[number].data)
        whole = _shaped(block, field)
        return Values(whole, whole)
    with scratch(found.longest) as buffer:
        return Values([_array(rows, name, field, n, buffer) for n in range(len(rows))])


def read_bytes(rows: BatchRows, name: str) -> Values:
    """Return the bytes of each row."""
    return Values(rows.stored(name))


def read_column(rows: BatchRows, name: str) -> Values:
    """Return the values of a small field that needs no other: all kinds but boxes and keypoints."""
    column = rows.shards.values(name, rows.array)
    kind, present = column.field.kind, column.present
    if kind == "labels":
        return _multi_hot(column)
    if kind not in ("number", "label"):
        return Values([column.value(number) for number in range(len(rows))])
    values = column.values
    if kind == "label":
        labels = values.astype(np.int64)
        if present is not None:
            labels[~present] = NO_LABEL
        return Values(labels.tolist(), torch.from_numpy(labels))
    if present is not None and not present.all():
        return Values([v if has else None for v, has in zip(values, present, strict=True)])
    return Values(values, torch.from_numpy(np.array(values)))


def read_coordinates(rows: BatchRows, name: str, op: ImageOp | None, leading: str | None) -> Values:
    """Return the boxes or keypoints of each row, where the operation moves them.

    Boxes are float64 of shape (N, 4), or (N, 5) with their labels; keypoints of shape (N, 3), or
    (objects, points, 3) with names.

    Args:
        rows: The batch.
        name: The boxes or keypoints.
        op: The operation that crops the images of the rows, if any.
        leading: The field of those images.
    """
    column = rows.shards.values(name, rows.array)
    found = rows.located(leading) if op is not None and leading is not None else None
    pieces = rows.pieces(op, found) if op is not None and found is not None else []
    values: list[torch.Tensor | None] = []
    for number in range(len(rows)):
        value = column.value(number)
        places, labels = value if isinstance(value, tuple) else (value, None)
        if places is not None and found is not None and found.fields[number] != ABSENT:
            frame = frame_of(pieces[number], found.widths[number], found.heights[number])
            if column.field.kind == "keypoints":
                places = move_points(places, frame, column.field.classes)
            else:
                places, kept = move_boxes(places, frame)
                labels = None if labels is None else labels[kept]
        joined = places if labels is None else np.column_stack([places, labels])
        values.append(None if joined is None else torch.from_numpy(np.array(joined)))
    return Values(values)


def _multi_hot(column: Column) -> Values:
    """Return labels as float32 of shape (classes,) for each row: 1 for each class that it has."""
    hot = torch.zeros(column.rows, len(column.field.classes or ()))
    for number in range(column.rows):
        hot[number, torch.from_numpy(column.values[column.span(number)].astype(np.int64))] = 1
    if column.present is None or column.present.all():
        return Values(hot, hot)
    return Values([hot[n] if column.has(n) else None for n in range(column.rows)])


def _array(rows: BatchRows, name: str, field: Field, number: int, buffer: memoryview) -> Any:
    found = rows.located(name)
    if found.fields[number] == ABSENT:
        return None
    rows.context.note(found.rows[number])
    data = found.read(number, buffer).data
    if field.is_uniform:
        return _shaped(torch.frombuffer(bytearray(data), dtype=torch.uint8)[None], field)[0]
    try:
        return _as_tensor(read_npy(data), field)
    except ValueError as error:
        raise found.corrupt(number, f"{name!r} is damaged: {error}") from error


def _shaped(block: torch.Tensor, field: Field) -> Any:
    """Return bytes of shape (N, bytes) as N arrays; as a tensor if PyTorch has the type."""
    values = block.numpy().view(field.values).reshape(len(block), *(field.shape or ()))
    if field.dtype == BFLOAT16:
        return block.view(torch.bfloat16).view(values.shape)
    return _as_tensor(values, field)


def _as_tensor(values: npt.NDArray[Any], field: Field) -> Any:
    """Return an array as a tensor in the same memory, or unchanged if PyTorch lacks its type."""
    if field.dtype == BFLOAT16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values) if values.dtype.kind in "biufc" else values
