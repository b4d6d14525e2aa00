"""Ten million rows cost as much as ten: counts of operations in opening, ordering and loading."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import png
from refusals import refused

from shardkit import BlockShuffle, Field, Rank, make_loader, open_dataset
from shardkit.dataset.index import ROW, ROWS_NAME, pack_row
from shardkit.dataset.manifest import FieldEntry, Manifest, ShardEntry, save_manifest
from shardkit.errors import CorruptDataset
from shardkit.recipe import Recipe
from shardkit.sampling.order import Order
from shardkit.system.npy import npy_header
from shardkit.torch.data import schedule

MANY = 10_000_000
BATCH = 4

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
