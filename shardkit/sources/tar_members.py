"""The members of tar archives that any program wrote, found by walking their headers.

`shardkit.formats.webdataset` reads shardkit's own archives and refuses what it does not write. This
walk accepts all that GNU tar, bsdtar, busybox, cpio and Python write, and reports the rest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardkit.errors import BadImage
from shardkit.sources.inputs import MAX_IMAGE_BYTES, OpenedFile
from shardkit.system.tar_headers import checksum, member_name
from shardkit.system.text import quoted

MAX_SPARSE = 1 << 26
"""Maximum size of a sparse file: its holes take no space, so a small archive could state any."""

_BLOCK = 512
_LONGEST_EXTENSION = 1 << 20
_MOST_EXTENTS = 1 << 16
_CHUNK = 1 << 20

_FILES = (b"0", b"\0", b"7", b"S")
_SPARSE = b"S"
_LINKS = {b"1": "a hard link", b"2": "a symbolic link"}
_WITHOUT_CONTENT = {b"3": "a device", b"4": "a device", b"5": "a folder", b"6": "a pipe"}
_EXTENSIONS = (b"L", b"K", b"x", b"X", b"g")
_MOST_DIGITS = 12
_LONGEST_LINE = 20
"""Maximum bytes of a number in a sparse map, with its line end."""
_DECIMAL = re.compile(rb"[0-9]{1,18}")
_PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")


class Extent(NamedTuple):
    """A range of a member's content."""

    position: int
    """Where it is in the content; between extents are zeros."""
    offset: int
    """Where it is in the archive."""
    length: int


class Member(NamedTuple):
    """One member of an archive."""

    start: int
    """Offset of its first header."""
    name: str
    kind: str
    """Its kind if it is not a file, such as "a folder", or ""."""
    size: int
    extents: tuple[Extent, ...]


class _Header(NamedTuple):
    """The header of a member, and what its extension headers state."""

    start: int
    name: bytes
    kind: bytes
    size: int
    content: int
    """Offset of its content."""
    block: bytes
    pax_records: Sequence[tuple[bytes, bytes]]
    """Records of its PAX header, in order."""


class _Content(NamedTuple):
    """The content of a member."""

    start: int
    """Offset of the bytes that the member's header counts."""
    size: int
    extents: tuple[Extent, ...]


def members(view: OpenedFile, start: int = 0) -> Iterator[Member]:
    """Yield the members of an archive from an offset on.

    BadImage is raised at the first byte that cannot be read: a truncated or damaged archive.
    """
    offset = start
    while (header := _header(view, offset)) is not None:
        kind = _LINKS.get(header.kind) or _WITHOUT_CONTENT.get(header.kind, "")
        if not kind and header.kind not in _FILES:
            kind = f"of the type {quoted(header.kind)}"
        body = _content_of(view, header)
        name = header.name.decode("utf-8", "surrogateescape")
        if header.kind == b"\0" and name.endswith("/"):  # so folders were marked once
            kind = "a folder"
        stored = 0 if header.kind in (*_LINKS, *_WITHOUT_CONTENT) else header.size
        end = body.start + stored
        if end > view.size:
            raise BadImage(f"the archive is truncated in the member {quoted(name)}")
        yield Member(header.start, name, kind, body.size, body.extents)
        offset = end + -stored % _BLOCK
    _check_end(view, offset)


def content(view: OpenedFile, member: Member) -> bytes:
    """Return a member's content; BadImage if truncated, or a sparse file over `MAX_SPARSE`."""
    if member.size > MAX_IMAGE_BYTES:
        raise BadImage(f"it has {member.size:,} bytes, over the limit of {MAX_IMAGE_BYTES:,}")
    if len(member.extents) == 1 and member.extents[0].length == member.size:
        data = view.read(member.extents[0].offset, member.size)
    else:
        if member.size > MAX_SPARSE:
            raise BadImage(f"it is a sparse file of over {MAX_SPARSE:,} bytes")
        buffer = bytearray(member.size)
        for extent in member.extents:
            content = view.read(extent.offset, extent.length)
            if len(content) < extent.length:
                raise BadImage("the archive is truncated in it")
            buffer[extent.position : extent.position + extent.length] = content
        data = bytes(buffer)
    if len(data) != member.size:
        raise BadImage("the archive is truncated in it")
    return data


