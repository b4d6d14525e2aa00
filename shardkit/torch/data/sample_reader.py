"""Reads the fields of a batch: decodes, crops and transforms them, and groups them in windows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from shardkit.codecs.image import Decoding
from shardkit.errors import TransformFailed, UsageError, setting
from shardkit.record import IMAGE, LABEL
from shardkit.system.late import load
from shardkit.system.text import name_list
from shardkit.torch.data.batch_rows import BatchRows, WindowReader
from shardkit.torch.data.collate import Values
from shardkit.torch.data.images import DECODES, Decode, ImageReader, MaskReader, require_one_size
from shardkit.torch.data.ops import ImageOp
from shardkit.torch.data.reader_options import Function, ReadFields, Transforms
from shardkit.torch.data.values import read_apart, read_column

_FOLLOWING = "shardkit.torch.data.following:move_arrays"
"""Moves arrays with their image."""


class FieldTransforms(NamedTuple):
    """The options ``transform`` and ``target_transform``."""

    transform: Function | Transforms | None = None
    target_transform: Function | None = None

    @property
    def named(self) -> dict[str, Function]:
        """The transforms, by option or field."""
        if self.transform is None and self.target_transform is None:
            return {}
        named = {"transform": self.transform}
        if isinstance(self.transform, Mapping):
            named = {", ".join(_names(key)): value for key, value in self.transform.items()}
        named["target_transform"] = self.target_transform
        return {name: value for name, value in named.items() if value is not None}  # type: ignore[misc]

    def of(self, name: str) -> Function | None:
        """Return the transform of a field, unless it applies to other fields too."""
        if name == LABEL and self.target_transform is not None:
            return self.target_transform
        if self.transform is not None and isinstance(self.transform, Mapping):
            return self.transform.get(name)
        return self.transform if name == IMAGE else None

    @property
    def joint(self) -> dict[tuple[str, ...], Function]:
        """The transforms of several fields together."""
        if not isinstance(self.transform, Mapping):
            return {}
        return {key: function for key, function in self.transform.items() if isinstance(key, tuple)}

    def change(self, name: str) -> bool:
        """Return whether a transform applies to a field."""
        return self.of(name) is not None or any(name in names for names in self.joint)

    def applied(self, batch: BatchRows, name: str, values: Values) -> Values:
        """Return the values of a field after its own transform."""
        function = self.of(name)
        if function is None:
            return values
        numbered = enumerate(values.values)
        return Values([batch.transformed(name, function, value, n) for n, value in numbered])

    def apply_jointly(self, batch: BatchRows, columns: dict[str, Values]) -> None:
        """Replace the values of fields that have a transform together.

        Raises TransformFailed if one does not return a value for each of its fields.
        """
        for names, function in self.joint.items():
            field_names = ", ".join(names)
            results = []
            rows = zip(*(columns[name].values for name in names), strict=True)
            for number, values in enumerate(rows):
                result = batch.apply(field_names, function, values, number)
                if not isinstance(result, (tuple, list)) or len(result) != len(names):
                    raise TransformFailed(
                        f"the transform of {field_names} must return a tuple of {len(names)} "
                        f"values, in this order; it returned {type(result).__name__} for "
                        f"{batch.describe(number)}"
                    )
                results.append(result)
            for position, name in enumerate(names):
                columns[name] = Values([result[position] for result in results])

    def require_valid(self, fields: Sequence[str]) -> None:
        """Refuse transforms of other fields than those that are read, and two of one field."""
        if isinstance(self.transform, Mapping):
            names = [name for key in self.transform for name in _names(key)]
            require_known("transform", names, fields)
            if self.target_transform is not None and LABEL in names:
                raise UsageError(
                    f"{setting('transform')} and target_transform= both apply to the label",
                    remedy="leave out one of them",
                )
            if len(set(names)) < len(names):
                raise UsageError(
                    f"{setting('transform')} applies twice to a field: {', '.join(names)}"
                )
        for name, function in self.named.items():
            if not callable(function):
                raise UsageError(f"{setting(name, function)} must be a function")
        for keyword, name in (("transform", IMAGE), ("target_transform", LABEL)):
            value = getattr(self, keyword)
            if value is not None and not isinstance(value, Mapping) and name not in fields:
                raise UsageError(
                    f"{setting(keyword)} applies to the {name!r} field, which is not read: "
                    f"fields= is {fields}",
                    remedy="Use transform={NAME: function} for other fields",
                )


def require_known(option: str, names: Iterable[str], choices: Sequence[str]) -> None:
    """Refuse names of a mapping that are not among the choices."""
    for name in names:
        if name not in choices:
            raise UsageError(
                f"{option}={{{name!r}: ...}}",
                remedy=f"choose from {name_list(choices) or 'no field'}, of the fields that are "
                "read",
            )


def _names(key: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the fields that a key of ``transform`` names."""
    return key if isinstance(key, tuple) else (key,)


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
            if not (isinstance(decode, ImageOp) or (isinstance(decode, str) and decode in DECODES)):
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
                "views= and Buckets set the operation of images, but the dataset also has "
                f"{setting('decode', self.decode)}",
                remedy=f"open it without {setting('decode')}",
            )
        if not self.fields.pictures:
            raise UsageError(
                "views= and Buckets set an operation for images, but the dataset reads no images: "
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
            if self.transforms.transform is not None:
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
        if name != leading and leading is not None and isinstance(self.decode, ImageOp):
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
