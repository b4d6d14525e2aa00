"""`OrderOptions`: the samples of an epoch, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.utils.data import IterableDataset

from shardkit.errors import UsageError, setting
from shardkit.options import option
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import BlockShuffle, Order
from shardkit.sampling.ranks import Rank
from shardkit.system.late import load
from shardkit.torch.data import nested
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.schedule import BatchSchedule

_OF_SAMPLER = "shardkit.orders.sampled:SampledOrder"
"""The order of a sampler of PyTorch."""


class OrderSampler:
    """A value of ``sampler`` that sets the order of each epoch, such as `shardkit.Weighted`."""

    def check(self, options: OrderOptions) -> None:
        """Refuse options that contradict the order."""

    @property
    def op(self) -> ImageOp | None:
        """The operation of the images, which the loader sets; None for the dataset's own."""
        return None

    def order(self, dataset: Any, seed: int) -> Order:
        """Return the order of a dataset's rows; UsageError if it has no such order."""
        raise NotImplementedError

    @property
    def of_any_rows(self) -> OrderSampler | None:
        """The same sampler for any other rows; None if it fits only its own rows."""
        return None


class OrderedDataset(IterableDataset[Any]):
    """A map-style dataset with an order of its own, which loaders take apart."""

    dataset: Any
    """The map-style dataset."""

    def completed(self, order: OrderOptions) -> OrderOptions:
        """Return options of a loader, with those of this dataset where they are None."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """The order of the rows, and this rank's subset."""

    shuffle: bool | BlockShuffle | None = option(
        None,
        help="False reads in stored order, True fully shuffles each epoch, and `BlockShuffle` "
        "shuffles blocks of neighboring rows. None means False, or for a loader of an iterable "
        "dataset, the dataset's setting. The same holds for the next two arguments.",
    )
    seed: int | None = option(
        None, help="Selects the order and the random numbers of each epoch; None means 0."
    )
    rank: Rank | None = option(
        None,
        help="This rank's subset of each epoch. None uses the rank from ``torch.distributed``.",
    )


@dataclass(frozen=True, kw_only=True)
class OrderOptions(RowOrder):
    """The order of a loader, and what its epochs hold."""

    sampler: Any = option(
        None,
        help="Selects the rows of each epoch, instead of ``shuffle``: `Weighted`, `Balanced`, "
        "`Mixture`, `Buckets`, or a PyTorch sampler that yields rows. Its random numbers depend "
        "on seed and epoch, and ranks divide its rows.",
    )
    drop_last: bool | None = option(
        None, help="Whether to drop a smaller last batch; None uses the setting of ``rank``."
    )
    samples_per_epoch: int | None = option(
        None,
        help="Samples in an epoch, over all ranks; the next epoch continues where this one "
        "ended. None means the length of the dataset or sampler.",
    )
    aug_repeats: int = option(
        1,
        help="Repeated augmentation: each sample appears this many times, with different random "
        "numbers, on neighboring ranks in the same step.",
    )
    views: int | Sequence[ImageOp] = option(
        1,
        help="If more than 1, each batch is a tuple of this many batches of the same samples, "
        "with different random numbers. A list of operations, such as ``[RandomResizedCrop(224), "
        "RandomResizedCrop(96)]``, sets the ``decode`` of each view; each image is decoded once. "
        "(With an int, a batch of `EpochBatchSampler` holds the views one after the other, and "
        "``images.chunk(views)`` separates them.)",
    )
    endless: bool = option(
        False, help="Whether an iteration continues with the next epoch instead of ending."
    )

    @property
    def of_any_rows(self) -> OrderOptions:
        """Options for batches of any rows, in random order, all read by this process."""
        sampler = self.sampler.of_any_rows if isinstance(self.sampler, OrderSampler) else None
        return replace(
            self,
            sampler=sampler,
            shuffle=sampler is None,
            rank=None,
            samples_per_epoch=None,
            endless=False,
        )

    def schedule(self, dataset: Any, batch_size: int) -> BatchSchedule:
        """Return the batches of a dataset with a length and rows."""
        if isinstance(self.sampler, OrderSampler):
            self.sampler.check(self)
        self._check_ops(dataset)
        rank = self.rank or Rank()
        if self.drop_last is not None:
            rank = replace(rank, drop_last=self.drop_last)
        epochs = Epochs(
            samples_per_epoch=self.samples_per_epoch,
            aug_repeats=self.aug_repeats,
            views=len(self.ops) or cast(int, self.views),
        )
        repeats = nested.row_repeats(dataset)
        schedule = BatchSchedule(self.order(dataset), batch_size, rank, epochs, repeats)
        if self.endless and not len(schedule):
            raise UsageError(
                f"endless=True needs a batch in each epoch, but {schedule.size} samples make no "
                "batch"
            )
        schedule.endless = self.endless
        return schedule

    def order(self, dataset: Any) -> Order:
        """Return the order of the rows of a dataset."""
        shuffle = False if self.shuffle is None else self.shuffle
        seed = 0 if self.seed is None else self.seed
        sampler = self.sampler
        if sampler is None:
            return Order(size=len(dataset), shuffle=shuffle, seed=seed)
        if shuffle is not False:
            raise UsageError(
                f"sampler= and {setting('shuffle')} both set the order",
                remedy="leave out one of them",
            )
        if isinstance(sampler, OrderSampler):
            return sampler.order(dataset, seed)
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            hint = f": use {sampler.__name__}(...)" if isinstance(sampler, type) else ""
            raise UsageError(f"sampler={sampler!r} is not a sampler with a length{hint}")
        of_sampler: Order = load(_OF_SAMPLER)(
            size=len(sampler), seed=seed, sampler=sampler, of=len(dataset)
        )
        return of_sampler

    @property
    def ops(self) -> tuple[ImageOp, ...]:
        """The operation of each view; empty if ``views`` is a number, and ``sampler`` sets none."""
        if isinstance(self.views, (list, tuple)):
            return tuple(self.views)
        op = self.op
        return () if op is None or self.views == 1 else (op,) * cast(int, self.views)

    @property
    def op(self) -> ImageOp | None:
        """The operation that ``sampler`` sets for all samples; None for the dataset's."""
        return self.sampler.op if isinstance(self.sampler, OrderSampler) else None

    @property
    def view_ops(self) -> tuple[ImageOp | None, ...]:
        """The operation of each view, None for the dataset's own; empty for one batch."""
        return self.ops or (None,) * (cast(int, self.views) if self.views != 1 else 0)

    def _check_ops(self, dataset: Any) -> None:
        """Check that operations in ``views`` can be the ``decode`` of a dataset."""
        if isinstance(self.views, (list, tuple)) and not self.views:
            raise UsageError("views=[] has no operation: views=1 reads the dataset's own samples")
        for number, op in enumerate(self.ops):
            if not isinstance(op, ImageOp):
                raise UsageError(
                    f"views[{number}]={op!r} is not an operation",
                    remedy="use views=[RandomResizedCrop(224), RandomResizedCrop(96)], or "
                    "views=2 for two draws of the dataset's own samples",
                )
        first = self.ops[0] if self.ops else self.op
        if first is None:
            return
        for inner in nested.leaves(dataset):
            if isinstance(inner, ShardDataset):
                inner.reader.with_op(first)
            elif self.ops and not nested.has_shards(inner):
                raise UsageError(
                    "views= sets the operation of each view for shardkit datasets, not "
                    f"{type(inner).__name__}",
                    remedy=f"use views={len(self.ops)}, and crop in your dataset",
                )
