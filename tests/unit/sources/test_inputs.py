"""Opened input files: they are closed once, and unpacked if they are compressed."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path

from interrupting import interrupt_everywhere

from shardkit.sources import inputs
from shardkit.sources.inputs import OpenedFile


def test_an_interruption_closes_no_file_twice(tmp_path: Path) -> None:
    """A second time would fail, or close a file that another thread opened."""
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    part = raw.compress(b"content") + raw.flush()
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"more" + part))

    def read() -> bytes:
        with OpenedFile(os.fspath(path)) as file:
            file.enter(4, len(part), packed=True)
            return file.read(0, 7)

    assert read() == b"content"
    assert interrupt_everywhere(read, inputs) > 10
