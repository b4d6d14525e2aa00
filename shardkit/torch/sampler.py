"""The order of a loader as a batch sampler, for a DataLoader that is not ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from shardkit.order import Blocks, Order
from shardkit.share import Share
from shardkit.torch import preflight
from shardkit.torch.feed import Feed, Progress


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of rows in shardkit's order, for ``DataLoader(dataset, batch_sampler=...)``.

    The order is that of `shardkit.make_loader`: another in each epoch, divided among ranks, the
    same for any number of workers. Each iteration reads the next epoch and tells the dataset, so
    that random operations follow it; ``set_epoch`` names one.

    ``torchdata``'s ``StatefulDataLoader`` saves and restores its state.

    Raises:
        UsageError: If options contradict each other.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool | Blocks = False,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        """Make a sampler; the arguments are those of `shardkit.make_loader`."""
        order = Order(size=len(dataset), shuffle=shuffle, seed=seed)
        self._dataset = dataset
        self._feed = Feed(order, batch_size, share or Share())
        self._progress = Progress(dataset, self._feed)
        self.batch_size = batch_size
        self.drop_last = self._feed.share.drop_last

    def __len__(self) -> int:
        return len(self._feed)

    def __iter__(self) -> Iterator[list[int]]:
        self._feed.require_same_group()
        run = self._progress.begin()
        for part in preflight.parts(self._dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(run.epoch, self._feed.order.seed)
        for request in self._feed.requests(run.epoch, run.consumed):
            self._progress.advance(run, request.consumed)
            yield request.rows.tolist()
        self._progress.finish(run)

    @property
    def epoch(self) -> int:
        """The epoch that was begun last, or once it is read to its end, the one that comes next."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read ``epoch``: from where a loaded state left it, if it did.

        Raises:
            UsageError: If it is not an integer from 0 on.
        """
        self._progress.set(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the sampler stands: after the last batch of rows that it gave."""
        return self._progress.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stood, with the next iteration: with nothing, if the epoch is over.

        Raises:
            StateMismatch: If it is of another dataset, order or version, or is no state.
        """
        self._progress.load(state)
        # torchdata begins a finished epoch, reads ahead, and begins again: that must skip nothing.
        self._progress.stay()
