"""How an epoch is divided: into steps, each step among the ranks, and what a last, smaller step is.

Every rank takes its part of each step, so what has been read after any step is a beginning of the
epoch's order, whole and without gaps. A run can therefore go on with other ranks or batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardkit.errors import UsageError

UNEVEN = ("drop", "pad", "exact")


@dataclass(frozen=True, kw_only=True)
class Share:
    """This process's share of each epoch.

    Raises:
        UsageError: If options contradict each other.
    """

    rank: int | None = None
    """Which of the processes this is, from 0 on; None asks ``torch.distributed``, or if that is not
    running the variables ``RANK`` and ``WORLD_SIZE``, and is 0 of 1 without either."""
    world: int | None = None
    """Number of processes; given if and only if ``rank`` is."""
    uneven: str = "drop"
    """What happens if the last samples of an epoch cannot be divided evenly. ``drop`` leaves out
    the odd ones, fewer than ``world`` (others in each shuffled epoch); ``pad`` repeats samples from
    the epoch's beginning, marked by row -1; ``exact`` gives some ranks one sample more, and perhaps
    one batch: for evaluation, without collective calls in each batch."""
    drop_last: bool = False
    """Whether a last step is left out if it is smaller than the others."""

    def __post_init__(self) -> None:
        if self.uneven not in UNEVEN:
            raise UsageError(f"uneven={self.uneven!r} is unknown; known are {', '.join(UNEVEN)}")
        if self.uneven == "exact" and self.drop_last:
            raise UsageError(
                "uneven='exact' reads every sample; drop_last=True would leave some out"
            )
        if (self.rank is None) != (self.world is None):
            raise UsageError("give rank and world together, or neither")
        if self.rank is not None and self.world is not None and not 0 <= self.rank < self.world:
            raise UsageError(f"rank {self.rank} is not from 0 on, below world {self.world}")

    def placed(self, found: tuple[int, int] | None) -> Placed:
        """Return this share with a rank.

        Args:
            found: Rank and world of the running process group, if there is one.

        Raises:
            UsageError: If ``RANK`` and ``WORLD_SIZE`` are needed, and are no such numbers.
        """
        if self.rank is not None and self.world is not None:
            return Placed(self.rank, self.world, self.uneven, self.drop_last)
        rank, world = found or _from_environment() or (0, 1)
        return replace(self, rank=rank, world=world).placed(None)


class Placed(NamedTuple):
    """A share whose rank is known."""

    rank: int
    world: int
    uneven: str
    drop_last: bool


class Step(NamedTuple):
    """One batch of one rank, as positions in the epoch."""

    start: int
    stop: int
    """Positions from ``start`` to before ``stop``; those from the number of samples on are padding,
    and stand for positions counted from the epoch's beginning."""
    consumed: int
    """Samples of the epoch that all ranks together have read after this step."""


def steps(size: int, batch_size: int, share: Placed, consumed: int = 0) -> Iterator[Step]:
    """Give the batches of one rank for the rest of an epoch.

    Args:
        size: Samples in the epoch.
        batch_size: Samples in a batch of one rank.
        share: The rank, and what happens at the end.
        consumed: Samples read already, by whatever number of ranks in batches of whatever size.
    """
    whole = batch_size * share.world
    while size - consumed >= whole:
        start = consumed + share.rank * batch_size
        consumed += whole
        yield Step(start, start + batch_size, consumed)
    start, count = _last(size - consumed, share)
    if count:
        yield Step(consumed + start, consumed + start + count, size)


def count_steps(size: int, batch_size: int, share: Placed, consumed: int = 0) -> int:
    """Return how many batches `steps` gives."""
    whole, rest = divmod(max(0, size - consumed), batch_size * share.world)
    return whole + (_last(rest, share)[1] > 0)


def count_samples(size: int, batch_size: int, share: Placed) -> int:
    """Return how many samples, padding among them, the batches of one rank hold in an epoch."""
    whole, rest = divmod(size, batch_size * share.world)
    return whole * batch_size + _last(rest, share)[1]


def _last(rest: int, share: Placed) -> tuple[int, int]:
    """Return where this rank's part of a last, smaller step begins, and its number of samples."""
    rank, world = share.rank, share.world
    each, odd = divmod(rest, world)
    if share.drop_last or rest <= 0:
        return 0, 0
    if share.uneven == "exact":
        return rank * each + min(rank, odd), each + (rank < odd)
    if share.uneven == "pad" and odd:
        each += 1
    return rank * each, each


def _from_environment() -> tuple[int, int] | None:
    """Return the rank and world that a launcher such as ``torchrun`` states."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    try:
        return int(rank), int(world)
    except ValueError:
        raise UsageError(f"RANK={rank!r} and WORLD_SIZE={world!r} are not numbers") from None
