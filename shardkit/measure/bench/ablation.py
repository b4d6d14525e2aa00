"""`shardkit ablation`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from typing import Any

from shardkit.measure.bench.bench import BenchOptions, compare
from shardkit.measure.bench.report import BenchReport, Line, line_of
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread, Watch
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition
from shardkit.measure.runner.steps import device
from shardkit.measure.runner.workload import Workload
from shardkit.options import about, option, part, require_valid, same_option, takes
from shardkit.system.machine import usable_cpus

SECONDS = 6.0
"""Default length of a measurement of the baseline."""

EPOCHS = 3
"""Epochs of a measurement: their boundaries count, but are not all."""

_PATIENCE = 3
"""A measurement may take this many times as long as that of the baseline."""


@dataclass(frozen=True, kw_only=True)
class AblationOptions:
    """The options of `ablation`."""

    decode: str | None = same_option(Workload, "decode")
    transform: str | None = same_option(Workload, "transform")
    batch_size: int = option(32, help="Samples per batch.", metavar="N", minimum=1)
    workers: int | None = option(
        None,
        help="Workers per loader.",
        metavar="N",
        minimum=1,
        shown="number of CPUs, at least 2",
    )
    model: str | None = same_option(Workload, "model", shown="measure loading alone")
    rounds: int = same_option(BenchOptions, "rounds", default=3)
    seconds: float = option(
        SECONDS,
        help="Length of a measurement of PyTorch's loader without workers.",
        metavar="T",
        is_positive=True,
    )
    watch: Watch = same_option(BenchOptions, "watch")

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True)
class AblationArguments(AblationOptions):
    """The arguments of `ablation`."""

    dataset: str | PathLike[str] = field(metadata=about("A dataset or a plain folder of images."))


@takes(AblationArguments)
def ablation(options: AblationArguments) -> BenchReport:
    """Measure the speedup of each improvement to data loading, one after the other.

    A measurement is several whole epochs, with the start of workers between them.

    Raises:
        UsageError: If the dataset, the model or an option is invalid.
        MeasurementFailed: If the first loader cannot be measured.
        KeyboardInterrupt: If Ctrl-C comes before a round is complete.
    """
    accelerator = device().type == "cuda"
    workload, workers = part(options, Workload), options.workers or max(2, usable_cpus())
    (subject,) = workload.subjects([fspath(options.dataset)])
    step = workload.step if options.model else StepSpec(arrive=accelerator)
    rungs = make_rungs(workers, options.batch_size, accelerator=accelerator)
    with MeasurementProcess(subject) as process:
        images = process.open().images
        stop = StopCondition(seconds=min(options.seconds / 5, 60.0))
        pilot = process.measure(rungs["no workers"], stop, step).rate
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * options.seconds / EPOCHS / options.batch_size))
    rows = min(images, batches * options.batch_size)
    stop = StopCondition(epochs=EPOCHS, whole=True, seconds=_PATIENCE * rows * EPOCHS / pilot)
    subject = replace(subject, limit=rows)
    candidates = [
        Candidate(subject=subject, loader=loader, step=step, stop=stop) for loader in rungs.values()
    ]
    return compare(
        candidates,
        lambda results: lines_of(list(rungs), results),
        rounds=options.rounds,
        length=f"{EPOCHS} epochs",
        watch=options.watch,
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
