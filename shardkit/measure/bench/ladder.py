"""`shardkit ladder`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from shardkit.measure.bench import tutorial
from shardkit.measure.bench.report import BenchReport, Line, Source, measured
from shardkit.measure.runner import session
from shardkit.measure.runner.environment import environment
from shardkit.measure.runner.material import Opened, choose_decode, is_dataset
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread, Watch, run_interleaved
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import device
from shardkit.system.machine import other_load, usable_cpus

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

_BATCH_SIZE, _PREFETCH = 32, 2
_EPOCHS = 3
"""Epochs of a measurement: their boundaries count, but are not all."""

_PATIENCE = 3.0
"""A measurement may take this many times as long as the baseline and the model in sequence."""


def ladder(  # noqa: PLR0913 - the options of the command
    dataset: str | PathLike[str] | None = None,
    *,
    case: str | None = None,
    decode: str | None = None,
    transform: str | None = None,
    batch_size: int = _BATCH_SIZE,
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
    load, accelerator = other_load(), device().type == "cuda"
    name = case or fspath(dataset or "")
    if case is not None:
        subject = Subject(dataset=f"{tutorial.__name__}:TutorialDataset", decode=case)
        kind, workers, epochs = "dataset", workers or tutorial.WORKERS, tutorial.EPOCHS
    else:
        workers, epochs = workers or max(2, usable_cpus()), _EPOCHS
        decode = choose_decode([name], decode, transform)
        subject = Subject(path=name, decode=decode, transform=transform)
        kind = "dataset" if is_dataset(name) else "folder"
    rungs = make_rungs(workers, batch_size, accelerator=accelerator)
    first = rungs["no workers"]
    step = StepSpec(model=model) if model else StepSpec(arrive=accelerator)
    step_seconds = None
    with MeasurementProcess(subject) as process:
        images = process.open().images
        pilot = process.measure(first, StopCondition(seconds=seconds / 5)).rate
        if model:
            step_seconds = process.call(session.step_seconds, loader=first, step=step)
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * seconds / epochs / batch_size))
    rows = images if case else min(images, batches * batch_size)
    longest = rows * epochs * (1 / pilot + (step_seconds or 0.0) / batch_size)
    stop = StopCondition(epochs=epochs, whole=True, seconds=_PATIENCE * longest)
    subject = replace(subject, limit=rows)
    candidates = [
        Candidate(subject=subject, loader=loader, step=step, stop=stop) for loader in rungs.values()
    ]
    results, interrupted = run_interleaved(candidates, rounds=rounds, watch=watch)
    settings = {
        "decode": subject.decode,
        "transform": transform,
        "batch_size": batch_size,
        "step_ms": None,
        "model": model,
        "step_seconds": step_seconds,
        "rounds": rounds,
        "complete": max(len(each.samples) for each in results),
        "length": f"{epochs} epochs",
    }
    opened = results[0].opened or Opened()
    return BenchReport(
        sources=(Source(path=name, kind=kind, **vars(opened)),),
        lines=lines_of(name, list(rungs), results),
        settings=settings,
        environment=environment(),
        load=load,
        interrupted=interrupted,
    )


def make_rungs(workers: int, batch_size: int, *, accelerator: bool) -> dict[str, LoaderSpec]:
    """Return the loaders that this machine supports, each with one improvement more."""
    loader = LoaderSpec(engine=PLAIN, batch_size=batch_size, num_workers=0)
    rungs = {"no workers": loader}
    target = "cuda" if accelerator else None
    changes: list[tuple[str, dict[str, Any]]] = [
        (f"+ {workers} workers", {"num_workers": workers, "prefetch_factor": _PREFETCH}),
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


def lines_of(path: str, names: Sequence[str], results: Sequence[Result]) -> tuple[Line, ...]:
    """Return the lines; each is compared with the first, and the last measured one above it."""
    lines, previous = [], results[0]
    for name, result in zip(names, results, strict=True):
        gain = ""
        if result.samples and previous.samples and result is not results[0]:
            ratio = Spread.paired(result.rates, previous.rates).median
            gain = f" ({ratio:.2f}x the row above)"
        line = Line(
            path=path,
            loader=f"{name}{gain}",
            cache="warm",
            baseline=result is results[0],
            measured=measured(result, results[0]),
            problem=result.problem,
        )
        lines.append(line)
        previous = result if result.samples else previous
    return tuple(lines)
