"""The datasets: photographs, JPEGs of 256 pixels, their planes, and raw pixels, all in LMDB.

Beside them, what other libraries read: folders of the same JPEGs, and tar files of the former.
"""

from __future__ import annotations

import io
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from gpu_parts.job import Job
from isolation import NotAvailable, Progress
from PIL import Image

from shardkit import convert
from shardkit.dataset.source import DatasetSource
from shardkit.system.machine import usable_cpus

_CLASSES = 8
"""Class folders: labels of a training run."""

_GENERATED = 64
"""Photographs to generate if there are none."""


def run(values: dict[str, Any], progress: Progress) -> None:
    """Make the datasets.

    Raises:
        NotAvailable: If the folder of photographs holds none.
    """
    job = Job.of(values)
    folder, side = job.folder("photos"), 48 if job.is_small else 256
    photographs = _photographs(job)
    _write(photographs, folder, job.images)
    source = "generated" if job.photos is None else job.photos
    remark = f"{len(photographs)} photographs, {source}"
    progress.add("images", job.images, "images", remark=remark)
    workers = 1 if job.is_small else min(usable_cpus(), 16)
    datasets: dict[str, dict[str, Any]] = {
        "jpeg": {"resize": side, "encode": "jpeg", "quality": 90, "enlarge": True},
        "photos": {},
        "tar": {"to": "webdataset", "shard_samples": job.images // 32 + 1},
        "planes": {"encode": "planes"},
        "raw": {"encode": "raw", "resize": (job.side, job.side), "resize_mode": "crop"},
    }
    for name, options in datasets.items():
        start = time.perf_counter()
        files = DatasetSource(job.work / "jpeg") if name in ("planes", "raw") else folder
        convert(files, job.work / name, **{"to": "lmdb", "workers": workers, **options})
        progress.add(name, job.images / (time.perf_counter() - start), "images/s, converted")
    stored = job.dataset("jpeg", "bytes")
    _write([stored[row][0] for row in range(len(stored))], job.folder("jpeg"), job.images)


def _photographs(job: Job) -> list[bytes]:
    """Return the content of the JPEG files of the given folder, or generated ones."""
    if job.photos is None:
        return pictures(8 if job.is_small else _GENERATED)
    folder = Path(job.photos)
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    data = (path.read_bytes() for path in paths)
    photographs = list(
        itertools.islice((item for item in data if item.startswith(b"\xff\xd8\xff")), job.images)
    )
    if not photographs:
        raise NotAvailable(f"{folder} holds no JPEG: leave PHOTOS out to generate photographs")
    return photographs


def pictures(count: int) -> list[bytes]:
    """Return JPEGs of 500 x 375 pixels with smooth parts and some grain, as photographs have."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), np.uint8))
        smooth = np.asarray(coarse.resize((500, 375), Image.Resampling.BICUBIC), np.int16)
        grain = smooth + rng.normal(0, 6, (375, 500, 1)).astype(np.int16)
        buffer = io.BytesIO()
        Image.fromarray(grain.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=78)
        made.append(buffer.getvalue())
    return made


def _write(photographs: list[bytes], folder: Path, count: int) -> None:
    """Write so many files into class folders, so that neighbors in path order differ."""
    for number, data in zip(range(count), itertools.cycle(photographs), strict=False):
        place = folder / f"class{number % _CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06d}.jpg").write_bytes(data)
