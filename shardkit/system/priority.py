"""Priority of a thread: its nice value. Linux keeps one for each thread, other systems do not."""

from __future__ import annotations

import os
import sys

LOW = 19
"""The lowest priority: next to a busy thread of normal priority, about 1.5% of a CPU."""


def lower_priority() -> None:
    """Give the calling thread, and those that it starts from now on, the lowest priority.

    Without privileges it cannot be raised again.
    """
    os.setpriority(os.PRIO_PROCESS, 0, LOW)


def priority_problem() -> str | None:
    """Return why this system cannot lower the priority of a thread, or None."""
    if sys.platform != "linux":
        return "only Linux has per-thread priorities"
    try:  # a sandbox may forbid even to set the current value
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0))
    except OSError as error:
        return f"this system does not let a thread set its priority ({error.strerror})"
    return None
