"""Reports of `shardkit bench` with made-up numbers, for tests of their display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkit.measure.bench.report import BenchReport, Line, Source, measured
from shardkit.measure.runner.environment import Environment
from shardkit.measure.runner.process import Seen
from shardkit.measure.runner.rounds import Contender, Outcome
from shardkit.measure.runner.spec import Subject, parse_loading
from shardkit.measure.runner.timing import Look
from shardkit.system.machine import OtherLoad

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
"""Names of folders that somebody may have."""


def seen(rate: float, *, wait: float = 0.01, batches: int = 100, workers: int = 2) -> Seen:
    """Return a round with ``rate`` images/s, in batches of 10."""
    images = 10 * batches
    seconds = images / rate
    look = Look(
        images=images,
        seconds=seconds,
        waits=[wait] * batches,
        first=0.5,
        cpu=1.5 * seconds,
        peak=300 << 20,
        worker_peak=(200 << 20) if workers else 0,
        batch_bytes=1000,
        worker_cpu=1.0 * seconds,
    )
    return Seen(look=look, engine="plain", reason="", workers=workers, warnings=[])


def outcome(
    path: str,
    loader: str = PLAIN,
    cache: str = "warm",
    rates: Sequence[float] = (100, 100, 100),
    **more: Any,
) -> Outcome:
    """Return the measurements of a line."""
    subject = Subject(path=path, decode="CenterCrop(8)")
    loading = parse_loading(loader, 10)
    contender = Contender(name=path, subject=subject, loading=loading, cache=cache)
    found = [] if "problem" in more else [seen(rate) for rate in rates]
    sizes = {"images": 1000, "total": 1000, "mean_bytes": 5e4, "bytes": 50_000_000}
    return Outcome(contender=contender, seen=found, **{**sizes, **more})


def report(*outcomes: Outcome, folders: Sequence[str] = (), **settings: Any) -> BenchReport:
    """Return the report of some lines, the first of which is the baseline."""
    first = outcomes[0].contender
    bases = {
        each.contender.cache: each
        for each in outcomes
        if (each.contender.subject, each.contender.loading) == (first.subject, first.loading)
    }
    lines = [
        Line(
            path=each.contender.subject.path,
            loader=str(each.contender.loading),
            cache=each.contender.cache,
            baseline=each in bases.values(),
            measured=measured(each, bases.get(each.contender.cache)),
            problem=each.problem,
        )
        for each in outcomes
    ]
    sources = {each.contender.subject.path: each for each in outcomes}
    return BenchReport(
        sources=tuple(
            Source(
                path=path,
                kind="folder" if path in folders else "dataset",
                split=each.split,
                images=each.images,
                total=each.total,
                bytes=each.bytes,
                mean_bytes=each.mean_bytes,
                filesystem="ext4",
            )
            for path, each in sources.items()
        ),
        lines=tuple(lines),
        settings={**SETTINGS, **settings},
        environment=Environment(
            date="2026-01-02T03:04:05Z",
            system="Linux",
            python="3.11.0",
            processor="A processor",
            processors=2,
            memory=8 << 30,
            accelerator="",
            versions={"shardkit": "0.1.0", "torch": "2.2.0"},
        ),
        load=OtherLoad(busy=0.1, present=2),
        command="shardkit bench photos dataset",
    )


SETTINGS: dict[str, Any] = {
    "decode": "CenterCrop(8)",
    "transform": None,
    "batch_size": 10,
    "order": "random",
    "step_ms": None,
    "model": None,
    "rounds": 3,
    "seconds": 1.0,
    "limit": 2000,
}


def usual() -> BenchReport:
    """Return a folder and a dataset that is read twice as fast, three times when cold."""
    return report(
        outcome("photos", cache="warm", rates=(100, 125, 80)),
        outcome("photos", cache="cold", rates=(50, 62.5, 40), resident=0.0),
        outcome("dataset", "auto", cache="warm", rates=(200, 250, 160)),
        outcome("dataset", "auto", cache="cold", rates=(150, 187.5, 120), resident=0.0),
        folders=["photos"],
    )


def hostile() -> BenchReport:
    """Return forty lines with hostile names."""
    outcomes = [outcome("photos")]
    for number in range(40):
        name = f"{HOSTILE[number % len(HOSTILE)]}{number}"
        failed = {"problem": f"failed\non {name}"} if number % 10 == 9 else {}
        outcomes.append(outcome(name, "auto", rates=(200 + number,) * 3, **failed))
    return report(*outcomes, folders=["photos"], transform="<i>:x", model=None)
