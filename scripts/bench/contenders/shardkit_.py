"""shardkit itself: any format, both engines, all its decoding options.

Options of a task: ``format``; ``engine`` (thread or process); ``loader``, more options of
`make_loader`; ``dataset``, more arguments of `open_dataset`; ``plain``, to read without a loader;
``planes``, to store JPEGs as planes; ``native``, whether the compiled module is used: required if
true, off if false, and where it is built by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once, square

from shardkit import (
    CenterCrop,
    Field,
    RandomResizedCrop,
    Sample,
    ShardDataset,
    convert,
    make_loader,
    open_dataset,
)
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.recipe import Recipe
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system import native
from shardkit.torch.loader import Loader

_DECODES: dict[str, Any] = {
    "crop": CenterCrop(SIDE),
    "raw": "torch",
    "random": RandomResizedCrop(SIDE),
    "bytes": "bytes",
}


class Adapter(adapter.Adapter):
    """`make_loader` over a dataset of one format."""

    distribution = "shardkit"

    def prepare(self) -> None:
        """Convert the folder, bytes as they are or as raw pixels, and make the loader."""
        options, kind = self.task.options, self.task.kind
        if "native" in options:
            os.environ[native.VARIABLE] = "on" if options["native"] else "off"
        recipe = Recipe(check="none")
        if kind == "raw":
            recipe = Recipe(resize=(SIDE, SIDE), resize_mode="crop", encode="raw", check="none")
        if options.get("planes"):
            recipe = Recipe(encode="planes", check="none")
        convert_options = ConvertOptions(to=options["format"], recipe=recipe)
        suffix = "-planes" if options.get("planes") else ""
        self.path = make_once(
            self.task.sets / f"{self.task.folder.name}-{options['format']}{suffix}",
            lambda target: _convert(self.task.folder, target, convert_options),
        )
        decode, more = _DECODES.get(kind, "torch"), options.get("dataset", {})
        if kind == "latent":
            more = {"fields": ("latent", "label"), **more}
        self.dataset = open_dataset(self.path, decode=decode, **more)
        self._loader = self._make(self.dataset, shuffle=True)

    def shuffled(self) -> Iterable[Batch]:
        """Read with the loader, or by asking the dataset for the rows of each batch."""
        if not self.task.options.get("plain"):
            return self._loader
        order = np.random.default_rng().permutation(len(self.dataset))
        return self._asked(order)

    def ordered(self) -> Iterable[Batch]:
        """Read with a loader of the same options, as stored."""
        if self.task.options.get("plain"):
            return self._asked(np.arange(len(self.dataset)))
        dataset: ShardDataset = self.dataset
        if self.task.kind == "random":
            dataset = open_dataset(self.path, square, **self.task.options.get("dataset", {}))
        return self._make(dataset, shuffle=False)

    def delivered(self) -> list[str]:
        """Return the paths as stored: in a random order, by default."""
        if self.task.kind == "latent":
            return [f"{key}.npy" for key in self.dataset.keys]
        return list(self.dataset.paths)

    def files(self) -> list[Path]:
        """Return the shards and the index."""
        return [path for path in self.path.rglob("*") if path.is_file()]

    def _make(self, dataset: ShardDataset, *, shuffle: bool) -> Loader:
        given: dict[str, Any] = {"num_workers": WORKERS, **self.task.options.get("loader", {})}
        options: dict[str, Any] = {"engine": self.task.options.get("engine", "auto"), **given}
        return make_loader(dataset, BATCH, shuffle=shuffle, **options)

    def _asked(self, rows: np.ndarray[Any, Any]) -> Iterator[Batch]:
        for begin in range(0, len(rows), BATCH):
            samples = self.dataset.__getitems__(rows[begin : begin + BATCH])
            yield [image for image, _ in samples], torch.tensor([label for _, label in samples])


class _Latents:
    """The arrays of a folder, as samples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = adapter.entries(folder)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, row: int) -> Sample:
        path, label = self.entries[row]
        latent = np.load(self.folder / path)
        return Sample(key=path.removesuffix(".npy"), latent=latent, label="ab"[label])


def _convert(folder: Path, target: Path, options: ConvertOptions) -> None:
    target.rmdir()
    if folder.name == "latents":
        schema = {"label": Field("label", classes=("a", "b"))}
        convert(_Latents(folder), target, to=options.to, schema=schema)  # type: ignore[arg-type]
        return
    convert_scan(scan_imagefolder(folder), target, options)
