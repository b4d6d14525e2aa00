"""Which kind of source a path is, from names and the start of files: no image is read.

Each `SourceKind` states its layout as a function of an `Overview`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shardkit.contracts import Recognition
from shardkit.errors import UsageError, setting
from shardkit.record import DATASET_FILE
from shardkit.registry import DATASET, DEFAULT_SOURCE, get_source, source_names
from shardkit.sources.folders import below, is_split_name, why_left_out
from shardkit.sources.imagefolder import FOLDERS_TRIED
from shardkit.sources.images import has_image_suffix, open_at_once
from shardkit.sources.inputs import SHARD_NUMBER
from shardkit.system.files import as_name, as_text
from shardkit.system.late import load
from shardkit.system.text import name_list, shell

_REFUSE_MISREAD = "shardkit.sources.table_layout:refuse_misread"

_LISTS_OF_CLASSES = "shardkit.sources.table_layout:lists_of_classes"

_WAY_OF_NUMBERS = "shardkit.sources.table_layout:way_of_numbers"

_REFUSE_PIXELS = "shardkit.sources.table_layout:refuse_pixels"

_ARCHIVE = "shardkit.sources.zip_file:overview_of"

_MOST = 10_000
"""Names to look at in a folder."""

_IN_ZIP = re.compile(r"(.*?\.zip)(?:/(.*))?", re.IGNORECASE | re.DOTALL)

_SPLIT = re.compile(r"(?<![a-z])(train|val|test|dev|eval)", re.IGNORECASE)

_HUB = {"blobs", "snapshots"}
"""Folders in a cache of the Hub."""

NO_CLASS = re.compile(
    r"(.*[ _-])?(jpe?g|png|img|image|photo|pic|picture|frame|dsc[fn]?|pxl|screenshot)s?([ _-].*)?",
    re.IGNORECASE,
)
"""Names of folders, and words that cameras write, that say what is there and name no class."""

_NAMED = ("([A-Za-z]+([_ -][A-Za-z]+)*)[._ -]?[0-9]+", "([A-Za-z]+[0-9]+)[_ -]+[0-9]+")
"""Names of images that start with a word and have a number, without suffix; also for `sed`."""

_NUMBERS = re.compile(r"([0-9]{1,3}_)+")
"""Numbers at the start of a name that may be labels."""

_NAMES_TRIED = 1000

_BOX = re.compile(rb"[0-9][0-9.]*([ ,\t]+[0-9][0-9.]*){3}")
"""Four numbers in a row."""

_PACKED = (".7z", ".rar", ".zip.001", ".7z.001")
"""Suffixes of archives that are not read."""

_UNFINISHED = (".part", ".partial", ".crdownload", ".download", ".tmp", ".aria2")
"""Suffixes of downloads that have not finished."""

Recognizer = Callable[["Overview"], Iterable[Recognition]]


class Overview:
    """The names below a path, and the start of its files.

    All methods take a path below it, by default the path itself. What cannot be read is empty. A
    zip archive is a file, and what it contains is below it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.is_folder = self.path.is_dir()
        self._names = lru_cache(maxsize=1000)(self._list)
        self._archive = lru_cache(maxsize=100)(self._open_archive)
        self._ends = lru_cache(maxsize=100)(self._read_ends)

    def folders(self, inside: str = "") -> list[str]:
        """Return the sorted names of the folders that may be data."""
        return self._names(inside)[0]

    def files(self, inside: str = "", suffix: str | tuple[str, ...] = "") -> list[str]:
        """Return the sorted names of the files that may be data, with one of some suffixes."""
        return [name for name in self._names(inside)[1] if name.lower().endswith(suffix)]

    def images(self, inside: str = "") -> list[str]:
        """Return the sorted names of the images, by their suffix."""
        return [name for name in self.files(inside) if has_image_suffix(name)]

    def has(self, *names: str) -> bool:
        """Return whether there are files or folders of all these names, below the path."""
        return all(map(self._has, names))

    def inner(self, folder: str) -> Overview:
        """Return the overview of a folder below the path."""
        return Overview(self.path / as_name(folder))

    def ends(self, name: str = "", size: int = 1 << 16) -> bytes:
        """Return the start of a file, and its end if it is larger."""
        archive, inside = self._in_zip(name)
        return archive.ends(inside, size) if archive else self._ends(name, size)

    def _read_ends(self, name: str, size: int) -> bytes:
        with (
            contextlib.suppress(OSError),
            open(self.path / as_name(name), "rb", opener=open_at_once) as file,
        ):
            start = file.read(size)
            file.seek(max(size, os.fstat(file.fileno()).st_size - size))
            return start + file.read(size)
        return b""

    def _has(self, name: str) -> bool:
        archive, inside = self._in_zip(name)
        return archive.has(inside) if archive else os.path.exists(self.path / as_name(name))

    def _list(self, inside: str) -> tuple[list[str], list[str]]:
        names: tuple[list[str], list[str]] = ([], [])
        archive, rest = self._in_zip(inside)
        if archive:
            return archive._list(rest)
        with contextlib.suppress(OSError), os.scandir(self.path / as_name(inside)) as entries:
            for entry in itertools.islice(entries, _MOST):
                if not why_left_out(entry.name):
                    names[not _is_folder(entry)].append(as_text(entry.name))
        folders = names[0] if inside else self._without_datasets(names)
        return sorted(folders), sorted(names[1])

    def _without_datasets(self, names: tuple[list[str], list[str]]) -> list[str]:
        """Return folders without results of earlier conversions, unless there is nothing else."""
        folders, files = names
        others = [
            name for name in folders if not os.path.isfile(self.path / as_name(name) / DATASET_FILE)
        ]
        return others if others or any(map(has_image_suffix, files)) else folders

    def _in_zip(self, name: str) -> tuple[Overview | None, str]:
        """Return the archive that a path below leads into, if any, and the rest of the path."""
        match = _IN_ZIP.fullmatch(name)
        return (self._archive(match[1]), match[2] or "") if match else (None, "")

    def _open_archive(self, name: str) -> Overview | None:
        archive: Overview | None = load(_ARCHIVE)(self.path / as_name(name))
        return archive


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one; it asks the disk for links alone."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def having(
    *names: str, suffixes: tuple[str, ...] = (), shards: tuple[str, ...] = (), whole: str = ""
) -> Recognizer:
    """Return what recognizes a folder with one of some names, or files with one of some suffixes.

    In names, ``*`` and the like are allowed. Suffixes are those of a file, or of files in a folder
    without images, or in its first one. ``shards`` are suffixes of shards of a split, as in
    `splits_of_shards`; such a folder has no others. Each file of suffix ``whole`` is a source.
    """

    def recognize(seen: Overview) -> Iterator[Recognition]:
        if not seen.is_folder:
            if seen.path.name.lower().endswith(suffixes or ("\0",)):
                yield Recognition(f"a {seen.path.suffix} file")
            return
        splits = [*splits_of_shards(seen, shards)] if shards else []
        files = seen.files(suffix=whole) if whole and not seen.images() else []
        if len(files) == 1:
            splits = [Recognition(files[0], inside=files[0])]
        elif files and {by.inside for by in splits_of_shards(seen, (whole,))} == {*files}:
            splits = [*splits_of_shards(seen, (whole,))]
        if splits:
            yield from splits
            return
        listed = [*seen.folders(), *seen.files()]
        found = [name for pattern in names for name in fnmatch.filter(listed, pattern)]
        for folder in ("", *seen.folders()[: not shards]):
            if suffixes and not seen.images(folder):
                found += seen.files(folder, suffixes)
        if found:
            yield Recognition(found[0] if len(found) == 1 else f"{found[0]} and others")

    return recognize


