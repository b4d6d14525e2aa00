"""Find what is wrong with images: equal ones, similar ones, and ones unlike all others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardkit.codecs.suffixes import KIND_OF_SUFFIX
from shardkit.record import NO_LABEL, PLANES
from shardkit.reporting.collection import Collection
from shardkit.reporting.copies import Copies, RowPairs, connected
from shardkit.reporting.identical import (
    Identical,
    Rows,
    find_identical,
    groups_of_equal,
    merge_identical,
)
from shardkit.reporting.image_facts import BROKEN
from shardkit.reporting.similar import BLANK, DISTANCE, NOTES, SimilarPairs, similar_pairs

KINDS = {
    "leak": "The same or a similar image is in several splits or datasets",
    "label-conflict": "The same image has different labels",
    "exact-duplicate": "The same image is stored several times",
    "near-duplicate-classes": "Similar images are in different classes",
    "near-duplicate": "Similar images are in the same class",
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
    "label-error": "The images with the nearest embeddings have another label",
    "embedding-duplicate": "The embeddings are nearly the same",
    "embedding-outlier": "The embedding is far from all others of its class",
    "bad-embedding": "The embedding is zero or not finite",
}
"""All kinds of findings, the worst first, each with its meaning."""

BY_EMBEDDING = ("label-error", "embedding-duplicate", "embedding-outlier", "bad-embedding")
"""Kinds that need embeddings."""

_DUPLICATES = (
    *("leak", "exact-duplicate", "near-duplicate-classes", "near-duplicate"),
    "embedding-duplicate",
)
"""Kinds of which one image is kept."""

_DARK = 64
_BLURRED = 0.44
"""Highlight in levels, and sharpness, below which an image is reported."""

_EQUAL = ("same bytes", "same pixels")
"""Notes of a group of equal pictures."""

_NEAR = "similar embeddings"
"""Note of a leak by embeddings."""

_MOST_BITS = 64

_TINY = 4
_ODD = 3
"""Factors between an image's shorter side, or aspect ratio, and the median."""

FEW = 20
_FAR = 8.0
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
    pairs: RowPairs = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """Pairs of duplicates that connect the groups."""
    complete: bool = True
    """Whether these are all groups; there may be too many similar pairs to list."""
    judged: bool = True
    """Whether anything could be judged; if not, the note has the reason."""
    note: str = ""
    """Text on images that were not examined."""

    def judge_nothing(self, reason: str) -> None:
        """Note that nothing could be judged."""
        self.judged = False
        self.note = f"nothing could be judged: {reason}"

    @property
    def rows(self) -> int:
        """Number of images concerned."""
        return len({row for group in self.groups for row in group.rows})


def find_all(
    images: Collection, distance: int = DISTANCE, by_embedding: Sequence[Findings] = ()
) -> list[Findings]:
    """Return the findings of all `KINDS`, also those without groups.

    The hashes of similar pictures differ in at most ``distance`` bits. ``by_embedding`` are the
    findings of `BY_EMBEDDING`: duplicates in several datasets become leaks.
    """
    findings = {kind: Findings(kind) for kind in KINDS if kind not in BY_EMBEDDING}
    findings |= {finding.kind: finding for finding in by_embedding}
    same = find_identical(images)
    similar = similar_pairs(images, same, distance)
    merge_identical(images, similar.first, similar.second, similar.distance, same)
    _find_equal(images, same, findings)
    _find_similar(images, same, similar, findings)
    for kind in ("leak", "near-duplicate", "near-duplicate-classes"):
        findings[kind].groups.sort(
            key=lambda group: (group.distance, group.note not in _EQUAL, group.rows)
        )
    if by_embedding:
        _find_leaks_by_embedding(images, findings["leak"], findings["embedding-duplicate"])
    for kind, rows, notes in _faults(images):
        findings[kind].groups = [
            Group([row], note=note) for row, note in zip(rows.tolist(), notes, strict=True)
        ]
        findings[kind].exclude = rows.tolist()
    _exclude_duplicates(images, same, similar, findings)
    return list(findings.values())


