"""Ten million rows cost as much as ten: counts of operations in opening, ordering and loading."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png, wait_until
from loading import prints
from refusals import refused

from shardkit import BlockShuffle, CorruptDataset, Field, Rank, make_loader, open_dataset
from shardkit.dataset.index import ROW, ROWS_NAME, pack_row
from shardkit.dataset.manifest import FieldEntry, Manifest, ShardEntry, save_manifest
from shardkit.recipe import Recipe
from shardkit.sampling.order import Order
from shardkit.system.npy import npy_header
from shardkit.torch.data import schedule
from shardkit.torch.data.memory import BlockPool
from shardkit.torch.engine import threads
from shardkit.torch.engine.fetch import Fetch

MANY = 10_000_000
BATCH = 4
IMAGES = 24

SHUFFLES: dict[str, bool | BlockShuffle] = {"stored": False, "full": True, "blocks": BlockShuffle()}

IN_MAIN: dict[str, Any] = {"engine": "thread", "num_workers": 0}


def sparse(root: Path, rows: int, real: list[int]) -> Path:
    """Make a dataset of ``rows`` rows, of which ``real`` alone can be read; the rest are holes."""
    image, header = png(12, 8), npy_header((rows,), ROW)
    (root / "index").mkdir(parents=True)
    (root / "shard-000000.lmdb").write_bytes(image)
    with (root / ROWS_NAME).open("wb") as file:
        file.write(header)
        for number in real:
            file.seek(len(header) + number * ROW.itemsize)
            file.write(pack_row(offset=0, image=image, label=number % 2, size=(12, 8), field="png"))
        file.truncate(len(header) + rows * ROW.itemsize)
    entry = ShardEntry(name="shard-000000.lmdb", bytes=len(image), sha256="0" * 64, rows=rows)
    manifest = Manifest(
        format="lmdb",
        rows=rows,
        content_digest="0" * 64,
        shards=(entry,),
        files=(),
        fields={"png": rows},
        schema=(
            FieldEntry.of("image", Field("image"), rows),
            FieldEntry.of("label", Field("label", classes=("a", "b")), rows),
        ),
        classes=("a", "b"),
        class_counts=(rows - rows // 2, rows // 2),
        raw_shape=None,
        recipe=Recipe().describe(),
        source={"kind": "imagefolder"},
    )
    save_manifest(manifest, root)
    return root


def first_rows(size: int, shuffle: bool | BlockShuffle) -> list[int]:
    return list(map(int, Order(size=size, shuffle=shuffle).rows(0, np.arange(BATCH))))


def peak_of(call: Callable[[], Any]) -> int:
    """Return the most bytes that Python and NumPy had at once above those before the call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def resident(path: Path) -> float:
    """Return which part of a file's pages is in memory."""
    values = np.memmap(path, np.uint8, "r")
    pages = -(-values.size // 4096)
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(values.ctypes.data)
    assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(values.size), found) == 0
    return sum(page & 1 for page in found) / pages


# Opening.


