"""Measurements of the loader with a remedy; they run in the measurement process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardkit.measure.doctor.lines import Line, end_sampling, named_lines
from shardkit.measure.doctor.pipeline import Loading, Pipeline, Remedy
from shardkit.measure.runner.loaders import close_loader
from shardkit.measure.runner.session import Session
from shardkit.measure.runner.spec import StepSpec, StopCondition
from shardkit.measure.runner.steps import make_step
from shardkit.measure.runner.timing import measure


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A measurement of the loader with a remedy."""

    remedy: Remedy
    data: str = ""
    """Converted dataset to read instead; empty reads the loader's."""
    rows: Sequence[int] = ()
    """Rows of the loader's dataset to read again and again; empty reads all."""
    seconds: float
    step: StepSpec = field(default_factory=StepSpec)
    """The use of each batch."""


def measure_rate(session: Session, *, loading: Loading, trial: Trial) -> float:
    """Return the images per second of a trial."""
    return _measured(Pipeline(session, loading).loader(trial.remedy, trial.data, trial.rows), trial)


def measure_step(session: Session, *, loading: Loading, trial: Trial) -> float:
    """Return the images per second of the step of a trial on one batch, without a loader."""
    loader = Pipeline(session, loading).loader(trial.remedy, trial.data, trial.rows)
    batch = next(iter(loader))
    close_loader(loader)
    return _measured(itertools.repeat(batch), trial)


def sample_lines(session: Session, *, loading: Loading, trial: Trial, scratch: Path) -> list[Line]:
    """Return the lines of code in which the workers spend the time of a trial.

    ``scratch`` is a folder for the counts of each process.
    """
    folder = scratch / f"counts-{time.monotonic_ns()}"
    folder.mkdir()
    pipeline = Pipeline(session, loading)
    try:
        _measured(pipeline.loader(trial.remedy, trial.data, trial.rows, str(folder)), trial)
    finally:
        ended = folder.rename(folder.with_suffix(".ended"))  # nothing is written there any more
        end_sampling(folder)
    return named_lines(ended)


def _measured(loader: Iterable[Any], trial: Trial) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(trial.remedy.torch_threads or threads)
    try:
        return measure(loader, StopCondition(seconds=trial.seconds), make_step(trial.step)).rate
    finally:
        torch.set_num_threads(threads)
        close_loader(loader)
