"""LMDB environments of other programs as a source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardkit.contracts import Entry, Images, Located, Scan, SourceKind, SourceOption
from shardkit.errors import BadImage, UsageError
from shardkit.record import NO_LABEL, Field, Record
from shardkit.sources.images import image_record
from shardkit.sources.inputs import CHANGED
from shardkit.sources.labels import LabelValues, read_classes
from shardkit.sources.library_process import call
from shardkit.sources.listing import ListedSource, Listing, scan_of
from shardkit.sources.located import located_in
from shardkit.system.files import read_small, require_local

_READER = "shardkit.sources.lmdb_reader"
_META = "meta_info.txt"
_META_LINE = re.compile(r"(\S.*) \(\d+, ?\d+(?:, ?\d+)?\) \d+\Z")
_CHUNK = 1000
_FUNCTION = "function"
"""The layout in the manifest for ``module:callable``."""
_WITH_FUNCTION = re.compile(r"([A-Za-z_][\w.]*:[A-Za-z_]\w*)@(.+)\Z", re.DOTALL)
_TEXT_FIELD = "txt"


class Lmdb(ListedSource):
    """An LMDB environment, read by the library ``lmdb`` in a child process.

    Args:
        path: The folder of ``data.mdb``, or the file.
        layout: ``ocr``: ``num-samples``, ``image-000000001``, ``label-000000001``, ...; labels are
            texts. ``basicsr``: the images listed in ``meta_info.txt``. ``images``: every key is the
            name of an image. ``module:callable``: a function that gets each key and value, and
            returns an encoded image, or a pair of image and label, or None. None infers one of the
            first three.
        label: ``folder`` takes the part of a key before the last slash as class, for ``images``.
        classes: A text file with a class name in each line.
    """

    kind = "lmdb"
    raw_shape = None

    def __init__(
        self,
        path: str | Path,
        *,
        layout: str | None = None,
        label: str | None = None,
        classes: str | None = None,
        _reopened: bool = False,
    ) -> None:
        require_local(path)
        self._path = os.path.abspath(path)
        self._names = read_classes(classes)
        self._reopened = _reopened
        try:
            stamp = self._stamp()
            self._entries, self._samples = json.loads(call(_READER, "facts", self._path, stamp))
        except BadImage as error:
            raise UsageError(f"{path} is not an LMDB environment: {error}") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        self._layout = layout or self._infer()
        if self._layout not in ("ocr", "basicsr", "images") and ":" not in self._layout:
            raise UsageError(
                f"--layout {layout} is unknown; choose from ocr, basicsr, images, module:callable"
            )
        if label not in (None, "none", "folder"):
            raise UsageError(f"--label {label} is unknown; choose from folder, none")
        self._by_folder = label == "folder"
        named = True if classes or _reopened else None
        kept = _FUNCTION if ":" in self._layout else self._layout
        super().__init__(path, {"layout": kept, "label": label, "class_names": named})

    @classmethod
    def find(cls, path: Path, described: Mapping[str, Mapping[str, Any]]) -> Lmdb:
        """Open the environment that a dataset was made from.

        A manifest must not name code to run, so the user names the function again, in the path.
        """
        options = next(iter(described.values()))
        layout = options.get("layout")
        if layout not in ("ocr", "basicsr", "images"):
            match = _WITH_FUNCTION.match(str(path))
            if match is None:
                raise UsageError(
                    f"the dataset was made by a function: give it too, as MODULE:FUNCTION@{path}"
                )
            layout, path = match[1], Path(match[2])
        return cls(
            path,
            layout=layout,
            label=options.get("label"),
            _reopened=bool(options.get("class_names")),
        )

    def paths(self) -> Sequence[Path]:
        """Return the environment."""
        return [Path(self._path)]

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image; with its text, for the layout ``ocr``."""
        if self._stamp() != entry.stamp:
            raise BadImage(CHANGED)
        text_key = b"label-%09d" % entry.place if self._layout == "ocr" else b""
        key = self._key(entry)
        answer = call(_READER, "read", self._path, entry.stamp, self._layout, key, text_key)
        length = int.from_bytes(answer[:8], "little", signed=True)
        record = image_record(entry, answer[8 + max(0, length) :])
        if length < 0:
            return record
        return Record(record.key, {**record.fields, _TEXT_FIELD: answer[8 : 8 + length]})

    def by_file(self, images: Images) -> Sequence[tuple[Path, Images]]:
        """Return the environment's only file, with all images.

        Raises:
            UsageError: If a function gives the images, so that the file need not have them.
        """
        if ":" in self._layout:
            raise UsageError(
                f"the images of the layout {self._layout} are what a function returns, so they "
                "cannot be read in place: use `shardkit convert`"
            )
        return [(self.pattern / "data.mdb" if self.pattern.is_dir() else self.pattern, images)]

    def located(self, split: str, entries: Sequence[Entry]) -> Iterator[Located | BadImage]:
        """Yield each of some images, with the offset of its value."""

        def offsets(some: Sequence[Entry]) -> bytes:
            keys = [self._key(entry) for entry in some]
            return call(_READER, "offsets", self._path, some[0].stamp, keys)

        return located_in(self._file, entries, offsets, partial(self.read, split))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the environment and the key of an image."""
        return f"{self._path}: {os.fsdecode(self._key(entry))}"

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images: in the order of numbers, of ``meta_info.txt``, or of keys.

        Raises:
            UsageError: If there are no images, or labels are out of range.
        """
        listing = Listing(LabelValues())
        lists = {"ocr": self._list_numbers, "basicsr": self._list_names}
        try:
            used = lists.get(self._layout, self._list_keys)(listing, self._stamp())
        except BadImage as error:
            raise UsageError(f"{self._path}: {error}") from error
        if used < self._entries:
            listing.ignore("(other keys)", f"{self._entries - used} keys outside of the layout")
        labels = listing.labels.assign(classes, self._names, reopened=self._reopened)
        of_text = "the text of each image" if self._layout == "ocr" else listing.labels.describe()
        understood = {
            "layout": self._layout,
            "keys": f"{self._entries:,}, with {len(listing):,} images",
            "label": of_text,
        }
        more = {"text": Field("text")} if self._layout == "ocr" else None
        return scan_of(self, {"": listing}, labels, understood, more=more)

    def _stamp(self) -> int:
        try:
            return os.stat(self._file).st_mtime_ns
        except OSError as error:
            raise BadImage(f"{self._file} cannot be read: {error.strerror}") from error

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
            raise UsageError(f"{self._path} has no key num-samples: choose another --layout")
        used = 1
        for start in range(1, self._samples + 1, _CHUNK):
            numbers = range(start, min(start + _CHUNK, self._samples + 1))
            wanted = [b"%s-%09d" % (kind, n) for n in numbers for kind in (b"image", b"label")]
            sizes = json.loads(call(_READER, "sizes", self._path, stamp, wanted))
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
                    listing.add(name, NO_LABEL, size, stamp, number)
        return used

    def _list_names(self, listing: Listing, stamp: int) -> int:
        """List the images in ``meta_info.txt``; return the number of keys used."""
        used = 0
        names = list(self._meta_names(listing))
        for start in range(0, len(names), _CHUNK):
            part = names[start : start + _CHUNK]
            wanted = [name.rpartition(".")[0].encode("utf-8", "surrogateescape") for name in part]
            sizes = json.loads(call(_READER, "sizes", self._path, stamp, wanted))
            for name, size in zip(part, sizes, strict=True):
                if size is None:
                    listing.blame(name, f"its key is missing, although {_META} lists it")
                else:
                    used += 1
                    listing.add(name, NO_LABEL, size, stamp, 0)
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
                listing.blame(f"{_META}:{number}", "this line is not NAME.SUFFIX (H,W,C) LEVEL")

    def _list_keys(self, listing: Listing, stamp: int) -> int:
        """List all keys; return their number."""
        after = b""
        while rows := json.loads(
            call(_READER, "keys", self._path, stamp, self._layout, after, _CHUNK)
        ):
            for name, size, label, problem in rows:
                folder = name.rpartition("/")[0]
                if problem or (self._by_folder and not folder):
                    listing.blame(name, problem or "its key has no folder")
                elif size < 0:
                    listing.ignore(name, "the layout's function returned None")
                else:
                    value = folder if self._by_folder else label
                    code = NO_LABEL if value is None else listing.labels.code(value)
                    listing.add(name, code, size, stamp, 0)
            after = rows[-1][0].encode("utf-8", "surrogateescape")
        return int(self._entries)


