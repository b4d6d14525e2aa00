"""Reports of `shardkit bench` with made-up numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardkit.measure.bench.bench import lines_of
from shardkit.measure.bench.report import BenchReport
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.rounds import Candidate, Result
from shardkit.measure.runner.spec import StopCondition, Subject, parse_loader
from shardkit.measure.runner.timing import Measurement

PLAIN = "plain:num_workers=2"

HOSTILE = (
    "<script>document.title='broken'</script>",
    "a\nb\x1b[31m",
    "$\\frac{1}{0}$ {{ 7 * 7 }}",
    "bytes \udcff\udcfe",
    "ディレクトリ ★",
    "long/" * 80,
    "&amp;\"'<b>",
    "--><script>alert(1)</script>",
)
"""Hostile names of folders."""


OPENED = SubjectInfo(split="", images=1000, total=1000, bytes=50_000_000, processes="")


def sample(rate: float, *, wait: float = 0.01, batches: int = 100, workers: int = 2) -> Measurement:
    """Return a measurement of ``rate`` images/s, in batches of 10."""
    images = 10 * batches
    seconds = images / rate
    return Measurement(
        images=images,
        seconds=seconds,
        waits=(wait,) * batches,
        first=0.5,
        cpu=1.5 * seconds,
        memory=300 << 20,
        engine="plain",
        workers=workers,
    )


def result(
    path: str,
    loader: str = PLAIN,
    cache: str = "warm",
    rates: Sequence[float] = (100, 100, 100),
    *,
    opened: SubjectInfo | None = OPENED,
    problem: str = "",
    resident: float | None = 0.0,
) -> Result:
    """Return the measurements of a line."""
    subject = Subject(path=path, decode="CenterCrop(8)")
    candidate = Candidate(
        subject=subject, loader=parse_loader(loader, 10), stop=StopCondition(), cache=cache
    )
    samples = [] if problem else [sample(rate) for rate in rates]
    return Result(
        candidate=candidate, samples=samples, opened=opened, problem=problem, resident=resident
    )


def report(
    *results: Result, folders: Sequence[str] = (), interrupted: bool = False, **settings: Any
) -> BenchReport:
    """Return the report of some lines; the first folder, or line, is the baseline."""
    sources = {}
    for each in results:
        path = each.candidate.subject.path
        kind = "folder" if path in folders else "dataset"
        sources[path] = each.opened = replace(each.opened or SubjectInfo(), path=path, kind=kind)
    return BenchReport(
        sources=tuple(sources.values()),
        lines=tuple(lines_of(results)),
        settings={**SETTINGS, **settings},
        environment={
            "date": "2026-01-02T03:04:05Z",
            "system": "Linux",
            "python": "3.11.0",
            "processor": "A processor",
            "processors": 2,
            "memory": 8 << 30,
            "accelerator": "",
            "versions": {"shardkit": "0.1.0", "torch": "2.2.0"},
        },
        load=OtherLoad(busy=0.1, present=2),
        interrupted=interrupted,
        command="shardkit bench photos dataset",
    )


SETTINGS: dict[str, Any] = {
    "decode": "CenterCrop(8)",
    "transform": None,
    "batch_size": 10,
    "step_ms": None,
    "model": None,
    "rounds": 3,
    "complete": 3,
    "length": "1 s",
    "limit": 2000,
}


def usual() -> BenchReport:
    """Return a folder and a dataset that is read twice as fast, three times when cold."""
    return report(
        result("photos", cache="warm", rates=(100, 125, 80)),
        result("photos", cache="cold", rates=(50, 62.5, 40), resident=0.0),
        result("dataset", "auto", cache="warm", rates=(200, 250, 160)),
        result("dataset", "auto", cache="cold", rates=(150, 187.5, 120), resident=0.0),
        folders=["photos"],
    )


def hostile() -> BenchReport:
    """Return forty lines with hostile names."""
    results = [result("photos")]
    for number in range(40):
        name = f"{HOSTILE[number % len(HOSTILE)]}{number}"
        failed = f"failed\non {name}" if number % 10 == 9 else ""
        results.append(result(name, "auto", rates=(200 + number,) * 3, problem=failed))
    return report(*results, folders=["photos"], transform="<i>:x", model=None)
