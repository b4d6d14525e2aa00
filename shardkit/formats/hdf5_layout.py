"""Find the datasets in an HDF5 file by parsing its structure, without trust in it.

It supports what HDF5 writes under the bound "earliest" ("HDF5 File Format Specification",
superblock version 0): groups as B-trees of symbol tables, object headers of version 1, contiguous
datasets. It refuses everything else, such as filters, and links and external values, which lead to
any other file of the machine. The HDF5 library is less strict: of a few thousand damaged files, one
made it hang in C, and 20 KB can make it allocate 128 GiB.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.system.text import quoted

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SUPERBLOCK = struct.Struct("<8s4B2BBxHHIQQQQ")
_ENTRY = struct.Struct("<QQII16x")
_TREE = struct.Struct("<4sBBHQQ")
_TABLE = struct.Struct("<4sBxH")
_HEAP = struct.Struct("<4sB3xQQQ")
_HEADER = struct.Struct("<BxHII4x")
_MESSAGE = struct.Struct("<HHB3x")
_PAIR = struct.Struct("<QQ")
_NOWHERE = 0xFFFF_FFFF_FFFF_FFFF

_SPACE = 0x01
_LINKS = 0x02
_TYPE = 0x03
_ELSEWHERE = 0x07
_LAYOUT = 0x08
_PACKING = 0x0B
_CONTINUATION = 0x10
_SYMBOLS = 0x11
"""Types of messages in an object header."""
_SHARED = 0x02
"""Flag of a message that is stored in another object."""

_FLOATS = {
    2: b"\x11\x20\x0f\0\x02\0\0\0\0\0\x10\0\x0a\x05\0\x0a\x0f",
    4: b"\x11\x20\x1f\0\x04\0\0\0\0\0\x20\0\x17\x08\0\x17\x7f",
    8: b"\x11\x20\x3f\0\x08\0\0\0\0\0\x40\0\x34\x0b\0\x34\xff\x03",
}
"""HDF5's encodings of IEEE 754 numbers, by size in bytes: fields 0x10 on are offset and precision,
then the positions and sizes of exponent and mantissa, and the exponent's bias."""

_TYPES = {
    bytes(
        (0x10, sign, 0, 0, size, 0, 0, 0, 0, 0, 8 * size)
    ): f"{'|' if size == 1 else '<'}{kind}{size}"
    for sign, kind in ((0, "u"), (8, "i"))
    for size in (1, 2, 4, 8)
} | {encoded: f"<f{size}" for size, encoded in _FLOATS.items()}
"""HDF5's encodings of the types that shardkit writes, without zeros at their end."""

STORED_TYPES = frozenset(_TYPES.values())
"""The types that shardkit writes, as NumPy spells them."""

_MOST_AXES = 18
"""Maximum axes of a dataset: rows, those of an array, and one for the bytes of a value."""

_LONGEST = 1 << 16
"""Maximum bytes of a block of headers, or of the heap with a group's member names."""
_MOST = 16 << 20
"""Maximum bytes of structure to read, enough for a thousand fields. It also ends cycles."""


class MalformedHdf5Error(Exception):
    """The file is not one that HDF5 could have written for shardkit."""


class StoredArray(NamedTuple):
    """A dataset, stored as one byte range of the file."""

    dtype: str
    """One of `STORED_TYPES`."""
    shape: tuple[int, ...]
    offset: int
    length: int
    """Size in bytes."""


def find_arrays(descriptor: int, size: int) -> dict[str, StoredArray]:
    """Return the datasets in the root of a finished file and in its groups.

    The position of ``descriptor`` is not used. Names in groups are group and name separated by
    ``/``. Raises MalformedHdf5Error if the file is truncated, inconsistent, or laid out
    differently.
    """
    return _Walk(descriptor, size).arrays()


