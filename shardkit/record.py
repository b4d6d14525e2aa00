"""The record: one stored, encoded example, and the rules for keys and field names.

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

from shardkit.system import native
from shardkit.system.text import quoted

IMAGE_FIELDS = ("jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "raw")
"""The names of image fields, in the order of their codes in the index.

Part of format version 1: entries may be appended, never moved. ``raw`` is uint8 pixels in the order
height, width, channel, all of the manifest's ``raw_shape``.
"""

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

_FIELD_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,31}\Z")
_UNQUOTED = re.compile(r"[A-Za-z0-9_~/-]*")


@dataclass(frozen=True, slots=True)
class Record:
    """One stored example: a key and named fields of bytes.

    Raises:
        ValueError: If the key is empty or longer than `MAX_KEY_BYTES`, or a field's name is not
            ``[a-z0-9][a-z0-9_]*`` of at most 32 characters.
    """

    key: str
    """The record's unique name in its dataset, from `make_keys`."""

    fields: Mapping[str, bytes]
    """The bytes of each field, by name."""

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
                    "a-z, 0-9 and '_', starting with a letter or a digit"
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
    """Return whether ``name`` is a valid field name: 1 to 32 of ``a-z 0-9 _``, no leading ``_``."""
    return _FIELD_NAME.match(name) is not None


def image_field(names: Iterable[str]) -> str | None:
    """Return the first image field among ``names``, or None."""
    for name in names:
        if name in IMAGE_FIELDS:
            return name
    return None


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
