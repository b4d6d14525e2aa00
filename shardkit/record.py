"""The record: one stored, encoded example, the fields it may have, and the rules for its names.

Nothing here knows about files, formats or decoding.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import numpy as np
import numpy.typing as npt

from shardkit.system import native
from shardkit.system.text import quoted

IMAGE_FIELDS = ("jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "raw")
"""The names of image fields, in the order of their codes in the index.

Part of format version 1: entries may be appended, never moved. ``raw`` is uint8 pixels in the order
height, width, channel, all of the manifest's ``raw_shape``.
"""

STORED_KINDS = (*IMAGE_FIELDS, "npy", "bin", "absent")
"""What an entry of the index describes, in the order of its codes: an image, an array, bytes, or
nothing, where the row lacks the field. Part of format version 1, like `IMAGE_FIELDS`."""

ABSENT = "absent"
"""The entry of a row that lacks the field, in `STORED_KINDS`."""

FOREIGN_FIELD = "foreign"
"""The field of a source's image that can be stored only re-encoded by a recipe."""

LABEL_FIELD = "cls"
"""The field of the label: a non-negative decimal integer in ASCII, as in WebDataset."""

META_FIELD = "json"
"""The field of the metadata, a JSON object: ``path``, ``width``, ``height`` and notes."""

NO_LABEL = -1
"""The label of an unlabeled record, wherever a number is needed."""

MAX_KEY_BYTES = 1 << 14
"""Maximum length of a key: the longest possible file path, percent-encoded, takes 12 KiB."""

KINDS = (
    *("image", "mask", "array", "bytes"),
    *("number", "label", "labels", "text", "json", "boxes", "keypoints"),
)
"""The kinds of fields. The first four have bytes, which the index locates. The others are small,
and the index holds their values as columns."""

STORED_APART = ("image", "mask", "array", "bytes")
"""The `KINDS` with bytes of their own."""

IMAGE, LABEL = "image", "label"
"""The names of the primary image and the primary label, which training code gets by default."""

RESERVED = frozenset(
    (
        "key",
        "path",
        "width",
        "height",
        "orientation",
        "frames",
        "small",
        "odd",
        "damaged",
        "dropped",
    )
)
"""Names that no field may have: the metadata use them."""

BFLOAT16 = "bfloat16"
"""The one `Field.dtype` that NumPy lacks; stored as ``<u2``."""

_SUFFIXES = {"array": "npy", "bytes": "bin", "text": "txt"}
"""The last part of the stored name of each kind that has a name of its own in a record."""

