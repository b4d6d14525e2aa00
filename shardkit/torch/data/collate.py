"""`BatchView`, the samples of a batch, and `collate`, which turns them into tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, overload

from torch.utils.data import default_collate

from shardkit.errors import UsageError

Sample = Any
"""The fields of a row: a tuple, or a dict with ``as_dict=True``."""


class Layout(NamedTuple):
    """The fields of the samples of a dataset."""

    names: tuple[str, ...]
    as_dict: bool = False
    """Whether a sample is a dict by name; otherwise it is a tuple in this order."""
    listed: frozenset[str] = frozenset()
    """Fields that a batch holds as lists, since their values have no common shape: texts, boxes."""


PAIR = Layout(("image", "label"))


class Values(NamedTuple):
    """The values of one field in a batch."""

    values: Any
    """A sequence with one value for each row, None where the row lacks the field; or a block."""
    block: Any = None
    """The tensor or array that holds all values along its first axis, if there is one."""


class TupleSample(tuple[Any, ...]):
    """A sample as a tuple. It states its fields, so that `collate` can treat each by its kind."""

    layout: Layout
    name = ""
    """Name of the record, in errors; set if it lacks a field."""


class DictSample(dict[str, Any]):
    """A sample as a dict; see `TupleSample`."""

    layout: Layout
    name = ""


class BatchView(Sequence[Sample]):
    """The samples of one batch, for PyTorch's ``__getitems__`` protocol.

    It is a sequence of samples, not a collated batch, so ``default_collate``, ``Subset``,
    ``ConcatDataset`` and ``StackDataset`` work: PyTorch always passes the result of
    ``__getitems__`` through ``collate_fn``. `collate` returns its `batch` without copying.
    """

    def __init__(
        self,
        columns: Sequence[Values],
        layout: Layout = PAIR,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        """Create a view.

        Args:
            columns: The values of each field, of equal length.
            layout: The fields, in the same order; by default an image and a label.
            describe: Returns the name of the record at a position, for errors.
        """
        self._columns = columns
        self._layout = layout
        self._describe = describe

    def __reduce__(self) -> tuple[Any, ...]:
        # `describe` refers to the rows being read. Only records that lack a field are ever named.
        lists = [values for values, block in self._columns if block is None]
        names = {
            position: self._name(position)
            for position in range(len(self))
            if any(values[position] is None for values in lists)
        }
        return BatchView, (self._columns, self._layout, names.__getitem__)

    def __len__(self) -> int:
        return len(self._columns[0].values)

    @overload
    def __getitem__(self, position: int) -> Sample: ...
    @overload
    def __getitem__(self, position: slice) -> list[Sample]: ...
    def __getitem__(self, position: int | slice) -> Sample | list[Sample]:
        if isinstance(position, slice):
            return [self[number] for number in range(*position.indices(len(self)))]
        position = index(position)
        values = [column.values[position] for column in self._columns]
        layout = self._layout
        if layout == PAIR:
            return tuple(values)
        sample: TupleSample | DictSample
        if layout.as_dict:
            sample = DictSample(zip(layout.names, values, strict=True))
        else:
            sample = TupleSample(values)
        sample.layout = layout
        if any(value is None for value in values):
            sample.name = self._name(range(len(self))[position])
        return sample

    def span(self, start: int, stop: int) -> BatchView:
        """Return the samples of some positions, without a copy."""
        columns = []
        for values, block in self._columns:
            cut = None if block is None else block[start:stop]
            columns.append(Values(cut if values is block else values[start:stop], cut))
        describe = self._describe
        return BatchView(columns, self._layout, describe and (lambda n: describe(start + n)))

    @property
    def batch(self) -> Any:
        """Collated fields: a tuple, or a dict with ``as_dict=True``.

        Equal images, arrays, numbers and labels become tensors, those in one block without a copy.
        Texts, JSON values, bytes, boxes, keypoints and arrays of varying shape become lists.

        Raises:
            TypeError: If values cannot be collated, such as PIL images.
            RuntimeError: If images differ in size.
            UsageError: If a row lacks a field that is collated.
        """
        names = self._layout.names
        collated = [
            self._collated(name, values) if block is None else block
            for name, (values, block) in zip(names, self._columns, strict=True)
        ]
        return dict(zip(names, collated, strict=True)) if self._layout.as_dict else tuple(collated)

    def _collated(self, name: str, values: Any) -> Any:
        if name in self._layout.listed:
            return list(values)
        self._require_all(name, values)
        try:
            return default_collate(values)
        except (TypeError, RuntimeError) as error:
            if isinstance(error, TypeError):
                raise TypeError(
                    f"the values of {name!r} cannot be collated: add a transform that returns "
                    f"tensors, or set decode='torch' for images ({error})"
                ) from error
            raise RuntimeError(
                f"the values of {name!r} in this batch differ in size: crop images with "
                "decode=CenterCrop(224), RandomResizedCrop(224) or your own transform, or convert "
                f"with --resize HxW --enlarge ({error})"
            ) from error

    def _require_all(self, name: str, values: Sequence[Any]) -> None:
        for position, value in enumerate(values):
            if value is None:
                raise UsageError(
                    f"{self._name(position)} lacks {name!r}, so this batch has no tensor for it",
                    remedy=f"Leave out such rows: dataset.select(dataset.has({name!r}))",
                )

    def _name(self, position: int) -> str:
        return f"sample {position}" if self._describe is None else self._describe(position)

    def __repr__(self) -> str:
        in_block = self._columns[0].block is not None
        return f"BatchView({len(self)} samples{' in one block' if in_block else ''})"


class TupleOfViews(tuple[Any, ...]):
    """The sample of each view of a row."""


class SeveralViews(BatchView):
    """The samples of one batch in several views: a sample is a tuple with one for each view.

    So ``default_collate`` returns a list with a batch for each view, and `collate` a tuple.
    """

    def __init__(self, views: Sequence[BatchView]) -> None:
        """Join the views of the same rows."""
        self.views = views

    def __reduce__(self) -> tuple[Any, ...]:
        return SeveralViews, (self.views,)

    def __len__(self) -> int:
        return len(self.views[0])

    @overload
    def __getitem__(self, position: int) -> Sample: ...
    @overload
    def __getitem__(self, position: slice) -> list[Sample]: ...
    def __getitem__(self, position: int | slice) -> Sample | list[Sample]:
        samples = [view[position] for view in self.views]
        if isinstance(position, slice):
            return [TupleOfViews(views) for views in zip(*samples, strict=True)]
        return TupleOfViews(samples)

    def span(self, start: int, stop: int) -> SeveralViews:
        """Return the samples of some positions, without a copy."""
        return SeveralViews([view.span(start, stop) for view in self.views])

    @property
    def batch(self) -> tuple[Any, ...]:
        """The `batch` of each view."""
        return tuple(view.batch for view in self.views)

    def __repr__(self) -> str:
        return f"SeveralViews({', '.join(map(repr, self.views))})"


def collate(samples: Sequence[Any]) -> Any:
    """Collate samples into a batch, without a copy for shardkit's datasets.

    Args:
        samples: The samples of one batch.

    Returns:
        The ``batch`` of a `BatchView`, or of its samples in a list, as returned by a
        ``ConcatDataset``; for other samples, the result of ``default_collate``.

    Raises:
        TypeError: If the samples cannot be collated, such as PIL images.
        RuntimeError: If images differ in size.
        UsageError: If a sample lacks a field to collate.
    """
    if isinstance(samples, BatchView):
        return samples.batch
    samples = list(samples)
    if samples and isinstance(samples[0], TupleOfViews):  # from a ConcatDataset
        return tuple(collate(view) for view in zip(*samples, strict=True))
    layouts = {getattr(sample, "layout", None) for sample in samples}
    layout = layouts.pop() if len(layouts) == 1 else None
    if not isinstance(layout, Layout):
        return default_collate(samples)
    keys = layout.names if layout.as_dict else range(len(layout.names))
    columns = [Values([sample[key] for sample in samples]) for key in keys]
    return BatchView(columns, layout, lambda position: samples[position].name).batch


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
        for item in level:
            if shape := getattr(item, "shape", ()):
                return int(shape[0])
        level = [inner for item in level for inner in _items(item)]
        for item in level:
            if _is_uncollated(item) or _is_column(item):
                return len(item)
    if isinstance(batch, (str, bytes)) or (isinstance(batch, tuple) and batch):
        return 1
    return len(batch) if hasattr(type(batch), "__len__") and not hasattr(batch, "shape") else 1


def _items(batch: Any) -> Iterable[Any]:
    """Return the items of a tuple, list or mapping; others have none."""
    if isinstance(batch, Mapping):
        return batch.values()
    return batch if isinstance(batch, (tuple, list)) else ()


def _is_uncollated(item: Any) -> bool:
    """Return whether this is a sequence of samples: of tuples, or of mappings with equal keys.

    ``default_collate`` also returns lists: for two mappings in a sample, a list of two with
    different keys.
    """
    if isinstance(item, BatchView):
        return True
    if not isinstance(item, (tuple, list)) or not item:
        return False
    if isinstance(item[0], Mapping):
        keys = item[0].keys()
        return all(isinstance(sample, Mapping) and sample.keys() == keys for sample in item)
    return isinstance(item, list) and all(isinstance(sample, tuple) for sample in item)


def _is_column(item: Any) -> bool:
    """Return whether this is a sequence of one plain value per sample, such as a name."""
    if not isinstance(item, (tuple, list)) or not item:
        return False
    return not any(
        isinstance(value, (tuple, list, Mapping)) or getattr(value, "shape", ()) for value in item
    )
