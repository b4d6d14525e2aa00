"""Reads the fields of a batch: decodes, crops and transforms them, and groups them in windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from shardkit.codecs.image import Decoding
from shardkit.errors import UsageError, setting
from shardkit.record import LABEL
from shardkit.system.late import load
from shardkit.torch.data.batch_rows import BatchRows, WindowReader
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import DECODES, Decode, ImageReader, MaskReader, require_one_size
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.reader_options import ReadFields
from shardkit.torch.data.transforms import FieldTransforms, require_known
from shardkit.torch.data.values import read_apart, read_column

_FOLLOWING = "shardkit.torch.data.following:move_arrays"
"""Moves arrays with their image."""


class SampleReader(NamedTuple):
    """Reads samples of a dataset with its current options."""

    fields: ReadFields
    decode: Decode | Mapping[str, Decode]
    transforms: FieldTransforms
    windows: WindowReader | None
    decoding: Decoding

    def require_valid(self) -> None:
        """Check ``decode`` and the transforms, each of which must be for a field that is read."""
        by_field = self.decode if isinstance(self.decode, Mapping) else {"": self.decode}
        for decode in by_field.values():
            if not isinstance(decode, ImageOp) and decode not in DECODES:
                raise UsageError(
                    f"{setting('decode', decode)} is unknown;",
                    remedy=f"choose from {', '.join(DECODES)}, or pass an operation, without "
                    "quotes: decode=shardkit.CenterCrop(224)",
                )
        if isinstance(self.decode, Mapping):
            require_known("decode", self.decode, self.fields.pictures)
        self.transforms.require_valid(self.fields.layout.names)

    def decode_of(self, name: str) -> Decode:
        """Return the type of the images of a field."""
        if isinstance(self.decode, (str, ImageOp)):
            return self.decode
        return self.decode.get(name, "pil")

    @property
    def decodes(self) -> dict[str, Decode]:
        """The type of the images of each field of images or masks."""
        return {name: self.decode_of(name) for name in self.fields.pictures}

    def with_op(self, op: ImageOp) -> SampleReader:
        """Return a reader with ``decode=op``.

        Raises UsageError if the dataset sets ``decode`` itself, or reads no images.
        """
        if self.decode not in ("pil", "torch"):
            raise UsageError(
                "views= and Buckets set the operation of images, and the dataset has "
                f"{setting('decode', self.decode)} too",
                remedy=f"open it without {setting('decode')}",
            )
        if not self.fields.pictures:
            raise UsageError(
                f"views= and Buckets set an operation for images, and the dataset reads none: "
                f"fields= is {self.fields.layout.names}"
            )
        return self._replace(decode=op)

    def read_views(self, batches: Sequence[BatchRows]) -> list[dict[str, Values]]:
        """Return the fields of each view of the rows of a batch, by name."""
        ops = [batch.context.op for batch in batches]
        readers = [self if op is None else self.with_op(op) for op in ops]
        views: list[dict[str, Values]] = [{} for _ in batches]
        for name in self.fields.layout.names:
            for columns, values in zip(views, _read(readers, batches, name), strict=True):
                columns[name] = values
        for batch, columns in zip(batches, views, strict=True):
            if self.windows is not None:
                for name in self.windows.fields:
                    columns[f"{name}_is_pad"] = self.windows.padding(name, batch)
            self.transforms.apply_jointly(batch, columns)
        return views

    def _read_window(self, windows: WindowReader, batch: BatchRows, name: str) -> Values:
        """Return the windows of a field, transformed."""
        frames = self._replace(windows=None, transforms=FieldTransforms())
        kind = self.fields.kinds[name]
        op = self.decode_of(name if kind.is_picture else self.fields.leading or name)
        moves = kind.is_picture or kind.follows or name in self.fields.follow
        drawn = isinstance(op, ImageOp) and op.random and moves
        values = windows.read(
            name, batch, lambda rows: _read([frames], [rows], name)[0], drawn=drawn
        )
        return self.transforms.applied(batch, name, values)

    def _image_reader(self, batch: BatchRows, name: str) -> ImageReader:
        """Return a reader of images or masks."""
        leading = self.fields.leading
        if isinstance(self.decode, ImageOp) and leading is not None and name != leading:
            require_one_size(batch, leading, name)
        reader = MaskReader if self.fields.kinds[name].follows else ImageReader
        decode = self.decode_of(name)
        return reader(batch, name, decode, self.transforms.of(name), self.decoding)

    def _read_value(self, batch: BatchRows, name: str) -> Values:
        """Return the values of a field without pixels, before its transform."""
        if name == LABEL:
            labels = batch.labels()
            return Values(labels.tolist(), torch.from_numpy(labels))
        leading = self.fields.leading
        decode = None if leading is None else self.decode_of(leading)
        op = decode if isinstance(decode, ImageOp) else None
        if not self.fields.kinds[name].stored_apart:
            return read_column(batch, name, op, leading)
        values = read_apart(batch, name, self.fields.shards.schema[name])
        if op is None or leading is None or name not in self.fields.follow:
            return values
        moved: Values = load(_FOLLOWING)(batch, name, values, op, leading)
        return moved


def _read(readers: Sequence[SampleReader], batches: Sequence[BatchRows], name: str) -> list[Values]:
    """Return the values of a field in each view of a batch, given the view's reader."""
    first = readers[0]
    views = list(zip(readers, batches, strict=True))
    windows = first.windows
    if windows is not None and name in windows.fields:
        return [reader._read_window(windows, batch, name) for reader, batch in views]
    if first.fields.kinds[name].is_picture:
        images = [reader._image_reader(batch, name) for reader, batch in views]
        return type(images[0]).read_views(images)
    return [
        reader.transforms.applied(batch, name, reader._read_value(batch, name))
        for reader, batch in views
    ]
