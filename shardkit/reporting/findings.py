"""Find what is wrong with images: equal ones, similar ones, and ones unlike all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.dataset.facts import BROKEN
from shardkit.record import NO_LABEL
from shardkit.reporting.collection import Collection
from shardkit.reporting.identical import Identical, Rows, find_identical, groups_of_equal
from shardkit.reporting.neighbors import Pairs, near_pairs

KINDS = {
    "leak": "The same or a similar picture is in several splits or datasets",
    "label-conflict": "The same picture has different labels",
    "exact-duplicate": "The same picture is stored several times",
    "near-duplicate-classes": "Similar pictures are in different classes",
    "near-duplicate": "Similar pictures are in one class",
    "broken": "The image cannot be decoded",
    "blank": "All pixels have nearly one color",
    "dark": "Even the bright parts are dark",
    "blurred": "The image is blurred",
    "tiny": "The image is much smaller than most",
    "odd-aspect": "The image is much longer or taller than most",
    "rotated": "The EXIF orientation is not upright; readers do not apply it",
    "wrong-suffix": "The file name has the suffix of another kind of image",
    "size-outlier": "The size is unusual for the class",
    "color-outlier": "The mean color is unusual for the class",
}
"""All kinds of findings, the worst first, each with its meaning."""

DISTANCE = 6
"""Default maximum distance of similar pictures: with it, 91 to 100% of the photographs are found
again after JPEG compression, scaling, cropping 5% and a brightness of 130%."""

_SIMILAR = "similar"
"""Note of a group whose pixels differ, even if no bit of their hashes does."""

_CHROMA, _LEVELS, _ASPECT = 0.03, 0.45, 0.15
"""Maximum difference of similar pictures in their color, as a fraction of red, green and blue, in
the logarithms of brightness and contrast, and in that of the aspect ratio. These remove most pairs
that are similar by chance."""

_CROWD = 64
"""Maximum images of one hash whose pairs are all compared."""

_BLANK, _DARK, _BLURRED = 2.0, 64, 0.25
"""Contrast and highlight in levels, and sharpness, below which an image is reported."""

_TINY, _ODD = 4, 3
"""Factors between an image's shorter side, or aspect ratio, and the median."""

_FEW, _FAR = 20, 8.0
"""Minimum images of a class to judge, and deviations from its median, in median deviations."""


@dataclass(frozen=True, slots=True)
class Group:
    """Images that belong together, or one image alone."""

    rows: list[int]
    """Rows of the collection, ascending."""
    distance: int | None = None
    """Number of different bits of the most similar pair's hashes; 0 for equal pixels."""
    note: str = ""


@dataclass
class Findings:
    """All findings of one kind."""

    kind: str
    groups: list[Group] = field(default_factory=list)
    """The most similar first, then by row."""
    exclude: list[int] = field(default_factory=list)
    """Rows to leave out so that the finding disappears, ascending."""
    complete: bool = True
    """Whether these are all groups; there may be too many similar pairs to list."""

    @property
    def rows(self) -> int:
        """Number of images concerned."""
        return len({row for group in self.groups for row in group.rows})


def find_all(images: Collection, distance: int = DISTANCE) -> list[Findings]:
    """Return the findings of all `KINDS`, also those without groups.

    Args:
        images: The datasets.
        distance: Maximum number of different bits in the hashes of similar pictures.
    """
    findings = {kind: Findings(kind) for kind in KINDS}
    same = find_identical(images)
    _find_equal(images, same, findings)
    _find_similar(images, same, distance, findings)
    for kind in ("leak", "near-duplicate", "near-duplicate-classes"):
        findings[kind].groups.sort(
            key=lambda group: (group.distance, group.note == _SIMILAR, group.rows)
        )
    for kind, rows, notes in _faults(images):
        findings[kind].groups = [
            Group([row], note=note) for row, note in zip(rows.tolist(), notes, strict=True)
        ]
        findings[kind].exclude = rows.tolist()
    return list(findings.values())


