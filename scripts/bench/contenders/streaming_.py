"""MosaicML Streaming: its MDS shards, through PyTorch's DataLoader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from contenders.adapter import BATCH, TRANSFORMS, WORKERS
from contenders.library import Library, decoded
from PIL import Image
from torch.utils.data import DataLoader


def _stand_in_for_torchvision() -> None:
    """Let streaming be imported where no torchvision fits the PyTorch that is measured.

    It imports two names of torchvision for its vision datasets, of which nothing is used here: a
    base class, and a function that would be a default transform.
    """
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    vars(sys.modules["torchvision.datasets"])["VisionDataset"] = torch.utils.data.Dataset
    vars(sys.modules["torchvision.transforms.functional"])["to_tensor"] = None


_stand_in_for_torchvision()

import streaming  # type: ignore[import-not-found]  # noqa: E402


class _Transformed(streaming.StreamingDataset):  # type: ignore[misc]
    """Its dataset with a transform in Python, as its documentation has it."""

    kind = "crop"

    def __getitem__(self, at: int) -> tuple[Any, int]:
        sample = super().__getitem__(at)
        return TRANSFORMS[self.kind](decoded(sample["jpeg"])), sample["label"]


class Adapter(Library):
    """StreamingDataset of a local folder."""

    distribution = "mosaicml-streaming"
    name = "streaming"

    def write(self, target: Path) -> None:
        """Write MDS shards, with the defaults."""
        columns = {"jpeg": "bytes", "label": "int"}
        with streaming.MDSWriter(out=str(target), columns=columns) as writer:
            for data, label in self.stored():
                writer.write({"jpeg": data, "label": label})

    def loader(self, path: Path) -> Any:
        """Return a DataLoader, as its documentation does."""
        streaming.base.util.clean_stale_shared_memory()
        self._dataset = _Transformed(local=str(path), shuffle=True, batch_size=BATCH)
        self._dataset.kind = self.task.kind
        return DataLoader(self._dataset, BATCH, num_workers=WORKERS, persistent_workers=True)

    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Ask for one row after the other."""
        for row in range(self._dataset.num_samples):
            sample = streaming.StreamingDataset.__getitem__(self._dataset, row)
            yield decoded(sample["jpeg"]), sample["label"]
