"""Single records: find one by row, key or class, and describe it with its facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.columns import COLUMN_KINDS
from shardkit.dataset.facts import BROKEN
from shardkit.dataset.selection import KEY_MARK
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import UsageError
from shardkit.record import ABSENT, IMAGE, LABEL, NO_LABEL, STORED_APART, Field
from shardkit.reporting.facts import measure_rows
from shardkit.system.text import quoted


def find_row(shards: ShardSet, text: str) -> int:
    """Return the row that ``text`` names: its number (from the end if negative), key or path.

    ``key:`` before a key tells it from a number.

    Raises:
        UsageError: If there is none.
    """
    if text.removeprefix("-").isdigit():
        try:
            return int(shards.resolve_rows([int(text)])[0])
        except (IndexError, OverflowError) as error:
            raise UsageError(f"{error}; `{KEY_MARK}{text}` names a key") from None
    key = text.removeprefix(KEY_MARK)
    for names in (shards.keys, shards.paths):
        for row, each in enumerate(names):
            if each == key:
                return row
    raise UsageError(
        f"{shards.directory} has no record {quoted(key)}; name a row from 0 to {len(shards) - 1}, "
        "or a key as `shardkit report` and `shardkit verify` print it"
    )


def rows_of_class(shards: ShardSet, name: str) -> npt.NDArray[np.int64]:
    """Return the rows of a class.

    Raises:
        UsageError: If there is no such class.
    """
    classes = shards.manifest.classes or ()
    if name not in classes:
        raise UsageError(
            f"{shards.directory} has no class {quoted(name)}; `shardkit info` lists its classes"
        )
    return np.flatnonzero(shards.labels == classes.index(name))


def describe_record(shards: ShardSet, row: int) -> dict[str, Any]:
    """Return everything about a record as JSON values: where it is, its fields, and its facts.

    Raises:
        CorruptDataset: If it is damaged.
    """
    label = int(shards.labels[row]) if LABEL in shards.schema else NO_LABEL
    classes = shards.manifest.classes or ()
    described: dict[str, Any] = {
        "row": row,
        "key": shards.keys[row],
        "path": shards.paths[row],
        "class": classes[label] if 0 <= label < len(classes) else None,
        "fields": {},
    }
    at = np.array([row])
    for name, field in shards.schema.items():
        if field.kind in STORED_APART:
            located = shards.find(at, name)
            if located.fields[0] != ABSENT:
                stored = {"kind": located.fields[0], "bytes": located.lengths[0]}
                if field.kind in ("image", "mask"):
                    stored |= {"width": located.widths[0], "height": located.heights[0]}
                described["fields"][name] = stored
        elif field.kind in COLUMN_KINDS and name != LABEL:
            described["fields"][name] = _plain(shards.values(name, at).value(0), field)
    if IMAGE in described["fields"]:
        described["facts"] = _facts(shards, at)
    return described


def _facts(shards: ShardSet, at: npt.NDArray[np.int64]) -> dict[str, Any]:
    fact = measure_rows(shards, at)[0]
    if fact["state"] == BROKEN:
        return {"broken": True}
    rounded = {
        name: round(float(fact[name]), 3) for name in ("brightness", "contrast", "sharpness")
    }
    return {
        "mode": fact["mode"].decode("ascii"),
        "orientation": int(fact["orientation"]),
        "frames": int(fact["frames"]),
        "icc": bool(fact["icc"]),
        "quality": int(fact["quality"]) or None,
        "hash": f"{int(fact['hash']):016x}",
        "mean": [round(float(each), 2) for each in fact["mean"]],
        "std": [round(float(each), 2) for each in fact["std"]],
        **rounded,
    }


def _plain(value: Any, field: Field) -> Any:
    """Return a value of a column as JSON allows it, with class names for labels."""
    names = field.classes or ()
    if isinstance(value, tuple):
        boxes, labels = (each.tolist() for each in value)
        return [[*box, names[label]] for box, label in zip(boxes, labels, strict=True)]
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if field.kind == "labels":
        return value and [names[label] for label in value]
    return names[value] if field.kind == "label" and value is not None else value