def _find_equal(images: Collection, same: Identical, findings: dict[str, Findings]) -> None:
    for group in groups_of_equal(same.pixels):
        parts, labels = images.part[group], images.labels[group]
        several = [group[parts == part] for part in np.unique(parts)]
        for copies in several:
            if len(copies) > 1:
                note = _how_equal(same, copies)
                findings["exact-duplicate"].groups.append(Group(copies.tolist(), 0, note))
                findings["exact-duplicate"].exclude += copies[1:].tolist()
        if len(several) > 1:
            findings["leak"].groups.append(Group(group.tolist(), 0, _how_equal(same, group)))
            findings["leak"].exclude += _leaking(images, group)
        if len(np.unique(labels[labels != NO_LABEL])) > 1:
            findings["label-conflict"].groups.append(
                Group(group.tolist(), 0, _how_equal(same, group))
            )
            findings["label-conflict"].exclude += group.tolist()
    for finding in findings.values():
        finding.exclude.sort()


def _how_equal(same: Identical, rows: Rows) -> str:
    return "same bytes" if len(np.unique(same.bytes[rows])) == 1 else "same pixels"


def _leaking(images: Collection, rows: Rows) -> list[int]:
    """Return the rows to leave out: all but those in the smallest or last dataset or split."""
    sizes = [len(part.shards) for part in images.parts]
    parts = images.part[rows]
    kept = min(np.unique(parts).tolist(), key=lambda part: (sizes[part], -part))
    excluded: list[int] = rows[parts != kept].tolist()
    return excluded


def _find_similar(
    images: Collection, same: Identical, distance: int, findings: dict[str, Findings]
) -> None:
    twins = _twins(images, same)
    pairs, crowded = _similar_pairs(images, twins, distance)
    first, second = pairs.first, pairs.second
    similar = same.pixels[first] != same.pixels[second]
    similar &= _agree(images, first, second)
    across = images.part[first] != images.part[second]
    labels = images.labels[first], images.labels[second]
    classes = (labels[0] != labels[1]) & (np.minimum(*labels) != NO_LABEL)
    for kind, chosen in (
        ("leak", across),
        ("near-duplicate-classes", ~across & classes),
        ("near-duplicate", ~across & ~classes),
    ):
        numbers = np.flatnonzero(chosen & similar)
        if kind == "leak":  # also the pairs with an image that leaks
            leaking = np.append(first[numbers], second[numbers])
            numbers = np.union1d(numbers, np.flatnonzero(crowded & np.isin(first, leaking)))
        chosen_pairs = Pairs(
            first[numbers], second[numbers], pairs.distance[numbers], pairs.complete
        )
        groups = _components(chosen_pairs)
        findings[kind].groups += groups
        findings[kind].complete = pairs.complete
        if kind == "leak":
            excluded = [row for group in groups for row in _leaking(images, np.array(group.rows))]
        else:
            excluded = sorted(_redundant(chosen_pairs))
        every = np.flatnonzero(np.isin(twins, twins[excluded])) if excluded else excluded
        findings[kind].exclude = np.union1d(findings[kind].exclude, every).astype(np.int64).tolist()


def _similar_pairs(
    images: Collection, twins: Rows, distance: int
) -> tuple[Pairs, npt.NDArray[np.bool_]]:
    """Return pairs of rows with similar hashes, and whether each is of a crowd."""
    rows = np.sort(np.unique(twins, return_index=True)[1])  # the first of each
    rows = rows[twins[rows] >= 0]
    rows, leaders, followers = _crowds(images, rows)
    hashes, crops = images.facts["hash"][rows], images.facts["crops"][rows]
    near = near_pairs(hashes, distance, queries=crops)
    pairs = Pairs(
        np.append(rows[near.first], leaders),
        np.append(rows[near.second], followers),
        np.append(near.distance, np.zeros(len(leaders), np.uint8)),
        near.complete,
    )
    return pairs, np.arange(len(pairs.first)) >= len(near.first)


