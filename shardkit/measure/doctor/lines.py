"""The lines of code in which loading spends its time, by samples of the stacks of its workers."""

from __future__ import annotations

import dis
import json
import linecache
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from shardkit.measure.runner.own_code import is_library
from shardkit.torch import _compat
from shardkit.torch.engine.fetch import Fetch

_INTERVAL = 0.03
_READY = 0.02
"""Seconds between samples, and most of those before one in which threads yield the GIL sooner."""

_SWITCH = 0.0005
"""Seconds after which a thread then yields the GIL. With Python's 0.005, samples would fall on the
lines that release it; with 0.0005 all the time, two threads that compute would lose a third."""

_WRITE = 0.1
"""Seconds between two writes of the counts: a worker may be killed at any moment."""

_LEAST = 0.1
_MOST = 3
_FEWEST = 25
"""Least fraction of the time of a line that is named, most lines, and fewest samples."""

_READING = {
    False: {Fetch.__call__.__code__, Fetch.read_several.__code__},
    True: _compat.fetch_codes(),
}
"""Functions that read a batch, in any engine of shardkit and in PyTorch's DataLoader. Other stacks
are of threads that wait for work."""


class CodeLine(NamedTuple):
    """A line of code that a sample found."""

    file: str
    line: int
    function: str
    is_own: bool
    """Whether it is the user's, not a library's."""
    is_native: bool
    """Whether it called native code, which has no lines."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of code that takes much of the time."""

    file: str
    line: int
    function: str
    text: str
    """The line itself; empty if its file cannot be read."""
    time: float
    """Fraction of the time that it takes, with all that it calls."""
    is_own: bool
    """Whether it is the user's, not a library's."""
    is_native: bool
    """Whether it spends most of this in native code that it calls itself."""


@dataclass(frozen=True)
class SampledCollate:
    """A collate function whose first call in a process starts to sample the stacks there.

    All engines call it where they read: in threads, in a helper, and in worker processes, however
    these start.
    """

    collate: Callable[[Any], Any]
    folder: str
    """Receives a file of each process. Sampling ends once it is gone."""
    is_stock: bool
    """Whether the loader is PyTorch's DataLoader itself."""

    def __call__(self, samples: Any) -> Any:
        """Return the batch of ``samples``."""
        key = os.getpid(), self.folder
        if key not in _samplers:
            thread = threading.Thread(target=self._sample, daemon=True)
            if _samplers.setdefault(key, thread) is thread:  # several threads may get here
                thread.start()
        return self.collate(samples)

    def _sample(self) -> None:
        """Sample the threads of this process that read, until the folder is gone."""
        counts = Counter[CodeLine]()
        written = 0.0
        target = Path(self.folder, f"{os.getpid()}.json")
        reading = _READING[self.is_stock]
        usual = sys.getswitchinterval()
        draw = random.Random(os.getpid())  # noqa: S311
        try:
            while os.path.isdir(self.folder):
                time.sleep(_INTERVAL)
                sys.setswitchinterval(_SWITCH)
                # This line is reached when a thread releases the GIL, and the sample shall not be.
                time.sleep(_READY * draw.random())
                sys.setswitchinterval(usual)  # from here on, no other thread changes its stack
                _count(counts, reading)
                if time.monotonic() > written + _WRITE:
                    target.with_suffix(".new").write_text(
                        json.dumps([[*line, count] for line, count in counts.items()])
                    )
                    os.replace(target.with_suffix(".new"), target)
                    written = time.monotonic()
        except OSError:  # the folder was moved while this wrote
            return


_samplers: dict[tuple[int, str], threading.Thread] = {}
"""Sampling threads of this process, and dead ones of the process from which it was forked."""


def end_sampling(folder: Path) -> None:
    """Wait until this process no longer samples into a folder that was moved or removed."""
    thread = _samplers.pop((os.getpid(), str(folder)), None)
    if thread is not None:
        thread.join()


def named_lines(folder: Path) -> list[Line]:
    """Return the lines that take most of the time of all processes, the user's first."""
    counts = Counter[CodeLine]()
    for file in folder.glob("*.json"):
        for *line, count in json.loads(file.read_bytes()):
            counts[CodeLine(*line)] += count
    return _largest(counts)


def _count(counts: Counter[CodeLine], reading: Set[CodeType]) -> None:
    """Count the line of each thread that reads. The stacks, and what they refer to, are let go."""
    stacks = sys._current_frames().values()
    counts.update(filter(None, (_code_line(frame, reading) for frame in stacks)))


def _code_line(innermost: FrameType, reading: Set[CodeType]) -> CodeLine | None:
    """Return the line that a stack counts for; None if it does not read.

    Time in a library or in native code belongs to the user's line that called it, or without such
    to the innermost line. Values of variables are not read.
    """
    frame: FrameType | None = innermost
    caller = None
    while isinstance(frame, FrameType) and frame.f_code not in reading:
        if caller is None and not is_library(frame.f_code.co_filename):
            caller = frame
        frame = frame.f_back
    if not isinstance(frame, FrameType):  # a thread that ends may have others
        return None
    at = caller or innermost
    code = at.f_code
    is_native = at is innermost and "CALL" in dis.opname[code.co_code[at.f_lasti]]
    return CodeLine(code.co_filename, at.f_lineno, code.co_qualname, caller is not None, is_native)


def _largest(counts: Counter[CodeLine]) -> list[Line]:
    """Return the largest lines of samples."""
    total = counts.total()
    if total < _FEWEST:
        return []
    lines: Counter[CodeLine] = Counter()
    for line, count in counts.items():
        lines[line._replace(is_native=False)] += count
    named = sorted(
        ((line, count) for line, count in lines.items() if count >= _LEAST * total),
        key=lambda item: (not item[0].is_own, -item[1]),
    )
    return [
        Line(
            file=line.file,
            line=line.line,
            function=line.function,
            text=linecache.getline(line.file, line.line).strip(),
            time=count / total,
            is_own=line.is_own,
            is_native=2 * counts[line._replace(is_native=True)] > count,
        )
        for line, count in named[:_MOST]
    ]
