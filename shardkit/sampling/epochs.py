"""Epochs of a chosen length, repeats and views, cut from the sequence of passes of an order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardkit.errors import UsageError
from shardkit.options import check_integer
from shardkit.sampling.order import Order, Positions


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """How epochs are cut from an order.

    A pass holds each position of the order, ``aug_repeats`` times. Passes follow each other, and
    an epoch is the next ``samples_per_epoch`` positions of that sequence.
    """

    samples_per_epoch: int | None = None
    """Samples in an epoch; the next epoch continues where this one ended. None is one pass."""
    aug_repeats: int = 1
    """Repeated augmentation: how often each sample comes in a pass, next to each other."""
    views: int = 1
    """Random draws of each sample that are read side by side."""

    def __post_init__(self) -> None:
        if self.samples_per_epoch is not None:
            check_integer("samples_per_epoch", self.samples_per_epoch, 1)
        check_integer("aug_repeats", self.aug_repeats, 1)
        check_integer("views", self.views, 1)

    @property
    def recurs(self) -> bool:
        """Whether an epoch may hold a sample several times, although the order does not."""
        return self.samples_per_epoch is not None or self.aug_repeats * self.views > 1

    def size(self, order: Order) -> int:
        """Return the number of samples in an epoch; UsageError if ``order`` is empty."""
        if self.samples_per_epoch is None:
            return order.size * self.aug_repeats
        if not order.size:
            raise UsageError(
                f"samples_per_epoch={self.samples_per_epoch} needs a dataset that is not empty"
            )
        return self.samples_per_epoch

    def rows(self, order: Order, epoch: int, positions: Positions) -> Positions:
        """Return the rows at ``positions`` of ``epoch``, in constant time for each."""
        if not self.recurs:
            return order.rows(epoch, positions)
        first, passes, in_pass = self._passes(order, epoch, positions)
        rows = np.empty_like(positions)
        for number in dict.fromkeys(passes.tolist()):
            inside = passes == number
            rows[inside] = order.rows(first + number, in_pass[inside])
        return rows

    def ahead(self, order: Order, epoch: int, positions: Positions) -> Positions:
        """Return rows to issue readahead for while ``positions`` are read, as `Order.ahead`."""
        if not self.recurs:
            return order.ahead(epoch, positions)
        first, passes, in_pass = self._passes(order, epoch, positions)
        last = passes[-1:]
        return order.ahead(first + int(last.sum()), in_pass[passes == last])

    def describe(self) -> str:
        """Return a text that identifies these options in a state; empty for the defaults."""
        values = {
            "samples_per_epoch": self.samples_per_epoch,
            "aug_repeats": self.aug_repeats,
            "views": self.views,
        }
        default = vars(Epochs())
        return "".join(
            f", {name}={value}" for name, value in values.items() if value != default[name]
        )

    def _passes(
        self, order: Order, epoch: int, positions: Positions
    ) -> tuple[int, Positions, Positions]:
        """Return the first pass, and for each position its pass after that, and position in it."""
        per_pass = max(1, order.size * self.aug_repeats)
        first, start = divmod(epoch * self.size(order), per_pass)
        passes, in_pass = np.divmod(positions + start, per_pass)
        return first, passes, in_pass // self.aug_repeats