def _twins(images: Collection, same: Identical) -> npt.NDArray[np.int64]:
    """Return the same number for rows with the same pixels, dataset and label.

    It is -1 for images without texture, whose hash is noise, and without pixels.
    """
    rows = np.flatnonzero(images.measured & (images.facts["contrast"] >= _BLANK))
    values = np.zeros(len(rows), [("pixels", "<i8"), ("part", "<i8"), ("label", "<i8")])
    columns = (same.pixels, images.part, images.labels)
    for name, column in zip(values.dtype.names or (), columns, strict=True):
        values[name] = column[rows]
    twins = np.full(len(images), -1)
    twins[rows] = np.unique(values, return_inverse=True)[1].reshape(-1)
    return twins


def _crowds(images: Collection, rows: Rows) -> tuple[Rows, Rows, Rows]:
    """Where many rows have one hash, pair those of one dataset with one or a few of them.

    Otherwise 10,000 frames of one scene would be 50 million pairs. Not all pairs are found, but all
    rows are.

    Returns:
        The other rows, still to be paired, and both rows of each pair.
    """
    hashes = images.facts["hash"][rows]
    _, same, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    many = np.flatnonzero(counts[same.reshape(-1)] > _CROWD)
    keys = (images.part[rows[many]], hashes[many])
    order = np.lexsort(keys)
    changes = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    pairs = [np.zeros((2, 0), np.int64)]
    for crowd in np.split(rows[many[order]], np.flatnonzero(changes) + 1):
        for _ in range(_CROWD):
            if len(crowd) < 2:
                break
            agree = _agree(images, crowd[:1], crowd)
            members = crowd[agree]
            pairs.append(np.stack([np.full(len(members) - 1, members[0]), members[1:]]))
            crowd = crowd[~agree]  # noqa: PLW2901
    leaders, followers = np.concatenate(pairs, axis=1)
    return np.setdiff1d(rows, followers), leaders, followers


def _agree(images: Collection, one: Rows, other: Rows) -> npt.NDArray[np.bool_]:
    """Return whether pairs agree in what hashes do not show: aspect ratio, light and color."""
    first, second = images.facts[one], images.facts[other]
    sizes = [np.log(np.maximum(images.sizes[rows], 1)) for rows in (one, other)]
    aspects = [logarithms[:, 0] - logarithms[:, 1] for logarithms in sizes]
    agree: npt.NDArray[np.bool_] = np.abs(aspects[0] - aspects[1]) <= _ASPECT
    for name in ("brightness", "contrast"):
        agree &= np.abs(np.log((first[name] + 2) / (second[name] + 2))) <= _LEVELS
    chroma = [
        (facts["mean"] + 1) / (facts["mean"].sum(1, keepdims=True) + 3) for facts in (first, second)
    ]
    agree &= (np.abs(chroma[0] - chroma[1]) <= _CHROMA).all(1)
    return agree


def _components(pairs: Pairs) -> list[Group]:
    """Return the groups of rows that pairs connect, in order of their first row."""
    above: dict[int, int] = {}

    def top(row: int) -> int:
        while (next_one := above.setdefault(row, row)) != row:
            above[row] = row = above[next_one]
        return row

    for first, second in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True):
        one, other = sorted((top(first), top(second)))
        above[other] = one
    members: dict[int, list[int]] = {}
    for row in sorted(above):
        members.setdefault(top(row), []).append(row)
    least: dict[int, int] = {}
    for first, distance in zip(pairs.first.tolist(), pairs.distance.tolist(), strict=True):
        least[top(first)] = min(least.get(top(first), distance), distance)
    return [Group(rows, least[row], _SIMILAR) for row, rows in members.items()]


def _redundant(pairs: Pairs) -> set[int]:
    """Return rows whose removal separates all pairs, keeping the first row of each."""
    excluded: set[int] = set()
    order = np.lexsort((pairs.second, pairs.first))
    firsts, seconds = pairs.first[order].tolist(), pairs.second[order].tolist()
    for first, second in zip(firsts, seconds, strict=True):
        if first not in excluded:
            excluded.add(second)
    return excluded


