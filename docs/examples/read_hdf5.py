"""Read images and labels from a shardkit dataset of HDF5 files with h5py and Pillow alone."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import h5py
from PIL import Image


def value(file: h5py.File, field: str, row: int) -> bytes:
    """Return the bytes of a field of one row; none where the row lacks the field."""
    start, stop = file[field]["offsets"][row : row + 2]
    return file[field]["data"][start:stop].tobytes()


for shard in sorted(Path(sys.argv[1]).glob("shard-*.h5")):
    with h5py.File(shard, "r") as file:
        classes = json.loads(file["__shardkit__"][()].tobytes())["classes"]
        fields = [name for name in file if name not in ("__key__", "__shardkit__", "cls", "json")]
        for row in range(min(3, len(file["__key__/offsets"]) - 1)):
            if "raw" in fields:
                image = Image.fromarray(file["raw/data"][row])
            else:
                content = next(filter(None, (value(file, name, row) for name in fields)))
                image = Image.open(io.BytesIO(content)).convert("RGB")
            label = classes[file["cls/data"][row]] if "cls" in file else None
            print(value(file, "__key__", row).decode(), label, image.size)
