"""The record: one stored example, still encoded, and the rules for its key and its field names.

It knows neither files nor formats nor how a picture is decoded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote_to_bytes

IMAGE_FIELDS = ("jpg", "png", "webp", "bmp", "gif", "tiff", "ppm", "raw")
"""The names of image fields, in the order of their codes in the index.

Part of format version 1: entries may be added at the end, never moved. ``raw`` is uint8 pixels in
the order height, width, channel, of the one shape that the manifest gives.
"""

LABEL_FIELD = "cls"
"""The field that holds the label: a non-negative decimal integer in ASCII, as WebDataset has it."""

META_FIELD = "json"
"""The field that holds a JSON object: ``path``, ``width``, ``height`` and what was noticed."""

NO_LABEL = -1
"""Stands for the label of an unlabelled record wherever a number is needed."""

_FIELD_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,31}\Z")


@dataclass(frozen=True, slots=True)
class Record:
    """One stored example: a key and named fields of bytes.

    Raises:
        ValueError: If the key is empty or a field's name is not ``[a-z0-9][a-z0-9_]*`` of at most
            32 characters.
    """

    key: str
    """Names the record; unique in its dataset; made by `make_keys`."""

    fields: Mapping[str, bytes]
    """Field name to the field's bytes."""

    def __post_init__(self) -> None:
        if not self.key:
            raise ValueError("a record needs a key of at least one character")
        for name in self.fields:
            if not is_field_name(name):
                raise ValueError(
                    f"field name {name!r} of record {self.key!r}: use 1 to 32 of a-z, 0-9 and '_', "
                    "beginning with a letter or a digit"
                )

    @property
    def image_field(self) -> str | None:
        """The name of the field that holds the image, or None where there is none."""
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
        """The JSON object beside the image; empty where there is none.

        Raises:
            ValueError: If the field does not hold a JSON object.
        """
        return load_json(self.fields.get(META_FIELD, b"{}"))


def is_field_name(name: str) -> bool:
    """Tell whether a field may have this name: at most 32 of ``a-z 0-9 _``, no ``_`` in front."""
    return _FIELD_NAME.match(name) is not None


def image_field(names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is an image field, or None."""
    return next((name for name in names if name in IMAGE_FIELDS), None)


def parse_label(value: bytes) -> int:
    """Return the label that ``value``, the bytes of a `LABEL_FIELD`, stands for.

    Raises:
        ValueError: If it is anything but the shortest decimal form of a non-negative integer.
    """
    if not value.isdigit() or (len(value) > 1 and value.startswith(b"0")) or len(value) > 9:
        raise ValueError(f"label {value[:40]!r} is not a decimal integer from 0 to 999999999")
    return int(value)


def dump_json(value: object) -> bytes:
    """Return ``value`` as canonical JSON: sorted names, no spaces, ASCII only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def load_json(content: bytes) -> dict[str, Any]:
    """Return the JSON object that ``content`` holds.

    Raises:
        ValueError: If it does not hold one.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("JSON that is not an object")
    return value


def make_keys(paths: Iterable[str]) -> list[str]:
    """Return the key of each path: the path without its suffix, percent-encoded.

    Only ``A-Z a-z 0-9 _ - ~ /`` stand for themselves. A dot never does, because WebDataset splits
    key and field at the first one, and neither does an underscore that begins a name with ``__``,
    which WebDataset skips. Paths whose keys would be equal (``a.jpg`` and ``a.png``) all keep their
    suffix in the key, as does one without which it could be taken for another (``a.jpg.png`` beside
    ``a.jpg``). `unquote_key` reverses it.

    Args:
        paths: Paths relative to the source, with ``/`` between their parts, each once. Bytes that
            are no UTF-8 come as surrogate escapes, as the `os` module gives them.

    Returns:
        As many keys, in the same order, no two of them equal.
    """
    paths = list(paths)
    names = set(paths)
    stems: dict[str, int] = {}
    for path in paths:
        stem = _stem(path)
        stems[stem] = stems.get(stem, 0) + 1
    return [
        _quote(path if stems[stem] > 1 or (stem != path and stem in names) else stem)
        for path, stem in ((path, _stem(path)) for path in paths)
    ]


def unquote_key(key: str) -> str:
    """Return the path, with or without its suffix, that ``key`` was made from."""
    return os.fsdecode(unquote_to_bytes(key))


def _stem(path: str) -> str:
    folder, slash, name = path.rpartition("/")
    stem, dot, _ = name.rpartition(".")
    return folder + slash + (stem if dot and stem else name)


def _quote(path: str) -> str:
    quoted = quote(os.fsencode(path), safe="/").replace(".", "%2E")
    return re.sub(r"(^|/)_(?=_)", r"\1%5F", quoted)
