"""The records of a TFRecord file, and their checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.errors import BadImage
from shardkit.sources.crc32c import crc32c
from shardkit.sources.inputs import OpenedFile

HEADER = struct.Struct("<QI")
"""Length of a record, and its checksum. The record and its own checksum follow."""
CHECKSUM = struct.Struct("<I")
_MASK = 0xA282EAD8


class RecordSpan(NamedTuple):
    """One record of a file."""

    offset: int
    start: int
    length: int
    stamp: int
    """Its masked checksum, as stored."""


def records(view: OpenedFile) -> Iterator[RecordSpan]:
    """Yield the records of a file; BadImage if a length's checksum differs, or it is truncated."""
    offset = 0
    while offset < view.size:
        length = length_of(view, offset)
        start = offset + HEADER.size
        end = start + length
        checksum = view.read(end, CHECKSUM.size) if end < view.size else b""
        if len(checksum) < CHECKSUM.size:
            raise BadImage(f"the file is truncated in the record at byte {offset}")
        yield RecordSpan(offset, start, length, CHECKSUM.unpack(checksum)[0])
        offset = end + CHECKSUM.size


def length_of(view: OpenedFile, offset: int) -> int:
    """Return the length of the record at an offset; BadImage if its checksum differs."""
    header = view.read(offset, HEADER.size)
    if len(header) < HEADER.size:
        raise BadImage(f"the file is truncated in the record at byte {offset}")
    length, checksum = HEADER.unpack(header)
    if masked(header[:8]) != checksum:
        raise BadImage(
            f"the length at byte {offset} does not match its checksum: the file is damaged, or not "
            "a TFRecord file"
        )
    return int(length)


def masked(data: bytes) -> int:
    """Return the checksum of TFRecord: a CRC-32C, rotated by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
