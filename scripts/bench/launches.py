"""How much a loader delays the kernel launches of a training loop, simulated without a GPU.

    python scripts/bench/launches.py PHOTOS [--work DIR] [--rounds 3] [--steps 100]
                                     [--workers 1 2] [--engines thread] [--only launches]
                                     [--results FILE]

A step issues 2,000 small operations from Python, as a launch-bound model does, and then sleeps for
40 ms, as it does while a GPU computes. Each candidate runs in an interpreter of its own; all are
measured once in each round. Ratios compare with the same round's loop without a loader.

GIL: CPU time of the training process per batch, of each thread, without its time in those functions
of the compiled module that release the GIL. It is an upper bound: other calls release it, too. The
training thread counts only while it takes a batch. Worker processes do not count: they have their
own GIL.

Then `contention.py` measures where low priority could make loading slower.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar

import contention
import material
import numpy as np
import torch
from contenders.adapter import BATCH, Task
from contenders.shardkit_ import Adapter
from harness import show
from memory import table
from report import machine
from tune_loads import hold

from shardkit import make_loader, open_dataset
from shardkit.system import native
from shardkit.torch.engine.options import ENGINES, PRIORITIES

OPERATIONS, SLEEP = 2_000, 0.04
"""Of a step: small operations, and seconds of sleep after them."""

WARM_UP = 10
"""Steps that do not count: workers start, and buffers fill."""

JPEG = "JPEG, random crop"
LOADS = {
    JPEG: ("random", "originals"),
    "raw 224 x 224": ("raw", "pixels224"),
    "Python transform": ("python", "pixels224"),
}
"""Kind of task and folder of each load; ``python`` holds the GIL for some 2 ms per image."""

NONE = "none"
PARTS = ("launches", "contention")

RELEASING = ("fill", "fill_views", "fill_values", "read_stored")
"""Functions of the compiled module that read batches; they release the GIL once per call."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A load, read by an engine with so many workers; the loop alone if the engine is `NONE`."""

    load: str = ""
    engine: str = NONE
    num_workers: int = 0
    priority: str = "normal"
    is_disturbed: bool = False
    """Whether a foreign process computes meanwhile."""

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' * (self.num_workers > 1)}"
        parts = [self.load, self.engine, workers]
        parts = ["no loader"] if self.engine == NONE else parts
        parts += ["low priority"] * (self.priority == "low") + ["busy process"] * self.is_disturbed
        return ", ".join(parts)


@dataclass(frozen=True)
class Phases:
    """Milliseconds of a candidate's steps in one round."""

    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    """Until the batch is there."""
    gil: dict[str, float] = field(default_factory=dict)
    """Upper bound of the time for which threads of a name hold the GIL, per batch."""

    @property
    def median(self) -> float:
        """Median of the launch phase."""
        return statistics.median(self.launch)

    @property
    def tail(self) -> float:
        """95th percentile of the launch phase."""
        return float(np.percentile(self.launch, 95))

    def held(self, *, by_training: bool) -> float:
        """Return `gil` of the training thread, or of all others."""
        training = self.gil.get(_TRAINING, 0.0)
        return training if by_training else sum(self.gil.values()) - training


_TRAINING = "MainThread"

_SCHED, _PERTHREAD = 2, 4
"""CPUCLOCK_SCHED and CPUCLOCK_PERTHREAD_MASK of Linux's posix-timers.h."""


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    multiprocessing.set_forkserver_preload(["torch", "shardkit.torch.loader"])
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).absolute()
        folders = {folder for _, folder in LOADS.values()}
        material.make_folders(options.photos, work, options.copies, sorted(folders))
        for kind, folder in LOADS.values():
            _dataset(work, kind, folder)
        results: dict[str, Any] = {"date": str(date.today()), "machine": machine()}
        print(f"{results['machine']}.")
        rounds: list[dict[Candidate, Phases]] = []
        slowdowns: list[dict[contention.Candidate, float]] = []
        for number in range(options.rounds):
            if "launches" in options.only:
                rounds.append({})
                for candidate in _candidates(options):
                    show(f"round {number + 1} of {options.rounds}, {candidate}")
                    measured = fresh([partial(measure, work, candidate, options.steps)])
                    rounds[-1][candidate] = measured[0]
            if "contention" in options.only:
                slowdowns.append({})
                for case in contention.candidates(options.engines):
                    show(f"round {number + 1} of {options.rounds}, {case}")
                    dataset = partial(_dataset, work, *LOADS[JPEG])
                    slowdowns[-1][case] = contention.measure(fresh, dataset, case, options.seconds)
    if rounds:
        _print(rounds)
        results["rounds"] = [
            {str(key): asdict(phases) for key, phases in phases_of.items()} for phases_of in rounds
        ]
    if slowdowns:
        contention.show(slowdowns)
        results["contention"] = [
            {str(key): rate for key, rate in rates.items()} for rates in slowdowns
        ]
    if options.results:
        options.results.write_text(json.dumps(results), "utf-8")


