"""The cost of reading, in counts instead of times: counts do not drift and name the cause.

Each number is that of a loader which is warm, after its first epoch. Counts of the kernel depend on
what the machine does meanwhile: they are `measures`.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FORMATS, jpeg, make_dataset, make_tree
from pairwise import pairwise

import shardkit
from shardkit import CenterCrop, RandomResizedCrop, ShardDataset, make_loader, open_dataset

pytestmark = pytest.mark.usefixtures("without_native")  # Python's calls are counted

ROWS = 48
SHARDS = 2
BATCH = 8
BATCHES = ROWS // BATCH
RAW_SIDE = 128
PIXELS = RAW_SIDE * RAW_SIDE * 3
"""Bytes of a raw image."""

KINDS: dict[str, dict[str, Any]] = {
    "jpg": {},
    "raw": {"encode": "raw", "resize": f"{RAW_SIDE}x{RAW_SIDE}", "resize_mode": "stretch"},
}
DECODES: dict[str, Any] = {"jpg": CenterCrop(96), "raw": "torch"}
"""How a dataset of each kind is read into one block."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of 48 images in two shards: each format, JPEG and raw."""
    root = tmp_path_factory.mktemp("counts")
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n:02d}.jpg": jpeg(320 + n % 3, 240, n) for n in range(ROWS)
    }
    source = make_tree(root / "photos", files)
    for storage, kind in itertools.product(FORMATS, KINDS):
        options = {"to": storage, "shard_samples": ROWS // SHARDS, **KINDS[kind]}
        make_dataset(source, root / f"{storage}-{kind}", **options)
    return root


def opened(root: Path, storage: str, kind: str, decode: Any = None, **options: Any) -> ShardDataset:
    chosen: Any = DECODES[kind] if decode is None else decode
    return open_dataset(root / f"{storage}-{kind}", decode=chosen, **options)


def warm_loader(dataset: ShardDataset, engine: str = "thread", **options: Any) -> Any:
    """Return a loader that has read an epoch, in any order, so that batches touch all shards.

    It prefetches too little to read several batches at once.
    """
    options = {"prefetch_factor": 1, **options}
    chosen: dict[str, Any] = {"engine": engine, "start_method": "fork", **options}
    loader = make_loader(dataset, BATCH, shuffle=True, **chosen)
    read(loader)
    return loader


def read(loader: Any) -> None:
    """Read an epoch and keep nothing of it."""
    assert sum(len(labels) for _, labels in loader) == ROWS


class Spy:
    """Wraps a function and records its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._function = getattr(owner, name)
        patch.setattr(owner, name, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append(arguments)
        return self._function(*arguments, **options)


def short(value: Any) -> str:
    """Return the name of a decode option in test IDs."""
    return value if isinstance(value, str) else type(value).__name__


def address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def lengths_of(dataset: ShardDataset) -> list[int]:
    lengths: list[int] = dataset.shards.entries.read(np.arange(ROWS))["length"].tolist()
    return lengths


# Calls to read files.


class Reads(Spy):
    """Records calls of `os.preadv`; ``cold`` fails reads that must not wait."""

    def __init__(self, patch: pytest.MonkeyPatch, *, cold: bool = False) -> None:
        super().__init__(patch, os, "preadv")
        self.lengths: list[int] = []
        """Of the reads that gave all they were asked for."""
        self._cold = cold

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._cold and (options or len(arguments) > 3):
            self.calls.append(arguments)
            raise BlockingIOError
        found = super().__call__(*arguments, **options)
        if found == sum(map(len, arguments[1])):
            self.lengths.append(found)
        return found

    @property
    def places(self) -> list[int]:
        """Memory addresses of the bytes read."""
        return [address(buffer) for _, buffers, *_ in self.calls for buffer in buffers]


@pytest.mark.parametrize(
    ("storage", "kind", "num_workers", "cold"), pairwise(FORMATS, KINDS, [0, 2], [False, True])
)
def test_an_image_takes_one_read_and_one_readahead_call(
    root: Path, storage: str, kind: str, num_workers: int, cold: bool
) -> None:
    """In addition, a batch checks once whether another dataset has replaced the manifest.

    A kernel that reports cached pages saves a warm batch the readahead calls. One that does not is
    asked once in a batch, for its first image.
    """
    dataset = opened(root, storage, kind)
    loader = warm_loader(dataset, num_workers=num_workers)
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch, cold=cold)
        names = ("posix_fadvise", "stat", "open", "pread", "read", "fstat", "lseek")
        spies = {name: Spy(patch, os, name) for name in names}
        for _ in range(2):
            read(loader)
    assert sorted(reads.lengths) == sorted(2 * lengths_of(dataset))
    assert 2 * ROWS <= len(reads.calls) <= 2 * ROWS + 2 * BATCHES
    found = {name: len(spy.calls) for name, spy in spies.items() if spy.calls}
    announced = found.pop("posix_fadvise", 0)
    assert announced == 2 * ROWS or (announced < 2 * ROWS and not cold)
    assert found == {"stat": 2 * BATCHES}


# Calls of Python.

HOME = str(Path(shardkit.__file__).parent)


def calls_of(work: Callable[[], Any]) -> int:
    """Return how many functions of shardkit a piece of work calls in this thread.

    Only frames whose file lies in the package: what libraries do differs from version to version.
    Not comprehensions, which are frames up to Python 3.11 alone, and not lambdas.
    """
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        named = not code.co_name.startswith("<")
        count += event == "call" and named and code.co_filename.startswith(HOME)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


MOST_CALLS = 106
"""Functions of shardkit that a batch takes in addition to its samples."""


@pytest.mark.parametrize(
    ("kind", "decode", "most"),
    [
        ("raw", "torch", 7),
        ("raw", "bytes", 7),
        ("jpg", "bytes", 7),
        ("jpg", "torch", 22),
        ("jpg", CenterCrop(96), 34),
        ("jpg", RandomResizedCrop(64), 85),
    ],
    ids=short,
)
def test_a_sample_takes_few_python_calls(
    root: Path, kind: str, decode: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up of each row or column by itself would show; a call takes some 0.1 us."""
    preadv = os.preadv  # as if all was in memory: what is not is announced, which takes calls
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at, flags=0: preadv(file, buffers, at))
    dataset = opened(root, "lmdb", kind, decode)
    dataset.set_epoch(0)
    rows = list(range(0, ROWS, 6))  # of both shards
    once, thrice = partial(dataset.__getitems__, rows), partial(dataset.__getitems__, 3 * rows)
    thrice()
    once_calls, thrice_calls = (min(calls_of(work) for _ in range(2)) for work in (once, thrice))
    each = (thrice_calls - once_calls) / (2 * len(rows))
    beside = once_calls - each * len(rows)
    assert each <= most, f"{each:.2f} calls for each sample"
    assert beside <= MOST_CALLS, f"{beside:.1f} calls for a batch"


