"""Libraries that read damaged files in a child: what it may do to this process."""

from __future__ import annotations

import operator
import os
import sys
import time

import pytest

from shardkit import ConversionFailed
from shardkit.errors import BadImage
from shardkit.sources import library_process


def test_a_library_that_hangs_or_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"crashed \(SIGABRT\): the file is damaged"):
        library_process.call(os.abort)
    monkeypatch.setattr(library_process.HELPER, "seconds", 0.2)
    with pytest.raises(ValueError, match="did not answer"):
        library_process.call(time.sleep, 60)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="ended with status 3"):
        library_process.call(sys.exit, 3)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        library_process.call(operator.truediv, 1, 0)
    with pytest.raises(BadImage, match="it cannot be read: No such file"):
        library_process.call(os.listdir, "/nowhere")
    with pytest.raises(ConversionFailed, match=r"it needs over 2\.0 GiB of memory"):
        library_process.call(bytearray, 3 << 30)  # never touched, if it should succeed
    with pytest.raises(OSError, match="Bad file descriptor"):  # the file is not the cause
        library_process.call(os.read, 1 << 20, 1)
    assert library_process.call(bytes, 3) == bytes(3)
