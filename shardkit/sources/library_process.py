"""Calls of libraries in a child process, which a damaged file may crash or hang.

The child answers with plain bytes, which need no unpickling. It ends with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import BinaryIO

from shardkit.errors import BadImage
from shardkit.system.bootstrap import command

DEADLINE = 120.0
"""Seconds for one call; the slowest read a chunk of rows from a disk."""

MAX_DATA = 16 << 30
"""Maximum bytes of memory of the child: a few KB of HDF5 can state any size."""

_LENGTH = struct.Struct("<cQ")
_MAX_ANSWER = 1 << 33


class _Child:
    """A child process and the pipes to it."""

    def __init__(self) -> None:
        # "::" refuses plugins: no code runs because a file's list of filters names it.
        environment = {**os.environ, "HDF5_PLUGIN_PRELOAD": "::"}
        self.process = subprocess.Popen(  # noqa: S603 - this module, in this Python
            [sys.executable, "-c", command(f"from {__name__} import serve; serve()")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def call(self, module: str, function: str, arguments: tuple[object, ...]) -> bytes:
        assert self.process.stdin is not None
        data = pickle.dumps((module, function, arguments))
        self.process.stdin.write(_LENGTH.pack(b"C", len(data)) + data)
        self.process.stdin.flush()
        end = time.monotonic() + DEADLINE
        kind, length = _LENGTH.unpack(self._read(_LENGTH.size, end))
        if length > _MAX_ANSWER:
            raise EOFError
        answer = self._read(length, end)
        if kind != b"R":
            raise BadImage(answer.decode(errors="replace"))
        return answer

    def _read(self, length: int, end: float) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        pieces: list[bytes] = []
        while length:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError
            piece = os.read(pipe, min(length, 1 << 20))
            if not piece:
                raise EOFError
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def end(self) -> int:
        """End the process; return its exit status."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        return self.process.wait()


_CHILDREN: dict[int, _Child] = {}
"""The child of each process: that of a parent is not used after a fork."""
_LOCK = threading.Lock()


def call(module: str, function: str, *arguments: object) -> bytes:
    """Call a function in the child process and return its bytes.

    Args:
        module: Name of a module of this package.
        function: Name of a function that returns bytes.
        arguments: Its arguments, which are pickled.

    Raises:
        BadImage: If the function raises it, or the library crashes or does not answer.
    """
    with _LOCK:
        child = _CHILDREN.get(os.getpid())
        if child is None:
            child = _CHILDREN[os.getpid()] = _Child()
        try:
            return child.call(module, function, arguments)
        except (EOFError, OSError) as error:
            late = isinstance(error, TimeoutError)
            status = _CHILDREN.pop(os.getpid()).end()
            how = f"did not answer in {DEADLINE:.0f} s" if late else _ended(status)
            raise BadImage(f"the library that reads it {how}: the file is damaged") from error


def _ended(status: int) -> str:
    if status < 0:
        return f"crashed ({signal.Signals(-status).name})"
    return f"ended with status {status}"


@atexit.register
def _end_child() -> None:
    child = _CHILDREN.pop(os.getpid(), None)
    if child is not None:
        child.end()


def serve() -> None:
    """Answer calls until the parent closes the pipe."""
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not be an answer
    calls = sys.stdin.buffer
    while head := calls.read(_LENGTH.size):
        _, length = _LENGTH.unpack(head)
        module, function, arguments = pickle.loads(calls.read(length))  # noqa: S301 - the parent's
        try:
            answer = getattr(importlib.import_module(module), function)(*arguments)
        except Exception as error:
            text = (
                str(error)
                if isinstance(error, (BadImage, OSError))
                else f"{type(error).__name__}: {error}"
            )
            _answer(out, b"E", text.encode(errors="replace"))
        else:
            _answer(out, b"R", answer)


def _answer(out: BinaryIO, kind: bytes, content: bytes) -> None:
    out.write(_LENGTH.pack(kind, len(content)))
    out.write(content)
    out.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MAX_DATA if hard == resource.RLIM_INFINITY else min(MAX_DATA, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
