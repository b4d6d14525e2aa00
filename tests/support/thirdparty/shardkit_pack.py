"""A source from another package that can be attached: images end to end in one file.

Before the bytes of an image, there is a line of text: ``LABEL SIZE NAME``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardkit.contracts import (
    AttachableSource,
    Attaching,
    Entry,
    Located,
    SourceKind,
    SourceOptions,
)
from shardkit.errors import BadImage
from shardkit.options import option
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.sources.driver import FileSource, Listing, Row
from shardkit.sources.images import image_record
from shardkit.sources.inputs import OpenedFile, file_at, place, place_of, reading
from shardkit.sources.labels import classes_option, read_classes


@dataclass(frozen=True, kw_only=True)
class PackOptions(SourceOptions):
    """The options of this source."""

    prefix: str | None = option(None, help="Only images whose names start with this.")
    classes: str | bool | None = classes_option()


class Pack(FileSource, AttachableSource):
    kind = "pack"

    def __init__(self, path: str | Path, options: PackOptions) -> None:
        super().__init__(path, options, (".pack",))
        self._prefix = options.prefix or ""
        self.class_names = read_classes(options.classes)

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        (listing,) = listings.values()
        self.list_files(listing, partial(self._list, listing))
        return {"images": f"{len(listing):,}", "label": "the line"}

    def _list(self, listing: Listing, number: int, view: OpenedFile) -> None:
        start = 0
        while start < view.size:
            line, newline, _ = view.read(start, 1000).partition(b"\n")
            try:
                label, size, name = line.decode().split(" ", 2)
                end = start + len(line) + len(newline)
                start = end + int(size)
            except ValueError as error:
                raise BadImage(f"there is no image at byte {start}") from error
            if name.startswith(self._prefix):
                row = Row(name, listing.code(label), int(size), view.stamp, place(number, end))
                listing.add(row)

    def read(self, split: str, entry: Entry) -> Record:
        path, offset = file_at(self.inputs.paths, entry.place)
        with reading(path, entry.stamp) as view:
            return image_record(entry, view.read(offset, entry.bytes))

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        for entry in entries:
            try:
                record = self.read(split, entry)
            except BadImage as error:
                yield error
            else:
                field = record.image_field or FOREIGN_FIELD
                yield Located(record, {field: place_of(entry.place)[1]})


SOURCE = SourceKind(
    name=Pack.kind,
    title="Convert the images in .pack files.",
    help="Convert the images in SRC, a .pack file or a folder of them, to a dataset in DST.",
    options=PackOptions,
    of_files=True,
    attaching=Attaching(
        title="Files of images end to end.",
        help="Index the images in ARCHIVES where they are, as a dataset in INDEX_DIR.",
    ),
    source=Pack,
)
