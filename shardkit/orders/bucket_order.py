"""Buckets: sizes of batches, to which images belong by their aspect ratio, and the order of these.

Like `Order`, everything is a pure function of seed, epoch and position; docs/order.md specifies it.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.errors import UsageError, setting
from shardkit.orders.weighted import Weights, draw
from shardkit.sampling.order import (
    Order,
    Positions,
    derive_key,
    digest,
    permute,
    permute_each,
    step_keys,
)

MOST_SIDE = 65535
"""Maximum side of a bucket: that of a JPEG."""

_MOST_BUCKETS = 1000


class BucketCount(NamedTuple):
    """Statistics of the images in one bucket."""

    size: tuple[int, int]
    """Height and width of its samples."""
    images: int
    cropped: float
    """Fraction of the pixels of these images that cropping removes."""


@dataclass(frozen=True)
class BucketSizes:
    """Heights and widths of the samples, ascending by aspect ratio (width divided by height).

    Raises:
        UsageError: If a size is none, or two have one aspect ratio.
    """

    sizes: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= _MOST_BUCKETS:
            raise UsageError(
                f"there are {len(self.sizes)} buckets", remedy=f"pass 1 to {_MOST_BUCKETS} buckets"
            )
        for size in self.sizes:
            sides = size if isinstance(size, tuple) else ()
            if len(sides) != 2 or not all(type(s) is int and 0 < s <= MOST_SIDE for s in sides):
                raise UsageError(f"bucket {size!r} must be a (height, width) pair in pixels")
        ordered = tuple(sorted(self.sizes, key=lambda size: size[1] / size[0]))
        for first, second in itertools.pairwise(ordered):
            if first[1] * second[0] == second[1] * first[0]:
                raise UsageError(
                    f"the buckets {_show(first)} and {_show(second)} have the same aspect ratio",
                    remedy="keep only one",
                )
        object.__setattr__(self, "sizes", ordered)

    @classmethod
    def by_area(cls, area: int, step: int = 64, ratio: float = 2.0) -> BucketSizes:
        """Return the largest sizes of up to ``area`` pixels whose sides are multiples of ``step``.

        Args:
            area: Maximum pixels of a sample.
            step: The sides are multiples of it.
            ratio: Maximum ratio of the longer side to the shorter one.

        Raises:
            UsageError: If there is no such size.
        """
        if not all(type(value) is int and value > 0 for value in (area, step)) or not ratio >= 1:
            raise UsageError(
                f"by_area({area!r}, step={step!r}, ratio={ratio!r}): area and step must be numbers "
                "of pixels, and ratio at least 1"
            )
        sizes = set()
        for short in range(step, min(int(area**0.5), MOST_SIDE) + 1, step):
            long = min(area // short, MOST_SIDE) // step * step
            if long <= short * ratio:
                sizes |= {(short, long), (long, short)}
        best: dict[float, tuple[int, int]] = {}  # the largest of those with one aspect ratio
        for size in sorted(sizes):
            best[size[1] / size[0]] = size
        if not best:
            raise UsageError(
                f"by_area({area}, step={step}, ratio={ratio}): no size fits;",
                remedy="use a smaller step",
            )
        return cls(tuple(best.values()))

    @cached_property
    def _limits(self) -> list[float]:
        """Between neighbors, the square of the aspect ratio that is as far from both."""
        return [
            (first[1] * second[1]) / (first[0] * second[0])
            for first, second in itertools.pairwise(self.sizes)
        ]

    def nearest(self, width: int, height: int) -> int:
        """Return the bucket of an image: the nearest aspect ratio, on a logarithmic scale."""
        return bisect_left(self._limits, (width / height) * (width / height))

    def nearest_of(self, widths: Positions, heights: Positions) -> Positions:
        """Return `nearest` of each image: int64 of shape (N,)."""
        ratios = widths / heights
        return np.searchsorted(self._limits, ratios * ratios, side="left").astype(np.int64)

    def count(self, images: Iterable[tuple[Positions, Positions]]) -> list[BucketCount]:
        """Return the statistics of each bucket, given batches of widths and heights above 0."""
        counts, pixels, used = np.zeros((3, len(self.sizes)))
        sides = np.array(self.sizes, np.float64)
        for widths, heights in images:
            buckets = self.nearest_of(widths, heights)
            ratios = (sides[:, 1] / sides[:, 0])[buckets]
            total = widths * heights.astype(np.float64)
            # The area of the largest crop with the bucket's aspect ratio.
            inside = np.minimum(widths * (widths / ratios), heights * (heights * ratios))
            counts += np.bincount(buckets, minlength=len(counts))
            pixels += np.bincount(buckets, total, len(counts))
            used += np.bincount(buckets, np.minimum(inside, total), len(counts))
        cropped = 1 - used / np.maximum(pixels, 1)
        return [
            BucketCount(size, int(count), float(max(0, loss)) if count else 0.0)
            for size, count, loss in zip(self.sizes, counts, cropped, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketOrder(Order):
    """Batches of one bucket each, in random order.

    A batch is ``step`` positions: those of all ranks. In an epoch, each bucket has as many batches
    as its rows fill. Rows come without replacement, or by weight. Raises UsageError if a bucket has
    rows for less than one batch.
    """

    sizes: BucketSizes
    counts: Positions
    """Rows of each bucket."""
    members: Positions
    """The rows of all buckets, bucket after bucket, ascending."""
    carries: bool = False
    """Whether the rows left over in one epoch come first in the next."""
    cumulative: Weights | None = None
    """Sum of the weights up to and including each of the members; None without weights."""
    step: int = 1
    batches: Positions = field(default_factory=lambda: np.zeros(0, np.int64))
    """Batches of each bucket in an epoch."""

    recurs: ClassVar[bool] = True

    def in_batches(self, step: int) -> Order:
        """Return the order for batches of ``step`` rows, of all ranks together."""
        ends = np.cumsum(self.counts)
        if self.cumulative is None:
            batches = self.counts // step
            short = np.flatnonzero((batches == 0) & (self.counts > 0))
            amounts = self.counts
        else:
            totals = np.diff(np.concatenate([[0.0], self.cumulative])[np.r_[0, ends]])
            amounts = len(self.members) * totals / self.cumulative[-1]
            batches = np.floor(amounts / step).astype(np.int64)
            short = np.flatnonzero((batches == 0) & (totals > 0))
        if len(short):
            lacking = ", ".join(
                f"{_show(self.sizes.sizes[number])} has {int(amounts[number]):,}"
                for number in short[:3].tolist()
            )
            raise UsageError(
                f"{len(short)} of {len(self.counts)} buckets have fewer images than a batch of "
                f"{step} on all ranks together ({lacking})",
                remedy="leave out these buckets, reduce the batch size, or select the rows of "
                "other buckets",
            )
        return replace(self, step=step, batches=batches, size=int(batches.sum()) * step)

    def rows(self, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``."""
        numbers, offsets = np.divmod(positions, self.step)
        key = derive_key("buckets", self.seed, epoch)
        slots = permute(int(self.batches.sum()), key, numbers)
        ends = np.cumsum(self.batches)
        buckets = np.searchsorted(ends, slots, side="right")
        in_bucket = (slots - (ends - self.batches)[buckets]) * self.step + offsets
        starts = (np.cumsum(self.counts) - self.counts)[buckets]
        if self.cumulative is not None:
            return self._drawn(epoch, positions, buckets)
        counts = self.counts[buckets]
        turns = np.full_like(positions, epoch)
        if self.carries:
            in_bucket += epoch * self.batches[buckets] * self.step
            turns, in_bucket = np.divmod(in_bucket, counts)
        keys = np.array([derive_key("bucket", self.seed, 0)], np.uint64)
        keys = step_keys(step_keys(keys, buckets.astype(np.uint64)), turns.astype(np.uint64))
        rows: Positions = self.members[starts + permute_each(counts, keys, in_bucket)]
        return rows

    def _drawn(self, epoch: int, positions: Positions, buckets: Positions) -> Positions:
        """Return rows drawn from buckets by weight, with replacement."""
        assert self.cumulative is not None
        limits = np.concatenate([[0.0], self.cumulative])[np.r_[0, np.cumsum(self.counts)]]
        low = limits[:-1][buckets]
        high = limits[1:][buckets]
        numbers = draw("weighted buckets", self.seed, epoch, positions)
        drawn = np.minimum(low + numbers * (high - low), np.nextafter(high, low))
        rows: Positions = self.members[np.searchsorted(self.cumulative, drawn, side="right")]
        return rows

    def describe(self) -> str:
        """Return a text that identifies the order in a state."""
        weights = () if self.cumulative is None else (self.cumulative,)
        sizes = np.array(self.sizes.sizes, np.int64)
        hashed = digest(sizes, self.counts, self.members, *weights)
        carry = ", carry" * self.carries
        return f"Buckets({len(sizes)} buckets, batches of {self.step}{carry}, digest {hashed})"


