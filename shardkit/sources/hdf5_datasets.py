"""The datasets of HDF5 files, as columns."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence

from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.sources import hdf5_reader
from shardkit.sources.columns import Column
from shardkit.sources.images import image_axes
from shardkit.sources.inputs import stamp_of
from shardkit.sources.kept import kind_of_bytes
from shardkit.sources.library_process import call
from shardkit.sources.recognize import split_in
from shardkit.system.text import name_list

SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".mat")


def datasets_of(path: str) -> dict[str, tuple[list[int], str]]:
    """Return shape and type of each dataset of a file, by name; BadImage if it cannot be read."""
    return call(hdf5_reader.datasets, os.path.abspath(path), stamp_of(path))


def columns_of(
    path: str, datasets: Mapping[str, tuple[Sequence[int], str]], split: str = ""
) -> list[Column]:
    """Return the datasets of a file as columns, without those of other splits."""
    columns = [_column(path, name, *dataset) for name, dataset in datasets.items()]
    counts = {column.rows for column in columns if column.holds == "image"}
    for number, column in enumerate(columns):
        shape, _ = datasets[column.name]
        if len(shape) == 2 and shape[0] == 1 not in counts and shape[1] in counts:  # of MATLAB
            holds = "float" if "float" in column.type else "integer"
            columns[number] = column._replace(holds=holds, rows=shape[1])
    return [column for column in columns if not split or split_in(column.name) in ("", split)]


def _column(path: str, name: str, shape: Sequence[int], kind: str) -> Column:
    """Return a dataset as a column."""
    sides = "x".join(map(str, shape))
    column = Column(name, f"{kind} {sides}", "", rows=(*shape, 0)[0])
    if kind in hdf5_reader.OTHERS or not shape or (kind == "bytes" and shape[1:]):
        return column._replace(why="its values are not stored as rows of plain values")
    if kind == "bytes":
        first = b" "
        if shape[0]:
            first = call(hdf5_reader.value, os.path.abspath(path), stamp_of(path), name, 0)
        kind = kind_of_bytes(first[1:])
        return column._replace(type=f"{kind} {sides}", holds=kind, field=Field(kind))
    field = Field("number", kind)
    if shape[1:]:
        field = Field("array", kind, None if 0 in shape else tuple(shape[1:]))
    holds = "image" if _is_image(shape[1:], kind) else "array"
    if math.prod(shape[1:]) == 1:
        holds = "float" if kind.startswith("float") else "integer"
    return column._replace(holds=holds, field=field)


def _is_image(shape: Sequence[int], kind: str) -> bool:
    try:
        return bool(image_axes(kind, shape))
    except (BadImage, TypeError):
        return False


def require_no_image_each(path: str, columns: Iterable[Column]) -> None:
    """Refuse datasets of one name in many groups, which may be one image each."""
    names = [column.name for column in columns if column.holds == "image"]
    if len(names) > 1 and len(ends := {name.rpartition("/")[2] for name in names}) == 1:
        raise UsageError(
            f"{path} has {len(names)} datasets that may contain images",
            remedy=f"choose with {setting('image')} from {name_list(names)}; if each is one image, "
            f"pass {setting('image', f'*/{ends.pop()}')}",
        )
