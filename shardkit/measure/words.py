"""Words and numbers of reports, for tables, plots and pages alike."""

from __future__ import annotations

import math
from typing import Any


def printable(text: str) -> str:
    """Return a path or name that cannot break a line, a terminal or an encoding."""
    return text if text.isprintable() else ascii(text)[1:-1]


def shortened(text: str, width: int) -> str:
    """Return a printable name of at most ``width`` characters: beginning, dots, and end."""
    text = printable(text)
    if len(text) <= width:
        return text
    end = max(1, 2 * (width - 3) // 3)
    return f"{text[: max(0, width - 3 - end)]}...{text[-end:]}"


def size(count: float) -> str:
    """Return a number of bytes for people: "21.3 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def json_value(value: Any) -> Any:
    """Return values of which JSON has no infinite number and no NaN: None stands for them."""
    if isinstance(value, dict):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def percent(part: float) -> str:
    """Return a part of one for people: "78 %"."""
    return f"{100 * part:.0f} %"


def significant(value: float) -> str:
    """Return a number with what can be told of it: 0.04, 1.23, 12.3, 1,234."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def sample_words(settings: dict[str, Any]) -> str:
    """Return what a sample is and how samples come, from a report's settings."""
    parts = [printable(settings["decode"])]
    if settings["transform"]:
        parts.append(f"then {printable(settings['transform'])}")
    return f"{' '.join(parts)}, batches of {settings['batch_size']}, in random order"


def step_words(settings: dict[str, Any]) -> str:
    """Return what is done with a batch, from a report's settings."""
    if settings["model"]:
        return f"training {printable(settings['model'])} with each batch"
    if settings["step_ms"]:
        return f"a wait of {settings['step_ms']:g} ms for each batch"
    return "none: batches are read and let go"
