"""`shardkit tune` compared with an exhaustive grid: is the choice within 5% of the best?

    python scripts/bench/tune_grid.py PHOTOS --work DIR [--only decode] [--json FILE]

Four loads: JPEGs of 256 pixels, cropped at random; the same as raw pixels; a transform in pure
Python, which holds the GIL; a transform that waits. For each, all settings of a grid of engine and
workers are measured once, and those within half of the best once more. `tune` then searches three
times. In the end, its choices and the grid's best are measured in interleaved rounds, and the
median of the ratios counts.

It takes about 8 minutes with 2 idle CPUs, after the datasets are made. Run it on an idle machine:
the last column shows how many CPUs others used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.errors import MeasurementFailed
from shardkit.measure.runner import session
from shardkit.measure.runner.environment import cpu_model
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Spread, turn
from shardkit.measure.runner.spec import LoaderSpec, StopCondition, Subject
from shardkit.measure.tune.tune import tune
from shardkit.recipe import Recipe
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.files import write_atomically
from shardkit.system.machine import usable_cpus

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NEAR = 0.5
TURNS = 3
"""Least batches of each worker in a measurement: workers that wait alike deliver together."""
LOADS: dict[str, dict[str, Any]] = {
    "decode": {"decode": "RandomResizedCrop(224)"},
    "raw": {"decode": "torch"},
    "hold": {"decode": "pil", "transform": "tune_loads:hold"},
    "wait": {"decode": "pil", "transform": "tune_loads:wait"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path, help="an image folder of photographs")
    parser.add_argument("--work", type=Path, required=True, help="where the datasets are made")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--only", choices=sorted(LOADS), action="append")
    parser.add_argument("--tunings", type=int, default=3)
    parser.add_argument("--budget", type=float, default=20.0, help="of a tuning, in seconds")
    parser.add_argument("--rounds", type=int, default=1, help="after the first of the grid")
    parser.add_argument("--final", type=int, default=5, help="rounds of the final comparison")
    parser.add_argument("--seconds", type=float, default=0.4, help="of a measurement")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    here = str(Path(__file__).parent)  # where the measuring process finds the transforms
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    names = given.only or list(LOADS)
    places = {name: make(given.photos, given.work, given.images, name == "raw") for name in names}
    start, found = time.monotonic(), {}
    for name in names:
        found[name] = compare(Subject(path=str(places[name]), **LOADS[name]), given)
        if given.json is not None:
            write_atomically(given.json, json.dumps(found, indent=1).encode())
    tell(found, given.budget, time.monotonic() - start)
    return 0


def make(photos: Path, work: Path, images: int, raw: bool) -> Path:
    """Create a dataset of JPEGs of 256 pixels, or raw pixels of 224, once; return its path."""
    dataset = work / f"{'raw224' if raw else 'jpeg256'}-{images}"
    if dataset.exists():
        return dataset
    source = work / f"photos-{images}"
    found = sorted(path for path in photos.glob("*/*") if path.is_file())
    if not found:
        raise SystemExit(f"{photos} has no class folders with images")
    for number, path in zip(range(images), itertools.cycle(found), strict=False):
        copy = source / path.parent.name / f"{number:06d}{path.suffix}"
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    size = (224, 224) if raw else (256, 256)
    recipe = Recipe(resize=size)
    if raw:
        recipe = Recipe(resize=size, resize_mode="crop", encode="raw", enlarge=True)
    convert_scan(scan_imagefolder(source), dataset, ConvertOptions(to="lmdb", recipe=recipe))
    return dataset


def compare(subject: Subject, given: argparse.Namespace) -> dict[str, Any]:
    """Let `tune` choose, and compare its choices with the best of a grid in interleaved rounds."""
    grid = measure_grid(subject, given)
    best = next(iter(grid))
    chosen, loads = [], []
    for number in range(given.tunings):
        report = tune(
            subject.path,
            decode=subject.decode,
            transform=subject.transform,
            budget=given.budget,
            batch_size=given.batch_size,
        )
        chosen.append(report.chosen.setting)
        loads.append(report.load.busy)
        show(f"tuning {number + 1}: {report.seconds:.1f} s, {report.chosen.setting}; grid: {best}")
    rates: dict[LoaderSpec, list[float]] = {each: [] for each in (best, *chosen)}
    with MeasurementProcess(subject) as process:
        process.open()
        for number in range(given.final):
            for each in turn(list(rates), number):
                rates[each].append(rate(process, each, 2 * given.seconds))
    return {
        "grid": {str(each): asdict(Spread.of(grid[each])) for each in grid},
        "best": str(best),
        "rate": statistics.median(rates[best]),
        "chosen": [str(each) for each in chosen],
        "ratios": [asdict(Spread.paired(rates[each], rates[best])) for each in chosen],
        "load": max(loads),
    }


def measure_grid(subject: Subject, given: argparse.Namespace) -> dict[LoaderSpec, list[float]]:
    """Return the images/s of all settings, the fastest first."""
    left = [
        LoaderSpec(engine=engine, num_workers=number, batch_size=given.batch_size)
        for engine, number in itertools.product(("thread", "process"), given.workers)
    ]
    rates: dict[LoaderSpec, list[float]] = {each: [] for each in left}
    with MeasurementProcess(subject) as process:
        process.open()
        process.call(session.warm)
        for number in range(given.rounds + 1):
            show(f"{subject.transform or subject.decode}: round {number}, {len(left)} settings")
            for each in turn(left, number * len(left) // (given.rounds + 1)):
                try:
                    rates[each].append(rate(process, each, given.seconds))
                except MeasurementFailed as error:
                    show(f"{each}: {error}")
            medians = {each: statistics.median(rates[each] or [0.0]) for each in left}
            left = [each for each in left if medians[each] >= NEAR * max(medians.values())]
    # A single lucky round is no best: those with all rounds come first.
    return dict(
        sorted(
            ((each, found) for each, found in rates.items() if found),
            key=lambda pair: (-len(pair[1]), -statistics.median(pair[1])),
        )
    )


def rate(process: MeasurementProcess, setting: LoaderSpec, seconds: float) -> float:
    """Return images/s of a measurement that is long enough for several batches of all workers."""
    found = process.measure(setting, StopCondition(seconds=seconds))
    turns = TURNS * setting.workers * setting.batch_size / found.rate
    if seconds < turns < 10:
        found = process.measure(setting, StopCondition(seconds=turns))
    return found.rate


def tell(found: dict[str, Any], budget: float, seconds: float) -> None:
    """Print the table."""
    print(f"{usable_cpus()} CPUs, {cpu_model()}; tunings of {budget:g} s; took {seconds:.0f} s")
    head = ("load", "best of the grid", "images/s", "chosen / best", "median", "busy CPUs")
    print("{:<7} {:<22} {:>8}  {:<24} {:>7}  {}".format(*head))
    for name, each in found.items():
        ratios = [ratio["median"] for ratio in each["ratios"]]
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        verdict = f"{statistics.median(ratios):>7.2f}  {each['load']:.1f}"
        print(f"{name:<7} {each['best']:<22} {each['rate']:>8,.0f}  {shown:<24} {verdict}")
        for setting in each["chosen"]:
            print(f"{'':<7} chosen: {setting}", flush=True)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
