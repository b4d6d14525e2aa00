"""Tar archives of samples in WebDataset's way, from any program, as a source."""

from __future__ import annotations

import functools
import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Located, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import FOREIGN_FIELD, NO_LABEL, STORED_APART, Record, image_field
from shardkit.sources.images import has_image_suffix, image_record
from shardkit.sources.inputs import (
    CHANGED,
    PACKED_SUFFIXES,
    View,
    find_files,
    place,
    place_of,
    reading,
    scanning,
    stem,
)
from shardkit.sources.kept import kind_of_suffix, parse_keep, value_of, with_fields
from shardkit.sources.labels import Value, checked_label, read_classes
from shardkit.sources.listing import FileSource, Listing, scan_of
from shardkit.sources.tar_members import Member, content, members

_SUFFIXES = (".tar", ".tar.gz", ".tgz")
GROUPINGS = ("webdataset", "huggingface", "basename")

_FIRST_DOT = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]*)\Z", re.DOTALL)
_LAST_DOT = re.compile(r"((?:.*/)?[^/]+)\.([^./]*)\Z", re.DOTALL)
_META = re.compile(r"__[^/]*__(/|\Z)")
"""Members that WebDataset skips."""

_MOST_TEXT = 1 << 20
"""Maximum bytes of a member with the label."""

_FIRST_MEMBERS = 64
"""Members from which the way to label is inferred."""


