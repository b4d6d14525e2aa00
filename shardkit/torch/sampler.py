"""`EpochBatchSampler`: the order of a loader, for PyTorch's own ``DataLoader``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch.utils.data import Sampler

from shardkit.errors import UsageError
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import BlockShuffle
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data import nested
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.read_context import NumberedRows, ReadContext
from shardkit.torch.data.resume import ResumeState
from shardkit.torch.data.samplers import make_order
from shardkit.torch.data.schedule import BatchSchedule, Request


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of rows in shardkit's order, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of `shardkit.make_loader`: different in each epoch, divided among ranks, and
    the same for any number of workers. Each iteration reads the next epoch and sets it on the
    dataset, so random operations follow; ``set_epoch`` selects one.

    ``torchdata``'s ``StatefulDataLoader`` saves and restores its state.

    Raises:
        UsageError: If options contradict each other.
    """

    def __init__(  # noqa: PLR0913 - those of make_loader that select rows
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | BlockShuffle = False,
        sampler: Any = None,
        seed: int = 0,
        samples_per_epoch: int | None = None,
        aug_repeats: int = 1,
        views: int = 1,
        endless: bool = False,
        rank_shard: RankShard | None = None,
    ) -> None:
        """Create a sampler.

        Args:
            dataset: The dataset of the ``DataLoader``.
            batch_size: Samples in a batch of this rank.
            shuffle: As in `shardkit.make_loader`, like the following arguments.
            sampler: Selects the rows of each epoch, instead of ``shuffle``.
            seed: Selects the order and the random numbers of each epoch.
            samples_per_epoch: Samples in an epoch, of all ranks.
            aug_repeats: How often each sample comes, with different random numbers.
            views: If more than 1, each batch holds so many views of ``batch_size`` samples, one
                after the other: ``images.chunk(views)`` separates them.
            endless: Whether an iteration continues with the next epoch instead of ending.
            rank_shard: This rank's subset of each epoch; None uses the rank given by
                ``torch.distributed``.
        """
        order = make_order(dataset, shuffle, seed, sampler)
        epochs = Epochs(samples_per_epoch=samples_per_epoch, aug_repeats=aug_repeats, views=views)
        self._dataset = dataset
        repeats = nested.row_repeats(dataset)
        self._schedule = BatchSchedule(
            order, batch_size, rank_shard or RankShard(), epochs, repeats
        )
        self._endless = self._schedule.require_endless(endless)
        self._resume = ResumeState(dataset, self._schedule)
        self._states_context = order.recurs or epochs.recurs or endless or repeats is not None
        self._require_numbered()
        self.batch_size = batch_size
        self.drop_last = self._schedule.rank_shard.drop_last

    def __len__(self) -> int:
        return len(self._schedule)

    def _require_numbered(self) -> None:
        """Check that each sample of a shardkit dataset can get random numbers of its own.

        Raises:
            UsageError: If batches of different epochs are read side by side, in a dataset that
                does not know their epochs.
        """
        dataset = self._dataset
        wrapped = any(isinstance(part, ShardDataset) for part in nested.parts(dataset))
        if isinstance(dataset, ShardDataset) or not wrapped:
            return
        if self._endless:
            raise UsageError(
                f"endless=True needs a dataset that knows the epoch of each batch, and a "
                f"{type(dataset).__name__} does not pass it on: use shardkit.make_loader"
            )
        if self._states_context:
            warnings.warn(
                f"rows repeat in this {type(dataset).__name__}, and a DataLoader draws the same "
                "random numbers for each repeat in another batch: use shardkit.make_loader, or "
                "dataset.select(rows) instead of a Subset, or open the dataset again with another "
                "view=",
                RuntimeWarning,
                stacklevel=3,
            )

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
        for part in nested.parts(self._dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(run.epoch, self._schedule.order.seed)
        requests = self._schedule.requests(run.epoch, run.consumed, endless=self._endless)
        for request in requests:
            self._resume.advance(run._replace(epoch=request.epoch), request.consumed)
            yield self._rows(request)
        self._resume.finish(run)

    def _rows(self, request: Request) -> list[int]:
        rows: list[int] = request.rows.tolist()
        if not self._states_context:
            return rows
        views = self._schedule.epochs.views
        repeats: list[int] = []
        for view in range(views if request.repeats is not None else 0):
            repeats += request.of_view(view, views).numbers
        context = ReadContext(request.seed, request.epoch, repeats=repeats)
        return NumberedRows(rows * views, context)

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
