"""`Buckets`: batches of images of one size, chosen by aspect ratio."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from shardkit.errors import UsageError, setting
from shardkit.orders.bucket_order import (
    BucketCount,
    BucketOrder,
    BucketSizes,
    make_buckets,
    order_members,
)
from shardkit.orders.samplers import gathered
from shardkit.orders.weighted import check_weights
from shardkit.sampling.order import Draws, Order, Positions
from shardkit.torch.data.batch_rows import describe_row
from shardkit.torch.data.crops import check_probability
from shardkit.torch.data.datasets import ShardDataset
from shardkit.torch.data.ops import Crop, Filter, ImageOp
from shardkit.torch.data.order_options import OrderOptions, OrderSampler

_ENTRIES_AT_ONCE = 1 << 18
"""Entries of the index to read at once, which bounds memory."""

_KNOWN = {"crop": ("random", "center"), "leftovers": ("drop", "carry")}


@dataclass(frozen=True, kw_only=True)
class BucketCrop(ImageOp):
    """Scale an image to cover the bucket of its aspect ratio, and crop the rest.

    It cuts the largest region of the bucket's aspect ratio from the image and scales that.
    """

    sizes: BucketSizes
    is_random: bool = True
    """Whether the position of the crop is random; otherwise, it is the center."""
    flip: float = 0.0
    """Probability of a horizontal flip."""

    @property
    def fixed_size(self) -> None:
        """None: the bucket depends on the image."""

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        """Return the crop for the image's bucket."""
        if 0 in (width, height):  # an unchecked image; decoding reports what is wrong with it
            return Crop(0, 0, width, height, self.sizes.sizes[0])
        size = self.sizes.sizes[self.sizes.nearest(width, height)]
        across = min(width, max(1, round(height * size[1] / size[0])))
        down = min(height, max(1, round(width * size[0] / size[1])))
        flip = self.flip > 0 and draws.uniform() < self.flip
        left = (width - across) // 2
        top = (height - down) // 2
        if self.is_random:
            left = draws.below(width - across + 1)
            top = draws.below(height - down + 1)
        return Crop(left, top, across, down, size, flip)