def _header(view: OpenedFile, offset: int) -> _Header | None:
    """Return the next member's header, after all extension headers; None at the end."""
    start = offset
    name = b""
    records: list[tuple[bytes, bytes]] = []
    while True:
        block = view.read(offset, _BLOCK)
        if not block.strip(b"\0"):
            if records or name:
                raise BadImage(f"the archive is truncated at byte {offset}")
            return None
        if len(block) < _BLOCK:
            raise BadImage(f"the archive is truncated at byte {offset}")
        kind, size = _parse(block, offset)
        if kind not in _EXTENSIONS:
            break
        text = _extension(view, offset + _BLOCK, size)
        if kind == b"L":
            name = text.partition(b"\0")[0]
        elif kind in (b"x", b"X"):
            records += _pax_records(text, offset)
        elif kind == b"g":
            _check_global(text, offset)
        offset += _BLOCK + size + -size % _BLOCK
    entries = dict(records)
    if b"size" in entries:
        size = _decimal(entries[b"size"], offset)
    name = entries.get(b"GNU.sparse.name") or entries.get(b"path") or name or member_name(block)
    return _Header(start, name, kind, size, offset + _BLOCK, block, records)


def _extension(view: OpenedFile, offset: int, size: int) -> bytes:
    if size > _LONGEST_EXTENSION:
        raise BadImage(f"the header at byte {offset} has {size} bytes")
    text = view.read(offset, size)
    if len(text) < size:
        raise BadImage(f"the archive is truncated at byte {offset}")
    return text


def _check_global(text: bytes, offset: int) -> None:
    """Refuse a header for all members that changes more than comments and times."""
    for keyword, _ in _pax_records(text, offset):
        if keyword in (b"path", b"size") or keyword.startswith(b"GNU.sparse"):
            raise BadImage(
                f"the PAX header at byte {offset} sets {quoted(keyword)} for all members"
            )


def _parse(block: bytes, offset: int) -> tuple[bytes, int]:
    """Return the type and size in a header, after comparing its checksum.

    It is the sum of the bytes; some programs took them for signed ones.
    """
    stored = _number(block[148:156], offset)
    total = checksum(block)
    if stored != total and stored != total - 256 * sum(
        byte > 127 for byte in block[:148] + block[156:]
    ):
        raise BadImage(f"the archive is damaged, or not a tar file, at byte {offset}")
    return block[156:157], _number(block[124:136], offset)


def _number(field: bytes, offset: int) -> int:
    """Return a number: octal, or binary if it is too large for that."""
    if field[:1] == b"\x80" and (value := int.from_bytes(field[1:], "big")) < 1 << 63:
        return value
    digits = field.partition(b"\0")[0].strip() or b"0"
    if digits.isdigit() and len(digits) <= _MOST_DIGITS:
        with contextlib.suppress(ValueError):
            return int(digits, 8)
    raise BadImage(f"the archive is damaged, or not a tar file, at byte {offset}")


def _decimal(value: bytes, offset: int) -> int:
    if not _DECIMAL.fullmatch(value):
        raise BadImage(f"the header at byte {offset} has no number in {quoted(value)}")
    return int(value)


def _pax_records(text: bytes, offset: int) -> Iterator[tuple[bytes, bytes]]:
    start = 0
    stop = len(text.rstrip(b"\0"))
    while start < stop:
        match = _PAX_LENGTH.match(text, start)
        end = start + int(match[1]) if match else 0
        keyword, equals, value = text[match.end() if match else end : end - 1].partition(b"=")
        if not equals or text[end - 1 : end] != b"\n":
            raise BadImage(f"the PAX header at byte {offset} is damaged")
        yield keyword, value
        start = end


