"""What this machine gives to this process: processors, memory, file systems, within its limits."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 where there is no limit."""
_DISTURBS = 0.25
"""Part of the processors that others may use before it tells on what is measured."""


def processors() -> int:
    """Return the number of processors that this process may use: its affinity, within its quota.

    A container that was given two processors of 64 by ``--cpus`` sees all 64 in its affinity; what
    is started for each of them is then held up together.
    """
    quota = processor_quota()
    allowed = affinity()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def affinity() -> int:
    """Return the number of processors that the kernel may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_quota() -> float | None:
    """Return the processors' worth of time that this process's control group has, or None."""
    found = []
    for folder in _control_groups("cpu"):
        both = _words(folder / "cpu.max")
        if not both:
            both = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(both) == 2 and all(each.isdecimal() for each in both) and int(both[1]):
            found.append(int(both[0]) / int(both[1]))
    return min(found, default=None)


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its group's limit."""
    return min([psutil.virtual_memory().total, *_group_limits()])


def memory_available() -> int:
    """Return the bytes of memory that this process could still take without swapping."""
    available: int = psutil.virtual_memory().available
    for folder in _control_groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            # What the group's page cache holds can be given up.
            cached = _statistic(folder / "memory.stat", "inactive_file")
            available = min(available, max(0, limit - used + cached))
    return available


@dataclass(frozen=True, kw_only=True)
class OtherLoad:
    """What others do on this machine while something is to be measured."""

    busy: float
    """Processors in use."""
    present: int
    """Processors of the machine."""

    def __str__(self) -> str:
        return f"others used {self.busy:.1f} of {self.present} processors when this began"

    @property
    def disturbs(self) -> bool:
        """Whether it tells on what is measured."""
        return self.busy > _DISTURBS * self.present


def other_load(seconds: float = 0.3) -> OtherLoad:
    """Look at what others do during the next ``seconds``."""
    present = os.cpu_count() or 1
    share: float = psutil.cpu_percent(seconds)
    return OtherLoad(busy=share / 100 * present, present=present)


def filesystem(path: Path) -> tuple[str, str]:
    """Return the kind of the file system that ``path`` lies on, and where it is mounted.

    Returns:
        Two empty strings if the system does not tell.
    """
    path = path.resolve()
    mounts = [
        (Path(each.mountpoint), str(each.fstype)) for each in psutil.disk_partitions(all=True)
    ]
    over = [(place, kind) for place, kind in mounts if path == place or place in path.parents]
    # Of two on one place the later hides the earlier.
    place, kind = max(reversed(over), key=lambda each: len(each[0].parts), default=("", ""))
    return kind, str(place)


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group and those above it."""
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
    """Return the number in the first of some files that has one."""
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
