"""Rounds without processes: a fake process notes requests and gives known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bench_reports import OPENED, sample

from shardkit.dataset.manifest import MANIFEST_NAME
from shardkit.errors import MeasurementFailed
from shardkit.measure.runner import rounds
from shardkit.measure.runner.material import SubjectInfo
from shardkit.measure.runner.spec import LoaderSpec, StepSpec, StopCondition, Subject
from shardkit.measure.runner.timing import Measurement


class Stage:
    """Creates the fake processes and notes their requests."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.failing: set[str] = set()
        """Loaders that fail."""
        self.damaged: set[str] = set()
        """Paths that cannot be opened."""
        self.interrupt_at: int | None = None
        """Number of the measurement at which the user presses Ctrl-C."""
        self.resident: float | None = 0.0

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> Stage:
        """Replace the processes of `run_interleaved` until the test ends."""
        stage = cls()
        monkeypatch.setattr(
            rounds, "MeasurementProcess", lambda subject: FakeProcess(stage, subject)
        )
        return stage

    def requests(self, kind: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] == kind]


class FakeProcess:
    def __init__(self, stage: Stage, subject: Subject) -> None:
        self.stage, self.path = stage, subject.path
        stage.events.append(("start", self.path))

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stage.events.append(("close", self.path))

    def open(self) -> SubjectInfo:
        if self.path in self.stage.damaged:
            raise MeasurementFailed("damaged")
        kind = "dataset" if (Path(self.path) / MANIFEST_NAME).exists() else "folder"
        return replace(OPENED, path=self.path, kind=kind)

    def call(self, function: Callable[..., object]) -> float | None:
        """Note ``warm`` or ``drop``, by the name of the function."""
        self.stage.events.append((function.__name__, self.path))
        return self.stage.resident

    def measure(self, loader: LoaderSpec, stop: StopCondition, step: StepSpec) -> Measurement:
        cache = "cold" if stop.whole else "warm"
        self.stage.events.append(("measure", self.path, str(loader), cache))
        if len(self.stage.requests("measure")) == self.stage.interrupt_at:
            raise KeyboardInterrupt
        if str(loader) in self.stage.failing:
            raise MeasurementFailed("it broke")
        return sample(100)