def _exclude_duplicates(
    images: Collection, same: Identical, similar: SimilarPairs, findings: dict[str, Findings]
) -> None:
    faulty = [row for kind in findings.keys() - {*_DUPLICATES} for row in findings[kind].exclude]
    crowds = np.stack([similar.first, similar.second], axis=1)[similar.crowded]
    copies = Copies(images, same, crowds, faulty)
    leak, *others = (findings[kind] for kind in _DUPLICATES if kind in findings)
    copies.leave_out(leak.pairs)
    copies.leave_out(np.concatenate([finding.pairs for finding in others]))
    for finding in (leak, *others):
        finding.exclude = copies.excluded(finding.pairs)


def _find_equal(images: Collection, same: Identical, findings: dict[str, Findings]) -> None:
    pairs: dict[str, list[RowPairs]] = {"exact-duplicate": [], "leak": []}
    for group in groups_of_equal(same.pixels):
        members = images.member[group]
        labels = images.labels[group]
        several = [group[members == member] for member in np.unique(members)]
        for copies in several:
            if len(copies) > 1:
                note = _how_equal(same, copies)
                findings["exact-duplicate"].groups.append(Group(copies.tolist(), 0, note))
                pairs["exact-duplicate"].append(np.stack([copies[:-1], copies[1:]], axis=1))
        everywhere = Group(group.tolist(), 0, _how_equal(same, group))
        if len(several) > 1:
            findings["leak"].groups.append(everywhere)
            firsts = [copies[0] for copies in several]
            pairs["leak"].append(np.array([*itertools.combinations(firsts, 2)]))
        if len(np.unique(labels[labels != NO_LABEL])) > 1:
            findings["label-conflict"].groups.append(everywhere)
            findings["label-conflict"].exclude += group.tolist()
    findings["label-conflict"].exclude.sort()
    for kind, listed in pairs.items():
        findings[kind].pairs = np.concatenate([findings[kind].pairs, *listed])


def _how_equal(same: Identical, rows: Rows) -> str:
    return _EQUAL[len(np.unique(same.bytes[rows])) > 1]


def _find_similar(
    images: Collection, same: Identical, pairs: SimilarPairs, findings: dict[str, Findings]
) -> None:
    first = pairs.first
    second = pairs.second
    similar = same.pixels[first] != same.pixels[second]
    across = images.member[first] != images.member[second]
    labels = images.labels[first], images.labels[second]
    classes = (labels[0] != labels[1]) & (np.minimum(*labels) != NO_LABEL)
    rows = np.stack([first, second], axis=1)
    for kind, chosen in (
        ("leak", across),
        ("near-duplicate-classes", ~across & classes),
        ("near-duplicate", ~across & ~classes),
    ):
        numbers = np.flatnonzero(chosen & similar)
        finding = findings[kind]
        finding.pairs = np.concatenate([finding.pairs, rows[numbers]])
        if kind == "leak":  # also show the pairs with an image that leaks
            numbers = np.union1d(
                numbers, np.flatnonzero(pairs.crowded & np.isin(first, rows[numbers]))
            )
        finding.groups += _components(pairs.at(numbers))
        finding.complete = pairs.complete


def _components(pairs: SimilarPairs) -> list[Group]:
    """Return the groups of rows that pairs connect, in order of their first row."""
    groups = connected(np.stack([pairs.first, pairs.second], axis=1))
    number = {row: position for position, rows in enumerate(groups) for row in rows}
    least = [_MOST_BITS] * len(groups)
    notes: list[set[int]] = [set() for _ in groups]
    columns = (pairs.first.tolist(), pairs.distance.tolist(), pairs.note.tolist())
    for first, distance, note in zip(*columns, strict=True):
        group = number[first]
        least[group] = min(least[group], distance)
        notes[group].add(note)
    return [
        Group(rows, least[n], ", ".join(NOTES[note] for note in sorted(notes[n])))
        for n, rows in enumerate(groups)
    ]


