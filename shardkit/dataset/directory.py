"""The directory of an open dataset, and whether it still holds that dataset."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardkit.dataset.manifest import MANIFEST_NAME, Manifest, load_manifest
from shardkit.errors import CorruptDataset
from shardkit.system.files import require_local

_Opened = TypeVar("_Opened")


class OpenDirectory:
    """A dataset's directory, from which files are opened when they are needed.

    Args:
        path: The directory.

    Raises:
        UsageError: If it is not a dataset.
        CorruptDataset: If its manifest is damaged.
    """

    def __init__(self, path: Path) -> None:
        require_local(path)
        self.path = path.expanduser().absolute()
        self._stamp = _stamp(self.path)
        self.manifest: Manifest = load_manifest(self.path)

    def unchanged(self, load: Callable[[], _Opened]) -> _Opened:
        """Return what ``load`` opens if the directory still holds the dataset opened here.

        Publishing exchanges the directory, or removes the old manifest first and adds the new one
        last. So files opened before this check belong to the old dataset.

        Raises:
            CorruptDataset: If another dataset has replaced this one.
        """
        try:
            opened = load()
        except CorruptDataset:  # files of another dataset are not damaged
            self._require_unchanged()
            raise
        self._require_unchanged()
        return opened

    def _require_unchanged(self) -> None:
        stamp = _stamp(self.path)
        if stamp != self._stamp:
            if stamp is None:
                raise CorruptDataset(
                    f"{self.path} has lost its manifest: it was removed or is being rewritten. "
                    "Open the dataset again."
                )
            if load_manifest(self.path).digest != self.manifest.digest:
                raise rewritten(self.path)
            self._stamp = stamp


def rewritten(directory: Path) -> CorruptDataset:
    """Return the error for a directory that another dataset has replaced."""
    return CorruptDataset(f"{directory} was rewritten since it was opened; open it again")


def _stamp(directory: Path) -> tuple[int, int, int, int] | None:
    """Return a value that changes when the manifest in ``directory`` is replaced; None without."""
    try:  # each batch asks: joining texts takes a tenth of the time of joining paths
        status = os.stat(f"{directory}/{MANIFEST_NAME}")
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
