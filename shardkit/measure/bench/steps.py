"""`shardkit bench --steps`: improve a loader step by step, and measure what each step gains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardkit.measure.bench.report import Line, line_of
from shardkit.measure.runner.process import MeasurementProcess
from shardkit.measure.runner.rounds import Candidate, Result, Spread
from shardkit.measure.runner.spec import PLAIN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import device
from shardkit.system.machine import usable_cpus

EPOCHS = 3
"""Epochs of a measurement: their boundaries count, but are not all."""

_PATIENCE = 3
"""A measurement may take this many times as long as that of the baseline."""


def step_candidates(
    subject: Subject, step: StepSpec, *, batch_size: int, seconds: float
) -> dict[str, Candidate]:
    """Return the loaders that this machine supports, by name, each with one improvement more.

    A large subject is sampled, so that an epoch of the first loader takes ``seconds``.
    MeasurementFailed if that loader cannot be measured.
    """
    accelerator = device().type == "cuda"
    workers = max(2, usable_cpus())
    step = step if step.model else replace(step, arrive=accelerator)
    loaders = make_steps(workers, batch_size, accelerator=accelerator)
    with MeasurementProcess(subject) as process:
        images = process.open().images
        stop = StopCondition(seconds=min(seconds, 60.0))
        pilot = process.measure(loaders["no workers"], stop, step).rate
    # At least two batches per worker: otherwise their start would be all that is measured.
    batches = max(2 * workers, math.ceil(pilot * seconds / batch_size))
    rows = min(images, batches * batch_size)
    stop = StopCondition(epochs=EPOCHS, whole=True, seconds=_PATIENCE * rows * EPOCHS / pilot)
    subject = replace(subject, limit=rows)
    return {
        name: Candidate(subject=subject, loader=loader, step=step, stop=stop)
        for name, loader in loaders.items()
    }


def make_steps(workers: int, batch_size: int, *, accelerator: bool) -> dict[str, LoaderSpec]:
    """Return the loaders by name."""
    loader = LoaderSpec(engine=PLAIN, batch_size=batch_size, num_workers=0)
    steps = {"no workers": loader}
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
            steps[name] = loader = replace(loader, **changed)
    ours = LoaderSpec(batch_size=batch_size, num_workers=workers, device=target)
    return {**steps, "+ shardkit's engine": ours}


def lines_of_steps(names: Sequence[str], results: Sequence[Result]) -> list[Line]:
    """Return the lines; each is compared with the first one and the one above it."""
    lines = [line_of(results[0], results[0], names[0])]
    for name, result, above in zip(names[1:], results[1:], results, strict=False):
        gain = ""
        if result.samples and above.samples:
            ratio = Spread.paired(result.rates, above.rates).median
            gain = f" ({ratio:.2f}x the row above)"
        lines.append(line_of(result, results[0], f"{name}{gain}"))
    return lines
