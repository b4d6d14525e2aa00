"""Recognizes folders whose images a table lists, and the options that such a table needs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import product
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from shardkit.contracts import Recognition
from shardkit.errors import UsageError, setting
from shardkit.sources.columns import field_name, ones_of, usual_label
from shardkit.sources.folders import below, is_split_name
from shardkit.sources.images import has_image_suffix
from shardkit.sources.recognize import (
    NO_CLASS,
    Overview,
    Recognized,
    first_image,
    has_images,
    labels_in_names,
    split_in,
    unwrapped,
    way_of_files,
)
from shardkit.sources.table_rows import SUFFIXES
from shardkit.sources.table_text import LISTS, first_rows
from shardkit.system.safe_paths import split_path
from shardkit.system.text import name_list, shell

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_MASKS = re.compile(r"mask|label|annot|gt|seg", re.I)
_MAY_LABEL = re.compile(r"label|class|target|categor|diagnos|finding|tag", re.I)
_NO_DATA = re.compile(r".*(submission|partition)", re.I)
_OF_IMAGES = re.compile(r"im(age|g)|photo|pic", re.I)
_START = 1 << 16
"""Bytes of a file to look at."""
_MOST = 1000
"""Rows of a table, or images of a folder, to look at."""
_LISTS = (*SUFFIXES, ".odgt", ".xlsx", ".xls", ".ods", ".mat", ".pkl")
"""Suffixes of what may be a list of labels, whatever is in it."""
_OBJECTS = (".json", ".jsonl", ".ndjson", ".odgt")
"""Suffixes of lists of JSON objects."""
_TEXTS = (".txt", ".json", ".xml", ".lst")
"""Suffixes of what is a list if it names an image."""
_SEPARATED = (".csv", ".tsv")
_PIXEL = re.compile(r"pixel_?[0-9]+|[0-9]+x[0-9]+", re.IGNORECASE)
"""The column of a pixel."""
_PIXELS = re.compile(r"[0-9]{1,3}( [0-9]{1,3}){63,}")
"""All pixels of an image as text."""
_SPECIAL = {*'"\\$`!'}
"""Characters that a shell changes between double quotation marks."""
SIDES = (
    (("xmin", "ymin", "xmax", "ymax"), "xyxy"),
    (("x1", "y1", "x2", "y2"), "xyxy"),
    (("left", "top", "right", "bottom"), "xyxy"),
    (("x", "y", "width", "height"), "xywh"),
    (("x", "y", "w", "h"), "xywh"),
    (("x1", "y1", "width", "height"), "xywh"),
    (("left", "top", "width", "height"), "xywh"),
)
"""Names of columns of the sides of boxes, without case and marks, and their order."""
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]*)?")
_BOX = re.compile(r"[\[(] *([0-9.]+), *([0-9.]+), *([0-9.]+), *([0-9.]+) *[\])]")
"""A box as text."""
_OF_SPLITS = re.compile(r"usage|split|subset|partition|data[ _]?set", re.IGNORECASE)
"""The column of splits."""
_WORD = re.compile(rb"[\w.-]+")
_NUMBERS = re.compile(rb"(?:\d+\r?\n)+\d*\s*")
"""A list of labels alone, in the order of the names of the images."""
_BOXED = re.compile(r"n\d{8}( -?\d+){4}.*")
"""The class of an image of ImageNet at Kaggle, with boxes."""
_OF_FRAMES = re.compile(r"(^|[/_])(gt|det|label|annot|ground|b?box|track|pose)", re.I)
"""Names of annotations of all frames of a sequence."""
_SPLIT_WORD = re.compile(
    r"(?<![A-Za-z])(?i:train|training|val|valid|validation|test|testing)(?![a-z])"
)
_EXPORTED = "shardkit convert on the same annotations, exported as COCO, YOLO or VOC"
_MOST_LISTS = 20
_FEW = 2
"""Names of images that show that a text in a folder lists them."""


class _Fit(NamedTuple):
    """A column whose values name files in a folder."""

    rows: int
    """Rows whose file is there."""
    folder: str
    column: str
    suffix: str
    """Suffix that the names lack."""


def recognize_table(seen: Overview) -> Iterator[Recognition]:
    """Yield the tables at or below a path that list images."""
    suffix = seen.path.suffix.lower()
    if not seen.is_folder:
        if suffix in SUFFIXES and not (suffix == ".parquet" and b"huggingface" in seen.ends()):
            yield Recognition(f"a table ({suffix})", certain=suffix != ".parquet")
        return
    for top in ("", *filter(is_split_name, seen.folders())):
        of_hub = [
            file
            for file in seen.files(top)
            if file in _METADATA and b"file_name" in seen.ends(below(top, file))
        ]
        for file in of_hub:
            inside = below(top, file)
            yield Recognition(inside, inside=inside, words=_words_of_hub(seen, inside))
        folders = _folders(seen, top)
        if seen.files(top, _SEPARATED):
            zips = (below(top, name) for name in seen.files(top, ".zip")[:_MOST_LISTS])
            folders += [folder for name in zips for folder in _folders(seen, name)]
        files = [*seen.files(top, _SEPARATED), *_lists(seen, top)] if folders else []
        files = [file for file in files if not (file in of_hub or _NO_DATA.match(file))]
        found = {file: [*_list_of(seen, below(top, file), folders)] for file in files}
        several = len({split_in(file) for file in files if found[file]} - {""}) > 1
        for file in files:
            if not (several and not split_in(file) and _stem(file) in seen.folders(top)):
                yield from found[file]  # a table of another folder is not of a split


def _words_of_hub(seen: Overview, file: str) -> tuple[str, ...]:
    """Return the options that keep what images without labels have, such as captions."""
    header = (first_rows(seen.ends(file)[:_START], file) or [[]])[0]
    if file.endswith(".jsonl"):
        with suppress(ValueError):
            header = [*json.loads(seen.ends(file)[:_START].partition(b"\n")[0])]
    elif file.endswith(".parquet"):
        return ()
    others = [name for name in header if not name.endswith("file_name")]
    kept = [_kept(name, [""]) for name in others] if not usual_label(others) else []
    return ("--keep", ",".join(filter(None, kept))) if any(kept) else ()


def _lists(seen: Overview, top: str) -> list[str]:
    """Return the lists in a folder that are not of one image."""
    stems = {*map(_stem, seen.images(top))}
    return [file for file in seen.files(top, LISTS) if _stem(file) not in stems][:_MOST_LISTS]


def refuse_misread(seen: Overview, inside: str = "") -> None:
    """Refuse images that would have no labels, or wrong ones, by what is next to or below them.

    The message names it. ``inside`` is the folder below ``seen`` whose images are meant.
    """
    lists = (
        (f"its folders are not classes, but {file} may list labels or captions", way)
        for file, way in unread_lists(seen, inside)
    )
    versions = [*split_versions(seen, inside)]
    labeled = (way for way in versions if " table " in way[1])
    folders = misread_folders(seen, inside)
    for why, way in itertools.chain(folders, labeled, lists, versions, named(seen, inside)):
        raise UsageError(
            f"{seen.path}: {why}",
            remedy=f"run {way}. Pass {setting('classes', True)} to use the folders as classes",
        )


def misread_folders(seen: Overview, top: str = "") -> Iterator[tuple[str, str]]:
    """Yield why folders, also those in splits, are no classes, and the commands."""
    tops = [top, *(name for name in _inner(seen, top) if is_split_name(PurePath(name).name))]
    found = [why for each in tops for why in [*not_classes(seen, each)][:1]]
    if found:
        yield found[0][0], "; ".join(way for _, way in found)


def named(seen: Overview, top: str = "") -> Iterator[tuple[str, str]]:
    """Yield that names of images in the only folder may contain labels, and the command."""
    folders = _inner(seen, top)
    for folder in folders if len(folders) == 1 and not seen.images(top) else ():
        what, way = labels_in_names(seen.path / folder, seen.images(folder))
        if what:
            yield f"{folder}/ is the only folder, and file names may contain {what}", way


def refuse_pixels(seen: Overview) -> None:
    """Refuse tables of pixels, with the command that converts each."""
    files = seen.files(suffix=_SEPARATED) if seen.is_folder else [""]
    ways = {file: way for file in files if (way := _way_of_pixels(seen, file))}
    if ways:
        named = f": {name_list(ways)}" if seen.is_folder else ""
        raise UsageError(
            f"{seen.path}{named}: the values are pixels, not file names;",
            remedy=f"run {'; '.join(ways.values())}",
        )


def _way_of_pixels(seen: Overview, file: str) -> str:
    """Return the command for a table whose rows are pixels, in columns or as text; "" if none."""
    path = seen.path / file
    suffix = path.suffix.lower()
    table = first_rows(seen.ends(file)[:_START], path.name) if suffix in _SEPARATED else []
    if len(table) < 2:
        return ""
    header, row = table[:2]
    pixels = [name for name in header if _PIXEL.fullmatch(name)]
    texts = [name for name, cell in zip(header, row, strict=False) if _PIXELS.fullmatch(cell)]
    others = [name for name in header if name not in (*pixels, *texts)]
    split = next(filter(_OF_SPLITS.fullmatch, others), "")
    label = usual_label(others) or next((name for name in others if name != split), "")
    if pixels:
        at = header.index(label) if label else None
        array = "rows" if at is None else f"numpy.delete(rows, {at}, 1)"
        labels = "" if at is None else f", labels=rows[:, {at}]"
        delimiter = "\t" if suffix == ".tsv" else ","
        code = (
            f"import numpy; rows = numpy.loadtxt({str(path)!r}, int, delimiter={delimiter!r}, "
            f"skiprows=1); numpy.savez('{path.stem}.npz', images={array}.astype('uint8')"
            f".reshape(-1, {_shape_of(len(pixels))}){labels})"
        )
        command = shell("npy", f"{path.stem}.npz", f"DST/{path.stem}", "--to", "lmdb")
        return f"{_python(code)}; shardkit convert {command}"
    if not texts:
        return ""
    shape = _shape_of(len(row[header.index(texts[0])].split()))
    image = f"numpy.array(row[{texts[0]!r}].split(), 'uint8').reshape({shape})"
    value = f"row[{label!r}]"
    number = f"int({value})" if label and row[header.index(label)].isdecimal() else value
    sample = f"({image}, {number})" if label else f"{{'image': {image}}}"
    values = f"{number} for row in rows"
    classes = f"1 + max({values})" if number != value else f"sorted({{{values}}})"
    schema = f", schema={{'label': shardkit.Field('label', classes={classes})}}" * bool(label)
    convert = f"shardkit.convert([{sample} for row in rows"
    code = (
        f"[{convert} if row[{split!r}] == split], 'DST/' + split, to='lmdb'{schema}) "
        f"for split in {{row[{split!r}] for row in rows}}]"
        if split
        else f"{convert}], 'DST/{path.stem}', to='lmdb')"
    )
    read = f"import csv, numpy, shardkit; rows = [*csv.DictReader(open({str(path)!r}))]"
    return _python(f"{read}; {code}")


def _python(code: str) -> str:
    """Return the command that runs code, with quotation marks that can be read, if possible."""
    return "python -c " + (shell(code) if {*code} & _SPECIAL else f'"{code}"')


def _shape_of(pixels: int) -> str:
    """Return the shape of square images with so many values, gray or RGB."""
    for channels, shape in ((1, "{0}, {0}"), (3, "{0}, {0}, 3")):
        side = math.isqrt(pixels // channels)
        if side * side * channels == pixels:
            return shape.format(side)
    return "HEIGHT, WIDTH"


def not_classes(seen: Overview, top: str = "") -> Iterator[tuple[str, str]]:
    """Yield that folders all have the same folders, which may be the classes, and the commands."""
    folders = [
        name for name in _inner(seen, top)[:_MOST_LISTS] if not is_split_name(PurePath(name).name)
    ]
    for folder in (top, *folders):
        copy = below(folder, PurePath(folder).name or seen.path.name)
        if {*seen.folders(folder)} & {*seen.folders(copy)}:
            way = shell(seen.path / copy, "DST", "--to", "lmdb")
            yield f"{copy}/ may be a copy of the folder around it", f"shardkit convert {way}"
    full = [folder for folder in folders if has_images(seen, folder)]
    if len(folders) > len(full) == 1:
        yield from not_classes(seen, *full)
    if len(folders) > 1:
        yield from _not_labels(seen, top, folders)
    shared = (
        set[str]().union(*map(seen.folders, folders[:1])).intersection(*map(seen.folders, folders))
    )
    names = sorted(name for name in shared if not name.isdecimal())
    if len(folders) > 1 and len(shared) == 1 and all(_has_one_image(seen, of) for of in folders):
        links = f'ln -s "$(realpath {shell(seen.path / top)})"/*/{shell(*shared)}/* images'
        yield (
            f"{folders[0]}/ and {folders[1]}/ contain one image each, and may not be classes",
            f"mkdir images; {links}; shardkit convert imagefolder images DST --to lmdb",
        )
    if len(folders) < 2 or len(names) < 2 or any(map(seen.images, folders)):
        return
    first, second = folders[:2]
    masks = [name for name in names if _MASKS.search(name)]
    images = [name for name in names if seen.images(below(first, name)) and name not in masks]
    if not all(has_images(seen, below(first, name)) for name in names):
        return
    if all(map(is_split_name, names)):
        way = (
            f'for d in {shell(seen.path / top)}/*/*/; do s=sorted/$(basename "$d"); mkdir -p "$s"; '
            'ln -s "$(realpath "$d")" "$s/$(basename "$(dirname "$d")")"; done; '
            "shardkit convert sorted DST --to lmdb"
        )
    elif (
        masks
        and images
        and len(seen.images(below(first, masks[0]))) > len(seen.images(below(first, images[0])))
    ):
        way = _way_of_instances(seen.path / top, images[0], masks[0])
    else:
        way = _one_by_one(seen, folders, "pairs" if masks and images else "imagefolder")
    yield (
        f"{first}/ and {second}/ contain the same folders ({name_list(names)}), which may not be "
        "classes",
        way,
    )


def _not_labels(seen: Overview, top: str, folders: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield why the names of several folders are no labels, and the command for the images."""
    names = [PurePath(folder).name for folder in folders]
    both = f"{folders[0]}/ and {folders[1]}/"
    image = next(filter(None, (first_image(seen, folder) for folder in folders)), "")
    split = next(filter(is_split_name, PurePath(top).parts), "")
    way = way_of_files(seen.path / top, image, split=split)
    inner = [{*seen.folders(folder)} for folder in folders]
    if all({name[:1] for name in of} == {names[n]} for n, of in enumerate(inner)):
        labeled = way_of_files(seen.path / top, image, split=split, labeled=True)
        yield f"{both} are initials, and the folders in them may be the classes", labeled
    if all(map(NO_CLASS.fullmatch, names)) and len({re.sub(r"\d+", "", n) for n in names}) == 1:
        yield f"{both} may be parts of one folder, not classes", way
    shared = set.intersection(*inner)
    first = folders[0]
    pairs = product([below(first, name) for name in shared], repeat=2)
    is_of_image = any(_partners(seen, images, of) for images, of in pairs)
    of_all = [f"{i}/" for i in shared if not any(has_images(seen, f"{of}/{i}") for of in folders)]
    of_all *= len(shared) > 1
    texts = (
        {below(i, file) for i in ("", *shared) for file in seen.files(below(of, i), _TEXTS)}
        for of in folders
    )
    of_all += filter(_OF_FRAMES.search, set.intersection(*texts))
    found = [below(first, name) for name in sorted(of_all)]
    for folder in _inner(seen, top.rpartition("/")[0]) if top else ():
        of_name = {_stem(name): name for name in seen.files(folder, _TEXTS)}
        found += [below(folder, of_name[names[0]])] if of_name.keys() >= {*names} else []
    if found and not is_of_image:
        yield (
            f"{both} may be sequences, not classes, because {found[0]} may annotate frames, which "
            "is read if it is exported as COCO, YOLO or VOC",
            way,
        )


