"""The manifest: what a dataset is. It is written last, so that its presence is the commit.

It knows the names and sizes of a dataset's files, and opens none of them but ``shardkit.json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardkit.errors import CorruptDataset, Problem, UsageError
from shardkit.files import open_regular, write_atomically
from shardkit.record import dump_json, load_json

MANIFEST_NAME = "shardkit.json"
FORMAT_VERSION = 1
"""Raised when a reader of an older version would misread what is written."""

_DEEPEST = 32
"""Objects and lists within each other in a recipe or a source; no writer makes more than three."""

_TOO_MANY = 1 << 63
"""Above this numbers do not fit where they are computed with."""

_REMEDY = (
    "Restore it from a copy, or convert again into a new folder: the same source, options and "
    "versions give the same file."
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a dataset, a shard or not, and what must be true of it."""

    name: str
    """Relative to the dataset's directory."""
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class ShardEntry(FileEntry):
    """One shard."""

    rows: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one dataset is: format, shards, classes, and how it was made.

    It holds no time and no absolute path: the same input and options give the same manifest.
    """

    format: str
    """Name of the storage format, as in the registry."""
    rows: int
    shards: tuple[ShardEntry, ...]
    files: tuple[FileEntry, ...]
    """Files that are not shards: the columns of the index, and reports."""
    fields: dict[str, int]
    """Field name to the number of records that have it."""
    classes: tuple[str, ...] | None
    """Class names; a label is a position here. None for an unlabelled dataset."""
    class_counts: tuple[int, ...] | None
    """Records of each class, in the order of ``classes``."""
    raw_shape: tuple[int, int, int] | None
    """Height, width and channels of every image, where images are stored as raw pixels."""
    recipe: dict[str, Any]
    """What was done to the images (`shardkit.recipe.Recipe`)."""
    source: dict[str, Any]
    """Where the records came from, and the rule of their order."""
    notes: dict[str, int] = field(default_factory=dict)
    """What was noticed and left as it was, counted (`shardkit.recipe.NOTES`)."""
    skipped: tuple[Problem, ...] = ()
    """Bad source files that were left out on request."""
    ignored: dict[str, int] = field(default_factory=dict)
    """What else was in the source, counted by reason; ``ignored.jsonl`` lists it."""
    software: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that made the pixels and the files."""

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """All files of the dataset but the manifest itself."""
        return (*self.shards, *self.files)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's canonical JSON: the dataset's identity."""
        return _digest(_as_json("dataset", asdict(self)))


@dataclass(frozen=True, kw_only=True)
class SplitsManifest:
    """What a directory of splits is: one dataset per split, with one common list of classes."""

    splits: dict[str, str]
    """Name of the split, which is its directory's, to the digest of its manifest."""

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's canonical JSON."""
        return _digest(_as_json("splits", asdict(self)))


def save_manifest(manifest: Manifest | SplitsManifest, directory: Path) -> None:
    """Write ``manifest`` into ``directory`` atomically: this commits the dataset."""
    kind = "dataset" if isinstance(manifest, Manifest) else "splits"
    write_atomically(directory / MANIFEST_NAME, _render(_as_json(kind, asdict(manifest))))


