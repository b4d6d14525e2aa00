"""Recognizes folders whose images a table lists, and the options that such a table needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import PurePath
from typing import NamedTuple

from shardkit.contracts import Recognition
from shardkit.errors import UsageError, setting
from shardkit.sources.columns import ones_of, usual_label
from shardkit.sources.imagefolder import is_split_name
from shardkit.sources.images import has_image_suffix
from shardkit.sources.places import below
from shardkit.sources.recognize import Overview
from shardkit.sources.table_rows import SUFFIXES
from shardkit.sources.table_text import first_rows
from shardkit.system.safe_paths import parts_of
from shardkit.system.text import shell

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_NO_DATA = re.compile(r".*submission|metadata\.", re.I)
_OF_IMAGES = re.compile(r"im(age|g)|photo|pic", re.I)
_SPLIT = re.compile(r"(?<![a-z])(train|val|test|dev|eval)")
_START = 1 << 16
"""Bytes of a file to look at."""
_MOST = 1000
"""Rows of a table, or images of a folder, to look at."""
_LISTS = (*SUFFIXES, ".xlsx", ".xls", ".ods", ".mat", ".pkl")
"""Suffixes of what may be a list of labels, whatever is in it."""
_TEXTS = (".txt", ".json", ".xml", ".lst")
"""Suffixes of what is a list if it names an image."""
_WORD = re.compile(rb"[\w.-]+")


class _Fit(NamedTuple):
    """A column whose values name files in a folder."""

    rows: int
    """Rows whose file is there."""
    folder: str
    column: str
    suffix: str
    """What the names lack."""


def recognize_table(seen: Overview) -> Iterator[Recognition]:
    """Yield the tables at or below a path that list images."""
    suffix = seen.path.suffix.lower()
    if not seen.is_folder:
        if suffix in SUFFIXES and not (suffix == ".parquet" and b"huggingface" in seen.ends()):
            yield Recognition(f"a table ({suffix})", certain=suffix != ".parquet")
        return
    for top in ("", *filter(is_split_name, seen.folders())):
        for file in set(_METADATA).intersection(seen.files(top)):
            yield Recognition(below(top, file), inside=below(top, file))
        folders = _folders(seen, top)
        for file in seen.files(top, (".csv", ".tsv")) if folders else ():
            if not _NO_DATA.match(file):
                yield from _list_of(seen, below(top, file), folders)


def refuse_unread_lists(seen: Overview) -> None:
    """Refuse images that would have no labels, or all the same, next to what may list labels.

    Raises:
        UsageError: If there is such a file; the message names it.
    """
    tops = ["", *filter(is_split_name, seen.folders())]
    folders = list(dict.fromkeys(folder for top in tops for folder in _folders(seen, top)))
    images = [name for folder in folders for name in seen.images(folder)[:_MOST]]
    words = {word.encode("utf-8", "replace") for name in images for word in (name, _stem(name))}
    for file in (below(top, name) for top in tops for name in seen.files(top)) if images else ():
        name = file.lower()
        is_list = name.endswith(_LISTS) and not _NO_DATA.match(PurePath(name).name)
        if is_list or (name.endswith(_TEXTS) and words & {*_WORD.findall(seen.ends(file))}):
            raise UsageError(
                f"{seen.path}: {file} may list the labels of its images, which folders do not have",
                remedy=f"run {_command(seen, file, folders)} if it is a table, or else write one "
                "with the columns file_name and label. "
                f"Pass {setting('classes', True)} to take the folders as they are",
            )


def _command(seen: Overview, file: str, folders: Sequence[str]) -> str:
    full = [folder for folder in folders if seen.images(folder)]
    words = [str(seen.path / file), "DST", "--to", "lmdb", "--root", str(seen.path / full[0])]
    return f"shardkit convert {shell('table', *words, '--image', 'COLUMN')}"


def _folders(seen: Overview, top: str) -> list[str]:
    """Return a folder and those in it with images, unless they are classes."""
    inner = [below(top, name) for name in seen.folders(top)]
    full = [name for name in inner if seen.images(name)]
    nested = [f"{name}/{of}" for name in inner for of in seen.folders(name)]
    classes = {PurePath(name).name for name in (*full, *filter(seen.images, nested))}
    if sum(not (is_split_name(name) or _OF_IMAGES.search(name)) for name in classes) > 1:
        return []
    return [top, *full]


def _list_of(seen: Overview, file: str, folders: Sequence[str]) -> Iterator[Recognition]:
    """Yield how a table lists the images of a folder, once for each folder that may be meant."""
    table = first_rows(seen.ends(file)[:_START], file)[: _MOST + 1]
    header, rows = (table or [[]])[0], table[1:]
    columns = {
        name: [row[number] for row in rows if number < len(row)]
        for number, name in enumerate(header)
    }
    fits = [*_fits(seen, columns, [[folder] for folder in folders])]
    most = max((fit.rows for fit in fits), default=0)
    if most < len(rows):
        fits = [fit for fit in _fits(seen, columns, [folders]) if fit.rows == len(rows)] or fits
        most = max((fit.rows for fit in fits), default=0)
    by_folder = {fit.folder: fit for fit in reversed(fits) if fit.rows == most}
    for folder in _meant(file, [*reversed(by_folder)], folders):
        _, _, column, suffix = by_folder[folder]
        ones, is_one = ones_of({name: cells for name, cells in columns.items() if name != column})
        words = ["--image", column]
        words += ["--root", f"{{}}/{folder}"] * (folder != file.rpartition("/")[0])
        if label := usual_label(set(header) - {column}) or _only(columns, column):
            words += ["--label", label]
        elif ones:
            words += ["--label" if is_one else "--labels", ",".join(ones)]
        words += ["--suffix", suffix] * bool(suffix)
        evidence = f"{file}, which lists the images in {folder or 'it'}"
        yield Recognition(evidence, inside=file, words=tuple(words))


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
    name = name.strip().replace("\\", "/").removeprefix("./")
    with suppress(ValueError):
        parts_of(name)
        return has_image_suffix(name) and sum(seen.has(below(f, name)) for f in folders) == 1
    return False


def _meant(file: str, fitting: Sequence[str], folders: Sequence[str]) -> Sequence[str]:
    """Return the folders that fit the name of a table best; none if another one should."""
    split = _split_of(PurePath(file).name)
    meant = [folder for folder in folders if split and _split_of(folder) == split]
    if "/" in file or not any(meant) or all(not _split_of(folder) for folder in fitting):
        return fitting
    return [folder for folder in fitting if folder in meant]


def _split_of(name: str) -> str:
    match = _SPLIT.search(name.lower())
    return match[1] if match else ""


def _only(columns: dict[str, list[str]], image: str) -> str:
    """Return the only column besides that of images, if its values are words."""
    others = [name for name in columns if name != image]
    return (
        others[0]
        if len(others) == 1 and not any(" " in v.strip() for v in columns[others[0]])
        else ""
    )


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
