"""Fields of a dataset's records, and the base of their kinds.

A kind is one module of this package with an object ``KIND``, and an entry of `KINDS`. Nothing
outside these modules needs to know which kinds there are.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shardkit.codecs.geometry import Frame, Geometry
from shardkit.codecs.image_type import RGB, ImageType
from shardkit.record import IMAGE, LABEL, Record, image_name
from shardkit.system.late import load
from shardkit.system.text import quoted

KINDS = (
    *("image", "mask", "array", "bytes"),
    *("number", "label", "labels", "text", "json", "boxes", "keypoints"),
)
"""The kinds of fields, each the name of its module. The first that can store a value is the kind
of a field that the user did not describe."""

RESERVED = frozenset(
    "key path width height orientation frames small odd damaged dropped".split()  # noqa: SIM905
)
"""Names that no field may have: the metadata use them."""

BFLOAT16 = "bfloat16"
"""The one `Field.dtype` that NumPy lacks; stored as ``<u2``."""

_DTYPE = re.compile(r"[<>|=]?[a-zA-Z]{1,12}[0-9]{0,6}(?:\[[0-9a-zA-Z]{1,8}\])?")
"""The names of types that are accepted; NumPy would also parse lists of types."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")

_MOST_AXES = 16
"""Maximum axes of an array."""


class Need(enum.Enum):
    """Whether a field has an attribute, such as its dtype."""

    NEVER = 0
    OPTIONAL = 1
    REQUIRED = 2


class Packed(NamedTuple):
    """The value of one row, as bytes of a column."""

    values: bytes
    labels: bytes = b""
    """The labels of boxes."""


class Stack(NamedTuple):
    """The values of a batch in one array."""

    array: npt.NDArray[Any]
    """One element for each row."""
    samples: Sequence[Any] | npt.NDArray[Any] | None = None
    """The value of each row; None if these are the rows of the array."""