def _find_leaks_by_embedding(images: Collection, leak: Findings, duplicate: Findings) -> None:
    """Find groups of near embeddings; pairs in several datasets are leaks, unless known as such."""
    members = images.member[duplicate.pairs]
    across = members[:, 0] != members[:, 1]
    leaking = duplicate.pairs[across]
    duplicate.pairs = duplicate.pairs[~across]
    duplicate.groups = [Group(rows) for rows in connected(duplicate.pairs)]
    numbers: dict[int, set[int]] = {}
    for number, group in enumerate(leak.groups):
        for row in group.rows:
            numbers.setdefault(row, set()).add(number)
    shown = [
        not numbers.get(first, set()) & numbers.get(second, set())
        for first, second in leaking.tolist()
    ]
    leak.groups += [Group(rows, note=_NEAR) for rows in connected(leaking[np.array(shown, bool)])]
    leak.pairs = np.concatenate([leak.pairs, leaking])


def _faults(images: Collection) -> Iterator[tuple[str, Rows, list[str]]]:
    """Yield each kind of fault of single images, the rows that have it, and a note for each."""
    facts = images.facts
    seen = images.measured
    blank = seen & (facts["contrast"] < BLANK)
    dark = seen & ~blank & (facts["highlight"] < _DARK)
    yield from _where("broken", facts["state"] == BROKEN)
    yield from _where("blank", blank, facts["contrast"], "contrast {:.1f} of 255")
    yield from _where("dark", dark, facts["highlight"], "99% of its pixels are below {} of 255")
    blurred = seen & ~blank & ~dark & (facts["sharpness"] < _BLURRED)
    yield from _where("blurred", blurred, facts["sharpness"], "sharpness {:.2f}")
    shorter = images.sizes.min(1)
    longer = images.sizes.max(1)
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
    rows = []
    notes = []
    for member in images.members:
        recipe = member.shards.manifest.recipe
        if recipe.get("encode") != "keep" or recipe.get("resize") or recipe.get("orient"):
            continue  # the conversion may have changed the kind
        for own_row, path in enumerate(member.shards.paths):
            row = member.start + own_row
            named = KIND_OF_SUFFIX.get(path.rpartition(".")[2].lower())
            if named not in _UNNAMED and images.present[row] and images.kind(row) != named:
                rows.append(row)
                notes.append(f"its content is {images.kind(row)}")
    yield "wrong-suffix", np.array(rows, np.int64), notes


_UNNAMED = (None, "raw", PLANES)
"""Kinds of images that files with such suffixes need not have: ``.raw`` is also that of cameras."""


def _outliers(images: Collection) -> Iterator[tuple[str, Rows, list[str]]]:
    """Find images whose area or mean color is far from the median of their class."""
    area = np.log2(np.maximum(images.sizes.prod(1), 1))[:, None]
    color = images.facts["mean"].astype(np.float64)
    seen = np.flatnonzero(images.measured)
    unusual = np.zeros(len(images))
    unusual[seen] = far_from_class(images.labels[seen], area[seen], least=0.5)
    yield from _where("size-outlier", unusual > 0, unusual, "{:.1f} times the median difference")
    unusual[seen] = far_from_class(images.labels[seen], color[seen], least=5)
    yield from _where("color-outlier", unusual > 0, unusual, "{:.1f} times the median difference")


def far_from_class(
    labels: Rows, values: npt.NDArray[np.float64], least: float
) -> npt.NDArray[np.float64]:
    """Return how far each image is from its class, in median distances; 0 unless it is unusual.

    The compared values have shape (N, D). Below a median distance of ``least``, the images of a
    class count as equal.
    """
    far = np.zeros(len(labels))
    order = np.argsort(labels, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(rows) < FEW:
            continue
        distance = np.linalg.norm(values[rows] - np.median(values[rows], axis=0), axis=1)
        ratio = distance / max(float(np.median(distance)), least)
        far[rows] = np.where(ratio > _FAR, ratio, 0)
    return far
