"""CRC-32C (Castagnoli), which Python's standard library lacks, with NumPy."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_LANE = 64
"""Bytes of a lane. All lanes advance together, two bytes in each step."""
_LANE_LOG = 6
_FEW = 64
"""Bytes below which a loop over them is faster."""


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``: 140 MB/s for 100 KB, 10 MB/s for 3 KB.

    The data are divided into lanes. The CRCs of all lanes are computed side by side, and joined in
    pairs: that of A and B is the CRC of A, advanced by the length of B, XOR that of B.
    """
    if len(data) < _FEW:
        crc = 0xFFFFFFFF
        small = _table()
        for byte in bytes(data):
            crc = small[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        return crc ^ 0xFFFFFFFF
    lanes = -(-len(data) // _LANE)
    buffer = np.zeros(
        lanes * _LANE, np.uint8
    )  # zeros in front do not change a CRC that starts at 0
    start = len(buffer) - len(data)
    buffer[start:] = np.frombuffer(data, np.uint8)
    buffer[start : start + 4] ^= 0xFF  # the same as starting at 0xFFFFFFFF
    steps = np.ascontiguousarray(buffer.view("<u2").reshape(lanes, -1).T).astype(np.uint32)
    table = _table16()
    crcs = np.zeros(lanes, np.uint32)
    for step in steps:
        crcs = table[(crcs ^ step) & 0xFFFF] ^ (crcs >> 16)
    level = _LANE_LOG
    while len(crcs) > 1:
        if len(crcs) % 2:
            crcs = np.concatenate([np.zeros(1, np.uint32), crcs])
        crcs = _advance(crcs[::2], level) ^ crcs[1::2]
        level += 1
    return int(crcs[0]) ^ 0xFFFFFFFF


@functools.cache
def _table() -> list[int]:
    table: list[int] = _table8().tolist()
    return table


@functools.cache
def _table8() -> _Words:
    crcs = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(crcs & 1, (crcs >> 1) ^ np.uint32(_POLYNOMIAL), crcs >> 1)
    return crcs


@functools.cache
def _table16() -> _Words:
    crcs = np.arange(65536, dtype=np.uint32)
    for _ in range(2):
        crcs = _table8()[crcs & 0xFF] ^ (crcs >> 8)
    return crcs


def _advance(crcs: _Words, level: int) -> _Words:
    """Return each CRC after ``2**level`` more zero bytes."""
    tables = _advance_tables(level)
    advanced: _Words = tables[0][crcs & 0xFF] ^ tables[1][(crcs >> 8) & 0xFF]
    advanced ^= tables[2][(crcs >> 16) & 0xFF] ^ tables[3][crcs >> 24]
    return advanced


@functools.cache
def _advance_tables(level: int) -> list[_Words]:
    """Return a table for each byte of a CRC: advancing is linear, so the results are XORed."""
    values = [np.arange(256, dtype=np.uint32) << np.uint32(8 * byte) for byte in range(4)]
    if level == 0:
        return [_table8()[each & 0xFF] ^ (each >> 8) for each in values]
    return [_advance(_advance(each, level - 1), level - 1) for each in values]
