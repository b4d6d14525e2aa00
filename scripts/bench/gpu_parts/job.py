"""What all parts of `gpu.py` share: the job, its device and its datasets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from isolation import NotAvailable

from shardkit import RandomResizedCrop, ShardDataset, make_loader, open_dataset
from shardkit.record import DATASET_FILE
from shardkit.system.machine import usable_cpus
from shardkit.torch.loader import Loader

KINDS = {
    "photos": "JPEGs as they came",
    "jpeg": "JPEGs of 256 pixels",
    "planes": "planes of 256 pixels",
    "raw": "raw pixels",
}
"""Datasets of the same photographs; of all but ``raw``, which is stored at the model's size, random
crops are read."""

ENGINES = ("thread", "helper", "process")
"""Engines to measure."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of the script, as its parts see it."""

    work: Path
    device_name: str
    """``cuda`` or ``cpu``."""
    photos: str | None
    """An image folder; None to generate photographs."""
    is_small: bool = False
    """Whether to do as little as shows that it works."""
    layers: int = 50
    """Of the ResNet that is trained."""
    kind: str = "jpeg"
    """Of `KINDS`, if one is loaded."""
    most_cores: int | None = None
    """CPUs that the part may use, if fewer than there are."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Job:
        """Return the job that a part is given as JSON values."""
        return cls(**{**values, "work": Path(values["work"])})

    @property
    def side(self) -> int:
        """Height and width of the images of a batch."""
        return 32 if self.is_small else 224

    @property
    def images(self) -> int:
        """Images in each dataset."""
        return 48 if self.is_small else min(2048, 256 * usable_cpus())

    @cached_property
    def device(self) -> torch.device:
        """The device.

        Raises:
            NotAvailable: If there is none.
        """
        if self.device_name == "cuda" and not torch.cuda.is_available():
            built = torch.version.cuda or "no CUDA"
            raise NotAvailable(f"no CUDA device: PyTorch {torch.__version__} is built for {built}")
        if self.device_name == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def limit_cores(self) -> None:
        """Leave this process and its workers only some of the CPUs."""
        if self.most_cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: self.most_cores])
        # Counted when PyTorch was imported; operations as small as those of a test take longer
        # with more.
        torch.set_num_threads(1 if self.is_small else usable_cpus())

    def folder(self, kind: str) -> Path:
        """Return the image folder that holds what the dataset ``kind`` was made from, or holds."""
        return self.work / f"{kind}-folder"

    def dataset(self, kind: str, decode: Any = None) -> ShardDataset:
        """Return a dataset of photographs.

        Args:
            kind: One of `KINDS`.
            decode: As for `open_dataset`; None for what a training run would use.

        Raises:
            NotAvailable: If the part that makes the datasets did not get so far.
        """
        path = self.work / kind
        if not (path / DATASET_FILE).is_file():
            raise NotAvailable("no dataset: see the part 'data'")
        if decode is None:
            decode = "torch" if kind == "raw" else RandomResizedCrop(self.side)
        return open_dataset(path, decode=decode)

    def loader(self, dataset: Any, batch_size: int, engine: str, **options: Any) -> Loader:
        """Return a loader; two of the same options give the same batches."""
        settings: dict[str, Any] = {"engine": engine, "seed": 1, **options}
        return make_loader(dataset, batch_size, shuffle=True, **settings)

    def seconds(self, longest: float, left: float) -> float:
        """Return the seconds of one measurement, given the most it needs and what is left."""
        return min(0.02 if self.is_small else longest, left)


def pause(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
