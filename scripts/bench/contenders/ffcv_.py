"""FFCV, the fastest of the libraries with a format of their own.

It gets the very bytes of the JPEG files (its own writer would encode them anew) and decodes with
the flags that it has: a fast DCT. Its labels come with a second axis, its batches in
memory that is used again: both as FFCV's own examples have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import adapter
from contenders.adapter import BATCH, SIDE, WORKERS, Batch, make_once
from ffcv.fields import IntField, NDArrayField, RGBImageField  # type: ignore[import-not-found]
from ffcv.fields.decoders import (  # type: ignore[import-not-found]
    CenterCropRGBImageDecoder,
    IntDecoder,
    NDArrayDecoder,
    RandomResizedCropRGBImageDecoder,
    SimpleRGBImageDecoder,
)
from ffcv.fields.rgb_image import IMAGE_MODES  # type: ignore[import-not-found]
from ffcv.loader import Loader, OrderOption  # type: ignore[import-not-found]
from ffcv.transforms import (  # type: ignore[import-not-found]
    RandomHorizontalFlip,
    ToTensor,
    ToTorchImage,
)
from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]
from PIL import Image


class StoredJPEGField(RGBImageField):  # type: ignore[misc]
    """An image field that takes the bytes of a JPEG file, width and height with them."""

    def encode(self, destination: Any, image: Any, malloc: Any) -> None:
        """Write one image, as RGBImageField does in the mode ``jpg``, without encoding it anew."""
        data, destination["width"], destination["height"] = image
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(len(data))
        storage[:] = np.frombuffer(data, np.uint8)


class _Source:
    """What FFCV's writer reads: an image and its label."""

    def __init__(self, task: adapter.Task) -> None:
        self.entries = adapter.entries(task.folder)
        self.folder = task.folder
        self.raw = task.kind == "raw"

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        path, label = self.entries[row]
        if path.endswith(".npy"):
            return np.load(self.folder / path).view(np.int16), label
        with Image.open(self.folder / path) as image:
            if self.raw:
                return np.array(image.convert("RGB")), label
            return ((self.folder / path).read_bytes(), *image.size), label


class Adapter(adapter.Adapter):
    """FFCV's loader over a file in its format, in a random order."""

    distribution = "ffcv"

    def prepare(self) -> None:
        """Write the dataset, and compile the loader."""
        made = make_once(self.task.sets / f"{self.task.folder.name}-ffcv", self._write)
        self.path = made / "data.beton"
        self._loader = self._make(OrderOption.RANDOM, self._timed())

    def shuffled(self) -> Iterable[Batch]:
        """Read in a random order."""
        return self._flat(self._loader)

    def ordered(self) -> Iterable[Batch]:
        """Read in the order of the paths."""
        decode = self._timed()
        if self.task.kind == "random":
            decode = [CenterCropRGBImageDecoder((SIDE, SIDE), ratio=1.0)]
        return self._flat(self._make(OrderOption.SEQUENTIAL, decode))

    def _write(self, target: Path) -> None:
        raw = self.task.kind == "raw"
        image = RGBImageField(write_mode="raw") if raw else StoredJPEGField(write_mode="jpg")
        if self.task.kind == "latent":
            # Numba compiles no float16, so the same bytes are read as integers.
            image = NDArrayField(np.dtype(np.int16), adapter.LATENT)
        fields = {"image": image, "label": IntField()}
        writer = DatasetWriter(str(target / "data.beton"), fields, num_workers=1)
        writer.from_indexed_dataset(_Source(self.task))

    def _timed(self) -> list[Any]:
        """Return the operations that are timed.

        Of an image of which the shorter side is 256, 7/8 are the crop of 224: it is not scaled.
        """
        if self.task.kind == "latent":
            return [NDArrayDecoder()]
        if self.task.kind == "raw":
            return [SimpleRGBImageDecoder()]
        if self.task.kind == "crop":
            return [CenterCropRGBImageDecoder((SIDE, SIDE), ratio=SIDE / 256)]
        return [RandomResizedCropRGBImageDecoder((SIDE, SIDE)), RandomHorizontalFlip()]

    def _make(self, order: Any, operations: list[Any]) -> Any:
        images = [] if self.task.kind == "latent" else [ToTorchImage()]
        more = (
            {}
            if self.task.kind in ("raw", "latent")
            else {"custom_fields": {"image": StoredJPEGField}}
        )
        return Loader(
            str(self.path),
            BATCH,
            num_workers=WORKERS,
            order=order,
            os_cache=True,
            drop_last=False,
            pipelines={
                "image": [*operations, ToTensor(), *images],
                "label": [IntDecoder(), ToTensor()],
            },
            **more,
        )

    def _flat(self, loader: Any) -> Iterator[Batch]:
        is_latent = self.task.kind == "latent"
        for images, labels in loader:
            yield images.view(torch.float16) if is_latent else images, labels.flatten()
