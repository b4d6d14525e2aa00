"""LitData: chunks of samples, shuffled, by its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata  # type: ignore[import-not-found]
from contenders.adapter import BATCH, TRANSFORMS, WORKERS
from contenders.library import Library, decoded
from PIL import Image

_CHUNK = "8MB"
"""So that a data set of some 50 MB has several chunks to shuffle."""


class _Transformed(litdata.StreamingDataset):  # type: ignore[misc]
    """Its dataset with a transform in Python, as its documentation has it."""

    kind = "crop"

    def __getitem__(self, index: Any) -> tuple[Any, int]:
        sample = super().__getitem__(index)
        return TRANSFORMS[self.kind](decoded(sample["jpeg"])), sample["label"]


class _Reader:
    """Makes a sample of a file: an object, since it is sent to another process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, entry: tuple[str, int]) -> dict[str, Any]:
        path, label = entry
        return {"jpeg": (self.folder / path).read_bytes(), "label": label}


class Adapter(Library):
    """StreamingDataset and StreamingDataLoader."""

    distribution = "litdata"
    name = "litdata"

    def write(self, target: Path) -> None:
        """Write chunks with its one worker, in the order of the paths."""
        litdata.optimize(
            fn=_Reader(self.task.folder),
            inputs=self.entries,
            output_dir=str(target),
            num_workers=1,
            chunk_bytes=_CHUNK,
        )

    def loader(self, path: Path) -> Any:
        """Return its loader."""
        dataset = _Transformed(str(path), shuffle=True)
        dataset.kind = self.task.kind
        return litdata.StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
        )

    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Ask for one row after the other."""
        dataset = litdata.StreamingDataset(str(path), shuffle=False)
        for row in range(len(dataset)):
            sample = dataset[row]
            yield decoded(sample["jpeg"]), sample["label"]
