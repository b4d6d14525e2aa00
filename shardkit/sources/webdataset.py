"""Tar archives of samples in WebDataset's way, from any program, as a source."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shardkit.contracts import AttachableSource, Attaching, Entry, SourceKind, SourceOptions
from shardkit.errors import CHANGED, BadImage, setting
from shardkit.kinds.field import Field
from shardkit.options import option, require_valid
from shardkit.sources.column_source import Cells, RowFile, RowSource, row_files
from shardkit.sources.columns import NONE, Column, lost_labels, usual_label
from shardkit.sources.driver import Listing, Row
from shardkit.sources.inputs import OpenedFile, find_files, place, scanning
from shardkit.sources.kept import Kept, kind_of_suffix, parse_keep, value_of
from shardkit.sources.labels import Value, classes_option, label_of, read_classes
from shardkit.sources.recognize import having, require_one_split
from shardkit.sources.tar_members import Member, content, members
from shardkit.sources.tar_samples import (
    GROUPINGS,
    Archive,
    Sample,
    Samples,
    divide,
    json_paths,
    plain_name,
)

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.zst")
_MOST_TEXT = 1 << 20
"""Maximum bytes of a member with the label."""

_FIRST_MEMBERS = 64
"""Members from which the way to label is inferred."""


@dataclass(frozen=True, kw_only=True)
class WebDatasetOptions(SourceOptions):
    """The options of this source."""

    grouping: str = option(
        "webdataset",
        help="Rule for splitting names. webdataset: at the first dot. huggingface: the same, "
        "with case-sensitive suffixes. basename: at the last dot.",
        choices=GROUPINGS,
    )
    image: str | None = option(
        None, help="Suffix of the image.", metavar="SUFFIX", shown="the only image suffix"
    )
    label: str | None = option(
        None,
        help="Location of the label: a member with an integer or text, a value in a JSON "
        "member, or the folder in the name.",
        metavar="SUFFIX|json:/PATH|folder|none",
        shown="cls, or another common name, or none",
    )
    keep: str | None = option(
        None,
        help="Additional fields to keep, such as "
        "caption=txt,age=json:/age:int64,mask=mask.png:mask. A field with ? may be missing.",
        metavar="NAME=SUFFIX[:KIND][?],...",
    )
    classes: str | PathLike[str] | None = classes_option()


class WebDataset(RowSource, AttachableSource):
    """Tar archives in which the members ``KEY.SUFFIX`` of one sample share their key.

    Unlike WebDataset's own reader, this one finds members that are not adjacent, and reports
    truncated archives, repeated members and samples without image or label instead of passing over
    them. Samples are in the order of their first members. Archives that end in ``.gz`` or ``.tgz``
    are unpacked to a temporary file.

    ``grouping``: names are divided at the first dot after the last slash, with the suffix in lower
    case (``webdataset``); the same, but suffixes differ by case (``huggingface``); or at the last
    dot (``basename``). Without ``image``, the image is the only member whose suffix is that of an
    image. ``label``: ``cls`` or another suffix, for an integer or text; ``json:/path``, for a value
    in a JSON object; ``folder``, for the part of the key before the last slash; or ``none``.
    Without, it is ``cls``, or another member of a usual name, if the first samples have one.
    """

    kind = "webdataset"

    def __init__(self, pattern: str | Path, options: WebDatasetOptions) -> None:
        require_valid(options)
        require_one_split(pattern, _SUFFIXES)
        inputs = find_files(pattern, _SUFFIXES)
        super().__init__(pattern, options, row_files(inputs, _SUFFIXES))
        self.others = inputs.others
        self._grouping = options.grouping
        self._image = options.image
        self.class_names = read_classes(options.classes)
        self._lost = ""
        """A note on labels that are not used."""
        self._infers = options.label is None
        self.keep = parse_keep(options.keep)
        self._label = options.label or self._infer_label()
        self.settle(label=self._label)
        self.schema = {
            kept.name: kept.field("json" if kept.pointer else kind_of_suffix(kept.source))
            for kept in self.keep
        }

    def column_of(self, name: str) -> Column:
        """Return the members of a suffix as a column."""
        kind = kind_of_suffix(name)
        return Column(name, kind, kind, field=Field(kind))

    def is_in_place(self, column: Column, field: Field) -> bool:
        """Return whether it may be; each record is compared with its archive."""
        return True

    def fit(self, kept: Kept, value: Any) -> Any:
        """Return the value in the bytes of a member."""
        return value_of(kept, self.schema[kept.name], value)

    def row(self, file: RowFile, view: OpenedFile, entry: Entry) -> Cells:
        """Return a sample."""
        member = next(members(view, entry.place), None)
        if member is None or member.size != entry.bytes:
            raise BadImage(CHANGED)
        starts = zip(self.keep, json.loads(entry.values) if self.keep else (), strict=True)
        kept = {
            kept.source: next(members(view, start)) for kept, start in starts if start is not None
        }
        return _Members(view, {"": member, **kept})

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the samples of all archives, in order."""
        (listing,) = listings.values()
        listing.ignored += self.others
        samples = Samples()
        for number, file in enumerate(self.inputs):
            archive = Archive(number, file.name)
            reason = scanning(file.path, functools.partial(self._walk, archive, listing))
            self._choose(archive, listing, samples)
            if reason:
                listing.blame_rest(file.name, reason)
        self.notes += filter(None, [self._lost or self._lost_folders(samples)])
        samples.add_to(listing, [file.folder for file in self.inputs])
        images = ", ".join(f"{name} ({count:,})" for name, count in samples.images.most_common())
        unused = ", ".join(f"{name} ({count:,})" for name, count in samples.unused.most_common(20))
        return {
            "archives": f"{len(self.inputs):,}, containing {len(listing):,} samples grouped by "
            f"the {self._grouping} rule",
            "image": images or "none",
            "label": self._label,
            **{kept.name: f"{kept.source}: {self.schema[kept.name]}" for kept in self.keep},
            "unused": unused or "no member",
        }

    def _lost_folders(self, samples: Samples) -> str:
        """Return that the folders in names may be classes, or ""."""
        count = len(samples.folders)
        if not self._infers or self._label != NONE or not 1 < count < samples.images.total():
            return ""
        first = min(samples.folders)
        return f"folders such as {first} may be classes: {setting('label', 'folder')} reads them"

    def _walk(self, archive: Archive, listing: Listing, view: OpenedFile) -> None:
        """Collect the samples of one archive."""
        archive.stamp = view.stamp
        for member in members(view):
            if member.kind == "a folder":
                continue
            key_and_suffix = divide(member.name, self._grouping)
            if key_and_suffix is None or member.kind:
                why = member.kind or "not part of a sample"
                listing.ignore(f"{archive.name}:{member.name}", why)
                continue
            key, suffix = key_and_suffix
            sample = archive.samples.setdefault(key, Sample())
            if suffix in sample.fields:
                sample.repeated.append(member.name)
                continue
            sample.fields[suffix] = member
            if suffix == self._label.partition(":")[0]:
                sample.value = self._value(view, member)

    def _value(self, view: OpenedFile, member: Member) -> Value | BadImage:
        """Return the label in a member, or what is wrong with it."""
        suffix, colon, pointer = self._label.partition(":")
        if member.size > _MOST_TEXT:
            return BadImage(f"its {suffix} has {member.size} bytes, too many for a label")
        kept = Kept(suffix, suffix, pointer if colon else None, "text")
        try:
            value = value_of(kept, kept.field(""), content(view, member))
        except BadImage:
            return BadImage(f"its sample has no label at {self._label}")
        try:
            return label_of(value, self._label)
        except BadImage as error:
            return error

    def _choose(self, archive: Archive, listing: Listing, samples: Samples) -> None:
        """Find image and label of each sample of an archive."""
        used = self._label.partition(":")[0]
        kept = {kept.source for kept in self.keep}
        for key, sample in archive.samples.items():
            for name in sample.repeated:
                listing.blame(
                    f"{archive.name}:{name} (again)", "the archive has two members with this name"
                )
            try:
                suffix = sample.image(self._image, kept)
                code = self._code(key, sample, listing)
                values = self._values(sample)
            except BadImage as error:
                listing.blame(f"{archive.name}:{key}", error.stated)
                continue
            samples.images[suffix] += 1
            samples.unused.update(sample.fields.keys() - {suffix, used} - kept)
            image = sample.fields[suffix]
            spot = place(archive.number, image.start)
            samples.add(Row(plain_name(image.name), code, image.size, archive.stamp, spot, values))

    def _values(self, sample: Sample) -> str:
        """Return where the fields to keep are, as JSON, or "" without any."""
        if not self.keep:
            return ""
        for kept in self.keep:
            if kept.source not in sample.fields and not kept.optional:
                raise BadImage(
                    f"its sample has no member {kept.source}; to allow this, write {kept.source}?"
                )
        members_ = [sample.fields.get(kept.source) for kept in self.keep]
        return json.dumps([member and member.start for member in members_])

    def _code(self, key: str, sample: Sample, listing: Listing) -> int:
        if self._label == NONE:
            return listing.code(None)
        value = sample.value
        if self._label == "folder":
            folder = plain_name(key).rpartition("/")[0]
            if not folder:
                raise BadImage("it is not in a folder")
            return listing.code(folder, is_name=True)
        if value is None:
            value = BadImage(f"its sample has no member {self._label.partition(':')[0]}")
        if isinstance(value, BadImage):
            raise value
        return listing.labels.code(value)

    def _infer_label(self) -> str:
        """Return the member of the first samples that is called as labels are, cls before others.

        A value in their JSON that may be a label is noted.
        """
        suffixes: set[str] = set()
        values: set[str] = set()

        def look(view: OpenedFile) -> None:
            for member in itertools.islice(members(view), _FIRST_MEMBERS):
                suffix = (divide(member.name, self._grouping) or ("", ""))[1]
                suffixes.add(suffix)
                if suffix == "json" and member.size <= _MOST_TEXT:
                    values.update(json_paths(content(view, member)))

        scanning(self.inputs[0].path, look)
        label = "cls" if "cls" in suffixes else usual_label(suffixes)
        if not label:
            values -= {kept.source + f":/{kept.pointer}" for kept in self.keep}
            self._lost = lost_labels(sorted(values), "json")
        return label or NONE


