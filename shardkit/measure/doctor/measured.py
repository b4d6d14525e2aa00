"""What a diagnosis stands on, as values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardkit.measure.doctor.changes import Change
from shardkit.measure.doctor.profiling import Profile
from shardkit.measure.doctor.surroundings import fits_in_memory

MEMORY_SPEED = 1e9
"""Bytes a second that any machine copies from its memory."""

WAIT = 0.0003
"""Seconds for a sample beyond that, from which on something was waited for."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All that the judgement stands on."""

    folder: bool
    """Whether it is an image folder, and not a dataset of shardkit."""
    images: int
    """In all."""
    bytes: int
    """Of all files."""
    memory: int
    """Bytes that this process may use."""
    batch_size: int
    decode: str
    transform: str = ""
    """``module:name``; empty without one."""
    profile: Profile
    single: float | None
    """Images/s of the loader with one worker; None if that cannot be had."""
    rates: Sequence[float]
    """Images/s of the loader that was asked for, with all its workers, in each round."""
    engine: str = "thread"
    """Of that loader, which has these workers:"""
    workers: int = 1
    alternatives: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The same with another engine, by its name, or with ``one torch thread``."""
    step: float | None = None
    """Seconds that a training step takes for a batch; None if nobody said."""
    repeats: bool = True
    """Whether a transform's random numbers repeat in threads, as they do in worker processes."""
    changes: Sequence[Change] = ()
    """What storing images in another way would do."""

    @property
    def rate(self) -> float:
        """The median of the rates."""
        return statistics.median(self.rates)

    def gain(self, alternative: str) -> float | None:
        """Return how many times as fast an alternative is; None if that is not clear.

        It is clear if the worst round of one is better than the best of the other.
        """
        rates = self.alternatives.get(alternative)
        if rates is None or min(rates) <= max(self.rates):
            return None
        return statistics.median(rates) / self.rate


def waits_for_disk(measured: Measured) -> bool:
    """Tell whether reading waits, and does not merely copy from the kernel's memory."""
    copying = measured.profile.stored_bytes / MEMORY_SPEED
    return effective(measured).get("read", 0.0) > copying + WAIT


def effective(measured: Measured) -> dict[str, float]:
    """Return the seconds of a sample's stages in a long run.

    Reading counts cold only if the data do not fit in memory: otherwise it is so once.
    """
    seconds = dict(measured.profile.warm)
    cold = measured.profile.cold_read
    if cold is not None and not fits_in_memory(measured.bytes, measured.memory):
        seconds["read"] = max(cold, seconds.get("read", 0.0))
    return seconds
