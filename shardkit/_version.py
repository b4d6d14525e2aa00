"""The version of shardkit, and those of other packages."""

from __future__ import annotations

from functools import cache
from importlib import import_module

__version__ = "0.1.0"


@cache  # reading it takes milliseconds, and each conversion asks for several
def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    metadata = import_module("importlib.metadata")  # it takes 20 ms
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None
