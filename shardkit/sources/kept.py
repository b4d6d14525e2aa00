"""Fields that a user asks to keep next to image and label: ``--keep caption=txt,info=json``."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from shardkit.errors import BadImage, UsageError, setting
from shardkit.kinds.field import Field, Need, all_kinds, check_schema
from shardkit.kinds.values import parse_json
from shardkit.record import LABEL
from shardkit.sources.images import has_image_suffix, is_image
from shardkit.system.text import fault

_ITEM = re.compile(r"(?:([a-z][a-z0-9_]*)=)?([^:,?=]+)(:/[^:,?]*)?(?::([a-z0-9]+))?(\?)?\Z")
_NUMBERS = ("int64", "float64")
KEPT_KINDS = (
    *(kind.name for kind in all_kinds() if Need.REQUIRED not in (kind.dtype, kind.classes)),
    *_NUMBERS,
)
"""Kinds of kept fields, as users write them: those that need no more words."""


class Kept(NamedTuple):
    """One field to keep."""

    name: str
    source: str
    """Where it is in the source: the suffix of a member, or the name of a feature."""
    pointer: str | None = None
    """The path of its value in a JSON object."""
    kind: str | None = None
    """One of `KEPT_KINDS`; None means what the source takes it for."""
    optional: bool = False
    """Whether records may lack it."""

    def __str__(self) -> str:
        """Return it as `parse_keep` reads it."""
        pointer = "" if self.pointer is None else f":/{self.pointer}"
        kind = f":{self.kind}" if self.kind else ""
        return f"{self.name}={self.source}{pointer}{kind}{'?' * self.optional}"

    @property
    def may_be_text(self) -> bool:
        """Whether its values may be texts, even empty ones."""
        return self.kind in (None, "text")

    def field(self, kind: str) -> Field:
        """Return the field, of a kind if the user gave none."""
        kind = self.kind or kind
        return Field("number", kind) if kind in _NUMBERS else Field(kind)


def parse_keep(text: str | None, option: str = "keep", *, labels: bool = False) -> list[Kept]:
    """Return the fields of ``--keep``: ``[NAME=]SOURCE[:/PATH][:KIND][?]``, separated by commas.

    ``option`` is its name in errors. If ``labels``, a field may be the primary label.
    """
    fields = []
    for item in text.split(",") if text else ():
        match = _ITEM.match(item)
        if match is None or (match[4] and match[4] not in KEPT_KINDS):
            raise UsageError(
                f"{setting(option, item)} is not [NAME=]SOURCE[:KIND], such as caption=txt or "
                f"age=json:/age:int64; kinds are {', '.join(KEPT_KINDS)}"
            )
        pointer = match[3][2:] if match[3] else None
        fields.append(Kept(match[1] or match[2], match[2], pointer, match[4], bool(match[5])))
    try:
        others = (kept.name for kept in fields if not (labels and kept.name == LABEL))
        check_schema({name: Field("json") for name in others})
    except ValueError as error:
        raise UsageError(f"{setting(option)}: {error}") from error
    if len({kept.name for kept in fields}) < len(fields):
        raise UsageError(f"{setting(option, text)} names a field twice")
    return fields


def kind_of_suffix(name: str) -> str:
    """Return the kind of field in a file, from the suffix of its name."""
    if has_image_suffix(name):
        return "image"
    kinds = {"txt": "text", "json": "json", "npy": "array"}
    return kinds.get(name.rpartition(".")[2].lower(), "bytes")


_HEAD = 4096


def kind_of_bytes(data: bytes) -> str:
    """Return the kind of field for a value, from its first 4,096 bytes or more."""
    head = data[:_HEAD]
    if is_image(head):
        return "image"
    try:
        head.decode()
    except UnicodeDecodeError as error:
        in_character = error.reason == "unexpected end of data" and len(head) == _HEAD
        return "text" if in_character else "bytes"
    return "text"


def value_of(kept: Kept, field: Field, data: bytes) -> Any:
    """Return the value of a field in the bytes of a file, such as a member of an archive.

    It raises BadImage if they are not a value of the field.
    """
    try:
        if kept.pointer is None:
            return field.type.parse(field, data)
        parsed = parse_json(data)
        try:
            return value_at(parsed, kept.pointer)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise BadImage(f"{kept.source} has no value at /{kept.pointer}") from error
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        if isinstance(error, BadImage):
            raise BadImage(f"{kept.name}: {error}") from error
        raise BadImage(
            f"{kept.name}: {kept.source} is not a valid {field.kind} value: {fault(error)}"
        ) from error


def value_at(value: Any, pointer: str) -> Any:
    """Return the part of a JSON value at a path such as ``person/age``.

    In a list of objects, it is the part of each, or None. If there is none, it raises KeyError,
    IndexError, TypeError or ValueError.
    """
    steps = [*filter(None, pointer.split("/"))]
    for number, step in enumerate(steps):
        if isinstance(value, list) and not step.lstrip("-").isdecimal():
            rest = "/".join(steps[number + 1 :])
            return [value_at(item[step], rest) if step in item else None for item in value]
        value = value[int(step) if isinstance(value, list) else step]
    return value