@dataclass(frozen=True, eq=False)
class Buckets(OrderSampler):
    """Read batches of one size each, with images grouped by aspect ratio, as for diffusion models.

    Each image is assigned to the size with the nearest aspect ratio. It is scaled to cover that
    size, and the excess is cropped. All images of a step, on all ranks, have one size, and sizes
    come in random order::

        buckets = Buckets.by_area(512 * 512, step=64, ratio=2)
        loader = make_loader(dataset, 16, sampler=buckets)

    The sizes of images are those that the dataset decodes, from its index. The order depends on the
    product of batch size and number of ranks, so a run resumes only with an equal product.

    Raises:
        UsageError: If a size is invalid, two have the same aspect ratio, or an option is unknown.
    """

    sizes: Any
    """Height and width of the samples of each bucket, in pixels: pairs, kept as `BucketSizes`."""
    _: KW_ONLY
    crop: str = "random"
    """``random`` draws the position of each crop; ``center`` crops the center."""
    flip: float = 0.0
    """Probability of a horizontal flip."""
    leftovers: str = "drop"
    """In an epoch, each bucket has only full batches. ``drop`` leaves out the rest, which is drawn
    again in each epoch. With ``carry``, the rest comes first in the next epoch, so all images of a
    bucket are read equally often."""
    weights: Any = None
    """A number for each row, as for `Weighted`. Rows are drawn with replacement, and the number of
    batches of a bucket is proportional to its weights."""
    filter: Filter = "bilinear"
    """``bilinear`` or ``bicubic``, both antialiased."""
    oversample: float = 1.0
    """As for `RandomResizedCrop`; ``math.inf`` decodes all pixels of a JPEG before scaling."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not isinstance(sizes, BucketSizes):
            object.__setattr__(self, "sizes", make_buckets(sizes))
        for name, choices in _KNOWN.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"{setting(name, getattr(self, name))} is unknown;",
                    remedy=f"choose from {', '.join(choices)}",
                )
        if self.weights is not None:
            object.__setattr__(self, "weights", check_weights("Buckets(weights)", self.weights))
            if self.leftovers == "carry":
                raise UsageError(
                    "weights= draws with replacement", remedy="leave out leftovers='carry'"
                )
        check_probability("flip", self.flip)
        _ = self.op  # checks the other options

    @cached_property
    def op(self) -> BucketCrop:
        """The operation of the images, which the loader sets."""
        return BucketCrop(
            sizes=self.sizes,
            is_random=self.crop == "random",
            flip=self.flip,
            filter=self.filter,
            oversample=self.oversample,
        )

    @classmethod
    def by_area(cls, area: int, step: int = 64, ratio: float = 2.0, **options: Any) -> Buckets:
        """Return buckets of the largest sizes of at most ``area`` pixels.

        Args:
            area: Maximum pixels of a sample.
            step: The sides are multiples of it.
            ratio: Maximum ratio of the longer side to the shorter one.
            options: Those of `Buckets`.

        Raises:
            UsageError: If there is no such size.
        """
        return cls(BucketSizes.by_area(area, step, ratio), **options)

    def count(self, dataset: Any) -> list[BucketCount]:
        """Return the number of images in each bucket, and the fraction of pixels that is cropped.

        Raises:
            UsageError: As `order`.
        """
        heights, widths = gathered(dataset, _image_sizes).T
        counts: list[BucketCount] = self.sizes.count([(widths, heights)])
        return counts

    @property
    def of_any_rows(self) -> Buckets:
        """The same buckets without weights, which belong to rows."""
        return replace(self, weights=None)

    def check(self, options: OrderOptions) -> None:
        """Check that each batch can be of one bucket; see `OrderSampler`."""
        if options.samples_per_epoch is not None or options.aug_repeats != 1:
            raise UsageError(
                "sampler=Buckets(...) makes an epoch of full batches of each bucket",
                remedy="leave out samples_per_epoch= and aug_repeats=",
            )
        if isinstance(options.views, (list, tuple)):
            raise UsageError(
                "sampler=Buckets(...) sets the operation of each view",
                remedy="use views=2 for two crops of each image",
            )

    def order(self, dataset: Any, seed: int) -> Order:
        """Return the order of a dataset's rows.

        Raises:
            UsageError: If the dataset is not shardkit's, a row has no image, all images are raw
                pixels of one size, or there is not one weight for each row.
        """
        heights, widths = gathered(dataset, _image_sizes).T
        if self.weights is not None and len(self.weights) != len(widths):
            raise UsageError(
                f"Buckets(weights) has {len(self.weights)} weights for {len(widths)} rows",
                remedy="pass one weight for each row of the dataset",
            )
        buckets = self.sizes.nearest_of(widths, heights)
        counts, members, cumulative = order_members(buckets, len(self.sizes.sizes), self.weights)
        return BucketOrder(
            size=len(widths),
            seed=seed,
            sizes=self.sizes,
            counts=counts,
            members=members,
            carries=self.leftovers == "carry",
            cumulative=cumulative,
        )


def _image_sizes(dataset: Any) -> Positions:
    """Return the height and width of each image of one dataset: int64 of shape (N, 2)."""
    if not isinstance(dataset, ShardDataset):
        raise UsageError(
            f"Buckets needs the size of every image, and {type(dataset).__name__} is not a "
            "shardkit dataset",
            remedy="open a path with shardkit.open_dataset",
        )
    if dataset.manifest.raw_shape is not None:
        height, width, _ = dataset.manifest.raw_shape
        raise UsageError(
            f"all images of {dataset.path} are {height}x{width} raw pixels, so there is only one "
            "bucket",
            remedy=f"convert it without {setting('encode', 'raw')}",
        )
    sizes = _sizes_in_index(dataset)
    unknown = dataset.stored_rows(np.flatnonzero((sizes == 0).any(axis=1)))
    if len(unknown):
        raise UsageError(
            "Buckets needs the size of every image, and the index has none for "
            f"{describe_row(dataset.shards, int(unknown[0]))}",
            remedy="select the rows whose images have a known size",
        )
    return sizes


def _sizes_in_index(dataset: ShardDataset) -> Positions:
    """Return the size of each row's image; 0 where a row lacks it, or its header was not read."""
    sizes = np.empty((len(dataset), 2), np.int64)
    entries = dataset.shards.entries
    for start in range(0, len(dataset), _ENTRIES_AT_ONCE):
        rows = np.arange(start, min(start + _ENTRIES_AT_ONCE, len(dataset)))
        read = entries.read(dataset.stored_rows(rows))
        sizes[rows, 0], sizes[rows, 1] = read["height"], read["width"]
    return sizes