def _has_one_image(seen: Overview, folder: str) -> bool:
    """Return whether a folder has only a folder of one image."""
    inner = _inner(seen, folder)
    return len(inner) == 1 and not seen.images(folder) and len(seen.images(inner[0])) == 1


def _way_of_instances(top: Path, images: str, masks: str) -> str:
    """Return the command for folders of an image and a mask of each object: one mask of numbers."""
    mask = (
        "numpy.max([number * (numpy.asarray(Image.open(file).convert('L')) > 0) "
        f"for number, file in enumerate(sorted(folder.glob('{masks}/*')), 1)], 0).astype('uint16')"
    )
    sample = f"{{'image': next(folder.glob('{images}/*')), 'mask': {mask}}}"
    return _python(
        "import numpy, pathlib, shardkit; from PIL import Image; shardkit.convert("
        f"[{sample} for folder in sorted(pathlib.Path({str(top)!r}).iterdir())], "
        "'DST', to='lmdb', schema={'mask': 'mask'})"
    )


def split_versions(seen: Overview, top: str = "") -> Iterator[tuple[str, str]]:
    """Yield folders that differ only in the word of a split, as trainA and testA, and commands."""
    alike: dict[str, list[str]] = {}
    for name in seen.folders(top):
        if not is_split_name(name) and _SPLIT_WORD.search(name):
            alike.setdefault(_SPLIT_WORD.sub("*", name), []).append(name)
    if names := [name for group in alike.values() if len(group) > 1 for name in group]:
        folders = {name: unwrapped(seen, below(top, name)) for name in names}
        ways = (
            _listed(seen, folder, ["", top, below(top, name), folder], f"DST/{name}")
            or f"shardkit convert imagefolder {shell(seen.path / folder, f'DST/{name}')} --to lmdb"
            for name, folder in folders.items()
        )
        yield f"{name_list(names)} may be splits, not classes", "; ".join(ways)


