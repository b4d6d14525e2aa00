"""shardkit itself: any format, both engines.

Options of a task: ``format``; ``engine`` (thread or process); ``planes``, to store JPEGs as planes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once, square

from shardkit import (
    CenterCrop,
    Field,
    RandomResizedCrop,
    ShardDataset,
    convert,
    make_loader,
    open_dataset,
)
from shardkit.torch.loader import Loader

_DECODES: dict[str, Any] = {
    "crop": CenterCrop(SIDE),
    "raw": "torch",
    "random": RandomResizedCrop(SIDE),
}


class Adapter(adapter.Adapter):
    """`make_loader` over a dataset of one format."""

    distribution = "shardkit"

    def prepare(self) -> None:
        """Convert the folder, bytes as they are or as raw pixels, and make the loader."""
        options, kind = self.task.options, self.task.kind
        recipe: dict[str, Any] = {"to": options["format"], "check": "none"}
        if kind == "raw":
            recipe |= {"resize": (SIDE, SIDE), "resize_mode": "crop", "encode": "raw"}
        if options.get("planes"):
            recipe["encode"] = "planes"
        suffix = "-planes" if options.get("planes") else ""
        self.path = make_once(
            self.task.sets / f"{self.task.folder.name}-{options['format']}{suffix}",
            lambda target: _convert(self.task.folder, target, recipe),
        )
        more: dict[str, Any] = {"fields": ("latent", "label")} if kind == "latent" else {}
        self.dataset = open_dataset(self.path, decode=_DECODES.get(kind, "torch"), **more)
        self._loader = self._make(self.dataset, shuffle=True)

    def shuffled(self) -> Iterable[Batch]:
        """Read with the loader."""
        return self._loader

    def ordered(self) -> Iterable[Batch]:
        """Read with a loader of the same options, as stored."""
        dataset: ShardDataset = self.dataset
        if self.task.kind == "random":
            dataset = open_dataset(self.path, square)
        return self._make(dataset, shuffle=False)

    def delivered(self) -> list[str]:
        """Return the paths as stored: in a random order, by default."""
        if self.task.kind == "latent":
            return [f"{key}.npy" for key in self.dataset.keys]
        return list(self.dataset.paths)

    def _make(self, dataset: ShardDataset, *, shuffle: bool) -> Loader:
        options: dict[str, Any] = {"engine": self.task.options["engine"], "num_workers": WORKERS}
        return make_loader(dataset, BATCH, shuffle=shuffle, **options)


class _Latents:
    """The arrays of a folder, as samples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = adapter.entries(folder)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, row: int) -> dict[str, Any]:
        path, label = self.entries[row]
        latent = np.load(self.folder / path)
        return {"key": path.removesuffix(".npy"), "latent": latent, "label": "ab"[label]}


def _convert(folder: Path, target: Path, recipe: dict[str, Any]) -> None:
    source: Path | _Latents = folder
    if folder.name == "latents":
        source = _Latents(folder)
        recipe = {"to": recipe["to"], "schema": {"label": Field("label", classes=("a", "b"))}}
    convert(source, target, **recipe)
