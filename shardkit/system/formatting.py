"""Numbers and phrases as reports show them, shared by tables, plots and pages."""

from __future__ import annotations

import math
import re
from typing import Any

from shardkit.errors import UsageError, setting

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


_LEAST_BYTES = 64 << 10
"""Minimum of a number without a unit: whoever writes ``256`` means MiB."""


class ByteCount(int):
    """A number of bytes that was parsed, of any size."""


def parse_bytes(size: int | str, option: str) -> ByteCount:
    """Return a number of bytes, given as one or as ``256MiB`` or ``1GB``.

    UsageError, which names ``option``, if it is neither, or a number under 64 KiB without a unit.
    """
    if isinstance(size, ByteCount):
        return size
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", str(size).lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(
            f"{setting(option, str(size)[:40])} is not a size such as 256MiB, 1GB or 500000"
        )
    number, unit = match.groups()
    count = ByteCount(float(number) * _UNITS[unit])
    if not unit and 0 < count < _LEAST_BYTES:
        raise UsageError(
            f"{setting(option, size)} means bytes",
            remedy=f"give a unit, as in {number}MiB or {number}B",
        )
    return count


def size(count: float) -> str:
    """Format a number of bytes: "21.3 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def amount(count: int, noun: str) -> str:
    """Return a count with its noun: "1 image", "2,000 images"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}{'es' if noun[-1] == 's' else 's'}"


def json_value(value: Any) -> Any:
    """Return ``value`` as JSON allows it: infinities and NaN become None."""
    if isinstance(value, dict):
        return {name: json_value(element) for name, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def significant(value: float) -> str:
    """Format a number with its significant digits: 0.04, 1.23, 12.3, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