class _Walk:
    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._budget = _MOST
        self._base = 0
        while self._bytes(0, len(_SIGNATURE)) != _SIGNATURE:
            self._base = 2 * self._base or 512  # after a user block

    def arrays(self) -> dict[str, StoredArray]:
        _, *versions, offsets, lengths, _, _, _, base, _, end, driver = _SUPERBLOCK.unpack(
            self._bytes(0, _SUPERBLOCK.size)
        )
        if any(versions) or (offsets, lengths, base, driver) != (8, 8, self._base, _NOWHERE):
            raise MalformedHdf5Error("it is not the kind of HDF5 that shardkit writes")
        if end > self._size:
            raise MalformedHdf5Error(f"it is truncated: it has {self._size} of {end} bytes")
        _, root, *_ = _ENTRY.unpack(self._bytes(_SUPERBLOCK.size, _ENTRY.size))
        arrays: dict[str, StoredArray] = {}
        for name, header in self._members(root, "/"):
            messages = self._messages(header)
            if _SYMBOLS not in messages:
                arrays[name] = self._array(messages, name)
                continue
            for inner, address in self._members(header, name):
                arrays[f"{name}/{inner}"] = self._array(self._messages(address), f"{name}/{inner}")
        if sum(array.length for array in arrays.values()) > self._size:
            raise MalformedHdf5Error("its datasets overlap")
        return arrays

    def _members(self, header: int, group: str) -> Iterator[tuple[str, int]]:
        """Yield the name and header address of each member of a group."""
        messages = self._messages(header)
        if _SYMBOLS not in messages or len(messages[_SYMBOLS]) < _PAIR.size:
            raise MalformedHdf5Error(f"{quoted(group)} is not a group written by shardkit")
        tree, heap = _PAIR.unpack_from(messages[_SYMBOLS])
        names = self._names(heap)
        seen: set[str] = set()
        for start, address, cached, _ in self._entries(tree, 8):
            raw, end, _ = names[start:].partition(b"\0")
            name = raw.decode("latin-1")
            if not end or not name or "/" in name or name in seen:
                raise MalformedHdf5Error(f"{quoted(group)} has a member named {quoted(name)}")
            if cached == 2 or address == _NOWHERE:
                raise MalformedHdf5Error(
                    f"{quoted(name)} in {quoted(group)} is a link that leads elsewhere"
                )
            seen.add(name)
            yield name, address

    def _names(self, address: int) -> bytes:
        signature, version, size, _, start = _HEAP.unpack(self._bytes(address, _HEAP.size))
        if signature != b"HEAP" or version != 0:
            raise MalformedHdf5Error(f"there are no names at byte {address}")
        return self._bytes(start, size)

    def _entries(self, address: int, depth: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the members below a node of a group's tree."""
        if self._bytes(address, 4) == b"SNOD":
            _, version, count = _TABLE.unpack(self._bytes(address, _TABLE.size))
            if version != 1:
                raise MalformedHdf5Error(f"the table at byte {address} has version {version}")
            yield from _ENTRY.iter_unpack(self._bytes(address + _TABLE.size, count * _ENTRY.size))
            return
        head = self._bytes(address, _TREE.size)
        signature, kind, level, count, _, _ = _TREE.unpack(head)
        if signature != b"TREE" or kind != 0 or depth == 0:
            raise MalformedHdf5Error(f"there is no tree of members at byte {address}")
        pairs = self._bytes(address + _TREE.size, count * _PAIR.size)
        for _, child in _PAIR.iter_unpack(pairs):
            yield from self._entries(child, min(depth - 1, level))

    def _messages(self, address: int) -> dict[int, bytes]:
        """Return the messages of an object's header, by type."""
        version, count, _, size = _HEADER.unpack(self._bytes(address, _HEADER.size))
        if version != 1:
            raise MalformedHdf5Error(f"the header at byte {address} has version {version}")
        blocks = [(address + _HEADER.size, size)]
        messages: dict[int, bytes] = {}
        for start, length in blocks:
            block = self._bytes(start, length)
            at = 0
            while at + _MESSAGE.size <= length and count:
                kind, size, flags = _MESSAGE.unpack_from(block, at)
                at += _MESSAGE.size
                body = block[at : at + size]
                if len(body) != size:
                    raise MalformedHdf5Error(f"the header at byte {address} is damaged")
                at += size
                count -= 1
                if kind == _CONTINUATION and size >= _PAIR.size:
                    blocks.append(_PAIR.unpack_from(body))
                elif kind in (_LINKS, _ELSEWHERE, _PACKING) or (kind in messages and kind in _ONCE):
                    raise MalformedHdf5Error(
                        f"the object at byte {address} was not laid out by shardkit"
                    )
                elif kind in _ONCE and flags & _SHARED:
                    raise MalformedHdf5Error(f"the object at byte {address} shares a header")
                messages[kind] = body
        return messages

    def _array(self, messages: dict[int, bytes], name: str) -> StoredArray:
        dtype = _TYPES.get(messages.get(_TYPE, b"").rstrip(b"\0"))
        shape = _shape(messages.get(_SPACE, b""))
        layout = messages.get(_LAYOUT, b"")
        if dtype is None or shape is None or layout[:2] != b"\x03\x01" or len(layout) < 18:
            raise MalformedHdf5Error(f"{quoted(name)} is not a dataset written by shardkit")
        offset, size = _PAIR.unpack_from(layout, 2)
        length = int(dtype[-1])
        for side in shape:
            length *= side
        if not length:
            return StoredArray(dtype, shape, 0, 0)
        offset += self._base
        if size != length or offset + length > self._size:
            raise MalformedHdf5Error(f"{quoted(name)} does not have the {length} bytes it declares")
        return StoredArray(dtype, shape, offset, length)

    def _bytes(self, address: int, length: int) -> bytes:
        """Return a block of the structure."""
        self._budget -= 64 + length  # count small reads, too: they take time
        offset = self._base + address
        if length > _LONGEST or self._budget < 0:
            raise MalformedHdf5Error(f"the structure at byte {offset} has no end")
        if offset + length > self._size:
            raise MalformedHdf5Error(f"it is truncated: byte {offset + length} is beyond its end")
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:  # pragma: no cover - truncated meanwhile
            raise MalformedHdf5Error(f"byte {offset + len(data)} cannot be read")
        return data


_ONCE = (_SPACE, _TYPE, _LAYOUT, _SYMBOLS)
"""Messages that define an object; each may occur once."""


def _shape(message: bytes) -> tuple[int, ...] | None:
    """Return the shape in a dataspace message, or None if the message is invalid."""
    version = message[:1]
    rank = int.from_bytes(message[1:2], "little")
    start = {b"\x01": 8, b"\x02": 4}.get(version, len(message))
    if not 1 <= rank <= _MOST_AXES or start + 8 * rank > len(message):
        return None
    return struct.unpack_from(f"<{rank}Q", message, start)