def splits_of_shards(seen: Overview, suffixes: tuple[str, ...]) -> Iterator[Recognition]:
    """Yield the splits of a folder of shards: folders, or words in names of files."""
    files = [name for name in seen.files() if SHARD_NUMBER.sub("", name).endswith(suffixes)]
    for folder in () if files else filter(is_split_name, seen.folders()):
        inner = [
            name for name in seen.files(folder) if SHARD_NUMBER.sub("", name).endswith(suffixes)
        ]
        if inner and not seen.images(folder):
            yield Recognition(below(folder, inner[0]), inside=folder)
    words = [*map(_SPLIT.search, files)]
    patterns = sorted({f"*{word[1]}*" for word in words if word})
    matching = [fnmatch.filter(files, pattern) for pattern in patterns]
    if len(patterns) > 1 and sorted(itertools.chain(*matching)) == files:
        for pattern, names in zip(patterns, matching, strict=True):
            yield Recognition(names[0], inside=names[0] if len(names) == 1 else pattern)


def require_one_split(path: str | Path, suffixes: tuple[str, ...]) -> None:
    """Refuse a folder with shards of several splits, which would become one dataset."""
    splits = [by.inside for by in splits_of_shards(Overview(path), suffixes)]
    if len(splits) > 1:
        raise UsageError(
            f"{path} contains parts of several splits ({', '.join(splits)})",
            remedy=f"choose one, such as {shell(os.path.join(path, splits[0]))}, or run `shardkit "
            f"convert {shell(path)} DST --to lmdb` to get a dataset for each",
        )


