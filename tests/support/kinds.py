"""Samples with a field of each kind, and what a dataset of them must return."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shardkit import Field
from shardkit.kinds.values import BFloat16  # as of a tensor, without loading torch


def png(seed: int, mode: str) -> bytes:
    file = io.BytesIO()
    shape = (3, 4, 3) if mode == "RGB" else (3, 4)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def array(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return an array of any bytes that are values of a type."""
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(seed)
    if kind.kind == "U":
        return rng.integers(65, 90, (*shape, 2)).astype("<u4").view(kind)[..., 0]
    count = int(np.prod(shape)) * kind.itemsize
    values = rng.integers(0, 2 if dtype == "bool" else 128, count).astype(np.uint8)
    return values.view(kind).reshape(shape)


FIELDS: dict[str, tuple[Field, Any]] = {
    "image": (Field("image"), lambda n: png(n, "RGB")),
    "mask": (Field("mask"), lambda n: png(n, "L")),
    "label": (Field("label", classes=3), lambda n: n % 3),
    "again": (Field("label", classes=("a", "b", "c")), lambda n: "abc"[n % 3]),
    "tags": (Field("labels", classes=4), lambda n: [*range(n % 5)]),
    "count": (Field("number", "uint16"), lambda n: n % 65536),
    "score": (Field("number", "float32"), lambda n: n / 4),
    "text": (Field("text"), lambda n: "ä\n★" * (n % 4)),
    "info": (Field("json"), lambda n: {"n": [n, None, "x"]}),
    "boxes": (Field("boxes"), lambda n: [[0, 0, n % 5, 1.5]] * (n % 3)),
    "things": (Field("boxes", classes=2), lambda n: [[0, 0, 1, 2, n % 2]] * (n % 3)),
    "points": (Field("keypoints"), lambda n: [[n % 7, 0.5, n % 3]] * (n % 3)),
    "people": (Field("keypoints", classes=2), lambda n: [[[n, 1, 2], [0, 0, 0]]] * (n % 3)),
    "bytes": (Field("bytes"), lambda n: bytes(n % 700)),
    "ragged": (Field("array"), lambda n: array("float16", (n % 3, 2), n)),
    "one": (Field("array", "int8", ()), lambda n: np.int8(n % 100)),
    "half": (
        Field("array", "bfloat16", (3,)),
        lambda n: np.arange(3, dtype="<u2").view(BFloat16) + n % 1000,
    ),
}

LACKED = ("mask", "tags", "score", "text", "info", "boxes", "people", "bytes", "ragged", "half")
"""The fields that the fourth of `SAMPLES` lacks."""

SAMPLES: list[dict[str, Any]] = [
    {name: make(n) for name, (_, make) in FIELDS.items() if n != 3 or name not in LACKED}
    | {"latent": array("float16", (2, 3), n)}
    for n in range(5)
]

SCHEMA = {name: field for name, (field, _) in FIELDS.items()}
"""The fields of `SAMPLES`, of which `latent` follows from the first."""


def content(field: Field, value: Any) -> bytes:
    """Return the bytes that the index locates for a value."""
    if value is None:
        return b""
    if field.kind != "array":
        return bytes(value)
    if field.is_uniform:
        return bytes(np.asarray(value).tobytes())
    file = io.BytesIO()
    np.save(file, value)
    return file.getvalue()


def same(field: Field, found: Any, value: Any) -> bool:
    """Return whether a value of a column is that of a sample."""
    if value is None:
        return found is None or found is np.ma.masked
    if field.kind == "label" and isinstance(value, str):
        value = (field.classes or ()).index(value)
    if isinstance(found, tuple):
        boxes, labels = (each.tolist() for each in found)
        found = [[*box, label] for box, label in zip(boxes, labels, strict=True)]
    if isinstance(found, np.ndarray | np.generic):
        found = found.tolist()
    return bool(found == value)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
