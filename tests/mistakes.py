"""Converters with a mistake, which the crash oracle must find; applied in the child that converts.

They change what Python's own functions do, not shardkit: so they hold whatever shardkit is made of.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, WORK = "shardkit.json", ".shardkit-work"


def manifest_first() -> None:
    """Publish the manifest before the files that it names."""
    rename = os.replace
    held: list[tuple[str, str]] = []

    def replace(source: Any, target: Any, **more: Any) -> None:
        old, new = os.fspath(source), os.fspath(target)
        published = WORK in old and WORK not in new
        if published and os.path.basename(new) != MANIFEST:
            held.append((old, new))
            return
        rename(source, target, **more)
        while published and held:
            rename(*held.pop(0))

    os.replace = replace  # type: ignore[assignment]


def spoiled_shards() -> None:
    """Change a byte of each shard when it gets its name, as if an older one were taken for it."""
    rename = os.replace

    def replace(source: Any, target: Any, **more: Any) -> None:
        rename(source, target, **more)
        path = Path(os.fspath(target))
        if path.name.startswith("shard-"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    os.replace = replace  # type: ignore[assignment]


def rubbish_stays() -> None:
    """Remove no folder at the end."""

    def rmtree(*_: Any, **__: Any) -> None:
        pass

    shutil.rmtree = rmtree  # type: ignore[assignment]


def old_dataset_first() -> None:
    """Remove the older dataset before the new one is made."""
    makedirs = os.mkdir

    @functools.wraps(makedirs)
    def mkdir(path: Any, *rest: Any, **more: Any) -> None:
        makedirs(path, *rest, **more)
        if os.path.basename(os.fspath(path)) == WORK:
            for file in Path(path).parent.glob("shard-*"):
                file.unlink()

    os.mkdir = mkdir


MISTAKES: dict[str, Callable[[], None]] = {
    "manifest first": manifest_first,
    "rubbish stays": rubbish_stays,
    "spoiled shards": spoiled_shards,
    "old dataset first": old_dataset_first,
}
