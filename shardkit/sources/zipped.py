"""Images in a zip archive as a source: read where they are, by the rules for folders of images.

Entries keep the offsets of members, so that no worker needs the directory of the archive.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardkit.contracts import (
    AttachableSource,
    Attaching,
    Entry,
    Images,
    Located,
    PartListing,
    Recognition,
    Scan,
    SourceKind,
    SourcePart,
)
from shardkit.errors import BadImage, Problem, UsageError, setting
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.registry import DEFAULT_SOURCE, get_source
from shardkit.sources.imagefolder import FolderOptions, ImageFolder
from shardkit.sources.images import image_record
from shardkit.sources.inputs import reading
from shardkit.sources.recognize import Overview, recognized
from shardkit.sources.table_layout import misread_folders, named, split_versions, unread_lists
from shardkit.sources.table_rows import SUFFIXES
from shardkit.sources.zip_file import (
    Inside,
    Member,
    ZipFolder,
    directory_of,
    member_of,
    read_member,
)
from shardkit.system.files import require_local
from shardkit.system.text import amount, shell


class ZipImages(ImageFolder, AttachableSource):
    """A zip archive of images as a `shardkit.contracts.Source`.

    Its folders mean what those of an `ImageFolder` mean. If there is only one folder, and that has
    folders, it is taken for the root. `Entry.stamp` is a member's CRC-32, and
    `Entry.values` its compressed size.
    """

    kind = "zip"

    def __init__(self, path: str | Path, options: FolderOptions | None = None) -> None:
        require_local(path)
        self.folder: ZipFolder = ZipFolder(str(path)).unwrapped()
        self.options = options or FolderOptions()

    def paths(self) -> Sequence[Path]:
        """Return the archive."""
        return [Path(self.folder.path)]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image."""
        return image_record(entry, self.folder.read(entry, entry.path))

    def parts(
        self, most: int, classes: Sequence[str] | None = None
    ) -> tuple[Scan, Sequence[SourcePart]]:
        """Return a scan without images, and the parts to list; see `ImageFolder.parts`."""
        if not self.options.classes:
            _refuse_other_kinds(self.folder)
        scan, parts = super().parts(most, classes)
        first = next(iter(scan.splits))
        scan.problems[first] += directory_of(self.folder.path).refused
        ignored = {**scan.ignored, first: [*scan.ignored[first], *self.folder.outside()]}
        return replace(scan, ignored=ignored), parts

    def list_part(self, part: SourcePart) -> PartListing:
        """List the images of some class folders, with the place of each."""
        listing = super().list_part(part)
        folder = self.folder.inner(part.split)
        return listing._replace(
            entries=((split, _placed(folder, entry)) for split, entry in listing.entries)
        )

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images of a split: the archive still lists the bad ones."""
        return scan.splits[split].entries if split in scan.splits else ()

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return the archive with its images; UsageError if some are compressed."""
        if packed := sum(bool(entry.values) for entry in images.entries):
            raise UsageError(
                f"{self.folder.path} contains {amount(packed, 'compressed image')}, which cannot "
                "be read in place",
                remedy="store them (`zip -0`), or use `shardkit convert zip`",
            )
        return [(Path(self.folder.path), images)]

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each image with its offset in the archive."""
        with reading(self.folder.path, ahead=True) as view:
            for entry in entries:
                try:
                    data, start = read_member(view, member_of(entry))
                    record = image_record(entry, data)
                    yield Located(record, {record.image_field or FOREIGN_FIELD: start})
                except BadImage as error:
                    yield error


def _placed(folder: ZipFolder, entry: Entry) -> Entry:
    member = folder.content(entry.path)
    if not isinstance(member, Member):
        raise UsageError(f"{folder.path} changed while it was listed", remedy="try again")
    return entry._replace(place=member.offset, values=member.packed)


def _refuse_other_kinds(folder: ZipFolder) -> None:
    """Refuse an archive of another layout, and images whose labels may be in a list."""
    seen = Inside(folder)
    unpacked = Inside(folder, Path("FOLDER", folder.below))
    others = [it for it in recognized(seen) if it.by.certain and it.kind != DEFAULT_SOURCE]
    if others:
        way = f"{_UNPACK}run {others[0].command(unpacked.path)}"
        if all(get_source(other.kind).reads_zip for other in others):
            way = f"run shardkit convert {shell(folder.path)} DST --to lmdb"
        raise UsageError(
            f"{folder} looks like {' and '.join(map(str, others))}, not class folders",
            remedy=f"{way}; or pass {setting('classes', True)} to use its folders as classes",
        )
    reasons = (
        ((why, f"{_UNPACK}run {way}") for why, way in misread_folders(unpacked)),
        _unread(seen, unpacked),
        ((why, f"{_UNPACK}run {way}") for why, way in split_versions(unpacked)),
        ((why, f"{_UNPACK}run {way}") for why, way in named(unpacked)),
    )
    for why, way in itertools.chain(*reasons):
        raise UsageError(
            f"{folder}: {why}",
            remedy=f"{way}. Pass {setting('classes', True)} to use the folders as classes",
        )


def _unread(seen: Inside, unpacked: Inside) -> Iterator[tuple[str, str]]:
    """Yield which lists may have the labels, and how to read them: here or unpacked."""
    for (file, way), (_, then) in zip(unread_lists(seen), unread_lists(unpacked), strict=True):
        is_read = way.startswith("shardkit convert table") and "imagefolder" not in way
        yield (
            f"its folders are not classes, but {file} may list the labels",
            f"run {way}" if is_read else f"{_UNPACK}run {then}",
        )


_UNPACK = "unpack it to FOLDER, and "


def _recognize(seen: Overview) -> Iterator[Recognition]:
    if not seen.is_folder:
        if seen.path.suffix.lower() == ".zip":
            yield Recognition("a .zip file")
    elif not any(map(seen.images, ("", *seen.folders()[:1]))):
        tables = seen.files(suffix=(*SUFFIXES, ".json", ".xlsx"))
        for name in seen.files(suffix=".zip")[:3]:
            lost = ""
            if tables:
                words = (seen.path / tables[0], "DST", "--to", "lmdb", "--root", seen.path / name)
                way = f"shardkit convert {shell('table', *words)}"
                lost = f", whose labels may be in {tables[0]} (`{way}`)"
            yield Recognition(f"{name}{lost}", certain=not lost, inside=name)


SOURCE = SourceKind(
    name=ZipImages.kind,
    title="Convert images in a zip archive, one folder for each class.",
    help="""Convert the images in the zip archive SRC to a dataset in DST, without unpacking it.

    Its folders are read as by `shardkit convert imagefolder`: one per class, or only images, or
    train, val and test folders of either. A single top-level folder that contains folders is not a
    class. System files, such as __MACOSX, are left out. Encrypted and repeated members, and names
    that lead out of the archive, are reported.

    \b
    Examples:
      shardkit convert zip photos.zip dataset --to lmdb
      shardkit convert zip photos.zip dataset --to webdataset --resize 256 --quality 90
    """,
    options=FolderOptions,
    of_files=True,
    attaching=Attaching(
        title="A zip archive of images that are stored, not compressed.",
        help="""Index the images in the zip archive ARCHIVES where they are, as a dataset in
        INDEX_DIR.

        Its folders are the classes. Images must be stored without compression (`zip -0`). This
        costs little, since image files are already compressed.

        \b
        Examples:
          zip -0 -r photos.zip photos
          shardkit attach zip photos.zip photos-index
        """,
    ),
    recognize=_recognize,
    source=ZipImages,
)
