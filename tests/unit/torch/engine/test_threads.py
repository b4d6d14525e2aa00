"""The thread engine: order, prefetching, memory and shutdown."""

from __future__ import annotations

import gc
import itertools
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DEADLINE, make_dataset, make_tree, png, wait_until
from loading import close, prints_of
from torch.utils.data import Dataset

from shardkit import (
    RandomResizedCrop,
    Rank,
    ShardDataset,
    collate,
    make_loader,
    open_dataset,
    with_rng,
)
from shardkit.errors import CorruptRecord, LoaderFailed, TransformFailed
from shardkit.sampling.order import Order
from shardkit.torch.data.schedule import BatchSchedule, Request
from shardkit.torch.engine import threads as engine_module
from shardkit.torch.engine.fetch import Fetch
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.engine.threads import _RUNNING, ThreadEngine

ROWS = 24
BATCH = 2
BATCHES = ROWS // BATCH

QUICK = 30.0
"""Seconds in which a busy process must end: the engine waits 2 s for threads that hang, which do so
for `DEADLINE`."""

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


def make_engine(dataset: Any, *, prefetch: int | None = None, **options: Any) -> ThreadEngine:
    settings = LoaderOptions(**options).resolved(1, pinned=False)
    if prefetch is not None:
        settings = replace(settings, thread_prefetch=prefetch)
    return ThreadEngine(Fetch(dataset, collate, with_rows=False), settings)


def requests(taken: list[Request] | None = None) -> Iterator[Request]:
    """Yield the requests of an epoch in stored order; consumed ones are recorded."""
    schedule = BatchSchedule(Order(size=ROWS), BATCH, Rank(rank=0, world_size=1))
    for request in schedule.requests(0):
        if taken is not None:
            taken.append(request)
        yield request


def numbers(engine: ThreadEngine) -> list[list[int]]:
    return [batch.tolist() for _, batch in engine.run(requests())]


IN_ORDER = np.arange(ROWS).reshape(BATCHES, BATCH).tolist()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardkit-decode"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not threads(), "the end of all threads")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An LMDB dataset of 24 images of 12 x 8 pixels."""
    root = tmp_path_factory.mktemp("threads")
    files: dict[str, bytes | None] = {f"a/{n:02d}.png": png(12, 8, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "made")


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3, 7])
def test_batches_come_in_order_each_with_its_request(num_workers: int) -> None:
    found = list(make_engine(Rows(), num_workers=num_workers).run(requests()))
    assert [batch.tolist() for _, batch in found] == IN_ORDER
    assert [request.rows.tolist() for request, _ in found] == IN_ORDER


def test_a_slow_batch_is_delivered_in_order() -> None:
    later_done = threading.Event()

    def hook(row: int) -> None:
        if row == 0:
            assert later_done.wait(DEADLINE)
        if row == 3 * BATCH:
            later_done.set()

    assert numbers(make_engine(Rows(hook), num_workers=2, prefetch=6)) == IN_ORDER


def test_without_order_a_slow_batch_comes_when_ready() -> None:
    release = threading.Event()

    def hook(row: int) -> None:
        if row == 0:
            assert release.wait(DEADLINE)

    batches = make_engine(Rows(hook), num_workers=2, in_order=False).run(requests())
    try:
        before = [next(batches)[1].tolist() for _ in range(BATCHES - 1)]
        assert [0, 1] not in before
    finally:
        release.set()
    assert sorted(before + [batch.tolist() for _, batch in batches]) == IN_ORDER


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

    assert numbers(make_engine(Rows(hook), num_workers=3, prefetch=8)) == IN_ORDER
    assert most == 3


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (1, 4), (2, 2), (3, 5), (2, 100)])
@pytest.mark.parametrize("in_order", [True, False])
def test_prefetch_limits_the_batches_in_progress(
    num_workers: int, prefetch: int, in_order: bool
) -> None:
    taken: list[Request] = []
    engine = make_engine(Rows(), num_workers=num_workers, prefetch=prefetch, in_order=in_order)
    batches = engine.run(requests(taken))
    assert taken == []
    for given, _ in enumerate(batches, 1):
        assert len(taken) == min(given + prefetch, BATCHES)