class _Members(Cells):
    """A sample: its members by suffix; the image has none."""

    def __init__(self, view: OpenedFile, members_: Mapping[str, Member]) -> None:
        self._view = view
        self._members = members_

    def has(self, name: str) -> bool:
        return name in self._members

    def value(self, column: Column) -> bytes:
        return content(self._view, self._members[column.name])

    def offset(self, name: str) -> int | None:
        member = self._members[name]
        (extent, *others) = member.extents or (None,)
        is_contiguous = extent is not None and not others and extent.length == member.size
        return extent.offset if extent is not None and is_contiguous else None


SOURCE = SourceKind(
    name=WebDataset.kind,
    title="Convert WebDataset tar files from other programs.",
    help="""Convert the samples in tar archives to a dataset in DST.

    SRC is an archive, a folder of them, or a quoted pattern with {000..999}, * or ?. The members of
    a sample share the name up to the first dot, and need not be adjacent. Truncated archives,
    repeated members, and samples without image or label are reported.

    \b
    Examples:
      shardkit convert webdataset 'train-{000..146}.tar' dataset --to lmdb --dry-run
      shardkit convert webdataset laion dataset --to webdataset --image jpg --label json:/class
      shardkit convert webdataset laion dataset --to lmdb --keep caption=txt,url=json:/url:text
      shardkit convert webdataset folder.tar dataset --to lmdb --grouping basename --label folder
    """,
    options=WebDatasetOptions,
    of_files=True,
    refuses_shards=True,
    attaching=Attaching(
        title="Tar archives of samples.",
        help="""Index the samples in ARCHIVES where they are, as a dataset in INDEX_DIR.

        ARCHIVES is a tar file, a folder of them, or a quoted pattern with {000..999}, * or ?.
        Nothing is written next to them. Training, `verify`, `bench` and `convert` then read the
        archives through INDEX_DIR. Rerun the command to resume it, or to add archives.

        \b
        Examples:
          shardkit attach 'laion/{00000..00099}.tar' laion-index
          shardkit attach laion laion-index --label json:/class --keep caption=txt --workers 8
        """,
    ),
    recognize=having(suffixes=(".tar", ".tar.gz", ".tgz"), shards=_SUFFIXES),
    source=WebDataset,
)