class Kind:
    """A kind of field: how its values are checked, stored, moved with their image, and read.

    A value has one of two homes. The bytes of a kind that is `stored_apart` are in the record,
    where the index locates them. All other values are in the record's metadata, as JSON, and the
    index holds a copy of them as a column.
    """

    name: ClassVar[str]

    # What a `Field` states.
    dtype: ClassVar[Need] = Need.NEVER
    shape: ClassVar[Need] = Need.NEVER
    classes: ClassVar[Need] = Need.NEVER
    class_nouns: ClassVar[tuple[str, str]] = ("class", "classes")
    """Nouns for one class and several."""
    is_named_so: ClassVar[bool] = False
    """Whether a field of the kind's name is of this kind, unless the user describes it."""

    # Where values are stored.
    stored_apart: ClassVar[bool] = False
    """Whether values are bytes of their own, which the index locates."""
    is_picture: ClassVar[bool] = False
    """Whether these bytes are an image file, whose name states its encoding."""
    suffix: ClassVar[str | None] = None
    """Last part of the stored name; None if values are metadata or pictures."""
    follows: ClassVar[bool] = False
    """Whether values move with the pixels of `shardkit.record.IMAGE`: a mask or box means pixels of
    that image, so a mask of another size is an error once they move. Other images do not follow: a
    second view has a size of its own, and the recipe applies to it as to the first."""

    # Columns.
    column_type: ClassVar[np.dtype[Any] | None] = None
    """Type of a column's values; None means the dtype of the field."""
    is_variable: ClassVar[bool] = False
    """Whether a row has any number of values."""
    holds_classes: ClassVar[bool] = False
    """Whether the values of a column are numbers of classes."""
    compares: ClassVar[tuple[type, ...]] = ()
    """Types that conditions compare values with (``--where``); none if they cannot."""

    def check(self, field: Field) -> None:
        """Raise ValueError for a field that its `Need` allows but the kind does not."""

    def infer(self, value: Any) -> Field | None:
        """Return the field of this kind for a Python value, or None if it is of another kind.

        Raises ValueError if no field can store it.
        """
        return None

    def pack(self, name: str, field: Field, value: Any) -> tuple[str | None, Any]:
        """Return the stored name and bytes of a Python value, or None and its JSON value.

        Raises ValueError, TypeError, OverflowError, OSError or BadImage if it is not one of the
        field.
        """
        raise NotImplementedError

    def parse(self, field: Field, data: bytes) -> Any:
        """Return the value in a file, in a form that `pack` takes.

        Raises ValueError, TypeError, RecursionError or BadImage if there is none.
        """
        return data

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of a field; None in the metadata, and of pictures."""
        if self.suffix is None or name == self.name:
            return self.suffix
        return f"{name}.{self.suffix}"

    def stored_in(self, names: Collection[str], name: str) -> str | None:
        """Return the stored name of a field among those of a record, or None."""
        stored = self.stored_name(name)
        return stored if stored in names else None

    def in_record(self, record: Record, meta: Mapping[str, Any], name: str) -> Any:
        """Return the value of a small field in a record as JSON has it, None without.

        ``meta`` is its parsed metadata. Raises ValueError if it is damaged.
        """
        return meta.get(name)

    def width(self, field: Field) -> int:
        """Return the divisor of the number of values in each row of a column."""
        return 1

    def has_labels(self, field: Field) -> bool:
        """Return whether a column has a separate file with a label for each `width` values."""
        return False

    def pack_column(self, field: Field, value: Any) -> Packed:
        """Return a JSON value in the form of its column.

        Raises ValueError, TypeError, OverflowError or struct.error if it is not one of the field.
        """
        raise NotImplementedError

    def pack_stored(self, field: Field, values: Sequence[Any]) -> Sequence[Packed]:
        """Return several values as `pack_column` does, given their bytes, or JSON without."""
        return [self.pack_column(field, value) for value in values]

    def unpack(
        self, field: Field, values: npt.NDArray[Any], labels: npt.NDArray[np.int32] | None
    ) -> Any:
        """Return the value of one row of a column; ValueError or RecursionError if damaged."""
        return values

    def as_json(self, field: Field, value: Any) -> Any:
        """Return a value of a record's metadata as users read it, with names of classes."""
        return value

    def plain(self, field: Field, value: Any) -> Any:
        """Return a value of `unpack` as the metadata state it."""
        return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value

    def counted(self, values: Sequence[Any]) -> tuple[list[float], str] | None:
        """Return a number for each value, such as its count of boxes, and a noun; or None."""
        return None

    def feature(self, field: Field) -> dict[str, Any]:
        """Return the field as a feature of Hugging Face's ``datasets``."""
        return {"_type": "Value", "dtype": "string"}

    def move(self, field: Field, value: Any, geometry: Geometry) -> tuple[Any, bool]:
        """Return JSON values moved with their image, and whether any is outside the canvas.

        ``value`` is in the metadata, in pixels of the source image; the field `follows` an image.
        """
        raise NotImplementedError

    def sample(self, field: Field, value: Any, frame: Frame | None) -> Any:
        """Return a value of `unpack` in the form of a sample, moved into ``frame`` if given."""
        return value

    def is_listed(self, field: Field) -> bool:
        """Return whether a batch is a list of values, rather than an array."""
        return True

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack | None:
        """Return the values of a column in one array, or None if a batch `is_listed`."""
        return None

    def fill_missing(self, stack: Stack, present: npt.NDArray[np.bool_]) -> Stack | None:
        """Return the stack with a marker for missing values, or None if the kind has no marker.

        Without a marker, a batch is a list, and missing values are None.
        """
        return None

    def fault(self, field: Field, data: bytes) -> str:
        """Return why bytes of a value that is `stored_apart` are not one of the field, or ""."""
        return ""

    def load(self, field: Field, data: bytes) -> Any:
        """Return the sample in the bytes of a value that is `stored_apart`, and not a picture.

        Raises ValueError if they are damaged.
        """
        return data


