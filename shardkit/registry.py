"""Storage formats and sources by name, imported at first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardkit.contracts import Format, Source, SourceKind
from shardkit.errors import UsageError
from shardkit.system.late import load
from shardkit.system.packages import entry_points
from shardkit.system.text import quoted, suggestion

DEFAULT_SOURCE = "imagefolder"
"""The source that is meant where none is named."""

DATASET = "dataset"
"""The source of the records of a dataset."""

DEFAULT_ATTACHED = "webdataset"
"""The source whose files `shardkit attach` takes where no kind is named."""

_ALIASES = {"tar": "webdataset", "wds": "webdataset", "h5": "hdf5", "mdb": "lmdb", "beton": "ffcv"}
"""Other names of formats and sources, to suggest the one that is meant."""

_Plugin = TypeVar("_Plugin", Format, SourceKind)


@dataclass(frozen=True)
class _Registry(Generic[_Plugin]):
    """Plugins of one type: shardkit's own, and those of other packages by entry point."""

    word: str
    type: type[_Plugin]
    builtin: Mapping[str, str]
    """Name to ``module:ATTRIBUTE``."""

    @property
    def group(self) -> str:
        """Entry-point group through which another package adds one: ``name = "module:OBJECT"``."""
        return f"shardkit.{self.word}s"

    def names(self) -> list[str]:
        return sorted(self.builtin.keys() | entry_points(self.group).keys())

    def has(self, name: str) -> bool:
        return name in self.builtin or name in entry_points(self.group)

    def get(self, name: str) -> _Plugin:
        target = self.builtin.get(name) or entry_points(self.group).get(name)
        if target is None:
            raise UsageError(
                f"unknown {self.word} {quoted(name)};",
                remedy=f"choose from {', '.join(self.names())}.{self.hint(name)}",
            )
        try:
            plugin = load(target)
        except ImportError as error:
            raise UsageError(
                f"{self.word} {name!r} needs a package that cannot be imported: {error}",
                remedy=f"Install it with `pip install {(error.name or target).partition('.')[0]}`.",
            ) from error
        except AttributeError:
            plugin = None
        if not isinstance(plugin, self.type):
            raise UsageError(
                f"{self.word} {name!r} is broken: {target} is not a shardkit {self.type.__name__}"
            )
        return plugin

    def hint(self, name: str) -> str:
        return suggestion(_ALIASES.get(name.lower(), name), self.names())


_FORMATS = _Registry(
    "format",
    Format,
    {
        "hdf5": "shardkit.formats.hdf5:FORMAT",
        "lmdb": "shardkit.formats.lmdb:FORMAT",
        "webdataset": "shardkit.formats.webdataset:FORMAT",
    },
)

_SOURCES = _Registry(
    "source",
    SourceKind,
    {
        "cifar": "shardkit.sources.cifar:SOURCE",
        "coco": "shardkit.sources.coco:SOURCE",
        DATASET: "shardkit.dataset.source:SOURCE",
        "ffcv": "shardkit.sources.ffcv:SOURCE",
        "hdf5": "shardkit.sources.hdf5:SOURCE",
        "huggingface": "shardkit.sources.huggingface:SOURCE",
        "imagefolder": "shardkit.sources.imagefolder:SOURCE",
        "litdata": "shardkit.sources.litdata:SOURCE",
        "lmdb": "shardkit.sources.lmdb:SOURCE",
        "mds": "shardkit.sources.mds:SOURCE",
        "mnist": "shardkit.sources.mnist:SOURCE",
        "npy": "shardkit.sources.npy:SOURCE",
        "pairs": "shardkit.sources.pairs:SOURCE",
        "table": "shardkit.sources.table:SOURCE",
        "tfrecord": "shardkit.sources.tfrecord:SOURCE",
        "voc": "shardkit.sources.voc:SOURCE",
        "webdataset": "shardkit.sources.webdataset:SOURCE",
        "yolo": "shardkit.sources.yolo:SOURCE",
        "zip": "shardkit.sources.zipped:SOURCE",
    },
)


OWN_FORMATS = tuple(_FORMATS.builtin)
"""Formats of shardkit; those of other packages are known when they are asked for."""


def format_names() -> list[str]:
    """Return the names of all formats, sorted, without importing them."""
    return _FORMATS.names()


def format_hint(name: str) -> str:
    """Return the format that a user may mean by an unknown name, as a sentence; "" for none."""
    return _FORMATS.hint(name)


def get_format(name: str) -> Format:
    """Return the format called ``name``; UsageError if it is unknown or not installed."""
    return _FORMATS.get(name)


def source_names() -> list[str]:
    """Return the names of all kinds of sources, sorted, without importing them."""
    return _SOURCES.names()


def is_source(name: str) -> bool:
    """Return whether a kind of source has this name."""
    return _SOURCES.has(name)


def source_hint(name: str) -> str:
    """Return the source that a user may mean by an unknown name, as a sentence; "" for none."""
    return _SOURCES.hint(name)


def is_own_source(name: str) -> bool:
    """Return whether the kind of source is shardkit's own, not one of another package."""
    return name in _SOURCES.builtin


def open_source(kind: str, path: str | Path, **options: Any) -> Source:
    """Open a source of images, for `shardkit.convert`, `shardkit.append` or `shardkit.attach`.

    Args:
        kind: Kind of source, such as ``coco``: a command of ``shardkit convert``.
        path: The file, folder or pattern that the command calls SRC.
        **options: The options of that command under "Source", such as ``root="photos"``.

    Raises:
        UsageError: If there is no such kind, it needs a package that is not installed, it has no
            such option, or it cannot be opened.
    """
    return get_source(kind).open(path, **options)


def get_source(name: str) -> SourceKind:
    """Return the kind of source called ``name``; UsageError if it is unknown or not installed."""
    return _SOURCES.get(name)
