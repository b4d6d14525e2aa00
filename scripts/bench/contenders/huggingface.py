"""Hugging Face datasets: Arrow files with encoded images, through PyTorch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from contenders.adapter import BATCH, WORKERS
from contenders.library import Library
from PIL import Image
from torch.utils.data import DataLoader


class Adapter(Library):
    """A dataset on disk, with a transform."""

    distribution = "datasets"
    name = "huggingface"

    def write(self, target: Path) -> None:
        """Write an Arrow dataset whose images are the files' bytes."""
        columns: dict[str, list[Any]] = {"image": [], "label": []}
        for data, label in self.stored():
            columns["image"].append({"bytes": data, "path": None})
            columns["label"].append(label)
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(target))

    def loader(self, path: Path) -> Any:
        """Return a DataLoader over the dataset with its transform."""
        dataset = datasets.load_from_disk(str(path)).with_transform(self._rows)
        return DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            num_workers=WORKERS,
            persistent_workers=True,
            collate_fn=_joined,
        )

    def samples(self, path: Path) -> Iterator[tuple[Image.Image, int]]:
        """Iterate over the dataset."""
        for sample in datasets.load_from_disk(str(path)):
            yield sample["image"].convert("RGB"), sample["label"]

    def _rows(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**rows, "image": [self.transform(image.convert("RGB")) for image in rows["image"]]}


def _joined(samples: list[dict[str, Any]]) -> Any:
    from torch.utils.data import default_collate

    found = default_collate(samples)
    return found["image"], found["label"]
