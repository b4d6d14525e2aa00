"""Progress of the fuzzing process, in memory that survives its crash."""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

from scripts.fuzzing.target import MAX_BYTES

_HEAD = struct.Struct("<QdQ")


class Progress:
    """How many inputs were tried, since when the present one is, and its bytes."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_HEAD.size + MAX_BYTES)
            self._memory = mmap.mmap(file.fileno(), 0)
        self.executions = 0

    def begin(self, data: bytes) -> None:
        data = data[:MAX_BYTES]
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, 0, self.executions, time.monotonic(), len(data))

    def end(self) -> None:
        self.executions += 1
        _HEAD.pack_into(self._memory, 0, self.executions, 0.0, 0)

    def look(self) -> tuple[int, float, bytes]:
        """Return inputs tried, seconds since the present one began (0 between two), its bytes."""
        executions, begun, size = _HEAD.unpack_from(self._memory, 0)
        data = bytes(self._memory[_HEAD.size : _HEAD.size + size])
        return executions, time.monotonic() - begun if begun else 0.0, data