def having_index(entry: bytes) -> Recognizer:
    """Return what recognizes folders, or folders of folders, whose index.json has an entry."""

    def recognize(seen: Overview) -> Iterator[Recognition]:
        names = [name for name in ("", *seen.folders()) if "index.json" in seen.files(name)]
        if names and entry in seen.ends(below(names[0], "index.json")):
            yield Recognition("index.json")

    return recognize


def recognize_folders(seen: Overview) -> Iterator[Recognition]:
    """Yield what shows folders of images."""
    folders = seen.folders()
    full = [name for name in folders if has_images(seen, name)]
    if {*folders} >= _HUB:
        for name in seen.folders("snapshots"):
            yield Recognition("a snapshot from the Hugging Face Hub", inside=f"snapshots/{name}")
    elif len(full) > 1 and _are_wrapped(seen, full):
        for folder in full:
            inside = unwrapped(seen, folder)
            yield Recognition(f"folders of images in {inside}/", inside=inside)
    elif folders and all(map(is_split_name, folders)):
        if full:
            yield Recognition(f"splits {', '.join(full[:3])}")
    elif around := _folder_around(seen, ""):
        yield Recognition(f"folders of images in {around}/", inside=around)
    elif len(full) == 1 and NO_CLASS.fullmatch(full[0]) and not seen.images():
        yield Recognition(f"images in {full[0]}/", inside=full[0])
    elif full:
        yield Recognition(f"class folders such as {full[0]}")
    elif not folders and (images := seen.images()):
        yield Recognition(f"images such as {images[0]}")


def _are_wrapped(seen: Overview, folders: Sequence[str]) -> bool:
    """Return whether folders are no classes: class folders are one folder deeper than in a split.

    Of splits, one such folder shows it, also with images alone, as does one in a folder of the same
    name. Otherwise, all must be such.
    """
    inner = {folder: unwrapped(seen, folder) for folder in folders}
    deeper = {folder for folder in folders if inner[folder] != folder}
    wrapped = {
        name for name in deeper if seen.folders(inner[name]) and not seen.images(inner[name])
    }
    sure = [
        *filter(is_split_name, deeper),
        *(name for name in wrapped if inner[name].split("/")[1].lower() == name.lower()),
    ]
    return bool(sure) or len(wrapped) == len(folders)


def unwrapped(seen: Overview, folder: str, depth: int = 4) -> str:
    """Return the folder whose content is more than a folder, or the images of one class."""
    inner = seen.folders(folder)
    if len(inner) != 1 or seen.images(folder) or not depth:
        return folder
    inside = f"{folder}/{inner[0]}"
    is_class = inner[0].lower() != folder.lower() and not NO_CLASS.fullmatch(inner[0])
    if seen.images(inside) and is_class:
        return folder
    return unwrapped(seen, inside, depth - 1)


