"""CRC-32C (Castagnoli), which Python's standard library lacks, with NumPy."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78
_LANE = 256
"""Bytes of a lane."""
_LANE_LOG = 8
_CHUNK = 1 << 18
"""Bytes of the lanes that are looked up together; each needs 12 bytes of memory."""
_FEW = 64
"""Bytes below which a loop over them is faster."""


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of ``data``.

    A CRC is linear: it is the XOR of what each byte adds by its value and position. So the data
    are divided into lanes, of which a table has the CRC for every value and position. Then the CRCs
    of lanes are joined in pairs: that of A and B is the CRC of A, advanced by the length of B, XOR
    that of B.
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
    table, positions = _lane_table()
    crcs = np.concatenate(
        [
            np.bitwise_xor.reduce(table[chunk.reshape(-1, _LANE) + positions], axis=1)
            for chunk in (buffer[n : n + _CHUNK] for n in range(0, len(buffer), _CHUNK))
        ]
    )
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
def _lane_table() -> tuple[_Words, npt.NDArray[np.int32]]:
    """Return the CRC of a lane of zeros but for one byte, and where each position starts."""
    rows = [_table8()]
    for _ in range(_LANE - 1):
        rows.append(_table8()[rows[-1] & 0xFF] ^ (rows[-1] >> 8))
    return np.concatenate(rows[::-1]), np.arange(_LANE, dtype=np.int32) * 256


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
        return [_table8()[value & 0xFF] ^ (value >> 8) for value in values]
    return [_advance(_advance(value, level - 1), level - 1) for value in values]
