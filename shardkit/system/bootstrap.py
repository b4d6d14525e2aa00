"""Helper processes that never import from the working directory.

`multiprocessing` starts spawned workers, its fork server and its resource tracker with
``python -c``, and Python then puts the working directory first on the module path. That directory
may be an untrusted dataset that contains a ``multiprocessing.py``. ``-P`` requires Python 3.11.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

_PACKAGES = str(Path(__file__).parents[1])
_usual: Any = None


def command(program: str) -> str:
    """Return a program for ``python -c`` that starts with this process's module path.

    The path omits empty entries, which mean the working directory, and includes this package.
    """
    path = [each for each in sys.path if isinstance(each, str) and each]
    if _PACKAGES not in path:
        path.append(_PACKAGES)
    return f"import sys; sys.path[:] = {path!a}; {program}"


def guard_helpers() -> None:
    """Make all helper processes of `multiprocessing` start with this process's module path.

    Call it before starting one; only the first call has an effect. A spawned worker receives its
    parent's module path anyway, but only after its first imports.
    """
    global _usual  # noqa: PLW0603 - the original function, replaced once per process
    if util.spawnv_passfds is not _start:
        _usual = util.spawnv_passfds
        util.spawnv_passfds = _start


def _start(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
    args = list(args)
    if "-c" in args:
        place = args.index("-c") + 1
        args[place] = command(args[place])
    started: int = _usual(path, args, passfds)
    return started
