"""An opened dataset: its splits, their manifests, and where their files are.

Everything else asks these objects, and never which kind of manifest a directory has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardkit.dataset.index import Index
from shardkit.dataset.manifest import (
    LAYERS,
    MANIFEST_NAME,
    FileEntry,
    Layer,
    Manifest,
    SplitsManifest,
    load_any_manifest,
    load_manifest,
)
from shardkit.dataset.parts import Part, dataset_parts
from shardkit.dataset.reports import IGNORED, StoredReport, excluded_paths
from shardkit.dataset.shard_files import LOCAL_FILES, Access
from shardkit.errors import CorruptDataset, Problem, UsageError, located, setting
from shardkit.record import DATASET_FILE
from shardkit.system.files import as_name, has_sha256, require_local, sha256_of
from shardkit.system.late import load
from shardkit.system.safe_paths import NO_PATH, UNFIT, LinkRefused, require_no_link
from shardkit.system.text import as_command, name_list
from shardkit.system.urls import STORES, as_local, scheme_and_path

_Loaded = TypeVar("_Loaded")


def is_dataset(root: Any) -> bool:
    """Return whether a user's argument is the folder of a dataset."""
    return isinstance(root, (str, Path)) and (Path(root) / DATASET_FILE).is_file()


class Fetching(NamedTuple):
    """How a dataset in an object store is read."""

    cache: str | os.PathLike[str] | None = None
    """A folder."""
    limit: int | str | None = None
    """Maximum bytes of shards in it, as a number or as ``"50GB"``."""


LOCAL = Fetching()
"""Not at all."""

_OPENERS = {
    "": "shardkit.dataset.opened:open_local",
    **dict.fromkeys(STORES, "shardkit.remote.dataset:open_remote"),
}
"""Functions that open datasets, by the scheme of the URL."""

_CONFIRMED = "shardkit.attaching.permission:confirmed_folder"
"""Returns the folder of an attached dataset's archives, if the user named them before."""

_JOINED = "shardkit.changes.layered:LayeredIndex"
"""The index of a dataset with layers."""


