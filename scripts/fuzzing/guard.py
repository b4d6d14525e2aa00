"""Try one input under guard: return its outcome, and the promise it broke, if any.

This covers only what a process can notice about itself; its parent notices crashes and hangs.
"""

from __future__ import annotations

import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from helpers import limit_memory

import shardkit
from scripts.fuzzing.target import BrokenPromiseError, Target
from shardkit.system import helper

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(Path(shardkit.__file__).parent) + os.sep
"""Where shardkit's modules lie: a folder of that name may hold all of the project."""

ADDRESS_SPACE = 4 << 30
"""Bytes of address space that a process may take beyond what it has when it begins."""

GROWTH = 160 << 20
"""Bytes by which memory in use may grow for one input; all are below `MAX_BYTES`, and images that
state more than a megapixel are not decoded."""

_DEEDS = {
    "pickle.find_class": "unpickled something",
    "os.system": "ran a command",
    "os.exec": "ran a program",
    "os.posix_spawn": "ran a program",
    "subprocess.Popen": "ran a program",
    "socket.connect": "opened a connection",
    "socket.bind": "opened a connection",
    "ctypes.dlopen": "loaded a library",
}
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod")


class Finding(NamedTuple):
    """A broken promise."""

    kind: str
    """``exception``, ``wrong``, ``memory``, ``deed``, ``crash`` or ``hang``."""
    signature: str
    """Equal for findings that are probably the same."""
    detail: str


class Result(NamedTuple):
    """What came of one input."""

    outcome: str
    """Name of the exception, or what the target says."""
    finding: Finding | None
    seconds: float = 0.0


class _Watch:
    """What an audit hook, which can never be taken away again, saw while it was to look."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.seen: list[str] = []
        self.code = tuple(map(os.path.abspath, (*sys.path, sys.prefix, str(ROOT))))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            self._opened(*arguments[:3])
        elif event in _DEEDS and not _starts_a_reader(event, arguments):
            self.seen.append(f"it {_DEEDS[event]}: {arguments!r:.200}")
        elif event in _CHANGING and not self._changes_inside(event, arguments):
            self.seen.append(f"it changed files elsewhere: {event}{arguments!r:.200}")
        elif event == "exec" and arguments[0].co_filename.startswith("<"):
            self.seen.append(f"it executed text: {arguments[0].co_filename}")

    def _opened(self, path: object, mode: object, flags: object) -> None:
        if isinstance(path, int) or path == os.devnull or self._inside(path):
            return
        if isinstance(flags, int) and flags & os.O_NOFOLLOW and os.sep not in os.fsdecode(path):  # type: ignore[arg-type]
            return  # a name in an open folder; where that is was seen when it was opened
        text = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
        if writes or not any(text.startswith(place + os.sep) for place in self.code):
            self.seen.append(f"it opened {text}")

    def _changes_inside(self, event: str, arguments: tuple[Any, ...]) -> bool:
        """Tell whether all that is changed is inside; names may be relative to open folders."""
        if event in ("os.rename", "os.link"):
            pairs = [(arguments[0], arguments[2]), (arguments[1], arguments[3])]
        else:
            pairs = [(arguments[0], arguments[-1] if len(arguments) > 1 else -1)]
        return all(self._inside(path, folder) for path, folder in pairs)

    def _inside(self, path: object, folder: object = -1) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)) or self.folder is None:
            return True  # a descriptor, of something opened before
        above = (
            os.readlink(f"/proc/self/fd/{folder}") if type(folder) is int and folder >= 0 else ""
        )
        whole = os.path.abspath(os.path.join(above, os.fsdecode(path)))
        return (whole + os.sep).startswith(self.folder)

    @contextmanager
    def looking(self, folder: Path) -> Iterator[None]:
        self.seen = []
        self.folder = os.path.abspath(folder) + os.sep
        try:
            yield
        finally:
            self.folder = None


def _starts_a_reader(event: str, arguments: tuple[Any, ...]) -> bool:
    """Tell whether a program is the process in which shardkit calls libraries."""
    program = f"from {helper.__name__} import serve; "
    return event == "subprocess.Popen" and program in list(arguments[1])[-1]


_watch: _Watch | None = None


def limit_process() -> None:
    """Have this process fail rather than fill the machine's memory, and leave no core dump."""
    limit_memory(ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def attempt(target: Target, data: bytes) -> Result:
    """Try one input in this process."""
    global _watch  # noqa: PLW0603 - an audit hook belongs to the process
    _watch = _watch or _Watch()
    finding: Finding | None = None
    place = "?"
    before = _peak()
    begun = time.perf_counter()
    try:
        with _watch.looking(target.folder):
            outcome = target.check(data)
    except BrokenPromiseError as error:
        promise = str(error).partition(":")[0]
        outcome, finding = "wrong", Finding("wrong", f"{target.name} {promise}", str(error))
    except MemoryError as error:
        outcome, finding = "MemoryError", _finding("memory", target, error)
    except target.allowed as error:
        outcome, place = type(error).__name__, _place(error)
    except Exception as error:
        outcome, finding = type(error).__name__, _finding("exception", target, error)
    seconds = time.perf_counter() - begun
    grown = (_peak() - before) * 1024
    if _watch.seen:
        what = _watch.seen[0]
        finding = Finding("deed", f"{target.name} {what.split(':')[0][:60]}", what)
    if finding is None and grown > GROWTH:
        finding = Finding("memory", f"{target.name} grew in {place}", f"it grew by {grown} bytes")
    return Result(outcome, finding, seconds)


def _peak() -> int:
    """Return the most memory that this program has had, in KiB.

    Not `resource.getrusage`: it knows that of the program before this one in the same process, too.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("VmHWM:")).split()[1])


def _finding(kind: str, target: Target, error: BaseException) -> Finding:
    text = "".join(traceback.format_exception(error))[-6000:]
    return Finding(kind, f"{target.name} {type(error).__name__} in {_place(error)}", text)


def _place(error: BaseException) -> str:
    """Return the innermost function of shardkit that an exception passed through."""
    found = "?"
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(PACKAGE):
            found = f"{Path(frame.filename).stem}.{frame.name}"
    return found
