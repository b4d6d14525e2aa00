"""Write tests/golden/mds/: small shards of MosaicML Streaming, by its own package.

    .venv-peers/streaming/bin/python scripts/make_mds.py

The package imports torchvision, which need not work: an empty package of that name will do.
"""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import MDSWriter  # type: ignore[import-not-found]

TARGET = Path(__file__).parents[1] / "tests" / "golden" / "mds"
COLUMNS = {"image": "bytes", "label": "int", "w": "float64", "info": "json", "cap": "str"}
COLUMNS |= {"lat": "ndarray:float16:2,3", "any": "ndarray", "p": "pil"}


def main() -> None:
    """Write both splits."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        shutil.rmtree(TARGET / split, ignore_errors=True)
        with MDSWriter(out=str(TARGET / split), columns=COLUMNS, size_limit=2000) as writer:
            for row in range(8):
                writer.write(sample(rng, row))


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