def test_threads_that_pin_use_the_device_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's current device is that of a thread: 0 in a new one."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(engine_module, "pin", lambda batch: batch)
    settings = LoaderOptions(num_workers=2).resolved(1, pinned=True)
    engine = ThreadEngine(Fetch(Rows(), collate, with_rows=False), settings)
    assert numbers(engine) == IN_ORDER
    assert devices == [3, 3]
    assert numbers(make_engine(Rows(), num_workers=2)) == IN_ORDER
    assert devices == [3, 3], "without pinned memory CUDA is not used"


def test_without_threads_nothing_is_read_ahead() -> None:
    taken: list[Request] = []
    for given, _ in enumerate(make_engine(Rows(), num_workers=0).run(requests(taken)), 1):
        assert len(taken) == given
        assert threads() == []


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
    engine = make_engine(dataset, num_workers=1, prefetch_factor=prefetch)
    for _ in range(3):
        for _, batch in engine.run(requests()):  # one is held while the next is asked for
            assert batch[0].shape == (BATCH, 3, 8, 12)
        del batch
    assert 0 < made <= prefetch + 2


def test_the_memory_of_a_kept_batch_is_not_reused(images: Path) -> None:
    engine = make_engine(open_dataset(images, decode="torch"), num_workers=2, prefetch=2)
    kept = [batch for _ in range(2) for _, batch in engine.run(requests())]
    alone = make_engine(open_dataset(images, decode="torch"), num_workers=0)
    expected = prints_of([batch for _, batch in alone.run(requests())])
    assert prints_of(kept) == expected * 2
    assert len({images.data_ptr() for images, _ in kept}) == len(kept)


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


