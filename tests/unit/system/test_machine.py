"""CPUs and memory of a process within control groups of both versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardkit.system import machine
from shardkit.torch.engine import preflight

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 16 CPUs and 64 GiB, 40 of them free, without control groups."""
    memory = SimpleNamespace(total=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "self")


def groups(root: Path, own: str, files: Mapping[str, str]) -> None:
    """Write /proc/self/cgroup and files of control groups."""
    (root / "self").write_text(own)
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_without_control_groups_the_whole_machine_counts() -> None:
    assert machine.cpu_quota() is None
    assert machine.usable_cpus() == machine.affinity() == 16
    assert machine.memory_limit() == 64 * GIB


@pytest.mark.parametrize(
    ("content", "quota", "processors"),
    [
        ("200000 100000", 2.0, 2),
        ("150000 100000", 1.5, 2),
        ("10000 100000", 0.1, 1),
        ("6400000 100000", 64.0, 16),
        ("max 100000", None, 16),
        ("", None, 16),
        ("rubbish", None, 16),
        ("100000 0", None, 16),
    ],
)
def test_a_quota_of_version_2(
    content: str, quota: float | None, processors: int, tmp_path: Path
) -> None:
    groups(tmp_path, "0::/box\n", {"box/cpu.max": content})

    assert machine.cpu_quota() == quota
    assert machine.usable_cpus() == processors
    assert preflight.default_workers() == processors, "loaders heed it too"


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {
        "cpu.max": "max 100000",
        "pod/cpu.max": "300000 100000",
        "pod/box/cpu.max": "800000 100000",
        "pod/memory.max": f"{8 * GIB}",
        "pod/box/memory.max": "max",
        "other/cpu.max": "100000 100000",
    }
    groups(tmp_path, "0::/pod/box\n", files)

    assert machine.cpu_quota() == 3.0
    assert machine.memory_limit() == 8 * GIB


@pytest.mark.parametrize(
    ("quota", "memory", "processors", "limit"),
    [("400000", f"{4 * GIB}", 4, 4 * GIB), ("-1", "9223372036854771712", 16, 64 * GIB)],
    ids=["limits", "no limits"],
)
def test_version_1_has_a_tree_for_each_controller(
    tmp_path: Path, quota: str, memory: str, processors: int, limit: int
) -> None:
    files = {
        "cpu/box/cpu.cfs_quota_us": quota,
        "cpu/box/cpu.cfs_period_us": "100000",
        "memory/box/memory.limit_in_bytes": memory,
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups(tmp_path, "4:memory:/box\n3:cpu:/box\n1:name=systemd:/box\n", files)

    assert machine.usable_cpus() == processors
    assert (machine.cpu_quota() is None) == (quota == "-1")
    assert machine.memory_limit() == limit


def test_a_group_that_is_named_from_outside_ends_at_the_root(tmp_path: Path) -> None:
    """In a container, the name may be the host's, whose folders do not exist there."""
    groups(tmp_path, "0::/host/docker/abc\n", {"cpu.max": "200000 100000"})

    assert machine.usable_cpus() == 2


def test_affinity_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)

    assert machine.usable_cpus() == 2


def test_the_file_system_is_that_of_the_nearest_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint="/data", fstype="xfs"),
        SimpleNamespace(mountpoint="/data", fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)

    assert machine.filesystem(Path("/data/photos")) == ("nfs4", "/data")
    assert machine.filesystem(Path("/database")) == ("ext4", "/")


def test_the_load_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda seconds: 50.0)
    load = machine.other_load()
    assert str(load) == "other processes used 2.0 of 4 CPUs at the start"
    assert load.disturbs
    assert not machine.OtherLoad(busy=0.0, present=4).disturbs


def test_the_own_cpu_time_is_not_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0.0, 10.0, 1.0), (10.0, 25.0, 6.0)])
    monkeypatch.setattr(machine, "_cpu_times", lambda: next(times))

    assert machine.CpuMeter().other_load().busy == 1.0


def test_cpu_times_include_this_process() -> None:
    elapsed, busy, own = machine._cpu_times()

    assert 0 < own <= busy
    assert elapsed > 0
