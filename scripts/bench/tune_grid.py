"""`shardkit tune` compared with an exhaustive grid: is the choice within 5% of the best?

    python scripts/bench/tune_grid.py PHOTOS --work DIR [--only decode] [--json FILE]

Four loads: JPEGs of 256 pixels, cropped at random; the same as raw pixels; a transform in pure
Python, which holds the GIL; a transform that waits. For each, the grid of engine x workers x
prefetch is measured in rounds: the first one all of it, the others what was within half of the
best. Then `tune` searches with its default budget and one batch size. In the end, its choice and
the grid's best are measured in interleaved rounds, and the median of the ratios counts.

It takes about 10 minutes per load with 2 CPUs. With --json, loads in the file are not measured
again; with --again, `tune` runs again and only the grid is taken from the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions
from shardkit.conversion.recipe import Recipe
from shardkit.errors import MeasurementFailed
from shardkit.measure.runner import session
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Spread, turn
from shardkit.measure.runner.spec import StopCondition, Subject
from shardkit.measure.tune.setting import Setting
from shardkit.measure.tune.tune import TuneReport, tune
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.files import write_atomically
from shardkit.system.machine import usable_cpus

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NEAR = 0.5
TURNS = 5
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
    parser.add_argument("--work", type=Path, required=True, help="where the dataset is made")
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--only", choices=sorted(LOADS), action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--final", type=int, default=9, help="rounds of the final comparison")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a measurement")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="tune again, with the grid of --json")
    given = parser.parse_args()
    here = str(Path(__file__).parent)  # where the measuring process finds the transforms
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    known: dict[str, Any] = {}
    if given.json is not None and given.json.exists():
        known = json.loads(given.json.read_text("utf-8"))
    for name in given.only or LOADS:
        if name not in known or given.again:
            dataset = make(given.photos, given.work, given.images, raw=name == "raw")
            subject = Subject(path=str(dataset), **LOADS[name])
            grid = known[name]["grid"] if name in known else measure_grid(subject, given)
            known[name] = compare(subject, grid, given)
            if given.json is not None:
                write_atomically(given.json, json.dumps(known, indent=1).encode())
        tell(name, known[name])
    return 0


def make(photos: Path, work: Path, images: int, *, raw: bool) -> Path:
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


def compare(subject: Subject, grid: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Let `tune` choose, and compare its choice with the best of a grid in interleaved rounds."""
    settings = {str(each): each for each in grid_of(given.workers, given.batch_size)}
    best = settings[next(iter(grid))]
    report = tune(
        subject.path,
        decode=subject.decode,
        transform=subject.transform,
        budget=given.budget,
        batch_sizes=(given.batch_size,),
    )
    chosen = report.chosen.setting
    show(f"tune took {report.seconds:.1f} s and chose {chosen}; the grid's best is {best}")
    rates: dict[Setting, list[float]] = {best: [], chosen: []}
    with MeasurementProcess(subject) as process:
        process.open()
        for number in range(given.final):
            for each in turn(list(rates), number):
                rates[each].append(rate(process, each, 2 * given.seconds))
    return {
        "processors": usable_cpus(),
        "grid": grid,
        "best": str(best),
        "best_rate": statistics.median(rates[best]),
        "chosen": str(chosen),
        "chosen_rate": statistics.median(rates[chosen]),
        "ratio": asdict(Spread.paired(rates[chosen], rates[best])),
        "tune": told(report),
    }


def measure_grid(subject: Subject, given: argparse.Namespace) -> dict[str, Any]:
    """Return the images/s of all settings, the fastest first."""
    rates: dict[Setting, list[float]] = {}
    with MeasurementProcess(subject) as process:
        process.open()
        process.call(session.warm)
        left = grid_of(given.workers, given.batch_size)
        for number in range(given.rounds + 1):
            show(f"{subject.transform or subject.decode}: round {number}, {len(left)} settings")
            for each in turn(left, number * len(left) // (given.rounds + 1)):
                try:
                    rates.setdefault(each, []).append(rate(process, each, given.seconds))
                except MeasurementFailed as error:
                    show(f"{each}: {error}")
            least = NEAR * max(map(statistics.median, rates.values()))
            left = [each for each in left if statistics.median(rates.get(each, [0.0])) >= least]
    fastest = sorted(rates, key=lambda each: -statistics.median(rates[each]))
    return {str(each): asdict(Spread.of(rates[each])) for each in fastest}


def grid_of(workers: list[int], batch_size: int) -> list[Setting]:
    """Return all settings of the grid, each once."""
    found: dict[tuple[str, int, int], Setting] = {}
    for engine, number in itertools.product(("thread", "process"), workers):
        plain = Setting(engine=engine, workers=number, batch_size=batch_size)
        for factor in (None, 1, -(-2 * plain.ahead // number)):
            each = plain.changed(prefetch_factor=factor)
            found.setdefault((engine, number, each.ahead), each)
    return list(found.values())


def rate(process: MeasurementProcess, setting: Setting, seconds: float) -> float:
    """Return images/s of a measurement that is long enough for several batches of all workers."""
    found = process.measure(setting.loader(), StopCondition(seconds=seconds))
    turns = TURNS * setting.workers * setting.batch_size / found.rate
    if seconds < turns < 10:
        found = process.measure(setting.loader(), StopCondition(seconds=turns))
    return found.rate


def told(report: TuneReport) -> dict[str, Any]:
    speedup = report.chosen.speedup
    return {
        "seconds": report.seconds,
        "settings": len(report.ranking),
        "default": str(report.default),
        "speedup": speedup and asdict(speedup),
        "load": report.load.busy,
    }


def tell(name: str, found: dict[str, Any]) -> None:
    """Print a line of the table."""
    ratio = found["ratio"]
    print(f"{name}, with {found['processors']} CPUs, {found['tune']['load']:.1f} used by others:")
    print(f"  best of {len(found['grid'])}: {found['best']}: {found['best_rate']:,.0f} images/s")
    print(f"  chosen: {found['chosen']}: {found['chosen_rate']:,.0f} images/s")
    ends = f"{ratio['lowest']:.3f} to {ratio['highest']:.3f} in {ratio['rounds']} rounds"
    print(f"  chosen / best: {ratio['median']:.3f} ({ends})", flush=True)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
