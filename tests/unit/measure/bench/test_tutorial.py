"""The tutorial's dataset is what PyTorch's tutorial describes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from shardkit import BatchView, LoaderOptions, collate, make_loader
from shardkit.measure.bench import tutorial
from shardkit.measure.bench.tutorial import TutorialDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Small(TutorialDataset):
    """The tutorial's, of small images."""

    ROWS, SIDE = 24, 8


def test_the_settings_are_the_tutorials() -> None:
    case = TutorialDataset()
    assert len(case) == 512
    assert (tutorial.BATCH_SIZE, tutorial.EPOCHS, tutorial.WORKERS) == (32, 10, 4)
    image, label = case[0]
    assert (image.shape, image.dtype) == ((3, 224, 224), torch.float32)
    assert 0 <= label < 10


def test_a_fetch_waits_once_for_a_sample_or_a_batch() -> None:
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


def test_a_batch_is_the_same_noise_either_way() -> None:
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


def test_a_pytorch_worker_shares_its_block() -> None:
    loader = DataLoader(
        Small(), 4, num_workers=1, collate_fn=_block_is_shared, multiprocessing_context="fork"
    )
    assert list(loader) == [True] * 6


def _block_is_shared(samples: Any) -> bool:
    return bool(collate(samples)[0].is_shared())
