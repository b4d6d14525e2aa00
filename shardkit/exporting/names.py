"""The names of exported files: the path in the source, with the suffix of the content."""

from __future__ import annotations

import os

from shardkit.codecs.suffixes import KIND_OF_SUFFIX, SUFFIXES
from shardkit.record import Record, unquote_key
from shardkit.system.files import split_text_path

_LONGEST = 255
"""Maximum bytes of a component of a path."""


def file_name(record: Record, stored: str, *, is_kept: bool) -> str:
    """Return the name of the file with the bytes of a field, given the stored name of the field.

    ``is_kept`` states whether the source path is right by definition.
    """
    path = str(record.meta["path"])
    kind = stored.rpartition(".")[2]
    # Several records of a dataset may have one number of a Python sample.
    if path.isdigit() and _can_name_file(f"{record.key}.{kind}"):
        path = record.key
    if is_kept:
        return path
    before, dot, suffix = path.rpartition(".")
    if dot and "/" not in suffix and before.rpartition("/")[2]:
        if suffix.lower() in SUFFIXES.get(kind, (kind,)):
            return path
        # A key keeps the suffix if it tells the record from another one.
        is_known = suffix.lower() in KIND_OF_SUFFIX
        if is_known and not unquote_key(record.key).endswith(f".{suffix}"):
            path = before
    return f"{path}.{kind}"


def _can_name_file(key: str) -> bool:
    """Return whether a file can have the name of a key; one that is hidden would not be read."""
    try:
        names = split_text_path(key)
    except ValueError:
        return False
    return not any(name.startswith(".") or len(os.fsencode(name)) > _LONGEST for name in names)
