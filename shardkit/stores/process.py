"""Calls in a process that talks to object stores.

The client's threads do not survive a fork, and data loaders fork. So each process that reads has a
helper of its own, started at the first call. Only messages pass between them: the helper writes
what it fetches to files.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from shardkit.errors import ShardkitError, UsageError
from shardkit.system.bootstrap import command

_LENGTH = struct.Struct("<Q")

_AHEAD = 4
"""Calls of `send` at a time: a thread is free to note what is needed while two shards arrive."""

_EXTRAS = {"fsspec": "fsspec", "obstore": "s3"}


class _Helper:
    """The helper of this process; its process starts with the first message."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._calling = threading.Lock()
        self._writing = threading.Lock()

    def call(self, function: str, arguments: tuple[object, ...]) -> Any:
        with self._calling:
            try:
                value, error = self._ask(function, arguments)
            except (EOFError, OSError) as gone:
                self.end()
                raise ShardkitError(
                    "the process that reads the object store ended unexpectedly; it may have run "
                    "out of memory"
                ) from gone
            except BaseException:  # an interrupted call: its answer must not be the next one's
                self.end()
                raise
        if error is not None:
            raise error
        return value

    def _ask(self, function: str, arguments: tuple[object, ...]) -> tuple[Any, Exception | None]:
        pipe = self._write(True, function, arguments).stdout
        assert pipe is not None
        (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
        answer: tuple[Any, Exception | None]
        answer = pickle.loads(_exactly(pipe, length))  # noqa: S301 - our helper's
        return answer

    def send(self, function: str, arguments: tuple[object, ...]) -> None:
        with contextlib.suppress(OSError, ValueError):  # only advice; it may just have ended
            self._write(False, function, arguments)

    def _write(
        self, answer: bool, function: str, arguments: tuple[object, ...]
    ) -> subprocess.Popen[bytes]:
        data = pickle.dumps((answer, function, arguments))
        with self._writing:
            environment = _environment()
            ended = self._process is not None and self._process.poll() is not None
            if answer and (ended or environment != self._environment):
                self.end()  # new credentials, most likely
                self._environment = environment
            if self._process is None:
                self._process = subprocess.Popen(  # noqa: S603 - this module, in this Python
                    [sys.executable, "-c", command(f"from {__name__} import serve; serve()")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(_LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
            return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            process.wait()


def _environment() -> dict[str, str]:
    """Return the variables that clients read."""
    names = ("AWS_", "AZURE_", "FSSPEC_", "GOOGLE_", "HF_", "SHARDKIT_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


_HELPERS: dict[int, _Helper] = {}
"""The helper of each process: that of a parent is not used after a fork."""


def _helper() -> _Helper:
    return _HELPERS.get(os.getpid()) or _HELPERS.setdefault(os.getpid(), _Helper())


def call(function: str, *arguments: object) -> Any:
    """Call a function in the helper process and return its result.

    Args:
        function: ``module:name`` of a function of this package.
        arguments: Its arguments, which are pickled.

    Raises:
        ShardkitError: If the function raises it, or the helper dies.
    """
    return _helper().call(f"{__package__}.{function}", arguments)


def send(function: str, *arguments: object) -> None:
    """Call a function in the helper process some time later, and ignore its result."""
    _helper().send(f"{__package__}.{function}", arguments)


@atexit.register
def _end_helper() -> None:
    if (helper := _HELPERS.pop(os.getpid(), None)) is not None:
        helper.end()


def serve() -> None:
    """Answer calls until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be an answer
    calls, advice = ThreadPoolExecutor(1), ThreadPoolExecutor(_AHEAD)
    with contextlib.suppress(EOFError):
        while True:
            (length,) = _LENGTH.unpack(_exactly(sys.stdin.buffer, _LENGTH.size))
            answer, function, arguments = pickle.loads(  # noqa: S301 - the parent's
                _exactly(sys.stdin.buffer, length)
            )
            if answer:
                calls.submit(_answer, out, function, arguments)
            else:
                advice.submit(_run, function, arguments)
    os._exit(0)  # without waiting for a fetch: nobody needs it


def _answer(out: BinaryIO, function: str, arguments: tuple[object, ...]) -> None:
    data = pickle.dumps(_run(function, arguments))
    out.write(_LENGTH.pack(len(data)) + data)
    out.flush()


def _run(function: str, arguments: tuple[object, ...]) -> tuple[Any, Exception | None]:
    module, _, name = function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)(*arguments), None
    except ShardkitError as error:
        return None, error
    except ImportError as error:
        if (extra := _EXTRAS.get(str(error.name))) is None:
            return None, ShardkitError(f"the object store cannot be read: {error}")
        return None, UsageError(
            f"object stores need the package {error.name}: pip install 'shardkit[{extra}]'"
        )
    except Exception as error:
        return None, ShardkitError(f"the object store cannot be used: {type(error).__name__}")


def _exactly(pipe: Any, length: int) -> bytes:
    data: bytes = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return data
