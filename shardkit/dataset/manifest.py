"""The manifest, which describes a dataset. It is written last: its presence is the commit.

This module knows the names and sizes of a dataset's files but opens only ``shardkit.json``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shardkit.dataset.index import INDEX_DIRECTORY, TIMES, index_files, string_files
from shardkit.errors import CorruptDataset, Problem, ShardkitError, UsageError, located, setting
from shardkit.kinds.field import Field, load_schema
from shardkit.recipe import Recipe
from shardkit.record import DATASET_FILE, IMAGE, LABEL, dump_json, load_json
from shardkit.system.files import (
    SMALL_BYTES,
    read_small,
    require_local,
    split_text_path,
    write_atomically,
)
from shardkit.system.safe_paths import LinkRefused, Unfit
from shardkit.system.text import as_command, name_list, printable, quoted

MANIFEST_NAME = DATASET_FILE

_PLAN = ".shardkit-work/state/jobs/plan.json"
"""The plan of `shardkit.cluster.plan_files`, in the directory of the dataset that jobs build."""

FACTS_NAME = "facts.npy"
"""The file of `shardkit report`, in a dataset's directory. It is not part of the dataset."""

FORMAT_VERSION = 1
"""Increased when readers of an older version would misread new datasets."""

CLASS_BYTES = SMALL_BYTES // 2
"""Maximum bytes of the class names of a field; the manifest also has their counts."""

_KEYS = string_files("keys")

_ROWS = "index/rows.npy"
"""A file of each dataset."""

_DEEPEST = 32
"""Maximum nesting of objects and lists in a recipe or a source; writers need three levels."""

_TOO_MANY = 1 << 63
"""Exclusive limit of counts: larger ones do not fit into int64."""

_REMEDY = (
    "Restore it from a copy, or convert again into a new folder: the same source, options and "
    "versions produce the same file."
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a dataset, with its size and digest."""

    name: str
    """The path relative to the dataset's directory."""
    bytes: int
    sha256: str

    @property
    def is_of_index(self) -> bool:
        """Whether it is a file of the index."""
        return self.name.startswith(f"{INDEX_DIRECTORY}/")

    def is_replaced(self, modified: int) -> bool:
        """Return whether a file of the same size, modified at ``modified``, must be another one."""
        return False


@dataclass(frozen=True, kw_only=True)
class ShardEntry(FileEntry):
    """One shard."""

    rows: int

    def renumbered(self, number: int) -> ShardEntry:
        """Return the entry of the same file under the name of another shard."""
        return replace(self, name=re.sub("[0-9]+", f"{number:06d}", self.name, count=1))

    @property
    def holds_records(self) -> bool:
        """Whether the format's reader reads whole records from it; else the index has ranges."""
        return True

    @property
    def identity(self) -> str:
        """A text that differs for another content."""
        return self.sha256


@dataclass(frozen=True, kw_only=True)
class AttachedShard(ShardEntry):
    """One archive of another program. Its name is the path below `AttachedManifest.folder`."""

    modified: int
    """Time of its last modification, in nanoseconds. It identifies the content if ``sha256`` is
    empty."""
    notes: dict[str, int]
    """As `Manifest.notes`, of its images."""

    @property
    def holds_records(self) -> bool:
        """False."""
        return False

    @property
    def identity(self) -> str:
        """A text that differs for another content."""
        return self.sha256 or f"modified {self.modified}"

    def is_replaced(self, modified: int) -> bool:
        """Return whether the time, which identifies an archive without SHA-256, is another one."""
        return not self.sha256 and self.modified != modified


@dataclass(frozen=True, kw_only=True)
class FieldEntry:
    """One field of a dataset's schema: see `shardkit.kinds.field.Field`."""

    name: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    classes: tuple[str, ...] | None
    """Class names; None without, and for the primary label, whose names `Manifest` has."""
    rows: int
    """Number of rows that have the field."""

    @classmethod
    def of(cls, name: str, field: Field, rows: int) -> FieldEntry:
        """Return the entry of a field."""
        classes = None if name == LABEL else field.classes
        return cls(
            name=name,
            kind=field.kind,
            dtype=field.dtype,
            shape=field.shape,
            classes=classes,
            rows=rows,
        )


PARTS = "parts"
"""The ``kind`` of a manifest's ``source`` that lists parts, and the name of the list."""


@dataclass(frozen=True, kw_only=True)
class PartEntry:
    """One part of a dataset, as the manifest states it."""

    shards: int
    """Number of shards, which follow those of the part before."""
    first: int
    """The number that the metadata of its first shard state."""
    classes: int | None
    """Number of classes in its shards: the first classes of the dataset; None without labels."""
    skipped: int
    """Number of bad files that its conversion skipped."""
    source: dict[str, Any]
    """The ``source`` of its manifest."""
    software: dict[str, str]
    """The ``software`` of its manifest."""


LAYERS = "layers"
"""The folder of a dataset's layers."""

ADD = "add"
REPLACE = "replace"
REMOVE = "remove"
"""Values of `Layer.operation`."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One change of a dataset's fields, after the conversion.

    A layer that adds or replaces fields is a dataset of its own, in a folder of `LAYERS`: it has
    the same rows, and these fields alone. One that removes fields has no files.
    """

    name: str
    """Its folder in `LAYERS`: six digits."""
    operation: str
    """`ADD`, `REPLACE` or `REMOVE`."""
    fields: tuple[str, ...]
    """Names of the fields that it adds, replaces or removes."""
    digest: str
    """Digest of its manifest; "" if it has no files."""
    files: tuple[FileEntry, ...]
    """All its files, including manifest and shards; none if it removes fields, or if later layers
    replaced all of its fields."""
    request: str
    """Digest of all that determines its values; "" if it removes fields."""

    @property
    def folder(self) -> str:
        """The folder, relative to the dataset's directory."""
        return f"{LAYERS}/{self.name}"

    @property
    def index_files(self) -> tuple[FileEntry, ...]:
        """All files but the shards."""
        shards = f"{self.folder}/shard-"
        return tuple(entry for entry in self.files if not entry.name.startswith(shards))

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self.files)


