"""What is special to the thread engine: threads at once, their memory, hangs and the end of Python.

Order, prefetching, failures and abandoned epochs are laws of `test_engine_conformance.py`.
"""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import Crew
from helpers import DEADLINE, make_dataset, make_tree, png, wait_until
from loading import close
from torch.utils.data import Dataset

from shardkit import RandomResizedCrop, ShardDataset, make_loader, open_dataset
from shardkit.torch.engine import threads as engine_module
from shardkit.torch.engine.threads import _RUNNING

ROWS = 24
BATCH = 2
BATCHES = ROWS // BATCH

Hook = Callable[[int], object]


class Rows(Dataset[int]):
    """The numbers of its rows; a hook is called with each before it is given."""

    def __init__(self, hook: Hook = bool) -> None:
        self.hook = hook

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        self.hook(row)
        return row


def load(hook: Hook = bool, **options: Any) -> Any:
    given = {"engine": "thread", "num_workers": 1, "timeout": DEADLINE, **options}
    return make_loader(Rows(hook), BATCH, **given)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


IN_ORDER = np.arange(ROWS).reshape(BATCHES, BATCH).tolist()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    crew = Crew()
    yield
    crew.ends()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LMDB dataset of 24 images of 12 x 8 pixels."""
    root = tmp_path_factory.mktemp("threads")
    files: dict[str, bytes | None] = {f"a/{n:02d}.png": png(12, 8, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "made")


def test_all_threads_work_at_once_and_no_more() -> None:
    together = threading.Barrier(3)
    lock, now, most = threading.Lock(), 0, 0

    def hook(row: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        if row % BATCH == 0 and row < 3 * BATCH:
            together.wait(DEADLINE)  # passed only by three threads in three batches
        with lock:
            now -= 1

    assert numbers(load(hook, num_workers=3, prefetch_factor=3)) == IN_ORDER
    assert most == 3


def has_read(read: list[int], rows: int) -> bool:
    return len(read) == rows


@pytest.mark.parametrize(("num_workers", "factor"), [(0, 1), (1, 1), (1, 4), (2, 2), (3, 40)])
def test_prefetch_limits_the_batches_in_progress(num_workers: int, factor: int) -> None:
    read: list[int] = []
    loader = load(read.append, num_workers=num_workers, prefetch_factor=factor)
    for given, _ in enumerate(loader, 1):
        most = min(ROWS, (given + num_workers * factor) * BATCH)
        wait_until(partial(has_read, read, most), "all batches that may be read")
    assert sorted(read) == list(range(ROWS))


def test_threads_that_pin_use_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's current device is that of a thread: 0 in a new one."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(engine_module, "pin", lambda batch: batch)
    assert numbers(load(num_workers=2)) == IN_ORDER
    assert devices == [3, 3]
    assert numbers(load(num_workers=2, pin_memory=False)) == IN_ORDER
    assert devices == [3, 3], "without pinned memory CUDA is not used"


@pytest.mark.parametrize("prefetch", [1, 3])
def test_memory_is_two_batches_plus_the_prefetched(
    images: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    empty = np.empty

    def counted(shape: Any, *more: Any, **options: Any) -> Any:
        nonlocal made
        made += shape == BATCH * 8 * 12 * 3
        return empty(shape, *more, **options)

    monkeypatch.setattr(np, "empty", counted)
    dataset = open_dataset(images, decode="torch")
    options: dict[str, Any] = {"engine": "thread", "num_workers": 1}
    loader = make_loader(dataset, BATCH, prefetch_factor=prefetch, **options)
    for _ in range(3):
        for batch in loader:  # one is held while the next is asked for
            assert batch[0].shape == (BATCH, 3, 8, 12)
        del batch
    assert 0 < made <= prefetch + 2


def test_small_batches_are_read_at_once_and_equal_single_ones(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of several batches: with repeated rows, random crops, rows, and several epochs."""
    sizes: list[int] = []
    read = ShardDataset.__getitems__

    def counted(self: ShardDataset, rows: Any) -> Any:
        sizes.append(len(rows))
        return read(self, rows)

    monkeypatch.setattr(ShardDataset, "__getitems__", counted)
    for dataset in (
        open_dataset(images, decode=RandomResizedCrop(6)),
        open_dataset(images, decode="bytes", as_dict=True, fields=("label",)),
    ):
        found = []
        for prefetch in (None, 1):
            sizes.clear()
            options: dict[str, Any] = {
                "engine": "thread",
                "num_workers": 2,
                "prefetch_factor": prefetch,
                "with_rows": True,
            }
            loader = make_loader(dataset, BATCH, samples_per_epoch=16, endless=True, **options)
            batches = list(itertools.islice(loader, 30))
            found.append(
                [list(each.values() if isinstance(each, dict) else each) for each in batches]
            )
            assert max(sizes) == (16 if prefetch is None else BATCH)
        for one, other in zip(*found, strict=True):
            assert all(map(torch.equal, one, other))


