"""Built-in synthetic datasets: loads whose right answer is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.utils.data import Dataset

from shardkit.torch.data.collate import BatchView
from shardkit.torch.data.read_context import new_block


class Case(Dataset[Any]):
    """A synthetic dataset, with the settings that it is read with where nobody says others."""

    BATCH_SIZE: ClassVar[int]
    EPOCHS: ClassVar[int]
    WORKERS: ClassVar[int]


class TutorialDataset(Case):
    """The load of PyTorch's tutorial on data loading: 512 samples of noise, 5 ms for each fetch.

    A fetch waits as a database or a network does, whether it brings one sample or a batch; so most
    of what can be gained is gained by fetching batches. See "Data Loading Optimization in PyTorch",
    docs.pytorch.org/tutorials/intermediate/intermediate_data_loading_tutorial.html.
    """

    ROWS, SIDE, CLASSES = 512, 224, 10
    FETCH_SECONDS = 0.005
    BATCH_SIZE, EPOCHS, WORKERS = 32, 10, 4

    def __len__(self) -> int:
        return self.ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        image = torch.randn(3, self.SIDE, self.SIDE)
        label = int(torch.randint(0, self.CLASSES, (1,)).item())
        time.sleep(self.FETCH_SECONDS)
        return image, label

    def __getitems__(self, rows: Sequence[int]) -> BatchView:
        """Return the samples of one fetch, in one block, as datasets of shardkit do."""
        shape = (len(rows), 3, self.SIDE, self.SIDE)
        images = new_block(shape, shared=True, dtype=torch.float32)
        torch.randn(shape, out=images)
        labels = torch.randint(0, self.CLASSES, (len(rows),)).tolist()
        time.sleep(self.FETCH_SECONDS)
        return BatchView(images, labels, images)


CASES: dict[str, type[Case]] = {"tutorial": TutorialDataset}
"""By the name that ``shardkit bench --case`` takes."""