def parse_buckets(text: str) -> BucketSizes:
    """Return the buckets of a text: ``512x512,448x576``, or ``512`` for `BucketSizes.by_area`.

    Raises UsageError if the text is neither.
    """
    if re.fullmatch(r"[0-9]{1,5}", text):
        return BucketSizes.by_area(int(text) ** 2)
    matches = [re.fullmatch(r"([0-9]{1,9})[xX]([0-9]{1,9})", item) for item in text.split(",")]
    if not all(matches):
        raise UsageError(
            f"{setting('buckets', text[:80])} must be a list of HEIGHTxWIDTH, such as "
            "512x512,448x576, or a side, such as 512"
        )
    return BucketSizes(tuple((int(part[1]), int(part[2])) for part in matches if part))


def make_buckets(sizes: Iterable[Any]) -> BucketSizes:
    """Return buckets of sizes that a user gave."""
    try:
        return BucketSizes(tuple(tuple(size) for size in sizes))
    except TypeError:
        raise UsageError(
            f"{str(sizes)[:80]} must be a list of heights and widths, such as "
            "[(512, 512), (448, 576)]"
        ) from None


def order_members(
    buckets: Positions, number: int, weights: npt.NDArray[Any] | None
) -> tuple[Positions, Positions, Weights | None]:
    """Return the rows that each bucket has, all rows by bucket, and their cumulative weights."""
    members = np.argsort(buckets, kind="stable")
    cumulative = None if weights is None else np.cumsum(weights[members])
    return np.bincount(buckets, minlength=number).astype(np.int64), members, cumulative


def _show(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
