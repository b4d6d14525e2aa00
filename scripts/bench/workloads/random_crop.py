"""Random crops of unchanged photographs of 500 x 375 and 2000 x 1500 pixels."""

from __future__ import annotations

from harness import Table, run_interleaved
from workloads.rows import ENGINES, Bench, Rows

_BASELINE = "ImageFolder-like with Pillow"

_ROUNDING = 0.1
"""What is compared here is computed with floats, whose last digit depends on the library."""


def run(bench: Bench) -> list[Table]:
    """Time all contenders, at both sizes."""
    sizes = {"originals": "photographs of about 500 x 375", "large": "photographs of 2000 x 1500"}
    return [_table(bench, folder, words) for folder, words in sizes.items()]


def _table(bench: Bench, folder: str, words: str) -> Table:
    rows = Rows("random", folder, f"random-{folder}", near=_ROUNDING)
    special = [row for row in rows.planes() if row.options["format"] == "lmdb"]
    contenders = [
        rows.other(_BASELINE, "imagefolder"),
        *rows.libraries()[:1],
        rows.ffcv(),
        *(rows.shardkit(f"lmdb, {engine}", format="lmdb", engine=engine) for engine in ENGINES),
        *special,
    ]
    table = Table(
        name=f"random-{folder}",
        title=f"RandomResizedCrop(224) and flip of {words}, 2 workers",
        baseline=_BASELINE,
    )
    return run_interleaved(table, contenders, bench.work, bench.rounds)
