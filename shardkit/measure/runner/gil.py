"""How much of its time some work holds the interpreter's lock, so that threads cannot share it."""

from __future__ import annotations

import sys
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

_IDLE_SECONDS = 0.1
"""How long the probe is tried while nothing holds the lock: a busy machine is late then, too."""

_LATEST = 0.8
"""Part of the switch interval that is late on any machine: Python code comes later than that."""

_LOOKS = 3


def held_share(work: Callable[[], object], seconds: float = 0.5) -> float:
    """Return the share of time, 0 to 1, in which ``work`` holds the interpreter's lock.

    A thread beside it wakes again and again, and looks whether it gets the lock at once. What is
    held in pieces below a third of a millisecond, between calls that release it, is not seen: other
    threads get in there. Processors that are taken by others make it look larger: so what counts as
    late is what is late beside a thread that sleeps, and the least of three looks is taken.

    Args:
        work: Called again and again in this thread.
        seconds: For how long, and a tenth of a second more; one call at the least.
    """
    work()  # what is done once, such as imports, does not count
    late = late_here()
    end = time.perf_counter() + seconds
    shares = [_look(work, seconds / _LOOKS).share_beyond(late)]
    while len(shares) < _LOOKS and time.perf_counter() < end:
        shares.append(_look(work, seconds / _LOOKS).share_beyond(late))
    return min(shares)


def late_here() -> float:
    """Return how late, in seconds, a probe has to be here until the lock must have been held."""
    idle = _look(lambda: time.sleep(_IDLE_SECONDS), 0.0).lates
    usual = sorted(idle)[int(0.95 * (len(idle) - 1))] if idle else 0.0
    return max(_LATE_SECONDS, min(usual, _LATEST * sys.getswitchinterval()))


def _look(work: Callable[[], object], seconds: float) -> _Probe:
    probe = _Probe()
    probe.start()
    try:
        end = time.perf_counter() + seconds
        work()
        while time.perf_counter() < end:
            work()
    finally:
        probe.stop()
    return probe


class _Probe:
    """Wakes often, and notes how late."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shardkit-gil-probe", daemon=True)
        self._stopped = threading.Event()
        self.lates: list[float] = []
        """Seconds that each was late."""

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def share_beyond(self, late: float) -> float:
        """Return the part of the time in which probes found the lock held: they were later.

        Probes are not counted but weighed: while it is held one takes long, and others as long
        meanwhile would have found the same.
        """
        taken = [_PROBE_SECONDS + each for each in self.lates]
        held = sum(each for each in taken if each - _PROBE_SECONDS > late)
        return held / sum(taken) if taken else 0.0

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = time.perf_counter()
            time.sleep(_PROBE_SECONDS)
            self.lates.append(time.perf_counter() - begun - _PROBE_SECONDS)
