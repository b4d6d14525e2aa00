"""JPEGs of 256 pixels, center crop of 224: the usual training from prepared data."""

from __future__ import annotations

from dataclasses import replace

from harness import Table, run_interleaved
from workloads.rows import Bench, Rows

_BASELINE = "ImageFolder-like, resized files"


def run(bench: Bench) -> list[Table]:
    """Time all contenders."""
    rows = Rows("crop", "jpeg256", "crop")
    loose = rows.other(_BASELINE, "imagefolder")
    originals = replace(
        loose,
        name="ImageFolder-like, originals, Resize(256)",
        kind="resize",
        folder="originals",
        reference="resize",
    )
    contenders = [
        loose,
        originals,
        *rows.libraries(),
        rows.ffcv(),
        *rows.every_format(),
        *rows.planes(),
    ]
    table = Table(
        name="crop",
        title="center crop of 256-pixel JPEGs, shuffled, 64 x 3 x 224 x 224, 2 workers",
        baseline=_BASELINE,
    )
    return [run_interleaved(table, contenders, bench.work, bench.rounds)]
