"""`shardkit tune` against an exhaustive grid: is the choice as good as the best there is?

    python scripts/bench/tune_grid.py PHOTOS --work DIR [--only decode] [--json FILE]

Three loads: JPEGs of 256 pixels, cropped at random; a transform in pure Python, which holds the
interpreter's lock; a transform that waits. For each the grid of engine x workers x prefetch is
measured in rounds: the first one all of it, the others what was within half of the best. Then
`tune` searches with its default budget and one batch size. In the end its choice and the grid's
best are measured side by side, in turn, and the median of the ratios is told.

It takes some 10 minutes a load with 2 processors. With --json a load that is in the file already is
not measured again; with --again too its grid is taken from there, and the rest is done anew.
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
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.spec import Subject
from shardkit.measure.runner.timing import StopCondition
from shardkit.measure.tune.candidate import Candidate
from shardkit.measure.tune.ledger import Ledger
from shardkit.measure.tune.limits import Footprint, room_here, what_forbids
from shardkit.measure.tune.tune import TuneReport, TuneRequest, tune
from shardkit.sources.imagefolder import scan_imagefolder
from shardkit.system.files import write_atomically
from shardkit.system.machine import usable_cpus

WORKERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
NEAR = 0.5
TURNS = 5
"""Batches of each worker in a look, at the least: those that wait alike deliver them together."""
LOADS: dict[str, dict[str, Any]] = {
    "decode": {"decode": "RandomResizedCrop(224)"},
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
    parser.add_argument("--final", type=int, default=9, help="rounds side by side, in the end")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a look")
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="tune again, with the grid of --json")
    given = parser.parse_args()
    here = str(Path(__file__).parent)  # where the measuring process finds the transforms
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    dataset = make(given.photos, given.work, given.images)
    known: dict[str, Any] = {}
    if given.json is not None and given.json.exists():
        known = json.loads(given.json.read_text("utf-8"))
    for name in given.only or LOADS:
        if name not in known or given.again:
            subject = Subject(path=str(dataset), **LOADS[name])
            grid = known[name]["grid"] if name in known else measure_grid(subject, given)
            known[name] = compare(subject, grid, given)
            if given.json is not None:
                write_atomically(given.json, json.dumps(known, indent=1).encode())
        tell(name, known[name])
    return 0


def make(photos: Path, work: Path, images: int) -> Path:
    """Make a dataset of so many images of 256 pixels, or find it; return where it is."""
    dataset = work / f"jpeg256-{images}"
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
    convert_scan(
        scan_imagefolder(source),
        dataset,
        ConvertOptions(to="lmdb", recipe=Recipe(resize=(256, 256))),
    )
    return dataset


def compare(subject: Subject, grid: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Let `tune` choose, and measure its choice and the best of a grid side by side."""
    settings = {str(each): each for each in grid_of(given.workers, given.batch_size)}
    best = settings[next(iter(grid))]
    request = TuneRequest(subject=subject, budget=given.budget, batch_sizes=(given.batch_size,))
    report = tune(request)
    chosen = report.chosen.candidate
    show(f"tune took {report.seconds:.1f} s and chose {chosen}; the grid's best is {best}")
    final = Ledger()
    with MeasurementProcess(subject) as served:
        served.open()
        for number in range(given.final):
            for each in (best, chosen) if number % 2 else (chosen, best):
                final.add(each, number, rate(served, each, 2 * given.seconds))
    ratio = final.ratio(chosen, best)
    assert ratio is not None
    return {
        "processors": usable_cpus(),
        "grid": grid,
        "best": str(best),
        "best_rate": final.rates(best).median,
        "chosen": str(chosen),
        "chosen_rate": final.rates(chosen).median,
        "ratio": asdict(ratio),
        "tune": told(report),
    }


def measure_grid(subject: Subject, given: argparse.Namespace) -> dict[str, Any]:
    """Return the images/s of all settings, the fastest first."""
    ledger, needs = Ledger(), Footprint()
    with MeasurementProcess(subject) as served:
        room = room_here(served.open()["images"])
        left = list(grid_of(given.workers, given.batch_size))
        for number in range(given.rounds + 1):
            show(f"{subject.transform or subject.decode}: round {number}, {len(left)} settings")
            shift = number * len(left) // (given.rounds + 1)
            for each in left[shift:] + left[:shift]:
                if what_forbids(each, needs, room):
                    continue
                try:
                    ledger.add(each, number, rate(served, each, given.seconds))
                except MeasurementFailed as error:
                    show(f"{each}: {error}")
            known = ledger.candidates()
            least = NEAR * ledger.rates(known[0]).median
            left = [each for each in left if each in ledger and ledger.rates(each).median >= least]
    return {str(each): asdict(ledger.rates(each)) for each in ledger.candidates()}


def grid_of(workers: list[int], batch_size: int) -> list[Candidate]:
    """Return all settings of the grid, each once."""
    found: dict[tuple[str, int, int], Candidate] = {}
    for engine, number in itertools.product(("thread", "process"), workers):
        plain = Candidate(engine=engine, workers=number, batch_size=batch_size)
        for factor in (None, 1, -(-2 * plain.ahead // number)):
            each = plain.changed(prefetch_factor=factor)
            found.setdefault((engine, number, each.ahead), each)
    return list(found.values())


def rate(served: MeasurementProcess, candidate: Candidate, seconds: float) -> float:
    """Return images/s of a look that is long enough for some turns of all workers."""
    seen = served.look(candidate.loading(), StopCondition(seconds=seconds)).look
    turn = candidate.workers * candidate.batch_size / seen.rate
    if seconds < TURNS * turn < 10:
        seen = served.look(candidate.loading(), StopCondition(seconds=TURNS * turn)).look
    return seen.rate


def told(report: TuneReport) -> dict[str, Any]:
    return {
        "seconds": report.seconds,
        "looks": sum(each.rates.rounds for each in report.tried),
        "held": report.held,
        "default": report.default and str(report.default.candidate),
        "gain": report.gain and asdict(report.gain),
    }


def tell(name: str, found: dict[str, Any]) -> None:
    """Print a line of the table."""
    ratio = found["ratio"]
    spread = statistics.fmean([ratio["high"] - ratio["middle"], ratio["middle"] - ratio["low"]])
    print(f"{name}, with {found['processors']} processors:")
    print(f"  best of {len(found['grid'])}: {found['best']}: {found['best_rate']:,.0f} images/s")
    print(f"  chosen: {found['chosen']}: {found['chosen_rate']:,.0f} images/s")
    print(f"  chosen / best: {ratio['middle']:.3f} +- {spread:.3f}", flush=True)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
