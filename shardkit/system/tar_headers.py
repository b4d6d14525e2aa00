"""Tar headers: the checksum and the name, which all readers of archives parse alike."""

from __future__ import annotations

import zlib


def byte_sum(block: bytes) -> int:
    """Return the sum of the bytes of at most one block."""
    # ASCII bytes of one block sum to less than Adler-32's modulus, so its lower half is exact.
    return (zlib.adler32(block) & 0xFFFF) - 1 if block.isascii() else sum(block)


def checksum(header: bytes) -> int:
    """Return the checksum of a header: the sum of its bytes, with spaces for the checksum."""
    return byte_sum(header) - byte_sum(header[148:156]) + 8 * 0x20


def member_name(header: bytes) -> bytes:
    """Return a member's name; POSIX archives store long ones in two parts."""
    name = header[:100].partition(b"\0")[0]
    prefix = header[345:500].partition(b"\0")[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name