def test_a_fault_among_batches_read_at_once_comes_with_its_own(
    images: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(images, tmp_path / "made")
    shards = open_dataset(copy)._shards
    shard = shards.files.path(shards.files.place(7)[0])
    content = bytearray(shard.read_bytes())
    content[int(shards.rows["offset"][7]) + 60] ^= 1
    shard.write_bytes(content)
    loader = make_loader(open_dataset(copy, decode="torch"), BATCH, num_workers=1)
    found: list[Any] = []
    with pytest.raises(CorruptRecord, match="row 7"):
        found.extend(loader)
    assert len(found) == 7 // BATCH


def test_a_failing_collate_function_fails_its_own_batch_once(images: Path) -> None:
    called: list[int] = []

    def refuse(samples: Any) -> Any:
        called.append(len(called))
        if len(called) == 3:
            raise ValueError("third")
        return collate(samples)

    options: dict[str, Any] = {"engine": "thread", "num_workers": 1, "collate_fn": refuse}
    found: list[Any] = []
    with pytest.raises(ValueError, match="third"):
        found.extend(make_loader(open_dataset(images, decode="torch"), BATCH, **options))
    assert (len(found), called) == (2, [0, 1, 2])


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize(
    "error", [ValueError("bad row", 5), KeyError("gone"), SystemExit(3), KeyboardInterrupt()]
)
def test_an_exception_is_raised_unchanged_and_ends_the_iteration(
    num_workers: int, error: BaseException
) -> None:
    def hook(row: int) -> None:
        if row == 5:
            raise error

    taken: list[Request] = []
    batches = make_engine(Rows(hook), num_workers=num_workers, prefetch=4).run(requests(taken))
    assert [next(batches)[1].tolist() for _ in range(2)] == IN_ORDER[:2]
    with pytest.raises(type(error)) as caught:
        next(batches)
    assert caught.value is error
    assert list(batches) == []
    assert len(taken) <= 2 + 4


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_that_ends_iterators_does_not_end_the_epoch_quietly(num_workers: int) -> None:
    def hook(row: int) -> None:
        if row == 5:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        numbers(make_engine(Rows(hook), num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_transform_that_fails_names_the_sample_and_keeps_its_cause(
    images: Path, num_workers: int
) -> None:
    def fail(image: Any) -> Any:
        raise ValueError("no such colour")

    dataset = open_dataset(images, fail, decode="numpy")
    with pytest.raises(TransformFailed, match="ValueError: no such colour") as caught:
        list(make_engine(dataset, num_workers=num_workers).run(requests()))
    assert dataset.keys[0] in str(caught.value)
    assert "row 0," in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_failures_of_unrequested_batches_are_ignored() -> None:
    failed = threading.Event()

    def hook(row: int) -> None:
        if row >= BATCH:
            failed.set()
            raise ValueError("nobody sees this")

    batches = make_engine(Rows(hook), num_workers=2).run(requests())
    assert next(batches)[1].tolist() == IN_ORDER[0]
    assert failed.wait(DEADLINE)
    close(batches)


@pytest.mark.parametrize("in_order", [True, False])
def test_a_timeout_is_an_error_that_names_the_batch(images: Path, in_order: bool) -> None:
    release = threading.Event()

    @with_rng
    def hang(image: Any, rng: np.random.Generator) -> Any:
        assert release.wait(DEADLINE)
        return torch.from_numpy(image)

    dataset = open_dataset(images, hang, decode="numpy")
    engine = make_engine(dataset, num_workers=2, timeout=0.2, in_order=in_order)
    start = time.monotonic()
    try:
        with pytest.raises(LoaderFailed) as caught:
            next(engine.run(requests()))
        assert time.monotonic() - start < QUICK
    finally:
        release.set()
    for part in ("0.2 s", repr(dataset.keys[0]), "row 0,", dataset.paths[0], "timeout="):
        assert part in str(caught.value)
    wait_until(lambda: not threads(), "the end of the threads that hung")
    assert len(list(engine.run(requests()))) == BATCHES  # and it can be used again


def by_break(batches: Iterator[Any]) -> None:
    for _ in batches:
        break


def by_closing(batches: Iterator[Any]) -> None:
    next(batches)
    close(batches)


def by_exception(batches: Iterator[Any]) -> None:
    def fail() -> None:
        for _ in batches:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


@pytest.mark.parametrize("leave", [by_break, by_closing, by_exception])
def test_an_iteration_that_is_abandoned_leaves_no_threads(
    leave: Callable[[Iterator[Any]], None],
) -> None:
    engine = make_engine(Rows(), num_workers=3)
    for _ in range(5):
        leave(engine.run(requests()))
        wait_until(lambda: not threads(), "the end of an iteration's threads")
    assert numbers(engine) == IN_ORDER


def test_requests_of_an_abandoned_iteration_are_dropped() -> None:
    release, reached = threading.Event(), threading.Event()
    read: list[int] = []

    def hook(row: int) -> None:
        read.append(row)
        if row == BATCH:
            reached.set()
            assert release.wait(DEADLINE)

    batches = make_engine(Rows(hook), num_workers=1, prefetch=8).run(requests())
    try:
        next(batches)
        assert reached.wait(DEADLINE)
        start = time.monotonic()
        close(batches)
        assert time.monotonic() - start < QUICK  # it does not wait for a thread that hangs
    finally:
        release.set()
    wait_until(lambda: not threads(), "the end of the thread")
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
        _, told = child.communicate(timeout=QUICK)
    finally:
        child.kill()
        child.wait(DEADLINE)
    return child.returncode, told


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["threading.Event().wait()", "while True: pass"])
def test_the_interpreter_ends_cleanly_during_an_epoch(hang: str) -> None:
    assert end_of(begin(hang=hang, end="hangs.wait()")) == (0, "")


@pytest.mark.slow
def test_an_exit_code_is_kept_while_a_transform_hangs() -> None:
    child = begin(hang="threading.Event().wait()", end="hangs.wait(); sys.exit(7)")
    assert end_of(child) == (7, "")


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

    batches = make_engine(Rows(hook), num_workers=1).run(requests())
    next(batches)
    assert entered.wait(DEADLINE)
    batches.close()
    del batches
    gc.collect()
    crews = [crew for crew in _RUNNING if any(thread.is_alive() for thread in crew._threads)]
    assert len(crews) == 1
    leave.set()
    crews[0].join(DEADLINE)
