"""Python objects as a source: any sequence of samples, such as dicts, or a PyTorch dataset."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardkit.codecs.decode_errors import raise_interruption
from shardkit.contracts import (
    Comparison,
    Entry,
    Images,
    PackedEntries,
    Scan,
    Source,
    StoredEntries,
)
from shardkit.errors import BadImage, CorruptDataset, UsageError, setting
from shardkit.kinds.field import Field, Schema, check_schema
from shardkit.kinds.packing import infer_field, pack
from shardkit.kinds.values import as_numpy
from shardkit.record import IMAGE, LABEL, META_FIELD, NO_LABEL, Record, dump_json
from shardkit.sources.given_pixels import other_pixels
from shardkit.sources.opening import SAMPLES, Described, SampleOptions
from shardkit.sources.row_log import CHUNK
from shardkit.sources.spool import Spool
from shardkit.system.text import name_list, quoted, shortened

_TRIALS = 32
"""Samples to read during a scan, to estimate the size of the others."""

_LONGEST = 200
"""Maximum characters of a message of an exception of the user's code."""

_MOST_CLASSES = 1 << 20
"""Maximum classes that are counted: a larger number is no label, but an ID."""

_PAIR = (IMAGE, LABEL)
"""The fields of a sample that is a tuple of two, as datasets of torchvision return it."""


FIRST = "first"
"""The entry of a description with the number of samples before these."""


