"""Child processes that fork from a server, which has loaded everything.

A new worker of a conversion, helper or command uses 0.6 to 3 CPU s to import what it needs; a
forked one 0.03.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, process, reduction, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any
from unittest import mock

import shardkit
from shardkit.cli.main import main
from shardkit.system import helper, native, pool, processes

_begin = processes._begin
_spawn: Any = util.spawnv_passfds
launch = helper._launch
"""The real one."""

_helpers = weakref.WeakSet["Child"]()

_DEADLINE = 120.0

_LIBRARIES = ("h5py", "lmdb", "pyarrow.compute", "pyarrow.parquet", "tifffile", "pi_heif")
"""What helpers import at their first call."""


def load_everything() -> None:
    """Import all modules of the package, so that no test is charged with that.

    Not those that need a library which is not installed: a wheel is tested without the extras.
    """
    modules = pkgutil.walk_packages(shardkit.__path__, "shardkit.")
    for name in (*(module.name for module in modules), *_LIBRARIES):
        if not name.endswith("__main__"):
            with suppress(ImportError):
                importlib.import_module(name)


def start_server() -> None:
    """Start the fork server of `multiprocessing` as a fork of this process, without threads yet."""
    with mock.patch.object(util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def stop_server() -> None:
    """End the server, and wait for it: only then the CPU time of its forks counts as ours."""
    end_helpers()
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        # It would end by itself without us, but only when all our forks have ended, too.
        os.kill(pid, signal.SIGKILL)  # it may have inherited other handlers
        os.waitpid(pid, 0)


def fork_workers() -> None:
    """Make conversions of this process fork their workers, and its helpers fork."""
    pool._START_METHOD = "forkserver"
    pool._WORTHWHILE = 0  # also for the little that tests convert
    processes._begin = Begin()  # type: ignore[assignment]
    helper._launch = LaunchFork()


def _fork(path: Any, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Run the program of ``python -c`` in a fork, instead of a new Python."""
    if "forkserver" not in arguments[-1]:
        return _spawn(path, arguments, descriptors)  # type: ignore[no-any-return]
    pid = os.fork()
    if pid:
        return pid
    try:
        faulthandler.disable()  # its file is closed below
        first = 3
        for last in (*sorted(descriptors), os.sysconf("SC_OPEN_MAX")):
            os.closerange(first, last)
            first = last + 1
        forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock was held
        exec(arguments[-1], {})
    finally:
        os._exit(0)


class Begin:
    """`processes._begin` in a fork of the server, with the variables of its user."""

    def __call__(self, *arguments: Any) -> None:
        """Begin in a fork of this process; in one of the server, a replacement is called."""
        _begin(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, str]]]:
        return _with_variables, (dict(os.environ),)


def _with_variables(variables: Mapping[str, str]) -> Callable[..., None]:
    os.environ.clear()
    os.environ.update(variables)
    return _begin_fork


def _begin_fork(channel: Any, _: int, turn: Any) -> None:
    _begin(channel, os.getppid(), turn)  # the server ends with the parent


def end_helpers() -> None:
    """End the children of helpers; the next call starts one with the path of that moment."""
    for child in tuple(_helpers):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


