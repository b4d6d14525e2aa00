"""`BatchView`, the samples of a batch, and `collate`, which turns them into tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy.typing as npt
import torch
from torch.utils.data import default_collate

Sample = tuple[Any, Any]
"""An image and its label, as determined by the dataset's options."""


Images = Sequence[Any] | torch.Tensor | npt.NDArray[Any]
"""The images of a batch: a sequence, or the first axis of a block."""


class BatchView(Sequence[Sample]):
    """The samples of one batch, for PyTorch's ``__getitems__`` protocol.

    It is a sequence of samples, so ``default_collate``, ``Subset``, ``ConcatDataset`` and
    ``StackDataset`` work. `collate` returns its `batch` without copying.
    """

    def __init__(
        self,
        images: Images,
        labels: list[Any],
        block: Any = None,
        targets: torch.Tensor | None = None,
    ) -> None:
        """Create a view.

        Args:
            images: The image of each sample.
            labels: The label of each sample.
            block: The tensor or array that all images are views of, if any.
            targets: The labels, collated, where they are known.
        """
        self._images = images
        self._labels = labels
        self._block = block
        self._targets = targets

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
        """Collated images and labels; the images are the block itself, if there is one.

        Raises:
            TypeError: If the images cannot be collated, such as PIL images.
            RuntimeError: If images differ in size.
        """
        if self._block is not None:
            targets = self._targets
            return self._block, default_collate(self._labels) if targets is None else targets
        try:
            return default_collate(list(self))
        except TypeError as error:
            raise TypeError(
                "these images cannot be collated: add a transform that returns tensors, or set "
                f"decode='torch' ({error})"
            ) from error
        except RuntimeError as error:
            raise RuntimeError(
                "the images of this batch differ in size: crop them with decode=CenterCrop(224), "
                "RandomResizedCrop(224) or your own transform, or convert with --resize HxW "
                f"--enlarge ({error})"
            ) from error

    def __repr__(self) -> str:
        return f"BatchView({len(self)} samples{'' if self._block is None else ' in one block'})"


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch, without a copy for shardkit's datasets.

    Args:
        samples: The samples of one batch.

    Returns:
        The ``batch`` of a `BatchView`, and the result of ``default_collate`` for others.

    Raises:
        TypeError: If the samples cannot be collated, such as PIL images.
        RuntimeError: If images differ in size.
    """
    return samples.batch if isinstance(samples, BatchView) else default_collate(list(samples))


def count(batch: Any) -> int:
    """Return the number of samples in a batch.

    It is the length of the outermost array or tensor that is not a scalar, in any nesting of
    tuples, lists and mappings; of several on one level, the first. Lists of uncollated samples, and
    without an array also lists of labels or undecoded images, count by their own length. A value
    without a length, a string and bytes count as one sample.
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
    """Return the items of a tuple, list or mapping; others have none."""
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (tuple, list)) else ()


def _is_uncollated(part: Any) -> bool:
    """Return whether this is a sequence of samples: of tuples, or of mappings with equal keys.

    ``default_collate`` also returns lists: for two mappings in a sample, a list of two with
    different keys.
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
    """Return whether this is a sequence of one plain value per sample, such as a name."""
    if not isinstance(part, (tuple, list)) or not part:
        return False
    return not any(
        isinstance(each, (tuple, list, Mapping)) or getattr(each, "shape", ()) for each in part
    )
