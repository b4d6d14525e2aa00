"""Synthetic loads: what the tutorial's promises to be."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from shardkit import BatchView, LoaderOptions, collate, make_loader
from shardkit.measure.runner.cases import CASES, TutorialDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Small(TutorialDataset):
    """The tutorial's, of small images."""

    ROWS, SIDE = 24, 8


def test_the_tutorials_numbers_are_the_tutorials() -> None:
    assert CASES["tutorial"] is TutorialDataset
    case = TutorialDataset()
    assert len(case) == 512
    assert (case.BATCH_SIZE, case.EPOCHS, case.WORKERS) == (32, 10, 4)
    image, label = case[0]
    assert (image.shape, image.dtype) == ((3, 224, 224), torch.float32)
    assert 0 <= label < 10


def test_a_fetch_waits_once_whatever_it_brings() -> None:
    case = Small()
    begun = time.perf_counter()
    for row in range(8):
        case[row]
    assert time.perf_counter() - begun >= 8 * case.FETCH_SECONDS
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        case.__getitems__(list(range(8)))
        times.append(time.perf_counter() - begun)
    assert case.FETCH_SECONDS <= min(times) < 4 * case.FETCH_SECONDS


def test_a_batch_is_noise_of_the_same_kind_either_way() -> None:
    case = Small()
    view = case.__getitems__(list(range(16)))
    assert isinstance(view, BatchView)
    for images, labels in (collate(view), default_collate([case[row] for row in range(16)])):
        assert (images.shape, images.dtype) == ((16, 3, 8, 8), torch.float32)
        assert (labels.shape, labels.dtype) == ((16,), torch.int64)
        assert 0.9 < float(images.std()) < 1.1
        assert -0.1 < float(images.mean()) < 0.1
        assert images[0].equal(images[1]) is False
        assert 0 <= int(labels.min()) <= int(labels.max()) < 10


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_batches_that_are_kept_do_not_change(engine: str) -> None:
    """Blocks of floats lie in memory that a loader uses again."""
    options = LoaderOptions(engine=engine, num_workers=2, start_method="fork")
    loader = make_loader(Small(), 4, options=options)
    kept = [(images, images.clone()) for _ in range(2) for images, _ in loader]
    loader.close()
    assert len(kept) == 12
    assert all(torch.equal(images, as_given) for images, as_given in kept)
    assert len({float(images[0, 0, 0, 0]) for images, _ in kept}) == 12


def test_a_worker_of_pytorch_shares_its_block() -> None:
    loader = DataLoader(
        Small(), 4, num_workers=1, collate_fn=_block_is_shared, multiprocessing_context="fork"
    )
    assert list(loader) == [True] * 6


def _block_is_shared(samples: Any) -> bool:
    return bool(collate(samples)[0].is_shared())
