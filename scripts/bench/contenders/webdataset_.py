"""WebDataset: tar files read forwards, shuffled in a buffer, by its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from contenders.adapter import BATCH, TRANSFORMS, WORKERS
from contenders.library import Library
from PIL import Image

_SHARDS = 8
"""So that 2 workers have as much to do, and shards can be shuffled."""

_BUFFER = 1000
"""Samples that wait to be drawn from: the number in WebDataset's documentation."""


class Adapter(Library):
    """WebDataset and WebLoader."""

    distribution = "webdataset"
    name = "webdataset-own"

    def write(self, target: Path) -> None:
        """Write tar files of as many samples each."""
        most = -(-len(self.entries) // _SHARDS)
        with webdataset.ShardWriter(str(target / "%06d.tar"), maxcount=most, verbose=0) as sink:
            for number, (name, label) in enumerate(self.entries):
                data = (self.task.folder / name).read_bytes()
                sink.write({"__key__": f"{number:08d}", "jpg": data, "cls": label})

    def loader(self, path: Path) -> Any:
        """Return its loader; batches are joined in the workers."""
        urls = [str(file) for file in sorted(path.iterdir())]
        dataset = (
            webdataset.WebDataset(urls, shardshuffle=_SHARDS)
            .shuffle(_BUFFER)
            .decode("pil")
            .to_tuple("jpg", "cls")
            .map_tuple(TRANSFORMS[self.task.kind], int)
            .batched(BATCH)
        )
        return webdataset.WebLoader(
            dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True
        )

    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Read the tar files one after the other."""
        urls = [str(file) for file in sorted(path.iterdir())]
        dataset = webdataset.WebDataset(urls, shardshuffle=False)
        yield from dataset.decode("pil").to_tuple("jpg", "cls")
