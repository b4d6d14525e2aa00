"""Divide the images of any source into train, val and test, while they are converted."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardkit.contracts import (
    Entry,
    Images,
    PartedSource,
    PartListing,
    Scan,
    Source,
    SourcePart,
    StoredEntries,
    as_packed,
)
from shardkit.errors import CorruptDataset, Problem, UsageError, setting
from shardkit.registry import get_source, is_source
from shardkit.sources.opening import DIVISION, DivisionOptions
from shardkit.sources.wrapper import Wrapper
from shardkit.system.text import as_command, fault, name_list, quoted

TRAIN, VAL, TEST = SIDES = ("train", "val", "test")

FOLDER = "folder"
"""The group of an image that is its folder."""

_TOLERANCE = 0.3
"""Fraction of a share by which groups may change it without a warning."""


@dataclass(frozen=True, kw_only=True)
class Division(DivisionOptions):
    """The rule by which images are divided. It depends on their paths, not on their positions.

    Each group, or each path without groups, gets a number from 0 to 1: the BLAKE2b-64 of ``split``,
    the seed in decimal and the group or path, with zero bytes between. Below ``val`` it is in val,
    below ``val + test`` in test, else in train. So images that are added move no others, and shares
    are approximate. ``stratify`` sorts the groups of each class by that number instead and divides
    its images by their order. What rounding leaves over in a class, the next class makes up for, so
    that shares are exact over all classes, as far as groups permit. Classes are in the order of
    their lowest number.

    Raises:
        UsageError: If shares or seed are out of range, or there are none.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in ((VAL, self.val), (TEST, self.test)):
            if type(share) not in (int, float) or not 0 <= share < 1:
                raise UsageError(
                    f"{setting(name, share)} must be a fraction from 0 to less than 1, such as 0.1"
                )
        if not 0 < self.val + self.test < 1:
            raise UsageError(
                f"pass fractions that leave images for train with {setting('val')}, "
                f"{setting('test')} or both, such as {setting('val', 0.1)}"
            )
        if type(self.seed) is not int or type(self.stratify) is not bool:
            raise UsageError(
                f"{setting('seed', self.seed)} must be an integer, and "
                f"{setting('stratify', self.stratify)} must be True or False"
            )

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of the splits."""
        return (TRAIN, *(side for side in (VAL, TEST) if getattr(self, side)))

    @property
    def by_path(self) -> bool:
        """Whether the side of an image depends only on its path."""
        return not self.stratify and self.group in (None, FOLDER)

    def divide(self, groups: Sequence[str], labels: Sequence[int]) -> dict[str, list[int]]:
        """Return the rows of each side, in order; ``groups`` may be the paths of the rows."""
        members: dict[str, list[int]] = defaultdict(list)
        for row, group in enumerate(groups):
            members[group].append(row)
        sides: dict[str, list[int]] = {side: [] for side in self.sides}
        if not self.stratify:
            for group, rows in members.items():
                sides[self.side_of(group)] += rows
        else:
            classes: dict[int, list[str]] = defaultdict(list)
            for group, rows in members.items():
                counts = Counter(labels[row] for row in rows)
                classes[min(counts, key=lambda label: (-counts[label], label))].append(group)
            self._divide_classes(classes.values(), members, sides)
        return {side: sorted(rows) for side, rows in sides.items()}

    def side_of(self, group: str) -> str:
        """Return the side of a group, or of a path; only without ``stratify``."""
        return _side(self._number(group), self.val, self.test)

    def warn_if_off(self, rows: Mapping[str, Sized]) -> None:
        """Warn if groups make a side much larger or smaller than requested."""
        total = sum(map(len, rows.values()))
        for side in self.sides[1:]:
            share = getattr(self, side)
            count = len(rows[side])
            off = abs(count - share * total)
            if (self.stratify or self.group) and off > max(1, _TOLERANCE * share * total):
                warnings.warn(
                    f"{side} has {count:,} of {total:,} images ({count / total:.1%}) instead of "
                    f"the requested {share:.1%}, because the images of a group stay together",
                    stacklevel=2,
                )

    def _divide_classes(
        self,
        classes: Iterable[Sequence[str]],
        members: Mapping[str, Sequence[int]],
        sides: Mapping[str, list[int]],
    ) -> None:
        """Add the rows of the groups of each class to the sides."""
        ordered = [sorted(names, key=self._number) for names in classes]
        due = dict.fromkeys(SIDES, 0.0)  # images that a side lacks so far
        for names in sorted(ordered, key=lambda names: self._number(names[0])):
            total = sum(len(members[name]) for name in names)
            due[VAL] += self.val * total
            due[TEST] += self.test * total
            val = due[VAL]
            test = due[TEST]
            start = 0
            for name in names:
                rows = members[name]
                side = _side(start + len(rows) / 2, val, test)
                sides[side].extend(rows)
                due[side] -= len(rows)
                start += len(rows)

    def _number(self, group: str) -> float:
        data = b"split\0%d\0" % self.seed + group.encode("utf-8", "surrogateescape")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64


def _side(drawn: float, val: float, test: float) -> str:
    if drawn < val:
        return VAL
    return TEST if drawn < val + test else TRAIN


class Divided(Wrapper):
    """A source without splits, divided into some.

    ``names`` is the side of each split, by name, as a manifest states them; a side may then be
    empty. None means all sides by their own names.
    """

    def __init__(
        self, source: Source, division: Division, names: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(source)
        self._division = division
        self._names = {side: side for side in division.sides} if names is None else dict(names)
        self._may_be_empty = names is not None
        self._scan: Scan | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self._division, self._names)

    def inner(self, split: str) -> str:
        """Return "": the source has no splits."""
        return ""

    @property
    def stratified(self) -> bool:
        """Whether the side of an image also depends on the other images."""
        return self._division.stratify

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of each side, none of which may be empty."""
        scan = self._scan = self.source.scan(classes)
        self._require_whole(scan)
        if self._division.stratify and (scan.classes is None or not scan.known):
            raise UsageError(
                f"{setting('stratify', True)} needs labels, but {self} has none until its images "
                "are read"
            )
        sides = self._divide(scan.splits[""].entries)
        if not self._may_be_empty:
            self._require_sides({name: sides[side] for name, side in self._names.items()})
        self._division.warn_if_off(sides)
        counts = ", ".join(f"{side} {len(entries):,}" for side, entries in sides.items())
        first = next((name for name, side in self._names.items() if side == TRAIN), None)
        return replace(
            scan,
            source=self,
            splits={name: Images(self, name, sides[side]) for name, side in self._names.items()},
            ignored={first: scan.ignored.get("", [])} if first is not None else {},
            problems={first: scan.problems.get("", [])} if first is not None else {},
            understood={**scan.understood, "divided": counts} if scan.understood else {},
        )

    def _require_whole(self, scan: Scan) -> None:
        if list(scan.splits) != [""]:
            choice = f"divide one of them, such as {self}/{next(iter(scan.splits))}, or "
            raise UsageError(
                f"{self} already has splits: {name_list(scan.splits)}",
                remedy=f"{choice * (not os.path.isfile(str(self)))}leave out "
                f"{setting('val')} and {setting('test')}",
            )

    def _require_sides(self, splits: Mapping[str, Sized]) -> None:
        empty = [self._names[name] for name, images in splits.items() if not len(images)]
        if empty:
            more = f", another seed, or {setting('stratify', True)}"
            remedy = "" if self._division.stratify else more
            raise UsageError(
                f"no image of {self} is in {empty[0]}", remedy=f"choose a larger fraction{remedy}"
            )

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the description of the source, with the division and the side."""
        division = {**asdict(self._division), "side": self._names[split]}
        return {**super().describe(split), DIVISION: division}

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a side as the conversion listed them."""
        if split not in self._names or self._scan is None:
            return ()
        if not skipped:
            return scan.splits[split].entries
        listed = self.source.relist(self._scan, "", skipped)
        return self._divide(listed)[self._names[split]]

    def _divide(self, entries: Sequence[Entry]) -> dict[str, Sequence[Entry]]:
        if isinstance(entries, StoredEntries) and self._division.by_path:
            by_side = entries.divide(lambda batch: map(self._division.side_of, self._groups(batch)))
            return {side: by_side.get(side, ()) for side in self._division.sides}
        names = self._groups(entries)
        rows = self._division.divide(names, [entry.label for entry in entries])
        packed = as_packed(entries)
        return {side: packed.take(chosen) for side, chosen in rows.items()}

    def _other_way(self, group: str) -> str:
        """Return what to do if the source does not state groups."""
        if not is_source(self.kind):  # Python samples, which are not read for groups
            return "Convert them first, then"
        if get_source(self.kind).has_option("keep"):
            return (
                f"Group by folder, or keep the column ({setting('keep', group)}). If its values "
                "are known only after images are read, convert them first, then"
            )
        return (
            "Group by folder; or convert without dividing, add the column (`shardkit fields add`), "
            "and"
        )

    def _groups(self, entries: Sequence[Entry]) -> Sequence[str]:
        """Return the group of each image, or its path without groups."""
        group = self._division.group
        if group is None:
            return [entry.path for entry in entries]
        if group == FOLDER:
            return [entry.path.rpartition("/")[0] for entry in entries]
        try:
            values = list(self.column(entries, group))
        except UsageError as error:
            raise UsageError(
                f"{setting('group', group)}: {error};", remedy="or group by folder"
            ) from error
        lacking = [
            entry.path
            for entry, value in zip(entries, values, strict=True)
            if type(value) not in (str, int, float, bool)
        ]
        if lacking and len(lacking) < len(entries):
            raise UsageError(
                f"{setting('group', group)}: this column has no number or text for "
                f"{len(lacking):,} of {len(entries):,} images, such as {quoted(lacking[0])};",
                remedy="add a value for each image",
            )
        if lacking:
            problem = f"{self} has no such column of numbers or text"
            if not is_source(self.kind):
                problem = f"{self} has no columns until it is converted"
            raise UsageError(
                f"{setting('group', group)}: {problem}. "
                f"{self._other_way(group)} divide the dataset: "
                f"{as_command('split', '--group', group)}"
            )
        return list(map(str, values))