class OpenedDataset:
    """One dataset, whose manifest and files are read when they are needed.

    It is an ordered list of `stores`: datasets with shards, of which each has some of its fields.
    ``directory`` has manifest and index. ``split`` is its name in a directory of splits, or "", and
    ``digest`` what the manifest above states as its manifest's digest. ``root`` is the folder of an
    attached dataset's archives, if the user named it; ``access`` opens its shards.
    """

    def __init__(
        self,
        directory: Path,
        split: str = "",
        *,
        digest: str | None = None,
        root: Path | None = None,
        access: Access = LOCAL_FILES,
    ) -> None:
        require_local(directory)
        self._directory = directory.expanduser()
        self.split = split
        self.root = root
        self.access = access
        self._digest = digest
        self._file = f"{self._directory}/{MANIFEST_NAME}"
        self._stamp = _stamp(self._file)
        self._known_manifest: Manifest | None = None
        """The manifest in the directory, if `manifest` is the base of it."""
        self.layer: Layer | None = None
        """The layer, if this is the store of a layer; None for the store of the conversion."""

    @property
    def prefix(self) -> str:
        """The prefix of its file names: the split and a slash, or ""."""
        return f"{self.split}/" if self.split else ""

    @property
    def folder(self) -> str:
        """The folder of a layer in the dataset; "" for the store of the conversion."""
        return self.layer.folder if self.layer else ""

    @property
    def top(self) -> Path:
        """The directory of all splits, or of the one dataset."""
        return self._directory.parent if self.split else self._directory

    @cached_property
    def path(self) -> Path:
        """The directory.

        Raises CorruptDataset if a split is a symbolic link, which could lead outside the dataset.
        """
        try:
            if self.split:
                require_no_link(self._directory)
        except LinkRefused as error:
            raise CorruptDataset(f"{self._directory} cannot be used: {error.strerror}") from error
        return self._directory

    @property
    def location(self) -> str:
        """The URL or path of the dataset, for messages."""
        return self.access.location(self.path)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest; errors as `load_manifest`."""
        return load_manifest(self.path)

    @property
    def belongs(self) -> bool:
        """Whether the manifest has the digest that the directory of splits lists, if any."""
        return self._digest in (None, self.manifest.digest)

    @property
    def is_store(self) -> bool:
        """Whether its own shards have all of its fields, so that it has no layers."""
        return not self.manifest.layers

    @cached_property
    def base(self) -> OpenedDataset:
        """The dataset before any change of its fields, as its shards and its index have it."""
        if self.is_store:
            return self
        base = OpenedDataset(self._directory, self.split, root=self.root, access=self.access)
        base.manifest = self.manifest.base
        base._known_manifest = self.manifest
        return base

    @cached_property
    def stores(self) -> list[OpenedDataset]:
        """All stores: that of the conversion, then one for each layer with shards.

        They have the same rows. Reading the manifest of one raises CorruptDataset if it is damaged,
        or of another dataset.
        """
        layers = [layer for layer in self.manifest.layers if layer.files]
        return [self.base, *(_LayerStore(self, layer) for layer in layers)]

    def store_of(self, field: str) -> OpenedDataset:
        """Return the store that has a field, or would have it."""
        layer = self.manifest.layer_of(field)
        if layer is None:
            return self.base
        return next(store for store in self.stores if store.layer is layer)

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of `base`: one for each source if the dataset was appended to or merged."""
        return dataset_parts(self.manifest)

    @property
    def files(self) -> list[FileEntry]:
        """The files of all stores except the manifest in `top`, with their names below `top`."""
        entries = list(self.manifest.entries)
        if self.split:
            path = self.path / MANIFEST_NAME
            size = path.stat().st_size
            entries.append(FileEntry(name=MANIFEST_NAME, bytes=size, sha256=sha256_of(path)))
        return [replace(entry, name=self.prefix + entry.name) for entry in entries]

    def holds(self, *names: str) -> bool:
        """Return whether files in `path` have the digests that the manifest states for them."""
        digests = {entry.name: entry.sha256 for entry in self.manifest.files}
        return all(
            name in digests and has_sha256(self.path / name, digests[name], self.path)
            for name in names
        )

    @property
    def later(self) -> set[str]:
        """Names of the fields that layers have."""
        names = self.manifest.fields_by_name
        return {name for name in names if self.store_of(name) is not self.base}

    @property
    def ignored(self) -> Collection[Problem]:
        """The ignored files that the report lists, read while they are iterated."""
        count = sum(self.manifest.ignored.values())
        return StoredReport(self.path / IGNORED, count, self.path) if count else ()

    def intact_ignored(self) -> Collection[Problem]:
        """Return `ignored`; CorruptDataset if the report is not the one of the manifest."""
        if self.manifest.ignored and not self.holds(IGNORED):
            raise CorruptDataset(
                f"{self.path / IGNORED} is damaged", remedy=f"run {as_command('verify', self.path)}"
            )
        return self.ignored

    @property
    def excluded(self) -> set[str] | None:
        """Paths of images that were left out on request; None if the report is damaged."""
        return excluded_paths(self.path, self.manifest.files)

    @property
    def index(self) -> Index:
        """The index, with all rows."""
        manifest = self.manifest
        if self.is_store:
            return Index(self.path, manifest.rows, manifest.fields_by_name, manifest.lacking)
        joined: Index = load(_JOINED)(self)
        return joined

    @cached_property
    def shards_folder(self) -> Path:
        """The folder of the shards. That of an attached dataset is in its manifest, if allowed.

        A manifest may come from anywhere, so it alone must not make a program open files elsewhere.
        Readers follow it only if this user named the archives on the command line, as `shardkit
        attach` remembers in the user's own folder, or names their folder when opening the dataset.
        Raises UsageError if the user did not, or if a dataset that is not attached has a ``root``.
        """
        if self.manifest.archives is None:
            if self.root is not None:
                raise UsageError(
                    f"{self.path} is not an attached dataset: it has its own shards",
                    remedy=f"Leave {setting('root')} out",
                )
            return self.path
        if self.root is not None:
            return self.root.expanduser().absolute()
        folder: Path = load(_CONFIRMED)(self)
        return folder

    def unchanged(self, load: Callable[[], _Loaded]) -> _Loaded:
        """Return the result of ``load`` if the directory still holds the dataset opened here.

        Publishing exchanges the directory, or removes the old manifest first and adds the new one
        last. So files opened before this check belong to the old dataset. Raises CorruptDataset if
        another dataset has replaced this one.
        """
        try:
            loaded = load()
        except CorruptDataset:  # files of another dataset are not damaged
            self._require_unchanged()
            raise
        self._require_unchanged()
        return loaded

    def _require_unchanged(self) -> None:
        stamp = _stamp(self._file)
        if stamp != self._stamp:
            if stamp is None:
                raise CorruptDataset(
                    f"{self.path} has lost its manifest: it was removed or is being rewritten",
                    remedy="Open the dataset again.",
                )
            self.require_digest(OpenedDataset(self.path).manifest.digest)
            self._stamp = stamp

    def require_digest(self, digest: str) -> None:
        """Raise CorruptDataset if the manifest has another digest: the dataset was replaced."""
        if (self._known_manifest or self.manifest).digest != digest:
            raise CorruptDataset(
                f"{self.path} was rewritten since it was opened;", remedy="open it again"
            )


