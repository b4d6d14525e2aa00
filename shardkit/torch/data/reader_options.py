"""`ReaderOptions`: which fields of a dataset are read, and how they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from shardkit.dataset.opened import Fetching
from shardkit.dataset.shardset import ShardSet, open_shards, require_field
from shardkit.errors import UsageError, setting
from shardkit.kinds.field import BFLOAT16, Kind, Schema, get_kind
from shardkit.options import option, require_valid
from shardkit.record import IMAGE, LABEL
from shardkit.torch.data.batch_rows import RowWindows
from shardkit.torch.data.collate import PAIR, Layout
from shardkit.torch.data.images import Decode
from shardkit.torch.data.ops import ImageOp

if TYPE_CHECKING:
    from shardkit.orders.windows import Windows

Function = Callable[..., Any]
Transforms = Mapping[Any, Function]
"""Transforms by field, or by a tuple of fields. (The keys of a `Mapping` have no common type.)"""


@dataclass(frozen=True)
class ReaderOptions:
    """The options of datasets: the fields to read, and their decoding.

    Raises:
        UsageError: If an option is unknown.
    """

    transform: Function | ImageOp | Transforms | None = option(
        None,
        help="Applied to each image. An `ImageOp` works as if passed as ``decode``. A mapping "
        'sets the transform of each field, or of several together: ``{("image", "mask"): '
        "function}`` calls ``function(image, mask)``, which returns both.",
    )
    target_transform: Function | None = option(None, help="Applied to each label.")
    decode: Decode | Mapping[str, Decode] = option(
        "pil",
        help="Type of the images: ``pil`` for RGB images, ``numpy`` for uint8 of shape (height, "
        "width, 3), ``torch`` for uint8 of shape (3, height, width) in channels-last memory, "
        "``bytes`` for the stored bytes. Images of other types (``--pixels``) keep their "
        "channels and dtype, also in operations; ``pil`` requires a type that Pillow supports. "
        "An `ImageOp`, such as ``RandomResizedCrop(224)``, crops while decoding and returns "
        "images as ``torch`` does; it selects one crop for all images, masks, boxes and "
        "keypoints of a row. A mapping sets each field separately; boxes and keypoints then "
        "follow ``image``. Masks have the shape (height, width) and keep their values.",
    )
    _: KW_ONLY
    fields: Sequence[str] | None = option(
        None,
        help="Names of the fields to read, in this order. None means image and label, or all "
        "fields of a dataset without images.",
    )
    follow: Sequence[str] = option(
        (),
        help="Array fields of shape (channels, height, width), such as latents and heat maps, "
        "that an `ImageOp` crops, scales and flips along with the image. They keep their grid: a "
        "latent with one value per 8 x 8 pixels also has one per 8 x 8 pixels of the crop.",
    )
    as_dict: bool = option(
        False, help="Whether samples and batches are dicts by field name instead of tuples."
    )
    verify: bool | None = option(
        None,
        help="Whether each read verifies the record's checksum. None does so for encoded images, "
        "which costs about 3%, but not for raw pixels and arrays of one shape.",
    )
    view: int = option(
        0,
        help="Number of this view, starting at 0. Datasets over the same images draw different "
        "random numbers if their views differ, for example for two crops of each image.",
    )
    windows: Windows | None = option(
        None,
        help="Neighboring rows that each sample contains; see `Windows`. Samples are then dicts, "
        "images are tensors, and a transform receives a window.",
    )
    split: str | None = option(
        None, help="Name of a split, such as ``train``: the folder of that name in ``path``."
    )
    cache: str | PathLike[str] | None = option(
        None,
        help="A local folder for shards of a dataset in an object store. Whole shards are "
        "fetched ahead of time, once for all processes.",
    )
    cache_limit: int | str | None = option(
        None,
        help='Maximum bytes of shards in the cache, as a number or a text such as ``"50GB"``. The '
        "least recently used shards are evicted. None means no limit.",
    )
    root: str | PathLike[str] | None = option(
        None,
        help="Folder of the archives of an attached dataset; None means where `shardkit.attach` "
        "found them.",
    )

    def __post_init__(self) -> None:
        require_valid(self)
        if isinstance(self.transform, ImageOp) and self.decode not in ("pil", "torch"):
            raise UsageError(
                f"{setting('transform', self.transform)} decodes images itself, and "
                f"{setting('decode', self.decode)} is set too",
                remedy="leave out one of them",
            )
        if self.windows is not None and not isinstance(self.windows, RowWindows):
            raise UsageError(f"windows={self.windows!r} is not a shardkit.Windows(...)")

    def open(self, path: str | PathLike[str]) -> ShardSet:
        """Open the shards, in a local folder or in an object store."""
        fetching = Fetching(self.cache, self.cache_limit)
        return open_shards(path, self.split, verify=self.verify, root=self.root, fetching=fetching)


@dataclass(frozen=True)
class ReadFields:
    """The fields that samples hold."""

    shards: ShardSet
    layout: Layout
    """Their names, and how a batch holds them."""
    follow: tuple[str, ...]
    """Fields of arrays that move with the images."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each field; labels of an unlabeled dataset are -1."""
        schema = self.shards.schema
        return {
            name: schema[name].type if name in schema else get_kind(LABEL)
            for name in self.layout.names
        }

    @cached_property
    def pictures(self) -> list[str]:
        """The fields of images and masks."""
        return [name for name, kind in self.kinds.items() if kind.is_picture]

    @cached_property
    def leading(self) -> str | None:
        """The images that share their crops with other images, masks, boxes and keypoints."""
        return IMAGE if IMAGE in self.shards.schema else next(iter(self.pictures), None)


def choose_fields(shards: ShardSet, options: ReaderOptions) -> ReadFields:
    """Return the fields that options select; UsageError if arrays cannot follow an image."""
    schema = shards.schema
    names = options.fields
    if options.windows is not None:
        names = options.windows.names(names)
    if names is None:
        names = PAIR.names if IMAGE in schema else tuple(schema)
    else:
        names = tuple(names)
        for name in names:
            require_field(schema, name, shards.location)
        if not names or len(set(names)) != len(names):
            raise UsageError(f"fields={names} must list at least one field, each only once")
    layout = PAIR
    if names != PAIR.names or options.as_dict or options.windows is not None:
        listed = frozenset(name for name in names if _is_listed(schema, name))
        layout = Layout(names, options.as_dict or options.windows is not None, listed)
    return ReadFields(shards, layout, _following(schema, names, options.follow))


def _following(schema: Schema, read: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the fields of arrays that follow the image."""
    for name in names:
        if name not in read:
            raise UsageError(f"follow= has {name!r}, which is not read: fields= is {tuple(read)}")
        field = schema[name]
        movable = field.dtype in (None, BFLOAT16) or field.values.kind in "biuf"
        if field.kind != "array" or not movable or len(field.shape or range(3)) != 3:
            raise UsageError(
                f"follow= has {name!r}, {field}: only number arrays with shape (channels, height, "
                "width) can follow an image; masks, boxes and keypoints always do"
            )
    return tuple(names)


def _is_listed(schema: Schema, name: str) -> bool:
    field = schema.get(name)
    if field is None:
        return False
    return not field.type.is_picture and field.type.is_listed(field)
