"""`shardkit ladder`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from shardkit.measure.bench.bench import compare
from shardkit.measure.bench.report import BenchReport, Line, line_of
from shardkit.measure.runner.material import choose_decode
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread, Watch
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import device
from shardkit.system.machine import usable_cpus

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

EPOCHS = 3
"""Epochs of a measurement: their boundaries count, but are not all."""

_PATIENCE = 3
"""A measurement may take this many times as long as that of the baseline."""


def ladder(  # noqa: PLR0913 - the options of the command
    dataset: str | PathLike[str],
    *,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    model: str | None = None,
    rounds: int = 3,
    seconds: float = SECONDS,
    watch: Watch = lambda text, done, total: None,
) -> BenchReport:
    """Measure the speedup of each improvement to data loading, one after the other.

    A measurement is several whole epochs, with the start of workers between them. The arguments are
    the options of the command.

    Raises:
        UsageError: If the dataset, the model or an option is invalid.
        MeasurementFailed: If the first loader cannot be measured.
        KeyboardInterrupt: If Ctrl-C comes before a round is complete.
    """
    accelerator = device().type == "cuda"
    path, workers = fspath(dataset), workers or max(2, usable_cpus())
    subject = Subject(
        path=path, decode=choose_decode([path], decode, transform), transform=transform
    )
    step = StepSpec(model=model) if model else StepSpec(arrive=accelerator)
    rungs = make_rungs(workers, batch_size, accelerator=accelerator)
    with MeasurementProcess(subject) as process:
        images = process.open().images
        stop = StopCondition(seconds=min(seconds / 5, 60.0))
        pilot = process.measure(rungs["no workers"], stop, step).rate
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * seconds / EPOCHS / batch_size))
    rows = min(images, batches * batch_size)
    stop = StopCondition(epochs=EPOCHS, whole=True, seconds=_PATIENCE * rows * EPOCHS / pilot)
    subject = replace(subject, limit=rows)
    candidates = [
        Candidate(subject=subject, loader=loader, step=step, stop=stop) for loader in rungs.values()
    ]
    return compare(
        candidates,
        lambda results: lines_of(list(rungs), results),
        rounds=rounds,
        length=f"{EPOCHS} epochs",
        watch=watch,
    )


def make_rungs(workers: int, batch_size: int, *, accelerator: bool) -> dict[str, LoaderSpec]:
    """Return the loaders that this machine supports, each with one improvement more."""
    loader = LoaderSpec(engine=PLAIN, batch_size=batch_size, num_workers=0)
    rungs = {"no workers": loader}
    target = "cuda" if accelerator else None
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"+ {workers} workers", {"num_workers": workers, "prefetch_factor": 2}),
        ("+ pinned memory", {"pin_memory": True} if accelerator else {}),
        ("+ persistent workers", {"persistent_workers": True}),
        ("+ device prefetcher", {"device": target} if accelerator else {}),
        ("+ batched __getitems__", {"batched": True}),
    ]
    for name, changed in changes:
        if changed:
            rungs[name] = loader = replace(loader, **changed)
    ours = LoaderSpec(batch_size=batch_size, num_workers=workers, device=target)
    return {**rungs, "+ shardkit's engine": ours}


def lines_of(names: Sequence[str], results: Sequence[Result]) -> list[Line]:
    """Return the lines; each is compared with the first one and the one above it."""
    lines = [line_of(results[0], results[0], names[0])]
    for name, result, above in zip(names[1:], results[1:], results, strict=False):
        gain = ""
        if result.samples and above.samples:
            ratio = Spread.paired(result.rates, above.rates).median
            gain = f" ({ratio:.2f}x the row above)"
        lines.append(line_of(result, results[0], f"{name}{gain}"))
    return lines
