"""Helper processes that never import from the working directory.

`multiprocessing` starts spawned workers, its fork server and its resource tracker with
``python -c``, and Python then puts the working directory first on the module path. That directory
may be an untrusted dataset that contains a ``multiprocessing.py``. ``-P`` would keep it out, but
not pass on the module path of this process.

``python -m shardkit`` removes the directory, too, but Python searches it before that. In an
untrusted directory, use the command ``shardkit``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

RECEIVER = "shardkit-helper"
"""Name of a helper's thread that waits for messages. It holds no lock that a fork needs."""

_HARMLESS = {
    "QueueFeederThread",  # of a loader's workers
    RECEIVER,  # of a process that measures, which forks as the user's process does
}

_PACKAGES = str(Path(__file__).parents[1])
_usual: Any = None


def threads_may_fork() -> bool:
    """Return whether this process may fork: children need no lock that another thread holds."""
    return all(
        thread is threading.current_thread()
        or thread.name in _HARMLESS
        or type(thread).__module__ == "tqdm._monitor"
        for thread in threading.enumerate()
    )


def command(program: str) -> str:
    """Return a program for ``python -c`` that starts with this process's module path.

    The path omits empty entries, which mean the working directory, and includes this package.
    """
    path = [folder for folder in sys.path if isinstance(folder, str) and folder]
    if _PACKAGES not in path:
        path.append(_PACKAGES)
    return f"import sys; sys.path[:] = {path!a}; {program}"


def guard_helpers() -> None:
    """Make all helper processes of `multiprocessing` start with this process's module path.

    Call it before starting one; only the first call has an effect. A spawned worker receives its
    parent's module path anyway, but only after its first imports.
    """
    global _usual  # noqa: PLW0603 - the original function, replaced once per process
    util: Any = import_module("multiprocessing.util")  # it takes 8 ms
    if util.spawnv_passfds is not _start:
        _usual = util.spawnv_passfds
        util.spawnv_passfds = _start


def _start(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    args = list(args)
    if "-c" in args:
        position = args.index("-c") + 1
        program = args[position]
        if "resource_tracker" in program:
            # It removes semaphores once we have ended, also if our whole process group is killed.
            program = f"import os; os.setsid(); {program}"
        args[position] = command(program)
    started: int = _usual(path, args, passfds)
    return started


def main_problem() -> str | None:
    """Return why a worker cannot run the program's main file again, or None."""
    file = main_file()
    if file is None:
        return None
    try:
        guarded = b"__main__" in Path(file).read_bytes()
    except OSError:
        return f"the program has no file ({file}) that worker processes can run"
    if guarded:
        return None
    return (
        f"each worker process would run {file} again, which has no "
        "`if __name__ == '__main__':` guard"
    )


def main_file() -> str | None:
    """Return the main file, which a worker that is not forked runs again, or None if none does."""
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None) or ""
    if name.rpartition(".")[2] == "__main__":
        return None
    file: str | None = getattr(main, "__file__", None)
    return file
