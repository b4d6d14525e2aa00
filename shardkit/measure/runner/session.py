"""Functions that run in a measurement process, on the subject that it has open."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.measure.runner import material, page_cache, steps, timing
from shardkit.measure.runner.material import Opened
from shardkit.measure.runner.spec import GIVEN, LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.steps import Step

_DROPS, _PAUSE, _DROPPED = 5, 0.1, 0.01
"""Drops, seconds between them, and the fraction of the pages that may stay: threads of the previous
measurement may still be reading their last batch."""


@dataclass
class Session:
    """The subject that a process has open."""

    subject: Subject = field(default_factory=Subject)
    dataset: Any = None
    """None if `Subject.loader` returned something without a dataset."""
    loader: Any = None
    """What `Subject.loader` returned; None without one."""
    files: list[Path] = field(default_factory=list)
    measured: int = 0
    """Measurements so far, which seed the order."""
    _steps: dict[StepSpec, Step] = field(default_factory=dict)

    def step(self, spec: StepSpec) -> Step:
        """Return the step; a model is created once."""
        if spec not in self._steps:
            self._steps[spec] = steps.make_step(spec)
        return self._steps[spec]

    def build(self, spec: LoaderSpec) -> Any:
        """Return the loader to measure."""
        if spec.engine == GIVEN:
            return material.rebuild_loader(self.loader, spec)
        return material.build_loader(self.dataset, spec, seed=self.measured)


def open_subject(session: Session, *, subject: Subject) -> Opened:
    """Open what is to be read."""
    session.subject, session.loader = subject, None
    if subject.loader is not None:
        session.loader = material.call_reference(subject.loader, "loader")
        session.dataset = getattr(session.loader, "dataset", None)
    else:
        session.dataset = material.open_subject(subject)
    opened, session.files = material.describe(session.dataset, subject.path)
    return opened


def measure(
    session: Session, *, loader: LoaderSpec, stop: StopCondition, step: StepSpec
) -> timing.Measurement:
    """Build a loader, measure it, and close it."""
    session.measured += 1
    use, built = session.step(step), session.build(loader)
    try:
        found = timing.measure(built, stop, use)
    finally:
        material.close_loader(built)
    bare = material.bare_loader(built)
    return dataclasses.replace(
        found,
        engine=getattr(bare, "engine", loader.engine),
        reason=getattr(bare, "reason", ""),
        workers=getattr(bare, "num_workers", 0),
    )


def step_seconds(session: Session, *, loader: LoaderSpec, step: StepSpec) -> float:
    """Return the time of a step on a batch that is ready."""
    built = session.build(loader.changed(num_workers=0, prefetch_factor=None))
    try:
        batch = next(iter(built))
    finally:
        material.close_loader(built)
    return steps.step_seconds(session.step(step), batch)


def warm(session: Session) -> None:
    """Read the stored bytes of every row, so that they are cached."""
    if session.subject.path:
        stored = dataclasses.replace(session.subject, decode="bytes", transform=None)
        dataset: Any = material.open_subject(stored)
        for row in range(len(dataset)):
            dataset[row]


def drop(session: Session) -> float | None:
    """Drop the files' pages; return the fraction that stayed, None if unknown."""
    for _ in range(_DROPS):
        page_cache.drop(session.files)
        stayed = page_cache.resident(session.files)
        if stayed is None or stayed < _DROPPED:
            break
        time.sleep(_PAUSE)
    return stayed
