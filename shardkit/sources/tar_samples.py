"""Samples in tar archives: members whose names share a key, while archives are walked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shardkit.errors import BadImage, setting
from shardkit.record import load_json
from shardkit.sources.driver import Listing, Row
from shardkit.sources.images import has_image_suffix
from shardkit.sources.inputs import place_of
from shardkit.sources.labels import Value
from shardkit.sources.row_log import RowLog
from shardkit.sources.tar_members import Member
from shardkit.system.text import name_list
from shardkit.system.text_hashes import TextHashes

GROUPINGS = ("webdataset", "huggingface", "basename")

_FIRST_DOT = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]*)\Z", re.DOTALL)
_LAST_DOT = re.compile(r"((?:.*/)?[^/]+)\.([^./]*)\Z", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|\Z)")
"""Members that WebDataset skips."""

_MOST_FOLDERS = 10_000


def divide(name: str, grouping: str) -> tuple[str, str] | None:
    """Return key and suffix of a member's name, or None if WebDataset skips it.

    ``grouping`` is one of `GROUPINGS`.
    """
    if _META.match(name):
        return None
    match = (_LAST_DOT if grouping == "basename" else _FIRST_DOT).match(name)
    if match is None or not match[2]:
        return None
    return match[1], match[2] if grouping == "huggingface" else match[2].lower()


@dataclass
class Sample:
    """The members of one sample."""

    fields: dict[str, Member] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    value: Value | BadImage | None = None

    def image(self, chosen: str | None, kept: Collection[str]) -> str:
        """Return the suffix of the image: the chosen one, or the only one that is not kept.

        It raises BadImage if there is no such member.
        """
        if chosen is not None:
            if chosen not in self.fields:
                has = name_list(self.fields)
                raise BadImage(f"its sample has no member {chosen}; it has {has}")
            return chosen
        suffixes = [name for name in self.fields if has_image_suffix(name) and name not in kept]
        if len(suffixes) == 1:
            return suffixes[0]
        if suffixes:
            raise BadImage(
                f"its sample has {len(suffixes)} images ({name_list(suffixes)})",
                remedy=f"choose one with {setting('image')}",
            )
        raise BadImage(f"its sample has no image; it has {name_list(self.fields)}")


@dataclass
class Archive:
    """One archive, while its samples are collected."""

    number: int
    name: str
    stamp: int = 0
    samples: dict[str, Sample] = field(default_factory=dict)


class Samples:
    """The images of all archives, before it is known whether their names are unique."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self.folders: set[str] = set()
        """Those in names, as far as there are few."""
        self._rows = RowLog()
        self._hashes = TextHashes()

    def add(self, row: Row) -> None:
        """Add an image, by its name in the archive."""
        self._rows.append(row)
        self._hashes.add(row.path)
        if len(self.folders) < _MOST_FOLDERS:
            self.folders.add(row.path.rpartition("/")[0])

    def add_to(self, listing: Listing, archives: Sequence[str]) -> None:
        """List all images; if names repeat, each after the name of its archive."""
        alike = self._hashes.repeated()
        names = Counter(row[0] for row in self._rows if hash(row[0]) in alike) if alike else {}
        unique = max(names.values(), default=1) == 1
        for row in map(Row._make, self._rows):
            folder = "" if unique else f"{archives[place_of(row.place)[0]]}/"
            listing.add(row._replace(path=f"{folder}{row.path}"))


def plain_name(name: str) -> str:
    """Return a member's name without ``./`` or slashes in front."""
    return re.sub(r"\A(?:\.?/+)+", "", name) or name


def json_paths(data: bytes) -> list[str]:
    """Return where the values of a JSON object are, such as ``json:/class``; none if it is none."""
    try:
        return [f"json:/{key}" for key in load_json(data)]
    except ValueError:
        return []
