"""Python objects as a source: any sequence of samples, such as dicts, or a PyTorch dataset."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from shardkit.codecs.image import SNIFF_BYTES, encode_mask, sniff
from shardkit.contracts import Entry, Images, PackedEntries, Scan
from shardkit.errors import BadImage, Problem, UsageError
from shardkit.record import (
    BFLOAT16,
    IMAGE,
    LABEL,
    LABEL_FIELD,
    META_FIELD,
    NO_LABEL,
    Field,
    Record,
    check_schema,
    dump_json,
)
from shardkit.sources.images import image_field_of
from shardkit.sources.spool import Spool
from shardkit.system.npy import npy_header
from shardkit.system.text import quoted, shortened

_TRIALS = 32
"""Samples to read during a scan, to estimate the size of the others."""

_LONGEST = 200
"""Maximum characters of a message of an exception of the user's code."""

_PAIR = (IMAGE, LABEL)
"""The fields of a sample that is a tuple of two, as datasets of torchvision return it."""


class Sample:
    """A sample with a key of its own: ``Sample(key="cat/7", image=..., label=...)``."""

    def __init__(self, key: str | None = None, **fields: Any) -> None:
        self.key = key
        """The record's key; None means the sample's number."""
        self.fields = fields
        """The value of each field; None where the sample lacks it."""


