"""The CPU use of other processes, which disturbs measurements."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

_DISTURBS = 0.25
"""Fraction of the CPUs that other processes may use before they disturb a measurement."""


@dataclass(frozen=True, kw_only=True)
class OtherLoad:
    """CPU use by other processes during a measurement."""

    busy: float
    """CPUs in use."""
    present: int
    """CPUs of the machine."""

    def __str__(self) -> str:
        return f"other processes used {self.busy:.1f} of {self.present} CPUs at the start"

    @property
    def disturbs(self) -> bool:
        """Whether it is high enough to disturb a measurement."""
        return self.busy > _DISTURBS * self.present


def other_load(seconds: float = 0.3) -> OtherLoad:
    """Measure the CPU use of other processes for ``seconds``."""
    present = os.cpu_count() or 1
    percent: float = psutil.cpu_percent(seconds)
    return OtherLoad(busy=percent / 100 * present, present=present)


class CpuMeter:
    """Measures the CPU use of other processes from its creation on."""

    def __init__(self) -> None:
        self._start = _cpu_times()

    def other_load(self) -> OtherLoad:
        """Return the load so far, without this process and its children that have ended."""
        now, all_cpus, ours = (
            new - old for new, old in zip(_cpu_times(), self._start, strict=True)
        )
        busy = max(0.0, all_cpus - ours) / max(now, 1e-9)
        return OtherLoad(busy=busy, present=os.cpu_count() or 1)


def _cpu_times() -> tuple[float, float, float]:
    """Return the time, the seconds that all CPUs computed, and those for this process."""
    times = psutil.cpu_times()
    process = os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is part of the users'.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return process.elapsed, sum(times) - idle - guests, sum(process[:4])
