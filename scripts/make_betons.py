"""Write tests/golden/ffcv/: small files of FFCV, by its own package, and what they hold.

    .venv-peers/ffcv/bin/python scripts/make_betons.py    (scripts/bench/peers ffcv installs it)

Each file is compressed, since a file of FFCV has 4 MiB or more, nearly all of them zeros.
expected.json lists the versions, and the samples of each file: numbers and JSON as given to the
writer, and the SHA-256 of bytes as FFCV's reader finds them. The file ``workers`` differs in each
run, since two processes write it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ffcv.fields import (  # type: ignore[import-not-found]
    BytesField,
    FloatField,
    IntField,
    JSONField,
    NDArrayField,
    RGBImageField,
    TorchTensorField,
)
from ffcv.memory_managers.os_cache import OSCacheManager  # type: ignore[import-not-found]
from ffcv.reader import Reader  # type: ignore[import-not-found]
from ffcv.writer import DatasetWriter  # type: ignore[import-not-found]

TARGET = Path(__file__).parents[1] / "tests" / "golden" / "ffcv"
PAGE = 1 << 21
Rows = Sequence[tuple[Any, ...]]


class CustomField(IntField):  # type: ignore[misc]
    """A field of a user: FFCV stores that it is not one of its own."""


def pictures(count: int, *sides: tuple[int, int]) -> list[Any]:
    """Return smooth images with some noise, of each of the sizes in turn."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        height, width = sides[number % len(sides)]
        base = np.linspace(0, 200, width)[None, :, None] + np.zeros((height, width, 3))
        noise = rng.integers(0, 55, (height, width, 3))
        made.append((base + noise).astype(np.uint8))
    return made


def files() -> dict[str, tuple[Mapping[str, Any], Rows, int]]:
    """Return fields, samples and number of processes of each file."""
    labels = [2, 0, 1, 0, 2]
    same, mixed = pictures(5, (12, 16)), pictures(5, (12, 16), (9, 7), (20, 11))

    def of(mode: str, images: Sequence[Any], **options: Any) -> Any:
        fields = {"image": RGBImageField(write_mode=mode, **options), "label": IntField()}
        return fields, list(zip(images, labels, strict=True)), 1

    rng = np.random.default_rng(1)
    every = {
        "image": RGBImageField(write_mode="jpg"),
        "label": IntField(),
        "weight": FloatField(),
        "info": JSONField(),
        "latent": NDArrayField(np.dtype("<f2"), (2, 3)),
        "blob": BytesField(),
        "tensor": TorchTensorField(torch.int32, (4,)),
        "swapped": NDArrayField(np.dtype(">f4"), (3,)),
        "thumb": RGBImageField(write_mode="raw"),
        "preview": RGBImageField(write_mode="jpg"),
    }
    rows = [
        (
            mixed[row],
            labels[row],
            [0.1, -2.5, float("inf"), 1e-300, 3.0][row],
            {"caption": f"größe {row}", "ids": [row, None, 1.5]},
            rng.standard_normal((2, 3)).astype("<f2"),
            rng.integers(0, 256, [7, 0, 3, 1, 40][row], np.uint8),
            torch.arange(4, dtype=torch.int32) * row,
            (np.arange(3) + row).astype(">f4"),
            same[row][:4, :5],
            mixed[row][:6, :6],
        )
        for row in range(5)
    ]
    tiny = pictures(60, (4, 4))
    return {
        "jpg": of("jpg", mixed),
        "raw": of("raw", same),
        "raw-sizes": of("raw", mixed),
        "smart": of("smart", mixed, smart_threshold=400),
        "proportion": of("proportion", mixed, compress_probability=0.5),
        "fields": (every, rows, 1),
        "custom": (
            {"image": RGBImageField(), "mine": CustomField()},
            list(zip(same, labels, strict=True)),
            1,
        ),
        "arrays": (
            {"covariate": NDArrayField(np.dtype("<f8"), (2,)), "target": FloatField()},
            [(np.arange(2.0), 1.5)],
            1,
        ),
        "workers": (
            {"image": RGBImageField(), "label": IntField()},
            [(image, row % 7) for row, image in enumerate(tiny)],
            2,
        ),
    }


def main() -> None:
    """Write all files, and what they hold."""
    TARGET.mkdir(parents=True, exist_ok=True)
    expected: dict[str, Any] = {
        "versions": {
            name: version(name) for name in ("ffcv", "numpy", "opencv-python-headless", "torch")
        }
        | {"python": platform.python_version()}
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (fields, rows, workers) in files().items():
            path = Path(folder, f"{name}.beton")
            np.random.seed(3)
            writer = DatasetWriter(str(path), fields, page_size=PAGE, num_workers=workers)
            writer.from_indexed_dataset(rows, chunksize=10)
            pack(path)
            expected[name] = [] if name == "custom" else samples(path, fields, rows)
        writer = DatasetWriter(str(Path(folder, "unfinished.beton")), fields, num_workers=1)
        writer.num_samples = 5
        writer.prepare()
        writer.metadata_sm.close()
        writer.metadata_sm.unlink()
        pack(Path(folder, "unfinished.beton"))
    lines = [f'"{name}": {json.dumps(value)}' for name, value in expected.items()]
    (TARGET / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def pack(path: Path) -> None:
    """Store a file, compressed."""
    packed = gzip.compress(path.read_bytes(), 9, mtime=0)
    (TARGET / f"{path.name}.gz").write_bytes(packed)


def samples(path: Path, fields: Mapping[str, Any], rows: Rows) -> list[dict[str, Any]]:
    """Return what FFCV reads in a file, of each sample."""
    reader = Reader(str(path))
    sizes = OSCacheManager(reader).ptr_to_size
    data = path.read_bytes()
    listed = []
    for row, values in zip(reader.metadata, rows, strict=True):
        sample: dict[str, Any] = {}
        for stored, (name, field), value in zip(row, fields.items(), values, strict=True):
            if isinstance(field, RGBImageField):
                mode, width, height, start = (int(number) for number in stored)
                content = data[start : start + int(sizes[np.uint64(start)])]
                sample[name] = {"mode": mode, "size": [width, height], "sha256": digest(content)}
            elif isinstance(field, NDArrayField):
                content = data[int(stored) : int(stored) + int(sizes[stored])]
                sample[name] = {
                    "dtype": field.dtype.str,
                    "shape": list(field.shape),
                    "sha256": digest(content),
                    "values": np.asarray(value).astype(float).tolist(),
                }
            elif isinstance(field, JSONField):
                sample[name] = value
            elif isinstance(field, BytesField):
                start, size = (int(number) for number in stored)
                sample[name] = {"size": size, "sha256": digest(data[start : start + size])}
            else:
                sample[name] = str(stored) if np.isinf(stored) else stored.item()
        listed.append(sample)
    return listed


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
