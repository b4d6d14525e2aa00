"""Refuses trainers that divide the samples of a rank among all ranks again."""

from __future__ import annotations

import sys
from types import FrameType

from shardkit.errors import UsageError
from shardkit.sampling.ranks import ResolvedRank

_DIVIDERS = ("BatchSamplerShard", "DataLoaderDispatcher", "IterableDatasetShard")
"""Classes of Accelerate and transformers that divide what they iterate over among processes."""


def require_undivided(what: str, rank: ResolvedRank) -> None:
    """Refuse callers that divide samples again, as ``Accelerator.prepare`` does.

    Otherwise, most samples would never be read. A forked worker has the callers of its loader.
    """
    frame: FrameType | None = sys._getframe(1) if rank.world_size > 1 else None
    while frame is not None:
        divider = type(frame.f_locals.get("self")).__name__
        if divider in _DIVIDERS:
            raise UsageError(
                f"this {what} yields the samples of rank {rank.rank} of {rank.world_size}, but "
                f"{divider} divides them again",
                remedy=f"create the {what} with rank=Rank(rank=0, world_size=1), or do not pass "
                "its DataLoader to Accelerator.prepare",
            )
        frame = frame.f_back
