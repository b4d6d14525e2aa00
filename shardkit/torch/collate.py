"""Batches: the sequence of samples that a dataset gives for many rows, and how it is unwrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy.typing as npt
import torch
from torch.utils.data import default_collate

Sample = tuple[Any, Any]
"""An image and its label, each as the dataset's options make it."""


Images = Sequence[Any] | torch.Tensor | npt.NDArray[Any]
"""The images of a batch: one after the other, or along the first axis of a block."""


class BatchView(Sequence[Sample]):
    """Samples of one batch, as PyTorch's ``__getitems__`` protocol wants them, over one block.

    To `torch.utils.data` it is a sequence of samples, so that ``default_collate``, ``Subset``,
    ``ConcatDataset`` and ``StackDataset`` work; `collate` takes `batch` and copies nothing.
    """

    def __init__(self, images: Images, labels: list[Any], block: Any = None) -> None:
        """Make a view.

        Args:
            images: One for each sample.
            labels: One for each sample.
            block: All images in one tensor, if they are views of one.
        """
        self._images = images
        self._labels = labels
        self._block = block

    def __len__(self) -> int:
        return len(self._images)

    @overload
    def __getitem__(self, position: int) -> Sample: ...
    @overload
    def __getitem__(self, position: slice) -> list[Sample]: ...
    def __getitem__(self, position: int | slice) -> Sample | list[Sample]:
        if isinstance(position, slice):
            return list(zip(self._images[position], self._labels[position], strict=True))
        return self._images[position], self._labels[position]

    @property
    def batch(self) -> Any:
        """The collated batch, images and labels: the block itself where there is one.

        Raises:
            TypeError: If images are of a type that cannot be collated, such as PIL images.
            RuntimeError: If images differ in size.
        """
        if self._block is not None:
            return self._block, default_collate(self._labels)
        try:
            return default_collate(list(self))
        except TypeError as error:
            raise TypeError(
                "these images cannot be made a batch; give a transform that makes tensors of them, "
                f"or decode='torch' ({error})"
            ) from error
        except RuntimeError as error:
            raise RuntimeError(
                "the images of this batch differ in size; crop them, with decode=CenterCrop(224), "
                "RandomResizedCrop(224) or a transform of your own; or convert with --resize HxW "
                f"--enlarge ({error})"
            ) from error

    def __repr__(self) -> str:
        return f"BatchView({len(self)} samples{'' if self._block is None else ' in one block'})"


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch; what shardkit's datasets give is handed on without a copy.

    Args:
        samples: What a dataset gave for the rows of one batch.

    Returns:
        For a `BatchView` its ``batch``; for anything else what ``default_collate`` makes of it.

    Raises:
        TypeError: If samples are of a type that cannot be collated, such as PIL images.
        RuntimeError: If images differ in size.
    """
    return samples.batch if isinstance(samples, BatchView) else default_collate(list(samples))


def count(batch: Any) -> int:
    """Return the number of samples in a batch: as many as it has labels.

    Of a mapping the values of its first key count, and what has no length, such as a
    sample without a batch around it, counts as one.
    """
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), ())
    elif isinstance(batch, (tuple, list)) and batch:
        batch = batch[min(1, len(batch) - 1)]
    try:
        return len(batch)
    except TypeError:
        return 1
