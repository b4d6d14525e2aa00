"""Sources by URL: their files are copied before they are read."""

from __future__ import annotations

import os
from pathlib import Path

import click

from shardkit.cli.show import progress_bar
from shardkit.contracts import SourceOption
from shardkit.conversion.download import download
from shardkit.errors import UsageError
from shardkit.stores.urls import as_url

CACHE = SourceOption(
    flags="--cache",
    metavar="DIR",
    type=Path,
    help="If SRC is a URL: copy its files to this folder, unless they are there.",
)

cache_option = click.option(CACHE.flags, metavar=CACHE.metavar, type=CACHE.type, help=CACHE.help)


def copied(source: Path, cache: Path | None, *, quiet: bool) -> Path:
    """Return a source's local path; copy its files first if it is a URL, perhaps with ``@ROOT``.

    Raises:
        UsageError: If it is a URL and no folder is given, or a file does not exist.
        ShardkitError: If the files cannot be copied.
    """
    if as_url(source) is None:
        return source
    if cache is None:
        raise UsageError(f"{as_url(source)} is a URL: name a local folder for a copy with --cache")
    url, at, root = _with_root(source)
    with progress_bar("copying", quiet=quiet) as tally:
        return Path(f"{download(url, cache, on_progress=tally)}{at}{root}")


def require_root(source: Path, root: str | None) -> None:
    """Require the folder of a list's images if the list is a URL, since only the list is copied.

    Raises:
        UsageError: If there is none.
    """
    if as_url(source) is not None and root is None and not _with_root(source)[2]:
        raise UsageError(
            f"of {as_url(source)}, only the table is copied; name the folder of its images: "
            "--root DIR"
        )


def _with_root(source: Path) -> tuple[str, str, str]:
    """Return the URL, and ``@`` and the folder after it, if there is one."""
    url, at, root = str(source).rpartition("@")
    return (url, at, root) if os.path.isdir(root) else (str(source), "", "")
