"""Compare two installations of shardkit: converting, verifying and loading, in interleaved rounds.

    python scripts/bench/versions.py OLD_PYTHON NEW_PYTHON PHOTOS [--rounds 5] [--count 2000]

Each Python has its shardkit. PHOTOS has class folders of images, repeated up to the count.
Prints the seconds of both and the median ratio of their speeds: above 1, the new one is faster.
Only names that are stable are used, so old releases can be compared.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

_LOAD = """
import sys, time
from shardkit import CenterCrop, make_loader, open_dataset
if __name__ == "__main__":
    dataset = open_dataset(sys.argv[1], decode=CenterCrop(64))
    loader = make_loader(dataset, 64, shuffle=True, num_workers=2, engine=sys.argv[2])
    for epoch in range(2):  # the second one counts
        start = time.perf_counter()
        for batch in loader:
            pass
    print(time.perf_counter() - start)
"""

_COMMAND = """
import subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.executable, "-P", "-m", "shardkit", *sys.argv[1:]], check=True)
print(time.perf_counter() - start)
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("old", help="a Python with the old shardkit")
    parser.add_argument("new", help="a Python with the new one")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardkit-versions-") as folder:
        _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    photos = [path for path in sorted(options.photos.glob("*/*")) if path.is_file()]
    if not photos:
        raise SystemExit(f"{options.photos} has no class folders of images")
    for number, path in zip(range(options.count), itertools.cycle(photos), strict=False):
        copy = folder / "photos" / path.parent.name / f"{number:06d}{path.suffix}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    pythons = {"old": options.old, "new": options.new}
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for name in sorted(pythons, reverse=bool(number % 2)):
            for task, taken in _round(pythons[name], folder, name).items():
                seconds.setdefault(task, {}).setdefault(name, []).append(taken)
    print(f"{'task':<20} {'old':>8} {'new':>8}   speed of new over old")
    for task, taken_by in seconds.items():
        old, new = taken_by["old"], taken_by["new"]
        ratios = [a / b for a, b in zip(old, new, strict=True)]
        print(
            f"{task:<20} {statistics.median(old):>6.2f} s {statistics.median(new):>6.2f} s   "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def _round(python: str, folder: Path, name: str) -> dict[str, float]:
    """Return the seconds of each task with one installation."""
    target = folder / name
    shutil.rmtree(target, ignore_errors=True)
    convert = ("convert", "imagefolder", folder / "photos", target, "--to", "lmdb", "--quiet")
    return {
        "convert": _seconds(python, _COMMAND, *convert),
        "verify": _seconds(python, _COMMAND, "verify", target, "--quiet"),
        "load, threads": _seconds(python, _LOAD, target, "thread"),
        "load, processes": _seconds(python, _LOAD, target, "process"),
    }


def _seconds(python: str, code: str, *arguments: object) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:  # processes import it again
        script.write(code)
        script.flush()
        command = [python, script.name, *map(str, arguments)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
