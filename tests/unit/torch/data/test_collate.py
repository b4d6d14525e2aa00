"""Batches: a sequence of samples for PyTorch, and one block without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, StackDataset, default_collate

from shardkit import collate
from shardkit.torch.data.collate import BatchView, Values, count


def make_view(count: int = 3) -> tuple[BatchView, torch.Tensor]:
    block = torch.arange(count * 12, dtype=torch.uint8).reshape(count, 3, 2, 2)
    return BatchView([Values(block, block), Values(list(range(count)))]), block


class Views(Dataset[Any]):
    """Returns batches like shardkit's datasets."""

    def __init__(self) -> None:
        self.given: list[BatchView] = []

    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> BatchView:
        block = torch.stack([torch.full((3, 2, 2), row, dtype=torch.uint8) for row in rows])
        self.given.append(BatchView([Values(block, block), Values(list(rows))]))
        return self.given[-1]


def test_a_view_is_a_sequence_of_samples() -> None:
    view, block = make_view()
    assert len(view) == 3
    image, label = view[1]
    assert torch.equal(image, block[1])
    assert image.data_ptr() == block[1].data_ptr()
    assert label == 1
    assert [label for _, label in view] == [0, 1, 2]
    assert [label for _, label in reversed(view)] == [2, 1, 0]
    assert view[-1][1] == 2
    assert [label for _, label in view[1:]] == [1, 2]
    for position in (3, -4):
        with pytest.raises(IndexError):
            view[position]
    with pytest.raises(TypeError):  # a tensor would get another axis
        BatchView([Values(block, block)])[None]  # type: ignore[call-overload]


def test_any_collatable_labels_are_collated() -> None:
    view = BatchView([Values([torch.zeros(2), torch.ones(2)]), Values([4, 5])])  # without a block
    images, labels = collate(view)
    assert (images.tolist(), labels.tolist()) == ([[0, 0], [1, 1]], [4, 5])
    block = torch.zeros(2, 3, 1, 1, dtype=torch.uint8)
    assert collate(BatchView([Values(block, block), Values(["a", "b"])]))[1] == ["a", "b"]
    vectors = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
    assert collate(BatchView([Values(block, block), Values(vectors)]))[1].shape == (2, 2)


def test_other_samples_use_default_collate() -> None:
    images, labels = collate([(np.zeros(2), 1), (np.ones(2), 2)])
    assert images.shape == (2, 2)
    assert labels.tolist() == [1, 2]
    assert collate((1, 2)).tolist() == [1, 2]


def test_images_of_different_sizes_and_of_pillow_are_refused() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        collate(BatchView([Values([torch.zeros(2), torch.zeros(3)]), Values([0, 1])]))
    with pytest.raises(TypeError, match="PIL"):
        collate(BatchView([Values([Image.new("RGB", (2, 2))]), Values([0])]))


def test_stack_dataset_accepts_views() -> None:
    stacked = StackDataset(Views(), Views())
    ((first, one), (second, two)) = next(iter(DataLoader(stacked, batch_size=4)))
    assert torch.equal(first, second)
    assert one.tolist() == two.tolist() == [0, 1, 2, 3]


IMAGE, PICTURE = torch.zeros(3, 8, 8), Image.new("RGB", (4, 4))
TARGET = {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)}


BATCHES: list[tuple[Any, int]] = [
    (default_collate([(IMAGE, 1)] * 7), 7),
    (default_collate([(IMAGE, "name")] * 7), 7),
    (default_collate([("name", IMAGE)] * 7), 7),
    (default_collate([({"image": IMAGE}, {"label": 1})] * 7), 7),
    (default_collate([((IMAGE, IMAGE), (1, 2))] * 7), 7),
    (default_collate([((IMAGE, IMAGE), 1)] * 7), 7),
    (default_collate([{"name": "a", "image": IMAGE}] * 7), 7),
    (default_collate([{"image": {"left": IMAGE, "right": IMAGE}}] * 7), 7),
    ([(IMAGE, 1)] * 64, 64),
    ([(PICTURE, 1)] * 64, 64),
    ([(b"jpeg", 1)] * 64, 64),
    ([(IMAGE, TARGET)] * 64, 64),
    ([{"image": IMAGE, "label": 1}] * 64, 64),
    ([(IMAGE, 1)], 1),
    ((torch.zeros(6, 3, 8, 8), {"boxes": torch.zeros(9, 4), "labels": torch.zeros(9)}), 6),
    ((torch.zeros(6, 3, 8, 8), [TARGET] * 6), 6),
    (([IMAGE] * 6, [TARGET] * 6), 6),
    (tuple(zip(*[(IMAGE, TARGET)] * 6, strict=True)), 6),
    (tuple(zip(*[(IMAGE, 1)] * 6, strict=True)), 6),
    (tuple(zip(*[(PICTURE, 1)] * 6, strict=True)), 6),
    (([IMAGE] * 6, torch.zeros(6)), 6),
    ({"scale": 2, "size": torch.tensor(3), "image": np.zeros((6, 3, 8, 8))}, 6),
    ({"images": [IMAGE] * 6, "labels": torch.zeros(6)}, 6),
    ((torch.tensor(1.0), torch.zeros(6, 2)), 6),
    (np.zeros((6, 2)), 6),
    (make_view(6)[0], 6),
    ([b"jpeg", b"more", b"last"], 3),
    ([PICTURE, PICTURE], 2),
    (["a", "b"], 2),
    ((b"jpeg", 1), 1),
    (b"jpeg", 1),
    ("name", 1),
    (np.float32(1), 1),
    (PICTURE, 1),
    ([], 0),
]


def test_samples_are_counted_however_a_batch_is_built() -> None:
    assert [count(batch) for batch, _ in BATCHES] == [samples for _, samples in BATCHES]
