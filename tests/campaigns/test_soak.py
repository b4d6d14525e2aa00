"""Fifty epochs: memory, open files, shared memory, threads and processes do not grow."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import make_dataset, make_tree, png, wait_until

from shardkit import BlockShuffle, RandomResizedCrop, make_loader, open_dataset
from shardkit.torch.loader import Loader

EPOCHS = 50
WARM_UP = 10
ROWS = 20
BATCH = 4
SIDE = 192
GROWTH = 8_000_000
"""Bytes that a process may grow by after warming up, of caches and of the allocator. The images of
a batch are 442 KB: to lose one block in each epoch would be 18 MB in the end."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 20 images in five shards."""
    root = tmp_path_factory.mktemp("soak")
    make_tree(root / "photos", {f"{'ab'[n % 2]}/{n:02d}.png": png(40, 30, n) for n in range(ROWS)})
    return make_dataset(root / "photos", root / "made", to="webdataset")


def new_loader(root: Path, engine: Any, **options: Any) -> Loader:
    dataset = open_dataset(root, decode=RandomResizedCrop(SIDE))
    chosen: dict[str, Any] = {"num_workers": 2, "start_method": "fork", "timeout": 60.0, **options}
    return make_loader(
        dataset, BATCH, shuffle=BlockShuffle(rows=2, buffer=8), engine=engine, **chosen
    )


class Things(NamedTuple):
    """What is open or running: of this process and its workers."""

    files: frozenset[tuple[int, str, str]]
    """Process, number and path of each open file."""
    shared: frozenset[tuple[int, str]]
    """Process and line of each mapping of shared memory."""
    threads: frozenset[int | None]
    """Threads of this process."""
    processes: frozenset[int]


class Use(NamedTuple):
    """What this process and its workers use, without the things of earlier tests."""

    files: int
    shared: int
    threads: int
    processes: int
    memory: int
    """Resident bytes of this process that are its own."""
    num_workers: int
    """The same of all workers."""


def things() -> Things:
    gc.collect()
    children = {child.pid for child in multiprocessing.active_children() if child.pid}
    files, shared = set(), set()
    for pid in {os.getpid(), *children}:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # such as the one that lists them
                files.add((pid, path.name, os.readlink(path)))
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        shared |= {(pid, line) for line in maps if "/dev/shm" in line}
    return Things(
        files=frozenset(files),
        shared=frozenset(shared),
        threads=frozenset(thread.native_id for thread in threading.enumerate()),
        processes=frozenset(children),
    )


def in_use(before: Things) -> Use:
    """Return what is in use now and was not ``before``: things of earlier tests end at any time."""
    now = things()
    return Use(
        files=len(now.files - before.files),
        shared=len(now.shared - before.shared),
        threads=len(now.threads - before.threads),
        processes=len(now.processes - before.processes),
        memory=_resident(os.getpid()),
        num_workers=sum(map(_resident, now.processes - before.processes)),
    )


def _resident(pid: int) -> int:
    """Return the bytes of a process that are in memory, without those shared with others."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def whole(loader: Loader, epoch: int) -> None:
    """Read all of an epoch."""
    assert sum(len(labels) for _, labels in loader) == ROWS


def broken_off(loader: Loader, epoch: int) -> None:
    """Read an epoch, or leave it in the midst, with batches under way."""
    stop = epoch % 4 + 1
    assert sum(1 for _ in itertools.islice(loader, stop)) == stop


def held_on_to(loader: Loader, epoch: int) -> None:
    """Read an epoch and keep its batches to the end of it, more than there are slots and blocks."""
    assert len(list(loader)) == ROWS // BATCH


def raising(loader: Loader, epoch: int) -> None:
    """Leave an epoch by an error in the loop."""

    def train() -> None:
        for _ in loader:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        train()


def resumed(loader: Loader, epoch: int) -> None:
    """Save and load a state in each epoch."""
    state = loader.state_dict()
    assert len(list(itertools.islice(loader, 2))) == 2
    loader.load_state_dict(state)
    whole(loader, epoch)


USES = (whole, broken_off, held_on_to, raising, resumed)


@pytest.mark.measures
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_fifty_epochs_leave_nothing_behind(
    root: Path, engine: str, use: Callable[[Loader, int], None]
) -> None:
    before = things()
    with closing(new_loader(root, engine)) as loader:
        held = [list(loader) for _ in range(4)]  # all blocks and slots that there may be
        del held
        for epoch in range(WARM_UP):
            use(loader, epoch)
        warm = settled(loader, before)
        for epoch in range(WARM_UP, EPOCHS):
            use(loader, epoch)
        after = settled(loader, before)
        assert after[:4] == warm[:4]
        assert after.memory - warm.memory < GROWTH
        assert after.num_workers - warm.num_workers < GROWTH
    wait_until(lambda: not in_use(before).processes, "the workers' end")
    wait_until(lambda: not in_use(before).threads, "the threads' end")


def settled(loader: Loader, before: Things) -> Use:
    """Return what is in use between two epochs, when no batch is under way."""
    whole(loader, 0)
    return in_use(before)


@pytest.mark.measures
@pytest.mark.parametrize("engine", ["thread", "process"])
def test_loaders_that_are_dropped_leave_nothing_behind(root: Path, engine: str) -> None:
    before, uses = things(), []
    for number in range(12):
        loader = new_loader(root, engine)
        batches = iter(loader)
        next(batches)
        if number % 2:
            loader.close()
        del loader, batches
        uses.append(in_use(before))
        assert uses[-1].processes == 0
    assert all(now <= then for now, then in zip(uses[-1][:4], uses[2][:4], strict=True))
    assert uses[-1].memory - uses[2].memory < GROWTH


class Large:
    """A dataset of large tensors in memory of their own: each is copied to a fresh shared file."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.zeros(1 << 20)


def test_loaders_that_are_closed_early_leave_no_shared_memory() -> None:
    """A worker may be in the middle of making a shared file."""
    shared = Path("/dev/shm")
    pids = set()
    for number in range(20):
        options: dict[str, Any] = {
            "engine": "process",
            "num_workers": 2,
            "start_method": "fork",
            "collate_fn": list,
        }
        loader = make_loader(Large(), 4, **options)
        batches = iter(loader)
        for _ in range(1 + number % 3):
            next(batches)
        pids |= {process.pid for process in loader._engine._crew.processes}  # type: ignore[attr-defined]
        loader.close()
    left = [each for pid in pids for each in shared.glob(f"torch_{pid}_*")]
    for each in left:
        each.unlink()
    assert left == []


@pytest.mark.measures
def test_workers_that_do_not_persist_leave_nothing_behind(root: Path) -> None:
    with closing(new_loader(root, "process", persistent_workers=False)) as loader:
        whole(loader, 0)  # starts what a process keeps, such as the resource tracker
    before = things()
    memory = in_use(before).memory
    loader = new_loader(root, "process", persistent_workers=False)
    for epoch in range(12):
        whole(loader, epoch)
        assert in_use(before).processes == 0
    loader.close()
    del loader
    after = in_use(before)
    assert after[:4] == (0, 0, 0, 0)
    assert after.memory - memory < GROWTH
