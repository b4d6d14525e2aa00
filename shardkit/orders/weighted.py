"""Orders that choose rows by weight: row by row, or from groups such as classes and datasets.

Like `Order`, they are pure functions of seed, epoch and position; docs/order.md specifies them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError
from shardkit.sampling.order import (
    Order,
    Positions,
    derive_key,
    digest,
    permute_each,
    step_keys,
    uniform,
)

Weights = npt.NDArray[np.float64]
"""Numbers from 0 on, not all 0; float64 of shape (N,)."""

BLOCK = 10_000
"""Positions over which weighted groups have exact shares."""


_LONGEST = 2**62
"""Positions after which the sequence of groups starts again, so that 64 bits can count them."""

_LEAST_SUM = 1e-280
"""Least sum of weights: below, a product with a number less than 1 may be rounded up to it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightedOrder(Order):
    """Rows drawn with replacement, each with a probability in proportion to its weight.

    Rows are looked up in the cumulative weights: in the time of a binary search, with 8 bytes of
    memory for each row.
    """

    recurs: ClassVar[bool] = True
    cumulative: Weights
    """Sum of the weights up to and including each row."""

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``."""
        drawn = draw("weighted", self.seed, epoch, positions) * self.cumulative[-1]
        rows: Positions = np.searchsorted(self.cumulative, drawn, side="right").astype(np.int64)
        return rows

    def describe(self) -> str:
        """Return a text that identifies the order in a state."""
        return f"Weighted({self.size} rows, digest {digest(self.cumulative)})"


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOrder(Order):
    """Rows of several groups, each with a fixed share of the positions.

    Each block of ``sum(counts)`` positions holds exactly ``counts[g]`` samples of group ``g``, in
    random order. Within a group, samples come without replacement: each comes once before any
    comes again. Epochs are parts of one sequence, so both hold across them too.
    """

    recurs: ClassVar[bool] = True
    kind: str
    """Name of the sampler, for states."""
    counts: Positions
    """Positions of each group in a block, at least 1."""
    sizes: Positions
    """Rows of each group, at least 1."""
    members: Positions
    """The rows of all groups, group after group."""

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``."""
        block = int(self.counts.sum())
        first, start = divmod(epoch * self.size % _LONGEST, block)
        numbers, offsets = np.divmod(positions + start, block)
        numbers += first
        keys = step_keys(self._key("groups"), numbers.astype(np.uint64))
        slots = permute_each(np.full_like(positions, block), keys, offsets)
        ends = np.cumsum(self.counts)
        groups = np.searchsorted(ends, slots, side="right")
        in_group = numbers * self.counts[groups] + slots - (ends - self.counts)[groups]
        turns, in_group = np.divmod(in_group, self.sizes[groups])
        keys = step_keys(self._key("members"), groups.astype(np.uint64))
        keys = step_keys(keys, turns.astype(np.uint64))
        starts = (np.cumsum(self.sizes) - self.sizes)[groups]
        rows: Positions = self.members[starts + permute_each(self.sizes[groups], keys, in_group)]
        return rows

    def describe(self) -> str:
        """Return a text that identifies the order in a state."""
        groups = digest(self.counts, self.sizes, self.members)
        return f"{self.kind}({len(self.counts)} groups, digest {groups})"

    def _key(self, purpose: str) -> npt.NDArray[np.uint64]:
        return np.array([derive_key(purpose, self.seed, 0)], np.uint64)


def draw(purpose: str, seed: int, epoch: int, positions: Positions) -> Weights:
    """Return a random number from 0 to 1 for each position."""
    key = np.array([derive_key(purpose, seed, epoch)], np.uint64)
    return uniform(step_keys(key, positions.astype(np.uint64) + np.uint64(1)))


def check_weights(name: str, weights: Any) -> Weights:
    """Return ``weights`` as an array.

    Raises UsageError, with ``name``, unless all are finite, at least 0, and not all 0.
    """
    try:
        values = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be numbers, not {str(weights)[:80]}") from None
    if values.ndim != 1 or not len(values):
        raise UsageError(f"{name} must be a list of numbers, not of shape {values.shape}")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise UsageError(
            f"{name} must be finite and not negative: number {wrong[0]} is {values[wrong[0]]}"
        )
    with np.errstate(over="ignore"):
        total = float(np.cumsum(values)[-1])
    if not _LEAST_SUM <= total < np.inf:
        raise UsageError(f"{name} must have a finite sum above 0, not {total:g}")
    return values


def block_counts(weights: Weights) -> Positions:
    """Return how many of `BLOCK` positions each group gets, in proportion to its weight.

    They are rounded by the largest remainders, the earlier group first if these are equal.
    """
    exact = weights / weights.sum() * BLOCK
    counts: Positions = np.floor(exact).astype(np.int64)
    missing = BLOCK - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return counts