class Samples:
    """A sequence of samples as a `shardkit.contracts.Source`.

    Args:
        samples: Any object with ``len()`` and ``[number]``, or an iterable, which is read once,
            into a temporary file. Each sample is a dict of values by field, a `Sample`, or a
            tuple. It must be picklable for several workers.
        schema: The fields, by name: a `shardkit.record.Field`, or a kind. Fields that it lacks
            follow from the first sample.
        fields: Names of the values, if samples are tuples; image and label for two of them.
    """

    kind = "samples"

    def __init__(
        self,
        samples: Any,
        *,
        schema: Mapping[str, Field | str] | None = None,
        fields: Sequence[str] | None = None,
    ) -> None:
        self._name = type(samples).__name__
        if not _is_sequence(samples):
            if not hasattr(samples, "__iter__"):
                raise UsageError(
                    f"{self._name} is neither a sequence, with len() and [number], nor an iterable"
                )
            samples = Spool(samples)
        self._samples = samples
        self._names = fields
        self._schema = self._complete(schema or {})

    def __str__(self) -> str:
        return f"{self._name} of {len(self._samples)} samples"

    def paths(self) -> Sequence[Path]:
        """Return nothing: samples are in no folder that is known."""
        return []

    def scan(self, classes: Sequence[str] | None = None) -> Scan:
        """List the samples, and estimate their size from some of them.

        Raises:
            UsageError: If there are none, or ``classes`` are not those of the schema.
        """
        count = len(self._samples)
        label = self._schema.get(LABEL)
        names = None if label is None else label.classes
        if classes is not None and tuple(classes) != (names or ()):
            raise UsageError("the classes of the samples differ from those of the dataset")
        size = self._mean_bytes()
        self._warn_if_random()
        entries = PackedEntries(
            Entry(f"{number:09d}", f"{number:09d}", NO_LABEL, size, 0) for number in range(count)
        )
        return Scan(
            source=self,
            splits={"": Images(self, "", entries)},
            classes=names,
            fields=self._schema,
            known=False,
            understood={name: str(field) for name, field in self._schema.items()},
        )

    def describe(self, split: str) -> Mapping[str, Any]:
        """Return the name of the samples' class, and those of the values of tuples."""
        named = {} if self._names is None else {"fields": list(self._names)}
        return {"name": self._name, **named}

    def read(self, split: str, entry: Entry) -> Record:
        """Return the record of a sample.

        Raises:
            BadImage: If it cannot be read, or a value is not one of its field.
        """
        key, values = self._values(int(entry.path))
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
        return Record(key or entry.key, {**fields, META_FIELD: dump_json(meta)})

    def locate(self, split: str, entry: Entry) -> str:
        """Return the number of a sample."""
        return f"sample {int(entry.path)}"

    def relist(self, scan: Scan, split: str, skipped: Sequence[Problem]) -> Sequence[Entry]:
        """Return all samples: bad ones keep their number."""
        return scan.splits[split].entries if split in scan.splits else ()

    def only(self, entries: Sequence[Entry]) -> Samples:
        """Return a source with these samples alone, if they are in memory, for a worker process."""
        if not isinstance(self._samples, (list, tuple, Spool)):
            return self
        found = Samples.__new__(Samples)
        vars(found).update(vars(self))
        numbers = [int(entry.path) for entry in entries]
        if isinstance(self._samples, Spool):
            found._samples = self._samples.only(numbers)
        else:
            found._samples = {number: self._samples[number] for number in numbers}
        return found

    def _values(self, number: int) -> tuple[str | None, Mapping[str, Any]]:
        """Return the key of a sample, if it has one, and its values.

        Raises:
            BadImage: If it cannot be read.
        """
        try:
            sample = self._samples[number]
        except MemoryError:
            raise
        except Exception as error:
            reason = shortened(f"{type(error).__name__}: {error}", _LONGEST)
            raise BadImage(f"it cannot be read: {reason}") from error
        if isinstance(sample, Sample):
            return sample.key, sample.fields
        if isinstance(sample, Mapping):
            values = dict(sample)
            key = values.pop("key", None)
            return None if key is None else str(key), values
        if isinstance(sample, tuple):
            names = self._names or _PAIR
            if len(names) == len(sample):
                return None, dict(zip(names, sample, strict=True))
            raise BadImage(f"it has {len(sample)} values; fields names {len(names)}")
        raise BadImage(f"it is of type {type(sample).__name__}, not a dict, tuple or Sample")

    def _complete(self, stated: Mapping[str, Field | str]) -> dict[str, Field]:
        """Return the schema: the fields of the first sample, and those that are stated.

        Raises:
            UsageError: If there are no samples, or a field is unclear.
        """
        if not len(self._samples):
            raise UsageError("there are no samples")
        try:
            _, first = self._values(0)
            schema = {
                name: _field(stated[name]) if name in stated else self._infer(name, value)
                for name, value in first.items()
            }
            schema |= {name: _field(field) for name, field in stated.items() if name not in first}
            check_schema(schema)
        except BadImage as error:
            raise UsageError(f"the first sample: {error}") from error
        except ValueError as error:
            raise UsageError(str(error)) from error
        return schema

    def _infer(self, name: str, value: Any) -> Field:
        """Return the field of a value.

        Raises:
            ValueError: If it is unclear.
        """
        value = _as_numpy(value)
        if name == LABEL:
            classes = getattr(self._samples, "classes", None)
            if classes is None:
                raise ValueError(
                    "the classes of the field 'label' are unknown: pass schema={'label': "
                    "Field('label', classes=...)} with their names or their number"
                )
            return Field("label", classes=tuple(classes))
        if name in (IMAGE, "mask", "boxes", "keypoints"):
            return Field(name)
        for kinds, make in _INFERRED:
            if isinstance(value, kinds):
                found: Field = make(value)
                return found
        raise ValueError(
            f"the field {quoted(name)} of the first sample is "
            f"{'missing' if value is None else 'a ' + type(value).__name__}: pass "
            f"schema={{{name!r}: Field(...)}}"
        )

    def _warn_if_random(self) -> None:
        """Warn if the first sample differs when it is read again, as with a random transform."""
        entry = Entry(f"{0:09d}", f"{0:09d}", NO_LABEL, 0, 0)
        try:
            is_same = self.read("", entry) == self.read("", entry)
        except BadImage:
            return  # reported when its shard is built
        if not is_same:
            warnings.warn(
                f"sample 0 of {self._name} differs each time it is read. Each sample is stored "
                "once, but an interrupted conversion cannot resume to the same bytes, and "
                "verify(against=samples) finds differences. Derive random numbers from the "
                "sample's number, for example with torch.Generator().manual_seed(number)",
                stacklevel=4,
            )

    def _mean_bytes(self) -> int:
        """Return the mean size of some samples' records."""
        step = max(1, len(self._samples) // _TRIALS)
        sizes = []
        for number in itertools.islice(range(0, len(self._samples), step), _TRIALS):
            try:
                record = self.read("", Entry(f"{number:09d}", f"{number:09d}", NO_LABEL, 0, 0))
            except BadImage:
                continue  # reported when its shard is built
            sizes.append(sum(map(len, record.fields.values())))
        return sum(sizes) // len(sizes) if sizes else 1


def _is_sequence(samples: Any) -> bool:
    """Return whether samples have ``len()`` and ``[number]``, which PyTorch's iterables inherit."""
    if any(base.__name__ == "IterableDataset" for base in type(samples).__mro__):
        return False
    return hasattr(samples, "__len__") and hasattr(samples, "__getitem__")


def _field(stated: Field | str) -> Field:
    return Field(stated) if isinstance(stated, str) else stated


def _infer_bytes(value: bytes) -> Field:
    return Field("image" if sniff(value[:SNIFF_BYTES]) else "bytes")


def _infer_path(value: Path) -> Field:
    return _infer_bytes(value.read_bytes()) if value.is_file() else Field("bytes")


def _infer_array(value: npt.NDArray[Any] | _BFloat16) -> Field:
    dtype = BFLOAT16 if isinstance(value, _BFloat16) else str(value.dtype)
    shape = np.shape(value)
    if 0 in shape:
        return Field("array", dtype)
    return Field("array", dtype, shape) if shape else Field("number", dtype)


class _BFloat16(np.ndarray):
    """The bits of a bfloat16 tensor, as uint16."""


_INFERRED: tuple[tuple[Any, Any], ...] = (
    (Image.Image, lambda _: Field("image")),
    ((bytes, bytearray, memoryview), lambda value: _infer_bytes(bytes(value))),
    (Path, _infer_path),
    (str, lambda _: Field("text")),
    ((np.ndarray, np.generic), _infer_array),
    (bool, lambda _: Field("number", "bool")),
    (int, lambda _: Field("number", "int64")),
    (float, lambda _: Field("number", "float64")),
    ((dict, list, tuple), lambda _: Field("json")),
)
"""The field of a value, by its type; the first that fits."""


def _as_numpy(value: Any) -> Any:
    """Return a tensor as an array, and anything else unchanged."""
    if not (hasattr(value, "detach") and hasattr(value, "cpu")):
        return value
    tensor = value.detach().cpu().contiguous()
    if str(tensor.dtype) == "torch.bfloat16":
        bits = tensor.view(sys.modules["torch"].int16).numpy()
        return bits.view(np.uint16).view(_BFloat16)
    return tensor.numpy()


def _pack_image(name: str, field: Field, value: Any) -> tuple[str, bytes]:
    before = "" if name == IMAGE else f"{name}."
    if isinstance(value, (str, Path)):
        value = Path(value).read_bytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return before + image_field_of(io.BytesIO(data)), data
    if not isinstance(value, Image.Image):
        array = np.asarray(_as_numpy(value))
        if array is not value and not isinstance(value, np.ndarray) and array.ndim == 3:
            array = np.moveaxis(array, 0, -1)  # tensors have channels first
        if field.kind == "mask":
            return f"{before}png", encode_mask(_mask_values(array))
        if array.dtype != np.uint8:
            raise ValueError(f"an image of {array.dtype}; use uint8, or a field of the kind array")
        value = Image.fromarray(array[..., 0] if array.shape[2:] == (1,) else array)
    elif field.kind == "mask" and value.mode not in ("1", "L", "P", "RGB", "RGBA", "LA"):
        return f"{before}png", encode_mask(_mask_values(np.asarray(value)))
    file = io.BytesIO()
    value.save(file, "PNG")
    return f"{before}png", file.getvalue()


def _mask_values(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the values of a mask as uint8, or uint16 if they need it."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.dtype.kind not in "biu":
        raise ValueError(f"a mask of {array.dtype}; use integers, or a field of the kind array")
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"a mask with values from {low} to {high}; 0 to 65535 are possible")
    fits = array.dtype.itemsize == 1 or (array.dtype != np.uint16 and high < 256)
    return array.astype(np.uint8 if fits else np.uint16)


def _pack_array(name: str, field: Field, value: Any) -> tuple[str, bytes]:
    array = _as_numpy(value)
    if isinstance(array, (str, Path)):
        array = np.load(array, allow_pickle=False)
    array = np.asanyarray(array)
    dtype = BFLOAT16 if isinstance(array, _BFloat16) else array.dtype
    found = Field("array", str(dtype)).dtype
    if field.dtype is not None and found != field.dtype:
        raise ValueError(f"it is of {found}; the schema states {field.dtype}")
    if field.shape is not None and array.shape != field.shape:
        raise ValueError(f"it has the shape {array.shape}; the schema states {field.shape}")
    values = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    stored = str(field.stored_name(name))
    header = b"" if field.is_uniform else npy_header(array.shape, values.dtype)
    return stored, header + values.tobytes()


def _pack_bytes(name: str, field: Field, value: Any) -> tuple[str, bytes]:
    data = value.read_bytes() if isinstance(value, Path) else bytes(memoryview(value))
    return str(field.stored_name(name)), data


def _pack_text(name: str, field: Field, value: Any) -> tuple[str, bytes]:
    if not isinstance(value, str):
        raise TypeError(f"it is of type {type(value).__name__}, not a text")
    return str(field.stored_name(name)), value.encode()


def _pack_number(name: str, field: Field, value: Any) -> tuple[None, Any]:
    given = np.asarray(_as_numpy(value))
    if given.size != 1 or given.dtype.kind not in "biuf":
        raise TypeError(f"it is not a number: {shortened(str(value), 40)}")
    with np.errstate(over="ignore"):
        stored = given.reshape(()).astype(field.values)
    rounds = field.values.kind == "f" and np.isfinite(stored)  # as in NumPy: 0.1 in float32
    if stored != given and not (rounds or np.isnan(given)):
        raise ValueError(f"{value} is not a number of the type {field.dtype}")
    number = stored.item()
    if isinstance(number, float) and not math.isfinite(number):
        return None, "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return None, number


def _pack_label(name: str, field: Field, value: Any) -> tuple[str | None, Any]:
    label = _label(field, value)
    stored = field.stored_name(name)
    return stored, b"%d" % label if stored == LABEL_FIELD else label


def _pack_labels(name: str, field: Field, value: Any) -> tuple[None, Any]:
    return None, sorted({_label(field, each) for each in _listed(value)})


def _label(field: Field, value: Any) -> int:
    """Return the number of a class, given as a number or name."""
    classes = field.classes or ()
    if isinstance(value, str):
        if value not in classes:
            raise ValueError(f"{quoted(value)} is not one of {len(classes)} classes")
        return classes.index(value)
    given = np.asarray(_as_numpy(value))
    if given.size != 1 or given.dtype.kind not in "iu":
        raise TypeError(f"it is not a label: {shortened(str(value), 40)}")
    label = int(given.reshape(()))
    if not 0 <= label < len(classes):
        raise ValueError(f"the label {label} is not from 0 to {len(classes) - 1}")
    return label


def _pack_json(name: str, field: Field, value: Any) -> tuple[None, Any]:
    json.dumps(value, allow_nan=False)
    return None, value


def _pack_boxes(name: str, field: Field, value: Any) -> tuple[None, Any]:
    labels: Iterable[Any] = ()
    if isinstance(value, Mapping):
        value, labels = value["boxes"], value.get("labels", ())
    elif isinstance(value, tuple) and len(value) == 2 and field.classes is not None:
        value, labels = value
    corners = np.asarray(_as_numpy(value), np.float64)
    corners = corners.reshape(0, 4) if not corners.size else corners
    if corners.ndim == 2 and corners.shape[1] == 5 and field.classes is not None:
        corners, labels = corners[:, :4], corners[:, 4].astype(int)
    if corners.ndim != 2 or corners.shape[1] != 4 or not np.isfinite(corners).all():
        raise ValueError(f"boxes are four numbers each, not an array of shape {corners.shape}")
    if (corners[:, :2] > corners[:, 2:]).any():
        raise ValueError("boxes are left, top, right, bottom: one ends before it starts")
    if field.classes is None:
        if _listed(labels):
            raise ValueError("the boxes have labels: use Field('boxes', classes=...)")
        return None, corners.tolist()
    known = [_label(field, each) for each in _listed(labels)]
    if len(known) != len(corners):
        raise ValueError(f"{len(corners)} boxes have {len(known)} labels")
    return None, [[*box, label] for box, label in zip(corners.tolist(), known, strict=True)]


def _pack_keypoints(name: str, field: Field, value: Any) -> tuple[None, Any]:
    points = np.asarray(_as_numpy(value), np.float64)
    points = points.reshape(0, 3) if not points.size else points
    if points.ndim > 1 and points.shape[-1] == 2:
        points = np.concatenate([points, np.full_like(points[..., :1], 2)], axis=-1)  # visible
    if points.ndim < 2 or points.shape[-1] != 3 or not np.isfinite(points).all():
        raise ValueError(
            f"keypoints are x, y and perhaps a visibility each, not an array of shape "
            f"{points.shape}: use numpy.reshape(points, (-1, 3)) for COCO's lists"
        )
    points = points.reshape(-1, 3)
    if not np.isin(points[:, 2], (0, 1, 2)).all():
        raise ValueError("the visibility of a keypoint is 0, 1 or 2, as in COCO")
    if field.classes is not None and len(points) % len(field.classes):
        raise ValueError(f"{len(points)} keypoints are not objects of {len(field.classes)} points")
    return None, [[x, y, int(visibility)] for x, y, visibility in points.tolist()]


def _listed(value: Any) -> list[Any]:
    value = _as_numpy(value)
    return value.tolist() if isinstance(value, np.ndarray) else list(value)


_PACKERS: dict[str, Any] = {
    "image": _pack_image,
    "mask": _pack_image,
    "array": _pack_array,
    "bytes": _pack_bytes,
    "number": _pack_number,
    "label": _pack_label,
    "labels": _pack_labels,
    "text": _pack_text,
    "json": _pack_json,
    "boxes": _pack_boxes,
    "keypoints": _pack_keypoints,
}
"""Functions that return the stored name and bytes of a value, or None and JSON values."""


def pack(name: str, field: Field, value: Any) -> tuple[str | None, Any]:
    """Return the stored name and bytes of a value, or None and its value in the metadata.

    Raises:
        BadImage: If the value is not one of the field.
    """
    try:
        packed: tuple[str | None, Any] = _PACKERS[field.kind](name, field, value)
    except BadImage as error:
        raise BadImage(f"{name}: {error}") from error
    except (ValueError, TypeError, OverflowError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename} cannot be read: {error.strerror}"
        raise BadImage(f"{name}: {shortened(reason, _LONGEST)}") from error
    return packed