def load_any_manifest(directory: Path) -> Manifest | SplitsManifest:
    """Read the manifest of ``directory``, whatever its kind.

    Raises:
        UsageError: If there is no manifest, or one of a newer version.
        CorruptDataset: If the manifest is not one that shardkit wrote, or was changed since.
    """
    path = directory / MANIFEST_NAME
    content = _read(path)
    value = _parse(path, content)
    version = value.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {version}; this shardkit reads up to version "
            f"{FORMAT_VERSION}. Install a newer shardkit."
        )
    value.pop("digest", None)
    if content != _render_or_none(value) or type(version) is not int or version != FORMAT_VERSION:
        raise CorruptDataset(
            f"{path} was changed after it was written, or is cut: its digest does not match. "
            f"{_REMEDY}"
        )
    body = {name: part for name, part in value.items() if name not in ("format_version", "kind")}
    target: type[Manifest | SplitsManifest]
    target = SplitsManifest if value.get("kind") == "splits" else Manifest
    try:
        manifest = _build(target, body)
        _check(manifest)
    except (TypeError, ValueError) as error:
        raise CorruptDataset(f"{path} is not a valid manifest: {error}") from error
    return manifest


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of the one dataset in ``directory``.

    Raises:
        UsageError: If there is no manifest, one of a newer version, or one of splits.
        CorruptDataset: If the manifest is not one that shardkit wrote, or was changed since.
    """
    manifest = load_any_manifest(directory)
    if isinstance(manifest, SplitsManifest):
        names = ", ".join(manifest.splits)
        first = next(iter(manifest.splits))
        raise UsageError(
            f"{directory} holds one dataset per split ({names}); open one of them, "
            f"for example {directory / first}"
        )
    return manifest


def dataset_directories(directory: Path) -> dict[str, Path]:
    """Return the datasets in ``directory``: name of the split to its directory.

    A directory that is one dataset gives that alone, under the name "".

    Raises:
        UsageError: If there is no manifest, or one of a newer version.
        CorruptDataset: If the manifest is not one that shardkit wrote, or was changed since.
    """
    manifest = load_any_manifest(directory)
    if isinstance(manifest, SplitsManifest):
        return {name: directory / name for name in manifest.splits}
    return {"": directory}


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path.parent} is not a shardkit dataset: {_lack(path)}") from None
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        raise UsageError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = load_json(content)
    except ValueError as error:
        raise CorruptDataset(f"{path} is not a manifest of shardkit: {error}. {_REMEDY}") from error
    if value.get("kind") not in ("dataset", "splits"):
        raise CorruptDataset(f"{path} is not a manifest of shardkit. {_REMEDY}")
    return value


def _render(value: Mapping[str, Any]) -> bytes:
    """Return the one text, its digest included, that a manifest of this content has."""
    text = json.dumps({**value, "digest": _digest(value)}, indent=1, sort_keys=True)
    return text.encode("ascii") + b"\n"


def _render_or_none(value: Mapping[str, Any]) -> bytes | None:
    try:
        return _render(value)
    except (RecursionError, ValueError):  # too deep, or numbers too large: nothing of ours
        return None


def _lack(path: Path) -> str:
    """Return why there is no manifest at ``path``."""
    if not path.parent.exists():
        return "there is no such directory"
    if not path.parent.is_dir():
        return "it is a file"
    if any(path.parent.glob(".shardkit*")):
        return "a conversion into it is not finished; give the same convert command again"
    return f"there is no {path.name} in it"


def _as_json(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, "kind": kind, **body}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(value)).hexdigest()


def _check(manifest: Manifest | SplitsManifest) -> None:
    """Refuse what the types allow and no writer makes, above all a name that leads elsewhere."""
    if isinstance(manifest, SplitsManifest):
        names = list(manifest.splits)
        if not names:
            raise ValueError("there are no splits")
    else:
        names = [entry.name for entry in manifest.entries]
        if manifest.rows != sum(shard.rows for shard in manifest.shards):
            raise ValueError("the rows of the shards do not add up to the rows of the dataset")
        if (manifest.classes is None) != (manifest.class_counts is None):
            raise ValueError("classes and class_counts must both be given, or neither")
        if len(manifest.classes or ()) != len(manifest.class_counts or ()):
            raise ValueError("there are not as many class_counts as classes")
    for name in names:
        parts = os.fsdecode(os.fsencode(name)).split("/")  # a name no file can have is refused
        if any(part in ("", ".", "..") or "\0" in part or len(part) > 255 for part in parts):
            raise ValueError(f"the name {name!r} is not a plain relative path")
    if len(set(names)) != len(names):
        raise ValueError("a file is named twice")


def _build(target: type[_T], value: object) -> _T:
    """Build the dataclass ``target`` from JSON, checking every type on the way."""
    if not isinstance(value, dict):
        raise TypeError(f"{target.__name__} must be an object")
    types_of = _types_of(target)  # type: ignore[arg-type]
    unknown = value.keys() - types_of.keys()
    if unknown:
        raise ValueError(f"{target.__name__} has unknown entries {sorted(unknown)}")
    missing = {item.name for item in fields(target)} - value.keys()  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"{target.__name__} lacks {sorted(missing)}")
    return target(**{name: _convert(types_of[name], part, name) for name, part in value.items()})


@functools.cache
def _types_of(target: type[Any]) -> dict[str, Any]:
    """Return the type of each field; kept, since to find out takes longer than to read an entry."""
    return typing.get_type_hints(target)


def _convert(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        kinds = [argument for argument in arguments if argument is not type(None)]
        return (
            None
            if value is None and len(kinds) < len(arguments)
            else _convert(kinds[0], value, name)
        )
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{name} must be a list")
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(items) != len(value):
            raise ValueError(f"{name} must have {len(items)} entries")
        return tuple(_convert(item, part, name) for item, part in zip(items, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be an object")
        return {key: _convert(arguments[1], part, f"{name}.{key}") for key, part in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value)
    if kind is Any:
        _require_plain(value, name, _DEEPEST)
        return value
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits or (kind is int and not 0 <= value < _TOO_MANY):
        raise TypeError(f"{name} must be {'a count' if kind is int else kind.__name__}")
    return value


def _require_plain(value: Any, name: str, deepest: int) -> None:
    """Refuse a value that is no JSON, or within which others stand too deep to walk over it.

    Raises:
        ValueError: If that is so.
    """
    if deepest == 0:
        raise ValueError(f"{name} is nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} has the number {value}, which is no JSON")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _require_plain(part, name, deepest - 1)
