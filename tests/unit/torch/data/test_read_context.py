"""The context of a batch: the epoch, random numbers of each sample, and its memory."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fields import make_fields
from helpers import DEADLINE, make_dataset, make_tree, png
from loading import METHODS
from refusals import refused
from torch.utils.data import DataLoader, Subset

from shardkit import RandomResizedCrop, collate, make_loader, open_dataset, with_rng
from shardkit.errors import TransformFailed, UsageError
from shardkit.torch.data.read_context import (
    BatchContext,
    EpochCell,
    NumberedRows,
    ReadContext,
    new_block,
    reading,
)

ROWS = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reading")
    files: dict[str, bytes | None] = {f"{'ab'[n % 2]}/{n}.png": png(14, 10, n) for n in range(ROWS)}
    make_tree(root / "photos", files)
    return make_dataset(root / "photos", root / "made")


def numbers(_: Any) -> torch.Tensor:
    """Draw from all three global generators."""
    return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


@with_rng
def own_numbers(_: Any, rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.random(3))


class Marked:
    """A transform whose class is marked as taking a generator."""

    takes_rng = True

    def __call__(self, _: Any, rng: np.random.Generator) -> torch.Tensor:
        return torch.from_numpy(rng.random(3))


class Fails:
    """A transform that fails for images with a certain sum."""

    def __init__(self, error: Exception, total: int) -> None:
        self.error = error
        self.total = total

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        if int(image.sum()) == self.total:
            raise self.error
        return image


def global_state() -> tuple[Any, ...]:
    numpys: Any = np.random.get_state()
    return random.getstate(), numpys[1].tobytes(), numpys[2:], torch.get_rng_state().tolist()


# The cell.


def test_an_invalid_epoch_or_seed_is_a_usage_error_and_changes_nothing() -> None:
    cell = EpochCell()
    cell.set(2, 1)
    epochs: list[Any] = [-1, 1.0, "1", None, True, torch.tensor([1, 2]), 2**63]
    for epoch in epochs:
        with refused(UsageError, f"epoch={epoch!r}"):
            cell.set(epoch, 5)
    seeds: list[Any] = [1.5, "3", None]
    for seed in seeds:
        with refused(UsageError, f"seed={seed!r}"):
            cell.set(3, seed)
    assert cell.get() == (2, 1)


def through_pickle(cell: Any) -> Any:
    return pickle.loads(pickle.dumps(cell))


def seen_by_a_child(cell: EpochCell, change: Callable[[], None]) -> tuple[int, int] | None:
    """Return what a forked process reads from ``cell`` after ``change`` was called here."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def work() -> None:
        there.recv()
        there.send(cell.get())

    child = context.Process(target=work, daemon=True)
    child.start()
    change()
    here.send(None)
    assert here.poll(DEADLINE)
    found: tuple[int, int] | None = here.recv()
    child.join(DEADLINE)
    return found


@pytest.mark.parametrize("copied", [lambda cell: cell, copy.copy, copy.deepcopy, through_pickle])
def test_a_forked_process_sees_what_is_set_later(copied: Callable[[EpochCell], EpochCell]) -> None:
    """A copy too: Lightning and others copy datasets before loaders are made."""
    cell = copied(EpochCell())
    assert seen_by_a_child(cell, lambda: cell.set(5, 6)) == (5, 6)


