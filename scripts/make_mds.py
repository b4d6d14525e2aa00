"""Write tests/golden/mds/: small shards of MosaicML Streaming 0.13.0, by its own package.

    .venv-peers/streaming/bin/python scripts/make_mds.py

The package imports torchvision, which need not work: an empty package of that name will do.
"""

import io
import shutil
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import MDSWriter  # type: ignore[import-not-found]

TARGET = Path(__file__).parents[1] / "tests" / "golden" / "mds"
COLUMNS = {"image": "bytes", "label": "int", "w": "float64", "info": "json", "cap": "str"}
COLUMNS |= {"lat": "ndarray:float16:2,3", "any": "ndarray", "p": "pil"}


NUMBERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
NUMBERS += ["float16", "float32", "float64", "str_int", "str_float", "str_decimal"]
ENCODINGS = {name: name for name in ("jpeg", *NUMBERS)}
ENCODINGS |= {"of_type": "ndarray:int16", "free": "ndarray", "blob": "bytes"}
PACKINGS = ("zstd", "gz", "br", "snappy", "bz2")


def main() -> None:
    """Write both splits, all encodings, and all packings."""
    shutil.rmtree(TARGET, ignore_errors=True)
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        write(f"splits/{split}", COLUMNS, (sample(rng, row) for row in range(8)))
    write("encodings", ENCODINGS, map(encoded, range(4)))
    rows = [{"image": encoded(row)["jpeg"], "label": row} for row in range(4)]
    for packing in PACKINGS:
        write(packing, {"image": "jpeg", "label": "int"}, rows, compression=packing)


def write(name: str, columns: dict[str, str], rows: Iterable[Any], **options: Any) -> None:
    """Write some shards."""
    out = str(TARGET / name)
    with MDSWriter(out=out, columns=columns, size_limit=2000, **options) as writer:
        for row in rows:
            writer.write(row)


def encoded(row: int) -> dict[str, Any]:
    """Return a sample of `ENCODINGS`; those of integers without sign are their maximum less row."""
    values: dict[str, Any] = {}
    for name in NUMBERS[:8]:
        info = np.iinfo(name)
        values[name] = info.max - row if name[0] == "u" else info.min + row
    file = io.BytesIO()
    Image.new("RGB", (6, 5), (0, 0, 60 * row)).save(file, "JPEG")
    return values | {
        "jpeg": file.getvalue(),
        **dict.fromkeys(("float16", "float32", "float64"), row / 4),
        "str_int": -row,
        "str_float": row / 10,
        "str_decimal": Decimal(row) / 10,
        "of_type": np.full((1, row + 1), row, np.int16),
        "free": np.full((300, 1, 2), row, np.uint8),
        "blob": bytes([0, 255, row]),
    }


def sample(rng: np.random.Generator, row: int) -> dict[str, Any]:
    """Return a sample; ``image`` and ``p`` take random pixels, in this order."""
    shape = (6 + row % 2, 5, 3)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(file, "PNG")
    return {
        "image": file.getvalue(),
        "label": row % 3,
        "w": row / 2,
        "info": {"a": row},
        "lat": np.full((2, 3), row, np.float16),
        "any": np.arange(row + 1, dtype=np.int64),
        "cap": f"größe {row}",
        "p": Image.fromarray(rng.integers(0, 256, shape, np.uint8)),
    }


if __name__ == "__main__":
    main()
