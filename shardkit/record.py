"""The record: one stored, encoded example, the fields it may have, and the rules for its names.

Nothing here knows about files, formats or decoding.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from shardkit.system import compiled
from shardkit.system.text import quoted

DATASET_FILE = "shardkit.json"
"""The file that makes a folder a dataset: its manifest."""

PLANES = "y4m"
"""The image field of a JPEG decoder's planes: see `shardkit.codecs.planes`."""

IMAGE_FIELDS = ("jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "raw", PLANES)
"""The names of image fields. ``raw`` is uint8 pixels in the order height, width, channel, all of
the manifest's ``raw_shape``."""

ARRAY_IMAGE = "npy"
"""The kind of an image that is an .npy file, of any `shardkit.codecs.image_type.ImageType`. Unlike
`IMAGE_FIELDS`, its stored name states the field of the primary image too: ``image.npy``."""

STORED_KINDS = (*IMAGE_FIELDS[:8], "npy", "bin", "absent", PLANES)
"""Kinds of entries of the index, in the order of their codes: an image, an array, bytes, or
nothing, where the row lacks the field. Part of the format: entries may be appended, never moved."""

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

IMAGE = "image"
LABEL = "label"
"""The names of the primary image and the primary label, which training code gets by default."""

PRIMARY_ARRAY = f"{IMAGE}.{ARRAY_IMAGE}"
"""The stored name of the primary image as an array."""

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
            if name in IMAGE_FIELDS or name == PRIMARY_ARRAY:
                return name
        return None
    for name in names:
        before, dot, kind = name.partition(".")
        if before == field and dot and (kind in IMAGE_FIELDS or kind == ARRAY_IMAGE):
            return name
    return None


def image_name(field: str, kind: str) -> str:
    """Return the stored name of an image: ``png``, ``image.npy``, ``left.png``.

    Args:
        field: Name of the image in the schema.
        kind: One of `IMAGE_FIELDS`, or `ARRAY_IMAGE`.
    """
    return kind if field == IMAGE and kind != ARRAY_IMAGE else f"{field}.{kind}"


def image_kind(stored: str) -> str:
    """Return the kind of an image, given its stored name."""
    return stored.rpartition(".")[2]


def is_raw(stored: str) -> bool:
    """Return whether a stored name is that of raw pixels: ``raw`` or ``depth.raw``."""
    return stored == "raw" or stored.endswith(".raw")


def is_planes(stored: str) -> bool:
    """Return whether a stored name is that of planes: ``y4m`` or ``left.y4m``."""
    return stored == PLANES or stored.endswith(f".{PLANES}")


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


def path_meta(path: str) -> bytes:
    """Return metadata that state only a path, as `dump_json` does in a fifth of the time."""
    return b'{"path":%b}' % json.encoder.encode_basestring_ascii(path).encode()


def load_json(content: bytes) -> dict[str, Any]:
    """Parse ``content``, in UTF-8, as a JSON object.

    Raises:
        ValueError: If it is not a JSON object.
    """
    try:
        value = _DECODER.decode(content.decode())
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def checksums(records: Sequence[Record]) -> list[int]:
    """Return the CRC-32 of each record's key, field names and fields."""
    values = compiled.record_checksums(records)
    return [*map(_checksum, records)] if values is None else values


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
    stems = [stem_of(path) for path in paths]
    count = Counter(stems)
    return [
        _quote(path if count[stem] > 1 or (stem != path and stem in names) else stem)
        for path, stem in zip(paths, stems, strict=True)
    ]


def unquote_key(key: str) -> str:
    """Return the path of ``key``, with or without its suffix."""
    return unquote_to_bytes(key).decode("utf-8", "surrogateescape")


def plain_key(path: str) -> str:
    """Return the key that `make_keys` gives a path whose stem is no other's stem or path."""
    return _quote(stem_of(path))


def stem_of(path: str) -> str:
    """Return a path without its suffix."""
    folder, slash, name = path.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return folder + slash + (stem if dot and stem else name)


def _quote(path: str) -> str:
    if _UNQUOTED.fullmatch(path) and "__" not in path:
        return path
    quoted = quote(path.encode("utf-8", "surrogateescape"), safe="/").replace(".", "%2E")
    return re.sub(r"(^|/)_(?=_)", r"\1%5F", quoted)
