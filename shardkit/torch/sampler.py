"""`EpochBatchSampler`: the order of a loader, for PyTorch's own ``DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from shardkit.errors import UsageError
from shardkit.options import takes
from shardkit.torch.data import nested
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.divided import require_undivided
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.data.read_context import NumberedRows, ReadContext
from shardkit.torch.data.resume import Resumable, ResumeState
from shardkit.torch.data.schedule import Request


class EpochBatchSampler(Resumable, Sampler[list[int]]):
    """Batches of rows in shardkit's order, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of `shardkit.make_loader`: different in each epoch, divided among ranks, and
    the same for any number of workers. Each iteration reads the next epoch; ``set_epoch`` selects
    one. A batch of rows carries its epoch and seed to the shardkit datasets that it is read from,
    inside any wrapper, so several samplers of one dataset are independent. The dataset's own epoch
    is set as well, for code that turns a batch into a plain list.

    ``torchdata``'s ``StatefulDataLoader`` saves and restores its state.

    Raises:
        UsageError: If options contradict each other.
    """

    @takes(OrderOptions)
    def __init__(self, options: OrderOptions, dataset: Any, batch_size: int) -> None:
        """Create a sampler, with the options of `shardkit.make_loader`.

        Args:
            dataset: The dataset of the ``DataLoader``.
            batch_size: Samples in a batch of this rank.
        """
        if not nested.has_rows(dataset):
            raise UsageError(
                "EpochBatchSampler needs a dataset with a length and rows, not "
                f"{type(dataset).__name__}",
                remedy="in Lightning, use Trainer(use_distributed_sampler=False)"
                if isinstance(dataset, Sampler)
                else "open a path with shardkit.open_dataset",
            )
        self._dataset = dataset
        self._ops = options.ops
        self._op = options.op
        self._schedule = options.schedule(dataset, batch_size)
        if self._ops and not all(isinstance(leaf, ShardDataset) for leaf in nested.leaves(dataset)):
            raise UsageError(
                "views=[...] makes each sample a tuple, which a wrapper around a shardkit dataset "
                "does not expect",
                remedy=f"use make_loader, or views={len(self._ops)}",
            )
        self._resume = ResumeState(dataset, self._schedule)
        self.batch_size = batch_size
        self.drop_last = self._schedule.rank.drop_last

    def __len__(self) -> int:
        return len(self._schedule)

    def __iter__(self) -> Iterator[list[int]]:
        require_undivided("sampler", self._schedule.rank)
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        self._schedule.require_same_group()
        run = self._resume.begin()
        for inner in nested.inner_datasets(self._dataset):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(run.epoch, self._schedule.order.seed)
        requests = self._schedule.requests(run.epoch, run.consumed, endless=self._schedule.endless)
        for request in requests:
            self._resume.advance(run._replace(epoch=request.epoch), request.consumed)
            yield self._rows(request)
        self._resume.finish(run)

    def _rows(self, request: Request) -> NumberedRows:
        if self._ops:
            return NumberedRows(request.rows.tolist(), self._context(request, request.numbers))
        views = self._schedule.epochs.views
        repeats = request.numbers
        if views > 1:
            view_requests = (request.of_view(view, views) for view in range(views))
            repeats = [number for view in view_requests for number in view.numbers]
        return NumberedRows(request.rows.tolist() * views, self._context(request, repeats))

    def _context(self, request: Request, repeats: list[int]) -> ReadContext:
        return ReadContext(
            request.seed, request.epoch, repeats=repeats or None, op=self._op, views=self._ops
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` in the next iteration, which is empty if its epoch is exhausted.

        Raises:
            StateMismatch: If ``state`` is damaged, or belongs to another dataset, order or version.
        """
        super().load_state_dict(state)
        # torchdata starts an exhausted epoch, reads ahead, and starts again: skip no epoch then.
        self._resume.keep_epoch()
