"""Time of each stage of loading, as fractions of a total, and the images that were loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.measure.doctor.lines import Line
from shardkit.measure.doctor.pipeline import Setup
from shardkit.measure.doctor.tail import Tail
from shardkit.measure.runner.gil import HOLDS
from shardkit.record import PLANES

OWN_CODE = ("dataset", "transform", "collate")
"""Stages that may run user code; ``dataset`` is ``read`` and ``decode`` if no files are known."""

WAITS = 0.5
MATTERS = 0.25
"""Fractions: of a stage's time, below which it waits; of an image's, from which a stage matters."""


@dataclass(frozen=True)
class Stage:
    """Time of one stage."""

    seconds: float
    """Mean time per image."""
    busy: float
    """Fraction of it that computes, 0 to 1; the rest waits for a disk, a network or a sleep."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The loader, the stages of loading, and the images of the sample that was timed."""

    setup: Setup
    cpus: int
    """CPUs that the process may use."""
    images: int
    """Images in the dataset; 0 if unknown."""
    rows: list[int]
    """The sample, drawn at random; empty for an iterable dataset."""
    files: Sequence[str] = ()
    """The image file of each row, if only code of the user knows it; else empty."""
    stages: dict[str, Stage]
    """In the order in which an image passes them."""
    p50: float
    p95: float
    """Percentiles of an image's time in all stages, in seconds."""
    held: float = 0.0
    """Fraction of the longest stage's time in which it holds the GIL."""
    crop: int = 0
    """Shorter side of the loaded images, in pixels; 0 if unknown, as all that follows."""
    kind: str = ""
    """Encoding of the stored images that take most of the time."""
    side: float = 0.0
    """Median of the shorter sides of the stored images, in pixels."""
    pixels: float = 0.0
    """Mean number of pixels of a stored image."""
    stored_bytes: float = 0.0
    """Mean stored size of an image."""
    tail: Tail | None = None
    """Few images that take most of the time, if there are such."""
    lines: Sequence[Line] = ()
    """Lines of code that take most of the time in the workers, those of the user first."""
    resident_bytes: int = 0
    """Memory that the decoded dataset would take; 0 if it cannot be resident, or does not fit."""
    step_seconds: float | None = None
    """Time of a training step."""

    def fraction(self, *names: str) -> float:
        """Return the fraction of an image's time that some stages take, 0 to 1."""
        return sum(self.stages[n].seconds for n in names if n in self.stages) / self.total

    @property
    def total(self) -> float:
        """Seconds per image of all stages."""
        return sum(stage.seconds for stage in self.stages.values())

    @property
    def busy(self) -> float:
        """Fraction of the total that computes, 0 to 1."""
        return sum(stage.seconds * stage.busy for stage in self.stages.values()) / self.total

    @property
    def longest(self) -> str:
        """The stage that takes most time."""
        return max(self.stages, key=self.fraction)

    @property
    def holds_gil(self) -> bool:
        """Whether the longest stage is user code that holds the GIL."""
        return self.longest in OWN_CODE and self.held >= HOLDS

    @property
    def decodes(self) -> bool:
        """Whether decoding encoded images takes, or may take, a notable fraction of the time."""
        stages = "read", "decode", "dataset"  # the last one, if the user's code decodes
        return self.kind not in ("", "raw", PLANES) and self.fraction(*stages) >= MATTERS