class WebDataset(FileSource):
    """Tar archives in which the members ``KEY.SUFFIX`` of one sample share their key.

    Unlike WebDataset's own reader, this one finds members that are not adjacent, and reports
    truncated archives, repeated members and samples without image or label instead of passing over
    them. Samples are in the order of their first members. Archives that end in ``.gz`` or ``.tgz``
    are unpacked to a temporary file.

    Args:
        pattern: A file, a folder, or names with ``{000..999}``, ``*`` or ``?``.
        grouping: How names are divided. ``webdataset``: at the first dot after the last slash, with
            the suffix in lower case. ``huggingface``: the same, but suffixes differ by case.
            ``basename``: at the last dot.
        image: The suffix of the image; None takes the only member whose suffix is that of an image.
        label: Where the label is: ``cls`` or another suffix, for an integer or text;
            ``json:/path``, for a value in a JSON object; ``folder``, for the part of the key before
            the last slash; or ``none``. None takes ``cls`` if the first samples have one.
        keep: More fields, as ``NAME=SUFFIX[:KIND][?]`` with commas between: ``caption=txt``,
            ``age=json:/age:int64``, ``mask=mask.png:mask?``. A sample may lack those with ``?``.
        classes: A text file with a class name in each line.
    """

    kind = "webdataset"
    raw_shape = None

    def __init__(  # noqa: PLR0913 - the options of its command
        self,
        pattern: str | Path,
        *,
        grouping: str = "webdataset",
        image: str | None = None,
        label: str | None = None,
        keep: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        if grouping not in GROUPINGS:
            raise UsageError(
                f"--grouping {grouping} is unknown; choose from {', '.join(GROUPINGS)}"
            )
        self._files = find_files(pattern, _SUFFIXES)
        self._grouping = grouping
        self._image = image
        self._names = read_classes(classes)
        self._reopened = _reopened
        self._label = label or self._infer_label()
        self._keep = parse_keep(keep)
        self._schema = {
            kept.name: kept.field("json" if kept.pointer else kind_of_suffix(kept.source))
            for kept in self._keep
        }
        options = {
            "grouping": grouping,
            "image": image,
            "label": self._label,
            "keep": keep,
            "class_names": True if classes or _reopened else None,
        }
        super().__init__(pattern, options)

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> WebDataset:
        """Open the archives that a dataset was made from."""
        options = next(iter(described.values()))
        return cls(
            path,
            grouping=options.get("grouping", "webdataset"),
            image=options.get("image"),
            label=options.get("label"),
            keep=options.get("keep"),
            _reopened=bool(options.get("class_names")),
        )

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        number, _ = place_of(entry.place)
        with reading(self._files.paths[number], entry.stamp) as view:
            return self._locate(view, entry).record

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return each archive with its images.

        Raises:
            UsageError: If an archive is compressed.
        """
        for path in self._files.paths:
            if path.endswith(PACKED_SUFFIXES):
                raise UsageError(
                    f"{path} is compressed, so its images cannot be read in place: unpack it, or "
                    "use `shardkit convert`"
                )
        rows: list[list[int]] = [[] for _ in self._files.paths]
        for row, entry in enumerate(images.entries):
            rows[place_of(entry.place)[0]].append(row)
        return [
            (Path(path), images.take(some))
            for path, some in zip(self._files.paths, rows, strict=True)
        ]

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images of one archive, with the offsets of its members."""
        if entries:
            number, _ = place_of(entries[0].place)
            with reading(self._files.paths[number], entries[0].stamp, ahead=True) as view:
                for entry in entries:
                    try:
                        found = self._locate(view, entry)
                        for name, offset in found.offsets.items():
                            if offset < 0:
                                raise BadImage(f"its {name} is not stored in one piece as it is")
                        yield found
                    except BadImage as error:
                        yield error

    def _locate(self, view: View, entry: Entry) -> Located:
        """Return the record of an image; an offset is -1 if the archive has other bytes there."""
        member = next(members(view, place_of(entry.place)[1]), None)
        if member is None or member.size != entry.bytes:
            raise BadImage(CHANGED)
        record = image_record(entry, content(view, member))
        offsets = {record.image_field or FOREIGN_FIELD: _offset(member)}
        if not self._keep:
            return Located(record, offsets)
        values: dict[str, Any] = {}
        apart: dict[str, tuple[Member, bytes]] = {}
        for kept, start in zip(self._keep, json.loads(entry.values), strict=True):
            if start is not None:
                member = next(members(view, start))
                field = self._schema[kept.name]
                data = content(view, member)
                values[kept.name] = value_of(kept, field, data)
                if field.kind in STORED_APART:
                    apart[kept.name] = member, data
        record = with_fields(record, self._schema, values)
        for name, (member, data) in apart.items():
            field = self._schema[name]
            stored = field.stored_name(name) or image_field(record.fields, name) or name
            offsets[stored] = _offset(member) if record.fields.get(stored) == data else -1
        return Located(record, offsets)

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the samples of all archives, in order.

        Raises:
            UsageError: If there are no samples, or labels are out of range.
        """
        listing = self._listing()
        found = _Found()
        for number, path in enumerate(self._files.paths):
            samples: dict[str, _Sample] = {}
            stamps: list[int] = []
            walk = functools.partial(self._walk, number, listing, samples, stamps)
            reason = scanning(path, walk)
            self._choose(number, listing, samples, found, stamps[0] if stamps else 0)
            if reason:
                listing.blame_rest(self._files.names[number], reason)
        found.add_to(listing, [stem(name, _SUFFIXES) for name in self._files.names])
        labels = listing.labels.assign(classes, self._names, reopened=self._reopened)
        images = ", ".join(f"{name} ({count:,})" for name, count in found.images.most_common())
        unused = ", ".join(f"{name} ({count:,})" for name, count in found.unused.most_common(20))
        understood = {
            "archives": f"{len(self._files.paths):,}, with {len(listing):,} samples grouped by the "
            f"rule {self._grouping}",
            "image": images or "none",
            "label": f"{self._label}: {listing.labels.describe()}",
            **{kept.name: f"{kept.source}: {self._schema[kept.name]}" for kept in self._keep},
            "unused": unused or "no member",
        }
        return scan_of(self, {"": listing}, labels, understood, more=self._schema)

    def _walk(
        self,
        number: int,
        listing: Listing,
        samples: dict[str, _Sample],
        stamps: list[int],
        view: View,
    ) -> None:
        """Collect the samples of one archive."""
        stamps.append(view.stamp)
        for member in members(view):
            if member.what == "a folder":
                continue
            parts = self._divide(member.name)
            if parts is None or member.what:
                why = member.what or "its name has no key and suffix"
                listing.ignore(f"{self._files.names[number]}:{member.name}", why)
                continue
            key, suffix = parts
            sample = samples.setdefault(key, _Sample())
            if suffix in sample.fields:
                sample.repeated.append(member.name)
                continue
            sample.fields[suffix] = member
            if suffix == self._label.partition(":")[0]:
                sample.value = self._value(view, member)

    def _divide(self, name: str) -> tuple[str, str] | None:
        """Return key and suffix of a member's name, or None if WebDataset skips it."""
        if _META.match(name):
            return None
        match = (_LAST_DOT if self._grouping == "basename" else _FIRST_DOT).match(name)
        if match is None or not match[2]:
            return None
        return match[1], match[2] if self._grouping == "huggingface" else match[2].lower()

    def _value(self, view: View, member: Member) -> Value | BadImage:
        """Return the label in a member, or what is wrong with it."""
        if member.size > _MOST_TEXT:
            return BadImage(f"its {self._label} has {member.size} bytes, too many for a label")
        try:
            text = content(view, member).decode()
            if ":" not in self._label:
                return checked_label(text.strip(), self._label)
            value = json.loads(text)
            for part in self._label.partition(":")[2].strip("/").split("/"):
                value = value[int(part) if isinstance(value, list) else part]
            return checked_label(value, self._label)
        except BadImage as error:
            return error
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            return BadImage(f"its sample has no label at {self._label}")

    def _choose(
        self,
        number: int,
        listing: Listing,
        samples: Mapping[str, _Sample],
        found: _Found,
        stamp: int,
    ) -> None:
        """Find image and label of each sample of an archive."""
        archive = self._files.names[number]
        used = self._label.partition(":")[0]
        for key, sample in samples.items():
            for name in sample.repeated:
                listing.blame(
                    f"{archive}:{name} (again)", "the archive has two members of this name"
                )
            try:
                suffix = self._image_of(sample)
                code = self._code(key, sample, listing)
                values = self._values(sample)
            except BadImage as error:
                listing.blame(f"{archive}:{key}", str(error))
                continue
            found.images[suffix] += 1
            found.unused.update(
                sample.fields.keys() - {suffix, used, *(kept.source for kept in self._keep)}
            )
            image = sample.fields[suffix]
            spot = place(number, image.start)
            found.add(_plain(image.name), values, code, image.size, stamp, spot)

    def _values(self, sample: _Sample) -> str:
        """Return where the fields to keep are, as JSON, or "" without any."""
        if not self._keep:
            return ""
        for kept in self._keep:
            if kept.source not in sample.fields and not kept.optional:
                raise BadImage(f"its sample has no member {kept.source}; {kept.source}? accepts it")
        members_ = [sample.fields.get(kept.source) for kept in self._keep]
        return json.dumps([member and member.start for member in members_])

    def _image_of(self, sample: _Sample) -> str:
        if self._image is not None:
            if self._image not in sample.fields:
                has = ", ".join(sample.fields)
                raise BadImage(f"its sample has no member {self._image}; it has {has}")
            return self._image
        kept = {kept.source for kept in self._keep}
        suffixes = [name for name in sample.fields if has_image_suffix(name) and name not in kept]
        if len(suffixes) == 1:
            return suffixes[0]
        if suffixes:
            raise BadImage(
                f"its sample has {len(suffixes)} images ({', '.join(suffixes)}): choose one with "
                "--image"
            )
        raise BadImage(f"its sample has no image; it has {', '.join(sample.fields)}")

    def _code(self, key: str, sample: _Sample, listing: Listing) -> int:
        if self._label == "none":
            return NO_LABEL
        value = sample.value
        if self._label == "folder":
            value = _plain(key).rpartition("/")[0] or BadImage("it is not in a folder")
        if value is None:
            value = BadImage(f"its sample has no member {self._label.partition(':')[0]}")
        if isinstance(value, BadImage):
            raise value
        return listing.labels.code(value)

    def _infer_label(self) -> str:
        """Return ``cls`` if the first samples have one."""
        suffixes: set[str] = set()

        def look(view: View) -> None:
            for member in itertools.islice(members(view), _FIRST_MEMBERS):
                suffixes.update((self._divide(member.name) or ("", ""))[1:])

        scanning(self._files.paths[0], look)
        return "cls" if "cls" in suffixes else "none"


@dataclass
class _Sample:
    """The members of one sample."""

    fields: dict[str, Member] = field(default_factory=dict)
    repeated: list[str] = field(default_factory=list)
    value: Value | BadImage | None = None


class _Found:
    """The images of all archives, before it is known whether their names are unique."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        self._names: list[str] = []
        self._values: list[str] = []
        self._numbers = array("q")

    def add(self, name: str, values: str, *numbers: int) -> None:
        """Add an image by its name, its values, and the other arguments of `Listing.add`."""
        self._names.append(name)
        self._values.append(values)
        self._numbers.extend(numbers)

    def add_to(self, listing: Listing, archives: Sequence[str]) -> None:
        """List all images; if names repeat, each after the name of its archive."""
        unique = len(set(self._names)) == len(self._names)
        rows = zip(self._names, self._values, _by_four(self._numbers), strict=True)
        for name, values, numbers in rows:
            path = name if unique else f"{archives[place_of(numbers[3])[0]]}/{name}"
            listing.add(path, *numbers, values)


def _by_four(numbers: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    each = iter(numbers)
    return zip(each, each, each, each, strict=True)


def _offset(member: Member) -> int:
    """Return the offset of a member's content; -1 if it is in several pieces."""
    (piece, *others) = member.pieces or (None,)
    return -1 if piece is None or others or piece.length != member.size else piece.offset


def _plain(name: str) -> str:
    """Return a member's name without ``./`` or slashes in front."""
    return re.sub(r"\A(?:\.?/+)+", "", name) or name


SOURCE = SourceKind(
    name=WebDataset.kind,
    title="Convert WebDataset tar files of other programs.",
    help="""Convert the samples in tar archives to a dataset in DST.

    SRC is an archive, a folder of them, or quoted names with {000..999}, * or ?. The members of a
    sample share the name up to the first dot, and need not be adjacent. Truncated archives,
    repeated members, and samples without image or label are reported.

    \b
    Examples:
      shardkit convert webdataset 'train-{000..146}.tar' dataset --to lmdb --dry-run
      shardkit convert webdataset laion dataset --to webdataset --image jpg --label json:/class
      shardkit convert webdataset laion dataset --to lmdb --keep caption=txt,url=json:/url:text
      shardkit convert webdataset folder.tar dataset --to lmdb --grouping basename --label folder
    """,
    options=(
        SourceOption(
            flags="--grouping",
            default="webdataset",
            metavar="webdataset|huggingface|basename",
            help="Rule that divides names: at the first dot; the same, but suffixes differ by "
            "case; or at the last dot.",
        ),
        SourceOption(
            flags="--image",
            metavar="SUFFIX",
            help="Suffix of the image.  [default: the only one of an image]",
        ),
        SourceOption(
            flags="--label",
            metavar="SUFFIX|json:/PATH|folder|none",
            help="Where the label is: a member with an integer or text, a value in a JSON member, "
            "or the folder in the name.  [default: cls, or none]",
        ),
        SourceOption(
            flags="--keep",
            metavar="NAME=SUFFIX[:KIND][?],...",
            help="More fields to keep, such as caption=txt,age=json:/age:int64,mask=mask.png:mask. "
            "Samples may lack those with ?.",
        ),
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ..., or in the order of labels.",
        ),
    ),
    of_files=True,
    open=WebDataset,
    find=WebDataset.find,
)
