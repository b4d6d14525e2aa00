"""Raw pixels, 224 x 224: nothing is decoded, so memory bandwidth limits."""

from __future__ import annotations

from harness import Table, run_interleaved
from workloads.rows import Bench, Rows


def run(bench: Bench) -> list[Table]:
    """Time all contenders."""
    rows = Rows("raw", "pixels224", "raw")
    contenders = [
        rows.other("h5py, one by one, plain DataLoader", "onebyone", store="h5py"),
        rows.other("np.memmap, one thread", "onebyone", store="memmap"),
        rows.ffcv(),
        *rows.every_format(),
    ]
    table = Table(
        name="raw",
        title="raw 224 x 224, shuffled, batches of 64, 2 workers",
        baseline="FFCV",
    )
    return [run_interleaved(table, contenders, bench.work, bench.rounds)]