class Samples(Source):
    """A sequence of samples as a `shardkit.contracts.Source`.

    ``samples`` is any object with ``len()`` and ``[number]``, picklable for several workers; or an
    iterable, which is read once, into a temporary file. Each sample is a tuple, or a dict of values
    by field, perhaps with its own ``key``.
    """

    kind = SAMPLES

    def __init__(self, samples: Any, options: SampleOptions | None = None) -> None:
        self._options = options or SampleOptions()
        self._name = type(samples).__name__
        if not _is_sequence(samples):
            if not hasattr(samples, "__iter__"):
                raise UsageError(
                    f"{self._name} is neither a sequence, with len() and [index], nor an iterable"
                )
            samples = Spool(samples)
        self._samples = samples
        self._names = self._options.fields
        self._first = 0
        self._is_keyed = False
        self._schema = self._complete(self._options.schema or {})

    @classmethod
    def restored(cls, samples: Any, schema: Schema, described: Described) -> Samples:
        """Return the samples that a dataset was made from."""
        description = next(iter(described.values()))
        first = description.get(FIRST, 0)
        if type(first) is not int or first < 0:
            raise CorruptDataset(f"the manifest counts {quoted(first)} samples before others")
        options = SampleOptions(schema=schema, fields=description.get("fields"))
        return cls(samples, options).after(first, with_keys=first > 0)  # some may be left out

    def __str__(self) -> str:
        return f"{self._name} of {len(self._samples)} samples"

    def paths(self) -> Sequence[Path]:
        """Return nothing: samples are in no folder that is known."""
        return []

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the samples, and estimate their size from some of them."""
        count = len(self._samples)
        label = self._schema.get(LABEL)
        names = None if label is None else label.classes
        if classes is not None and names is not None and tuple(classes) != names[: len(classes)]:
            raise UsageError(
                f"the classes of the samples, {name_list(names)}, differ from those of the "
                f"dataset: {name_list(classes)}; list new classes after these. Or convert the "
                "samples to a separate dataset, and append that"
            )
        size = self._mean_bytes()
        self._warn_if_random()
        starts = [*range(0, count, CHUNK), count]

        def load(chunk: int) -> list[Entry]:
            numbers = range(*starts[chunk : chunk + 2])
            return [
                Entry(_name(self._first + number), self._key(number), NO_LABEL, size, 0, number)
                for number in numbers
            ]

        few = count <= CHUNK
        entries = PackedEntries(load(0)) if few else StoredEntries(load, starts)
        return Scan(
            source=self,
            splits={"": Images(self, "", entries)},
            classes=names,
            fields=self._schema,
            known=False,
            understood={name: str(field) for name, field in self._schema.items()},
        )

    def after(
        self, count: int, *, with_keys: bool = False, optional: Collection[str] | None = None
    ) -> Samples:
        """Return the samples to append to ``count`` others.

        ``with_keys`` reads all samples, to list them with their own keys. The first sample may lack
        the fields ``optional``; None means all.
        """
        later = copy.copy(self)
        later._first = count
        later._is_keyed = with_keys
        if optional is not None:
            names = {*self._values(0)[1], *optional}
            later._schema = {name: self._schema[name] for name in self._schema if name in names}
        return later

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name of the samples' class, and those of the values of tuples."""
        first = {FIRST: self._first} if self._first else {}
        return {"name": self._name, **self._options.describe(), **first}

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of a sample."""
        return self.read_given(split, entry)[0]

    def read_given(self, split: str, entry: Entry) -> tuple[Record, Comparison]:
        """Return the record of a sample, and a comparison with its values, which are read once."""
        key, values = self._values(entry.place)
        if values.get(IMAGE) is None and {IMAGE} <= self._schema.keys() <= {IMAGE, LABEL}:
            raise BadImage("it has no image")
        fields: dict[str, bytes] = {}
        meta: dict[str, Any] = {"path": entry.path}
        for name, value in values.items():
            if value is None:
                continue
            if name not in self._schema:
                raise BadImage(f"the first sample and the schema have no field {quoted(name)}")
            stored, content = pack(name, self._schema[name], value)
            if stored:
                fields[stored] = content
            else:
                meta[name] = content
        record = Record(key or entry.key, {**fields, META_FIELD: dump_json(meta)})
        return record, partial(other_pixels, values)

    def locate(self, split: str, entry: Entry) -> str:
        """Return the number of a sample."""
        return f"sample {entry.place}"

    def only(self, entries: Sequence[Entry]) -> Samples:
        """Return a source with these samples alone, if they are in memory, for a worker process."""
        if not isinstance(self._samples, (list, tuple, Spool)):
            return self
        narrowed = copy.copy(self)
        numbers = [entry.place for entry in entries]
        if isinstance(self._samples, Spool):
            narrowed._samples = self._samples.only(numbers)
        else:
            narrowed._samples = {number: self._samples[number] for number in numbers}
        return narrowed

    def _key(self, number: int) -> str:
        """Return the key of a sample: its own, if those are wanted, or its number."""
        key = None
        if self._is_keyed:
            with suppress(BadImage):  # reported when its shard is built
                key, _ = self._values(number)
        return key or _name(number)

    def _values(self, number: int) -> tuple[str | None, Mapping[str, Any]]:
        """Return the key of a sample, if it has one, and its values."""
        try:
            sample = self._samples[number]
        except MemoryError:
            raise
        except Exception as error:
            raise_interruption(error)
            reason = shortened(f"{type(error).__name__}: {error}", _LONGEST)
            raise BadImage(f"it cannot be read: {reason}") from error
        if isinstance(sample, Mapping):
            values = {name: _file(value) for name, value in sample.items()}
            key = values.pop("key", None)
            if not isinstance(key, str | int | np.integer | None):
                raise BadImage(f"its key must be text or an integer, not {quoted(key)}")
            return None if key is None else str(key), values
        if isinstance(sample, tuple):
            names = self._names or _PAIR
            if len(names) == len(sample):
                return None, dict(zip(names, sample, strict=True))
            raise BadImage(
                f"it has {len(sample)} values, but {setting('fields')} lists {len(names)}"
            )
        raise BadImage(f"it is of type {type(sample).__name__}, not a dict or tuple")

    def _complete(self, fields: Mapping[str, Field | str]) -> dict[str, Field]:
        """Return the schema: the fields of the first sample, and those that are stated."""
        if not len(self._samples):
            raise UsageError("there are no samples")
        try:
            _, first = self._values(0)
            schema = {
                name: _field(fields[name]) if name in fields else self._infer(name, value)
                for name, value in first.items()
            }
            schema |= {name: _field(field) for name, field in fields.items() if name not in first}
            check_schema(schema)
        except BadImage as error:
            raise UsageError(f"the first sample: {error.problem}", remedy=error.remedy) from error
        except ValueError as error:
            raise_interruption(error)
            raise UsageError(str(error)) from error
        return schema

    def _infer(self, name: str, value: Any) -> Field:
        """Return the field of a value."""
        if name == LABEL:
            return Field("label", classes=self._classes())
        field = infer_field(name, value)
        if field is not None:
            return field
        raise ValueError(
            f"the {quoted(name)} field of the first sample is "
            f"{'missing' if value is None else f'of type {type(value).__name__}'}: pass "
            f"schema={{{name!r}: Field(...)}}"
        )

    def _classes(self) -> Sequence[str] | int:
        """Return the classes of the field ``label``: those that are stated, or all labels."""
        features = getattr(self._samples, "features", None)  # of Hugging Face
        feature = features.get(LABEL) if isinstance(features, Mapping) else None
        for names in _stated_classes(self._samples), getattr(feature, "names", None):
            if names is not None:
                return tuple(names)
        labels = self._samples[LABEL] if feature is not None else _stated_labels(self._samples)
        if labels is None and isinstance(self._samples, (list, tuple, Spool)):
            labels = map(self._label, range(len(self._samples)))
        if labels is None:
            raise ValueError(
                "the classes of the 'label' field are unknown: pass "
                "schema={'label': Field('label', classes=...)} with their names or their number"
            )
        return _classes_of(labels)

    def _label(self, number: int) -> Any:
        """Return the label of a sample, or None."""
        with suppress(BadImage):  # reported when its shard is built
            return self._values(number)[1].get(LABEL)
        return None

    def _warn_if_random(self) -> None:
        """Warn if the first sample differs when it is read again, as with a random transform."""
        entry = Entry(_name(0), _name(0), NO_LABEL, 0, 0)
        try:
            is_same = self.read("", entry) == self.read("", entry)
        except BadImage:
            return  # reported when its shard is built
        if not is_same:
            warnings.warn(
                f"sample 0 of {self._name} differs each time it is read. Each sample is stored "
                "once, but an interrupted conversion cannot resume with the same bytes, and "
                "verify(against=samples) reports differences. Derive random numbers from the "
                "sample's index, for example with torch.Generator().manual_seed(index)",
                stacklevel=4,
            )

    def _mean_bytes(self) -> int:
        """Return the mean size of some samples' records."""
        step = max(1, len(self._samples) // _TRIALS)
        sizes = []
        for number in itertools.islice(range(0, len(self._samples), step), _TRIALS):
            try:
                entry = Entry(_name(number), _name(number), NO_LABEL, 0, 0, number)
                record = self.read("", entry)
            except BadImage:
                continue  # reported when its shard is built
            sizes.append(sum(map(len, record.fields.values())))
        return sum(sizes) // len(sizes) if sizes else 1


def _name(number: int) -> str:
    return f"{number:09d}"


def _file(value: Any) -> Any:
    """Return the bytes or the path of an image that Hugging Face's `datasets` did not decode."""
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return value["bytes"] or (value["path"] and Path(value["path"]))
    return value


def _classes_of(labels: Iterable[Any]) -> Sequence[str] | int:
    """Return the sorted names among labels, or one more than the largest number."""
    values = {_scalar(label) for label in labels if label is not None}
    if all(isinstance(label, str) for label in values):
        return sorted(values)
    if all(type(label) is int and 0 <= label < _MOST_CLASSES for label in values):
        return 1 + int(max(values, default=-1))
    missing = "store a missing label as None, or " if -1 in values else ""
    raise ValueError(
        f"the labels are neither all names nor all numbers from 0 to {_MOST_CLASSES - 1}, such as "
        f"{name_list(sorted(map(repr, values)))}: {missing}pass schema={{'label': Field(...)}}"
    )


def _scalar(label: Any) -> Any:
    """Return a label as a number or text."""
    value = np.asarray(as_numpy(label))
    if value.ndim == 0 and value.dtype.kind != "O":
        return value.item()
    raise ValueError(
        f"a label is {shortened(repr(label), _LONGEST)}, neither a number nor a name: use "
        "another kind of field, as in convert(samples, ..., fields=('image', 'labels'), schema="
        "{'labels': Field('labels', classes=...)}); for several fields, samples must be dicts"
    )


def _stated_classes(samples: Any) -> Iterable[str] | None:
    """Return the class names that a torchvision dataset states, also inside a ``Subset``."""
    names: Iterable[str] | None = getattr(samples, "classes", None)
    if names is None and hasattr(samples, "indices"):
        return _stated_classes(getattr(samples, "dataset", None))
    return names


def _stated_labels(samples: Any) -> Sequence[Any] | None:
    """Return the labels that a dataset of torchvision or PyTorch holds in memory."""
    if hasattr(samples, "indices"):
        labels = _stated_labels(getattr(samples, "dataset", None))
        return None if labels is None else [labels[index] for index in samples.indices]
    tensors = getattr(samples, "tensors", None)
    if isinstance(tensors, tuple):
        return cast(Sequence[Any], tensors[-1]) if len(tensors) == len(_PAIR) else None
    for name in "targets", "labels", "_labels":  # CIFAR10, SVHN, Flowers102
        labels = getattr(samples, name, None)
        if isinstance(labels, Sized) and len(labels) == len(samples):
            return labels
    return None


def _is_sequence(samples: Any) -> bool:
    """Return whether samples have ``len()`` and ``[number]``, which PyTorch's iterables inherit."""
    if any(base.__name__ == "IterableDataset" for base in type(samples).__mro__):
        return False
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _field(field: Field | str) -> Field:
    return Field(field) if isinstance(field, str) else field
