"""Sources by URL: their files are copied before they are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shardkit.cli.printing import progress_bar
from shardkit.cli.run import Run
from shardkit.contracts import SourceOptions
from shardkit.dataset.opened import OpenedDirectory
from shardkit.errors import ShardkitError, UsageError
from shardkit.options import option
from shardkit.registry import get_source
from shardkit.system.late import load
from shardkit.system.urls import as_url


@dataclass(frozen=True, kw_only=True)
class Copies(SourceOptions):
    """Where files of a URL are copied to."""

    cache: Path | None = option(
        None,
        help="If SRC is a URL: copy its files to this folder, unless they are already there.",
        metavar="DIR",
    )


def copied(run: Run, source: Path, copies: Copies, dataset: Path | None = None) -> Path:
    """Return a source's local path; copy its files first if it is a URL, perhaps with ``@ROOT``.

    A URL is returned as it is if ``dataset`` was made by a source that reads URLs by itself.
    """
    if as_url(source) is None or (dataset is not None and _reads_urls(dataset)):
        return source
    if copies.cache is None:
        raise UsageError(
            f"{as_url(source)} is a URL", remedy="pass --cache DIR to copy it to a local folder"
        )
    url, at, root = _with_root(source)
    with progress_bar(run, "copying") as tally:
        download = load("shardkit.remote.download:download")
        return Path(f"{download(url, copies.cache, on_progress=tally)}{at}{root}")


def _reads_urls(dataset: Path) -> bool:
    try:
        splits = OpenedDirectory(dataset).splits.values()
        sources = [part.manifest.source for split in splits for part in split.parts]
        return all(get_source(source["kind"]).reads_urls for source in sources)
    except (ShardkitError, KeyError):  # the command itself reports what is wrong with it
        return False


def require_root(source: Path, root: str | None) -> None:
    """Require the folder of a list's images if the list is a URL, since only the list is copied."""
    if as_url(source) is not None and root is None and not _with_root(source)[2]:
        raise UsageError(
            f"only the table itself is copied from {as_url(source)};",
            remedy="pass the folder of its images with --root DIR",
        )


def _with_root(source: Path) -> tuple[str, str, str]:
    """Return the URL, and ``@`` and the folder after it, if there is one."""
    url, at, root = str(source).rpartition("@")
    return (url, at, root) if os.path.isdir(root) else (str(source), "", "")
