"""Batches: the sequence of samples that a dataset gives for many rows, and how it is unwrapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    """Return the number of samples in a batch.

    That is the length of its outermost array or tensor that is no scalar, in whatever tuples, lists
    and mappings it stands: of several on one level of the first. A list of samples that were not
    collated counts by itself, and so does a list of labels or of undecoded images where there is no
    array. What has no length, and a string or bytes, is one sample.
    """
    if isinstance(batch, (list, BatchView)) and (_is_uncollated(batch) or _is_column(batch)):
        return len(batch)
    level = [batch]
    while level:
        for part in level:
            if shape := getattr(part, "shape", ()):
                return int(shape[0])
        level = [inner for part in level for inner in _parts(part)]
        for part in level:
            if _is_uncollated(part) or _is_column(part):
                return len(part)
    if isinstance(batch, (str, bytes)) or (isinstance(batch, tuple) and batch):
        return 1
    return len(batch) if hasattr(type(batch), "__len__") and not hasattr(batch, "shape") else 1


def _parts(batch: Any) -> Iterable[Any]:
    """Return what a structure consists of; nothing if it is none."""
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (tuple, list)) else ()


def _is_uncollated(part: Any) -> bool:
    """Tell whether it is a sequence of samples: of tuples, or of mappings of the same keys.

    ``default_collate`` makes lists, and of two mappings in a sample a list of two that differ.
    """
    if isinstance(part, BatchView):
        return True
    if not isinstance(part, (tuple, list)) or not part:
        return False
    if isinstance(part[0], Mapping):
        keys = part[0].keys()
        return all(isinstance(each, Mapping) and each.keys() == keys for each in part)
    return isinstance(part, list) and all(isinstance(each, tuple) for each in part)


def _is_column(part: Any) -> bool:
    """Tell whether it is a sequence with one thing for each sample, such as a name or a number."""
    if not isinstance(part, (tuple, list)) or not part:
        return False
    return not any(
        isinstance(each, (tuple, list, Mapping)) or getattr(each, "shape", ()) for each in part
    )
