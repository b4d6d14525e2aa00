"""Reads scenarios.txt: what two commits must do alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")

WORDS = {
    "format": ("hdf5", "lmdb", "webdataset"),
    "layout": ("csv", "imagefolder", "parquet", "webdataset"),
    "engine": ("process", "thread"),
    "command": (
        *("append", "attach", "bench", "commit", "convert", "diff", "doctor", "export", "index"),
        *("info", "merge", "repair", "report", "show", "split", "tune"),
        *("upload", "verify", "work"),
    ),
}


@dataclass(frozen=True)
class Scenario:
    """Steps to take, each the words of a command."""

    name: str
    first: tuple[str, ...]
    """The steps before the hand-over; without one, all steps."""
    second: tuple[str, ...] = ()
    """The steps after it."""


def scenarios() -> Iterator[Scenario]:
    """Yield all scenarios, those first whose folders others read."""
    for line in LIST.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        words = list(dict.fromkeys(re.findall(r"{(\w+)}", line)))
        for values in product(*(WORDS[word] for word in words)):
            filled = line.format(**dict(zip(words, values, strict=True)))
            name, _, steps = filled.partition(":")
            first, _, second = steps.partition(" => ")
            yield Scenario(name, _steps(first), _steps(second))


def _steps(text: str) -> tuple[str, ...]:
    return tuple(step.strip() for step in text.split(" && ") if step.strip())