@dataclass(frozen=True, kw_only=True)
class BaseEntry:
    """Excerpt of a dataset's manifest, as it was before its fields were changed."""

    content_digest: str
    fields: dict[str, int]
    schema: tuple[FieldEntry, ...]
    classes: tuple[str, ...] | None
    class_counts: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Layering:
    """The layers of a dataset."""

    base: BaseEntry
    """The dataset without them, which its shards and its index hold."""
    layers: tuple[Layer, ...]
    """All changes, in order; at least one."""
    before: int
    """Number of layers before the last change, which can be undone if it is less than all."""

    @functools.cached_property
    def providers(self) -> dict[str, Layer | None]:
        """The layer that has each field of the dataset, in order; None for the base."""
        providers: dict[str, Layer | None] = {entry.name: None for entry in self.base.schema}
        for layer in self.layers:
            for name in layer.fields:
                if layer.operation == REMOVE:
                    providers.pop(name, None)
                else:
                    providers[name] = layer
        return providers


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of one dataset: format, shards, classes, and how it was made.

    It contains no time and no absolute path: the same input and options give the same manifest.
    """

    format: str
    """The storage format's name in the registry."""
    rows: int
    content_digest: str
    """Digest of the records in row order, equal in any format (`Index.content_digest`)."""
    shards: tuple[ShardEntry, ...]
    files: tuple[FileEntry, ...]
    """Files other than shards: the columns of the index, and reports."""
    fields: dict[str, int]
    """Number of records that have each field, by stored name."""
    schema: tuple[FieldEntry, ...]
    """The fields of records, as users see them."""
    classes: tuple[str, ...] | None
    """Class names, by label; None for an unlabeled dataset."""
    class_counts: tuple[int, ...] | None
    """Records of each class, in the order of ``classes``."""
    raw_shape: tuple[int, int, int] | None
    """Height, width and channels of every image stored as raw pixels; otherwise None."""
    recipe: dict[str, Any]
    """Changes made to the images (`shardkit.recipe.Recipe`)."""
    source: dict[str, Any]
    """Origin of the records, and the rule for their order."""
    notes: dict[str, int] = field(default_factory=dict)
    """Counts of noted peculiarities (`shardkit.recipe.NOTES`)."""
    skipped: tuple[Problem, ...] = ()
    """Bad source files that were skipped on request."""
    ignored: dict[str, int] = field(default_factory=dict)
    """Counts of ignored source files, by reason; ``ignored.jsonl`` lists them."""
    software: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries that wrote the pixels and the files."""
    layering: Layering | None = None
    """Fields added, replaced or removed after the conversion; None, and not stored, without any."""

    @functools.cached_property
    def made_with(self) -> Recipe:
        """The recipe.

        Raises:
            TypeError, UsageError: If ``recipe`` describes none, unlike that of a loaded manifest.
        """
        return Recipe.restored(self.recipe)

    @functools.cached_property
    def stated_parts(self) -> tuple[PartEntry, ...]:
        """The parts of a dataset that was appended to or merged; else empty.

        Raises:
            TypeError, ValueError: If there are none that fit the dataset.
        """
        check_source(self.source)
        if self.source["kind"] != PARTS:
            return ()
        entries = _convert(tuple[Any, ...], self.source.get(PARTS), PARTS)
        parts = tuple(build_typed(PartEntry, entry) for entry in entries)
        if not parts or sum(entry.shards for entry in parts) != len(self.shards):
            raise ValueError("the shards of the parts do not add up")
        if sum(entry.skipped for entry in parts) != len(self.skipped):
            raise ValueError("the skipped files of the parts do not add up")
        classes = self.base.classes  # the fields of the dataset may have changed since
        labels = -1 if classes is None else len(classes)
        if any((-1 if entry.classes is None else entry.classes) > labels for entry in parts):
            raise ValueError("a part has more classes than the dataset")
        for entry in parts:
            check_source(entry.source)
            if entry.source["kind"] == PARTS:
                raise ValueError("a part has parts")  # a merge of merged datasets lists all
        return parts

    @functools.cached_property
    def base(self) -> Manifest:
        """The manifest before any change of fields, which describes the shards and the index."""
        if self.layering is None:
            return self
        return replace(self, **vars(self.layering.base), layering=None)

    @property
    def can_undo(self) -> bool:
        """Whether the last change of fields can be taken back."""
        return self.layering is not None and self.layering.before < len(self.layering.layers)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The changes of fields, in order."""
        return () if self.layering is None else self.layering.layers

    @property
    def layer_files(self) -> tuple[FileEntry, ...]:
        """All files of the layers."""
        return tuple(entry for layer in self.layers for entry in layer.files)

    @property
    def index_files(self) -> tuple[FileEntry, ...]:
        """All files except shards and the manifest itself, including those of the layers."""
        return (*self.files, *(entry for layer in self.layers for entry in layer.index_files))

    @property
    def keys_digests(self) -> dict[str, str]:
        """The digests of the files that state the keys: equal for datasets with the same rows."""
        return {entry.name: entry.sha256 for entry in self.files if entry.name in _KEYS}

    def layer_of(self, name: str) -> Layer | None:
        """Return the layer that has a field; None for the shards of the dataset itself."""
        return None if self.layering is None else self.layering.providers.get(name)

    @property
    def removed(self) -> set[str]:
        """Names of the fields that the dataset had once."""
        names = {name for layer in self.layers for name in layer.fields}
        return (names | self.base.fields_by_name.keys()) - self.fields_by_name.keys()

    @property
    def relabels(self) -> bool:
        """Whether the label of a row is another one than in the shards and the index."""
        is_removed = LABEL in self.base.fields_by_name and LABEL not in self.fields_by_name
        return is_removed or self.layer_of(LABEL) is not None

    @property
    def archives(self) -> str | None:
        """The folder of the shards if they are archives of another program, or None."""
        return None

    @property
    def is_loose(self) -> bool:
        """Whether each row is a file of its own, so that a shard is only a group of rows."""
        return False

    def require_own_shards(self, message: str) -> None:
        """Refuse an attached dataset.

        Raises:
            UsageError: With ``message``, if the shards are archives of another program.
        """
        if self.archives is not None:
            raise UsageError(message)

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """All files of the dataset except the manifest itself."""
        return (*self.shards, *self.files, *self.layer_files)

    @functools.cached_property
    def fields_by_name(self) -> dict[str, Field]:
        """The fields of records by name, with all class names.

        Raises:
            ValueError: If the schema states a field that cannot be.
        """
        return load_schema([asdict(entry) for entry in self.schema], self.classes)

    @property
    def lacking(self) -> frozenset[str]:
        """Names of the fields that some rows lack."""
        return frozenset(entry.name for entry in self.schema if entry.rows < self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest's canonical JSON: the dataset's identity."""
        return _digest(_as_json(self))


@dataclass(frozen=True, kw_only=True)
class AttachedManifest(Manifest):
    """Description of a dataset whose shards are archives of another program, read in place.

    Unlike other manifests, it leads out of its directory: `shardkit.dataset.opened` decides
    whether readers follow it.
    """

    shards: tuple[AttachedShard, ...]
    folder: str
    """The folder of all archives: absolute, or relative to the dataset's directory."""

    @property
    def archives(self) -> str:
        """``folder``."""
        return self.folder

    @property
    def is_loose(self) -> bool:
        """Whether the index has the times of files."""
        return any(entry.name == TIMES for entry in self.files)

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """All files in the dataset's directory except the manifest itself: not the archives."""
        return (*self.files, *self.layer_files)


@dataclass(frozen=True, kw_only=True)
class SplitsManifest:
    """Description of a directory of splits: one dataset per split, with shared classes."""

    splits: dict[str, str]
    """Digest of each split's manifest, by split name, which is also its directory."""

    @property
    def first(self) -> str:
        """The name of the first split."""
        return next(iter(self.splits))

    def refusal(self, path: object, example: object) -> UsageError:
        """Return the error that ``path`` does not hold one dataset; ``example`` opens a split."""
        return UsageError(
            f"{path} contains one dataset per split ({name_list(self.splits)});",
            remedy=f"open one of them, for example {example}",
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's canonical JSON."""
        return _digest(_as_json(self))


_KINDS: dict[str, type[Manifest | SplitsManifest]] = {
    "dataset": Manifest,
    "attached": AttachedManifest,
    "splits": SplitsManifest,
}
"""The kinds of manifests, by the name that the file states."""


def save_manifest(manifest: Manifest | SplitsManifest, directory: Path) -> None:
    """Write ``manifest`` into ``directory`` atomically, which commits the dataset."""
    content = _render(_as_json(manifest))
    if len(content) > SMALL_BYTES:
        raise ShardkitError(
            f"the manifest would have {len(content):,} bytes, more than the {SMALL_BYTES:,} "
            "that readers accept;",
            remedy=f"choose larger shards ({setting('shard_size')}) or a label with fewer classes, "
            "or remove bad files from the source",
        )
    write_atomically(directory / MANIFEST_NAME, content)


def load_any_manifest(directory: Path) -> Manifest | SplitsManifest:
    """Read the manifest of ``directory``, of a dataset or of splits.

    Raises UsageError if there is none, or it is of a newer version; CorruptDataset if shardkit did
    not write it, or it was changed since.
    """
    require_local(directory)
    path = directory / MANIFEST_NAME
    with located(path):
        return parse_manifest(_read(path), str(path))


def parse_manifest(content: bytes, path: str) -> Manifest | SplitsManifest:
    """Return the manifest that ``content`` states; ``path`` names it in messages.

    Errors are those of `load_any_manifest`.
    """
    value = _parse(path, content)
    version = value.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {version}; this shardkit reads version {FORMAT_VERSION}",
            remedy="Install a newer shardkit.",
        )
    value.pop("digest", None)
    # All bytes are compared, not only the digest: JSON has many texts for one value, such as one
    # that repeats a name, and other parsers could read another value from it.
    if content != _render_or_none(value) or type(version) is not int or version != FORMAT_VERSION:
        raise CorruptDataset(
            f"{path} was changed or truncated: its digest does not match", remedy=_REMEDY
        )
    body = {name: item for name, item in value.items() if name not in ("format_version", "kind")}
    try:
        if value["kind"] != "splits":
            if "layering" in body and body["layering"] is None:
                raise ValueError("it declares layering without layers")
            body.setdefault("layering", None)  # not stored without layers
        manifest = build_typed(_KINDS[value["kind"]], body)
        _check(manifest)
    except (TypeError, ValueError, UsageError) as error:
        reason = printable(str(error))
        raise CorruptDataset(f"{path} is not a valid manifest: {reason}") from error
    return manifest


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of the one dataset in ``directory``; errors as `load_any_manifest`.

    A manifest of splits is a UsageError.
    """
    manifest = load_any_manifest(directory)
    if isinstance(manifest, SplitsManifest):
        raise manifest.refusal(directory, directory / manifest.first)
    return manifest


def _read(path: Path) -> bytes:
    try:
        return read_small(path)
    except LinkRefused as error:
        raise CorruptDataset(f"{path} cannot be used: {error.strerror}") from error
    except (FileNotFoundError, NotADirectoryError):
        message = f"{path.parent} is not a shardkit dataset: {_lack(path)}"
        raise UsageError(message, where=path.parent) from None
    except (Unfit, ValueError) as error:  # a path with a null character is a ValueError
        raise UsageError(f"{path} cannot be read: {error}") from error


def _parse(path: str, content: bytes) -> dict[str, Any]:
    try:
        value = load_json(content)
    except ValueError as error:
        raise CorruptDataset(
            f"{path} is not a shardkit manifest: {error}", remedy=_REMEDY
        ) from error
    if value.get("kind") not in tuple(_KINDS):
        raise CorruptDataset(f"{path} is not a shardkit manifest", remedy=_REMEDY)
    return value


def _render(value: Mapping[str, Any]) -> bytes:
    """Return the canonical text of a manifest, including its digest."""
    text = json.dumps({**value, "digest": _digest(value)}, indent=1, sort_keys=True)
    return text.encode("ascii") + b"\n"


def _render_or_none(value: Mapping[str, Any]) -> bytes | None:
    try:
        return _render(value)
    except (RecursionError, ValueError):  # nested too deeply, or numbers too large
        return None


def _lack(path: Path) -> str:
    """Return why there is no manifest at ``path``."""
    if not path.parent.is_dir():
        return "it is a file" if path.parent.exists() else "the directory does not exist"
    if (path.parent / _PLAN).exists():
        return (
            f"it is planned, but not built: {as_command('info', path.parent)} shows its "
            "progress and the next command"
        )
    if any(path.parent.glob(".shardkit*")):
        return "a command that writes it is unfinished; rerun that command to resume"
    if (path.parent / _ROWS).exists():
        return f"it has lost its {path.name}. {_REMEDY}"
    if splits := sorted(path.parent.glob(f"*/{path.name}")):
        return (
            f"it has no {path.name}, but {splits[0].parent} has: open it, or restore the file of "
            "all splits from a copy"
        )
    attach = as_command("attach", path.parent, "INDEX")
    return (
        f"it contains no {path.name}. Convert its files with `shardkit convert`, or read "
        f"images in place after {attach}"
    )


def _as_json(manifest: Manifest | SplitsManifest) -> dict[str, Any]:
    (kind,) = (name for name, target in _KINDS.items() if type(manifest) is target)
    value = {"format_version": FORMAT_VERSION, "kind": kind, **asdict(manifest)}
    if isinstance(manifest, Manifest) and manifest.layering is None:
        del value["layering"]  # datasets without layers keep their bytes
    return value


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(value)).hexdigest()


def _check(manifest: Manifest | SplitsManifest) -> None:
    """Refuse values that no writer makes, such as a name that leads elsewhere."""
    if isinstance(manifest, SplitsManifest):
        if not manifest.splits:
            raise ValueError("there are no splits")
        for name in manifest.splits:
            if len(split_text_path(name)) > 1 or name.startswith((MANIFEST_NAME, ".shardkit")):
                raise ValueError(f"{name!r} cannot be the folder of a split")
        return
    if manifest.rows != sum(shard.rows for shard in manifest.shards):
        raise ValueError("the rows of the shards do not add up to the rows of the dataset")
    if (manifest.classes is None) != (manifest.class_counts is None):
        raise ValueError("classes requires class_counts, and class_counts requires classes")
    if len(manifest.classes or ()) != len(manifest.class_counts or ()):
        raise ValueError("class_counts and classes differ in length")
    rows = [field.rows for field in manifest.schema]
    if not manifest.fields_by_name or max(rows) > manifest.rows:
        raise ValueError("the schema has no fields, or more rows than there are")
    pixels = manifest.fields_by_name[IMAGE].pixels if IMAGE in manifest.fields_by_name else None
    if pixels and manifest.raw_shape and manifest.raw_shape[2] != pixels.channels:
        raise ValueError("raw_shape has another number of channels than the image")
    _ = manifest.made_with, manifest.stated_parts  # raise an error
    _check_files(manifest)
    if manifest.layering is not None:
        _check(manifest.base)
        _check_layers(manifest, manifest.layering)


_SOURCE: Mapping[str, tuple[type, ...]] = {
    "kind": (str,),
    "name": (str,),
    "images": (int,),
    "order": (str,),
    "limit": (int, types.NoneType),
    "seed": (int, types.NoneType),
}
"""Types of the entries that each source has. `shardkit.contracts.SourceOptions` checks its own."""


def check_source(source: Mapping[str, Any]) -> None:
    """Raise TypeError if a description of a source has values of wrong types, or no kind."""
    for name in _SOURCE.keys() & {"kind", *source}:
        if type(source.get(name)) not in _SOURCE[name]:
            raise TypeError(f"source.{name} cannot be {quoted(source.get(name))}")
    if not 0 <= source.get("images", 0) < _TOO_MANY:
        raise TypeError("source.images must be a count")


def _check_files(manifest: Manifest) -> None:
    """Refuse names of files that no conversion gives, or that occur twice.

    Others could be those of files that shardkit writes next to them, such as `FACTS_NAME`.
    """
    names = [entry.name for entry in manifest.entries]
    allowed = index_files(manifest.base.fields_by_name) + [TIMES] * manifest.is_loose
    for entry in manifest.files:
        if entry.name not in allowed and not _REPORT.fullmatch(entry.name):
            raise ValueError(f"{entry.name!r} cannot be a file of a dataset")
    for entry in manifest.layer_files:
        require_file_name(entry.name)
    if len(set(names)) != len(names):  # `files` are looked up by name: one would go unchecked
        raise ValueError("two entries have the same file name")
    _check_shards([shard.name for shard in manifest.shards], manifest.archives)


def _check_layers(manifest: Manifest, layering: Layering) -> None:
    """Refuse layers that are not in folders of their own, or do not make the manifest's schema."""
    names = [layer.name for layer in layering.layers]
    if not names or sorted(set(names)) != names or layering.before > len(names):
        raise ValueError("the layers are not in order")
    for layer in layering.layers:
        is_known = layer.operation in (ADD, REPLACE, REMOVE)
        if not is_known or not _LAYER.fullmatch(f"{layer.folder}/"):
            raise ValueError(f"the layer {layer.name!r} is unknown")
        if not layer.fields or (layer.operation == REMOVE and layer.files):
            raise ValueError(f"the layer {layer.name!r} lacks fields, or has unneeded files")
        if not all(entry.name.startswith(f"{layer.folder}/") for entry in layer.files):
            raise ValueError(f"a file of the layer {layer.name!r} is elsewhere")
    layered_fields = {entry.name: entry for entry in manifest.schema}
    base_fields = {entry.name: entry for entry in layering.base.schema}
    if list(layered_fields) != list(layering.providers):
        raise ValueError("the layers do not have the fields of the schema")
    for name, provider in layering.providers.items():
        if provider is None and layered_fields[name] != base_fields[name]:
            raise ValueError(f"no layer has changed the field {name!r}")
        if provider is not None and not provider.files:
            raise ValueError(f"the layer of the field {name!r} has no files")


def _check_shards(names: list[str], archives: str | None) -> None:
    """Refuse shards of other names, and archives outside of their folder, or two of one name."""
    if archives is None:
        for name in names:
            if not _SHARD.fullmatch(name):
                raise ValueError(f"{name!r} cannot be a shard")
        return
    if not archives or "\0" in archives:
        raise ValueError(f"the folder {archives!r} cannot be one")
    for name in names:
        split_text_path(name)
    if len(set(names)) != len(names):
        raise ValueError("two archives have the same name")


_LAYER = re.compile(rf"{LAYERS}/[0-9]{{6}}/")
"""The folder of a layer, as names of its files start."""

_SHARD = re.compile(r"shard-[0-9]{6,}[^/\0]*")
"""The name of a shard; each format has its own suffix."""

_REPORT = re.compile(r"[a-z0-9_-]+\.jsonl")
"""The name of a report, perhaps of a newer version."""

_FOLDERS: tuple[list[str], ...] = (["index"], ["index", "fields"], ["index", "columns"])
"""Folders of a dataset's files."""


def is_of_layer(name: str) -> bool:
    """Return whether a file, by its name in the dataset, is in the folder of a layer."""
    return _LAYER.match(name) is not None


def require_file_name(name: str) -> None:
    """Raise ValueError unless the manifest of a dataset can list a file of this name."""
    layer = _LAYER.match(name)
    inside = name[layer.end() :] if layer else name
    *folders, last = split_text_path(inside)
    top_name = MANIFEST_NAME if layer else FACTS_NAME
    at_top = not folders and (last == top_name or _SHARD.fullmatch(last) or _REPORT.fullmatch(last))
    if not at_top and not (folders in _FOLDERS and last.endswith(".npy")):
        raise ValueError(f"{name!r} cannot be a file of a dataset")


def build_typed(target: type[_T], value: object) -> _T:
    """Build the dataclass ``target`` from JSON, checking the exact type of every value.

    `msgspec` 0.22 would not do: its decoder refuses lone surrogates, which store file names that
    are not UTF-8, and its ``convert`` ignores missing and unknown entries and any depth. Raises
    TypeError for a wrong type, ValueError for missing, unknown or out-of-range entries.
    """
    if not isinstance(value, dict):
        raise TypeError("an entry is not an object")
    types_of = _types_of(target)  # type: ignore[arg-type]
    unknown = value.keys() - types_of.keys()
    if unknown:
        raise ValueError(f"it has unknown entries: {name_list(sorted(unknown))}")
    missing = {item.name for item in fields(target)} - value.keys()  # type: ignore[arg-type]
    if missing:
        raise ValueError(f"it lacks {name_list(sorted(missing))}")
    return target(**{name: _convert(types_of[name], item, name) for name, item in value.items()})


@functools.cache
def _types_of(target: type[Any]) -> dict[str, Any]:
    """Return the type of each field; cached, since this takes longer than checking an entry."""
    return typing.get_type_hints(target)


def _convert(kind: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
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
        return tuple(_convert(kind, item, name) for kind, item in zip(items, value, strict=True))
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be an object")
        return {key: _convert(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return build_typed(kind, value)
    if kind is Any:
        _require_plain(value, name, _DEEPEST)
        return value
    fits = isinstance(value, kind) and not isinstance(value, bool)  # True is an int, too
    if not fits or (kind is int and not 0 <= value < _TOO_MANY):
        words = {int: "a count", str: "text"}
        raise TypeError(f"{name} must be {words.get(kind, kind.__name__)}")
    return value


def _require_plain(value: Any, name: str, deepest: int) -> None:
    """Refuse a value that is not JSON, or is nested too deeply."""
    if deepest == 0:
        raise ValueError(f"{name} is nested too deeply")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} contains the number {value}, which is not JSON")
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        _require_plain(item, name, deepest - 1)
