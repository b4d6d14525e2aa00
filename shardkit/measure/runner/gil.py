"""How much of its time some work holds the GIL, so that threads cannot share it.

A thread wakes a few hundred times and counts how often the GIL is held. Comparing the time of two
threads with one gives the same answer, but on a busy machine only after many seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

HOLDS = 0.5
"""Minimum fraction of the time for which work that holds the GIL blocks other threads."""

_PROBE_SECONDS = 0.001
_IDLE_SECONDS = 0.1
_TRIES = 3
"""Sleep of the probe before it asks for the GIL again; time to measure its delay without load."""

_LATE_SECONDS = 0.0003
"""From this delay on, the GIL was held: a free one takes 0.1 ms, Python releases it after 5 ms."""


def held_fraction(work: Callable[[], object], seconds: float) -> float:
    """Return the fraction of time, 0 to 1, in which ``work`` holds the GIL.

    Other processes make the fraction larger, so the threshold is measured first, and the smallest
    of three counts.
    """
    work()  # imports and other one-time work do not count
    late = late_here()
    end = time.perf_counter() + seconds
    fractions = [late_fraction(_probe(work, seconds / _TRIES), late)]
    while len(fractions) < _TRIES and time.perf_counter() < end:
        fractions.append(late_fraction(_probe(work, seconds / _TRIES), late))
    return min(fractions)


def late_here() -> float:
    """Return from how many seconds of delay on the GIL must have been held on this machine."""
    idle = sorted(_probe(lambda: time.sleep(_IDLE_SECONDS), 0.0))
    usual = idle[int(0.95 * (len(idle) - 1))] if idle else 0.0
    return max(_LATE_SECONDS, min(usual, 0.8 * sys.getswitchinterval()))


def late_fraction(delays: list[float], late: float) -> float:
    """Return the fraction of the time, not of the probes, with delays longer than ``late``."""
    total = sum(_PROBE_SECONDS + delay for delay in delays)
    return sum(_PROBE_SECONDS + delay for delay in delays if delay > late) / total if total else 0.0


def _probe(work: Callable[[], object], seconds: float) -> list[float]:
    """Return how many seconds late each wake-up of a thread was while ``work`` ran."""
    delays: list[float] = []
    stopped = threading.Event()

    def run() -> None:
        while not stopped.is_set():
            start = time.perf_counter()
            time.sleep(_PROBE_SECONDS)
            delays.append(time.perf_counter() - start - _PROBE_SECONDS)

    thread = threading.Thread(target=run, name="shardkit-gil-probe", daemon=True)
    thread.start()
    try:
        end = time.perf_counter() + seconds
        work()
        while time.perf_counter() < end:
            work()
    finally:
        stopped.set()
        thread.join()
    return delays
