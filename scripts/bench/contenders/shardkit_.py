"""shardkit itself: any format, both engines.

Options of a task: ``format``; ``engine`` (thread or process); ``planes``, to store JPEGs as planes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once, square

from shardkit import (
    CenterCrop,
    RandomResizedCrop,
    ShardDataset,
    convert,
    make_loader,
    open_dataset,
    open_source,
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
        source: Any = self.task.folder
        more: dict[str, Any] = {}
        if kind == "latent":
            source = open_source("npy", source, arrays=True)
            recipe = {"to": options["format"]}
            more = {"fields": ("array", "label")}
        self.path = make_once(
            self.task.sets / f"{self.task.folder.name}-{options['format']}{suffix}",
            lambda target: convert(source, target, **recipe),
        )
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
        return list(self.dataset.paths)

    def _make(self, dataset: ShardDataset, *, shuffle: bool) -> Loader:
        options: dict[str, Any] = {"engine": self.task.options["engine"], "num_workers": WORKERS}
        return make_loader(dataset, BATCH, shuffle=shuffle, **options)