def _classes_beside(seen: Overview, others: Sequence[Recognized]) -> Iterator[Recognition]:
    """Yield the folders with class folders if others, of files, are of other splits.

    Next to tables of a split, all such folders may be another split.
    """
    if not all(kind.by.inside for kind in others):
        return
    paths = {folder for kind in others for word in kind.paths for folder in word.split("/")}
    listed = {split_in(kind.split) for kind in others}
    is_table = {kind.kind for kind in others} == {"table"} and "" not in listed
    for name in filter(None if is_table else is_split_name, seen.folders()):
        classes = [inner for inner in seen.folders(name) if has_images(seen, f"{name}/{inner}")]
        is_listed = name in paths or split_in(name) in listed - {""}
        is_split = is_split_name(name) or len(classes) > 1
        if classes and is_split and not is_listed and not seen.images(name):
            inside = name if len(classes) > 1 else unwrapped(seen, name)
            yield Recognition(f"folders of images in {inside}/", inside=inside)


def _folder_inside(seen: Overview) -> str | None:
    """Return the only folder that has data, if there is one."""
    folders = seen.folders()
    if {*folders} >= _HUB:
        folders = [f"snapshots/{name}" for name in seen.folders("snapshots")]
    elif len(folders) > 1:
        folders = [name for name in folders if has_images(seen, name)]
    return folders[0] if len(folders) == 1 and not seen.images() else None


def _folder_around(seen: Overview, top: str) -> str:
    """Return the innermost folder that has all folders of images, and no images itself."""
    folders = [below(top, name) for name in seen.folders(top)]
    if seen.images(top) or any(map(seen.images, folders)):
        return top
    full = [folder for folder in folders if has_images(seen, folder)]
    return _folder_around(seen, full[0]) if len(full) == 1 else top


def has_images(seen: Overview, folder: str, depth: int = 4) -> bool:
    """Return whether a folder or one of the first below it has images."""
    return bool(first_image(seen, folder, depth))


def first_image(seen: Overview, folder: str, depth: int = 4) -> str:
    """Return the path of an image in a folder or one of the first below it; "" if none has one."""
    if images := seen.images(folder):
        return below(folder, images[0])
    inner = seen.folders(folder)[: 10 * (depth > 0)]
    return next(filter(None, (first_image(seen, f"{folder}/{n}", depth - 1) for n in inner)), "")


def split_in(name: str) -> str:
    """Return the word of a split in a name, such as ``train`` in ``instances_train2017``; or ""."""
    match = _SPLIT.search(name.lower())
    return match[1] if match else ""


def splits_in(name: str) -> set[str]:
    """Return the words of all splits in a name, such as both of ``train_val.csv``."""
    return set(_SPLIT.findall(name.lower()))


class Recognized(NamedTuple):
    """A kind that has recognized a source."""

    kind: str
    by: Recognition

    def __str__(self) -> str:
        """Return the kind and its evidence; of image folders, the evidence alone."""
        evidence = self.by.evidence
        return evidence if self.kind == DEFAULT_SOURCE else f"{self.kind} ({evidence})"

    @property
    def paths(self) -> list[str]:
        """Paths to read, below the source: a folder, or a file and the folder of its images."""
        options = itertools.pairwise(self.by.words)
        roots = [path[3:] for option, path in options if option == "--root"]
        folder, _, file = self.by.inside.rpartition("/")
        is_list = "." in file and get_source(self.kind).has_option("root")
        return [self.by.inside, *(roots or [folder] * is_list)]

    @property
    def name(self) -> str:
        """A name of the source among others of the path: that of its split or file, or its kind."""
        folder, _, file = self.by.inside.rpartition("/")
        split = folder.rpartition("/")[2]
        return split if is_split_name(split) else Path(file).stem or self.kind

    @property
    def split(self) -> str:
        """The split that its file is of, by its folder or name; "" if it is of none."""
        *_, folder, name = ["", *self.by.inside.split("/")]
        named = [text for text in (folder, name) if is_split_name(text)]
        return named[0] if named else split_in(Path(name).stem)

    def below(self, folder: str) -> Recognized:
        """Return the same as it is seen from around the folder."""
        words = (
            f"{{}}/{folder}{word[2:]}" if word.startswith("{}/") else word for word in self.by.words
        )
        inside = below(folder, self.by.inside)
        evidence = f"{self.by.evidence}, in {folder}/"
        return Recognized(
            self.kind, self.by._replace(evidence=evidence, inside=inside, words=tuple(words))
        )

    def noted(self, seen: Overview) -> Recognized:
        """Return the same, with the lists next to class folders in its evidence: they are lost."""
        of_classes = self.kind == DEFAULT_SOURCE and seen.is_folder
        lists = load(_LISTS_OF_CLASSES)(seen, self.by.inside) if of_classes else []
        if not lists:
            return self
        has_boxes = [bool(_BOX.search(seen.ends(file))) for file in lists]
        ways = [load(_WAY_OF_NUMBERS)(seen, file, self.by.inside) for file in lists]
        hints = [f"to read its splits, run {way}" for way in ways if way]
        hints = hints or ["--exclude FILE leaves out the images in one"] * (not all(has_boxes))
        hints += ["boxes are read if they are exported as COCO, YOLO or VOC"] * any(has_boxes)
        evidence = f"{self.by.evidence}, without {name_list(lists)} ({'; '.join(hints)})"
        return Recognized(self.kind, self.by._replace(evidence=evidence))

    def arguments(self, source: str | Path) -> list[str]:
        """Return the arguments of ``shardkit convert`` up to the source."""
        return [self.kind, os.path.join(source, self.by.inside) if self.by.inside else str(source)]

    def command(self, source: str | Path, rest: Sequence[str] = ("DST", "--to", "lmdb")) -> str:
        """Return the command to paste."""
        words = [*self.arguments(source), *rest, *self.by.options(Path(source))]
        return f"shardkit convert {shell(*words)}"


