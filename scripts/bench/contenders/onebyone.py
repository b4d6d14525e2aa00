"""Raw pixels, read with the libraries that made their stores: h5py and NumPy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset


class _Store(ABC):
    """Images of one size by their number."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def write(self, target: Path, images: Iterator[Any], count: int) -> None:
        """Write all images into an empty folder."""

    @abstractmethod
    def __getitem__(self, row: Any) -> Any:
        """Return one image, or several."""


class _Memmap(_Store):
    """One .npy file."""

    def write(self, target: Path, images: Iterator[Any], count: int) -> None:
        shape = (count, SIDE, SIDE, 3)
        file = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
        for row, pixels in enumerate(images):
            file[row] = pixels

    def __getitem__(self, row: Any) -> Any:
        return np.load(self.path / "images.npy", mmap_mode="r")[row]


class _HDF5(_Store):
    """One dataset, a chunk for each image."""

    _open: Any = None

    def write(self, target: Path, images: Iterator[Any], count: int) -> None:
        shape = (SIDE, SIDE, 3)
        with h5py.File(target / "data.h5", "w") as file:
            data = file.create_dataset("images", (count, *shape), np.uint8, chunks=(1, *shape))
            for row, pixels in enumerate(images):
                data[row] = pixels

    def __getitem__(self, row: Any) -> Any:
        if self._open is None:  # in each worker anew: HDF5 is not to be forked
            self._open = h5py.File(self.path / "data.h5", "r")["images"]
        return self._open[row]


_STORES: dict[str, Callable[[Path], _Store]] = {"h5py": _HDF5, "memmap": _Memmap}


class _Pixels(Dataset[Any]):
    """What a DataLoader asks: one image of a store, and its label."""

    def __init__(self, store: _Store, labels: list[int]) -> None:
        self.store, self.labels = store, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.store[row]).permute(2, 0, 1), self.labels[row]


class Adapter(adapter.Adapter):
    """The option ``store``: h5py through a plain DataLoader, a memmap in this process."""

    distribution = "h5py"

    def prepare(self) -> None:
        """Write the store."""
        name = self.task.options["store"]
        place = self.task.sets / f"{self.task.folder.name}-one-{name}"
        self.store: _Store = _STORES[name](place)
        make_once(place, lambda to: self.store.write(to, self._images(), len(self.entries)))
        self.labels = [label for _, label in self.entries]
        self._loader = self._make(shuffle=True) if name == "h5py" else None

    def shuffled(self) -> Iterable[Batch]:
        """Read in a random order."""
        if self._loader is not None:
            return self._loader
        return self._read(np.random.default_rng().permutation(len(self.labels)))

    def ordered(self) -> Iterable[Batch]:
        """Read in the order of the paths."""
        if self._loader is not None:
            return self._make(shuffle=False)
        return self._read(np.arange(len(self.labels)))

    def _images(self) -> Iterator[Any]:
        for path, _ in self.entries:
            yield np.array(Image.open(self.task.folder / path).convert("RGB"))

    def _make(self, *, shuffle: bool) -> DataLoader[Any]:
        dataset = Subset(_Pixels(self.store, self.labels), range(len(self.labels)))
        return DataLoader(
            dataset, BATCH, shuffle=shuffle, num_workers=WORKERS, persistent_workers=shuffle
        )

    def _read(self, order: Any) -> Iterator[Batch]:
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            labels = torch.tensor([self.labels[row] for row in rows])
            yield torch.from_numpy(self.store[rows]).permute(0, 3, 1, 2), labels
