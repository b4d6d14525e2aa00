"""The stores themselves, read one record at a time with the libraries that made them.

The option ``store`` is one of `_STORES`; raw pixels are kept in h5py and memmap, files in the rest.
"""

from __future__ import annotations

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
import torch
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset


class _Store(ABC):
    """Records by their number."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        """Write all records into an empty folder."""

    @abstractmethod
    def __getitem__(self, row: int) -> Any:
        """Return one record."""


class _Memmap(_Store):
    """One .npy file of all pixels."""

    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        shape = (count, SIDE, SIDE, 3)
        file = np.lib.format.open_memmap(target / "images.npy", "w+", np.uint8, shape)
        for row, pixels in enumerate(records):
            file[row] = pixels

    def __getitem__(self, row: Any) -> Any:
        return np.load(self.path / "images.npy", mmap_mode="r")[row]


class _HDF5(_Store):
    """One dataset: of all pixels, or of byte strings of any length."""

    _open: Any = None

    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        first = next(records)
        shape, kind = (count,), h5py.vlen_dtype(np.uint8)
        if not isinstance(first, bytes):
            shape, kind = (count, *first.shape), np.dtype(np.uint8)
        with h5py.File(target / "data.h5", "w") as file:
            chunks = (1, *shape[1:]) if len(shape) > 1 else None
            data = file.create_dataset("images", shape, kind, chunks=chunks)
            for row, record in enumerate([first, *records]):
                data[row] = record if len(shape) > 1 else np.frombuffer(record, np.uint8)

    def __getitem__(self, row: int) -> Any:
        if self._open is None:  # in each worker anew: HDF5 is not to be forked
            self._open = h5py.File(self.path / "data.h5", "r")["images"]
        record = self._open[row]
        return record if record.ndim > 1 else record.tobytes()


class _LMDB(_Store):
    """One environment, keys of eight digits."""

    _open: Any = None

    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        environment = lmdb.open(str(target), map_size=1 << 36)
        with environment.begin(write=True) as transaction:
            for row, record in enumerate(records):
                transaction.put(b"%08d" % row, record)
        environment.close()

    def __getitem__(self, row: int) -> Any:
        if self._open is None:
            environment = lmdb.open(str(self.path), readonly=True, lock=False, readahead=False)
            self._open = environment.begin()
        return self._open.get(b"%08d" % row)


class _Tar(_Store):
    """One tar file, whose members are found by a list of their places."""

    _open: Any = None

    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        with tarfile.open(target / "data.tar", "w") as archive:
            for row, record in enumerate(records):
                member = tarfile.TarInfo(f"{row:08d}.jpg")
                member.size = len(record)
                archive.addfile(member, io.BytesIO(record))

    def __getitem__(self, row: int) -> Any:
        if self._open is None:
            archive = tarfile.open(self.path / "data.tar")  # noqa: SIM115  # stays open
            self._open = archive, archive.getmembers()
        archive, members = self._open
        return archive.extractfile(members[row]).read()


class _Loose(_Store):
    """Files as they are."""

    def write(self, target: Path, records: Iterator[Any], count: int) -> None:
        for row, record in enumerate(records):
            (target / f"{row:08d}.jpg").write_bytes(record)

    def __getitem__(self, row: int) -> Any:
        return (self.path / f"{row:08d}.jpg").read_bytes()


_STORES: dict[str, Callable[[Path], _Store]] = {
    "h5py": _HDF5,
    "lmdb": _LMDB,
    "tar": _Tar,
    "loose": _Loose,
    "memmap": _Memmap,
}


class _Pixels(Dataset[Any]):
    """What a DataLoader asks: one image of a store, and its label."""

    def __init__(self, store: _Store, labels: list[int]) -> None:
        self.store, self.labels = store, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.store[row]).permute(2, 0, 1), self.labels[row]


class Adapter(adapter.Adapter):
    """A store: raw pixels of h5py through a plain DataLoader, all else read in this process."""

    distribution = "h5py"

    def prepare(self) -> None:
        """Write the store."""
        name = self.task.options["store"]
        place = self.task.sets / f"{self.task.folder.name}-one-{name}"
        self.store: _Store = _STORES[name](place)
        make_once(place, lambda to: self.store.write(to, self._records(), len(self.entries)))
        self.labels = [label for _, label in self.entries]
        self._loader: DataLoader[Any] | None = None
        if self.task.kind == "raw" and name == "h5py":
            self._loader = self._make(shuffle=True)

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

    def files(self) -> list[Path]:
        """Return the store's files."""
        return [path for path in self.store.path.iterdir() if path.is_file()]

    def _records(self) -> Iterator[Any]:
        for path, _ in self.entries:
            if self.task.kind == "raw":
                yield np.array(Image.open(self.task.folder / path).convert("RGB"))
            else:
                yield (self.task.folder / path).read_bytes()

    def _make(self, *, shuffle: bool) -> DataLoader[Any]:
        dataset = Subset(_Pixels(self.store, self.labels), range(len(self.labels)))
        return DataLoader(
            dataset, BATCH, shuffle=shuffle, num_workers=WORKERS, persistent_workers=shuffle
        )

    def _read(self, order: Any) -> Iterator[Batch]:
        for begin in range(0, len(order), BATCH):
            rows = order[begin : begin + BATCH]
            labels = torch.tensor([self.labels[row] for row in rows])
            if isinstance(self.store, _Memmap):
                yield torch.from_numpy(self.store[rows]).permute(0, 3, 1, 2), labels
            else:
                yield [self.store[row] for row in rows], labels
