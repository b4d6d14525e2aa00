"""Write tests/golden/litdata/: small chunks of LitData 0.2.76, by its own package.

.venv-peers/litdata/bin/python scripts/make_litdata.py
"""

import io
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litdata.streaming.writer import BinaryWriter  # type: ignore[import-not-found]
from PIL import Image

TARGET = Path(__file__).parents[1] / "tests" / "golden" / "litdata"


def main() -> None:
    """Write each dataset."""
    shutil.rmtree(TARGET, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = range(8)
        files = [jpeg(Path(folder), row) for row in rows]
        write("fields", ({"image": files[row], **fields(row)} for row in rows))
        write("tuple", ((files[row], row % 3) for row in rows))
        write(
            "bytes", ({"image": Path(files[row].filename).read_bytes(), "n": row} for row in rows)
        )
        write("pil", ((Image.fromarray(pixels(row)), row % 3) for row in rows))
        write("nested", ({"a": {"image": files[row], "n": row}, "p": {1, 2}} for row in rows))
        zstd = {"compression": "zstd", "compression_level": "chunk"}
        write("zstd", ((files[row], row % 3) for row in rows), **zstd)
        write("framed", ((files[row], row % 3) for row in rows), compression="zstd")


def pixels(row: int) -> Any:
    """Return the pixels of a row."""
    return np.random.default_rng(row).integers(0, 256, (6 + row % 2, 5, 3), np.uint8)


def jpeg(folder: Path, row: int) -> Any:
    """Return an opened JPEG, whose file LitData copies."""
    data = io.BytesIO()
    Image.fromarray(pixels(row)).save(data, "JPEG")
    path = folder / f"{row}.jpg"
    path.write_bytes(data.getvalue())
    return Image.open(path)


def fields(row: int) -> dict[str, Any]:
    """Return the other columns of a row."""
    return {
        "label": row % 3,
        "w": row / 2,
        "ok": row % 2 == 0,
        "cap": f"größe {row}",
        "lat": np.full((2, 3), row, np.float16),
        "vec": np.arange(4, dtype=np.float32) + row,
        "t": torch.full((2, 2), row),
        "tv": torch.arange(3) + row,
        "raw": b"x" * row,
    }


def write(name: str, rows: Iterable[Any], **options: Any) -> None:
    """Write a dataset."""
    writer = BinaryWriter(str(TARGET / name), chunk_bytes=2000, **options)
    for number, row in enumerate(rows):
        writer[number] = row
    writer.done()
    writer.merge()


if __name__ == "__main__":
    main()
