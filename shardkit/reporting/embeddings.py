"""Find wrong labels, odd images and near duplicates by embeddings: vectors of another model.

Embeddings are compared by the angle between them. Neighbors are looked for among at most
`_REFERENCES` images, so a million images cost 20,000 million comparisons, not a million million.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError
from shardkit.kinds.field import BFLOAT16
from shardkit.record import ABSENT, NO_LABEL
from shardkit.reporting.collection import Collection, Member
from shardkit.reporting.copies import RowPairs
from shardkit.reporting.findings import BY_EMBEDDING, FEW, Findings, Group, far_from_class
from shardkit.reporting.identical import Rows
from shardkit.system.text import amount, name_list

_NEIGHBORS = 10
"""Neighbors that are compared, and images that a class needs to be judged."""

_OWN = 1
_OTHER = 8
"""Of the neighbors of a wrong label, at most `_OWN` have it, and at least `_OTHER` another one."""

_FARTHER = 1.5
"""Minimum distance of images of its own class, in units of that of its neighbors."""

_REFERENCES = 20_000
"""Maximum images among which neighbors are looked for, as many of each class as possible."""

_NEAR = 1 / 8
"""Distance of near duplicates, in units of the median distance of nearest neighbors."""

_ROUNDING = 1e-3
"""Distance of equal embeddings after rounding."""

_SHARED = 2
_AHEAD = 16
"""Near duplicates share one of so many nearest references. So many next images are compared."""

_BLOCK = 1 << 22
_CHUNK = 1 << 14
"""Similarities computed at a time, and pairs compared."""


class _Neighbors(NamedTuple):
    """The nearest references, the nearest first: shape (N, `_NEIGHBORS`)."""

    position: Rows
    distance: npt.NDArray[np.float32]


class _Vectors(NamedTuple):
    rows: Rows
    """Rows that have one, ascending."""
    values: npt.NDArray[np.float16]
    """Their embeddings, of length 1: half the memory, and exact to a thousandth of a radian."""
    labels: Rows


def find_by_embedding(images: Collection, name: str) -> list[Findings]:
    """Return the findings of `BY_EMBEDDING`; of duplicates, only their pairs.

    A million embeddings of 512 values need 1 GB of memory. The field ``name`` has arrays of floats,
    of one shape; UsageError if a dataset has no such field.
    """
    findings = {kind: Findings(kind) for kind in BY_EMBEDDING}
    vectors = _read(images, name, findings["bad-embedding"])
    unfit = _unfit(vectors)
    if unfit:
        for kind in ("label-error", "embedding-duplicate", "embedding-outlier"):
            findings[kind].judge_nothing(unfit)
    else:
        references = _references(vectors.labels)
        near = _neighbors(vectors, references)
        _find_label_errors(images, vectors, near, references, findings["label-error"])
        _find_outliers(vectors, near, findings["embedding-outlier"])
        least = _NEAR * float(np.median(near.distance[references, 0])) + _ROUNDING
        findings["embedding-duplicate"].pairs = _near_pairs(vectors, near, least)
    return list(findings.values())


def _unfit(vectors: _Vectors) -> str:
    """Return why embeddings cannot be compared, or ""."""
    if len(vectors.rows) <= _NEIGHBORS:
        return f"fewer than {_NEIGHBORS + 1} images have a usable embedding"
    if np.ptp(vectors.values, axis=0).max() <= _ROUNDING:
        return "all embeddings have the same direction"
    return ""


def _read(images: Collection, name: str, bad: Findings) -> _Vectors:
    sizes = [_values_of(member, name) for member in images.members]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the {name!r} field has {sizes[0]} values in one dataset and "
            f"{next(size for size in sizes if size != sizes[0])} in another;",
            remedy="compare embeddings from the same model",
        )
    usable: list[int] = []
    most = sum(int(member.shards.present(name).sum()) for member in images.members)
    values = np.zeros((most, sizes[0]), np.float16)
    for row, vector in _embeddings(images, name):
        largest = float(np.abs(vector).max())
        if not 0 < largest < np.inf:
            note = "all its values are 0" if largest == 0 else "a value is not finite"
            bad.groups.append(Group([row], note=note))
            bad.exclude.append(row)
            continue
        scaled = vector / largest  # the square of 1e200 is infinite
        values[len(usable)] = scaled / np.linalg.norm(scaled)
        usable.append(row)
    rows = np.array(usable, np.int64)
    return _Vectors(rows, values[: len(rows)], images.labels[rows])


def _embeddings(images: Collection, name: str) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Yield each row that has an embedding, with it."""
    for member in images.members:
        field = member.shards.schema[name]
        located = member.shards.find(np.arange(len(member.shards)), name)
        buffer = memoryview(bytearray(located.longest))
        for row in range(len(located)):
            if located.fields[row] == ABSENT:
                continue
            stored = np.frombuffer(located.read(row, buffer).data, field.values)
            if field.dtype == BFLOAT16:
                stored = (stored.astype(np.uint32) << 16).view(np.float32)
            yield member.start + row, stored.astype(np.float64)