def test_failures_of_unrequested_batches_are_ignored() -> None:
    failed = threading.Event()

    def hook(row: int) -> None:
        if row >= BATCH:
            failed.set()
            raise ValueError("nobody sees this")

    batches = iter(load(hook, num_workers=2))
    assert next(batches).tolist() == IN_ORDER[0]
    assert failed.wait(DEADLINE)
    close(batches)


def test_requests_of_an_abandoned_iteration_are_dropped() -> None:
    """It does not wait for a thread that hangs."""
    crew = Crew()
    release, reached = threading.Event(), threading.Event()
    read: list[int] = []

    def hook(row: int) -> None:
        read.append(row)
        if row == BATCH:
            reached.set()
            release.wait()

    batches = iter(load(hook, prefetch_factor=8))
    try:
        next(batches)
        assert reached.wait(DEADLINE)
        close(batches)
        assert read == [0, 1, 2]
    finally:
        release.set()
    crew.ends()
    assert read == [0, 1, 2, 3]


def test_a_loader_can_be_used_in_another_thread() -> None:
    loader = make_loader(Rows(), BATCH, engine="thread", num_workers=2)
    begun = iter(loader)
    found = [next(begun).tolist()]

    def work() -> None:
        found.extend(batch.tolist() for batch in begun)
        found.extend(batch.tolist() for batch in loader)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE)
    assert found == IN_ORDER * 2
    assert [batch.tolist() for batch in loader] == IN_ORDER


SCRIPT = """
import sys, threading
from shardkit import make_loader

hangs = threading.Event()

class Rows:
    def __len__(self):
        return 64

    def __getitem__(self, row):
        if row == 9:
            print("hangs", flush=True)
            hangs.set()
            {hang}
        return row

loader = make_loader(Rows(), 4, engine="thread", num_workers=2, timeout=0.0)
batches = iter(loader)
next(batches), next(batches)
{end}
"""


def begin(**parts: str) -> subprocess.Popen[str]:
    """Start a process that reads until a sample hangs."""
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(**parts)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "hangs\n"
    return child


def end_of(child: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and error output of a process that must end soon."""
    try:
        _, told = child.communicate(timeout=DEADLINE)
    finally:
        child.kill()
        child.wait(DEADLINE)
    return child.returncode, told


@pytest.mark.slow
def test_the_interpreter_ends_cleanly_during_an_epoch() -> None:
    assert end_of(begin(hang="while True: pass", end="hangs.wait()")) == (0, "")
    child = begin(hang="threading.Event().wait()", end="hangs.wait(); sys.exit(7)")
    assert end_of(child) == (7, "")


@pytest.mark.slow
def test_ctrl_c_ends_a_wait_for_a_long_batch_at_once() -> None:
    child = begin(hang="threading.Event().wait()", end="next(batches)")
    child.send_signal(signal.SIGINT)
    code, told = end_of(child)
    assert code == -signal.SIGINT
    assert told.count("Traceback") == 1
    assert told.endswith("KeyboardInterrupt\n")


def test_a_thread_that_is_reading_is_stopped_before_interpreter_shutdown() -> None:
    """A thread that nobody joins would run during interpreter shutdown and crash it."""
    entered, leave = threading.Event(), threading.Event()

    def hook(row: int) -> None:
        if row >= BATCH:
            entered.set()
            assert leave.wait(DEADLINE)

    batches = iter(load(hook))
    next(batches)
    assert entered.wait(DEADLINE)
    close(batches)
    del batches
    gc.collect()
    crews = [crew for crew in _RUNNING if any(thread.is_alive() for thread in crew._threads)]
    assert len(crews) == 1
    leave.set()
    crews[0].join(DEADLINE)
