"""Distributions of the fields of records, apart from images and primary labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.codecs.image import decode_mask
from shardkit.dataset.shardset import ShardSet
from shardkit.errors import BadImage
from shardkit.kinds.field import Field
from shardkit.record import ABSENT, IMAGE, LABEL
from shardkit.reporting.collection import Collection
from shardkit.system.numbers import significant

_SEED = 0
_MOST_MASKS = 64
"""Masks to decode; of other fields, `_MOST` rows are read."""
_MOST = 10_000


def describe_fields(images: Collection) -> list[dict[str, Any]]:
    """Return the distribution of each field of each dataset, from at most 10,000 of its rows.

    Each has ``dataset``, ``name``, ``kind``, ``rows`` examined, ``what`` is counted, its
    ``summary`` and, where there are classes, the ``counts`` of each.
    """
    distributions = []
    for member in images.members:
        for name, field in member.shards.schema.items():
            if name in (IMAGE, LABEL):
                continue
            described = _describe(member.shards, name, field)
            if described:
                distributions.append(
                    {"dataset": member.name, "name": name, "kind": field.kind, **described}
                )
    return distributions


def sampled_rows(count: int, most: int, seed: int = _SEED) -> npt.NDArray[np.int64]:
    """Return at most ``most`` rows, ascending; the same for the same arguments."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False))


def _describe(shards: ShardSet, name: str, field: Field) -> dict[str, Any] | None:
    kind = field.type
    is_mask = kind.is_picture and kind.follows
    rows = sampled_rows(len(shards), _MOST_MASKS if is_mask else _MOST)
    if is_mask:
        return _masks(shards, name, rows)
    if kind.stored_apart or not len(rows):
        return None
    column = shards.values(name, rows)
    counted = kind.counted([column.value(row) for row in range(column.rows) if column.has(row)])
    if counted is None:
        return None
    numbers, unit = counted
    described = {"rows": len(numbers), "what": unit, "summary": _summary(numbers)}
    classes = column.classes()
    if classes is not None and field.classes:
        inside = classes[(classes >= 0) & (classes < len(field.classes))]
        counts = np.bincount(inside, minlength=len(field.classes)).tolist()
        described["counts"] = dict(zip(field.classes, counts, strict=True))
    return described


def _summary(values: list[float]) -> str:
    if not values:
        return "no values"
    low, middle, high = (float(percentile) for percentile in np.percentile(values, [0, 50, 100]))
    return f"{significant(low)} to {significant(high)}, median {significant(middle)}"


def _masks(shards: ShardSet, name: str, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return which fraction of the pixels of some masks has each value."""
    pixels: dict[int, float] = {}
    done = 0
    for row in rows.tolist():
        mask = read_mask(shards, name, row)
        if mask is None:
            continue
        values, counts = np.unique(mask, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            pixels[value] = pixels.get(value, 0) + count / mask.size
        done += 1
    most = sorted(pixels.items(), key=lambda item: -item[1])
    shown = [f"{value}: {100 * member / done:.1f}%" for value, member in most[:8]]
    more = f" and {len(most) - 8:,} more" if len(most) > 8 else ""
    summary = ", ".join(shown) + more if done else "no masks"
    return {"rows": done, "what": "pixel values", "summary": summary}


def read_mask(shards: ShardSet, name: str, row: int) -> npt.NDArray[Any] | None:
    """Return the values of a mask; None if the row has none or it cannot be decoded."""
    located = shards.find(np.array([row]), name)
    if located.fields[0] == ABSENT:
        return None
    stored = located.read(0, memoryview(bytearray(located.longest)))
    try:
        return decode_mask(stored.data, stored.field)
    except BadImage:
        return None
