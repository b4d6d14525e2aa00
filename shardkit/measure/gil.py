"""How much of its time some work holds the interpreter's lock, so that threads cannot share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

HOLDS = 0.5
"""Part of its time from which on work that holds the interpreter's lock stops threads."""

_PROBE_SECONDS = 0.001
"""How long a probe sleeps, which needs no lock, before it asks for the lock again."""

_LATE_SECONDS = 0.0003
"""A probe that gets the lock this much later found it held: a free one is had after some 0.1 ms,
one that Python code holds when it is released, or after ``sys.getswitchinterval()``, 5 ms."""


def held_share(work: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the share of time, 0 to 1, in which ``work`` holds the interpreter's lock.

    A thread beside it wakes again and again, and looks whether it gets the lock at once. What is
    held in pieces below a third of a millisecond, between calls that release it, is not seen: other
    threads get in there. Processors that are taken by others make it look larger.

    Args:
        work: Called again and again in this thread.
        seconds: For how long; one call at the least.
    """
    probe = _Probe()
    work()  # what is done once, such as imports, does not count
    probe.start()
    try:
        end = time.perf_counter() + seconds
        work()
        while time.perf_counter() < end:
            work()
    finally:
        probe.stop()
    return probe.share


class _Probe:
    """Wakes often, and notes how late."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shardkit-gil-probe", daemon=True)
        self._stopped = threading.Event()
        self._held = self._seconds = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    @property
    def share(self) -> float:
        """The part of the time in which probes found the lock held.

        Probes are not counted but weighed: while it is held one takes long, and others as long
        meanwhile would have found the same.
        """
        return self._held / self._seconds if self._seconds else 0.0

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = time.perf_counter()
            time.sleep(_PROBE_SECONDS)
            late = time.perf_counter() - begun - _PROBE_SECONDS
            self._seconds += _PROBE_SECONDS + late
            self._held += _PROBE_SECONDS + late if late > _LATE_SECONDS else 0.0
