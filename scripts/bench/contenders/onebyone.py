"""Raw pixels, read with the libraries that made their stores: h5py and NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class _Pixels(Dataset[Any]):
    """What a DataLoader asks: one image of an HDF5 file, and its label."""

    _images: Any = None

    def __init__(self, path: Path, labels: list[int]) -> None:
        self.path, self.labels = path, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if self._images is None:  # in each worker anew: HDF5 is not to be forked
            self._images = h5py.File(self.path, "r")["images"]
        return torch.from_numpy(self._images[row]).permute(2, 0, 1), self.labels[row]


class Adapter(adapter.Adapter):
    """The option ``store``: h5py through a plain DataLoader, a memmap in this process."""

    distribution = "h5py"

    def prepare(self) -> None:
        """Write the store."""
        self.labels = [label for _, label in self.entries]
        name = self.task.options["store"]
        make = self._write_hdf5 if name == "h5py" else self._write_memmap
        self.place = make_once(self.task.sets / f"{self.task.folder.name}-one-{name}", make)
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

    def _write_hdf5(self, target: Path) -> None:
        """Write one dataset, a chunk for each image."""
        shape = (SIDE, SIDE, 3)
        with h5py.File(target / "data.h5", "w") as file:
            data = file.create_dataset(
                "images", (len(self.entries), *shape), np.uint8, chunks=(1, *shape)
            )
            self._fill(data)

    def _write_memmap(self, target: Path) -> None:
        """Write one .npy file."""
        shape = (len(self.entries), SIDE, SIDE, 3)
        self._fill(np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape))

    def _fill(self, images: Any) -> None:
        for row, (path, _) in enumerate(self.entries):
            images[row] = np.array(Image.open(self.task.folder / path).convert("RGB"))

    def _make(self, *, shuffle: bool) -> DataLoader[Any]:
        dataset = _Pixels(self.place / "data.h5", self.labels)
        return DataLoader(
            dataset, BATCH, shuffle=shuffle, num_workers=WORKERS, persistent_workers=shuffle
        )

    def _read(self, order: Any) -> Iterator[Batch]:
        images = np.load(self.place / "images.npy", mmap_mode="r")
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            labels = torch.tensor([self.labels[row] for row in rows])
            yield torch.from_numpy(images[rows]).permute(0, 3, 1, 2), labels
