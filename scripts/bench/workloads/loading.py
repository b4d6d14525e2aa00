"""Loading: crops of JPEGs, raw pixels, arrays, and random crops of unchanged photographs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness import Contender, Table, run_interleaved
from workloads.rows import ENGINES, Bench, Rows

_ROUNDING = 0.1
"""Random crops are compared by floats, whose last digit depends on the library."""


def crop(bench: Bench) -> list[Table]:
    """Time JPEGs of 256 pixels, center crop of 224: the usual training from prepared data."""
    rows = Rows("crop", "jpeg256", "crop")
    loose = rows.other("ImageFolder-like, resized files", "imagefolder")
    originals = replace(
        loose,
        name="ImageFolder-like, originals, Resize(256)",
        kind="resize",
        folder="originals",
        reference="resize",
    )
    own = [*rows.every_format(), *rows.planes()]
    title = "center crop of 256-pixel JPEGs, shuffled, 64 x 3 x 224 x 224, 2 workers"
    contenders = [loose, originals, *rows.libraries(), rows.ffcv(), *own]
    return [_timed(bench, "crop", title, loose.name, contenders)]


def raw(bench: Bench) -> list[Table]:
    """Time raw pixels, 224 x 224: nothing is decoded, so memory bandwidth limits."""
    rows = Rows("raw", "pixels224", "raw")
    contenders = [
        rows.other("h5py, one by one, plain DataLoader", "onebyone", store="h5py"),
        rows.other("np.memmap, one thread", "onebyone", store="memmap"),
        rows.ffcv(),
        *rows.every_format(),
    ]
    title = "raw 224 x 224, shuffled, batches of 64, 2 workers"
    return [_timed(bench, "raw", title, "FFCV", contenders)]


def arrays(bench: Bench) -> list[Table]:
    """Time float16 arrays, as an autoencoder makes them."""
    rows = Rows("latent", "latents", "latents")
    title = "float16 arrays of 4 x 64 x 64, shuffled, batches of 64, 2 workers"
    return [_timed(bench, "arrays", title, "FFCV", [rows.ffcv(), *rows.every_format()])]


def random(bench: Bench) -> list[Table]:
    """Time random crops of unchanged photographs, at two sizes."""
    sizes = {"originals": "photographs of about 500 x 375", "large": "photographs of 2000 x 1500"}
    return [_random(bench, folder, words) for folder, words in sizes.items()]


def _random(bench: Bench, folder: str, words: str) -> Table:
    rows = Rows("random", folder, f"random-{folder}", near=_ROUNDING)
    loose = rows.other("ImageFolder-like with Pillow", "imagefolder")
    contenders = [
        loose,
        *rows.libraries()[:1],
        rows.ffcv(),
        *(rows.shardkit(f"lmdb, {engine}", format="lmdb", engine=engine) for engine in ENGINES),
        *(row for row in rows.planes() if row.options["format"] == "lmdb"),
    ]
    title = f"RandomResizedCrop(224) and flip of {words}, 2 workers"
    return _timed(bench, f"random-{folder}", title, loose.name, contenders)


def _timed(
    bench: Bench, name: str, title: str, baseline: str, contenders: Sequence[Contender]
) -> Table:
    table = Table(name=name, title=title, baseline=baseline)
    return run_interleaved(table, contenders, bench.work, bench.rounds)
