"""Images/s of a loader where others use the CPUs, at normal and low priority; see launches.py."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from contenders.adapter import BATCH
from memory import table

from shardkit import make_loader
from shardkit.system.machine import usable_cpus
from shardkit.torch.engine.options import PRIORITIES

MULTIPLICATIONS, SIDE = 20, 768
"""Products of square matrices in a training step on all CPUs: 0.1 to 0.2 s on two cores."""

WARM_UP = 4
"""Batches that do not count."""

ALONE, TRAINING, RANKS, FOREIGN = "alone", "CPU training", "two ranks", "a busy process"
SITUATIONS = (ALONE, TRAINING, RANKS, FOREIGN)

_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An engine in a situation."""

    situation: str
    engine: str
    priority: str

    def __str__(self) -> str:
        return f"{self.situation}, {self.engine}, {self.priority} priority"


def candidates(engines: Sequence[str]) -> list[Candidate]:
    """Return all candidates; those that are compared are neighbors."""
    return [
        Candidate(situation=situation, engine=engine, priority=priority)
        for situation in SITUATIONS
        for engine in engines
        for priority in PRIORITIES
    ]


def measure(
    fresh: Callable[[Sequence[Callable[[], float]]], list[float]],
    dataset: Callable[[], Any],
    candidate: Candidate,
    seconds: float,
) -> float:
    """Return images/s; of two ranks, which start together, the sum."""
    ranks = 2 if candidate.situation == RANKS else 1
    return sum(fresh([partial(load, dataset, candidate, seconds)] * ranks))


def load(dataset: Callable[[], Any], candidate: Candidate, seconds: float) -> float:
    """Load for so many seconds; return images/s."""
    workers = max(1, usable_cpus() // (2 if candidate.situation == RANKS else 1))
    loader = make_loader(
        dataset(),
        BATCH,
        shuffle=True,
        endless=True,
        engine=candidate.engine,
        num_workers=workers,
        priority=candidate.priority,
    )
    matrix, start, elapsed = torch.ones(SIDE, SIDE), 0.0, 0.0
    with busy_process() if candidate.situation == FOREIGN else contextlib.nullcontext():
        for number, _ in enumerate(loader):
            if candidate.situation == TRAINING:
                for _ in range(MULTIPLICATIONS):
                    torch.mm(matrix, matrix)
            if number < WARM_UP:
                start = time.perf_counter()
            elif (elapsed := time.perf_counter() - start) >= seconds:
                break
    loader.close()
    return BATCH * (number - WARM_UP + 1) / elapsed


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """Keep one CPU busy at normal priority; the process ends with this one, too."""
    with subprocess.Popen([sys.executable, "-c", _BUSY]) as process:
        try:
            yield
        finally:
            process.kill()


def show(rounds: list[dict[Candidate, float]]) -> None:
    """Print a line for each situation and engine: medians over the rounds."""
    lines: list[tuple[object, ...]] = []
    for candidate in rounds[0]:
        if candidate.priority == PRIORITIES[0]:
            low = replace(candidate, priority=PRIORITIES[1])
            rates = [[rates[key] for rates in rounds] for key in (candidate, low)]
            ratios = [later / first for first, later in zip(*rates, strict=True)]
            name = f"{candidate.situation}, {candidate.engine}"
            lines.append((name, *map(statistics.median, (*rates, ratios))))
    columns = ("JPEG, random crop", "normal priority, images/s", "low priority", "low / normal")
    table(f"median of {len(rounds)} rounds", columns, lines)
