"""Lists of images as JSON, for sources whose images do not fit in memory."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit.contracts import Entry
from shardkit.record import MAX_KEY_BYTES, NO_LABEL, dump_json, load_json


def dump_entries(entries: Iterable[Entry]) -> bytes:
    """Return entries as JSON."""
    return dump_json({"entries": list(entries)})


def load_entries(content: bytes) -> list[Entry]:
    """Return the entries that `dump_entries` wrote; ValueError if ``content`` is something else."""
    try:
        entries = [Entry(*values) for values in load_json(content)["entries"]]
    except (TypeError, KeyError) as error:
        raise ValueError("it does not list images") from error
    if any(tuple(map(type, entry)) != _TYPES for entry in entries):
        raise ValueError("a value of an image has the wrong type")
    for entry in entries:
        if min(entry.label - NO_LABEL, entry.bytes, entry.place) < 0 or not (
            entry.label < _LABELS and max(entry.bytes, entry.place, abs(entry.stamp)) < _LIMIT
        ):
            raise ValueError("a number of an image is out of range")
        if not 0 < len(entry.key) <= MAX_KEY_BYTES:
            raise ValueError("the key of an image is empty or too long")
        for text in (entry.key, entry.values):
            text.encode()  # only paths have surrogates; UnicodeEncodeError is a ValueError
    return entries


_TYPES = (str, str, int, int, int, int, str)

_LABELS = 10**9
"""Labels must be smaller."""

_LIMIT = 1 << 63
"""Numbers of an entry must be smaller."""
