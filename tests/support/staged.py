"""Rounds without processes: requests are recorded, answers are given."""

from __future__ import annotations

from typing import Any

import pytest
from bench_reports import seen

from shardkit.errors import MeasurementFailed
from shardkit.measure.runner import rounds
from shardkit.measure.runner.process import Seen
from shardkit.measure.runner.spec import LoaderSpec, Subject
from shardkit.measure.runner.steps import StepSpec
from shardkit.measure.runner.timing import StopCondition


class Stage:
    """Replaces the processes and records requests."""

    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.failing: set[str] = set()
        self.ending: set[str] = set()
        self.refusing: set[str] = set()
        self.images = 1000
        self.resident: float | None = 0.0

    @classmethod
    def put_up(cls, monkeypatch: pytest.MonkeyPatch) -> Stage:
        """Return a stage that replaces the processes until the test ends."""
        found = cls()
        monkeypatch.setattr(rounds, "MeasurementProcess", found.served)
        return found

    def served(self, subject: Subject) -> FakeServed:
        self.events.append(("start", subject.path))
        return FakeServed(self, subject)

    def asked(self, what: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[0] == what]


class FakeServed:
    def __init__(self, stage: Stage, subject: Subject) -> None:
        self.stage, self.path, self.ended = stage, subject.path, False

    def __enter__(self) -> FakeServed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stage.events.append(("close", self.path))

    def open(self) -> dict[str, Any]:
        if self.path in self.stage.refusing:
            raise MeasurementFailed("damaged")
        return {"split": "", "images": 1000, "total": 2000, "mean_bytes": 10.0, "bytes": 10_000}

    def restart_if_ended(self) -> None:
        if self.ended:
            self.stage.events.append(("start", self.path))
            self.ended = False

    def warm(self) -> None:
        self.stage.events.append(("warm", self.path))

    def drop(self) -> float | None:
        self.stage.events.append(("drop", self.path))
        return self.stage.resident

    def look(self, loading: LoaderSpec, span: StopCondition, step: StepSpec | None) -> Seen:
        cache = "cold" if span.whole else "warm"
        self.stage.events.append(("look", self.path, str(loading), cache))
        if str(loading) in self.stage.failing:
            self.ended = str(loading) in self.stage.ending
            raise MeasurementFailed("it broke")
        return seen(100, batches=self.stage.images // 10)
