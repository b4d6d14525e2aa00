"""Convert, verify and read sample_data, as a user would; called by scripts/demo."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from shardkit import RandomResizedCrop, make_loader, open_dataset
from shardkit.registry import format_names

ROOT = Path(__file__).parents[1]
OUT = ROOT / "demo-output"


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    rows = [("format", "stored", "convert", "verify", "read", "first labels", "samples")]
    for name in format_names():
        place = OUT / name
        converting = run(
            "convert", "imagefolder", ROOT / "sample_data", place, "--to", name, "--resize", "64x64"
        )
        verifying = run("verify", place, "--level", "decode")
        images, reading, labels, digest = read(place)
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        rows.append(
            (
                name,
                f"{size / 1024:.0f} KiB",
                f"{converting:.1f} s",
                f"{verifying:.1f} s",
                f"{images} in {reading:.2f} s",
                " ".join(map(str, labels)),
                f"{digest:08x}",
            )
        )
    run("info", OUT / format_names()[0])
    print()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    if len({row[-1] for row in rows[1:]}) != 1:
        sys.exit("the formats returned different samples")
    print(
        """
All formats returned the same samples in the same order, shuffled and with random crops ("samples"
is the CRC-32 of all pixels and labels). Threads read the first part of each epoch, and worker
processes continued from the loader's state. Times include the startup of Python and the workers.
The datasets remain in demo-output/. docs/training.md describes the loader, and docs/benchmarks.md
has measurements."""
    )


def run(*arguments: object) -> float:
    """Run a shardkit command, showing it and what it prints; return the seconds it took."""
    shown = [str(part.relative_to(ROOT) if isinstance(part, Path) else part) for part in arguments]
    print(f"\n$ shardkit {' '.join(shown)}", flush=True)
    begun = time.perf_counter()
    command = [sys.executable, "-m", "shardkit", *shown]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        sys.exit(1)
    return time.perf_counter() - begun


def read(place: Path) -> tuple[int, float, list[int], int]:
    """Read an epoch, stopped and resumed: images, seconds, first labels, digest of it all."""
    dataset = open_dataset(place, decode=RandomResizedCrop(48))
    begun = time.perf_counter()
    images, digest = 0, 0
    first: list[int] = []
    state = None
    for engine in ("thread", "process"):
        options: dict[str, Any] = {"engine": engine, "num_workers": 2}
        loader = make_loader(dataset, 16, shuffle=True, seed=1, **options)
        if state is not None:
            loader.load_state_dict(state)
        for number, (pixels, labels) in enumerate(loader):
            digest = zlib.crc32(pixels.permute(0, 2, 3, 1).contiguous().numpy().tobytes(), digest)
            digest = zlib.crc32(labels.numpy().tobytes(), digest)
            first = first or labels[:6].tolist()
            images += len(labels)
            if state is None and number == 2:
                break
        state = loader.state_dict()
        loader.close()
    return images, time.perf_counter() - begun, first, digest


if __name__ == "__main__":
    main()
