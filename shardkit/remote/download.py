"""Local copies of files in object stores: sources read them like all others, and see no URL.

So formats, offsets and checks need no second way to read, and `verify` and `repair` find the same
files. A copy's modification time states the time and the ETag of the original: so a new version is
noticed, and no list of copies can disagree with the folder.
"""

from __future__ import annotations

import fnmatch
import glob
import os
from pathlib import Path

from shardkit.errors import UsageError
from shardkit.remote import fetch
from shardkit.remote.process import call
from shardkit.sources.inputs import expand
from shardkit.system.pool import Progress, Report
from shardkit.system.safe_paths import make_folder, split_path
from shardkit.system.urls import as_url


def download(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    on_progress: Report | None = None,
) -> Path:
    """Copy the files of a URL to a local folder, for a source of files, such as tar archives.

    Files whose copy has the size, modification time and ETag of the original are not fetched again,
    so you can repeat an interrupted call to resume it. Any number of processes may share the
    folder.

    Args:
        url: ``s3://BUCKET/x-{000..999}.tar``, ``gs://``, ``az://`` or ``https://``. The last part
            may contain ``*`` or ``[...]``, except on a web server.
        folder: The copy of ``s3://BUCKET/PATH`` is ``FOLDER/s3/BUCKET/PATH``. Nothing is removed.
        on_progress: Called with the files and bytes fetched since the last call.

    Returns:
        The path or pattern that names the copies, for `convert`, `verify` and `repair`.

    Raises:
        UsageError: If a file does not exist, access is denied, or the folder contains files that
            match ``*`` but are not in the store.
        ShardkitError: If the store cannot be read, or the folder cannot be written.
    """
    pattern = as_url(url)
    top = Path(folder).expanduser()
    if pattern is None:
        raise UsageError(f"{url} must be a URL such as s3://BUCKET/x-{{000..999}}.tar")
    if glob.has_magic(str(top)) or set("{}") & set(str(top)):
        raise UsageError(f"the name of the folder {top} must not contain any of *?[]{{}}")
    files = [file for file_url in expand(pattern) for file in _matches(file_url, top)]
    if on_progress:
        on_progress(Progress(total=len(files)))
    for base, name in files:
        path = _local(top, f"{base}/{name}")
        try:
            top.mkdir(parents=True, exist_ok=True)
            make_folder(top, str(path.parent.relative_to(top)))
        except OSError as error:
            raise UsageError(f"the folder {top} cannot be used: {error.strerror}") from error
        size = call(fetch.copy, base, name, path.absolute())
        if on_progress:
            on_progress(Progress(images=1, bytes=size))
    return _local(top, pattern)


def _matches(url: str, top: Path) -> list[tuple[str, str]]:
    """Return the folder's URL and the name of each file that a URL without braces names."""
    base, _, name = url.rpartition("/")
    if as_url(base) is None or glob.has_magic(base):
        raise UsageError(f"{url}: only the last part of a URL may contain * or [...]")
    if not glob.has_magic(name):
        return [(base, name)]
    if base.startswith("http"):
        raise UsageError(
            f"{url}: a web server does not list its files;", remedy="list them, as in {000..999}"
        )
    listed = [entry for entry in call(fetch.names, base) if not entry.startswith(".")]
    matches = sorted(fnmatch.filter(listed, name))
    if not matches:
        raise UsageError(f"{base} contains no {name}")
    others = {os.path.basename(path) for path in glob.glob(str(_local(top, url)))} - {*matches}
    if others:
        raise UsageError(
            f"{_local(top, base)} contains files that are not in {base}, such as {min(others)};",
            remedy="remove them",
        )
    return [(base, match) for match in matches]


def _local(top: Path, url: str) -> Path:
    """Return the path of the copy of a file."""
    try:
        return top.joinpath(*split_path(url.replace("://", "/", 1)))
    except ValueError as error:
        raise UsageError(f"{url} cannot be copied: {error}") from error