def _faults(images: Collection) -> Iterator[tuple[str, Rows, list[str]]]:
    """Yield each kind of fault of single images, the rows that have it, and a note for each."""
    facts, seen = images.facts, images.measured
    blank = seen & (facts["contrast"] < _BLANK)
    dark = seen & ~blank & (facts["highlight"] < _DARK)
    yield from _where("broken", facts["state"] == BROKEN)
    yield from _where("blank", blank, facts["contrast"], "contrast {:.1f} of 255")
    yield from _where("dark", dark, facts["highlight"], "99% of its pixels are below {} of 255")
    blurred = seen & ~blank & ~dark & (facts["sharpness"] < _BLURRED)
    yield from _where("blurred", blurred, facts["sharpness"], "sharpness {:.2f}")
    shorter, longer = images.sizes.min(1), images.sizes.max(1)
    median = np.median(shorter[seen]) if seen.any() else 0
    yield from _where("tiny", seen & (shorter * _TINY <= median), shorter, "{} pixels")
    aspect = longer / np.maximum(shorter, 1)
    usual = np.median(aspect[seen]) if seen.any() else 1
    yield from _where("odd-aspect", seen & (aspect > _ODD * usual), aspect, "{:.1f} to 1")
    turned = seen & (facts["orientation"] > 1)
    yield from _where("rotated", turned, facts["orientation"], "orientation {}")
    yield from _wrong_suffixes(images)
    yield from _outliers(images)


def _where(
    kind: str,
    chosen: npt.NDArray[np.bool_],
    values: npt.NDArray[np.generic] | None = None,
    text: str = "",
) -> Iterator[tuple[str, Rows, list[str]]]:
    rows = np.flatnonzero(chosen)
    notes = [""] * len(rows) if values is None else [text.format(value) for value in values[rows]]
    yield kind, rows, notes


def _wrong_suffixes(images: Collection) -> Iterator[tuple[str, Rows, list[str]]]:
    rows, notes = [], []
    for part in images.parts:
        recipe = part.shards.manifest.recipe
        if recipe.get("encode") != "keep" or recipe.get("resize") or recipe.get("orient"):
            continue  # the conversion may have changed the kind
        for own_row, path in enumerate(part.shards.paths):
            row = part.start + own_row
            named = _NAMED.get(path.rpartition(".")[2].lower())
            if named and images.present[row] and images.kind(row) != named:
                rows.append(row)
                notes.append(f"its content is {images.kind(row)}")
    yield "wrong-suffix", np.array(rows, np.int64), notes


_NAMED = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpg"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    **dict.fromkeys(("ppm", "pgm", "pbm"), "ppm"),
    **{name: name for name in ("png", "webp", "gif", "bmp")},
}


def _outliers(images: Collection) -> Iterator[tuple[str, Rows, list[str]]]:
    """Find images whose area or mean color is far from the median of their class."""
    area = np.log2(np.maximum(images.sizes.prod(1), 1))[:, None]
    color = images.facts["mean"].astype(np.float64)
    unusual = _far_from_class(images, area, least=0.5)
    yield from _where("size-outlier", unusual > 0, unusual, "{:.1f} times the usual difference")
    unusual = _far_from_class(images, color, least=5)
    yield from _where("color-outlier", unusual > 0, unusual, "{:.1f} times the usual difference")


def _far_from_class(
    images: Collection, values: npt.NDArray[np.float64], least: float
) -> npt.NDArray[np.float64]:
    """Return how far each image is from its class, in median distances; 0 unless it is unusual.

    Args:
        images: The datasets.
        values: The compared values of each image: shape (N, D).
        least: Median distance below which the images of a class count as equal.
    """
    far = np.zeros(len(images))
    seen = np.flatnonzero(images.measured)
    seen = seen[np.argsort(images.labels[seen], kind="stable")]
    for rows in np.split(seen, np.flatnonzero(np.diff(images.labels[seen])) + 1):
        if len(rows) < _FEW:
            continue
        distance = np.linalg.norm(values[rows] - np.median(values[rows], axis=0), axis=1)
        ratio = distance / max(float(np.median(distance)), least)
        far[rows] = np.where(ratio > _FAR, ratio, 0)
    return far
