"""Compressed files of sources: what comes out and is refused; libraries in a child harm nobody."""

from __future__ import annotations

import bz2
import gzip
import operator
import os
import signal
import sys
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import make_tar, png_of
from interrupting import interrupt_everywhere
from refusals import refused

from shardkit import open_source
from shardkit.errors import BadImage, ConversionFailed
from shardkit.sources import inputs, library_process, unpacking
from shardkit.sources.inputs import OpenedFile

PACKERS: dict[str, tuple[str, Callable[[Any, bytes], bytes]]] = {
    "gz": ("gzip", lambda library, data: gzip.compress(data, 1)),
    "bz2": ("bz2", lambda library, data: bz2.compress(data, 1)),
    "br": ("brotli", lambda library, data: bytes(library.compress(data, quality=1))),
    "snappy": ("snappy", lambda library, data: bytes(library.compress(data))),
    "zst": ("zstandard", lambda library, data: bytes(library.compress(data))),
}


def packed(suffix: str, data: bytes) -> bytes:
    name, pack = PACKERS[suffix]
    pytest.importorskip(name)
    return pack(import_module(name), data)


@pytest.mark.parametrize("suffix", PACKERS)
def test_what_was_packed_comes_out(suffix: str, tmp_path: Path) -> None:
    piece = 1 << 20
    for size in (0, 1, piece, 2 * piece + 1):
        data = np.random.default_rng(size).integers(0, 3, size, np.uint8).tobytes()
        path = tmp_path / f"{size}.{suffix}"
        path.write_bytes(packed(suffix, data))
        with OpenedFile(str(path)) as view:
            assert view.size == size
            assert view.read(0, size) == data


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_file_is_bad_and_never_shorter(suffix: str, tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3000, np.uint8).tobytes()
    whole = packed(suffix, data)
    for number, cut in enumerate((1, len(whole) // 2, len(whole) - 3)):
        path = tmp_path / f"{number}.{suffix}"
        path.write_bytes(whole[:-cut])
        with refused(BadImage), OpenedFile(str(path)):
            pass


@pytest.mark.parametrize("suffix", ["gz", "bz2", "zst"])
def test_tar_archives_in_a_folder_may_be_packed(suffix: str, tmp_path: Path) -> None:
    images = {f"cat/{row}.png": png_of(np.full((4, 4, 3), row, np.uint8)) for row in range(3)}
    plain = make_tar(tmp_path, images)
    (tmp_path / f"y.tar.{suffix}").write_bytes(packed(suffix, plain.read_bytes()))
    plain.unlink()
    (found,) = open_source("webdataset", tmp_path).scan().splits.values()
    assert [record.fields["png"] for record in found.read(range(3))] == [*images.values()]


def test_a_file_may_have_many_bytes_only_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "_FREE_BYTES", 1 << 20)
    path = tmp_path / "x.bz2"
    path.write_bytes(bz2.compress(bytes(8 << 20)))
    with refused(BadImage), OpenedFile(str(path)):
        pass


@pytest.mark.parametrize("suffix", PACKERS)
def test_no_more_is_unpacked_than_an_index_states(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(packed(suffix, bytes(3000)))
    for stated, fits in ((2999, False), (3000, True), (3001, True)):
        if fits:
            with OpenedFile(str(path), unpacked_size=stated) as view:
                assert view.size == 3000
        else:
            with refused(BadImage, "2,999"), OpenedFile(str(path), unpacked_size=stated):
                pass


def test_many_small_members_are_unpacked_in_time_in_proportion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of each member copies all that follows of what it was given."""
    given: list[int] = []

    class Unpacker:
        def __init__(self, window: int) -> None:
            self._unpacker = decompressobj(window)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._unpacker, name)

        def decompress(self, data: bytes, most: int) -> bytes:
            given.append(len(data))
            return bytes(self._unpacker.decompress(data, most))

    decompressobj = zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", Unpacker)
    members = [gzip.compress(b"%d" % number, 1) for number in range(5000)]
    path = tmp_path / "x.gz"
    path.write_bytes(b"".join(members))
    with OpenedFile(str(path)) as view:
        assert view.read(0, view.size) == b"".join(b"%d" % number for number in range(5000))
    assert max(given) < 1 << 14


def test_a_part_of_a_file_is_packed_once(tmp_path: Path) -> None:
    """Two bytes are an empty stream of DEFLATE; only files of gzip have several."""
    path = tmp_path / "x"
    path.write_bytes(b"\x03\0" * 1000)
    for length in (1000, 3, 1):
        with refused(BadImage), OpenedFile(str(path)) as view:
            view.enter(0, length, packed=True)
    with OpenedFile(str(path)) as view:
        view.enter(0, 2, packed=True)
        assert view.size == 0


def test_the_suffix_says_how_a_file_is_packed() -> None:
    packings = {
        "a.tar.gz": "gz",
        "a.tgz": "tgz",
        "chunk-0-1.zstd.bin": "zstd",
        "chunk-0-1.zstd:4.bin": "zstd",
        "shard.00000.mds.zstd": "zstd",
        "a.gz.tar": "",
        "a.bin": "",
        "zst": "",
    }
    assert {name: unpacking.packing_of(name) for name in packings} == packings


# Opened input files: they are closed once, and unpacked if they are compressed.


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


# Libraries that read damaged files in a child: what it may do to this process.


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
