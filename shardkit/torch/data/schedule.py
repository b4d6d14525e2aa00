"""The batches of an epoch, as rows, for any number of ranks and workers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch.distributed

from shardkit.errors import UsageError
from shardkit.options import check_integer
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import Order, Positions
from shardkit.sampling.ranks import Rank, ResolvedRank, Step, count_samples, count_steps, steps
from shardkit.system.text import amount

_Number = TypeVar("_Number", int, Positions)

_AT_ONCE = 8192
"""Positions whose rows are looked up together: 60 ns each, compared with 1 us in batches of 64."""


class Request(NamedTuple):
    """One batch to read."""

    epoch: int
    seed: int
    rows: Positions
    padding: int
    """Number of trailing rows that only repeat others, so that ranks have equally many."""
    consumed: int
    """Samples of the epoch that all ranks together have read after this batch."""
    ahead: Positions
    """Rows to issue readahead for."""
    repeats: Positions | None = None
    """A number for each sample, different for equal rows of an epoch; None if no row repeats."""

    @property
    def batch_id(self) -> tuple[int, int]:
        """Identifies the batch among all of a rank."""
        return self.epoch, self.consumed

    @property
    def numbers(self) -> list[int]:
        """`repeats` as a list; empty if no row repeats."""
        return [] if self.repeats is None else list(self.repeats.tolist())

    def packed(self) -> PackedRequest:
        """Return this as values of types that ``marshal`` knows."""
        numbers = int(self.epoch), int(self.seed), int(self.padding), int(self.consumed)
        repeats = None if self.repeats is None else _bytes(self.repeats)
        return *numbers, _bytes(self.rows), _bytes(self.ahead), repeats

    @classmethod
    def unpacked(cls, packed: PackedRequest) -> Request:
        """Return the request that was `packed`."""
        epoch, seed, padding, consumed, rows, ahead, repeats = packed
        return cls(
            epoch=epoch,
            seed=seed,
            rows=_array(rows),
            padding=padding,
            consumed=consumed,
            ahead=_array(ahead),
            repeats=None if repeats is None else _array(repeats),
        )

    def at(self, positions: list[int]) -> Request:
        """Return a request of the samples at some positions of the batch, without readahead."""
        first_repeated = len(self.rows) - self.padding
        return self._replace(
            rows=self.rows[positions],
            padding=sum(position >= first_repeated for position in positions),
            ahead=self.ahead[:0],
            repeats=None if self.repeats is None else self.repeats[positions],
        )

    def of_view(self, view: int, views: int) -> Request:
        """Return the request of one of several views, which draw different random numbers."""
        if views == 1:
            return self
        assert self.repeats is not None, "samples with views are numbered"
        return self._replace(repeats=view_number(self.repeats, view, views))


PackedRequest = tuple[int, int, int, int, bytes, bytes, bytes | None]
"""The values of a `Request`, its arrays as bytes."""


def _bytes(values: Positions) -> bytes:
    return np.asarray(values, np.int64).tobytes()


def _array(values: bytes) -> Positions:
    return np.frombuffer(bytearray(values), np.int64)


def view_number(number: _Number, view: int, views: int) -> _Number:
    """Return the number of a sample in one of several views, which draw different numbers."""
    return number * views + view


class BatchSchedule:
    """The batches of one rank, for any epoch.

    An unset rank is looked up here. ``repeats`` states, for each row, how many earlier rows are the
    same record; None if all differ. Raises UsageError if an epoch would have no batch since the
    last, smaller one is left out.
    """

    lookahead = 0
    """Samples to announce before they are read, in the order of the epoch; 0 leaves it to the
    order."""
    endless = False
    """Whether an iteration continues with the next epoch instead of ending."""

    def __init__(
        self,
        order: Order,
        batch_size: int,
        rank: Rank,
        epochs: Epochs | None = None,
        repeats: Positions | None = None,
    ) -> None:
        self.batch_size = check_integer("batch_size", batch_size, 1)
        self.rank: ResolvedRank = rank.resolved(_process_group())
        self.order = order.in_batches(self.batch_size * self.rank.world_size)
        self.epochs = epochs or Epochs()
        self.size = self.epochs.size(self.order)
        """Samples of all ranks in an epoch."""
        self._repeats = repeats
        self._rank_looked_up = rank.rank is None
        step = self.batch_size * self.rank.world_size
        if self.rank.drop_last and 0 < self.size < step:
            of_ranks = f" on each of {self.rank.world_size} ranks" * (self.rank.world_size > 1)
            raise UsageError(
                f"drop_last=True leaves no batch: an epoch has {amount(self.size, 'sample')}, "
                f"and a batch needs {self.batch_size}{of_ranks}",
                remedy="Use a smaller batch_size, or drop_last=False",
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return count_steps(self.size, self.batch_size, self.rank)

    def require_same_group(self) -> None:
        """Check that the process group still is the one that the rank was taken from.

        If it was initialized since, all ranks would read the same samples.
        """
        rank = self.rank.rank
        world_size = self.rank.world_size
        if self._rank_looked_up and _process_group() not in (None, (rank, world_size)):
            raise UsageError(
                f"this was created as rank {rank} of {world_size}, before torch.distributed was "
                "initialized",
                remedy="create it afterwards, or pass Rank(rank=, world_size=)",
            )

    def is_exhausted(self, consumed: int) -> bool:
        """Return whether no rank has a batch left after ``consumed`` samples of an epoch.

        All ranks must agree, even where some have one batch less: rank 0 never has.
        """
        rank = self.rank._replace(rank=0)
        return count_steps(self.size, self.batch_size, rank, consumed) == 0

    @property
    def samples(self) -> int:
        """Samples of this rank in an epoch, including padding."""
        return count_samples(self.size, self.batch_size, self.rank)

    def requests(
        self, epoch: int, consumed: int = 0, *, endless: bool = False
    ) -> Iterator[Request]:
        """Yield the batches of the rest of an epoch, in order; then of all others if endless."""
        yield from self._requests(epoch, consumed)
        while endless:
            epoch += 1
            yield from self._requests(epoch, 0)

    def _requests(self, epoch: int, consumed: int) -> Iterator[Request]:
        strided = self.epochs.aug_repeats > 1
        remaining = steps(self.size, self.batch_size, self.rank, consumed, strided=strided)
        at_once = max(1, _AT_ONCE // self.batch_size)
        announced = 0
        while group := list(itertools.islice(remaining, at_once)):
            for request in self._look_up(epoch, group):
                if not self.lookahead or not len(request.rows):
                    yield request
                    continue
                stop = min(request.consumed + self.lookahead, self.size)
                start = max(announced, request.consumed - self.batch_size)
                announced = max(start, stop)
                positions = np.arange(start, announced)
                yield request._replace(ahead=self.epochs.rows(self.order, epoch, positions))

    def _look_up(self, epoch: int, group: list[Step]) -> Iterator[Request]:
        size = self.size
        ranges = [np.arange(step.start, step.stop, step.stride) for step in group]
        positions = np.concatenate(ranges) % size
        rows = self.epochs.rows(self.order, epoch, positions)
        repeats = self._number_repeats(positions, rows)
        end = 0
        for step in group:
            real = np.arange(step.start, min(step.stop, size), step.stride)
            start = end
            end = end + (step.stop - step.start) // step.stride
            of_step = slice(start, end)
            yield Request(
                epoch=epoch,
                seed=self.order.seed,
                rows=rows[of_step],
                padding=end - start - len(real),
                consumed=step.consumed,
                ahead=self.epochs.ahead(self.order, epoch, real),
                repeats=None if repeats is None else repeats[of_step],
            )

    def _number_repeats(self, positions: Positions, rows: Positions) -> Positions | None:
        """Return a number for each sample, different for equal rows; None if no row repeats."""
        if self.order.recurs or self.epochs.recurs:
            return positions
        return None if self._repeats is None else self._repeats[rows]


def _process_group() -> tuple[int, int] | None:
    """Return the rank and world size of ``torch.distributed``, or None if not initialized."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return None