def _content_of(view: OpenedFile, header: _Header) -> _Content:
    """Return the content of a member: its size, and where it is."""
    start = header.content
    if header.kind in (*_LINKS, *_WITHOUT_CONTENT):
        return _Content(start, 0, ())
    entries = dict(header.pax_records)
    if header.kind == _SPARSE:
        return _old_sparse(view, header)
    if entries.get(b"GNU.sparse.major") == b"1":
        return _sparse_map_in_content(view, header, entries)
    if b"GNU.sparse.size" in entries:
        size = _decimal(entries[b"GNU.sparse.size"], header.start)
        if b"GNU.sparse.map" in entries:
            numbers = [*filter(None, entries[b"GNU.sparse.map"].split(b","))]
        else:
            wanted = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
            numbers = [value for keyword, value in header.pax_records if keyword in wanted]
        return _Content(start, size, _extents(header, start, size, numbers))
    return _Content(start, header.size, (Extent(0, start, header.size),))


def _sparse_map_in_content(
    view: OpenedFile, header: _Header, entries: dict[bytes, bytes]
) -> _Content:
    """Return the content of a member that starts with lines of decimal numbers, its map."""
    size = _decimal(entries.get(b"GNU.sparse.realsize", b""), header.start)
    lines: list[bytes] = []
    tail = b""
    start = header.content
    wanted = 1
    while len(lines) < wanted:
        block = view.read(start, _BLOCK)
        if len(block) < _BLOCK or start > header.content + header.size or len(tail) > _LONGEST_LINE:
            raise BadImage(f"the sparse file at byte {header.start} has no map")
        start += _BLOCK
        *complete, tail = (tail + block).split(b"\n")
        lines += complete
        if wanted == 1 and lines:
            count = _decimal(lines[0], header.start)
            if count > _MOST_EXTENTS:
                raise BadImage(f"the sparse file at byte {header.start} has {count} extents")
            wanted += 2 * count
    return _Content(header.content, size, _extents(header, start, size, lines[1:wanted]))


def _old_sparse(view: OpenedFile, header: _Header) -> _Content:
    """Return the content of a member of GNU's own type, whose map is in its headers."""
    size = _number(header.block[483:495], header.start)
    numbers = _sparse_pairs(header.block[386:482], header.start)
    start = header.content
    more = header.block[482]
    while more:
        block = view.read(start, _BLOCK)
        if len(block) < _BLOCK or len(numbers) > 2 * _MOST_EXTENTS:
            raise BadImage(f"the sparse file at byte {header.start} has no map")
        numbers += _sparse_pairs(block[:504], header.start)
        start = start + _BLOCK
        more = block[504]
    return _Content(start, size, _extents(header, start, size, numbers))


def _sparse_pairs(table: bytes, offset: int) -> list[bytes]:
    fields = [table[start : start + 12] for start in range(0, len(table), 12)]
    used = [field for field in fields if field.strip(b"\0")]
    return [b"%d" % _number(field, offset) for field in used]


def _extents(
    header: _Header, offset: int, size: int, numbers: Sequence[bytes]
) -> tuple[Extent, ...]:
    """Return the extents of a sparse file from the pairs of position and length."""
    extents = []
    before = 0
    for pair in range(0, len(numbers) - 1, 2):
        position, length = (_decimal(number, header.start) for number in numbers[pair : pair + 2])
        if position < before or position + length > size:
            raise BadImage(f"the sparse file at byte {header.start} has a damaged map")
        extents.append(Extent(position, offset, length))
        offset = offset + length
        before = position + length
    return tuple(extents)


def _check_end(view: OpenedFile, offset: int) -> None:
    """Refuse an archive without its end: only this finds a truncation between members."""
    if view.size - offset < _BLOCK:
        raise BadImage("the archive ends without its end marker, so it may be truncated")
    for start in range(offset, view.size, _CHUNK):
        if view.read(start, _CHUNK).strip(b"\0"):
            raise BadImage(
                f"more bytes follow the end of the archive at byte {offset}: concatenated archives "
                "are read only up to there"
            )
