"""Names to things: the storage formats, loaded at first use.

It knows where an implementation is, never what it does.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from shardkit.contracts import Format
from shardkit.errors import UsageError

ENTRY_POINTS = "shardkit.formats"
"""The entry-point group through which another package adds a format: ``name = "module:FORMAT"``."""

_FORMATS = {
    "hdf5": "shardkit.formats.hdf5:FORMAT",
    "lmdb": "shardkit.formats.lmdb:FORMAT",
    "webdataset": "shardkit.formats.webdataset:FORMAT",
}


def format_names() -> list[str]:
    """Return the names of all formats, sorted; nothing of theirs is imported."""
    return sorted(_FORMATS.keys() | _third_party().keys())


def get_format(name: str) -> Format:
    """Return the format called ``name``, importing what it needs.

    Raises:
        UsageError: If no format has this name, or it needs a package that is not installed.
    """
    target = _FORMATS.get(name)
    if target is None and name in (third_party := _third_party()):
        target = third_party[name].value
    if target is None:
        raise UsageError(f"unknown format {name!r}; known are {', '.join(format_names())}")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as error:
        raise UsageError(
            f"format {name!r} needs a package that cannot be imported: {error}. "
            f"Install it with `pip install {(error.name or module).partition('.')[0]}`."
        ) from error
    except AttributeError:
        found = None
    if not isinstance(found, Format):
        raise UsageError(f"format {name!r} is broken: {target} is not a shardkit Format")
    return found


def _third_party() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
