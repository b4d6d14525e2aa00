"""`ShardDataModule`: exact resume in PyTorch Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, cast

import lightning.pytorch as pl

from shardkit.errors import StateMismatch, UsageError
from shardkit.options import option, takes
from shardkit.sampling.order import BlockShuffle
from shardkit.sampling.ranks import Rank
from shardkit.system.text import quoted
from shardkit.torch.data.datasets import open_dataset
from shardkit.torch.data.order_options import OrderOptions
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.loader import Loader, make_loader, reader_of


@dataclass(frozen=True, kw_only=True)
class TrainingOrder(OrderOptions):
    """The order of the training dataset, which is shuffled."""

    shuffle: bool | BlockShuffle | None = option(
        True,
        help="How the training dataset is shuffled, as in `make_loader`; leave it None with a "
        "``sampler``.",
    )


class ShardDataModule(pl.LightningDataModule):
    """The loaders of a training and a validation dataset.

    Lightning's checkpoints include the training loader's state, and ``trainer.fit(ckpt_path=...)``
    resumes with exactly the next batch. The rank comes from the trainer's process group. Lightning
    does not change the loaders, since they are not PyTorch DataLoaders. With ``overfit_batches``,
    each epoch reads the first batches of the first epoch.

    Raises:
        UsageError: If a dataset is missing, an option is unknown, or options contradict each other.
    """

    @takes(TrainingOrder, LoaderOptions)
    def __init__(
        self,
        order: TrainingOrder,
        loading: LoaderOptions,
        train: Any,
        validation: Any = None,
        *,
        batch_size: int = 64,
    ) -> None:
        """Create a data module, with the options of `shardkit.make_loader`.

        Args:
            train: A dataset for `make_loader`; or its directory, which is opened with
                ``decode="torch"``. Or a function that returns a new loader, such as
                ``partial(make_loader, dataset, 64)``; it is called once the trainer's process group
                exists, and no option of this module applies to it.
            validation: The same for validation; every sample is read once, in stored order. (A
                function needs ``Rank(remainder="exact")`` for that.) Only ``seed`` and the options
                that do not select samples apply.
            batch_size: Samples in a batch of each rank.
        """
        super().__init__()
        reader_of(loading).suited(loading, "")  # raises before a trainer starts
        shared = {"batch_size": batch_size, "seed": order.seed, **vars(loading)}
        self._make_training = _maker(train, **(vars(order) | shared))
        exact = Rank(remainder="exact")
        self._make_validation = _maker(validation, **shared, rank=exact)
        self._training: Loader | None = None
        self._validation: Loader | None = None
        self._loaded: dict[str, Any] | None = None

    def setup(self, stage: str) -> None:
        """Reset the position for a new fit; a checkpoint is loaded after this."""
        if stage == "fit":
            self._training = self._loaded = None

    def train_dataloader(self) -> Loader:
        """Return a new loader of the training dataset.

        It resumes from a checkpoint, or from the previous loader if the trainer reloads it.
        """
        if self._training is not None and self._loaded is None:
            self._loaded = self.state_dict()
        if self._make_training is _no_loader:
            raise UsageError(
                "this ShardDataModule has no training dataset", remedy="pass one as train="
            )
        self._training = training = self._make_training()
        if not isinstance(training, Loader):
            raise UsageError(
                f"train={self._make_training!r} returned {type(training).__name__}, not a "
                "loader of shardkit.make_loader"
            )
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        batches = limit if isinstance(limit, int) else int(len(training) * limit)
        training.end_epochs_after(batches)
        if getattr(self.trainer, "overfit_batches", 0):
            # For this, Lightning turns off shuffling in PyTorch DataLoaders.
            training.batch_sampler.set_epoch = lambda epoch: training.set_epoch(0)
        if self._loaded:
            training.load_state_dict(self._loaded)
            self._loaded = None
        return training

    def state_dict(self) -> dict[str, Any]:
        """Return the training loader's state, for Lightning's checkpoints.

        Lightning also saves the states of loaders, but does not restore them from a checkpoint
        saved at the end of an epoch.
        """
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next training loader resume from the checkpoint.

        Raises:
            StateMismatch: If ``state_dict`` is not a mapping. Its values are checked when the
                training loader is made.
        """
        if not isinstance(state_dict, Mapping):
            raise StateMismatch(f"the checkpoint has no state of a loader: {quoted(state_dict)}")
        self._loaded = dict(state_dict)

    def val_dataloader(self) -> Any:
        """Return a new loader of the validation dataset, or an empty list without one."""
        self._validation = self._make_validation()
        return [] if self._validation is None else self._validation

    def teardown(self, stage: str) -> None:
        """Stop worker processes with the run; the loaders keep their state."""
        for loader in (self._training, self._validation):
            if loader is not None:
                loader.close()


def _maker(data: Any, **arguments: Any) -> Callable[[], Any]:
    """Return a function that returns a loader of ``data``, or None without it."""
    if data is None:
        return _no_loader
    if callable(data) and not hasattr(data, "__getitem__"):
        return cast(Callable[[], Any], data)
    dataset = open_dataset(data, decode="torch") if isinstance(data, (str, PathLike)) else data
    return partial(make_loader, dataset, **arguments)


def _no_loader() -> None:
    """Return nothing; Lightning pickles a data module for processes that it spawns."""
