"""Suggestions where a user names a source that is not the one of a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardkit.dataset.opened import is_dataset
from shardkit.errors import UsageError
from shardkit.system.text import shell
from shardkit.verification.source_match import OTHER_FOLDER


def with_remedy(error: UsageError, root: Any, name: object, top: Path) -> UsageError:
    """Return an error, perhaps with what may be meant; a specific remedy stays.

    ``root`` is not the source that ``name`` names; ``top`` is the dataset, perhaps a split.
    """
    if error.remedy in (None, OTHER_FOLDER):
        error.remedy = _what_is_meant(root, name, top) or error.remedy
    return error


def _what_is_meant(root: Any, name: object, top: Path) -> str:
    """Return the source's name in a folder, where `convert` finds it by itself, or all splits."""
    name = os.path.basename(str(name))
    if isinstance(root, (str, Path)) and os.path.isdir(root) and name not in ("", ".", ".."):
        folders = [Path(root), *(path for path in sorted(Path(root).iterdir()) if path.is_dir())]
        for path in (folder / name for folder in folders):
            if path.exists():
                return f"try {shell(path)}"
    parent = top.absolute().parent
    return f"if it contains all splits, check them together: {shell(parent)}" * is_dataset(parent)
