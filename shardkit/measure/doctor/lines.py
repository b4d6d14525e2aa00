"""The lines of code in which loading spends its time, by samples of the stack."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_INTERVAL = 0.005
"""Seconds between samples; one takes about 20 microseconds."""

_SWITCH = 0.0005
"""Seconds after which the sampled thread yields the GIL. With Python's 0.005, samples would fall on
the lines that release it."""

_LEAST, _MOST, _FEWEST = 0.1, 3, 20
"""Least fraction of the time of a line that is named, most lines, and fewest samples."""

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    )
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")

_Place = tuple[str, int, str]
"""File, line and function."""


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


class LineSampler:
    """Samples of the stack of the calling thread, while `running`.

    Time in a library or in native code belongs to the line of the user's code that called it, or
    without such to the innermost line. It never reads the value of a variable.
    """

    def __init__(self) -> None:
        self._own: Counter[_Place] = Counter()
        self._others: Counter[_Place] = Counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Sample the calling thread within the context."""
        target, stop = threading.get_ident(), threading.Event()
        outer = sys._getframe(2)  # that of the caller, whose own lines do not count

        def sample() -> None:
            while not stop.wait(_INTERVAL):
                frame = sys._current_frames().get(target)
                if frame is not None:
                    self._add(frame, outer)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        usual = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH)
        try:
            yield
        finally:
            sys.setswitchinterval(usual)
            stop.set()
            thread.join()

    def lines(self) -> list[Line]:
        """Return the lines that take most of the time, those of the user's code first."""
        total = self._own.total() + self._others.total()
        if total < _FEWEST:
            return []
        found = [
            (place, count / total)
            for counter in (self._own, self._others)
            for place, count in counter.most_common(_MOST)
            if count >= _LEAST * total
        ]
        return [
            Line(
                file=file,
                line=number,
                function=function,
                text=linecache.getline(file, number).strip(),
                time=part,
            )
            for (file, number, function), part in found[:_MOST]
        ]

    def _add(self, frame: FrameType, outer: FrameType) -> None:
        """Count the line of a sampled stack."""
        innermost, at = frame, frame
        while at is not outer:
            if not is_library(at.f_code.co_filename):
                self._own[_place(at)] += 1
                return
            if at.f_back is None:
                break
            at = at.f_back
        self._others[_place(innermost)] += 1


def _place(frame: FrameType) -> _Place:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname


def is_library(file: str) -> bool:
    """Return whether a file is of Python, of an installed package or of shardkit."""
    if file.startswith("<") or _INSTALLED.search(file):
        return True
    return os.path.realpath(file).startswith(_LIBRARIES)
