"""Files of this user that are not datasets: requested results, and what shardkit remembers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from shardkit.errors import ShardkitError, UsageError
from shardkit.system.files import open_regular, published_file, start_of, sync, write_atomically

_OLD = 600
"""Age in seconds after which a temporary result counts as abandoned."""


def write_together(contents: Mapping[Path, bytes], old: Iterable[Path]) -> None:
    """Write files that belong together, and remove ``old`` ones that do not belong to them.

    A crash leaves some or all of the new files, or of those before, but never some of both.
    """
    before = {*contents, *old}
    with contextlib.ExitStack() as written:
        for path, content in contents.items():
            remove_leftovers(path)
            file = written.enter_context(published_file(path))
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for path in before:
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in before}:
            sync(folder)


def write_result(path: Path, content: bytes) -> None:
    """Write a file that the user requested, atomically.

    ShardkitError if it cannot be written, most often because the disk is full.
    """
    try:
        remove_leftovers(path)
        write_atomically(path, content)
    except OSError as error:
        raise ShardkitError(f"{path} cannot be written: {error.strerror or error}") from error


def require_own_output(path: Path, option: str, mark: str) -> None:
    """Refuse an output file that cannot be written, or that another program wrote.

    The error names ``option``. ``mark`` is text such as "made by shardkit bench" in the first KiB
    of each file of that command.
    """
    if path.is_dir():
        why = "this is a folder; choose a file in it"
    elif not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        why = f"the folder {path.parent} does not exist or cannot be written"
    elif path.exists() and not _starts_with(path, mark.encode()):
        command = mark.removeprefix("made by ")
        why = f"{command} did not write this file; choose another name, or remove it"
    else:
        return
    raise UsageError(f"{option} {path}: {why}", where=option)


def _starts_with(path: Path, mark: bytes) -> bool:
    """Return whether a file is empty, or has a mark in its first KiB."""
    if not path.is_file():  # a device
        return False
    with open(path, "rb") as file:
        head = file.read(1024)
    return not head or mark in head


def remove_leftovers(path: Path) -> None:
    """Remove this user's files that a killed `published_file` left.

    On a file system without locks, these are the ones that are ten minutes old or older.
    """
    pattern = re.compile(re.escape(f".{start_of(path)}.") + r"[0-9a-f]{16}\.tmp")
    for entry in os.scandir(path.parent):
        if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with contextlib.suppress(OSError), open_regular(Path(entry.path)) as file:
                status = os.fstat(file.fileno())
                if status.st_uid == os.geteuid() and _is_abandoned(file.fileno(), status):
                    os.unlink(entry.path)


def _is_abandoned(descriptor: int, status: os.stat_result) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return time.time() - status.st_mtime > _OLD
    return True


def state_folder() -> Path:
    """Return the folder for what shardkit remembers for this user, which may not exist yet."""
    state = os.environ.get("XDG_STATE_HOME", "")
    above = Path(state if os.path.isabs(state) else os.path.expanduser("~/.local/state"))
    # A user without a home, as in some containers, remembers nothing.
    return above / "shardkit" if above.is_absolute() else Path("/nonexistent/shardkit")
