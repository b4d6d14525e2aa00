"""CPUs, memory and file systems that this process may use, within its limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 reports a number near 2**63 for no limit."""
_DISTURBS = 0.25
"""Fraction of the CPUs that other processes may use before they disturb a measurement."""


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use: its affinity, capped by its quota.

    A container started with ``--cpus 2`` on a machine with 64 CPUs has all 64 in its affinity, but
    64 workers would share the time of two.
    """
    quota = cpu_quota()
    allowed = affinity()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def affinity() -> int:
    """Return the number of CPUs in this process's affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # pragma: no cover - not Linux


def cpu_quota() -> float | None:
    """Return the CPU quota of this process's control group in CPUs, or None if unlimited."""
    found = []
    for folder in _control_groups("cpu"):
        both = _words(folder / "cpu.max")
        if not both:
            both = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(both) == 2 and all(each.isdecimal() for each in both) and int(both[1]):
            found.append(int(both[0]) / int(both[1]))
    return min(found, default=None)


def memory_limit() -> int:
    """Return the memory that this process may use, in bytes: the machine's or its group's limit."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def memory_available() -> int:
    """Return the memory that this process can still allocate without swapping, in bytes."""
    available: int = psutil.virtual_memory().available
    for folder in _control_groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            # The kernel can reclaim the group's inactive page cache.
            cached = _statistic(folder / "memory.stat", "inactive_file")
            available = min(available, max(0, limit - used + cached))
    return available


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
        now, all_cpus, own = (new - old for new, old in zip(_cpu_times(), self._start, strict=True))
        busy = max(0.0, all_cpus - own) / max(now, 1e-9)
        return OtherLoad(busy=busy, present=os.cpu_count() or 1)


def _cpu_times() -> tuple[float, float, float]:
    """Return the time, the seconds that all CPUs computed, and those for this process."""
    times, own = psutil.cpu_times(), os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' time is part of the users'.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return own.elapsed, sum(times) - idle - guests, sum(own[:4])


def filesystem(path: Path) -> tuple[str, str]:
    """Return the type of the file system of ``path`` and its mount point.

    Returns:
        Two empty strings if unknown.
    """
    path = path.resolve()
    mounts = [
        (Path(each.mountpoint), str(each.fstype)) for each in psutil.disk_partitions(all=True)
    ]
    over = [(place, kind) for place, kind in mounts if path == place or place in path.parents]
    # A later mount hides an earlier one at the same place.
    place, kind = max(reversed(over), key=lambda each: len(each[0].parts), default=("", ""))
    return kind, str(place)


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors."""
    try:
        lines = _OWN_GROUPS.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        place = root / name.lstrip("/")
        folders += [
            each for each in (place, *place.parents) if each == root or root in each.parents
        ]
    return folders


def _group_limits() -> list[int]:
    limits = [
        _number(folder, "memory.max", "memory.limit_in_bytes")
        for folder in _control_groups("memory")
    ]
    return [limit for limit in limits if limit is not None and limit < _UNLIMITED]


def _number(folder: Path, *names: str) -> int | None:
    """Return the number in the first of the files that holds one."""
    for name in names:
        words = _words(folder / name)
        if words and words[0].isdecimal():
            return int(words[0])
    return None


def _statistic(path: Path, name: str) -> int:
    words = _words(path)
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    return int(pairs.get(name, 0))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").split()
    except OSError:
        return []