def _values_of(member: Member, name: str) -> int:
    """Return the number of values of an embedding; raise if the field has none."""
    schema = member.shards.schema
    usable = [key for key, field in schema.items() if field.is_uniform and _is_float(field.dtype)]
    if name not in usable:
        why = f"there is no field {name!r}"
        verb = "add"
        if name in schema:
            why = f"the {name!r} field has kind {schema[name]}"
            verb = "replace"
        others = f"; {member.name} has {name_list(usable)}" if usable else ""
        raise UsageError(
            f"{member.name}: {why}; embeddings must be float arrays with the same shape{others}. "
            f"`shardkit fields {verb}` makes these from .npy files, or a column of lists in a "
            f"table: --field {name}=COLUMN:array."
        )
    return math.prod(schema[name].shape or ())


def _is_float(dtype: str | None) -> bool:
    return dtype in ("float16", "float32", "float64", BFLOAT16)


def _references(labels: Rows) -> Rows:
    """Return positions of at most `_REFERENCES` images: as many of each class, if it has them."""
    if len(labels) <= _REFERENCES:
        return np.arange(len(labels))
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    ordinal = np.arange(len(labels)) - np.repeat(starts, counts)  # within the class
    chosen: Rows = np.sort(order[np.argsort(ordinal, kind="stable")[:_REFERENCES]])
    return chosen