def recognized(path: str | Path | Overview) -> list[Recognized]:
    """Return the kinds that recognize a path or its overview, certain ones first.

    Where another kind is certain, also in the only folder that has data, folders of images are
    recognized only as a split of classes next to others. Of a zip archive, it is the kinds that it
    contains, if all that are certain can be read in it.
    """
    overview = path if isinstance(path, Overview) else Overview(path)
    if not overview.is_folder and (archive := load(_ARCHIVE)(overview.path)):
        inner = [kind for kind in recognized(archive) if kind.by.certain]
        if inner and all(get_source(kind.kind).reads_zip for kind in inner):
            return inner
    kinds = []
    for name in source_names():
        with contextlib.suppress(UsageError):  # the package of another one is missing
            recognize = get_source(name).recognize
            kinds += [Recognized(name, by) for by in (recognize(overview) if recognize else ())]
    if datasets := [kind for kind in kinds if kind.kind == DATASET]:
        return datasets  # its shards are files of other kinds, too
    if _only_archives(kinds):
        return sorted(kinds, key=lambda kind: not kind.by.certain)
    is_other = any(map(_is_certainly_other, kinds))
    folder = None if is_other else _folder_inside(overview)
    inner = recognized(overview.inner(folder)) if folder else []
    if is_other or any(map(_is_certainly_other, inner)):
        kinds = [kind for kind in kinds if kind.kind != DEFAULT_SOURCE]
        kinds += [kind.below(folder or "") for kind in inner if kind.by.certain]
    if is_other:
        kinds += [Recognized(DEFAULT_SOURCE, by) for by in _classes_beside(overview, kinds)]
    return sorted(kinds, key=lambda kind: not kind.by.certain)


def _only_archives(kinds: Iterable[Recognized]) -> bool:
    """Return whether only tar archives are next to folders of images, as in ImageNet's folder."""
    return {kind.kind for kind in kinds if kind.by.certain} == {DEFAULT_SOURCE, "webdataset"}


def _is_certainly_other(kind: Recognized) -> bool:
    return kind.by.certain and kind.kind != DEFAULT_SOURCE


