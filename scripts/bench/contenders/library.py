"""What the libraries that decode with Pillow have in common.

They store the files' bytes, take a transform in Python, and go through a DataLoader of theirs or
PyTorch's, with worker processes.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from contenders import adapter
from contenders.adapter import Batch, checked_transform, make_once
from PIL import Image


class Library(adapter.Adapter):
    """A library whose datasets can also be asked for one sample after the other."""

    name: str
    """Of its dataset, in the folder of datasets."""

    def prepare(self) -> None:
        """Write the dataset and make the loader."""
        self.path = make_once(self.task.sets / f"{self.task.folder.name}-{self.name}", self.write)
        self._loader: Iterable[Batch] = self.loader(self.path)

    def shuffled(self) -> Iterable[Batch]:
        """Read with the library's loader."""
        return self._loader

    def ordered(self) -> Iterable[Batch]:
        """Decode one sample after the other, with the transform of the check."""
        transform = checked_transform(self.task.kind)
        samples = ((transform(image), label) for image, label in self.samples(self.path))
        return adapter.batches(samples)

    @abstractmethod
    def write(self, target: Path) -> None:
        """Write the dataset into an empty folder."""

    @abstractmethod
    def loader(self, path: Path) -> Any:
        """Return the loader that is timed, with shuffling and 2 persistent workers."""

    @abstractmethod
    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Yield image and label of each sample, in the order they were written."""


def decoded(data: bytes) -> Image.Image:
    """Decode as the documentation of these libraries does."""
    return Image.open(io.BytesIO(data)).convert("RGB")