# Bytes copied.


def test_raw_pixels_are_read_straight_into_the_batch(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads directly into the batch's memory, so nothing is copied."""
    loader = warm_loader(opened(root, "lmdb", "raw"), num_workers=0)
    reads = Reads(monkeypatch)
    for images, _ in loader:
        assert sorted(set(reads.places)) == [images.data_ptr() + n * PIXELS for n in range(BATCH)]
        assert images.shape == (BATCH, 3, RAW_SIDE, RAW_SIDE)
        reads.calls.clear()
        del images


@pytest.mark.parametrize(("kind", "num_workers"), [("jpg", 2), ("raw", 0)])
def test_a_warm_loader_allocates_no_block(
    root: Path, kind: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocator might not return the same memory, so a warm loader does not allocate."""
    loader = warm_loader(opened(root, "lmdb", kind), num_workers=num_workers)
    sizes = {images.numel() for images, _ in list(loader)}  # all blocks that there may be
    assert len(sizes) == 1
    asked = [Spy(monkeypatch, library, "empty").calls for library in (np, torch)]
    for _ in range(3):
        read(loader)
    assert not sizes & {int(np.prod(shape)) for shape, *_ in itertools.chain(*asked)}


# Memory.


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable the garbage collector: only reference counts free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def faults_of(loader: Any) -> int:
    """Return the number of page faults of this process during an epoch."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read(loader)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.measures
@pytest.mark.parametrize(("storage", "kind", "num_workers"), pairwise(FORMATS, KINDS, [0, 1]))
def test_a_batch_touches_no_new_memory_page(
    root: Path, storage: str, kind: str, num_workers: int
) -> None:
    """A raw image has 12 pages, a decoded one 57, and each would fault if it was fresh.

    A thread that begins costs some, and so may others of this process: so it is the best epoch.
    """
    loader = warm_loader(opened(root, storage, kind), num_workers=num_workers)
    assert len(list(loader)) == BATCHES  # all blocks that there may be
    with no_collection():  # it writes to the pages of all objects
        assert min(faults_of(loader) for _ in range(5)) < 24 * BATCHES


# Checksums.


@pytest.mark.parametrize(
    ("storage", "kind", "verify"),
    [
        ("lmdb", "jpg", None),
        ("hdf5", "jpg", False),
        ("webdataset", "raw", None),
        ("lmdb", "raw", True),
    ],
)
def test_each_byte_is_hashed_at_most_once(
    root: Path, storage: str, kind: str, verify: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Always 29 bytes of each row's entry; where images are verified, they and 13 of their entry.

    It is 1 ms for 3 MB: to hash twice would show, and so would raw pixels.
    """
    dataset = opened(root, storage, kind, verify=verify)
    loader = warm_loader(dataset, num_workers=0)
    hashed = Spy(monkeypatch, zlib, "crc32")
    read(loader)
    expected = [29] * ROWS
    if verify or (verify is None and kind == "jpg"):
        expected += [13] * ROWS + lengths_of(dataset)
    assert sorted(len(arguments[0]) for arguments in hashed.calls) == sorted(expected)
