"""The stored images of a dataset, without decoding; runs in the measurement process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Subset

from shardkit.codecs.image import SNIFF_BYTES, inspect, sniff
from shardkit.dataset.shardset import ShardSet
from shardkit.torch.data.datasets import ShardDataset


class Header(NamedTuple):
    """Properties of a stored image."""

    kind: str
    """Encoding, such as ``jpg``."""
    width: int
    height: int
    bytes: int
    label: int
    """-1 without one."""


def innermost(dataset: Any, rows: list[int] | None = None) -> tuple[Any, list[int]]:
    """Return the dataset within any ``Subset``, and its rows for ``rows``."""
    rows = rows or []
    while type(dataset) is Subset:
        rows = [int(dataset.indices[row]) for row in rows]
        dataset = dataset.dataset
    return dataset, rows


def stored_images(dataset: Any) -> Stored | None:
    """Return the stored images of a shardkit dataset or an image folder; None for other datasets.

    A dataset with a list ``samples`` of (path, label) is an image folder, as in torchvision.
    """
    inner, _ = innermost(dataset)
    if isinstance(inner, ShardDataset):
        return Stored(dataset, ShardSet(inner.path), [])
    samples = getattr(inner, "samples", None)
    if isinstance(samples, list) and samples and isinstance(samples[0], tuple):
        path, *rest = samples[0]
        if len(rest) == 1 and isinstance(path, (str, Path)) and Path(path).is_file():
            return Stored(dataset, None, samples)
    return None


class Stored:
    """The images of a dataset by row: in shards, or in files with labels."""

    def __init__(
        self, dataset: Any, shards: ShardSet | None, files: list[tuple[str | Path, int]]
    ) -> None:
        self._dataset = dataset
        self._shards = shards
        self._files = files
        self._memory = memoryview(b"")

    def read(self, rows: list[int]) -> list[bytes | memoryview]:
        """Read the bytes of some images; they are valid until the next call."""
        _, inner = innermost(self._dataset, rows)
        if self._shards is None:
            return [Path(self._files[row][0]).read_bytes() for row in inner]
        found = self._shards.find(np.array(inner, np.int64))
        if sum(found.lengths) > len(self._memory):  # new memory costs more than reading into it
            self._memory = memoryview(bytearray(sum(found.lengths)))
        starts = np.cumsum([0, *found.lengths]).tolist()
        return [found.read(n, self._memory[starts[n] :]).data for n in range(len(inner))]

    def headers(self, rows: list[int]) -> list[Header]:
        """Return the properties of some images."""
        _, inner = innermost(self._dataset, rows)
        if self._shards is not None:
            found = self._shards.find(np.array(inner, np.int64))
            columns = (found.fields, found.widths, found.heights, found.lengths, found.labels)
            return [Header(*values) for values in zip(*columns, strict=True)]
        headers = []
        for row in inner:
            path, label = self._files[row]
            data = Path(path).read_bytes()
            kind = sniff(data[:SNIFF_BYTES]) or ""
            info = inspect(data, kind)
            headers.append(Header(kind, info.width, info.height, len(data), int(label)))
        return headers

    def files(self, rows: list[int]) -> list[Path]:
        """Return the files that some images are read from."""
        if self._shards is not None:
            return [path for path in self._shards.directory.rglob("*") if path.is_file()]
        return [Path(self._files[row][0]) for row in innermost(self._dataset, rows)[1]]
