"""Arrays of one shape: float16 latents of 4 x 64 x 64, read from memory as they are."""

from __future__ import annotations

from harness import Table, run_interleaved
from workloads.rows import Bench, Rows


def run(bench: Bench) -> list[Table]:
    """Time all contenders."""
    rows = Rows("latent", "latents", "latents")
    contenders = [
        rows.ffcv(),
        *rows.every_format(),
    ]
    table = Table(
        name="arrays",
        title="float16 arrays of 4 x 64 x 64, shuffled, batches of 64, 2 workers",
        baseline="FFCV",
    )
    return [run_interleaved(table, contenders, bench.work, bench.rounds)]
