"""How much a loader delays the kernel launches of a training loop, simulated without a GPU.

    python scripts/bench/launches.py PHOTOS [--work DIR] [--rounds 3] [--steps 100]
                                     [--workers 1 2] [--engines thread] [--results FILE]

A step issues 2,000 small operations from Python, as a launch-bound model does, and then sleeps for
40 ms, as it does while a GPU computes. Each candidate runs in an interpreter of its own; all are
measured once in each round. Ratios compare with the same round's loop without a loader.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import material
import numpy as np
import torch
from contenders.adapter import BATCH, Task
from contenders.shardkit_ import Adapter
from harness import show
from memory import fresh, table
from report import machine
from tune_loads import hold

from shardkit import make_loader, open_dataset
from shardkit.torch.engine.options import ENGINES

OPERATIONS, SLEEP = 2_000, 0.04
"""Of a step: small operations, and seconds of sleep after them."""

WARM_UP = 10
"""Steps that do not count: workers start, and buffers fill."""

LOADS = {
    "JPEG, random crop": ("random", "originals"),
    "raw 224 x 224": ("raw", "pixels224"),
    "Python transform": ("python", "pixels224"),
}
"""Kind of task and folder of each load; ``python`` holds the GIL for some 2 ms per image."""

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A load, read by an engine with so many workers; the loop alone if the engine is `NONE`."""

    load: str = ""
    engine: str = NONE
    num_workers: int = 0

    def __str__(self) -> str:
        if self.engine == NONE:
            return "no loader"
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        return f"{self.load}, {self.engine}, {workers}"


@dataclass(frozen=True)
class Phases:
    """Milliseconds of a candidate's steps in one round."""

    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    """Until the batch is there."""

    @property
    def median(self) -> float:
        """Median of the launch phase."""
        return statistics.median(self.launch)

    @property
    def tail(self) -> float:
        """95th percentile of the launch phase."""
        return float(np.percentile(self.launch, 95))


def main(arguments: list[str] | None = None) -> None:
    given = _parse(arguments)
    candidates = [Candidate()] + [
        Candidate(load=load, engine=engine, num_workers=workers)
        for load in LOADS
        for engine in given.engines
        for workers in given.workers
    ]
    with tempfile.TemporaryDirectory() as temporary:
        work = (given.work or Path(temporary)).absolute()
        material.make(given.photos, work, given.copies)
        for kind, folder in set(LOADS.values()):
            _dataset(work, kind, folder)
        rounds: list[dict[Candidate, Phases]] = []
        for number in range(given.rounds):
            rounds.append({})
            for candidate in candidates:
                show(f"round {number + 1} of {given.rounds}, {candidate}")
                rounds[-1][candidate] = fresh(partial(measure, work, candidate, given.steps))
    _print(rounds)
    if given.results:
        found = [{str(key): asdict(phases) for key, phases in one.items()} for one in rounds]
        source = {"date": str(date.today()), "machine": machine()}
        given.results.write_text(json.dumps({**source, "rounds": found}), "utf-8")


def measure(work: Path, candidate: Candidate, steps: int) -> Phases:
    """Run the loop; return its phases."""
    batches: Iterator[Any] = repeat(None)
    if candidate.engine != NONE:
        dataset = _dataset(work, *LOADS[candidate.load])
        options: dict[str, Any] = {"engine": candidate.engine, "num_workers": candidate.num_workers}
        batches = _endless(make_loader(dataset, BATCH, shuffle=True, **options))
    phases, value = Phases(), torch.zeros(16)
    for number in range(WARM_UP + steps):
        begun = time.perf_counter()
        batch = next(batches)
        there = time.perf_counter()
        for _ in range(OPERATIONS):
            value.add_(1)
        launched = time.perf_counter()
        time.sleep(SLEEP)
        del batch
        if number >= WARM_UP:
            phases.wait.append(1000 * (there - begun))
            phases.launch.append(1000 * (launched - there))
    return phases


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _dataset(work: Path, kind: str, folder: str) -> Any:
    """Open the dataset of a load, from LMDB; make it first, unless it is there."""
    task = Task(
        kind="raw" if kind == "python" else kind,
        folder=work / folder,
        sets=work / "sets",
        options={"format": "lmdb"},
    )
    adapter = Adapter(task)
    adapter.prepare()
    return open_dataset(adapter.path, hold) if kind == "python" else adapter.dataset


def _print(rounds: list[dict[Candidate, Phases]]) -> None:
    """Print a line for each candidate: medians over the rounds."""
    lines: list[tuple[object, ...]] = []
    for candidate in rounds[0]:
        mine = [one[candidate] for one in rounds]
        ratios = [one[candidate].median / one[Candidate()].median for one in rounds]
        tails = [one[candidate].tail / one[Candidate()].tail for one in rounds]
        waits = [statistics.median(phases.wait) for phases in mine]
        lines.append(
            (
                candidate,
                statistics.median(phases.median for phases in mine),
                statistics.median(ratios),
                statistics.median(phases.tail for phases in mine),
                statistics.median(tails),
                statistics.median(waits),
            )
        )
    print(f"{machine()}.")
    columns = ("launch phase", "median, ms", "x none", "95th percentile, ms", "x none", "wait, ms")
    table(f"median of {len(rounds)} rounds", columns, lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("photos", type=Path, help="An image folder of photographs.")
    parser.add_argument("--work", type=Path, help="Where data are kept (default: nowhere).")
    parser.add_argument("--copies", type=int, default=10, help="Copies of each photograph (10).")
    parser.add_argument("--rounds", type=int, default=3, help="Rounds (3).")
    parser.add_argument("--steps", type=int, default=100, help="Steps that count (100).")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="Workers (1 2).")
    engines = [engine for engine in ENGINES if engine != "auto"]
    parser.add_argument(
        "--engines", nargs="+", choices=engines, default=engines, help="Engines (all)."
    )
    parser.add_argument("--results", type=Path, help="A JSON file for every number.")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
