"""Libraries that read damaged files in a child: what it may do to this process."""

from __future__ import annotations

import operator
import os
import signal
import sys

import pytest
from refusals import refused

from shardkit import ConversionFailed
from shardkit.errors import BadImage
from shardkit.sources import library_process


def test_a_library_that_hangs_or_dies_is_an_error() -> None:
    with refused(ValueError, "SIGABRT"):
        library_process.call(os.abort)
    with refused(ValueError, "120 s of CPU"):
        library_process.call(signal.raise_signal, signal.SIGXCPU)
    with refused(ValueError, "3"):
        library_process.call(sys.exit, 3)
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        library_process.call(operator.truediv, 1, 0)
    with refused(BadImage):
        library_process.call(os.listdir, "/nowhere")
    with refused(ConversionFailed, "2.0"):
        library_process.call(bytearray, 3 << 30)  # never touched, if it should succeed
    with refused(OSError):  # the file is not the cause
        library_process.call(os.read, 1 << 20, 1)
    assert library_process.call(bytes, 3) == bytes(3)
