"""CPUs, memory and file systems that this process may use, within its limits."""

from __future__ import annotations

import math
import os
from pathlib import Path

from shardkit.system.late import load

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


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
    quotas = []
    for folder in _control_groups("cpu"):
        both = _words(folder / "cpu.max")
        if not both:
            both = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(both) == 2 and all(number.isdecimal() for number in both) and int(both[1]):
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None)


def memory_limit() -> int:
    """Return the memory that this process may use, in bytes: the machine's or its group's limit."""
    limits = [
        int(words[0])
        for folder in _control_groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (words := _words(folder / name)) and words[0].isdecimal()
    ]
    # Without a limit, version 2 states "max", and version 1 a number near 2**63.
    return min([int(load("psutil:virtual_memory")().total), *limits])


def free_memory() -> int:
    """Return the memory that this process may still allocate, in bytes."""
    below_limit = memory_limit() - int(load("psutil:Process")().memory_info().rss)
    return max(0, min(int(load("psutil:virtual_memory")().available), below_limit))


def filesystem(path: Path) -> tuple[str, str]:
    """Return the type of the file system of ``path`` and its mount point; "" and "" if unknown."""
    path = path.resolve()
    listed = load("psutil:disk_partitions")(all=True)
    mounts = [(Path(mount.mountpoint), str(mount.fstype)) for mount in listed]
    over = [
        (mountpoint, kind)
        for mountpoint, kind in mounts
        if path == mountpoint or mountpoint in path.parents
    ]
    # A later mount hides an earlier one at the same place.
    mountpoint, kind = max(reversed(over), key=lambda mount: len(mount[0].parts), default=("", ""))
    return kind, str(mountpoint)


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of this process's control group and its ancestors."""
    try:
        lines = _OWN_GROUPS.read_text("ascii", "replace").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, _, fields = line.partition(":")
        controllers, _, name = fields.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        lowest = root / name.lstrip("/")
        folders += [
            group for group in (lowest, *lowest.parents) if group == root or root in group.parents
        ]
    return folders


def _words(path: Path) -> list[str]:
    try:
        return path.read_text("ascii", "replace").split()
    except OSError:
        return []