def the_kinds(
    path: str | Path, rest: Sequence[str] = (), only: str = ""
) -> Mapping[str, Recognized]:
    """Return the kind of a source, or of the file of each split; exactly one must be certain.

    ``rest`` are the command's arguments after the source, for messages; ``only`` is the kind that
    the user has named, if any.
    """
    seen = Overview(path)
    kinds = [kind.noted(seen) for kind in recognized(path) if only in ("", kind.kind)]
    certain = [kind for kind in kinds if kind.by.certain]
    if {kind.kind for kind in certain} == {DEFAULT_SOURCE} and "--classes" not in rest:
        for inside in {kind.by.inside for kind in certain} - {""}:
            load(_REFUSE_MISREAD)(Overview(path), inside)
    if len(certain) == 1:
        (kind,) = certain
        return {"": kind}
    if splits := _splits_of(certain):
        return splits
    if not kinds and only:
        raise UsageError(f"{path} is a folder without {only} files", remedy="pass the file instead")
    if not kinds:
        _refuse_unknown(path)
        raise UsageError(
            f"{path}: not recognized as any kind of source;",
            remedy=f"choose the kind: shardkit convert KIND {shell(path, *rest)}, with KIND from "
            f"{', '.join(source_names())}. Or convert any Python dataset, such as one from "
            "torchvision: shardkit.convert(dataset, 'DST', to='lmdb')",
        )
    may_be = certain or kinds
    raise UsageError(
        f"{path} may be {' or '.join(map(str, may_be))}",
        remedy=f"Run {_commands(may_be, path, rest or ('DST', '--to', 'lmdb'))}",
    )


def _refuse_unknown(path: str | Path) -> None:
    """Refuse what shows why no kind recognizes a path."""
    seen = Overview(path)
    names = [*seen.folders(), *seen.files()] if seen.is_folder else [seen.path.name]
    if not names:
        raise UsageError(f"{path} contains no data;", remedy="choose another folder")
    for suffixes, what, remedy in (
        (_PACKED, "packed", "unpack it"),
        (_UNFINISHED, "an unfinished download", "download it again"),
    ):
        if name := next((name for name in names if name.lower().endswith(suffixes)), None):
            inside = f"{path} contains {name}, which" if seen.is_folder else f"{path}"
            raise UsageError(f"{inside} is {what};", remedy=remedy)
    load(_REFUSE_PIXELS)(seen)


def _splits_of(kinds: Sequence[Recognized]) -> Mapping[str, Recognized]:
    """Return the kind of each split, if each has one source of the same kind; otherwise nothing.

    Of COCO, the files of instances count, and not those of captions and keypoints next to them.
    """
    instances = [kind for kind in kinds if Path(kind.by.inside).stem.startswith("instances")]
    kinds = instances or kinds
    splits = {kind.split: kind for kind in kinds}
    is_one = len({kind.kind for kind in kinds}) == 1
    return splits if is_one and 1 < len(splits) == len(kinds) and "" not in splits else {}


def left_out(path: str | Path, kinds: Iterable[Recognized]) -> list[str]:
    """Return what is next to what is read below a path; folders end with a slash."""
    seen = load(_ARCHIVE)(path) or Overview(path)
    read = [inside for kind in kinds for inside in kind.paths]
    found = []
    waiting = [""] * ("" not in read)
    for top in waiting:
        for name in (*seen.folders(top), *seen.files(top)):
            inside = below(top, name)
            if any(other.startswith(f"{inside}/") for other in read if inside not in read):
                waiting.append(inside)
            elif inside not in read and not any(
                fnmatch.fnmatch(inside, pattern) for pattern in read if "*" in pattern
            ):
                found.append(inside + "/" * (name in seen.folders(top)))
    return found


def note_other_classes(path: str | Path) -> Iterator[str]:
    """Yield a note on what may be classes: words in names, or folders in folders without images."""
    seen = Overview(path)
    what, way = labels_in_names(seen.path, seen.images())
    if what:
        yield f"file names may contain {what}, but only folders label images: run {way}"
    outer = seen.folders()[:FOLDERS_TRIED]
    inner = [f"{name}/{of}" for name in outer for of in seen.folders(name)]
    if len(inner) > len(outer):
        image = next((image for of in inner for image in seen.images(of)), ".jpg")
        yield (
            f"the outer folders are the classes, such as {outer[0]}; to use the inner folders, "
            f"such as {inner[0]}, run {way_of_files(seen.path, image, labeled=True)}"
        )