class DividedParts(Divided, PartedSource):
    """A source of parts, divided by paths or folders, as a `shardkit.contracts.PartedSource`."""

    source: PartedSource

    def parts(
        self, most: int, classes: Sequence[str] | None = None
    ) -> tuple[Scan, Sequence[SourcePart]]:
        """Return a scan without images, and the parts of the source."""
        scan, parts = self.source.parts(most, classes)
        self._require_whole(scan)
        first = next(iter(self._names))
        divided_scan = replace(
            scan,
            source=self,
            splits={name: Images(self, name, ()) for name in self._names},
            ignored={first: scan.ignored[""]},
            problems={first: scan.problems[""]},
        )
        return divided_scan, [SourcePart(first, part) for part in parts]

    def list_part(self, part: SourcePart) -> PartListing:
        """List the images of a part."""
        listing = self.source.list_part(part.place)
        return listing._replace(entries=self._sides(entry for _, entry in listing.entries))

    def require_images(self, scan: Scan) -> None:
        """Refuse a source of which a side is empty."""
        self.source.require_images(scan)
        self._require_sides(scan.splits)
        sides = {self._names[name]: images for name, images in scan.splits.items()}
        self._division.warn_if_off(sides)

    def _sides(self, entries: Iterable[Entry]) -> Iterator[tuple[str, Entry]]:
        names = {side: name for name, side in self._names.items()}
        for entry in entries:
            (group,) = self._groups([entry])
            yield names[self._division.side_of(group)], entry


