"""Loose files, as torchvision's ImageFolder reads them: Pillow and a plain DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from contenders import adapter
from contenders.adapter import BATCH, TRANSFORMS, WORKERS, Batch
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class PlainImageFolder(Dataset[Any]):
    """Open, convert to RGB, transform; one item at a time."""

    def __init__(self, task: adapter.Task, transform: Callable[[Image.Image], Any]) -> None:
        self.samples = [
            (str(task.folder / path), label) for path, label in adapter.entries(task.folder)
        ]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        path, label = self.samples[row]
        with open(path, "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), label


class Adapter(adapter.Adapter):
    """The folder itself."""

    distribution = "pillow"

    def prepare(self) -> None:
        """Make the loader; the data are there."""
        kind = self.task.kind
        self._checked = self._loader(adapter.checked_transform(kind), shuffle=False)
        self._timed = self._loader(TRANSFORMS[kind], shuffle=True)

    def shuffled(self) -> Iterable[Batch]:
        """Read with persistent workers."""
        return self._timed

    def ordered(self) -> Iterable[Batch]:
        """Read with the same workers, in the order of the paths."""
        return self._checked

    def _loader(
        self, transform: Callable[[Image.Image], torch.Tensor], *, shuffle: bool
    ) -> DataLoader[Any]:
        return DataLoader(
            PlainImageFolder(self.task, transform),
            BATCH,
            shuffle=shuffle,
            num_workers=WORKERS,
            persistent_workers=shuffle,
        )
