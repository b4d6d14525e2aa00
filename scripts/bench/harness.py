"""Interleaved timing: every contender once in each round, medians over the rounds, as a table."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version

Contender = Callable[[], int]
"""Does the work once, from the beginning, and returns the number of images it handled."""


def contend(
    title: str, contenders: Mapping[str, Contender], *, rounds: int, baseline: str
) -> dict[str, float]:
    """Time all contenders and print a Markdown table; return the median images/s of each.

    One round that does not count comes first, so that all have read their files. In each round the
    order is turned by one, so that no contender always follows the same other.
    """
    names = list(contenders)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned:
            _show(f"{title}: round {number + 1} of {rounds}, {name}")
            begun = time.perf_counter()
            images = contenders[name]()
            seconds = time.perf_counter() - begun
            if number >= 0:
                rates[name].append(images / seconds)
    _show("")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n**{title}**, median of {rounds} interleaved rounds\n")
    print(f"| contender | images/s | lowest to highest | x {baseline} |")
    print("|---|---:|---:|---:|")
    for name in names:
        low, high = min(rates[name]), max(rates[name])
        ratio = medians[name] / medians[baseline]
        print(f"| {name} | {medians[name]:,.0f} | {low:,.0f} to {high:,.0f} | {ratio:.2f} |")
    return medians


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:100.100}", end="\r", file=sys.stderr, flush=True)


def machine(*packages: str) -> str:
    """Return one line on this machine and the versions in use."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{cores} cores of {model}, {system}, {versions}"


def _cpuinfo() -> list[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
