"""Convert arrays in .npy files, and pack them by ``tar cf``, in turn.

    python scripts/bench/npy.py FOLDER [--count 10000] [--rounds 3]

FOLDER is made, and removed at the end. Each array has 32 KB.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

_PER_CLASS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    try:
        _measure(options.folder, options.count, options.rounds)
    finally:
        shutil.rmtree(options.folder)


def _measure(folder: Path, count: int, rounds: int) -> None:
    source, archive, target = folder / "arrays", folder / "x.tar", folder / "dataset"
    random = np.random.default_rng(0)
    for number in range(count):
        of_class = source / f"{number // _PER_CLASS:04d}"
        of_class.mkdir(parents=True, exist_ok=True)
        array = random.integers(0, 256, (8, 32, 32)).astype("float32")
        np.save(of_class / f"{number:06d}.npy", array)
    tar = ["tar", "cf", str(archive), "-C", str(source), "."]
    convert = [sys.executable, "-m", "shardkit", "convert", "npy", str(source), str(target)]
    convert += ["--arrays", "--to", "webdataset", "--quiet"]
    ratios = []
    for _ in range(rounds):
        by_tar, by_shardkit = _seconds(tar), _seconds(convert)
        archive.unlink()
        shutil.rmtree(target)
        ratios.append(by_tar / by_shardkit)
        print(f"tar cf {by_tar:.2f} s, convert {by_shardkit:.2f} s, {ratios[-1]:.2f} of its speed")
    print(f"median: {statistics.median(ratios):.2f} of the speed of tar cf")


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
