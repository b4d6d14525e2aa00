"""Single records: find one by row, key or class, and describe it with its facts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.dataset.selection import KEY_MARK
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import CorruptDataset, UsageError
from shardkit.record import ABSENT, IMAGE, LABEL, NO_LABEL
from shardkit.reporting.facts import measure_rows
from shardkit.reporting.fields import sampled_rows
from shardkit.reporting.image_facts import BROKEN
from shardkit.system.text import quoted

_AT_ONCE = 1 << 16
"""Rows whose labels are read at a time."""


def find_row(shards: ShardSet, text: str) -> int:
    """Return the row that ``text`` names: its number (from the end if negative), key or path.

    ``key:`` before a key tells it from a number. UsageError if there is none.
    """
    if text.removeprefix("-").isdigit():
        try:
            return int(shards.resolve_rows([int(text)])[0])
        except (IndexError, OverflowError) as error:
            raise UsageError(f"{error}; to select a key, write `{KEY_MARK}{text}`") from None
    key = text.removeprefix(KEY_MARK)
    for names in (shards.keys, shards.paths):
        for row, name in enumerate(names):
            if name == key:
                return row
    raise UsageError(
        f"{shards.directory} has no record {quoted(key)};",
        remedy=f"pass a row from 0 to {len(shards) - 1}, or a key as `shardkit report` and "
        "`shardkit verify` print it",
    )


def rows_of_class(shards: ShardSet, name: str, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Return at most ``most`` rows of a class, ascending, drawn with ``seed``.

    This reads the index up to the last of them, a block at a time: a manifest may state any number
    of rows. CorruptDataset if the class has fewer rows than the manifest states.
    """
    classes = shards.manifest.classes or ()
    if name not in classes:
        raise UsageError(
            f"{shards.directory} has no class {quoted(name)}; `shardkit info` lists its classes"
        )
    number = classes.index(name)
    count = (shards.manifest.class_counts or ())[number]
    drawn = sampled_rows(count, most, seed)
    rows = np.empty_like(drawn)
    seen = 0
    for start in range(0, len(shards) if count else 0, _AT_ONCE):
        block = np.arange(start, min(start + _AT_ONCE, len(shards)))
        members = block[shards.labels_of(block) == number]
        wanted = (drawn >= seen) & (drawn < seen + len(members))
        rows[wanted] = members[drawn[wanted] - seen]
        seen += len(members)
        if seen > drawn[-1]:
            return rows
    if not count:
        return rows
    raise CorruptDataset(
        f"{shards.directory}: class {quoted(name)} has {seen:,} rows in the index but {count:,} "
        "in the manifest;",
        remedy="to rebuild the index from the shards, run `shardkit index`",
    )


def describe_record(shards: ShardSet, row: int) -> dict[str, Any]:
    """Return everything about a record as JSON values: where it is, its fields, and its facts."""
    label = int(shards.labels_of(np.array([row]))[0]) if LABEL in shards.schema else NO_LABEL
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
        if field.type.stored_apart:
            located = shards.find(at, name)
            if located.fields[0] != ABSENT:
                stored = {"kind": located.fields[0], "bytes": located.lengths[0]}
                if field.type.is_picture:
                    stored |= {"width": located.widths[0], "height": located.heights[0]}
                described["fields"][name] = stored
        elif name != LABEL:
            value = shards.values(name, at).value(0)
            if value is not None:
                value = field.type.as_json(field, field.type.plain(field, value))
            described["fields"][name] = value
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
        "mean": [round(float(level), 2) for level in fact["mean"]],
        "std": [round(float(level), 2) for level in fact["std"]],
        **rounded,
    }
