"""`to_webdataset`: a dataset of any format as a pipeline of the library WebDataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from typing import Any

from webdataset import DataPipeline
from webdataset.compat import FluidInterface

from shardkit.codecs.image import SNIFF_BYTES, sniff
from shardkit.options import takes
from shardkit.record import IMAGE, LABEL
from shardkit.torch.data.iterable import IterableShardDataset
from shardkit.torch.data.order_options import RowOrder
from shardkit.torch.data.reader_options import ReaderOptions
from shardkit.torch.data.schedule import Request


class Pipeline(DataPipeline, FluidInterface):  # type: ignore[misc]  # it has no types
    """A pipeline of WebDataset that starts with the samples of a dataset."""

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration read ``epoch``."""
        self.pipeline[0].set_epoch(epoch)


class _Samples(IterableShardDataset):
    """Yields what WebDataset would read from tar archives: dicts with the names of members."""

    def _samples(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        keys = self.dataset.keys
        for request, sample in super()._samples(requests):
            yield request, {"__key__": keys[int(request.rows[0])], **_named(sample)}


def _named(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the names that WebDataset gives; all bytes if its image is."""
    fields = dict(sample)
    image, label = fields.pop(IMAGE, None), fields.pop(LABEL, None)
    if isinstance(image, bytes):
        fields[sniff(image[:SNIFF_BYTES]) or IMAGE] = image
        label = None if label is None else str(label).encode()
    elif image is not None:
        fields[IMAGE] = image
    return fields if label is None else fields | {"cls": label}


@takes(ReaderOptions, RowOrder)
def to_webdataset(
    reading: ReaderOptions, options: RowOrder, path: str | PathLike[str]
) -> DataPipeline:
    """Return a `webdataset.DataPipeline` over a dataset, for code that uses such a pipeline.

    It replaces ``wds.WebDataset(urls)``: it yields dicts with ``__key__``, the image, ``cls`` for
    the label, and the other fields by name, and has the methods ``decode``, ``to_tuple``, ``map``,
    ``batched``, ... The order is the same as for `shardkit.IterableTarDataset`: nodes and workers
    divide samples, and each is read once. Shuffle with ``shuffle``, not in the pipeline, and call
    ``set_epoch`` before each epoch.

    Args:
        path: The dataset's directory or URL, of any format.

    Returns:
        With ``decode="bytes"``, image and label are bytes, as in a tar archive, and the image is
        named after its type, such as ``jpg`` or ``png``: use WebDataset's ``decode``. Otherwise
        they are decoded, and the image is named ``image``.

    Raises:
        UsageError: If there is no dataset at ``path``, or an option is unknown.
        CorruptDataset: If the dataset's manifest is damaged.
    """
    return Pipeline(_Samples(path, **vars(replace(reading, as_dict=True)), **vars(options)))