def fresh(functions: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """Call functions at once, each in an interpreter of its own; return their results."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(len(functions), context) as pool:
        return [future.result() for future in [pool.submit(call) for call in functions]]


def measure(work: Path, candidate: Candidate, steps: int) -> Phases:
    """Run the loop; return its phases."""
    released = _Released()
    loader: Any = repeat(None)
    if candidate.engine != NONE:
        loader = make_loader(
            _dataset(work, *LOADS[candidate.load]),
            BATCH,
            shuffle=True,
            endless=True,
            engine=candidate.engine,
            num_workers=candidate.num_workers,
            priority=candidate.priority,
        )
    disturbance = contention.busy_process() if candidate.is_disturbed else nullcontext()
    phases, value, taking = Phases(), torch.zeros(16), 0.0
    before, batches = dict[str, float](), iter(loader)
    with disturbance:
        for number in range(WARM_UP + steps):
            if number == WARM_UP:
                before, taking = released.held(), 0.0
            start, cpu = time.perf_counter(), time.thread_time()
            batch = next(batches)
            arrival, taking = time.perf_counter(), taking + time.thread_time() - cpu
            for _ in range(OPERATIONS):
                value.add_(1)
            end = time.perf_counter()
            time.sleep(SLEEP)
            del batch
            if number >= WARM_UP:
                phases.wait.append(1000 * (arrival - start))
                phases.launch.append(1000 * (end - arrival))
        after = released.held()
    if candidate.engine != NONE:
        loader.close()
    held = {name: after[name] - before[name] for name in before} | {_TRAINING: taking}
    phases.gil.update({name: 1000 * seconds / steps for name, seconds in held.items()})
    return phases


class _Released:
    """Measures how much CPU time the threads of this process use, and how much without the GIL."""

    def __init__(self) -> None:
        self._seconds = defaultdict[int, float](float)
        self._starts: dict[int, float] = {}
        """CPU time of the threads that are in such a function, when they entered it."""
        compiled = native.module()
        for name in RELEASING if compiled else ():
            setattr(compiled, name, self._timed(getattr(compiled, name)))

    def held(self) -> dict[str, float]:
        """Return CPU seconds of the threads by name, without those in functions of `RELEASING`."""
        result = defaultdict[str, float](float)
        for thread in threading.enumerate():
            ident, task = thread.ident, thread.native_id
            if ident is None or task is None:
                continue
            # As pthread_getcpuclockid(3), which must not be called for a thread that has ended.
            clock = ~task << 3 | _SCHED | _PERTHREAD
            with suppress(OSError):
                now = time.clock_gettime(clock)
                result[thread.name] += self._starts.get(ident, now) - self._seconds[ident]
        return result

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            ident = threading.get_ident()
            self._starts[ident] = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self._seconds[ident] += time.thread_time() - self._starts.pop(ident)

        return call


def _candidates(options: argparse.Namespace) -> list[Candidate]:
    """Return all candidates; the loops that a foreign process disturbs come last."""

    def disturbed(**values: Any) -> Candidate:
        return Candidate(is_disturbed=True, num_workers=max(options.workers), **values)

    alone = [
        Candidate(load=load, engine=engine, num_workers=workers, priority=priority)
        for load in LOADS
        for engine in options.engines
        for workers in options.workers
        for priority in PRIORITIES
    ]
    others = [
        disturbed(load=JPEG, engine=engine, priority=priority)
        for engine in options.engines
        for priority in PRIORITIES
    ]
    return [Candidate(), *alone, Candidate(is_disturbed=True), *others]


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
        base = Candidate(is_disturbed=candidate.is_disturbed)
        pairs = [(phases[candidate], phases[base]) for phases in rounds]
        columns = (
            [loaded.median for loaded, _ in pairs],
            [loaded.median / none.median for loaded, none in pairs],
            [loaded.tail for loaded, _ in pairs],
            [loaded.tail / none.tail for loaded, none in pairs],
            [statistics.median(loaded.wait) for loaded, _ in pairs],
            [loaded.held(by_training=True) for loaded, _ in pairs],
            [loaded.held(by_training=False) for loaded, _ in pairs],
        )
        lines.append((candidate, *map(statistics.median, columns)))
    columns_of_table = ("launch phase", "median, ms", "x none", "95th percentile, ms", "x none")
    more = ("wait, ms", "GIL by the training thread, ms", "GIL by the loader's threads, ms")
    table(f"median of {len(rounds)} rounds", (*columns_of_table, *more), lines)


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
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="Parts (all).")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="Seconds of a contention measurement (3)."
    )
    parser.add_argument("--results", type=Path, help="A JSON file for every number.")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
