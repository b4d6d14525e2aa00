"""shardkit in PyTorch Lightning: a data module whose runs stop and go on exactly."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

import lightning.pytorch as pl

from shardkit.order import Blocks
from shardkit.share import Share
from shardkit.torch.datasets import ShardDataset, open_dataset
from shardkit.torch.loader import Loader, make_loader
from shardkit.torch.options import LoaderOptions


class ShardDataModule(pl.LightningDataModule):
    """The loaders of a training and a validation dataset.

    A checkpoint of Lightning holds the training loader's state, and ``trainer.fit(ckpt_path=...)``
    goes on with the very next batch. The rank comes from the trainer's process group; Lightning
    leaves the loaders as they are, since they are no PyTorch DataLoaders.

    Raises:
        UsageError: If a dataset is missing, or an option is unknown.
    """

    def __init__(  # noqa: PLR0913 - what make_loader takes, for two datasets
        self,
        train: str | PathLike[str] | ShardDataset,
        validation: str | PathLike[str] | ShardDataset | None = None,
        *,
        batch_size: int = 64,
        shuffle: bool | Blocks = True,
        seed: int = 0,
        options: LoaderOptions | None = None,
    ) -> None:
        """Make a data module.

        Args:
            train: A dataset, or the directory of one, which is opened with ``decode="torch"``.
            validation: The same; read in its stored order, every sample once.
            batch_size: Samples in a batch of each rank.
            shuffle: How the training dataset is shuffled.
            seed: Chooses the order and the random numbers of each epoch.
            options: How the loaders work; a ``share`` is that of training.
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
        """Begin a new fit at the beginning; a checkpoint is loaded after this."""
        if stage == "fit":
            self._training = self._loaded = None

    def train_dataloader(self) -> Loader:
        """Return a new loader of the training dataset.

        It goes on where a checkpoint stood, or the loader before it, if the trainer reloads them.
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
        """Return the training loader's state, which Lightning puts into its checkpoints.

        Lightning keeps the states of loaders by itself too, but does not give them back after a
        checkpoint that was saved at the end of an epoch.
        """
        if self._training is None or not self._options.in_order:
            return {}
        return self._training.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next training loader go on where the checkpoint stood."""
        self._loaded = state_dict

    def val_dataloader(self) -> Any:
        """Return a new loader of the validation dataset, or no loader if there is none."""
        if self.validation_dataset is None:
            return []
        options = replace(self._options, share=Share(uneven="exact"))
        self._validation = make_loader(
            self.validation_dataset, self._batch_size, seed=self._seed, options=options
        )
        return self._validation

    def teardown(self, stage: str) -> None:
        """End worker processes with the run; the loaders' state stays."""
        for loader in (self._training, self._validation):
            if loader is not None:
                loader.close()


def _opened(dataset: str | PathLike[str] | ShardDataset) -> ShardDataset:
    return dataset if isinstance(dataset, ShardDataset) else open_dataset(dataset, decode="torch")