@dataclass(frozen=True, init=False)
class Field:
    """A named part of all records of a dataset."""

    kind: str
    """One of `KINDS`. A mask is an image whose pixels are classes or measurements: it is scaled by
    nearest neighbor and stored without loss."""

    dtype: str | None
    """Type of an array's, number's or image's values: a NumPy name, or ``bfloat16``. Images without
    one are 8-bit RGB."""

    shape: tuple[int, ...] | None
    """Shape of every array; None if it varies. For an image with a dtype, the number of channels:
    the shape of each pixel."""

    classes: tuple[str, ...] | None
    """Class names of a label, of labels, or of the labels of boxes; boxes without class names have
    no labels. For keypoints, the names of an object's points."""

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
            dtype: Type of an array's, number's or image's values, such as ``"float16"`` or
                ``"bfloat16"``. Images without one are 8-bit RGB.
            shape: Shape of every array; None if it varies. For an image with a dtype, its channels,
                such as ``(1,)``.
            classes: Names or number of the classes of a label, of labels, or of boxes; for
                keypoints, names or number of the points of each object. If an image is flipped,
                points whose names differ in ``left`` and ``right`` change places.

        Raises:
            ValueError: If the kind is unknown or contradicts the other values.
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
        kind = self.type
        wrong = {Need.NEVER: False, Need.REQUIRED: True}
        if wrong.get(kind.dtype) is (self.dtype is None):
            raise ValueError(f"a {self.kind} {'needs a' if self.dtype is None else 'has no'} dtype")
        if self.shape is not None:
            if kind.shape is Need.NEVER or self.dtype is None:
                raise ValueError("only an array, or an image with a dtype, has a shape")
            if len(self.shape) > _MOST_AXES or not 0 < self.bytes < 1 << 32:
                raise ValueError(f"the shape {self.shape} is out of range")
            if min(self.shape, default=1) < 1:
                raise ValueError(f"the shape {self.shape} has an empty axis: leave out the shape")
        if len(set(self.classes or ())) != len(self.classes or ()):
            raise ValueError("two classes have the same name")
        if self.classes is None and kind.classes is Need.REQUIRED:
            raise ValueError(
                "the classes are missing: pass their names or their number, as in "
                f"Field({self.kind!r}, classes=10)"
            )
        if self.classes is not None and kind.classes is Need.NEVER:
            raise ValueError(f"a {self.kind} cannot have classes")
        kind.check(self)

    def __str__(self) -> str:
        return field_in_words(self.kind, self.dtype, self.shape, len(self.classes or ()))

    @cached_property
    def type(self) -> Kind:
        """The kind of this field, as an object."""
        return get_kind(self.kind)

    @cached_property
    def values(self) -> np.dtype[Any]:
        """The type of the stored values; little-endian."""
        if self.dtype == BFLOAT16:
            return np.dtype("<u2")
        return np.dtype(self.dtype).newbyteorder("<")

    @cached_property
    def bytes(self) -> int:
        """Bytes of the values of an array of fixed shape."""
        return math.prod(self.shape or ()) * self.values.itemsize

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all values are arrays of one dtype and shape, stored end to end."""
        return self.shape is not None and not self.type.is_picture

    @cached_property
    def pixels(self) -> ImageType | None:
        """Channels and dtype that an image declares; None if it declares none: 8-bit RGB."""
        if not self.type.is_picture or self.dtype is None or self.shape is None:
            return None
        (channels,) = self.shape
        return ImageType(channels, self.dtype)

    @cached_property
    def image_type(self) -> ImageType:
        """Channels and dtype of stored images: 8-bit RGB unless they declare others."""
        return self.pixels or RGB

    def stored_name(self, name: str) -> str | None:
        """Return the stored name of this field, called ``name``; None in the metadata.

        The name of a picture also depends on its encoding: see `shardkit.record.image_field`.
        """
        return self.type.stored_name(name)

    def describe(self, name: str) -> dict[str, Any]:
        """Return the field as JSON values. The classes of `LABEL` are described elsewhere."""
        return {
            "name": name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": None if self.shape is None else list(self.shape),
            "classes": None if self.classes is None or name == LABEL else list(self.classes),
        }


@cache
def get_kind(name: str) -> Kind:
    """Return one of `KINDS` by name; its module is imported at first use."""
    kind: Kind = load(f"shardkit.kinds.{name}:KIND")
    return kind


def all_kinds() -> list[Kind]:
    """Return all kinds, in the order of `KINDS`."""
    return [get_kind(name) for name in KINDS]


Schema = Mapping[str, Field]
"""The fields of a dataset by name, in the order in which users see them."""


def default_schema(classes: Sequence[str] | None) -> dict[str, Field]:
    """Return the schema of images, and of labels if there are ``classes``."""
    schema = {IMAGE: Field("image")}
    if classes is not None:
        schema[LABEL] = Field("label", classes=tuple(classes))
    return schema


def check_schema(schema: Schema) -> None:
    """Raise ValueError for a schema with a name that no field can have."""
    for name, field in schema.items():
        if not _NAME.match(name) or name in RESERVED:
            raise ValueError(
                f"a field cannot be named {quoted(name)}: use 1 to 32 of a-z, 0-9 and '_', "
                f"starting with a letter, and none of {', '.join(sorted(RESERVED))}"
            )
        if name in (IMAGE, LABEL) and field.kind != name:
            raise ValueError(
                f"only the {name} of a record can be named {name!r}: choose another name"
            )


def describe_schema(schema: Schema) -> list[dict[str, Any]]:
    """Return a schema as JSON values, for a shard's metadata."""
    return [field.describe(name) for name, field in schema.items()]


