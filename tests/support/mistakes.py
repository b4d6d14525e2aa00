"""Converters with a mistake, which the crash oracle must detect; applied in the converting child.

They change what Python's own functions do, not shardkit: so they hold whatever shardkit is made of.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, WORK = "shardkit.json", ".shardkit-work"


def _whole(path: Any, folder: int | None) -> str:
    """Return a path that may be relative to an open folder."""
    above = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
    return os.path.join(above, os.fspath(path))


def manifest_first() -> None:
    """Publish the manifest before the files that it names."""
    rename = os.replace
    held: list[tuple[str, str]] = []

    def replace(source: Any, target: Any, **more: Any) -> None:
        old = _whole(source, more.get("src_dir_fd"))
        new = _whole(target, more.get("dst_dir_fd"))
        published = WORK in old and WORK not in new
        if published and os.path.basename(new) != MANIFEST:
            held.append((old, new))
            return
        rename(old, new)
        while published and held:
            rename(*held.pop(0))

    os.replace = replace  # type: ignore[assignment]


def spoiled_shards() -> None:
    """Change a byte of each shard on renaming, as if an old one were reused."""
    rename = os.replace

    def replace(source: Any, target: Any, **more: Any) -> None:
        rename(source, target, **more)
        path = Path(_whole(target, more.get("dst_dir_fd")))
        if path.name.startswith("shard-"):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)

    os.replace = replace  # type: ignore[assignment]


def rubbish_stays() -> None:
    """Remove no folder at the end."""

    def rmdir(*_: Any, **__: Any) -> None:
        pass

    os.rmdir = rmdir


def old_dataset_first() -> None:
    """Remove the old dataset before building the new one."""
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
