"""SPDL: loose files through its pipeline of threads.

Pillow decodes, which releases the GIL: SPDL's own decoder needs the shared libraries of FFmpeg.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator

import torch
from contenders import adapter
from contenders.adapter import BATCH, TRANSFORMS, WORKERS, Batch
from contenders.library import decoded
from PIL import Image
from spdl.dataloader import DataLoader  # type: ignore[import-not-found]

Entry = tuple[str, int]


class _Shuffled:
    """The files, in another order in each epoch."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(random.sample(self._entries, len(self._entries)))


class Adapter(adapter.Adapter):
    """Its DataLoader, with as many threads as the others have workers."""

    distribution = "spdl"

    def prepare(self) -> None:
        """Make the loaders; the data are there."""
        kind = self.task.kind
        self._timed = self._loader(_Shuffled(self.entries), TRANSFORMS[kind], "completion")
        self._checked = self._loader(self.entries, adapter.checked_transform(kind), "input")

    def shuffled(self) -> Iterable[Batch]:
        """Read in a random order."""
        return self._timed

    def ordered(self) -> Iterable[Batch]:
        """Read in the order of the paths."""
        return self._checked

    def _loader(
        self,
        source: Iterable[Entry],
        transform: Callable[[Image.Image], torch.Tensor],
        order: str,
    ) -> Iterable[Batch]:
        def load(entry: Entry) -> tuple[torch.Tensor, int]:
            path, label = entry
            return transform(decoded((self.task.folder / path).read_bytes())), label

        loader: Iterable[Batch] = DataLoader(
            source,
            preprocessor=load,
            batch_size=BATCH,
            aggregator=_joined,
            num_threads=WORKERS,
            output_order=order,
        )
        return loader


def _joined(samples: list[tuple[torch.Tensor, int]]) -> Batch:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)
