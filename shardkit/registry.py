"""Storage formats and sources by name, imported at first use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from shardkit.contracts import Format, SourceKind
from shardkit.errors import UsageError

DEFAULT_SOURCE = "imagefolder"
"""The source that is meant where none is named."""

ATTACHED_SOURCE = "webdataset"
"""The source whose files `shardkit attach` takes where no kind is named."""

ATTACHABLE_SOURCES = (ATTACHED_SOURCE, "hdf5", "lmdb")
"""The sources whose files it takes."""

_Plugin = TypeVar("_Plugin", Format, SourceKind)


@dataclass(frozen=True)
class _Registry(Generic[_Plugin]):
    """Plugins of one type: shardkit's own, and those of other packages by entry point."""

    word: str
    type: type[_Plugin]
    own: Mapping[str, str]
    """Name to ``module:ATTRIBUTE``."""

    @property
    def group(self) -> str:
        """Entry-point group through which another package adds one: ``name = "module:OBJECT"``."""
        return f"shardkit.{self.word}s"

    def names(self) -> list[str]:
        return sorted(self.own.keys() | self._third_party().keys())

    def get(self, name: str) -> _Plugin:
        target = self.own.get(name)
        if target is None and name in (third_party := self._third_party()):
            target = third_party[name].value
        if target is None:
            raise UsageError(f"unknown {self.word} {name!r}; choose from {', '.join(self.names())}")
        module, _, attribute = target.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except ImportError as error:
            raise UsageError(
                f"{self.word} {name!r} needs a package that cannot be imported: {error}. "
                f"Install it with `pip install {(error.name or module).partition('.')[0]}`."
            ) from error
        except AttributeError:
            found = None
        if not isinstance(found, self.type):
            raise UsageError(
                f"{self.word} {name!r} is broken: {target} is not a shardkit {self.type.__name__}"
            )
        return found

    def _third_party(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}


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
        "dataset": "shardkit.dataset.source:SOURCE",
        "hdf5": "shardkit.sources.hdf5:SOURCE",
        "huggingface": "shardkit.sources.huggingface:SOURCE",
        "imagefolder": "shardkit.sources.imagefolder:SOURCE",
        "lmdb": "shardkit.sources.lmdb:SOURCE",
        "mnist": "shardkit.sources.mnist:SOURCE",
        "npy": "shardkit.sources.npy:SOURCE",
        "table": "shardkit.sources.table:SOURCE",
        "tfrecord": "shardkit.sources.tfrecord:SOURCE",
        "voc": "shardkit.sources.voc:SOURCE",
        "webdataset": "shardkit.sources.webdataset:SOURCE",
    },
)


def format_names() -> list[str]:
    """Return the names of all formats, sorted, without importing them."""
    return _FORMATS.names()


def get_format(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        UsageError: If there is no such format, or it needs a package that is not installed.
    """
    return _FORMATS.get(name)


def source_names() -> list[str]:
    """Return the names of all kinds of sources, sorted, without importing them."""
    return _SOURCES.names()


def get_source(name: str) -> SourceKind:
    """Return the kind of source called ``name``.

    Raises:
        UsageError: If there is no such kind, or it needs a package that is not installed.
    """
    return _SOURCES.get(name)
