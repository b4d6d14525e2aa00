"""Worker processes of conversions that fork from a server, which has loaded everything.

A spawned worker uses 0.6 CPU s to import what it needs; a forked one 0.03.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from typing import Any
from unittest import mock

import shardkit
from shardkit.system import pool

_begin = pool._begin


def load_everything() -> None:
    """Import all modules of the package, so that no test is charged with that."""
    for module in pkgutil.walk_packages(shardkit.__path__, "shardkit."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def start_server() -> None:
    """Start the fork server of `multiprocessing` as a fork of this process, without threads yet."""
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def stop_server() -> None:
    """End the server, and wait for it: only then the CPU time of its forks counts as ours."""
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        # It would end by itself without us, but only when all our forks have ended, too.
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def fork_workers() -> None:
    """Make conversions of this process fork their workers."""
    pool._START_METHOD = "forkserver"
    pool._begin = Begin()  # type: ignore[assignment]


def _fork(_: object, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run the program of ``python -c`` in a fork, instead of a new Python."""
    pid = os.fork()
    if pid:
        return pid
    try:
        first = 3
        for last in (*sorted(descriptors), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, last)
            first = last + 1
        exec(arguments[-1], {})
    finally:
        os._exit(0)


class Begin:
    """`pool._begin` in a fork of the server, with the variables of the process that needs it."""

    def __call__(self, *arguments: Any) -> None:
        """Executors require it; only the replacement in the fork is called."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str]]]:
        return _with_variables, (dict(os.environ),)


def _with_variables(variables: dict[str, str]) -> Callable[..., None]:
    os.environ.clear()
    os.environ.update(variables)
    return _begin_fork


def _begin_fork(channel: Any, _: int, turn: Any) -> None:
    _begin(channel, os.getppid(), turn)  # the server ends with the parent
