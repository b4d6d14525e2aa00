"""The synthetic dataset of PyTorch's tutorial on data loading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from shardkit.torch.data.collate import BatchView, Values
from shardkit.torch.data.read_context import new_block

BATCH_SIZE, EPOCHS, WORKERS = 32, 10, 4
"""Settings in the tutorial."""


class TutorialDataset(Dataset[Any]):
    """512 samples of noise, with a wait of 5 ms per fetch.

    A fetch waits once, as for a database or a network, whether it returns one sample or a batch. So
    fetching whole batches gains the most. See "Data Loading Optimization in PyTorch",
    docs.pytorch.org/tutorials/intermediate/intermediate_data_loading_tutorial.html.
    """

    ROWS, SIDE, CLASSES = 512, 224, 10
    FETCH_SECONDS = 0.005

    def __len__(self) -> int:
        return self.ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        image = torch.randn(3, self.SIDE, self.SIDE)
        label = int(torch.randint(0, self.CLASSES, (1,)).item())
        time.sleep(self.FETCH_SECONDS)
        return image, label

    def __getitems__(self, rows: Sequence[int]) -> BatchView:
        """Return the samples of one fetch in one block, as datasets of shardkit do."""
        shape = (len(rows), 3, self.SIDE, self.SIDE)
        images = new_block(shape, shared=True, dtype=torch.float32)
        torch.randn(shape, out=images)
        labels = torch.randint(0, self.CLASSES, (len(rows),)).tolist()
        time.sleep(self.FETCH_SECONDS)
        return BatchView([Values(images, images), Values(labels)])