def load_schema(described: Any, classes: Sequence[str] | None) -> dict[str, Field]:
    """Return the schema that `describe_schema` described; ValueError if it describes none.

    If ``described`` is None, it is the `default_schema`; ``classes`` are the names of `LABEL`.
    """
    if described is None:
        return default_schema(classes)
    schema: dict[str, Field] = {}
    try:
        for entry in described:
            name = entry["name"]
            shape = entry["shape"]
            names = classes if name == LABEL else entry["classes"]
            texts = [name, entry["kind"], *(names or ()), *filter(None, [entry["dtype"]])]
            if not all(isinstance(text, str) for text in texts) or name in schema:
                raise ValueError(f"its schema is damaged at the field {quoted(str(name))}")
            if not all(type(side) is int for side in shape or ()):
                raise ValueError(f"its schema is damaged at the shape of {quoted(name)}")
            schema[name] = Field(entry["kind"], entry["dtype"], shape, names)
        check_schema(schema)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("its schema is damaged") from error
    return schema


def uniform_arrays(schema: Schema, raw_shape: Sequence[int] | None = None) -> dict[str, Field]:
    """Return the fields whose values are stored end to end without headers, by stored name.

    ``raw_shape`` is the height, width and channels of raw pixels. Those of typed images are arrays,
    too.
    """
    arrays = {
        str(field.stored_name(name)): field for name, field in schema.items() if field.is_uniform
    }
    for name, field in schema.items():
        if raw_shape is not None and field.pixels is not None:
            shape = (*raw_shape[:2], field.pixels.channels)
            arrays[image_name(name, "raw")] = Field("array", field.dtype, shape)
    return arrays


def columns_of(schema: Schema) -> dict[str, Field]:
    """Return the fields that have a column: all small ones but the label of the image."""
    return {
        name: field
        for name, field in schema.items()
        if name != LABEL and not field.type.stored_apart
    }


def apart_of(schema: Schema) -> dict[str, Field]:
    """Return the fields with bytes and thus entries of their own, except the primary image."""
    return {
        name: field for name, field in schema.items() if name != IMAGE and field.type.stored_apart
    }


def field_in_words(kind: str, dtype: str | None, shape: Sequence[int] | None, classes: int) -> str:
    """Return a description of a field: "float16 array, 4 x 64 x 64", "labels with 80 classes"."""
    text = kind if dtype is None else f"{dtype} {kind}"
    if shape is not None and kind == IMAGE:
        text += f", {shape[0]} channel{'s' * (shape[0] != 1)}"
    elif shape is not None:
        text += f", {' x '.join(map(str, shape)) or 'one value'}"
    nouns = get_kind(kind).class_nouns if kind in KINDS else Kind.class_nouns
    return f"{text} with {classes} {nouns[classes != 1]}" if classes else text


def _dtype_name(dtype: Any) -> str | None:
    """Return the name of a type: ``float16``, or NumPy's text, such as ``<M8[s]``."""
    if dtype is None:
        return None
    if isinstance(dtype, str):
        if dtype == BFLOAT16:
            return BFLOAT16
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"the dtype {quoted(dtype)} is unknown")
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"the dtype {quoted(str(dtype))} is unknown") from None
    widest = {"f": 8, "c": 16}.get(parsed.kind, parsed.itemsize)  # wider ones differ by machine
    if parsed.kind not in "biufcmMSU" or not 0 < parsed.itemsize <= widest:
        raise ValueError(f"the dtype {parsed} is not plain, or its size depends on the machine")
    return str(parsed.name if parsed.kind in "biufc" else parsed.newbyteorder("<").str)
