"""`EpochBatchSampler`: the order of a loader, for PyTorch's own ``DataLoader``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import Sampler

from shardkit.errors import UsageError
from shardkit.sampling.order import BlockShuffle, Order
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data import nested
from shardkit.torch.data.resume import ResumeState
from shardkit.torch.data.schedule import BatchSchedule
from shardkit.torch.engine import preflight


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of rows in shardkit's order, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of `shardkit.make_loader`: different in each epoch, divided among ranks, and
    the same for any number of workers. Each iteration reads the next epoch and sets it on the
    dataset, so random operations follow; ``set_epoch`` selects one.

    ``torchdata``'s ``StatefulDataLoader`` saves and restores its state.

    Raises:
        UsageError: If options contradict each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | BlockShuffle = False,
        seed: int = 0,
        rank_shard: RankShard | None = None,
    ) -> None:
        """Create a sampler.

        Args:
            dataset: The dataset of the ``DataLoader``.
            batch_size: Samples in a batch of this rank.
            shuffle: As in `shardkit.make_loader`.
            seed: Selects the order and the random numbers of each epoch.
            rank_shard: This rank's subset of each epoch; None uses the rank given by
                ``torch.distributed``.
        """
        order = Order(size=len(dataset), shuffle=shuffle, seed=seed)
        if nested.row_repeats(dataset) is not None:
            warnings.warn(
                "rows repeat in this dataset, and a DataLoader draws the same random numbers for "
                "each repeat: use shardkit.make_loader, or open the dataset again with another "
                "view=",
                RuntimeWarning,
                stacklevel=2,
            )
        self._dataset = dataset
        self._schedule = BatchSchedule(order, batch_size, rank_shard or RankShard())
        self._resume = ResumeState(dataset, self._schedule)
        self.batch_size = batch_size
        self.drop_last = self._schedule.rank_shard.drop_last

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[list[int]]:
        self._require_undivided(sys._getframe(1))
        return self._batches()

    def _require_undivided(self, caller: FrameType) -> None:
        """Check that the caller does not divide the batches again, as ``Accelerator.prepare`` does.

        Raises:
            UsageError: If it does, and this sampler already yields one rank's batches.
        """
        divider = caller.f_locals.get("self")
        processes = getattr(divider, "num_processes", 1)
        divides = processes > 1 and getattr(divider, "batch_sampler", None) is self
        rank_shard = self._schedule.rank_shard
        if divides and rank_shard.world_size > 1:
            raise UsageError(
                f"this sampler yields the batches of rank {rank_shard.rank} of "
                f"{rank_shard.world_size}, and {type(divider).__name__} divides them again among "
                f"{processes} processes: do not pass its DataLoader to Accelerator.prepare, or "
                "create the sampler with rank_shard=RankShard(rank=0, world_size=1)"
            )

    def _batches(self) -> Iterator[list[int]]:
        self._schedule.require_same_group()
        run = self._resume.begin()
        for part in preflight.parts(self._dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(run.epoch, self._schedule.order.seed)
        for request in self._schedule.requests(run.epoch, run.consumed):
            self._resume.advance(run, request.consumed)
            yield request.rows.tolist()
        self._resume.finish(run)

    @property
    def epoch(self) -> int:
        """The last epoch started, or the next one once it is exhausted."""
        return self._resume.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``, or the rest of it after `load_state_dict`.

        Raises:
            UsageError: If ``epoch`` is not an integer from 0 on.
        """
        self._resume.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch of rows yielded."""
        return self._resume.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration, which is empty if its epoch is exhausted.

        Raises:
            StateMismatch: If ``state`` is damaged, or of another dataset, order or version.
        """
        self._resume.load(state)
        # torchdata starts an exhausted epoch, reads ahead, and starts again: skip no epoch then.
        self._resume.keep_epoch()
