"""Numbers for people and for JSON."""

from __future__ import annotations

import math
from typing import Any


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