def divided(source: Source, **options: Any) -> Source:
    """Return a source divided by the options of `Division`; the source itself without shares."""
    if options.get("val") or options.get("test"):
        division = Division(**options)
        in_parts = division.by_path and isinstance(source, PartedSource)
        return (DividedParts if in_parts else Divided)(source, division)
    if options.get("stratify") or options.get("group") is not None:
        raise UsageError(
            f"{setting('stratify')} and {setting('group')} require {setting('val')} or "
            f"{setting('test')}"
        )
    return source


def is_divided(described: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether descriptions, by split, are of sides of one source."""
    return any(DIVISION in description for description in described.values())


def reopen(
    find: Callable[[Mapping[str, Mapping[str, Any]]], Source],
    described: Mapping[str, Mapping[str, Any]],
) -> Source:
    """Open the source that manifests describe, divided as they say.

    ``find`` opens a source from its descriptions, by split.
    """
    try:
        divisions = {split: dict(described[split][DIVISION]) for split in described}
        names = {split: str(division.pop("side")) for split, division in divisions.items()}
        (rule,) = {tuple(sorted(division.items())) for division in divisions.values()}
        division = Division(**dict(rule))
        if not set(names.values()) <= set(division.sides):
            raise ValueError(f"no split is called {sorted(names.values())}")
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise CorruptDataset(
            f"the manifest does not state how images were divided: {fault(error)}"
        ) from error
    inner = {
        name: value for name, value in next(iter(described.values())).items() if name != DIVISION
    }
    return Divided(find({"": inner}), division, names)
