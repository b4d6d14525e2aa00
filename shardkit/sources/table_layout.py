"""Recognizes folders whose images a table lists, and the options that such a table needs."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from shardkit.contracts import Recognition
from shardkit.sources.imagefolder import is_split_name
from shardkit.sources.recognize import Overview
from shardkit.sources.table_rows import SUFFIXES

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_LABEL = re.compile(r"labels?|class(es|_name|_id)?|category|target|diagnosis|breed|species|y", re.I)
_NO_DATA = re.compile(r"submission|metadata\.", re.I)
_OF_IMAGES = re.compile(r"im(age|g)|photo|pic", re.I)


def recognize_table(seen: Overview) -> Iterator[Recognition]:
    """Yield the tables at or below a path that list images."""
    suffix = seen.path.suffix.lower()
    if not seen.is_folder:
        if suffix in SUFFIXES and not (suffix == ".parquet" and b"huggingface" in seen.ends()):
            yield Recognition(f"a table ({suffix})", certain=suffix != ".parquet")
        return
    for top in ("", *filter(is_split_name, seen.folders())):
        for file in set(_METADATA).intersection(seen.files(top)):
            path = f"{top}/{file}".lstrip("/")
            yield Recognition(path, inside=path)
    folders = [name for name in ("", *seen.folders()) if seen.images(name)]
    if len(folders) == 1 or all(is_split_name(f) or _OF_IMAGES.search(f) for f in folders if f):
        for file in seen.files(suffix=(".csv", ".tsv")):
            if not _NO_DATA.search(file):
                yield from _list_of(seen, file, folders)


def _list_of(seen: Overview, file: str, folders: list[str]) -> Iterator[Recognition]:
    """Yield why a table lists the images of one of some folders, if it does."""
    lines = seen.ends(file).decode("utf-8-sig", "replace").splitlines()[:2]
    columns, *rows = csv.reader(lines, delimiter="\t" if file.lower().endswith("tsv") else ",")
    for folder in folders:
        images = {name.rpartition(".")[0]: name for name in seen.images(folder)}
        for column, value in zip(columns, rows[0] if rows else (), strict=False):
            if value in images.values() or value in images:
                others = [name for name in columns if name != column]
                labels = [name for name in others if _LABEL.fullmatch(name)] or others
                words = ["--image", column]
                words += ["--root", f"{{}}/{folder}"] if folder else []
                words += ["--label", labels[0]] if len(labels) == 1 else []
                if value in images:
                    words += ["--suffix", images[value][len(value) :]]
                evidence = f"{file}, which lists the images in {folder or 'it'}"
                yield Recognition(evidence, inside=file, words=tuple(words))
                return
