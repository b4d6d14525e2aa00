"""How ranks divide an epoch: into steps, each of which holds one batch of every rank.

Every rank reads its subset of each step. After any step, the samples read are therefore a prefix of
the epoch's order, without gaps, so a run can resume with other ranks or batch sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from shardkit.errors import UsageError, setting

Remainder = Literal["drop", "pad", "exact"]
REMAINDERS = get_args(Remainder)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """This rank's subset of each epoch.

    Raises:
        UsageError: If options contradict each other.
    """

    rank: int | None = None
    """Rank of this process, from 0 to ``world_size - 1``. None uses the rank from
    ``torch.distributed`` or, if that is not initialized, ``RANK`` and ``WORLD_SIZE``. Without
    either, it is rank 0 of 1."""
    world_size: int | None = None
    """Number of ranks; required with ``rank``."""
    remainder: Remainder = "drop"
    """Treatment of the last samples of an epoch if they do not divide evenly. ``drop`` leaves out
    fewer than ``world_size`` samples (different ones in each shuffled epoch). ``pad`` repeats
    samples from the start of the epoch; their row is -1. ``exact`` gives some ranks one more
    sample, and perhaps one more batch: use it for evaluation, without collective operations in the
    loop."""
    drop_last: bool = False
    """Whether to leave out a last step that is smaller than the others."""

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise UsageError(
                f"remainder={self.remainder!r} is unknown;",
                remedy=f"choose from {', '.join(REMAINDERS)}",
            )
        if self.remainder == "exact" and self.drop_last:
            raise UsageError("drop_last=True contradicts remainder='exact'", remedy="leave one out")
        if (self.rank is None) != (self.world_size is None):
            raise UsageError("rank and world_size belong together", remedy="pass both or neither")
        if self.rank is None or self.world_size is None:
            return
        for name, value in (("rank", self.rank), ("world_size", self.world_size)):
            if not hasattr(value, "__index__"):
                raise UsageError(f"{setting(name, value)} must be an integer")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank={self.rank} must be below world_size={self.world_size}, and at least 0"
            )

    def resolved(self, group: tuple[int, int] | None) -> ResolvedRank:
        """Return these options with a known rank.

        Args:
            group: Rank and world size of the running process group, or None without one.

        Raises:
            UsageError: If ``RANK`` and ``WORLD_SIZE`` are needed but invalid.
        """
        if self.rank is not None and self.world_size is not None:
            return ResolvedRank(self.rank, self.world_size, self.remainder, self.drop_last)
        rank, world_size = group or _from_environment() or (0, 1)
        return replace(self, rank=rank, world_size=world_size).resolved(None)


class ResolvedRank(NamedTuple):
    """A `Rank` whose rank is known."""

    rank: int
    world_size: int
    remainder: Remainder
    drop_last: bool


class Step(NamedTuple):
    """One batch of one rank, as positions in the epoch."""

    start: int
    stop: int
    """End of the positions. From the number of samples on they are padding, which continues at the
    start of the epoch."""
    consumed: int
    """Samples of the epoch that all ranks together have read after this step."""
    stride: int = 1
    """Distance between neighboring positions of the batch."""


def steps(
    size: int,
    batch_size: int,
    rank: ResolvedRank,
    consumed: int = 0,
    *,
    strided: bool = False,
) -> Iterator[Step]:
    """Yield the batches of one rank for the rest of an epoch of ``size`` samples.

    ``consumed`` samples were already read, by any number of ranks with any batch size. With
    ``strided``, neighboring positions of a step are on different ranks; otherwise, each rank reads
    a run of them.
    """
    step = batch_size * rank.world_size
    stride, first = (rank.world_size, 1) if strided else (1, batch_size)
    while size - consumed >= step:
        start = consumed + rank.rank * first
        consumed += step
        yield Step(start, start + batch_size * stride, consumed, stride)
    start, count = _last_step(size - consumed, rank)
    start = consumed + (rank.rank if strided else start)
    if count:
        yield Step(start, start + count * stride, size, stride)


def count_steps(size: int, batch_size: int, rank: ResolvedRank, consumed: int = 0) -> int:
    """Return the number of batches that `steps` yields."""
    full, leftover = divmod(max(0, size - consumed), batch_size * rank.world_size)
    return full + (_last_step(leftover, rank)[1] > 0)


def count_samples(size: int, batch_size: int, rank: ResolvedRank) -> int:
    """Return the number of samples of one rank in an epoch, including padding."""
    full, leftover = divmod(size, batch_size * rank.world_size)
    return full * batch_size + _last_step(leftover, rank)[1]


def _last_step(leftover: int, rank: ResolvedRank) -> tuple[int, int]:
    """Return the offset and the number of this rank's samples in a last, smaller step."""
    number = rank.rank
    per_rank, extra = divmod(leftover, rank.world_size)
    if rank.drop_last or leftover <= 0:
        return 0, 0
    if rank.remainder == "exact":
        return number * per_rank + min(number, extra), per_rank + (number < extra)
    if rank.remainder == "pad" and extra:
        per_rank += 1
    return number * per_rank, per_rank


def _from_environment() -> tuple[int, int] | None:
    """Return the rank and world size that a launcher such as ``torchrun`` has set."""
    rank = os.environ.get("RANK")
    world_size = os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        return None
    try:
        return int(rank), int(world_size)
    except ValueError:
        raise UsageError(f"RANK={rank!r} and WORLD_SIZE={world_size!r} must be integers") from None
