"""`ShardDataModule`: exact resume in PyTorch Lightning."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import lightning.pytorch as pl

from shardkit.sampling.order import BlockShuffle
from shardkit.sampling.ranks import RankShard
from shardkit.torch.data.datasets import ShardDataset, open_dataset
from shardkit.torch.engine.options import LoaderOptions
from shardkit.torch.loader import Loader, make_loader


class ShardDataModule(pl.LightningDataModule):
    """The loaders of a training and a validation dataset.

    Lightning's checkpoints include the training loader's state, and ``trainer.fit(ckpt_path=...)``
    resumes with exactly the next batch. The rank comes from the trainer's process group. Lightning
    does not change the loaders, since they are not PyTorch DataLoaders.

    Raises:
        UsageError: If a dataset is missing, or an option is unknown.
    """

    def __init__(  # noqa: PLR0913 - the arguments of make_loader, for two datasets
        self,
        train: str | PathLike[str] | ShardDataset,
        validation: str | PathLike[str] | ShardDataset | None = None,
        *,
        batch_size: int = 64,
        shuffle: bool | BlockShuffle = True,
        seed: int = 0,
        options: LoaderOptions | None = None,
    ) -> None:
        """Create a data module.

        Args:
            train: A dataset, or its directory, which is opened with ``decode="torch"``.
            validation: The same for validation; every sample is read once, in stored order.
            batch_size: Samples in a batch of each rank.
            shuffle: How the training dataset is shuffled.
            seed: Selects the order and the random numbers of each epoch.
            options: Options of the loaders; a ``rank_shard`` applies to training only.
        """
        super().__init__()
        self.train_dataset = _opened(train)
        self.validation_dataset = None if validation is None else _opened(validation)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._options = options or LoaderOptions()
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
        self._training = make_loader(
            self.train_dataset,
            self._batch_size,
            shuffle=self._shuffle,
            seed=self._seed,
            options=self._options,
        )
        if self._loaded:
            self._training.load_state_dict(self._loaded)
            self._loaded = None
        return self._training

    def state_dict(self) -> dict[str, Any]:
        """Return the training loader's state, for Lightning's checkpoints.

        Lightning saves the states of loaders itself too, but does not restore them from a
        checkpoint saved at the end of an epoch.
        """
        if self._training is None or not self._options.in_order:
            return {}
        return self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next training loader resume from the checkpoint."""
        self._loaded = state_dict

    def val_dataloader(self) -> Any:
        """Return a new loader of the validation dataset, or an empty list without one."""
        if self.validation_dataset is None:
            return []
        options = replace(self._options, rank_shard=RankShard(remainder="exact"))
        self._validation = make_loader(
            self.validation_dataset, self._batch_size, seed=self._seed, options=options
        )
        return self._validation

    def teardown(self, stage: str) -> None:
        """Stop worker processes with the run; the loaders keep their state."""
        for loader in (self._training, self._validation):
            if loader is not None:
                loader.close()


def _opened(dataset: str | PathLike[str] | ShardDataset) -> ShardDataset:
    return dataset if isinstance(dataset, ShardDataset) else open_dataset(dataset, decode="torch")