def _neighbors(vectors: _Vectors, references: Rows) -> _Neighbors:
    """Return the neighbors of all images; an image is no neighbor of itself."""
    others = vectors.values[references].astype(np.float32).T
    reference_of = np.full(len(vectors.rows), -1)
    reference_of[references] = np.arange(len(references))
    shape = (len(vectors.rows), _NEIGHBORS)
    near = _Neighbors(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
    step = max(1, _BLOCK // len(references))
    for start in range(0, len(vectors.rows), step):
        block = slice(start, start + step)
        similar = vectors.values[block].astype(np.float32) @ others
        itself = np.flatnonzero(reference_of[block] >= 0)
        similar[itself, reference_of[block][itself]] = -np.inf
        best = np.argpartition(similar, -_NEIGHBORS, axis=1)[:, -_NEIGHBORS:]
        cosines = np.take_along_axis(similar, best, 1)
        order = np.argsort(-cosines, axis=1, kind="stable")
        near.position[block] = references[np.take_along_axis(best, order, 1)]
        cosines = np.take_along_axis(cosines, order, 1)
        near.distance[block] = np.sqrt(np.maximum(2 - 2 * cosines, 0))
    return near


def _find_label_errors(
    images: Collection, vectors: _Vectors, near: _Neighbors, references: Rows, finding: Findings
) -> None:
    """Find images whose neighbors nearly all have one other label, the most certain first.

    Classes may touch, and at their border images have neighbors of the other one. Those of their
    own are near, too; images with a wrong label are far from all of their class.
    """
    classes, counts = np.unique(vectors.labels, return_counts=True)
    large = classes[(counts >= _NEIGHBORS) & (classes != NO_LABEL)]
    small = int(np.count_nonzero(classes != NO_LABEL)) - len(large)
    if small:
        are = "is" if small == 1 else "are"
        fewer = f"with fewer than {_NEIGHBORS} embeddings"
        finding.note = f"{amount(small, 'class')} {fewer} {are} not judged"
    if not len(large):
        finding.judge_nothing(f"no class has {_NEIGHBORS} images with a usable embedding")
    labels = vectors.labels[near.position]
    agreeing = (labels == vectors.labels[:, None]).sum(1)
    judged = np.flatnonzero((agreeing <= _OWN) & np.isin(vectors.labels, large))
    farther = _farther(vectors, near, references, judged)
    for number in np.argsort(-farther, kind="stable").tolist():
        position = int(judged[number])
        others, votes = np.unique(labels[position], return_counts=True)
        best = int(votes.argmax())
        if farther[number] < _FARTHER or others[best] == NO_LABEL or votes[best] < _OTHER:
            continue
        row = int(vectors.rows[position])
        name = images.classes[int(others[best])]
        note = f"{votes[best]} of its {_NEIGHBORS} neighbors are {name}"
        note += f"; images of its own class are {farther[number]:.1f} times as far away"
        finding.groups.append(Group([row], note=note))
        finding.exclude.append(row)
    finding.exclude.sort()


def _farther(
    vectors: _Vectors, near: _Neighbors, references: Rows, positions: Rows
) -> npt.NDArray[np.float64]:
    """Return the distance of an image's own class, divided by that of its neighbors."""
    farther = np.zeros(len(positions))
    labels = vectors.labels[positions]
    for label in np.unique(labels).tolist():
        same = references[vectors.labels[references] == label]
        others = vectors.values[same].astype(np.float32).T
        numbers = np.flatnonzero(labels == label)
        step = max(1, _BLOCK // len(same))
        for start in range(0, len(numbers), step):
            chunk = numbers[start : start + step]
            cosines = vectors.values[positions[chunk]].astype(np.float32) @ others
            cosines[positions[chunk][:, None] == same] = -1  # not itself
            nearest = -np.sort(-cosines, axis=1)[:, : _NEIGHBORS - 1]
            within = np.sqrt(np.maximum(2 - 2 * nearest, 0)).mean(1)
            farther[chunk] = within / np.maximum(near.distance[positions[chunk]].mean(1), _ROUNDING)
    return farther


def _find_outliers(vectors: _Vectors, near: _Neighbors, finding: Findings) -> None:
    if np.unique(vectors.labels, return_counts=True)[1].max() < FEW:
        finding.judge_nothing(f"no class has {FEW} images with a usable embedding")
    mean = near.distance.astype(np.float64).mean(1)[:, None]
    unusual = far_from_class(vectors.labels, mean, least=0.01)
    farther = mean[:, 0] > np.median(mean)  # not those that are nearer than usual
    for position in np.flatnonzero((unusual > 0) & farther).tolist():
        row = int(vectors.rows[position])
        note = f"{unusual[position]:.1f} times the median difference"
        finding.groups.append(Group([row], note=note))
        finding.exclude.append(row)


def _near_pairs(vectors: _Vectors, near: _Neighbors, least: float) -> RowPairs:
    """Return pairs of rows whose distance is at most ``least``.

    These are images and their neighbors; and since neighbors are only references, also images that
    share one and have the same distance to it.
    """
    close_cells = np.argwhere(near.distance <= least)
    pairs = [
        np.stack([close_cells[:, 0], near.position[close_cells[:, 0], close_cells[:, 1]]], axis=1)
    ]
    cells = near.position[:, :_SHARED].reshape(-1)
    distance = near.distance[:, :_SHARED].reshape(-1)
    order = np.lexsort((distance, cells))
    cells = cells[order]
    distance = distance[order]
    images = order // _SHARED
    for ahead in range(1, _AHEAD + 1):
        maybe = np.flatnonzero(
            (cells[ahead:] == cells[:-ahead]) & (distance[ahead:] - distance[:-ahead] <= least)
        )
        for start in range(0, len(maybe), _CHUNK):
            chunk = maybe[start : start + _CHUNK]
            firsts = images[chunk]
            seconds = images[chunk + ahead]
            first, second = (vectors.values[rows].astype(np.float32) for rows in (firsts, seconds))
            close = (np.linalg.norm(first - second, axis=1) <= least) & (firsts != seconds)
            pairs.append(np.stack([firsts[close], seconds[close]], axis=1))
    return np.unique(np.sort(vectors.rows[np.concatenate(pairs)], axis=1), axis=0)