def test_without_shared_memory_a_cell_serves_its_own_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    cell = EpochCell()
    assert cell.get() is None
    cell.set(5, 6)
    assert cell.get() == (5, 6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_set_epoch_reaches_persistent_workers(place: Path, method: str, wrapped: bool) -> None:
    dataset = open_dataset(place, own_numbers, decode="torch")
    inside: Any = Subset(dataset, range(ROWS)) if wrapped else dataset
    loader = DataLoader(
        inside, 3, num_workers=2, persistent_workers=True, multiprocessing_context=method
    )

    def epoch(number: int) -> torch.Tensor:
        dataset.set_epoch(number, seed=1)
        return torch.cat([images for images, _ in loader])

    first, second, again = epoch(0), epoch(1), epoch(0)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    here = open_dataset(place, own_numbers, decode="torch")
    here.set_epoch(1, seed=1)
    assert torch.equal(second, torch.stack([image for image, _ in here[:]]))


# Random numbers.


def drawn(context: BatchContext, row: int = 0) -> int:
    return context.draws(row).bits()


def test_a_loaders_context_overrides_the_cell_within_its_block() -> None:
    cell = EpochCell()
    cell.set(1, 1)
    own = drawn(BatchContext(cell))
    with reading(ReadContext(seed=2, epoch=3)):
        inner = drawn(BatchContext(cell))
        with reading(ReadContext(seed=1, epoch=1)):
            assert drawn(BatchContext(cell)) == own
        assert drawn(BatchContext(cell)) == inner
    assert inner != own
    assert drawn(BatchContext(cell)) == own
    with pytest.raises(ZeroDivisionError), reading(ReadContext(seed=2, epoch=3)):
        _ = 1 / 0
    assert drawn(BatchContext(cell)) == own


def test_a_context_is_thread_local() -> None:
    cell, found = EpochCell(), []
    cell.set(1, 1)
    own = drawn(BatchContext(cell))
    with reading(ReadContext(seed=2, epoch=3)):
        thread = threading.Thread(target=lambda: found.append(drawn(BatchContext(cell))))
        thread.start()
        thread.join(DEADLINE)
    assert found == [own]


def test_without_an_epoch_draws_follow_the_generator_of_torch() -> None:
    cell = EpochCell()
    torch.manual_seed(1)
    first = [drawn(BatchContext(cell)) for _ in range(4)]
    torch.manual_seed(1)
    assert [drawn(BatchContext(cell)) for _ in range(4)] == first
    assert len(set(first)) == 4
    torch.manual_seed(2)
    assert drawn(BatchContext(cell)) != first[0]


def test_an_image_operation_and_a_transform_draw_different_numbers() -> None:
    cell = EpochCell()
    cell.set(0, 0)
    context = BatchContext(cell)
    given = context.apply(with_rng(lambda _, rng: rng.bit_generator.state), [None], 3)
    assert int(given["state"]["key"][0]) != drawn(context, 3)


@pytest.mark.parametrize("transform", [numbers, own_numbers, Marked()])
def test_transforms_repeat_with_epoch_seed_and_row(place: Path, transform: Any) -> None:
    dataset = open_dataset(place, transform, decode="torch")

    def read(epoch: int, seed: int, rows: Any) -> torch.Tensor:
        dataset.set_epoch(epoch, seed)
        return torch.stack([image for image, _ in dataset[rows]])

    every = read(1, 2, range(ROWS))
    assert len({tuple(values) for values in every.tolist()}) == ROWS
    rows = [5, 0, 6, -1]
    assert torch.equal(read(1, 2, rows), every[rows])  # neighbours do not matter
    assert not torch.equal(read(2, 2, rows), every[rows])
    assert not torch.equal(read(1, 3, rows), every[rows])


def test_the_global_generators_are_restored(place: Path) -> None:
    total = int(open_dataset(place, decode="torch")[2][0].sum())
    dataset = open_dataset(place, numbers, decode="torch")
    dataset.set_epoch(1)
    before = global_state()
    dataset[:]
    assert global_state() == before
    dataset.transform = Fails(ValueError("no"), total)
    with pytest.raises(TransformFailed):
        dataset[:]
    assert global_state() == before


def test_reading_without_any_random_operation_draws_nothing(place: Path) -> None:
    dataset = open_dataset(place, decode="torch")
    before = global_state()
    dataset[:]
    assert global_state() == before


@pytest.mark.parametrize(
    "context",
    [None, ReadContext(seed=0, epoch=0, alone=False)],
    ids=["no epoch", "several threads"],
)
def test_ordinary_transforms_draw_as_usual(place: Path, context: ReadContext | None) -> None:
    dataset = open_dataset(place, lambda _: random.random(), decode="torch")
    random.seed(3)
    expected = [random.random() for _ in range(ROWS)]
    random.seed(3)
    with nullcontext() if context is None else reading(context):
        assert [image for image, _ in dataset[:]] == expected


# Errors of transforms.


def nothing(*_: Any) -> None:
    """Transform an image, but forget to return it."""


FORGETFUL: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"transform": nothing}, ("the transform ", "None")),
    ({"target_transform": nothing}, ("target_transform", "None")),
    ({"transform": {"image": nothing}}, ("the transform ", "None")),
    ({"transform": {("image", "label"): nothing}}, ("image, label", "None")),
]


