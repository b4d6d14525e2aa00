"""Image folders as a source: class folders, or unlabeled images, or splits of either."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardkit.contracts import (
    LOOSE,
    Attaching,
    Entry,
    Images,
    PackedEntries,
    PartedSource,
    PartListing,
    Recognition,
    Scan,
    SourceKind,
    SourceOptions,
    SourcePart,
    as_packed,
)
from shardkit.errors import BadImage, Problem, UsageError, setting
from shardkit.options import option
from shardkit.record import DATASET_FILE, NO_LABEL, Record, make_keys
from shardkit.sources.folders import (
    BROKEN_LINK,
    NO_FILE,
    TOO_LARGE,
    UNREADABLE_FOLDER,
    Finder,
    SourceFolder,
    below,
    claims_image,
    is_split_name,
    open_folder,
    walk_order,
    why_left_out,
)
from shardkit.sources.images import image_record, require_inside
from shardkit.system.files import as_name, read_small
from shardkit.system.late import load
from shardkit.system.text import is_within, shell

if TYPE_CHECKING:
    from shardkit.sources.recognize import Overview

_OTHERS = re.compile(
    r"im(age|g)|mask|label|annot|gt|seg|voc|blobs|[_-]train|train([_-]|[ab]$)|\.(json|jsonl|csv|tsv|parquet|xlsx?|ods|mat|pkl|lst|ya?ml|txt|xml|tar|tgz|zip)",
    re.IGNORECASE,
)
"""Parts of names in other layouts of images."""

MASK_NAME = re.compile(
    r"(?P<image>.+?)(?P<suffix>[ _.-]+"
    r"(?:masks?|seg(?:mentation)?s?|labels?|annot(?:ation)?s?|gt|ground[ _-]?truth|trimap)"
    r"(?:[ _-]?\d+)?)",
    re.IGNORECASE,
)
"""Names of masks next to their images, without suffix."""

FOLDERS_TRIED = 20
"""Class folders that are searched for masks."""

_PACKED = (".zip", ".rar", ".7z")

_REFUSE_OTHERS = "shardkit.sources.recognize:refuse_other_kinds"
_OTHER_CLASSES = "shardkit.sources.recognize:note_other_classes"

_NEVER_LISTED = {NO_FILE, BROKEN_LINK, TOO_LARGE, *map(os.strerror, errno.errorcode)}
"""Reasons for which a scan reports a bad file without listing it as an image."""


@dataclass(frozen=True, kw_only=True)
class FolderOptions(SourceOptions):
    """The options of folders of images."""

    class_order: str | os.PathLike[str] = option(
        "plain",
        help="Label order. plain: as in torchvision. natural: numbers by value. FILE: one class "
        "per line, in this order.",
        metavar="plain|natural|FILE",
        stored="",
    )
    splits: bool | None = option(
        None,
        help="Treat the folders of SRC as splits (train, val, ...), one dataset for each.",
        shown="by name",
        stored="",
    )
    classes: bool = option(
        False,
        help="Use the folders as classes, even if they look like another kind of source.",
        stored="",
    )

    @classmethod
    def restored(cls, described: Mapping[str, Mapping[str, Any]]) -> FolderOptions:
        """Return the options of a folder, given the description of each split, or of ""."""
        return cls(splits="" not in described, classes=True)


class ImageFolder(PartedSource):
    """A folder of images as a `shardkit.contracts.Source`. The root may be a URL: ``s3://...``.

    Each folder directly in ``root`` is a class, and each folder below it belongs to it. A folder
    with images and no folders gives images without labels. Symbolic links are followed; below a
    class, no folder is entered twice.

    ``class_order``: ``plain`` sorts class names as torchvision does, ``natural`` sorts numbers in
    them by value. Any other value is the path of a text file with one class per line; it may name
    classes without a folder. ``splits``: whether the folders in ``root`` are splits, each scanned
    like a root folder. None decides by name (`is_split_name`): all must be splits, or none.
    """

    kind = "imagefolder"

    def __init__(self, root: str | Path, options: FolderOptions | None = None) -> None:
        self.folder = open_folder(root)
        self.options = options or FolderOptions()
        self.rest: Sequence[str] = ("DST", "--to", "lmdb")
        """Words of a command after the source, for messages that name another source."""

    def __str__(self) -> str:
        return str(self.folder)

    def paths(self) -> Sequence[Path]:
        """Return the folder, if it is local."""
        return self.folder.local()

    @property
    def chunk_bytes(self) -> int:  # type: ignore[override]
        """Bytes of images that a process prepares at a time."""
        return self.folder.chunk_bytes

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name of the folder, or of the split's folder."""
        return {"name": self.folder.inner(split).name}

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of an image file."""
        require_inside(entry.path)
        return image_record(entry, self.folder.read(entry, below(split, entry.path)))

    def locate(self, split: str, entry: Entry) -> str:
        """Return the path or URL of an image."""
        return self.folder.locate(below(split, entry.path))

    def ahead(self, split: str, entries: Sequence[Entry]) -> None:
        """Start to read images."""
        self.folder.ahead(entries, split)

    def files(self, split: str, entries: Sequence[Entry]) -> Sequence[bytes] | None:
        """Return the file of each image, if they are local."""
        if type(self).read is not _READ:
            return None  # another class reads otherwise
        paths = as_packed(entries).paths()
        try:
            require_inside(*paths)
        except BadImage:
            return None  # `read` says which
        return self.folder.paths([below(split, path) for path in paths])

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the images of each split, in the order of labels and paths."""
        scan, parts = self.parts(1, classes)
        ignored = dict[str, list[Problem]]()
        for split, images in scan.splits.items():
            listings = [self.list_part(part) for part in parts if part.split == split]
            entries = itertools.chain.from_iterable(listing.entries for listing in listings)
            scan.splits[split] = images.of(PackedEntries(entry for _, entry in entries))
            for listing in listings:
                scan.problems[split] += listing.problems
            ignored[split] = [problem for listing in listings for problem in listing.ignored]
            ignored[split] += scan.ignored[split]
        self.require_images(scan)
        return replace(scan, ignored=ignored)

    def parts(
        self, most: int, classes: Sequence[str] | None = None
    ) -> tuple[Scan, Sequence[SourcePart]]:
        """Return a scan without images, and the parts to list: some class folders each.

        A split has at most ``most`` parts, and one more for its own files.
        """
        for archive in filter(Path.is_file, self.folder.local()):
            load(_REFUSE_OTHERS)(archive, self.rest)
        folders = self.folder.folders()
        for root in () if self.options.classes else self.folder.local():
            if self._may_be_other(folders):
                load(_REFUSE_OTHERS)(root, self.rest, splits=bool(self.options.splits))
        splits = self.options.splits
        splits = _are_splits(self.folder, folders) if splits is None else splits
        inner = {"": folders}
        if splits:
            inner = {name: self.folder.inner(name).folders() for name in folders}
        if not self.options.classes:
            _require_labels(self.folder, inner)
        names = [*inner]
        class_names = {name for classes in inner.values() for name in classes}
        if self.options.class_order in ("plain", "natural"):
            _require_distinct(inner, classes or ())
        known = _ordered(class_names, self.options.class_order) if classes is None else classes
        ordered = (*known, *sorted(class_names.difference(known)))
        labels = {name: label for label, name in enumerate(ordered)}
        parts = []
        for split, class_folders in inner.items():
            parts.append(SourcePart(split, _Folders(labeled=bool(class_folders))))
            class_folders.sort(key=labels.__getitem__)
            step = -(-len(class_folders) // most)
            for start in range(0, len(class_folders), max(step, 1)):
                few = class_folders[start : start + step]
                of_part = tuple((labels[name], name) for name in few)
                parts.append(SourcePart(split, _Folders(labeled=True, classes=of_part)))
        loose = sorted(set(self.folder.names()).difference(names)) if splits else []
        ignored: dict[str, list[Problem]] = {name: [] for name in names}
        ignored[names[0]] += [
            Problem(path=name, reason=why_left_out(name) or "outside all splits") for name in loose
        ]
        scan = Scan(
            source=self,
            splits={name: Images(self, name, ()) for name in names},
            classes=ordered if class_names else None,
            ignored=ignored,
            problems={name: [] for name in names},
            notes=[*_notes(ordered if classes is None else ()), *self._other_classes(inner)],
        )
        return scan, parts

    def _other_classes(self, splits: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """Yield notes on what may be classes, in splits whose folders have no images themselves."""
        for split, classes in splits.items():
            if not any(self._has_image(below(split, name)) for name in classes[:FOLDERS_TRIED]):
                for root in self.folder.inner(split).local():
                    yield from load(_OTHER_CLASSES)(root)

    def _may_be_other(self, folders: Sequence[str]) -> bool:
        """Return whether names suggest another layout, so that other kinds should have a look."""
        inside = ["", *filter(is_split_name, folders)]
        names = [name for top in inside for name in self.folder.inner(top).names()]
        suggested = (
            not all(map(self._has_image, folders[:FOLDERS_TRIED]))
            or any(len(self.folder.inner(top).folders()) == 1 for top in inside)
            or any(map(_OTHERS.search, names))
            or self._may_have_masks(inside)
        )
        paths = (root / as_name(name) for root in self.folder.local() for name in folders)
        return suggested or any(os.path.isdir(path / path.name) for path in paths)

    def _has_image(self, folder: str) -> bool:
        """Return whether a folder has an image, not only folders with some."""
        with contextlib.suppress(PermissionError):  # the listing will name it
            return any(map(claims_image, self.folder.inner(folder).names()))
        return True

    def _may_have_masks(self, tops: Sequence[str]) -> bool:
        """Return whether class folders have names of masks, or annotations."""
        return any(
            MASK_NAME.fullmatch(file.rpartition(".")[0]) or file.endswith(".json")
            for top in tops
            for name in self.folder.inner(top).folders()[:FOLDERS_TRIED]
            for file in self._names(below(top, name))
        )

    def _names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if it cannot be read, which the scan says."""
        try:
            return list(self.folder.inner(folder).names())
        except PermissionError:
            return []

    def list_part(self, part: SourcePart) -> PartListing:
        """List the images of some class folders, in the order of labels and paths."""
        finder = self.folder.inner(part.split).finder()
        entries = ((part.split, entry) for entry in _find(finder, part.place))
        return PartListing(entries, finder.problems, finder.ignored)

    def require_images(self, scan: Scan) -> None:
        """Refuse a folder with neither images nor problems."""
        if not any(map(len, scan.splits.values())) and not any(scan.problems.values()):
            if self.folder.has(DATASET_FILE):
                raise UsageError(
                    f"{self.folder} is a shardkit dataset, not a folder of images",
                    remedy="use `shardkit convert dataset` or `shardkit merge`; `shardkit "
                    "diff` compares two datasets",
                )
            packed = [name for name in self.folder.names() if name.lower().endswith(_PACKED)]
            raise UsageError(
                f"{self.folder} contains no images: no file has an image's content or suffix"
                + (f"; unpack {packed[0]} first" if packed else "")
            )

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return the images as the conversion listed them, without files that it could not list.

        The list includes bad files that were removed since: each counted toward a limit, and may
        have made another image's key longer.
        """
        entries = scan.splits[split].entries if split in scan.splits else ()
        if not skipped:
            return entries
        unlisted = {
            problem.path
            for problem in skipped
            if problem.reason in _NEVER_LISTED or problem.reason.startswith(UNREADABLE_FOLDER)
        }
        by_path = {entry.path: entry for entry in entries if not is_within(entry.path, unlisted)}
        labels = {name: label for label, name in enumerate(scan.classes or ())}
        for problem in skipped:
            if problem.path not in unlisted and problem.path not in by_path:
                label = labels.get(problem.path.partition("/")[0], NO_LABEL)
                by_path[problem.path] = Entry(problem.path, "", label, 0, 0)
        listed = [
            entry._replace(key=key)
            for key, entry in zip(make_keys(by_path), by_path.values(), strict=True)
        ]
        return sorted(listed, key=lambda entry: (entry.label, walk_order(entry.path)))


_READ = ImageFolder.read


def scan_imagefolder(root: str | Path) -> Scan:
    """List the images below ``root``, and their classes."""
    return ImageFolder(root, FolderOptions()).scan()


def _are_splits(root: SourceFolder, folders: Sequence[str]) -> bool:
    named = [folder for folder in folders if is_split_name(folder)]
    if len(named) == len(folders):
        return bool(named)
    if any(root.inner(folder).folders() for folder in named):
        other = next(folder for folder in folders if folder not in named)
        link = f"mkdir splits; ln -srt splits {shell(*map(root.locate, named))}"
        way = f"run {link}; shardkit convert splits DST --to lmdb" * bool(root.local())
        raise UsageError(
            f"{root}: {', '.join(named)} may be splits, but {other} may not",
            remedy=f"{way or f'move {other} elsewhere'}. Pass {setting('splits', True)} if all "
            f"are splits or {setting('splits', False)} if all are classes",
        )
    return False


def _require_distinct(splits: Mapping[str, Iterable[str]], classes: Sequence[str]) -> None:
    """Refuse new classes whose names look like others: they are one class, spelled in two ways."""
    first = {_as_seen(name): name for name in classes}
    for split, names in splits.items():
        for name in sorted(set(names).difference(classes)):
            folder = below(split, name)
            other = first.setdefault(_as_seen(name), folder)
            if other.rpartition("/")[2] != name:
                raise UsageError(
                    f"the names of the class folders {other!a} and {folder!a} differ only in case "
                    "or Unicode form",
                    remedy="rename one; or, if they are two classes, list both in a file for "
                    f"{setting('class_order')}",
                )


def _require_labels(root: SourceFolder, splits: Mapping[str, Sequence[str]]) -> None:
    """Refuse a split without class folders next to others, such as ImageNet's val."""
    flat = [name for name, classes in splits.items() if not classes]
    unlabeled = [name for name in flat if not name.lower().startswith("test")]
    if any(splits.values()) and unlabeled:
        raise UsageError(
            f"{root}: {unlabeled[0]} has no class folders, so its images would have no labels. "
            f"`shardkit convert table LIST.csv DST --root {root.locate(unlabeled[0])}` reads "
            "labels from a table with the columns file_name and label;",
            remedy=f"pass {setting('classes', True)} to convert it without labels",
        )


_COPY = re.compile(r"( -)? copy( \(?\d+\)?)?\Z")


def _as_seen(name: str) -> str:
    """Return a name without case, accents' form, spaces around, and what is added to copies."""
    return _COPY.sub("", unicodedata.normalize("NFKC", name).casefold().strip())


def _notes(classes: Sequence[str]) -> Iterator[str]:
    """Yield what may surprise: the order of numbers, and a single class."""
    if len(classes) == 1:
        yield f"all images have the label {classes[0]}, because there is only one folder"
    by_value = sorted(classes, key=natural)
    if all(name.isdecimal() for name in classes) and by_value != [*classes]:
        yield (
            f"class names are numbers, sorted as text: {_first_labels(classes)}; with "
            f"{setting('class_order', 'natural')}: {_first_labels(by_value)}"
        )


def _first_labels(classes: Sequence[str]) -> str:
    """Return classes with their labels: the first ones, and the last."""
    shown = [f"{name}={label}" for label, name in enumerate(classes)]
    return ", ".join(shown if len(shown) <= 5 else [*shown[:3], "...", shown[-1]])


class _Folders(NamedTuple):
    """Folders to list: some classes of a split, or the split's folder without those in it."""

    labeled: bool
    """Whether the split has classes."""
    classes: tuple[tuple[int, str], ...] = ()
    """Label and name of each class folder; none for the folder of the split."""


def _find(finder: Finder, folders: _Folders) -> Iterator[Entry]:
    """Yield the images, by label and path."""
    for label, name in folders.classes:
        yield from _entries(finder.files(name, recurse=True), label)
    if folders.labeled and not folders.classes:
        files = finder.files("", recurse=False)
        loose = [Problem(path=path, reason=LOOSE) for path, *_ in files]
        finder.ignored += [*finder.problems, *loose]
        finder.problems.clear()
    elif not folders.labeled:
        yield from _entries(finder.files("", recurse=False), NO_LABEL)


def _entries(files: Iterable[tuple[str, int, int]], label: int) -> Iterator[Entry]:
    """Yield the entries of files, folder by folder: only keys of one folder can collide."""
    for _, group in itertools.groupby(files, lambda file: file[0].rpartition("/")[0]):
        folder = list(group)
        keys = make_keys(path for path, *_ in folder)
        for key, (path, size, mtime) in zip(keys, folder, strict=True):
            yield Entry(path, key, label, size, mtime)


def _ordered(names: Iterable[str], class_order: str | os.PathLike[str]) -> tuple[str, ...]:
    if class_order == "plain":
        return tuple(sorted(names))
    if class_order == "natural":
        return tuple(sorted(names, key=natural))
    return _from_file(set(names), Path(class_order))


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Return a sort key that sorts digits in ``name`` by value: class2 before class10."""
    runs = re.split(r"([0-9]+)", name)
    return [(0, int(run), "") if run.isdecimal() else (1, 0, run) for run in runs if run], name


def _from_file(names: set[str], path: Path) -> tuple[str, ...]:
    try:
        content = read_small(Path(os.path.realpath(path)))
        lines = content.decode("utf-8-sig", errors="surrogateescape").split("\n")
    except OSError as error:
        raise UsageError(
            f"{setting('class_order')} must be plain, natural or a readable file; {path}: "
            f"{error.strerror or error}"
        ) from error
    listed = [line.rstrip("\r") for line in lines if line.strip()]
    twice = sorted(name for name, count in Counter(listed).items() if count > 1)
    for fault, wrong in (("lists twice", twice), ("lacks", sorted(names - set(listed)))):
        if wrong:
            first = ", ".join(map(repr, wrong[:5])) + (" ..." if len(wrong) > 5 else "")
            raise UsageError(
                f"the {setting('class_order')} file {path} {fault} {len(wrong)} classes: {first}"
            )
    return tuple(listed)


def _recognize(seen: Overview) -> Iterable[Recognition]:
    layouts: Iterable[Recognition] = load("shardkit.sources.recognize:recognize_folders")(seen)
    return layouts


SOURCE = SourceKind(
    name=ImageFolder.kind,
    title="Convert a folder of images, one folder for each class.",
    help="""Convert the images in SRC to a dataset in DST.

    SRC contains one folder per class, or only images, or train, val and test folders of either,
    which become one dataset each. Rerun the same command to resume an interrupted conversion.
    Readers see the dataset only once it is complete.

    \b
    Examples:
      shardkit convert imagefolder photos dataset --to lmdb
      shardkit convert imagefolder photos dataset --to webdataset --resize 256 --quality 90
      shardkit convert imagefolder photos dataset --to hdf5 --resize 224x224 --encode raw --enlarge
      shardkit convert imagefolder s3://bucket/photos dataset --to lmdb
    """,
    options=FolderOptions,
    reads_urls=True,
    recognize=_recognize,
    attaching=Attaching(
        whole_files=True,
        title="Read a folder of images where it is.",
        help="""Index the images in the folder ARCHIVES where they are, as a dataset in INDEX_DIR.

        Nothing is copied. Keys, labels, classes and splits are those of `shardkit convert
        imagefolder`. Run the command again after changes: only changed class folders are read.

        \b
        Example:
          shardkit attach imagefolder photos index
        """,
    ),
    source=ImageFolder,
)
