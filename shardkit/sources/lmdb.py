"""LMDB environments from other programs as a source."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from shardkit.contracts import (
    AttachableSource,
    Attaching,
    Entry,
    Images,
    Located,
    Recognition,
    SourceKind,
    SourceOptions,
)
from shardkit.errors import CHANGED, BadImage, UsageError, setting
from shardkit.kinds.field import Field
from shardkit.options import option
from shardkit.record import NO_LABEL, Record
from shardkit.sources import lmdb_reader
from shardkit.sources.driver import ListedSource, Listing, Row
from shardkit.sources.images import image_record, require_machine
from shardkit.sources.inputs import located_in, refusing, require_rows
from shardkit.sources.labels import classes_option, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.recognize import Overview, having
from shardkit.system.files import read_small, require_local

_META = "meta_info.txt"
_META_LINE = re.compile(r"(\S.*) \(\d+, ?\d+(?:, ?\d+)?\) \d+\Z")
_CHUNK = 1000
_FUNCTION = "function"
"""The layout in the manifest for ``module:callable``."""
_WITH_FUNCTION = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)@(.+)\Z", re.DOTALL)
_PICKLED = re.compile(rb"\x80[\x02-\x05]")
"""How a pickle of protocol 2 or later starts."""
_OCR_FIELDS = {"text": Field("text")}


@dataclass(frozen=True, kw_only=True)
class LmdbOptions(SourceOptions):
    """The options of this source."""

    layout: str | None = option(
        None,
        help="Keys of the images. ocr: image-000000001 and label-000000001. basicsr: the names "
        "in meta_info.txt. images: every key. MODULE:FUNCTION: returns image and label for a key "
        "and a value.",
        metavar="ocr|basicsr|images|MODULE:FUNCTION",
        shown="inferred",
        store=lambda layout: _FUNCTION if ":" in layout else layout,
    )
    label: str | None = option(
        None,
        help="folder: the part of a key before the last slash is the class.",
        metavar="folder|none",
        shown="none",
    )
    classes: str | None = classes_option()


class Lmdb(ListedSource, AttachableSource):
    """An LMDB environment, read by the library ``lmdb`` in a child process.

    A manifest must not name code to run. If a function made its images, the user names it again, in
    the path: ``MODULE:FUNCTION@PATH``.

    Layouts: ``ocr``: ``num-samples``, ``image-000000001``, ``label-000000001``, ...; labels are
    texts. ``basicsr``: the images listed in ``meta_info.txt``. ``images``: every key is the name of
    an image. ``module:callable``: a function that gets each key and value, and returns an encoded
    image, or a pair of image and label, or None. The label ``folder`` uses the part of a key before
    the last slash as class, for ``images``.
    """

    kind = "lmdb"

    def __init__(self, path: str | Path, options: LmdbOptions) -> None:
        if options.layout == _FUNCTION:
            match = _WITH_FUNCTION.match(str(path))
            if match is None:
                raise UsageError(
                    "a function creates the images of this source",
                    remedy=f"add it to the source: MODULE:FUNCTION@{path}",
                )
            options = replace(options, layout=match[1])
            path = match[2]
        require_local(path)
        super().__init__(path, options)
        self._path = os.path.abspath(path)
        self.class_names = read_classes(options.classes)
        try:
            with refusing(f"{path} is not an LMDB environment"):
                stamp = self._stamp()
                self._entries, self._samples = call(lmdb_reader.facts, self._file, stamp)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        self._layout = options.layout or self._infer()
        if self._layout not in ("ocr", "basicsr", "images") and ":" not in self._layout:
            raise UsageError(
                f"{setting('layout', self._layout)} is unknown;",
                remedy="choose from ocr, basicsr, images, module:callable",
            )
        if options.label not in (None, "none", "folder"):
            raise UsageError(
                f"{setting('label', options.label)} is unknown;", remedy="choose from folder, none"
            )
        self._by_folder = options.label == "folder"
        self.settle(layout=self._layout)
        self.schema = _OCR_FIELDS if self._layout == "ocr" else {}

    def paths(self) -> Sequence[Path]:
        """Return the environment."""
        return [Path(self._path)]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image; with its text, for the layout ``ocr``."""
        if self._stamp() != entry.stamp:
            raise BadImage(CHANGED)
        text_key = b"label-%09d" % entry.place if self._layout == "ocr" else b""
        key = self._key(entry)
        answer = call(lmdb_reader.read, self._file, entry.stamp, self._layout, key, text_key)
        length = int.from_bytes(answer[:8], "little", signed=True)
        record = self._image_record(entry, answer[8 + max(0, length) :])
        if length < 0:
            return record
        try:
            text = answer[8 : 8 + length].decode()
        except UnicodeDecodeError as error:
            raise BadImage(f"its text, at key {text_key.decode()}, is not UTF-8") from error
        return self.complete(record, {"text": text})

    def _image_record(self, entry: Entry, data: bytes) -> Record:
        try:
            return image_record(entry, data)
        except BadImage as error:
            if ":" in self._layout or not data:
                raise
            problem = "pickled" if _PICKLED.match(data) else "not an encoded image"
            raise BadImage(
                f"its value is {problem}",
                remedy=f"unpack values with a function: {setting('layout', 'MODULE:FUNCTION')}",
            ) from error

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return the environment's only file, with all images.

        It raises UsageError if a function gives the images, so that the file need not have them.
        """
        if ":" in self._layout:
            raise UsageError(
                f"images from the layout function {self._layout} cannot be read in place",
                remedy="convert it with `shardkit convert`",
            )
        return [(self.path / "data.mdb" if self.path.is_dir() else self.path, images)]

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images, with the offset of its value."""

        def offsets(chunk: Sequence[Entry]) -> list[int | None]:
            keys = [self._key(entry) for entry in chunk]
            return call(lmdb_reader.offsets, self._file, chunk[0].stamp, keys)

        return located_in(self._file, entries, offsets, partial(self.read, split))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the environment and the key of an image."""
        return f"{self._path}: {os.fsdecode(self._key(entry))}"

    def list_images(self, listings: Mapping[str, Listing]) -> Mapping[str, str]:
        """List the images: in the order of numbers, of ``meta_info.txt``, or of keys."""
        (listing,) = listings.values()
        lists = {"ocr": self._list_numbers, "basicsr": self._list_names}
        with refusing(self._path):
            used = lists.get(self._layout, self._list_keys)(listing, self._stamp())
        if used < self._entries:
            listing.ignore("(other keys)", f"{self._entries - used} keys outside the layout")
        label = (
            "the folder" if self._by_folder else "the function" if ":" in self._layout else "none"
        )
        return {
            "layout": self._layout,
            "keys": f"{self._entries:,}, with {len(listing):,} images",
            "label": label,
        }

    def _stamp(self) -> int:
        try:
            status = os.stat(self._file)
        except OSError as error:
            require_machine(error, self._file)
            raise BadImage(f"{self._file} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # the library would wait at a pipe
            raise BadImage(f"{self._file} is not a file")
        return status.st_mtime_ns

    @property
    def _file(self) -> str:
        return os.path.join(self._path, "data.mdb") if os.path.isdir(self._path) else self._path

    def _infer(self) -> str:
        if self._samples is not None:
            return "ocr"
        return "basicsr" if os.path.isfile(os.path.join(self._path, _META)) else "images"

    def _key(self, entry: Entry) -> bytes:
        if self._layout == "ocr":
            return b"image-%09d" % entry.place
        name = entry.path.rpartition(".")[0] if self._layout == "basicsr" else entry.path
        return name.encode("utf-8", "surrogateescape")

    def _list_numbers(self, listing: Listing, stamp: int) -> int:
        """List the samples 1 to ``num-samples``; return the number of keys used."""
        if self._samples is None:
            raise UsageError(
                f"{self._path} has no num-samples key", remedy=f"choose another {setting('layout')}"
            )
        used = 1
        for start in range(1, self._samples + 1, _CHUNK):
            numbers = range(start, min(start + _CHUNK, self._samples + 1))
            wanted = [b"%s-%09d" % (kind, n) for n in numbers for kind in (b"image", b"label")]
            sizes = call(lmdb_reader.sizes, self._file, stamp, wanted)
            used += sum(size is not None for size in sizes)
            if not any(size is not None for size in sizes):
                listing.blame(f"image-{start:09d}", "this key and all after it are missing")
                break
            for number, size, text in zip(numbers, sizes[::2], sizes[1::2], strict=True):
                name = f"image-{number:09d}"
                if size is None or text is None:
                    missing = name if size is None else f"label-{number:09d}"
                    listing.blame(name, f"the key {missing} is missing")
                else:
                    listing.add(Row(name, NO_LABEL, size, stamp, number))
        return used

    def _list_names(self, listing: Listing, stamp: int) -> int:
        """List the images in ``meta_info.txt``; return the number of keys used."""
        used = 0
        names = list(self._meta_names(listing))
        for start in range(0, len(names), _CHUNK):
            chunk = names[start : start + _CHUNK]
            wanted = [name.rpartition(".")[0].encode("utf-8", "surrogateescape") for name in chunk]
            sizes = call(lmdb_reader.sizes, self._file, stamp, wanted)
            for name, size in zip(chunk, sizes, strict=True):
                if size is None:
                    listing.blame(name, f"its key is missing, although {_META} lists it")
                else:
                    used += 1
                    listing.add(Row(name, NO_LABEL, size, stamp))
        return used

    def _meta_names(self, listing: Listing) -> Iterator[str]:
        path = Path(self._path) / _META
        try:
            text = read_small(path).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            match = _META_LINE.match(line)
            if match and "." in match[1]:
                yield match[1]
            elif line.strip():
                listing.blame(
                    f"{_META}:{number}",
                    "this line does not have the form NAME.SUFFIX (H,W,C) LEVEL",
                )

    def _list_keys(self, listing: Listing, stamp: int) -> int:
        """List all keys; return their number."""
        after = b""
        count = 0
        while rows := call(lmdb_reader.keys, self._file, stamp, self._layout, after, _CHUNK):
            count += len(rows)
            require_rows(self._file, count)  # pages of a damaged tree may refer to each other
            for name, size, label, problem in rows:
                folder = name.rpartition("/")[0]
                if problem or (self._by_folder and not folder):
                    listing.blame(name, problem or "its key has no folder")
                elif size < 0:
                    listing.ignore(name, "the layout's function returned None")
                else:
                    value = folder if self._by_folder else label
                    code = listing.code(value, is_name=self._by_folder)
                    listing.add(Row(name, code, size, stamp))
            after = rows[-1][0].encode("utf-8", "surrogateescape")
        return int(self._entries)


def _recognize(seen: Overview) -> Iterator[Recognition]:
    inner = seen.folders() if seen.is_folder and not seen.has("data.mdb") else []
    folders = [name for name in inner if "data.mdb" in seen.files(name)]
    for folder in folders:
        yield Recognition(f"{folder}/data.mdb", inside=folder)
    if not folders:
        yield from having("data.mdb", suffixes=(".lmdb", ".mdb"))(seen)


SOURCE = SourceKind(
    name=Lmdb.kind,
    title="Convert LMDB environments from other programs.",
    help="""Convert the images in an LMDB environment to a dataset in DST.

    SRC is the folder of data.mdb, or the file. The lmdb library reads it in a separate process, so
    a damaged file cannot crash the conversion. The ocr layout stores each label in the `text`
    field.

    \b
    Examples:
      shardkit convert lmdb train_lmdb dataset --to webdataset --dry-run
      shardkit convert lmdb train_lmdb dataset --to lmdb --layout images --label folder
      shardkit convert lmdb train_lmdb dataset --to lmdb --layout mymodule:image_and_label
    """,
    options=LmdbOptions,
    refuses_shards=True,
    attaching=Attaching(
        title="An LMDB environment of images.",
        help="""Index the images in an LMDB environment where they are, as a dataset in INDEX_DIR.

        ARCHIVES is the folder of data.mdb, or the file.

        \b
        Example:
          shardkit attach lmdb train_lmdb train-index --layout ocr
        """,
    ),
    recognize=_recognize,
    source=Lmdb,
)
