"""The helper engine: the batches and errors of threads, from one child process."""

from __future__ import annotations

import itertools
import multiprocessing
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import make_dataset, make_tree, png
from loading import same

from shardkit import CenterCrop, RandomResizedCrop, make_loader, open_dataset
from shardkit.torch.engine import preflight
from shardkit.torch.engine.ring import Ring

ROWS = 23
BATCH = 2
CROP = RandomResizedCrop(16)

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 23 images of 20 x 16 pixels."""
    root = tmp_path_factory.mktemp("helper")
    files: dict[str, bytes | None] = {f"a/{n:02d}.png": png(20, 16, n) for n in range(ROWS)}
    return make_dataset(make_tree(root / "photos", files), root / "made")


@pytest.fixture
def load() -> Iterator[Load]:
    """Create loaders with a helper, closed at the end of the test."""
    loaders: list[Any] = []

    def load(dataset: Any, **options: Any) -> Any:
        given = {"engine": "helper", "num_workers": 2, "start_method": "fork", **options}
        loaders.append(make_loader(dataset, BATCH, shuffle=True, **given))
        return loaders[-1]

    yield load
    for loader in loaders:
        loader.close()


def drawn(image: Any) -> torch.Tensor:
    """A transform that draws from the global generators."""
    return torch.tensor([random.random(), float(np.random.random()), float(torch.rand(()))])


def test_one_process_reads_in_all_threads(place: Path, load: Load) -> None:
    before = multiprocessing.active_children()
    loader = load(open_dataset(place, decode=CROP), num_workers=3)
    next(iter(loader))
    assert len(set(multiprocessing.active_children()) - set(before)) == 1
    assert loader.num_workers == 3


@pytest.mark.parametrize("crop", [16, 400], ids=["read at once", "read one by one"])
def test_images_come_in_reused_memory(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch, crop: int
) -> None:
    """Batches that a thread reads at once share a block, which is sent once."""
    blocks, received = [], Ring.receive

    def receive(ring: Ring, worker: int, slot: int, sent: Any) -> torch.Tensor:
        blocks.append(sent is not None)
        return received(ring, worker, slot, sent)

    monkeypatch.setattr(Ring, "receive", receive)
    loader = load(open_dataset(place, decode=CenterCrop(crop)), num_workers=1)
    batches = sum(1 for _ in range(8) for _ in loader)
    assert batches == 8 * len(loader)
    at_once = loader._engine._fetch.batches_at_once(BATCH)
    assert at_once == (16 if crop == 16 else 8)
    assert len(blocks) == 8 * -(-len(loader) // at_once)
    assert 1 <= sum(blocks) <= 7


def test_resuming_before_a_short_batch_changes_no_group(place: Path, load: Load) -> None:
    """More batches of one sample than of two are read at once, and both sides count them."""
    loader = load(open_dataset(place, decode=CenterCrop(600)), endless=True, num_workers=1)
    batches = iter(loader)
    for _ in range(ROWS // BATCH):  # all but the last, of one sample
        next(batches)
    state = loader.state_dict()
    expected = [next(batches) for _ in range(20)]
    loader.load_state_dict(state)
    assert all(map(same, itertools.islice(loader, 20), expected))


def test_helpers_draw_other_numbers_from_global_generators(place: Path, load: Load) -> None:
    """A fork has the state of its parent, and PyTorch seeds the first worker of each loader."""
    dataset = open_dataset(place, drawn, decode="numpy")
    loader = load(dataset, persistent_workers=False)
    epochs = [torch.cat([values for values, _ in loader]) for _ in range(2)]
    for one, other in zip(epochs[0].T, epochs[1].T, strict=True):
        assert not set(one.tolist()) & set(other.tolist())


# The choice of the engine.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is a CUDA device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("device")
def test_auto_never_uses_the_helper_which_nobody_has_measured_next_to_a_gpu(
    place: Path, load: Load
) -> None:
    dataset = open_dataset(place, decode=CenterCrop(16))
    assert load(dataset, engine="auto", pin_memory=False).engine == "thread"
    assert load(dataset, engine="helper", pin_memory=False).engine == "helper"
    slow = open_dataset(place, drawn, decode="numpy")
    assert load(slow, engine="auto", pin_memory=False).engine == "process"


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("problem", ["shared_memory_problem", "descriptor_problem"])
def test_threads_replace_a_helper_that_lacks_memory(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    dataset = open_dataset(place, decode=CROP)
    expected = list(load(dataset, engine="thread", pin_memory=False))
    monkeypatch.setattr(preflight, problem, lambda needed: "there is no room")
    with pytest.warns(RuntimeWarning, match="using threads") as caught:
        loader = load(dataset, pin_memory=False)
    assert (loader.engine, loader.reason) == ("thread", "requested, but there is no room")
    assert caught[0].filename == __file__
    assert same(list(loader), expected)


def test_it_needs_the_shared_memory_of_its_blocks(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(preflight, "shared_memory_problem", needed.append)
    load(open_dataset(place, decode=CenterCrop(1200)), num_workers=2)
    # 4 prefetched, 2 on their way, and 2 in use; of 2 images, and 8 bytes for each label.
    assert needed == pytest.approx([8 * 2 * 1200 * 1200 * 3], rel=1e-3)


def test_threads_replace_a_helper_that_cannot_start_later(
    place: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = load(open_dataset(place, decode=CROP))
    monkeypatch.setattr(loader._engine, "start_problem", lambda: "another thread runs")
    with pytest.warns(RuntimeWarning, match="another thread"):
        assert len(list(loader)) == len(loader)
    assert (loader.engine, loader.reason) == ("thread", "requested, but another thread runs")
