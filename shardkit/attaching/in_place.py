"""Open a folder of images that is not a dataset: make or reuse an index in the user's cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from shardkit.attaching.attach import attach, is_current
from shardkit.contracts import Scan
from shardkit.dataset.manifest import MANIFEST_NAME, SplitsManifest
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import BadImages, UsageError, setting
from shardkit.registry import open_source
from shardkit.system.text import amount, as_command, name_list

_LOG = logging.getLogger(__name__)

_LEFT = (MANIFEST_NAME, f"*/{MANIFEST_NAME}", ".shardkit*", "index/rows.npy")
"""Files of datasets, even damaged or unfinished ones; a folder of images has none."""


def index_of(path: str | os.PathLike[str], split: str | None) -> Path | None:
    """Return the index of a folder of images, made or as it was; None if it is no such folder.

    It raises `BadImages` if some of its files are not images, or cannot be read in place.
    """
    folder = Path(path).expanduser()
    if not os.path.isdir(folder) or any(any(folder.glob(name)) for name in _LEFT):
        return None
    source = open_source("imagefolder", folder)
    try:
        scan = source.scan()
    except UsageError:
        return None
    if split is not None and split not in scan.splits:
        names = f"; it has {name_list(scan.splits)}" if "" not in scan.splits else ""
        raise UsageError(f"{folder} has no split {split!r}{names}")
    target = _cache() / hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:32]
    with _alone(target):
        if not is_current(source, scan, target):
            _make(folder, scan, target)
    manifest = OpenedDirectory(target).manifest
    if isinstance(manifest, SplitsManifest) and split is None:
        raise manifest.refusal(folder, setting("split", manifest.first))
    return target


def _make(folder: Path, scan: Scan, target: Path) -> None:
    count = amount(sum(map(len, scan.splits.values())), "image")
    _LOG.warning("%s is not a dataset: indexing its %s once, in %s", folder, count, target)
    try:
        attach(scan.source, target)
    except BadImages as error:
        command = as_command("attach", "imagefolder", folder, "INDEX", "--on-error", "skip")
        first = "".join(f". The first is {bad.path}: {bad.message}" for bad in error.problems[:1])
        raised = BadImages(
            f"{folder} is not a dataset, and {error.problem}{first}",
            remedy=f"Fix the files, or run {command} and open INDEX",
        )
        raised.problems = error.problems
        raise raised from error


def _cache() -> Path:
    """Return the folder of all such indexes."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    above = Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"))
    return above / "shardkit" / "folders"


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Wait for other processes that make the same index, such as those of other GPUs."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(f"{target}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(
            f"{target.parent} cannot be written: {error.strerror}",
            remedy="set XDG_CACHE_HOME, or use `shardkit attach imagefolder`",
        ) from error
    try:
        with contextlib.suppress(OSError):  # not all network file systems can lock
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
