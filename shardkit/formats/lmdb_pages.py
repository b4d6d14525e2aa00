"""Find the values in an LMDB file by parsing its pages, without a memory map or trust in them.

The layout is that of LMDB 0.9 on 64-bit little-endian machines, from ``mdb.c``. A page starts with
its number (8 bytes), padding (2), flags (2), and the bounds of its free space (2 + 2). A node
starts with its data size or child page (6, as three 16-bit words), the key size (2) and the key.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.system.text import quoted

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_PAGE_HEADER = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_META = struct.Struct("<IIQQ")
_DATABASE = struct.Struct("<IHHQQQQQ")
_META_TAIL = struct.Struct("<QQ")

_BRANCH = 0x01
_LEAF = 0x02
_OVERFLOW = 0x04
_BIG_DATA = 0x01
"""Flag of a leaf node that holds the number of the first overflow page of its value."""

_NO_PAGE = 0xFFFF_FFFF_FFFF_FFFF
_DEEPEST = 32
"""LMDB's limit of a tree's depth."""
_LONGEST_KEY = 511
"""LMDB's limit of a key's size in bytes."""


class MalformedLmdbError(Exception):
    """The file is not one that LMDB could have written."""


class Entry(NamedTuple):
    """One key, and the byte range of its value in the file."""

    key: bytes
    offset: int
    length: int


def walk(descriptor: int, size: int) -> Iterator[Entry]:
    """Yield every entry of the main database of a finished LMDB file, in key order.

    The position of ``descriptor`` is not used. Raises MalformedLmdbError if the file is truncated,
    inconsistent, or not LMDB 0.9.
    """
    return _Walk(descriptor, size).entries()


class _Walk:
    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._used = bytearray()
        head = self._read(0, _PAGE_HEADER.size + _META.size + _DATABASE.size)
        # LMDB keeps the page size in a spare word of the first database's description.
        self._page_size = _DATABASE.unpack_from(head, _PAGE_HEADER.size + _META.size)[0]
        if self._page_size not in (1 << bits for bits in range(9, 17)):
            raise MalformedLmdbError("it is not an LMDB file")

    def entries(self) -> Iterator[Entry]:
        _, last_page, root = max(self._meta(0), self._meta(1))
        if (last_page + 1) * self._page_size > self._size:
            raise MalformedLmdbError(
                f"it is truncated: LMDB uses {(last_page + 1) * self._page_size} bytes, but the "
                f"file has {self._size}"
            )
        self._used = bytearray(last_page + 1)
        if root != _NO_PAGE:
            last = b""
            for entry in self._tree(root, 1):
                if entry.key <= last:
                    raise MalformedLmdbError(f"the key {quoted(entry.key)} is out of order")
                last = entry.key
                yield entry

    def _use(self, first: int, count: int = 1) -> None:
        """Mark pages as used; none may be used twice, so all values fit into the file."""
        used = self._used[first : first + count]
        if len(used) < count or any(used):
            raise MalformedLmdbError(f"page {first} is used twice, or does not exist")
        self._used[first : first + count] = b"\1" * count

    def _meta(self, number: int) -> tuple[int, int, int]:
        """Return transaction, last page and main root from one of the two meta pages."""
        page = self._page(number)
        at = _PAGE_HEADER.size
        magic, version, _, _ = _META.unpack_from(page, at)
        if magic != _MAGIC or version != _DATA_VERSION:
            raise MalformedLmdbError("it is not an LMDB file of the 0.9 format")
        at += _META.size + _DATABASE.size  # the first database lists free pages
        _, flags, *_, root = _DATABASE.unpack_from(page, at)
        if flags:
            raise MalformedLmdbError("its main database has a custom order or duplicates")
        last_page, transaction = _META_TAIL.unpack_from(page, at + _DATABASE.size)
        return transaction, last_page, root

    def _tree(self, number: int, depth: int) -> Iterator[Entry]:
        if depth > _DEEPEST:
            raise MalformedLmdbError(f"its tree has more than {_DEEPEST} levels")
        self._use(number)
        page = self._page(number)
        page_number, _, flags, lower, _ = _PAGE_HEADER.unpack_from(page)
        count = (lower - _PAGE_HEADER.size) // 2
        if page_number != number or count < 1 or lower > len(page):
            raise MalformedLmdbError(f"page {number} is not a page of its tree")
        pointers = struct.unpack_from(f"<{count}H", page, _PAGE_HEADER.size)
        if flags == _LEAF:
            space = len(page) - lower
            entries = []
            for pointer in pointers:
                entry, size = self._entry(page, number, pointer)
                entries.append(entry)
                space -= size
                if space < 0:
                    raise MalformedLmdbError(f"the nodes of page {number} overlap")
            yield from entries
        elif flags == _BRANCH:
            for pointer in pointers:
                low, high, top, _ = self._node(page, number, pointer)
                yield from self._tree(low | high << 16 | top << 32, depth + 1)
        else:
            raise MalformedLmdbError(f"page {number} is neither a branch nor a leaf")

    def _entry(self, page: bytes, number: int, pointer: int) -> tuple[Entry, int]:
        """Return an entry of a leaf, and the bytes that it occupies in that page."""
        low, high, flags, key_size = self._node(page, number, pointer)
        start = pointer + _NODE.size + key_size
        length = low | high << 16
        key = page[pointer + _NODE.size : start]
        if flags == 0 and start + length <= len(page):
            size = _NODE.size + key_size + length
            return Entry(key, number * self._page_size + start, length), size
        if flags != _BIG_DATA or start + 8 > len(page):
            raise MalformedLmdbError(f"page {number} has a damaged node for the key {quoted(key)}")
        first = int.from_bytes(page[start : start + 8], "little")
        offset = first * self._page_size
        header = self._read(offset, _PAGE_HEADER.size)
        page_number, _, kind, low, high = _PAGE_HEADER.unpack(header)
        pages = low | high << 16
        if (
            page_number != first
            or kind != _OVERFLOW
            or _PAGE_HEADER.size + length > pages * self._page_size
        ):
            raise MalformedLmdbError(
                f"page {first} does not contain the value of the key {quoted(key)}"
            )
        self._use(first, pages)
        return Entry(key, offset + _PAGE_HEADER.size, length), _NODE.size + key_size + 8

    def _node(self, page: bytes, number: int, pointer: int) -> tuple[int, int, int, int]:
        if pointer + _NODE.size > len(page):
            raise MalformedLmdbError(f"page {number} points outside of itself")
        low, high, flags, key_size = _NODE.unpack_from(page, pointer)
        if key_size > _LONGEST_KEY:
            raise MalformedLmdbError(f"page {number} has a key of {key_size} bytes")
        return low, high, flags, key_size

    def _page(self, number: int) -> bytes:
        return self._read(number * self._page_size, self._page_size)

    def _read(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self._size:
            raise MalformedLmdbError(f"it is truncated: byte {offset + length} is beyond its end")
        data = os.pread(self._descriptor, length, offset)
        if len(data) != length:  # pragma: no cover - truncated meanwhile
            raise MalformedLmdbError(f"byte {offset + len(data)} cannot be read")
        return data
