"""The records of a TFRecord file, their checksums, and the features of a tf.train.Example.

Features are read from the protocol-buffer encoding. Long values are not read: a feature of bytes is
a list of ranges.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from shardkit.contracts import Range
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


Read = Callable[[int, int], bytes]
"""Returns the bytes at an offset, of at most a length."""

_MOST_NUMBERS = 1 << 20
"""Maximum numbers of a feature."""

_MOST_FEATURES = 1 << 16
_Value = TypeVar("_Value")

_VARINT = 0
_BYTES = 2
_FIXED32 = 5
_FIXED = {1: 8, _FIXED32: 4}
"""Bytes of a value of a fixed size, by its type."""


@dataclass
class Feature:
    """One feature; only one of the lists is used."""

    ranges: list[Range] = field(default_factory=list)
    """Where each value of a list of bytes is."""
    numbers: list[int] = field(default_factory=list)
    """The values of a list of integers."""
    floats: list[Range] = field(default_factory=list)
    """Where the values of a list of floats are: four bytes each, in little-endian order."""
    kind: str = "empty"
    """``bytes``, ``int64`` or ``float``."""


def features(read: Read, start: int, end: int) -> dict[str, Feature]:
    """Return the features of the Example between two offsets, by name; BadImage if it is not one.

    As protocol buffers require, the last one counts if a name occurs twice.
    """
    result: dict[str, Feature] = {}
    for number, outer in _messages(read, Range(start, end - start)):
        if number != 1:
            continue
        for entry, inner in _messages(read, outer):
            if entry == 1:
                name, feature = _map_entry(read, inner)
                result[name] = feature
                if len(result) > _MOST_FEATURES:
                    raise _wrong(f"it has over {_MOST_FEATURES} features")
    return result


def _map_entry(read: Read, inside: Range) -> tuple[str, Feature]:
    name = ""
    feature = Feature()
    for number, value in _messages(read, inside):
        if number == 1:
            if value.length > 4096:
                raise _wrong("a feature's name is too long")
            name = read(value.offset, value.length).decode("utf-8", "surrogateescape")
        elif number == 2:
            feature = _feature(read, value)
    return name, feature


def _feature(read: Read, inside: Range) -> Feature:
    feature = Feature()
    for number, values in _messages(read, inside):
        if number == 1:
            feature.kind = "bytes"
            feature.ranges += _few(value for n, value in _messages(read, values) if n == 1)
        elif number == 2:
            feature.kind = "float"
            feature.floats += _few(_floats(read, values))
        elif number == 3:
            feature.kind = "int64"
            feature.numbers += _few(_integers(read, values))
        if len(feature.numbers) + len(feature.ranges) + len(feature.floats) > _MOST_NUMBERS:
            raise _wrong(f"a feature has over {_MOST_NUMBERS} values")
    return feature


def _few(values: Iterable[_Value]) -> Iterator[_Value]:
    """Return as many values as are needed to see that they are too many."""
    return itertools.islice(values, _MOST_NUMBERS + 1)


def _integers(read: Read, inside: Range) -> Iterator[int]:
    """Yield the numbers of an Int64List, packed or one by one."""
    for number, kind, values in _fields(read, inside):
        if number != 1 or kind not in (_VARINT, _BYTES):
            raise _wrong(f"a list of integers has the tag {number << 3 | kind}")
        offset = values.offset
        end = offset + values.length
        while offset < end:
            value, offset = _varint(read, offset, end)
            yield _signed(value)


def _floats(read: Read, inside: Range) -> Iterator[Range]:
    """Yield where the values of a FloatList are, packed or one by one."""
    for number, kind, values in _fields(read, inside):
        if number != 1 or kind not in (_FIXED32, _BYTES):
            raise _wrong(f"a list of floats has the tag {number << 3 | kind}")
        if values.length % 4:
            raise _wrong(f"a list of floats has {values.length} bytes")
        yield values


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _messages(read: Read, inside: Range) -> Iterator[tuple[int, Range]]:
    """Yield number and range of each length-delimited field; skip all others."""
    return ((number, value) for number, kind, value in _fields(read, inside) if kind == _BYTES)


def _fields(read: Read, inside: Range) -> Iterator[tuple[int, int, Range]]:
    """Yield number, type and range of each field of a message."""
    offset = inside.offset
    end = offset + inside.length
    while offset < end:
        tag, offset = _varint(read, offset, end)
        kind = tag & 7
        if kind == _BYTES:
            length, offset = _varint(read, offset, end)
        elif kind == _VARINT:
            length = _varint(read, offset, end)[1] - offset
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise _wrong(f"a field has the unknown type {kind}")
        if offset + length > end:
            raise _wrong("a field ends outside its message")
        yield tag >> 3, kind, Range(offset, length)
        offset += length


def _varint(read: Read, offset: int, end: int) -> tuple[int, int]:
    """Return a number of up to ten bytes, and the offset after it."""
    data = read(offset, min(10, end - offset))
    value = 0
    for count, byte in enumerate(data):
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, offset + count + 1
    raise _wrong("a number does not end")


def _wrong(reason: str) -> BadImage:
    return BadImage(f"it is not a tf.train.Example: {reason}")