_DTYPE = re.compile(r"[<>|=]?[a-zA-Z]{1,12}[0-9]{0,6}(?:\[[0-9a-zA-Z]{1,8}\])?")
"""What the name of a type looks like; NumPy would also parse lists of types."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
_FIELD_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,31}(?:\.[a-z0-9][a-z0-9_]{0,31})?\Z")
_UNQUOTED = re.compile(r"[A-Za-z0-9_~/-]*")


@dataclass(frozen=True, slots=True)
class Record:
    """One stored example: a key and named fields of bytes.

    Raises:
        ValueError: If the key is empty or longer than `MAX_KEY_BYTES`, or a field's name is not
            one or two parts ``[a-z0-9][a-z0-9_]*`` of at most 32 characters, with a dot between.
    """

    key: str
    """The record's unique name in its dataset, from `make_keys`."""

    fields: Mapping[str, bytes]
    """The bytes of each field, by stored name: ``jpg``, ``mask.png``, ``json``."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a record needs a key of at least one character")
        if len(self.key) > MAX_KEY_BYTES:
            raise ValueError(
                f"the key {quoted(self.key)} has {len(self.key)} characters; "
                f"use at most {MAX_KEY_BYTES}"
            )
        for name in self.fields:
            if not is_field_name(name):
                raise ValueError(
                    f"field name {quoted(name)} of record {quoted(self.key)}: use 1 to 32 of "
                    "a-z, 0-9 and '_', starting with a letter or a digit, or two of these with a "
                    "dot between"
                )

    @property
    def image_field(self) -> str | None:
        """The name of the image's field, or None without an image."""
        return image_field(self.fields)

    @property
    def label(self) -> int:
        """The label, or `NO_LABEL`.

        Raises:
            ValueError: If the label's field is not a non-negative decimal integer.
        """
        return parse_label(self.fields[LABEL_FIELD]) if LABEL_FIELD in self.fields else NO_LABEL

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata: the JSON object in `META_FIELD`, empty without that field.

        Raises:
            ValueError: If the field is not a JSON object.
        """
        return load_json(self.fields.get(META_FIELD, b"{}"))


@lru_cache(maxsize=256)
def is_field_name(name: str) -> bool:
    """Return whether ``name`` is a valid stored name: see `Record`."""
    return _FIELD_NAME.match(name) is not None


def image_field(names: Iterable[str], field: str = IMAGE) -> str | None:
    """Return the stored name of an image among ``names``, or None.

    Args:
        names: Stored names.
        field: Name of the image in the schema: ``mask`` is stored as ``mask.png``.
    """
    if field == IMAGE:
        for name in names:
            if name in IMAGE_FIELDS:
                return name
        return None
    for name in names:
        before, dot, kind = name.partition(".")
        if before == field and dot and kind in IMAGE_FIELDS:
            return name
    return None


def is_raw(stored: str) -> bool:
    """Return whether a stored name is that of raw pixels: ``raw`` or ``depth.raw``."""
    return stored == "raw" or stored.endswith(".raw")


@dataclass(frozen=True, init=False)
class Field:
    """A named part of all records of a dataset."""

    kind: str
    """One of `KINDS`. A mask is an image whose pixels are classes or measurements: it is scaled by
    nearest neighbor and stored without loss."""

    dtype: str | None
    """Type of an array's or number's values: a NumPy name, or ``bfloat16``."""

    shape: tuple[int, ...] | None
    """Shape of every array; None if it varies."""

    classes: tuple[str, ...] | None
    """Class names of a label, of labels, or of the labels of boxes, which have none without; of
    keypoints the names of an object's points."""

    def __init__(
        self,
        kind: str,
        dtype: npt.DTypeLike | None = None,
        shape: Iterable[int] | None = None,
        classes: Iterable[str] | int | None = None,
    ) -> None:
        """Describe a field.

        Args:
            kind: One of `KINDS`.
            dtype: Type of an array's or number's values, such as ``"float16"`` or ``"bfloat16"``.
            shape: Shape of every array; None if it varies.
            classes: Names or number of the classes of a label, of labels, or of boxes; of keypoints
                those of the points of each object. If an image is flipped, points whose names
                differ in ``left`` and ``right`` change places.

        Raises:
            ValueError: If the kind is unknown, or does not go with the other values.
        """
        if isinstance(classes, int):
            classes = map(str, range(classes))
        values = {
            "kind": kind,
            "dtype": _dtype_name(dtype),
            "shape": None if shape is None else tuple(map(int, shape)),
            "classes": None if classes is None else tuple(map(str, classes)),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the kind {quoted(self.kind)} is unknown; use {', '.join(KINDS)}")
        if (self.dtype is not None) != (self.kind == "number") and self.kind != "array":
            raise ValueError(f"a {self.kind} has {'a' if self.dtype is None else 'no'} dtype")
        if self.kind == "number" and np.dtype(self.dtype).kind not in "biuf":
            raise ValueError(f"a number has no dtype {self.dtype}; use an array")
        if self.shape is not None:
            if self.kind != "array" or self.dtype is None:
                raise ValueError("only an array of a stated dtype has a shape")
            if len(self.shape) > _MOST_AXES or not 0 < self.bytes < 1 << 32:
                raise ValueError(f"the shape {self.shape} is out of range")
            if min(self.shape, default=1) < 1:
                raise ValueError(f"the shape {self.shape} has an empty axis: leave the shape out")
        classes = self.classes
        if len(set(classes or ())) != len(classes or ()):
            raise ValueError("two classes have one name")
        if classes is None and self.kind in ("label", "labels"):
            raise ValueError(
                f"the classes are missing: give their names or their number, as in "
                f"Field({self.kind!r}, classes=10)"
            )
        if classes is not None and self.kind not in ("label", "labels", "boxes", "keypoints"):
            raise ValueError(f"a {self.kind} has no classes")
        if self.kind == "keypoints" and classes == ():
            raise ValueError("an object has at least one keypoint: leave the classes out")

    def __str__(self) -> str:
        return field_in_words(self.kind, self.dtype, self.shape, len(self.classes or ()))

    @property
    def values(self) -> np.dtype[Any]:
        """The type of the stored values; little-endian."""
        if self.dtype == BFLOAT16:
            return np.dtype("<u2")
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def bytes(self) -> int:
        """Bytes of the values of an array of a stated shape."""
        return math.prod(self.shape or ()) * self.values.itemsize

    @property
    def is_uniform(self) -> bool:
        """Whether all values are arrays of one dtype and shape, stored end to end."""
        return self.shape is not None

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of this field, called ``name``; None in the metadata.

        The name of an image also depends on its encoding: see `image_field`.
        """
        if self.kind == "label" and name == LABEL:
            return LABEL_FIELD
        suffix = _SUFFIXES.get(self.kind)
        return suffix if suffix is None or name == self.kind else f"{name}.{suffix}"

    def describe(self, name: str) -> dict[str, Any]:
        """Return the field as JSON values. The classes of `LABEL` are described elsewhere."""
        return {
            "name": name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": None if self.shape is None else list(self.shape),
            "classes": None if self.classes is None or name == LABEL else list(self.classes),
        }


_MOST_AXES = 16
"""Maximum axes of an array."""

Schema = Mapping[str, Field]
"""The fields of a dataset by name, in the order in which users see them."""


def default_schema(classes: Sequence[str] | None) -> dict[str, Field]:
    """Return the schema of images, and of labels if there are ``classes``."""
    schema = {IMAGE: Field("image")}
    if classes is not None:
        schema[LABEL] = Field("label", classes=tuple(classes))
    return schema


def check_schema(schema: Schema) -> None:
    """Refuse a schema with a name that no field can have.

    Raises:
        ValueError: If there is one.
    """
    for name, field in schema.items():
        if not _NAME.match(name) or name in RESERVED:
            raise ValueError(
                f"no field can be called {quoted(name)}: use 1 to 32 of a-z, 0-9 and '_', starting "
                f"with a letter, and none of {', '.join(sorted(RESERVED))}"
            )
        if name in (IMAGE, LABEL) and field.kind != name:
            raise ValueError(f"the field {name!r} cannot be of the kind {field.kind}: rename it")


def describe_schema(schema: Schema) -> list[dict[str, Any]]:
    """Return a schema as JSON values, for a shard's metadata."""
    return [field.describe(name) for name, field in schema.items()]


def load_schema(described: Any, classes: Sequence[str] | None) -> dict[str, Field]:
    """Return the schema that `describe_schema` described.

    Args:
        described: The description. None means the `default_schema`.
        classes: Class names of `LABEL`.

    Raises:
        ValueError: If it describes none.
    """
    if described is None:
        return default_schema(classes)
    schema: dict[str, Field] = {}
    try:
        for each in described:
            name, shape = each["name"], each["shape"]
            known = classes if name == LABEL else each["classes"]
            texts = [name, each["kind"], *(known or ()), *filter(None, [each["dtype"]])]
            if not all(isinstance(text, str) for text in texts) or name in schema:
                raise ValueError(f"its schema is damaged at the field {quoted(str(name))}")
            if not all(type(side) is int for side in shape or ()):
                raise ValueError(f"its schema is damaged at the shape of {quoted(name)}")
            schema[name] = Field(each["kind"], each["dtype"], shape, known)
        check_schema(schema)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its schema is damaged: {error!r}") from error
    return schema


def uniform_arrays(schema: Schema) -> dict[str, Field]:
    """Return the fields whose values are stored end to end without headers, by stored name."""
    return {
        str(field.stored_name(name)): field for name, field in schema.items() if field.is_uniform
    }


def field_in_words(kind: str, dtype: str | None, shape: Sequence[int] | None, classes: int) -> str:
    """Return a description of a field: "array of float16, 4 x 64 x 64", "labels of 80 classes"."""
    text = kind if dtype is None else f"{kind} of {dtype}"
    if shape is not None:
        text += f", {' x '.join(map(str, shape)) or 'one value'}"
    one, several = ("point", "points") if kind == "keypoints" else ("class", "classes")
    return f"{text} of {classes} {one if classes == 1 else several}" if classes else text


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a type: ``float16``; that of NumPy's own text for types like ``<M8[s]``.

    Raises:
        ValueError: If it is not a type of plain values.
    """
    if dtype is None:
        return None
    if isinstance(dtype, str):
        if dtype == BFLOAT16:
            return BFLOAT16
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"the dtype {quoted(dtype)} is unknown")
    try:
        found = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"the dtype {quoted(str(dtype))} is unknown") from None
    widest = {"f": 8, "c": 16}.get(found.kind, found.itemsize)  # wider ones differ by machine
    if found.kind not in "biufcmMSU" or not 0 < found.itemsize <= widest:
        raise ValueError(f"the dtype {found} has no plain values of the same size everywhere")
    return str(found.name if found.kind in "biufc" else found.newbyteorder("<").str)


def parse_label(value: bytes) -> int:
    """Parse the label in ``value``, the bytes of a `LABEL_FIELD`.

    Raises:
        ValueError: If it is not the shortest decimal form of a non-negative integer.
    """
    if not value.isdigit() or (len(value) > 1 and value.startswith(b"0")) or len(value) > 9:
        raise ValueError(f"label {value[:40]!r} is not a decimal integer from 0 to 999999999")
    return int(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_DECODER = json.JSONDecoder()


def dump_json(value: object) -> bytes:
    """Return ``value`` as canonical JSON: sorted names, no spaces, ASCII."""
    return _ENCODER.encode(value).encode("ascii")


def load_json(content: bytes) -> dict[str, Any]:
    """Parse ``content``, in UTF-8, as a JSON object.

    Raises:
        ValueError: If it is not a JSON object.
    """
    try:
        value = _DECODER.decode(content.decode())
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("JSON that is not an object")
    return value


def checksums(records: Sequence[Record]) -> list[int]:
    """Return the CRC-32 of each record's key, field names and fields."""
    compiled = native.module()
    if compiled is not None and (found := compiled.record_checksums(records)) is not None:
        values: list[int] = found
        return values
    return [*map(_checksum, records)]


def _checksum(record: Record) -> int:
    total = zlib.crc32(record.key.encode())
    for name in sorted(record.fields):
        total = zlib.crc32(record.fields[name], zlib.crc32(name.encode(), total))
    return total


def make_keys(paths: Iterable[str]) -> list[str]:
    """Return the key of each path: the path without its suffix, percent-encoded.

    Only ``A-Z a-z 0-9 _ - ~ /`` remain unescaped. Dots are escaped because WebDataset splits key
    and field at the first one; the first underscore of a name that starts with ``__`` is escaped
    because WebDataset skips such names. A path keeps its suffix if its key would otherwise equal
    another path's (``a.jpg`` and ``a.png``) or name another path (``a.jpg.png`` and ``a.jpg``).
    `unquote_key` reverses the escaping.

    Args:
        paths: Distinct paths relative to the source, with ``/`` between their parts. Bytes that are
            not UTF-8 are surrogate escapes, as in the `os` module.

    Returns:
        One key per path, in the same order, all different.
    """
    paths = list(paths)
    names = set(paths)
    stems = [_stem(path) for path in paths]
    count = Counter(stems)
    return [
        _quote(path if count[stem] > 1 or (stem != path and stem in names) else stem)
        for path, stem in zip(paths, stems, strict=True)
    ]


def unquote_key(key: str) -> str:
    """Return the path of ``key``, with or without its suffix."""
    return unquote_to_bytes(key).decode("utf-8", "surrogateescape")


def _stem(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return folder + slash + (stem if dot and stem else name)


def _quote(path: str) -> str:
    if _UNQUOTED.fullmatch(path) and "__" not in path:
        return path
    quoted = quote(path.encode("utf-8", "surrogateescape"), safe="/").replace(".", "%2E")
    return re.sub(r"(^|/)_(?=_)", r"\1%5F", quoted)