def labels_in_names(root: Path, images: Sequence[str]) -> tuple[str, str]:
    """Return which labels the names of images may contain, and the command; or "" twice."""
    for pattern in _NAMED:
        matches = (re.fullmatch(pattern + r"\.\w+", name) for name in images[:_NAMES_TRIED])
        words = Counter(m[1] for m in matches if m and not NO_CLASS.fullmatch(m[1]))
        if len(words) > 1 and min(words.values()) > 1:
            what = f"classes ({', '.join(sorted(words)[:3])})"
            return what, _way_of_names(root, f"{pattern}\\.[A-Za-z0-9]+", ["label"])
    numbers = [match[0] for match in map(_NUMBERS.match, images[:_NAMES_TRIED]) if match]
    (first, most), *_ = Counter(text.count("_") for text in numbers).most_common(1) or [(0, 0)]
    if first < 2 or 2 * most < len(images[:_NAMES_TRIED]):
        return "", ""
    columns = [f"number_{n}" for n in range(1, first + 1)]
    return f"numbers ({numbers[0]})", _way_of_names(root, "([0-9]+)_" * first + ".*", columns)


def _way_of_names(root: Path, pattern: str, columns: Sequence[str]) -> str:
    """Return the command for a table of the groups in names of files."""
    groups = "".join(f",\\{n}" for n in range(1, len(columns) + 1))
    options = ["--keep", ",".join(columns)] * (columns[0] != "label")
    script = shell(f's/^{pattern}$/"&"{groups}/p')
    words = shell("labels.csv", "DST", "--to", "lmdb", "--root", root, *options)
    return (
        f"(cd {shell(root)}; echo file_name,{','.join(columns)}; ls | sed -nE {script}) "
        f"> labels.csv; shardkit convert table {words}"
    )


def way_of_files(root: Path, image: str, *, split: str = "", labeled: bool = False) -> str:
    """Return the command for a table of all files like an image, perhaps with their folders."""
    columns = ("file_name,label", '"%p","%h"') if labeled else ("file_name", '"%p"')
    pattern = shell(f"*.{image.rpartition('.')[2]}")
    table = f"{split or 'labels'}.csv"
    words = shell(table, f"DST/{split}".rstrip("/"), "--to", "lmdb", "--root", root)
    return (
        f"(cd {shell(root)}; echo {columns[0]}; find */ -name {pattern} -printf "
        f"'{columns[1]}\\n' | sort) > {table}; shardkit convert table {words}"
    )


def refuse_other_kinds(path: str | Path, rest: Sequence[str], *, splits: bool = False) -> None:
    """Refuse a folder of images that another kind of source recognizes for certain.

    The message has the command of that kind; ``rest`` are the arguments after the source. If
    ``splits``, the user says that the folders are splits, not a wrapper of the classes.
    """
    found = recognized(path)
    kinds = [
        kind
        for kind in found
        if not (_only_archives(found) and kind.kind != DEFAULT_SOURCE)
        if (kind.by.inside and not splits if kind.kind == DEFAULT_SOURCE else kind.by.certain)
        if kind.kind != DATASET  # it has no images, which the source says
    ]
    if [kind.kind for kind in kinds] == [DEFAULT_SOURCE]:
        load(_REFUSE_MISREAD)(Overview(path), kinds[0].by.inside)
    if kinds:
        as_they_are = f"pass {setting('classes', True)} to use its folders as classes, or "
        raise UsageError(
            f"{path} looks like {' and '.join(map(str, kinds))}, not class folders",
            remedy=f"{as_they_are * os.path.isdir(path)}run {_commands(kinds, path, rest)}",
        )
    load(_REFUSE_MISREAD)(Overview(path))


def _commands(kinds: Sequence[Recognized], path: str | Path, rest: Sequence[str]) -> str:
    """Return the commands; several get datasets of their own, unless they are splits."""
    if _splits_of([kind for kind in kinds if kind.by.certain]):
        return f"shardkit convert {shell(path, *(rest or ('DST',)))}"
    target, *options = rest or ("DST",)
    several = len({(kind.kind, kind.by.inside) for kind in kinds}) > 1
    names = [kind.name for kind in kinds]
    if len(set(names)) < len(names):
        names = [kind.by.inside or kind.kind for kind in kinds]
    goals = [os.path.join(target, name) if several else target for name in names]
    commands = [
        kind.command(path, [goal, *options]) for kind, goal in zip(kinds, goals, strict=True)
    ]
    return ", or ".join(commands)