SOURCE = SourceKind(
    name=Lmdb.kind,
    title="Convert LMDB environments of other programs.",
    help="""Convert the images in an LMDB environment to a dataset in DST.

    SRC is the folder of data.mdb, or the file. The library lmdb reads it, in a separate process, so
    that a damaged file cannot crash the conversion. The layout ocr stores each label as a text, in
    the field txt.

    \b
    Examples:
      shardkit convert lmdb train_lmdb dataset --to webdataset --dry-run
      shardkit convert lmdb train_lmdb dataset --to lmdb --layout images --label folder
      shardkit convert lmdb train_lmdb dataset --to lmdb --layout mymodule:image_and_label
    """,
    options=(
        SourceOption(
            flags="--layout",
            metavar="ocr|basicsr|images|MODULE:FUNCTION",
            help="image-000000001 and label-000000001; the names in meta_info.txt; every key; or a "
            "function that returns image and label for a key and a value.  [default: inferred]",
        ),
        SourceOption(
            flags="--label",
            metavar="folder|none",
            help="folder: the part of a key before the last slash is the class.  [default: none]",
        ),
        SourceOption(
            flags="--classes",
            metavar="FILE",
            help="Class names, one per line: of label 0, 1, ..., or in the order of labels.",
        ),
    ),
    open=Lmdb,
    find=Lmdb.find,
)
