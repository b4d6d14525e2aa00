"""The image files that code of the user opens, from Python's audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from shardkit.codecs.image import SNIFF_BYTES, sniff

_paths: list[str] | None = None
"""Receives the paths that this process opens; None while nobody asks."""


@contextmanager
def opened_paths() -> Iterator[list[str]]:
    """Collect the paths that this process opens within the context.

    Files that a library opens in native code, such as those of LMDB or OpenCV, are not seen.
    """
    global _paths  # noqa: PLW0603 - an audit hook is global, too
    _install()
    _paths = list[str]()
    try:
        yield _paths
    finally:
        _paths = None


def only_image(paths: Sequence[str]) -> str:
    """Return the path that is an image; empty if none or several are."""
    images = [path for path in dict.fromkeys(paths) if _is_image(path)]
    return images[0] if len(images) == 1 else ""


def _is_image(path: str) -> bool:
    try:
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            return bool(sniff(file.read(SNIFF_BYTES)))
    except OSError:
        return False


@cache
def _install() -> None:
    """Add the hook, which nothing can remove, once."""
    sys.addaudithook(_note)


def _note(event: str, args: tuple[Any, ...]) -> None:
    paths = _paths  # another thread may end the context meanwhile
    if paths is not None and event == "open" and isinstance(args[0], str | bytes):
        paths.append(os.fsdecode(args[0]))
