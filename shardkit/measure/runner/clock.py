"""The time that something takes on an idle machine, and of that the time on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Cost = npt.NDArray[np.float64]
"""Seconds as on an idle machine, and of these the seconds on a CPU."""

_T = TypeVar("_T")


def timed(work: Callable[[], _T]) -> tuple[Cost, _T]:
    """Do something, and return its cost and result."""
    start = _clock()
    value = work()
    return _clock() - start, value


def _clock() -> Cost:
    """Return the time without that in which this thread waited for a CPU, and the CPU time."""
    file = _schedule()
    waited = 0 if file is None else int(os.pread(file, 64, 0).split()[1])
    return np.array((time.perf_counter() - waited / 1e9, time.process_time()))


@cache
def _schedule() -> int | None:
    """Return the file in which Linux states how long this thread waited; None elsewhere."""
    try:
        return os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return None
