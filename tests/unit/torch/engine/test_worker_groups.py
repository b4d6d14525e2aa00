"""Worker processes that read several small batches at once, into one block of shared memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png
from loading import prints_of

from shardkit import collate, convert, make_loader, open_dataset
from shardkit.torch.engine import fetch, preflight
from shardkit.torch.engine.fetch import Fetch
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.engine.processes import SPARE_SLOTS, ProcessEngine
from shardkit.torch.engine.ring import Ring

ROWS, BATCH = 24, 2


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 24 images of 12 x 8 pixels."""
    root = tmp_path_factory.mktemp("groups")
    files: dict[str, bytes | None] = {f"a/{n:02d}.png": png(12, 8, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "dataset")


def in_workers(path: Path, **options: Any) -> Any:
    chosen = {"num_workers": 1, "start_method": "fork", "timeout": 60.0, **options}
    return make_loader(open_dataset(path, decode="torch"), BATCH, engine="process", **chosen)


def blocks(batches: list[Any]) -> set[int]:
    return {batch[0].untyped_storage().data_ptr() for batch in batches}


def test_batches_of_one_block_are_those_read_one_by_one(images: Path) -> None:
    with (
        closing(in_workers(images)) as together,
        closing(in_workers(images, prefetch_factor=1)) as alone,
    ):
        kept = list(together)
        expected = list(alone)
        assert prints_of(kept) == prints_of(expected)
        assert (len(blocks(kept)), len(blocks(expected))) == (1, ROWS // BATCH)
        for _ in range(4):  # more blocks than the worker has: none is that of a kept batch
            assert prints_of(list(together)) == prints_of(expected)
        assert prints_of(kept) == prints_of(expected)


def test_each_block_of_a_batch_has_reused_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [
        {"key": str(n), "one": np.full(9, n), "two": np.full((2, 8), -n, "f4")} for n in range(ROWS)
    ]
    convert(samples, tmp_path / "arrays", to="lmdb")
    memory, received = list[bool](), Ring.receive

    def receive(ring: Ring, worker: int, slot: int, sent: Any) -> torch.Tensor:
        memory.append(sent is not None)
        return received(ring, worker, slot, sent)

    monkeypatch.setattr(Ring, "receive", receive)
    held = list[Any]()
    with closing(in_workers(tmp_path / "arrays", prefetch_factor=2)) as loader:
        for _ in range(2):
            for one, two in loader:
                assert (one[:, 0] == -two[:, 1, 7]).all()
                held = [*held[-1:], (one, two)]  # this batch and the one before it
    assert len(memory) == 2 * 2 * ROWS // BATCH, "no block came in new memory"
    assert sum(memory) <= 2 * (2 + SPARE_SLOTS)


def drawn(_: Any) -> torch.Tensor:
    return torch.rand(1) + np.random.random()


def test_a_collate_function_draws_the_same_for_any_number_of_batches_at_once(images: Path) -> None:
    with (
        closing(in_workers(images, collate_fn=drawn)) as together,
        closing(in_workers(images, collate_fn=drawn, prefetch_factor=1, num_workers=2)) as alone,
    ):
        assert torch.cat(list(together)).tolist() == torch.cat(list(alone)).tolist()


@pytest.mark.parametrize("prefetch", [None, 1], ids=["read at once", "read one by one"])
def test_global_generators_are_seeded_only_for_what_may_use_them(
    images: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int | None
) -> None:
    def refuse(bits: int) -> None:
        raise OverflowError("seeded")

    monkeypatch.setattr(fetch, "seed_globals", refuse)
    with closing(in_workers(images, prefetch_factor=prefetch)) as loader:
        assert len(list(loader)) == ROWS // BATCH
    with (
        closing(in_workers(images, prefetch_factor=prefetch, collate_fn=drawn)) as loader,
        pytest.raises(OverflowError, match="seeded"),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("free", "prefetch", "expected"),
    [
        (None, None, (16, 2)),
        (1 << 30, None, (16, 2)),
        (64 << 10, None, (1, 2)),
        (1 << 30, 1, (1, 1)),
        (1 << 30, 8, (4, 2)),
    ],
)
def test_workers_read_as_much_at_once_as_memory_and_prefetch_factor_allow(
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int | None,
    prefetch: int | None,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(preflight, "shared_memory", lambda: None if free is None else (free, free))
    fetch = Fetch(open_dataset(images, decode="torch"), collate, with_rows=False)
    options = LoaderOptions(engine="process", num_workers=2, prefetch_factor=prefetch)
    settings = options.resolved(2, pinned=False, batch_size=BATCH)
    assert ProcessEngine.at_once(fetch, settings) == expected


def test_stored_samples_are_read_in_larger_groups(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5 << 20
    for fields, expected in ((("image", "label"), 1), (("label",), 4)):
        dataset = open_dataset(images, decode="torch", fields=fields)
        monkeypatch.setattr(fetch, "sample_bytes", lambda dataset: size)
        assert Fetch(dataset, collate, with_rows=False).batches_at_once(1) == expected
