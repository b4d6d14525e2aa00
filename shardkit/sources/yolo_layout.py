"""YOLO's layouts, and the files that describe them: data.yaml, and Darknet's obj.data."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.contracts import Recognition
from shardkit.errors import UsageError
from shardkit.sources.folders import is_split_name
from shardkit.sources.labels import read_classes
from shardkit.sources.recognize import Overview
from shardkit.system.files import read_small
from shardkit.system.late import load
from shardkit.system.text import fault, quoted

_SPLITS = ("train", "val", "test")
_DARKNET = ".data"
"""Suffix of Darknet's descriptions, such as CVAT's obj.data: a line ``NAME = VALUE`` for each."""
_DESCRIPTIONS = (".yaml", ".yml", _DARKNET)
"""Suffixes of descriptions."""


class Description(NamedTuple):
    """The content of a file such as data.yaml."""

    names: tuple[str, ...] | None
    folder: str
    """The folder of the splits, as the file names it; perhaps one of another machine."""
    splits: Mapping[str, Sequence[str]]
    """The folders, lists and files of each split, as the file names them."""
    points: tuple[str, ...]
    """The names of keypoints; none if there are no keypoints."""
    dimensions: int
    """The numbers of each keypoint: 2, or 3 with a visibility."""


NOTHING = Description(None, "", {}, (), 0)


def recognize_yolo(seen: Overview) -> Iterator[Recognition]:
    """Yield descriptions, and folders whose images have files of labels."""
    if not seen.is_folder:
        if seen.path.suffix in _DESCRIPTIONS and _looks_like_description(seen.ends()):
            yield Recognition("a description of images and labels")
        return
    files = seen.files(suffix=_DESCRIPTIONS)
    described = [file for file in files if _looks_like_description(seen.ends(file))]
    for images, labels in _pairs_of_folders(seen):
        stems = {name.rpartition(".")[0] for name in seen.images(images)}
        partners = [name for name in seen.files(labels, ".txt") if name[:-4] in stems][:3]
        if any(_is_labels(seen, f"{labels}/{name}") for name in partners):
            words = f"{images}/ and {labels}/"
            if images == labels:
                words = f"{partners[0]} next to its image"
            yield Recognition(" and ".join([words, *described[:1]]))
            return
    if described:
        yield Recognition(described[0])


def _pairs_of_folders(seen: Overview) -> Iterator[tuple[str, str]]:
    """Yield folders of images with the folders that may have their labels."""
    splits = [*filter(is_split_name, seen.folders())]
    yield "images", "labels"
    yield from ((f"images/{name}", f"labels/{name}") for name in seen.folders("images")[:10])
    yield from ((f"{name}/images", f"{name}/labels") for name in splits)
    yield from ((name, name) for name in (*splits, "."))


def _is_labels(seen: Overview, file: str) -> bool:
    """Return whether the first line of a file has a class and fractions."""
    line = seen.ends(file, 4096).partition(b"\n")[0]
    return re.fullmatch(rb"\d+(\s+-?[01]?\.?\d+(e-?\d+)?){4,}\s*", line) is not None


def description_in(root: str) -> Path | None:
    """Return the description in a folder; data.yaml before others."""
    files = sorted(Path(root).glob("*.*a*"), key=lambda path: (path.stem != "data", path.name))
    for path in files:
        is_named = path.suffix in _DESCRIPTIONS and path.is_file()
        if is_named and _looks_like_description(_read(path)):
            return path
    return None


def _read(path: Path) -> bytes:
    """Return a description, which may be a link, as in a cache of the Hugging Face Hub."""
    return read_small(path.resolve())


def _looks_like_description(content: bytes) -> bool:
    keys = re.findall(
        rb"^(names|nc|train|val|path|classes|valid)(?:: | *=|:$)", content, re.MULTILINE
    )
    return len(set(keys)) >= 2


def read_description(path: Path) -> Description:
    """Return what a file such as data.yaml states."""
    if path.suffix != _DARKNET and find_spec("yaml") is None:
        raise UsageError(f"{path} needs pyyaml", remedy="pip install 'shardkit[yolo]'")
    try:
        values = _values_in(path)
        names = values.get("names")
        if isinstance(names, str):
            names = read_classes(str(path.parent / os.path.basename(names)))
        if isinstance(names, dict):
            names = [names[number] for number in range(len(names))]
        points, dimensions = _points_of(values)
        return Description(
            names=_texts(names) if names else None,
            folder=_texts([values.get("path") or ""])[0],
            splits={
                split: _texts([entry] if isinstance(entry, str) else entry)
                for split in _SPLITS
                if (entry := values.get(split, values.get("valid") if split == "val" else None))
            },
            points=points,
            dimensions=dimensions,
        )
    except (OSError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {fault(error)}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = f"does not describe YOLO images and labels: {fault(error)}"
        raise UsageError(f"{path} {reason}") from error


def _values_in(path: Path) -> Any:
    """Return the content of a description."""
    content = _read(path)
    if path.suffix == _DARKNET:
        lines = (line.partition("=") for line in content.decode().splitlines())
        return {name.strip(): value.strip() for name, sign, value in lines if sign}
    try:
        return load("yaml:safe_load")(content)
    except load("yaml:YAMLError") as error:
        raise UsageError(f"{path} is not YAML: {error}") from error


def _points_of(values: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the names of keypoints, and the numbers of each; see `Description`."""
    shape = values.get("kpt_shape")
    if not shape:
        return (), 0
    count, dimensions = map(int, shape)
    if not (0 < count <= 10_000 and dimensions in (2, 3)):
        raise ValueError(f"kpt_shape is {quoted(shape)}")
    by_class = values.get("kpt_names")
    names = next(iter(by_class.values())) if isinstance(by_class, dict) and by_class else by_class
    if not isinstance(names, list) or len(names) != count:
        names = [*range(count)]
    return _texts(names), dimensions


def _texts(values: Iterable[object]) -> tuple[str, ...]:
    """Return texts and numbers as texts; lists, which aliases of YAML may make huge, are wrong."""
    items = tuple(values)
    if not all(isinstance(value, str | int | float) for value in items):
        raise ValueError("a list is where text is expected")
    texts = tuple(map(str, items))
    if any("\0" in text for text in texts):
        raise ValueError("a text contains a zero byte")
    return texts
