"""A child process that calls functions for this process, and may crash or hang in them.

Libraries that read damaged files, object stores and measurements run in such children. A call
passes the function itself, so that tools can follow it; function and arguments are pickled. An
answer is bytes or JSON, never a pickle: the child may have read a hostile file. (A measurement runs
the user's code anyway, and packs a pickle into the bytes.)
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from shardkit import errors
from shardkit.errors import ShardkitError
from shardkit.system.bootstrap import RECEIVER, command
from shardkit.system.processes import end_with_parent

_P = ParamSpec("_P")
_R = TypeVar("_R")

_CALL = b"C"
_ADVICE = b"A"
_MAX_ANSWER = 1 << 33

_AHEAD = 4
"""Calls of `send` at a time: a thread is free to note what is needed while two shards arrive."""

_END_SECONDS = 5.0
"""Time for the child to exit by itself once its parent has ended."""

_ERRORS = {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, ShardkitError)
}


class HelperEnded(Exception):
    """The child crashed or was killed; the text states how."""

    def __init__(self, text: str, status: int) -> None:
        """Store the text and the exit status of the child."""
        super().__init__(text)
        self.status = status


class HelperLate(HelperEnded):
    """The child did not answer in time, and was killed."""


class Library:
    """A library that the child imports at its first use, and its parent does not."""

    def __init__(self, name: str) -> None:
        """Store the name of the module."""
        self._name = name

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


class Helper:
    """A child for each process that calls: a fork shares neither pipes nor threads with its parent.

    The child starts with the first call, and again if it ended. It never imports from the working
    directory. Threads may share a helper; their calls wait for each other.
    """

    def __init__(
        self,
        run: Callable[..., Any] | None = None,
        ended: Callable[[str], ShardkitError] | None = None,
        *,
        cpu_seconds: int | None = None,
        follows: tuple[str, ...] = (),
        log: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        """Prepare a helper.

        ``run`` is a function of a module that the child calls instead, with the function and its
        arguments. It turns what the function raises into a `ShardkitError`. ``ended`` returns the
        error to raise if the child ends, given how; None raises `HelperEnded`. ``cpu_seconds``
        limits the CPU time of a call, which other processes do not affect. A change of an
        environment variable with a prefix in ``follows`` restarts the child. ``log`` is a file for
        what the child prints.
        """
        self.seconds: float | None = None
        """Time limit of a call, which a busy machine may exceed."""
        self.cpu_seconds = cpu_seconds
        self._run = run
        self._ended = ended
        self._follows = follows
        self._log = log
        self._callers: dict[int, _Caller] = {}
        atexit.register(self.end)

    def call(self, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Call a function of a module in the child; return its result, which is bytes or JSON.

        ShardkitError or OSError if the function raises it; HelperEnded if the child ends or does
        not answer in time.
        """
        caller = self._caller()
        with caller.calling:
            try:
                connection = self._write(_CALL, function, args, kwargs)
                kind, *answer = json.loads(self._read(connection))
                if kind == "bytes":
                    answer = [self._read(connection)]
            except (EOFError, OSError) as error:
                raise self._ending(caller.end(), isinstance(error, TimeoutError)) from error
            except BaseException:  # an interrupted call: its answer must not be the next one's
                caller.end()
                raise
        if kind == "errno":
            raise OSError(answer[0], os.strerror(answer[0]), answer[1])
        if kind == "error":
            name, problem, remedy, where = answer
            raise _ERRORS[name](problem, remedy=remedy, where=where)
        return cast("_R", answer[0])

    def send(self, function: Callable[_P, object], /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call a function in the child some time later, and ignore its result."""
        with contextlib.suppress(OSError):  # only advice; the child may just have ended
            self._write(_ADVICE, function, args, kwargs)

    def start(self) -> None:
        """Start the child unless it runs."""
        with self._caller().writing:
            self._start(self._caller())

    @property
    def process(self) -> _Process | None:
        """The child that runs, if any."""
        child = self._caller().child
        return child.process if child is not None and child.process.poll() is None else None

    def end(self, patience: float = 0.0) -> None:
        """End the child and its workers. For ``patience`` seconds, it may exit by itself."""
        self._caller().end(patience)

    def _caller(self) -> _Caller:
        return self._callers.get(os.getpid()) or self._callers.setdefault(os.getpid(), _Caller())

    def _write(
        self, kind: bytes, function: Callable[..., object], args: object, kwargs: dict[str, Any]
    ) -> Connection:
        data = pickle.dumps((self._run, partial(function, **kwargs), args, self.cpu_seconds))
        caller = self._caller()
        with caller.writing:
            child = self._start(caller) if kind == _CALL or not caller.child else caller.child
            child.connection.send_bytes(kind + data)
            return child.connection

    def _ending(self, status: int, late: bool) -> Exception:
        how = f"ended with status {status}"
        if late:
            how = f"did not answer in {self.seconds:.0f} s"
        elif status == -signal.SIGXCPU:
            how = f"used more than {self.cpu_seconds} s of CPU time"
        elif status < 0:
            how = f"crashed ({signal.Signals(-status).name})"
        if self._ended is not None:
            return self._ended(how)
        return (HelperLate if late else HelperEnded)(how, status)

    def _read(self, connection: Connection) -> bytes:
        if not connection.poll(self.seconds):
            raise TimeoutError
        return connection.recv_bytes(_MAX_ANSWER)

    def _start(self, caller: _Caller) -> _Child:
        names = os.environ if self._follows else ()
        variables = {name: os.environ[name] for name in names if name.startswith(self._follows)}
        child = caller.child
        if child is not None and child.variables == variables and child.process.poll() is None:
            return child
        caller.end()
        ours, theirs = Pipe()
        with theirs:
            process = _launch(theirs, self._log)
        caller.child = _Child(process, ours, variables)
        return caller.child


class _Process(Protocol):
    """A child process; `wait` raises `subprocess.TimeoutExpired`."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def _launch(connection: Connection, log: int | IO[bytes]) -> _Process:
    """Start a child that serves a connection, in a process group of its own. Tests fork it."""
    # The system would end it with the thread that starts it, unless that is the main one.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    program = f"from {__name__} import serve; serve({connection.fileno()}, {parent})"
    return subprocess.Popen(  # noqa: S603 - this module, in this Python
        [sys.executable, "-c", command(program)],
        pass_fds=(connection.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        process_group=0,
    )


class _Child(NamedTuple):
    process: _Process
    connection: Connection
    variables: dict[str, str]
    """Environment variables that it follows, at its start."""


class _Caller:
    """A process that calls, and its child."""

    def __init__(self) -> None:
        self.calling = threading.Lock()
        self.writing = threading.Lock()
        self.child: _Child | None = None

    def end(self, patience: float = 0.0) -> int:
        """End the child and the processes that it started; return its exit status."""
        child, self.child = self.child, None
        if child is None:
            return 0
        child.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk may block the exit
            return child.process.wait(_END_SECONDS)
        return -signal.SIGKILL


def serve(descriptor: int, parent: int) -> None:
    """Answer calls until the parent closes the connection or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.set_inheritable(descriptor, False)
    if parent:
        end_with_parent(parent)
    connection = Connection(descriptor)
    calls: SimpleQueue[bytes] = SimpleQueue()
    receive = threading.Thread(
        target=_receive, args=(connection, calls), name=RECEIVER, daemon=True
    )
    receive.start()
    while call := calls.get():
        answer = _answer(call)
        if isinstance(answer, bytes | bytearray):
            connection.send_bytes(b'["bytes"]')
            connection.send_bytes(answer)
        else:
            connection.send_bytes(answer.encode())
        del answer  # it may be large
        sys.stderr.flush()


def _receive(connection: Connection, calls: SimpleQueue[bytes]) -> None:
    """Pass calls to the main thread, since a library may need it, and advice to other threads."""
    advice = ThreadPoolExecutor(_AHEAD)
    with contextlib.suppress(EOFError, OSError):
        while message := connection.recv_bytes():
            if message.startswith(_CALL):
                calls.put(message)
            else:
                advice.submit(_answer, message)
    calls.put(b"")
    time.sleep(_END_SECONDS)
    os._exit(0)  # it hangs, or fetches what nobody needs


def _answer(message: bytes) -> bytes | bytearray | str:
    try:
        run, function, arguments, seconds = pickle.loads(message[1:])  # noqa: S301 - the parent's
        if seconds is not None:
            _limit_cpu(seconds)
        encoded = partial(_encoded, function)
        answer: bytes | bytearray | str = run(encoded, *arguments) if run else encoded(*arguments)
    except Exception as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, ShardkitError):
            return json.dumps(["errno", error.errno, error.filename])
        names = [base.__name__ for base in type(error).__mro__]
        name = next((name for name in names if name in _ERRORS), ShardkitError.__name__)
        details = [f"{names[0]}: {error}", None, None]
        if isinstance(error, ShardkitError):
            details = [error.problem, error.remedy, error.where]
        return json.dumps(["error", name, *details])
    return answer


def _limit_cpu(seconds: int) -> None:
    """Let this process use so much more CPU time; then a signal ends it."""
    limit = int(time.process_time()) + 1 + seconds
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def _encoded(function: Callable[..., Any], *arguments: object) -> bytes | bytearray | str:
    result = function(*arguments)
    return result if isinstance(result, bytes | bytearray) else json.dumps(["value", result])