class _LayerStore(OpenedDataset):
    """The store of a layer, in a folder of the dataset."""

    def __init__(self, dataset: OpenedDataset, layer: Layer) -> None:
        folder = dataset.path / layer.folder
        super().__init__(folder, f"{dataset.prefix}{layer.folder}", access=dataset.access)
        self._dataset = dataset
        self.layer: Layer = layer

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, after bringing the index here."""
        dataset = self._dataset
        layer = self.layer
        self.access.fetch(dataset.path, layer.index_files)
        try:
            require_no_link(dataset.path / LAYERS)
        except LinkRefused as error:
            raise CorruptDataset(f"{self.path} cannot be used: {error.strerror}") from error
        manifest = load_manifest(self.path)
        if fault := _layer_fault(manifest, layer, dataset.manifest):
            raise CorruptDataset(
                f"{self.path} does not belong to the dataset in {dataset.path}: {fault}"
            )
        return manifest


def _layer_fault(manifest: Manifest, layer: Layer, dataset_manifest: Manifest) -> str:
    """Return why a manifest is not that of a layer of a dataset, or ""."""
    if manifest.digest != layer.digest:
        return "its manifest differs"
    if (
        manifest.layers
        or manifest.archives is not None
        or manifest.rows != dataset_manifest.rows
        or manifest.keys_digests != dataset_manifest.keys_digests
    ):
        return "its rows differ"
    for name in layer.fields:
        field = manifest.fields_by_name.get(name)
        is_used = dataset_manifest.layer_of(name) == layer
        if field is None or (is_used and field != dataset_manifest.fields_by_name.get(name)):
            return f"its field {name!r} is different or missing"
    return ""


class OpenedDirectory:
    """A directory that holds one dataset, or one for each split; errors as `load_any_manifest`."""

    def __init__(self, path: str | os.PathLike[str], *, root: Path | None = None) -> None:
        self.path = Path(path)
        only = OpenedDataset(self.path, root=root)
        self.manifest = load_any_manifest(self.path)
        """The manifest of the dataset, or of all splits."""
        self.splits = {"": only}
        """The dataset of each split; "" without splits."""
        if isinstance(self.manifest, SplitsManifest):
            self.splits = {}
            for name, digest in self.manifest.splits.items():
                inside = root and root / as_name(name)
                split = OpenedDataset(self.path / as_name(name), name, digest=digest, root=inside)
                self.splits[name] = split
        else:
            only.manifest = self.manifest

    def manifests(self) -> dict[str, Manifest]:
        """Return the manifest of each split."""
        for split in self.splits.values():
            if not split.belongs:
                raise CorruptDataset(
                    f"{self.path / split.prefix / MANIFEST_NAME} does not belong to the other "
                    "splits",
                    remedy="Restore the original, or convert again.",
                )
        return {name: split.manifest for name, split in self.splits.items()}

    def with_own_shards(self, message: str) -> OpenedDirectory:
        """Return this, checked as by `manifests`; refuse attached datasets with ``message``."""
        for manifest in self.manifests().values():
            manifest.require_own_shards(message)
        return self

    @property
    def stores(self) -> list[OpenedDataset]:
        """The stores of all splits: first the conversions, then the layers."""
        stores = chain.from_iterable(split.stores for split in self.splits.values())
        return sorted(stores, key=lambda store: store.layer is not None)

    @property
    def files(self) -> list[FileEntry]:
        """The files of all splits except the manifest in ``path``, with names below ``path``."""
        return [entry for split in self.splits.values() for entry in split.files]

    @property
    def rows(self) -> int:
        """Number of rows of all splits."""
        return sum(split.manifest.rows for split in self.splits.values())


def open_one(
    path: str | os.PathLike[str],
    split: str | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    fetching: Fetching = LOCAL,
) -> OpenedDataset:
    """Open one dataset, by its path or URL and the name of a split.

    Raises UsageError if there is none, CorruptDataset if the manifest, or the index at a URL, is
    damaged, ShardkitError if the store cannot be read.
    """
    scheme, path = scheme_and_path(path)
    with located(path):
        opened: OpenedDataset = load(_OPENERS[scheme])(path, split, root, fetching)
        return opened


def open_local(
    path: str, split: str | None, root: str | os.PathLike[str] | None, fetching: Fetching
) -> OpenedDataset:
    """Open one dataset of this machine; see `open_one`."""
    if fetching != LOCAL:
        raise UsageError(
            f"{path} is local; {setting('cache')} and {setting('cache_limit')} are for object "
            "stores"
        )
    folder = Path(as_local(path))
    opened = OpenedDataset(
        (folder if split is None else folder / split).expanduser().absolute(),
        root=None if root is None else Path(root, as_name(split or "")),
    )
    try:
        _ = opened.manifest
    except UsageError as error:
        if split is not None and (folder / MANIFEST_NAME).exists():
            splits = OpenedDirectory(folder).splits
            if "" in splits:
                raise UsageError(
                    f"{path} has no splits;", remedy=f"leave out {setting('split', split)}"
                ) from error
            if split not in splits:
                raise UsageError(
                    f"{path} has no split {split!r}; it has {name_list(splits)}"
                ) from error
        raise
    return opened


def _stamp(file: str) -> tuple[int, int, int, int] | None:
    """Return a value that changes when a manifest is replaced; None without."""
    try:
        status = os.stat(file)
    except (*UNFIT, ValueError):
        return None
    except OSError as error:
        if error.errno in NO_PATH:
            return None
        raise
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
