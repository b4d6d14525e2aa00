"""Strings end to end in UTF-8, and the end of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

UTF8 = ("utf-8", "surrogateescape")
"""Encoding of strings: file names that are not UTF-8 keep their bytes."""


def join_strings(texts: Sequence[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return the bytes of all strings, and the end of each."""
    joined = "".join(texts)
    strings = texts if joined.isascii() else [text.encode(*UTF8) for text in texts]
    ends = np.cumsum([*map(len, strings)], dtype=np.int64)
    return np.frombuffer(joined.encode(*UTF8), np.uint8), ends


def split_strings(text: str | bytes, starts: Any, ends: Any, errors: str = UTF8[1]) -> list[str]:
    """Return the strings in some ranges; ASCII is decoded at once, in a third of the time."""
    spans = zip(starts.tolist(), ends.tolist(), strict=True)
    if isinstance(text, bytes) and not text.isascii():
        return [text[start:end].decode("utf-8", errors) for start, end in spans]
    decoded = text if isinstance(text, str) else text.decode()
    return [decoded[start:end] for start, end in spans]