def _listed(seen: Overview, folder: str, tops: Sequence[str], target: str) -> str:
    """Return the command for a table with the labels of a folder of images; "" if there is none."""
    files = [
        below(top, name)
        for top in dict.fromkeys(tops)
        for name in (*seen.files(top, _SEPARATED), *_lists(seen, top))
        if split_in(name) in ("", split_in(folder))
    ]
    found = (it for file in files if seen.images(folder) for it in _list_of(seen, file, [folder]))
    ways = [it for it in found if {"--label", "--labels"} & {*it.words}]
    return Recognized("table", ways[0]).command(seen.path, (target, "--to", "lmdb")) if ways else ""


def _one_by_one(seen: Overview, folders: Iterable[str], kind: str = "imagefolder") -> str:
    """Return the commands that convert each folder to a dataset of its own."""
    return "; ".join(
        "shardkit convert "
        + shell(kind, seen.path / name, f"DST/{PurePath(name).name}", "--to", "lmdb")
        for name in folders
    )


def unread_lists(seen: Overview, inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield which files may list the labels of images, and the commands that read them."""
    splits = [below(inside, name) for name in seen.folders(inside) if is_split_name(name)]
    tops = [inside, *splits]
    folders = list(dict.fromkeys(folder for top in tops for folder in _folders(seen, top)))
    full = sorted(filter(seen.images, folders), key=lambda name: bool(_MASKS.search(name)))
    if not full:
        classes = _inner(seen, inside)[:_MOST_LISTS]
        yield from _texts_of(seen, [name for name in classes if not seen.images(name)])
        words = {re.sub(r"\d+", "", PurePath(name).name) for name in classes} - {""}
        if len(classes) > 1 == len(words) and (texts := _partners(seen, classes[0], classes[0])):
            way = _way_of_texts(seen, classes[0], classes[0], top=inside)
            yield below(classes[0], texts[0]), way
        yield from _lists_of_shards(seen, inside)
        return
    outer = (folder.rpartition("/")[0] for folder in (inside, *full))
    yield from _texts_of(seen, dict.fromkeys([*tops, *outer]))
    images = [name for folder in full for name in seen.images(folder)[:_MOST]]
    known = {word.encode("utf-8", "replace") for name in images for word in (name, _stem(name))}
    classes = [name for name in splits if any(map(seen.images, _inner(seen, name)))]
    inner = [folder for name in classes for folder in _inner(seen, name)[:_MOST_LISTS]]
    of_classes = {name.encode("utf-8", "replace") for of in inner for name in seen.images(of)}
    places = dict.fromkeys([*tops, "", *_beside(seen)])
    files = [below(top, name) for top in places for name in seen.files(top)]
    others = [shell("imagefolder", seen.path / of, f"DST/{PurePath(of).name}") for of in classes]
    alike: dict[str, list[str]] = {}
    for file in files:
        words = {*_WORD.findall(seen.ends(file))}
        if len(words & of_classes) < _FEW or words & known:
            alike.setdefault(_SPLIT_WORD.sub("*", file), []).append(file)
    found = []
    for group in alike.values():
        ways = {file: way for file in group if (way := _way(seen, file, full, known, classes))}
        for file in itertools.islice(ways, 1):
            commands = [
                *dict.fromkeys(ways.values()),
                *(f"shardkit convert {of} --to lmdb" for of in others),
            ]
            found.append((file, "; ".join(commands)))
    yield from sorted(found, key=lambda way: way[1].startswith(_EXPORTED))


def lists_of_classes(seen: Overview, inside: str) -> list[str]:
    """Return the texts next to class folders that name several of their images by path."""
    folders = _inner(seen, inside)
    names = {
        f"{PurePath(folder).name}/{_stem(image)}".encode("utf-8", "replace")
        for folder in folders[:_MOST_LISTS]
        for image in seen.images(folder)[:_MOST_LISTS]
    }
    tops = dict.fromkeys([inside, inside.rpartition("/")[0], "", *_beside(seen)])
    files = [
        below(top, name)
        for top in tops
        if names and top not in folders
        for name in seen.files(top, (*_TEXTS, *_SEPARATED))[:_MOST_LISTS]
    ]
    return [file for file in files if sum(map(seen.ends(file).__contains__, names)) >= _FEW]


def way_of_numbers(seen: Overview, file: str, inside: str) -> str:
    """Return the commands for both splits of images with numbers; "" if no list divides these.

    The lines of such a list, which is next to theirs, are a number and 0 or 1.
    """
    folder = file.rpartition("/")[0]
    images = _numbered_in(seen, file)
    for other in seen.files(folder, ".txt"):
        numbers = _numbered_in(seen, below(folder, other))
        shared = len(numbers.keys() & images.keys())  # of the first ones
        if {*numbers.values()} == {"0", "1"} and shared == min(len(numbers), len(images)) > 0:
            ones, zeros = ("train", "test") if "train" in other else ("ones", "zeros")
            script = f'{{print path[$1] > ($2 ? "{ones}.txt" : "{zeros}.txt")}}'
            paths = [seen.path / file, seen.path / folder / other]
            ways = [shell("awk", f"NR == FNR {{path[$1] = $2; next}} {script}", *paths)]
            for split, rest in ((ones, zeros), (zeros, ones)):
                words = (seen.path / inside, f"DST/{split}", "--to", "lmdb", "--exclude")
                ways.append(f"shardkit convert imagefolder {shell(*words, f'{rest}.txt')}")
            return "; ".join(ways)
    return ""


def _numbered_in(seen: Overview, file: str) -> dict[str, str]:
    """Return the second words of the first lines of a file by their first; none of other files."""
    text = seen.ends(file)[:_START].decode("utf-8", "replace")
    lines = [line.split() for line in text.split("\n")[:-1]]
    return {line[0]: line[1] for line in lines} if all(len(line) == 2 for line in lines) else {}


def _lists_of_shards(seen: Overview, top: str) -> Iterator[tuple[str, str]]:
    """Yield the tables of labels of images in folders that look like classes, but are not."""
    tables = [below(top, name) for name in seen.files(top, _SEPARATED)]
    of_stem: dict[str, tuple[str, str]] = {}  # the folder of an image, and the suffix that it lacks
    for folder in _inner(seen, top) if tables else ():
        for image in itertools.chain(*map(seen.images, [folder, *_inner(seen, folder)[:_FEW]])):
            for name, suffix in ((image, ""), (_stem(image), PurePath(image).suffix)):
                of_stem[name] = ("", "") if name in of_stem else (PurePath(folder).name, suffix)
    for file in tables:
        header, *rows = first_rows(seen.ends(file)[:_START], file)[: _MOST + 1] or [[]]
        columns = dict(zip(header, zip(*rows, strict=False), strict=False))
        for name, values in columns.items():
            found = [of_stem.get(value, ("", "")) for value in values]
            folders, suffixes = zip(*found, strict=True) if found else ((), ())
            others = {other: columns[other] for other in columns if other != name}
            label = usual_label(others) or next(filter(_MAY_LABEL.search, others), "")
            if (
                label
                and 2 * sum(map(bool, folders)) > len(rows)
                and not any(_are_same(folders, other) for other in others.values())
            ):
                words = ["DST", "--to", "lmdb", "--image", name]
                words += ["--labels" if any("|" in v for v in columns[label]) else "--label", label]
                words += ["--suffix", suffix] * bool(suffix := max(suffixes))
                yield file, f"shardkit convert {shell('table', seen.path / file, *words)}"


def _are_same(folders: Sequence[str], values: Sequence[str]) -> bool:
    """Return whether values are the names of the folders, or stand for several images of each."""
    pairs = {*zip(folders, values, strict=True)}
    is_one_to_one = len(pairs) == len({*folders}) == len({*values}) < len(values)
    return folders == values or is_one_to_one


def _texts_of(seen: Overview, tops: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the first of texts that are each of an image, and the commands that store all.

    They are next to their images, or in a folder next to theirs.
    """
    pairs: dict[str, str] = {}  # the texts of each folder of images
    for top in tops:
        inner = _inner(seen, top)
        inner += [name for folder in inner for name in _inner(seen, folder)[:_MOST_LISTS]]
        inner.sort(key=lambda name: not _MASKS.search(name))
        bare = [name for name in inner if not seen.images(name)]
        full = [top] if seen.images(top) else sorted({*inner}.difference(bare, pairs))
        for images in full:
            found = (
                of
                for of in ([top] if images == top else bare)
                if of not in pairs.values() and _partners(seen, images, of)
                if _split_of(of) in ("", _split_of(images))
            )
            if (texts := next(found, None)) is not None:
                pairs[images] = texts
    splits = [_split_of(images) for images in pairs]
    outer = [images.rpartition("/")[0] for images in pairs]
    names = max(splits, outer, [*pairs], key=lambda of: len({*of} - {""}))
    names = [name.replace("/", "_") for name in names] if len(pairs) > 1 else [""] * len(pairs)
    ways = [
        _way_of_texts(seen, *pair, name) for pair, name in zip(pairs.items(), names, strict=True)
    ]
    for images, texts in itertools.islice(pairs.items(), 1):
        file = _partners(seen, images, texts)[0]
        way = "; ".join(ways) * all(ways)
        if not (way and images == texts and file.endswith(".txt")):
            way += "; or, to read boxes, " * bool(way) + _EXPORTED
        yield below(texts, file), way


def _partners(seen: Overview, images: str, texts: str) -> list[str]:
    """Return the texts in a folder that are named after images, if most images have one."""
    found = seen.images(images)
    names = {*found, *map(_stem, found)}
    files = [name for name in seen.files(texts, (*_TEXTS, *_LISTS)) if _stem(name) in names]
    return files if len(files) > len(found) / 2 else []


def _way_of_texts(
    seen: Overview, images: str, texts: str, name: str = "", top: str | None = None
) -> str:
    """Return the commands that store the text of each image as a field; "" if there are none.

    All folders in ``top`` are like that of the images.
    """
    stems = {*map(_stem, seen.images(images))}
    files = _partners(seen, images, texts)
    suffixes = {
        file[len(stem) + 1 :]
        for file in files
        for stem in (_stem(file), _stem(_stem(file)))
        if stem in stems
    }
    if len(suffixes) != 1:
        return ""
    (suffix,) = suffixes
    field = "caption" if images == texts and suffix == "txt" else "annotation"
    keep = f"{field}={suffix}" + ":text" * suffix.endswith("xml")
    words = [f"{name or 'images'}.tar", below("DST", name), "--to", "lmdb"]
    words += ["--keep", keep + "?" * (len(files) < len(stems))]
    words += ["--grouping", "basename"] * any("." in stem for stem in stems)
    pack = shell("-C", seen.path / (images if top is None else top), ".")
    pack += f" -C {shell(os.path.relpath(seen.path / texts, seen.path / images))} ." * (
        images != texts
    )
    tar = f"tar --sort=name -cf {shell(words[0])} {pack}"
    return f"{tar}; shardkit convert webdataset {shell(*words)}"


def _split_of(path: str) -> str:
    """Return the split in the last name of a path that has the word of one; otherwise ""."""
    words = map(_SPLIT_WORD.search, reversed(PurePath(path).parts))
    return next((split_in(word[0]) for word in words if word), "")


def _inner(seen: Overview, top: str) -> list[str]:
    return [below(top, name) for name in seen.folders(top)]


def _beside(seen: Overview) -> list[str]:
    """Return folders next to the images, and those in them without images."""
    top = ""
    while len(inner := seen.folders(top)) == 1 and not seen.files(top):
        top = below(top, inner[0])
    folders = _inner(seen, top)[:_MOST_LISTS]
    nested = [name for outer in folders for name in _inner(seen, outer)[:_MOST_LISTS]]
    return [top, *folders, *(name for name in nested if not seen.images(name))]


def _way(  # noqa: PLR0911
    seen: Overview, file: str, folders: Sequence[str], names: Set[bytes], classes: Sequence[str]
) -> str:
    """Return the command for images whose labels may be in a file; "" if none are."""
    name = PurePath(file).name.lower()
    if _NO_DATA.match(name) or _way_of_pixels(seen, file):
        return ""
    content = seen.ends(file) if name.endswith((*_TEXTS, *_OBJECTS, ".csv")) else b""
    split = split_in(name) or _split_of(file)
    meant = [
        folder
        for folder in folders
        if split and split in (split_in(PurePath(folder).name), _split_of(folder))
    ]
    if split and not meant and classes:
        return ""  # it is about the classes
    root = (meant or folders)[0]
    suffixes = {PurePath(image).suffix for image in seen.images(root)[:1]}
    top = root.rpartition("/")[0]
    beside = [of for of in folders if of.rpartition("/")[0] == top and _split_of(of)]
    root = root if split or len(beside) < 2 else top  # of all splits
    split = split or split_in(PurePath(root).name) or "labels"
    pattern = _SPLIT_WORD.sub("*", file)
    alike = [
        of
        for of in seen.files(file.rpartition("/")[0])
        if pattern.endswith(_SPLIT_WORD.sub("*", of))
    ]
    is_one_of = bool(classes) or len(alike) > 1 or bool(_split_of(file.rpartition("/")[0]))
    words = [f"DST/{split}" if is_one_of else "DST", "--to", "lmdb", "--root", seen.path / root]
    table = f"> {split}.csv; shardkit convert {shell('table', f'{split}.csv', *words)}"
    path = shell(seen.path / file)
    if b"\n" in content and _NUMBERS.fullmatch(content):
        return (
            f"(echo file_name,label; LC_ALL=C ls {shell(words[-1])} | paste -d, - {path}) {table}"
        )
    boxed = re.findall(r"(?<=,)(n\d+)((?: -?\d+){4}.*)", content[:_START].decode("latin-1"))
    if any(_BOXED.fullmatch(name + rest) for name, rest in boxed):
        pattern = "1s/.*/file_name,label/; s/^([^,]*),(n[0-9]+) .*/\\1.JPEG,\\2/"
        options = [
            seen.path / o[3:] if o[0] == "{" else o for o in _classes(seen, [boxed[0][0]], classes)
        ]
        return f"sed -E {shell(pattern)} {path} {table} {shell(*options)}".rstrip()
    is_list = name.endswith(_LISTS)
    found = {*_WORD.findall(content)} & names if name.endswith(_TEXTS) else set()
    lines = content[:_START].splitlines()[:_MOST] if name.endswith(LISTS) else []
    widths = {len(line.split()) for line in lines}
    if ("/" in file and len(found) < _FEW) or widths == {1}:
        found = set()  # a text that may be about anything, or names alone
    if name.endswith(LISTS) and found and widths != {5}:
        is_bare = not any(b"." in word for word in found)
        needed = ["--suffix", *suffixes] * (is_bare and bool(suffixes))
        if needed and not content.startswith(b"#"):  # the first line would be a header
            rows = f"(echo file_name,label; sed -E 's/[ \t]+/{needed[1]},/' {path})"
            return f"{rows} {table} if its lines are NAME LABEL"
        command = shell("table", seen.path / file, *words, "--image", "1", "--label", "2", *needed)
        return f"shardkit convert {command} if its lines are NAME LABEL"
    if not (is_list or found):
        return ""
    of_cvat = b"<annotations>" in content and b"<image " in content
    if of_cvat or widths == {5} or _stem(PurePath(file).name).encode("utf-8", "replace") in names:
        return _EXPORTED
    command = f"shardkit convert {shell('table', seen.path / file, *words)}"
    if name.endswith(_OBJECTS):
        if of_objects := _options_of_objects(seen, content, root):
            return f"{command} {of_objects}"
    elif name.endswith((*SUFFIXES, *LISTS)):
        return (
            f"{command} --image COLUMN if it is a table; otherwise, write a table with the columns "
            "file_name and label"
        )
    return (
        f"{f'{_EXPORTED}, or ' * name.endswith(_OBJECTS)}shardkit convert "
        f"{shell('table', f'{split}.csv', *words)} after you write that table, with the columns "
        f"file_name and label, from {path}"
    )


def _options_of_objects(seen: Overview, content: bytes, root: str) -> str:
    """Return the options for a list of JSON objects of images, perhaps with lists of boxes.

    There are none if no value names an image.
    """
    text = content[:_START].decode("utf-8-sig", "replace").lstrip("[ \r\n\t")
    rows = []
    with suppress(ValueError):
        while text:
            row, end = json.JSONDecoder().raw_decode(text)
            rows += [row] if isinstance(row, dict) else []
            text = text[end:].lstrip("], \r\n\t")
    first = rows[0] if rows else {}
    columns = {name: [str(row.get(name)) for row in rows] for name in first}
    fits = sorted(_fits(seen, columns, [[root]]), key=lambda fit: (-fit.rows, bool(fit.suffix)))
    if not fits:
        return ""
    options = ["--image", fits[0].column, *["--suffix", fits[0].suffix] * bool(fits[0].suffix)]
    kept = [_kept(name, [""]) for name in first if isinstance(first[name], dict | list)]
    options += ["--keep", ",".join(filter(None, kept))] * any(kept)
    for name in first:
        lists = [row[name] for row in rows if isinstance(row.get(name), list)]
        items = [item for of in lists for item in of if isinstance(item, dict)]
        keys = dict.fromkeys(key for item in items for key in item)
        chosen, *others = [
            f"{name}:/{key}:{order}"
            for key in keys
            for order in _orders_of([item[key] for item in items if item.get(key) is not None])
        ] or [""]
        if chosen:
            label = next(filter(_MAY_LABEL.search, keys), "")
            labels = ["--box-labels", f"{name}:/{label}"] * bool(label)
            other = f" (or --boxes {' or '.join(others)})" * bool(others)
            return shell(*options, *labels, "--boxes", chosen) + other
    return shell(*options)


def _orders_of(boxes: Sequence[Any]) -> list[str]:
    """Return the possible orders of the sides of boxes in JSON; none if they are no boxes."""
    if not boxes or all(isinstance(box, dict) for box in boxes):
        fits = [order for sides, order in SIDES if all({*sides} <= box.keys() for box in boxes)]
        return fits[: bool(boxes)]
    numbers = [box for box in boxes if isinstance(box, list) and len(box) == 4]
    if len(numbers) < len(boxes) or {type(side) for box in numbers for side in box} - {int, float}:
        return []
    is_size = any(box[2] <= box[0] or box[3] <= box[1] for box in numbers)
    return ["xywh"] if is_size else ["xywh", "xyxy"]


def _folders(seen: Overview, top: str) -> list[str]:
    """Return a folder and those in it with images, unless they are classes."""
    inner = _inner(seen, top)
    full = [name for name in inner if seen.images(name)]
    nested = [f"{n}/{of}" for n in inner if not is_split_name(n) for of in seen.folders(n)]
    classes = {PurePath(name).name for name in (*full, *filter(seen.images, nested))}
    if sum(not (split_in(name) or _OF_IMAGES.search(name)) for name in classes) > 1:
        return []
    outer = [name for name in inner if name not in full and has_images(seen, name)]
    return [top, *(full or filter(seen.images, nested)), *outer]


def _list_of(seen: Overview, file: str, folders: Sequence[str]) -> Iterator[Recognition]:
    """Yield how a table lists the images of a folder, once for each folder that may be meant."""
    table = first_rows(seen.ends(file)[:_START], file)[: _MOST + 1]
    header = (table or [[]])[0]
    rows = [row for row in table[1:] if len(row) == len(header)]
    columns = {name: [row[number] for row in rows] for number, name in enumerate(header)}
    fits = [*_fits(seen, columns, [[folder] for folder in folders])]
    most = max((fit.rows for fit in fits), default=0)
    if most < len(rows):
        fits = [fit for fit in _fits(seen, columns, [folders]) if fit.rows == len(rows)] or fits
        most = max((fit.rows for fit in fits), default=0)
    fits = [fit for fit in fits if fit.rows == most]
    fits = [
        fit for fit in fits if not fit.suffix
    ] or fits  # paths before numbers that fit by chance
    by_folder = {fit.folder: fit for fit in reversed(fits)}
    for folder in _meant(file, [*reversed(by_folder)], folders):
        _, _, column, suffix = by_folder[folder]
        is_list = file.endswith(LISTS) and header[:1] == ["1"]
        others = {name: columns[name] for name in columns if name not in ("", column)}
        if (
            (
                is_list and (column != "1" or suffix or header[1:2] != ["2"])
            )  # names alone, or others
            or (suffix and _has(seen, folders, column + suffix))  # the first line is no header
            or any(map(_BOXED.fullmatch, itertools.chain(*others.values())))  # no option reads it
        ):
            return
        words = ["--image", column]
        words += ["--root", f"{{}}/{folder}"] * (folder != file.rpartition("/")[0])
        is_repeated = len({*columns[column]}) < len(columns[column])
        boxes, orders = _boxes_in(others)
        others = {name: others[name] for name in others if name not in boxes}
        label = _label_of(others) or _only(columns, column) or "2" * (is_list and len(header) != 5)
        ones, counts = _ones_in(others)
        if boxes:
            label = label or next(filter(_MAY_LABEL.search, others), "")
            words += ["--box-labels", label] * bool(label)
        if label and not (boxes and is_repeated):
            splits = [*filter(is_split_name, seen.folders())]
            pairs = {pair for pair in zip(columns[column], columns[label], strict=True) if pair[1]}
            is_one = len(pairs) <= len({*columns[column]})
            is_one = is_one and not any("|" in value for value in columns[label])
            words += ["--label" if is_one else "--labels", label]
            words += _classes(seen, columns[label], splits)
        elif not boxes:
            ones = [] if is_repeated else ones
            words += ["--label" if counts == {1} else "--labels", ",".join(ones)] * bool(ones)
            kept = [_kept(name, others[name], is_repeated) for name in others if name not in ones]
            words += ["--keep", ",".join(filter(None, kept))] * any(kept)
        words += ["--join-rows"] * is_repeated
        words += ["--suffix", suffix] * bool(suffix)
        evidence = f"{file}, which lists the images in {folder or 'it'}"
        top = file.rpartition("/")[0]
        known = columns[column][0].encode("utf-8", "replace")
        more = (below(top, name) for name in _lists(seen, top)) if is_list else ()
        certain = not any(known in seen.ends(other) for other in more if other != file)
        for order in orders or [""]:
            boxed = ["--boxes", f"{','.join(boxes)}:{order}"] * bool(order)
            found = evidence + f", with boxes as {order}" * (len(orders) > 1)
            yield Recognition(found, certain=certain, inside=file, words=(*words, *boxed))


def _classes(seen: Overview, names: Sequence[str], splits: Sequence[str]) -> list[str]:
    """Return the option that gives labels as in a split with folders of these classes."""
    if all(name.isdecimal() for name in names):
        return []  # integers are kept
    split = next((split for split in splits if {*names} <= {*seen.folders(split)}), "")
    return ["--classes", f"{{}}/{split}"] if split else []


def _boxes_in(columns: Mapping[str, Sequence[str]]) -> tuple[list[str], Sequence[str]]:
    """Return the columns of the sides of a box in pixels, or of boxes, and the possible orders."""
    called = {re.sub("[^a-z0-9]", "", name.lower()): name for name in columns}
    for sides, order in SIDES:
        names = [called[side] for side in sides if side in called]
        cells = [cell for name in names for cell in columns[name]]
        if len(names) == len(sides) and any(float(c) > 1 for c in cells if _DECIMAL.fullmatch(c)):
            return names, [order]
    for name in columns:
        matches = [*map(_BOX.fullmatch, filter(None, columns[name]))]
        boxes = [[*map(float, match.groups())] for match in matches if match]
        if boxes and len(boxes) == len(matches) and max(map(max, boxes)) > 1:
            is_size = any(box[2] <= box[0] or box[3] <= box[1] for box in boxes)
            return [name], ["xywh"] if is_size else ["xywh", "xyxy"]
    return [], []


def _kept(name: str, values: Sequence[str], is_joined: bool = False) -> str:
    """Return what keeps a column; "" if no option can name it."""
    if {*name} & {*":,?="}:
        return ""
    field = field_name(name)
    called = "" if field == name else f"{field}="
    if is_joined:
        return f"{called}{name}"
    kind = ":int64" * ({*values} <= {"0", "1"})
    return f"{called}{name}{kind}{'?' * ('' in values)}"


def _fits(
    seen: Overview, columns: dict[str, list[str]], groups: Sequence[Sequence[str]]
) -> Iterator[_Fit]:
    """Yield the columns that name files in just one folder of a group."""
    for group, (column, values) in product(groups, columns.items()):
        images = (name for folder in group for name in seen.images(folder)[:_MOST])
        suffixes = Counter(PurePath(name).suffix for name in images)
        for suffix in ("", *suffixes):
            if any(_has(seen, group, value + suffix) for value in values[:20]):
                is_there = [_has(seen, group, value + suffix) for value in values]
                yield _Fit(sum(is_there), group[0], column, suffix)


def _has(seen: Overview, folders: Sequence[str], name: str) -> bool:
    """Return whether just one of some folders has an image of this name."""
    name = name.strip().replace("\\", "/").removeprefix("./").removeprefix("/")
    with suppress(ValueError):
        split_path(name)
        return has_image_suffix(name) and sum(seen.has(below(f, name)) for f in folders) == 1
    return False


def _meant(file: str, fitting: Sequence[str], folders: Sequence[str]) -> Sequence[str]:
    """Return the folders that fit the name of a table best; none if another one should."""
    split = split_in(PurePath(file).name)
    meant = [folder for folder in folders if split and split_in(folder) == split]
    if "/" in file or not any(meant) or all(not split_in(folder) for folder in fitting):
        return fitting
    return [folder for folder in fitting if folder in meant]


def _only(columns: dict[str, list[str]], image: str) -> str:
    """Return the only column besides that of images, if its values are words."""
    others = [name for name in columns if name != image]
    return (
        others[0]
        if len(others) == 1 and not any(" " in v.strip() or "://" in v for v in columns[others[0]])
        else ""
    )


def _ones_in(columns: Mapping[str, Sequence[str]]) -> tuple[list[str], set[int]]:
    """Return what `ones_of` does; none of a row without any or next to labels: what may they be?"""
    ones, counts = ones_of(columns)
    is_other = 0 in counts or any("label" in name.lower() for name in {*columns}.difference(ones))
    return ([] if is_other else ones), counts


def _label_of(columns: Mapping[str, Sequence[str]]) -> str:
    """Return the column of labels by its name; y next to x is a coordinate."""
    label = usual_label(columns)
    words = [re.findall("[a-z]+", name.lower())[-1:] for name in columns]
    if re.findall("[a-z]+", label.lower()) == ["y"] and ["x"] in words:
        label = ""
    ends = [
        name for name, word in zip(columns, words, strict=True) if word in (["label"], ["labels"])
    ]
    return label or (ends[0] if len(ends) == 1 else "")


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