def test_a_transform_that_forgets_to_return_is_named(place: Path) -> None:
    decodes: list[Any] = ["pil", "torch", "numpy", RandomResizedCrop(4)]
    for (options, facts), decode in itertools.product(FORGETFUL, decodes):
        dataset = open_dataset(place, decode=decode, **options)
        with refused(TransformFailed, *facts, "row 0,"):
            dataset[0]
        with refused(TransformFailed, *facts):
            next(iter(make_loader(dataset, 2, num_workers=0)))


# Memory and marks.


def test_a_block_comes_from_the_loader_only_if_shared() -> None:
    asked = []

    def allocate(shape: tuple[int, ...]) -> torch.Tensor:
        asked.append(shape)
        return torch.zeros(shape, dtype=torch.uint8)

    with reading(ReadContext(seed=0, epoch=0, allocate=allocate)):
        assert new_block((2, 3), shared=True).shape == (2, 3)
        assert new_block((1, 3), shared=False).shape == (1, 3)
        lent = new_block((2, 3), shared=True, dtype=torch.float32)
    assert asked == [(2, 3), (2, 12)]  # in bytes
    own = new_block((2, 3), shared=True, dtype=torch.float32)
    assert (lent.dtype, lent.shape) == (own.dtype, own.shape) == (torch.float32, (2, 3))
    block = new_block((2, 3, 4), shared=True)
    assert (block.dtype, block.shape) == (torch.uint8, (2, 3, 4))
    assert block.is_contiguous()
    assert not is_shared(block)


def test_arrays_keep_the_storage_of_their_block(tmp_path: Path) -> None:
    """Otherwise pinned memory would be reused while it is copied: PyTorch would not know it."""
    blocks: list[torch.Tensor] = []

    def allocate(shape: tuple[int, ...]) -> torch.Tensor:
        blocks.append(torch.empty(shape, dtype=torch.uint8))
        return blocks[-1]

    dataset = open_dataset(make_fields(tmp_path / "made"), fields=("latent", "half"))
    rows = NumberedRows([1, 4, 2], ReadContext(0, 0, allocate))
    batch = collate(dataset.__getitems__(rows))
    assert [part.untyped_storage()._cdata for part in batch] == [
        block.untyped_storage()._cdata for block in blocks
    ]


class SharedBlocks(torch.utils.data.Dataset[bool]):
    """Reports whether a block created in a worker is shared."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> bool:
        return is_shared(new_block((3, 4), shared=bool(row)))


def is_shared(block: torch.Tensor) -> bool:
    return bool(block.is_shared())  # type: ignore[no-untyped-call]


def test_in_a_plain_worker_a_block_is_in_shared_memory() -> None:
    loader = DataLoader(SharedBlocks(), None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == [False, True]


@pytest.mark.parametrize("decode", ["torch", "pil", RandomResizedCrop(4)])
def test_the_row_being_read_is_noted(place: Path, decode: Any) -> None:
    dataset = open_dataset(place, decode=decode)
    mark = np.full(1, -1)
    seen = []
    dataset.transform = lambda image: seen.append(int(mark[0])) or image  # type: ignore[func-returns-value]
    with reading(ReadContext(seed=0, epoch=0, mark=mark)):
        dataset[[3, -1, 0]]
    assert seen == [3, ROWS - 1, 0]
