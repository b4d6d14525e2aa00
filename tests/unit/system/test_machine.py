"""CPUs and memory within control groups, priorities of threads, and turns of processes."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from colliding import collide
from helpers import encoded, jpeg, make_tree, picture, png
from PIL import Image

from shardkit import convert, make_loader, open_dataset
from shardkit.codecs import limits
from shardkit.codecs.image import decode, decode_mask, inspect
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import FOREIGN_FIELD, Record
from shardkit.system import machine
from shardkit.system.pool import run_tasks
from shardkit.system.priority import LOW, lower_priority, priority_problem
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


# The priority of a thread: lowered for it and for threads that it starts, and for no other.

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has threads' priorities")


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


@linux
def test_a_thread_lowers_itself_and_its_threads_only() -> None:
    before, values = nice(), list[int]()

    def call() -> None:
        lower_priority()
        values.append(nice())
        in_thread(lambda: values.append(nice()))

    in_thread(call)
    assert values == [LOW, LOW]
    assert nice() == before


@linux
def test_asking_changes_nothing() -> None:
    before = nice()
    assert priority_problem() is None
    assert nice() == before


def test_other_systems_and_sandboxes_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, value: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "linux")
        patch.setattr(os, "setpriority", refuse)
        assert "Operation not permitted" in str(priority_problem())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "only Linux" in str(priority_problem())


# One at a time: threads and processes that share work take turns.


def test_processes_take_turns(tmp_path: Path) -> None:
    tasks = [tmp_path / "turn"] * 3
    assert [found for _, found in run_tasks(collide, tasks, workers=3)] == [0, 0, 0]


def test_threads_take_turns(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(collide, [tmp_path / "turn"] * 3)] == [0, 0, 0]


class Colliding:
    """A transform that counts collisions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, _: object) -> int:
        return collide(self.path)


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_of_a_loader_take_turns(tmp_path: Path, start_method: str) -> None:
    source = make_tree(tmp_path / "photos", {f"a/{n}.png": png() for n in range(4)})
    convert(source, tmp_path / "set", to="lmdb", workers=1)
    dataset = open_dataset(tmp_path / "set", transform=Colliding(tmp_path / "turn"))
    options: dict[str, Any] = {"engine": "process", "num_workers": 2, "start_method": start_method}
    loader = make_loader(dataset, batch_size=1, **options)
    try:
        assert [int(found) for found, _ in loader] == [0] * 4
    finally:
        loader.close()


LARGE = {
    "jpg": jpeg(40, 40),
    "png": png(40, 40),
    "webp": encoded(picture(40, 40), "WEBP"),
    "gif": encoded(picture(40, 40), "GIF"),
    "tiff": encoded(picture(40, 40), "TIFF"),
    "bmp": encoded(picture(40, 40), "BMP"),
    "ppm": encoded(picture(40, 40), "PPM"),
    FOREIGN_FIELD: encoded(picture(40, 40), "TGA"),
}


@pytest.mark.parametrize("field", LARGE)
def test_large_images_are_decoded_in_turn(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, turns = 0, 0

    @contextmanager
    def turn() -> Iterator[None]:
        nonlocal depth, turns
        depth, turns = depth + 1, turns + 1
        yield
        depth -= 1

    monkeypatch.setattr(limits, "in_turn", turn)
    data = LARGE[field]
    recipe = Recipe(encode="png", resize=8)
    steps = (
        partial(inspect, encoded(picture(40, 40), "WEBP"), "webp"),  # opening it takes memory
        partial(decode, data, field),
        partial(decode_mask, data, field),
        partial(convert_record, recipe, Record("a", {field: data})),
    )
    for step in steps:
        step()
    assert turns == 0
    monkeypatch.setattr(limits, "LARGE_PIXELS", 1599)
    resize = Image.Image.resize
    monkeypatch.setattr("shardkit.system.compiled.resize", lambda *_: None)
    # It has the same limit, and leaves larger images to Python.
    monkeypatch.setattr("shardkit.system.compiled.decode_png", lambda *_: None)

    def resized(*arguments: object) -> Image.Image:
        assert depth > 0  # the pixels are in memory
        return resize(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", resized)
    for step in steps:
        before = turns
        step()
        assert turns > before
        assert depth == 0
    assert np.array_equal(decode(data, field).shape, (40, 40, 3))