def test_opening_needs_nothing_of_the_index(tmp_path: Path) -> None:
    path = sparse(tmp_path / "made", MANY, [])
    shutil.rmtree(path / "index")
    dataset = open_dataset(path)
    assert len(pickle.loads(pickle.dumps(dataset))) == len(dataset) == MANY
    assert (dataset.classes, dataset.class_to_idx) == (["a", "b"], {"a": 0, "b": 1})
    assert repr(dataset).endswith("10000000 images, 2 classes, lmdb")
    loader = make_loader(dataset, BATCH, shuffle=True, **IN_MAIN)
    loader.load_state_dict(loader.state_dict())
    assert len(loader) == MANY // BATCH
    for ask in (lambda: dataset.targets, lambda: dataset.keys, lambda: dataset[MANY // 2]):
        with refused(CorruptDataset):
            ask()


@pytest.mark.parametrize("name", SHUFFLES)
def test_the_first_batch_of_many_rows_takes_no_more_memory_than_of_few(
    tmp_path: Path, name: str
) -> None:
    shuffle, peaks = SHUFFLES[name], {}
    for size in (20_000, MANY):
        path = sparse(tmp_path / str(size), size, first_rows(size, shuffle))

        def read(path: Path = path) -> None:
            dataset = open_dataset(path, decode="torch")
            images, _ = next(iter(make_loader(dataset, BATCH, shuffle=shuffle, **IN_MAIN)))
            assert images.shape == (BATCH, 3, 8, 12)

        read()  # what is imported or remembered at first does not count
        peaks[size] = peak_of(read)
    assert peaks[MANY] < 4_000_000  # a permutation would take 80 MB, the labels as much
    assert peaks[MANY] < 1.5 * peaks[20_000]


@pytest.mark.measures  # what else runs may change what the kernel keeps
@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for the pages of a file")
def test_a_batch_brings_its_own_rows_into_memory_and_not_the_index(tmp_path: Path) -> None:
    rows = first_rows(MANY, True)
    path = sparse(tmp_path / "made", MANY, rows)
    assert resident(path / ROWS_NAME) < 0.01
    dataset = open_dataset(path, decode="torch")
    assert resident(path / ROWS_NAME) < 0.01
    assert [label for _, label in dataset[rows]] == [row % 2 for row in rows]
    assert resident(path / ROWS_NAME) < 0.25  # the kernel reads ahead, some as much as 8 MB


# What a worker is sent.


def test_what_is_pickled_is_small_whatever_the_size_and_whatever_was_asked(tmp_path: Path) -> None:
    dataset = open_dataset(sparse(tmp_path / "many", MANY, [0]), decode="torch")
    assert dataset[0][1] == 0
    assert len(dataset.shards.rows) == MANY
    assert len(pickle.dumps(dataset)) < 2000
    used = open_dataset(make_images(tmp_path))
    assert len(used.keys) == len(used.targets) == len(used.samples) == IMAGES
    assert len(pickle.dumps(used)) < 2000
    few = len(pickle.dumps(open_dataset(sparse(tmp_path / "tiny", 8, []))))
    assert len(pickle.dumps(open_dataset(tmp_path / "many"))) == few


def test_a_state_is_small_whatever_the_size(tmp_path: Path) -> None:
    dataset = open_dataset(sparse(tmp_path / "made", MANY, []))
    loader = make_loader(dataset, BATCH, shuffle=True, **IN_MAIN)
    loader.set_epoch(3)
    assert len(repr(loader.state_dict())) < 300


# Order.


@pytest.mark.parametrize("name", SHUFFLES)
@pytest.mark.parametrize("consumed", [0, MANY // 2 // BATCH * BATCH])
def test_the_next_batch_asks_for_a_constant_part_of_the_order(
    name: str, consumed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    plain = Order.rows

    def counted(order: Order, epoch: int, positions: Any) -> Any:
        asked.append(len(positions))
        return plain(order, epoch, positions)

    monkeypatch.setattr(Order, "rows", counted)
    order = Order(size=MANY, shuffle=SHUFFLES[name])
    requests = schedule.BatchSchedule(order, BATCH, Rank(rank=0, world_size=1)).requests(
        5, consumed
    )
    assert peak_of(lambda: next(requests)) < 4_000_000
    assert asked == [schedule._AT_ONCE]


# Memory of the thread engine.


class Watched(BlockPool):
    """A pool that notes the most blocks that anybody ever held at once."""

    made: list[Watched] = []  # noqa: RUF012

    def __init__(self, keep: int) -> None:
        super().__init__(keep)
        self.most = 0
        Watched.made.append(self)

    def new(self, shape: tuple[int, ...]) -> torch.Tensor:
        block = super().new(shape)
        self.most = max(self.most, self.held)
        return block

    @property
    def held(self) -> int:
        return len(self._lent)

    @property
    def free(self) -> int:
        return sum(map(len, list(self._free.values())))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Watched]]:
    """The pools of all thread engines that are made."""
    monkeypatch.setattr(threads, "BlockPool", Watched)
    Watched.made.clear()
    yield Watched.made
    Watched.made.clear()


def make_images(root: Path) -> Path:
    """Make an LMDB dataset of 24 images of one size."""
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n:02d}.png": png(12, 8, n) for n in range(IMAGES)
    }
    return make_dataset(make_tree(root / "photos", files), root / "made")


def in_threads(path: Path, prefetch: int) -> Any:
    workers = next(count for count in (3, 2, 1) if prefetch % count == 0)
    options: dict[str, Any] = {
        "engine": "thread",
        "num_workers": workers,
        "prefetch_factor": prefetch // workers,
    }
    return make_loader(open_dataset(path, decode="torch"), BATCH // 2, shuffle=True, **options)


@pytest.mark.parametrize("prefetch", [1, 2, 3, 7, 50])
def test_threads_hold_prefetch_and_two_batches_and_no_more(
    tmp_path: Path, pools: list[Watched], prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large batches are read one by one; small ones share blocks of at most 8 MiB.
    monkeypatch.setattr(Fetch, "batches_at_once", lambda self, batch_size: 1)
    loader = in_threads(make_images(tmp_path), prefetch)
    (pool,) = pools
    for _ in range(2):
        left = len(loader)
        for _batch in loader:
            left -= 1
            ahead = min(prefetch, left)
            wait_until(lambda: pool.held == ahead + 1, "batches ahead")  # noqa: B023
        del _batch
        assert (left, pool.held) == (0, 0)
        assert pool.free <= prefetch + 2
    assert min(prefetch + 1, len(loader)) <= pool.most <= prefetch + 2


@pytest.mark.parametrize("prefetch", [1, 3])
def test_a_consumer_that_keeps_all_batches_pays_for_them_and_for_prefetch_more(
    tmp_path: Path, pools: list[Watched], prefetch: int
) -> None:
    loader = in_threads(make_images(tmp_path), prefetch)
    (pool,) = pools
    kept: list[Any] = []
    for batch in loader:
        kept.append(batch)
        ahead = min(prefetch, len(loader) - len(kept))
        wait_until(lambda: pool.held == len(kept) + ahead, "batches ahead")  # noqa: B023
    del batch
    assert pool.most == pool.held == len(kept) == len(loader)
    assert len({image.untyped_storage().data_ptr() for image, _ in kept}) == len(kept)
    loader.set_epoch(0)
    assert [prints(batch) for batch in loader] == [prints(batch) for batch in kept]
    kept.clear()
    assert (pool.held, pool.free) == (0, prefetch + 2)


def test_what_was_kept_in_one_epoch_is_let_go_in_the_next(
    tmp_path: Path, pools: list[Watched]
) -> None:
    loader = in_threads(make_images(tmp_path), 2)
    (pool,) = pools
    first = list(loader)
    assert pool.held == len(first)
    first.clear()
    assert sum(len(labels) for _, labels in loader) == IMAGES
    assert (pool.held, pool.free <= 4) == (0, True)