class Child:
    """A fork of the server with the interface of `subprocess.Popen`."""

    def __init__(
        self, target: Callable[..., None], *arguments: Any, env: Mapping[str, str] | None = None
    ) -> None:
        """Call a function of a module with these arguments and the variables for it."""
        context = multiprocessing.get_context("forkserver")
        variables = {**os.environ, **(env or {})}
        self._process = context.Process(target=target, args=(*arguments, variables))
        self._process.start()
        # Whoever started it ends it: this process does not wait for it at its own end.
        process._children.discard(self._process)  # type: ignore[attr-defined]
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status."""
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return code


def run_forked(
    function: Callable[[], object],
    arguments: Sequence[object],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    *,
    merged: bool = False,
    deadline: float = _DEADLINE,
) -> subprocess.CompletedProcess[str]:
    """Call a function of a module in a fork, as if it were a program with these arguments.

    Args:
        function: The program; it and what it needs was loaded when the server started.
        arguments: `sys.argv`.
        env: Environment variables beside those of this process.
        cwd: Its working directory.
        merged: Print to one stream, stdout.
        deadline: Seconds after which it is taken for hung, and killed.
    """
    command = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = Descriptor(out), Descriptor(out if merged else err)
        child = Child(_run, function, command, cwd or Path.cwd(), streams, env=env)
        try:
            code = child.wait(deadline)
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "backslashreplace"))
    return subprocess.CompletedProcess(command, code, *texts)


def _run(
    function: Callable[[], object],
    command: list[str],
    cwd: Path,
    streams: tuple[int, int],
    env: Mapping[str, str],
) -> None:
    _begin_anew(env, *streams)
    os.chdir(cwd)
    sys.argv = command
    fork_workers()
    try:
        function()
    finally:
        sys.stdout.flush()
        stop_server()


def run_shardkit() -> None:
    """Run the command line, as ``shardkit`` does."""
    main()


def start_script(command: Sequence[str], *, stdout: IO[bytes], **_: object) -> Child:
    """Start ``[sys.executable, FILE, ...]`` as `subprocess.Popen` does, with one stream."""
    streams = (Descriptor(stdout),) * 2
    return Child(_run, _run_script_alone, [*command[1:]], Path.cwd(), streams)


def _run_script_alone() -> None:
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # cleans up after a kill
    run_script()


def run_script() -> None:
    """Run the file `sys.argv` names, as ``python FILE`` does."""
    sys.path.insert(0, str(Path(sys.argv[0]).absolute().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


class Descriptor:
    """An open file that a fork of the server inherits."""

    def __init__(self, file: int | IO[bytes]) -> None:
        """Store a file, which stays open until the child has started."""
        self._number = file if isinstance(file, int) else file.fileno()

    def __reduce__(self) -> tuple[Callable[..., int], tuple[Any]]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(inherited: Any) -> int:
    number: int = inherited.detach()
    return number


class LaunchFork:
    """`helper._launch` of this process; its forks, which have no server, keep the real one."""

    def __init__(self) -> None:
        """Belong to this process."""
        self._pid = os.getpid()

    def __call__(self, connection: Connection, log: int | IO[bytes]) -> Any:
        """Start the child of a helper."""
        if os.getpid() != self._pid:
            return launch(connection, log)
        started, theirs = multiprocessing.Pipe(duplex=False)
        with started, theirs, Path(os.devnull).open("wb") as devnull:
            output = Descriptor(devnull if log == subprocess.DEVNULL else log)
            child = Child(_serve, connection, output, theirs)
            started.poll(60)  # until it has a process group of its own, as `Popen` returns
        _helpers.add(child)
        return child


def _serve(connection: Connection, log: int, started: Connection, env: Mapping[str, str]) -> None:
    os.setpgid(0, 0)
    started.send_bytes(b"\0")
    started.close()
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # ends with its parent
    _begin_anew(env, log, log)
    helper.serve(connection.fileno(), 0)


def _begin_anew(env: Mapping[str, str], out: int, err: int) -> None:
    """Make this fork as good as a new Python with these variables and streams."""
    os.environ.clear()
    os.environ.update(env)
    native._load.cache_clear()
    warnings.resetwarnings()  # pytest makes them errors
    for ignored in (DeprecationWarning, ImportWarning, PendingDeprecationWarning, ResourceWarning):
        warnings.simplefilter("ignore", ignored)
    util.spawnv_passfds = _fork  # type: ignore[assignment]
    devnull = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((devnull, 0), (out, 1), (err, 2)):
        os.dup2(number, target)
    streams = (
        io.TextIOWrapper(io.FileIO(number, mode, closefd=False), "utf-8", line_buffering=True)
        for number, mode in enumerate("rww")
    )
    sys.stdin, sys.stdout, sys.stderr = streams
