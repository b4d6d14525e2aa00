"""Compressed input files, unpacked once in each process to one unnamed temporary file."""

from __future__ import annotations

import bz2
import os
import re
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from shardkit.contracts import Range
from shardkit.errors import BadImage, UsageError

_CHUNK = 1 << 20
_SHORT = 1 << 13
_MOST_RATIO = 1100
"""Maximum of unpacked bytes for each packed one; zlib reaches 1,032, datasets rarely 10."""
_FREE_BYTES = 1 << 26
_MOST_WINDOW = 1 << 27
"""Memory that a Zstandard file may ask for: that of ``zstd --ultra -22``."""
_SUFFIX = re.compile(r"\.(?:(gz|tgz|bz2|br|snappy|zstd?)|(zstd)(?::[0-9]+)?\.bin)\Z")

DEFLATED = "deflate"
"""The packing of a range of a file: DEFLATE without a header."""


class Unpacked(NamedTuple):
    """An unpacked file in the temporary file of this process."""

    file: int
    start: int
    size: int


def packing_of(path: str) -> str:
    """Return how a file is compressed, from its suffix; "" if it is not."""
    match = _SUFFIX.search(path)
    return (match[1] or match[2]) if match else ""


def unpacked(
    key: tuple[str, int, int], source: int, inside: Range, packing: str, limit: int | None = None
) -> Unpacked:
    """Return the unpacked content of a range of a file, unpacked at first use.

    ``key`` is path, modification time, and the size or start of the range; ``packing`` as
    `packing_of`, or `DEFLATED`. It raises BadImage if the range is damaged, or unpacks to more than
    ``limit`` bytes, or 1,100 times its size; UsageError if it needs a package that is not
    installed.
    """
    if os.getpid() not in _STORES:
        _STORES.setdefault(os.getpid(), _Store())
    store = _STORES[os.getpid()]
    with store.lock:
        if key not in store.known:
            most = max(_FREE_BYTES, _MOST_RATIO * inside.length), "too many for its size"
            if limit is not None:
                most = min(most, (limit, "the declared size"))
            size = _unpack(_Packed(source, inside), packing, store, most)
            store.known[key] = Unpacked(store.file, store.end, size)
            store.end += size
        return store.known[key]


class _Store:
    """The unpacked files of one process, end to end in an unnamed file, which the kernel frees."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        with tempfile.TemporaryFile() as file:
            self.file = os.dup(file.fileno())
        self.end = 0
        self.known: dict[tuple[str, int, int], Unpacked] = {}


_STORES: dict[int, _Store] = {}
"""The store of each process: a child of a fork starts its own, since both would write to one."""


class _Packed:
    """The packed bytes, as a file to read to its end."""

    def __init__(self, source: int, inside: Range) -> None:
        self._source = source
        self.at = inside.offset
        self.stop = inside.offset + inside.length

    def read(self, size: int = _CHUNK) -> bytes:
        """Return up to ``size`` more bytes, of which there are none at the end."""
        data = os.pread(self._source, min(size, self.stop - self.at), self.at)
        self.at += len(data)
        return data

    def peek(self, at: int, size: int) -> bytes:
        """Return up to ``size`` bytes at an offset of the file."""
        return os.pread(self._source, max(0, min(size, self.stop - at)), at)

    def chunks(self, size: int = _CHUNK) -> Iterator[bytes]:
        """Yield the bytes, ``size`` at a time."""
        while chunk := self.read(size):
            yield chunk


def _unpack(packed: _Packed, packing: str, store: _Store, most: tuple[int, str]) -> int:
    """Append unpacked bytes to the store; return their number. ``most`` is a limit and why."""
    end = store.end
    try:
        for chunk in _UNPACKERS[packing](packed):
            view = memoryview(chunk)
            if end + len(view) - store.end > most[0]:
                raise BadImage(f"it unpacks to over {most[0]:,} bytes, {most[1]}")
            while view:
                written = os.pwrite(store.file, view, end)
                view = view[written:]
                end += written
    except ImportError as error:
        raise UsageError(
            f"a file is compressed with {packing}, which needs {error.name}",
            remedy="pip install 'shardkit[compressed]'",
        ) from error
    return end - store.end


def _inflate(window: int, packed: _Packed) -> Iterator[bytes]:
    """Unpack DEFLATE; ``window`` is that of `zlib.decompressobj`. Only gzip may have members."""
    unpacker = zlib.decompressobj(window)
    # The end of a member copies what follows, which must be short: it may have two bytes.
    for chunk in packed.chunks(_SHORT):
        waiting = chunk
        while waiting:
            if unpacker.eof:
                if not waiting.strip(b"\0"):  # padding
                    break
                if window < 0:
                    raise BadImage(_FOLLOWED)
                unpacker = zlib.decompressobj(window)
            try:
                data = unpacker.decompress(waiting, _CHUNK)
            except zlib.error as error:
                raise BadImage(f"it cannot be unpacked: {error}") from error
            waiting = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
            yield data
    while data := unpacker.decompress(unpacker.unconsumed_tail, _CHUNK):  # held back by zlib
        yield data
    if not unpacker.eof:
        raise BadImage(_TRUNCATED)


_FOLLOWED = "it cannot be unpacked: more data follows its end"
_TRUNCATED = "it cannot be unpacked: the compressed file is truncated"


def _bunzip(packed: _Packed) -> Iterator[bytes]:
    unpacker = bz2.BZ2Decompressor()
    for chunk in packed.chunks():
        try:
            yield unpacker.decompress(chunk, _CHUNK)
            while not (unpacker.eof or unpacker.needs_input):
                yield unpacker.decompress(b"", _CHUNK)
        except (OSError, ValueError) as error:
            raise BadImage(f"it cannot be unpacked: {error}") from error
        if unpacker.unused_data:
            raise BadImage(_FOLLOWED)
    if not unpacker.eof:
        raise BadImage(_TRUNCATED)


def _unbrotli(packed: _Packed) -> Iterator[bytes]:
    brotli = import_module("brotli")
    if not hasattr(brotli.Decompressor, "can_accept_more_data"):
        raise ImportError("its chunk size has no limit", name="brotli 1.2 or newer")
    unpacker = brotli.Decompressor()
    for chunk in packed.chunks():
        try:
            yield unpacker.process(chunk, output_buffer_limit=_CHUNK)
            while not unpacker.can_accept_more_data():
                yield unpacker.process(b"", output_buffer_limit=_CHUNK)
        except brotli.error as error:
            raise BadImage(f"it cannot be unpacked: {error}") from error
    # It may need no more data, and still hold back the end of what it unpacked.
    while remaining := unpacker.process(b"", output_buffer_limit=_CHUNK):
        yield remaining
    if not unpacker.is_finished():
        raise BadImage(_TRUNCATED)


def _unzstd(packed: _Packed) -> Iterator[bytes]:
    zstandard = import_module("zstandard")
    _require_whole_frames(zstandard, packed)
    unpacker = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
    try:
        with unpacker.stream_reader(packed, read_across_frames=True) as stream:
            while data := stream.read(_CHUNK):
                yield data
    except zstandard.ZstdError as error:
        raise BadImage(f"it cannot be unpacked: {error}") from error


def _require_whole_frames(zstandard: Any, packed: _Packed) -> None:
    """Raise `BadImage` for a truncated Zstandard file, which the package takes for a shorter one.

    Source: RFC 8878, section 3.1: a frame is a header, blocks of which the last says so, and
    perhaps a checksum.
    """
    at = packed.at
    try:
        while at < packed.stop:
            head = packed.peek(at, 18)
            if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:  # to skip
                at += 8 + int.from_bytes(head[4:8], "little")
                continue
            at += zstandard.frame_header_size(head)
            last = 0
            while not last and at < packed.stop:
                block = int.from_bytes(packed.peek(at, 3), "little")
                last = block & 1
                kind = block >> 1 & 3
                size = block >> 3
                at += 3 + (1 if kind == _REPEATED else size)
            at += 4 * zstandard.get_frame_parameters(head).has_checksum
            at += not last  # so that it is not the end
    except zstandard.ZstdError as error:
        raise BadImage(f"it cannot be unpacked: {error}") from error
    if at != packed.stop or packed.at == packed.stop:
        raise BadImage(_TRUNCATED)


_REPEATED = 1
"""The kind of a block that is one byte, repeated."""


def _unsnap(packed: _Packed) -> Iterator[bytes]:
    """Unpack Snappy without frames, which has no chunks; its first bytes state the size."""
    snappy = import_module("snappy")
    data = packed.read(packed.stop - packed.at)
    size = 0
    for position, byte in enumerate(data[:5]):
        size |= (byte & 127) << 7 * position
        if byte < 128:
            break
    if size > _MOST_SNAPPY * len(data):
        raise BadImage(f"it cannot be unpacked: it declares {size:,} bytes")
    try:
        yield snappy.uncompress(data)
    except (ValueError, RuntimeError, snappy.UncompressError) as error:
        raise BadImage(f"it cannot be unpacked: {error}") from error


_MOST_SNAPPY = 64
"""Maximum of unpacked bytes for each packed one: a copy of 64 bytes takes at least two."""

_UNPACKERS: dict[str, Callable[[_Packed], Iterator[bytes]]] = {
    DEFLATED: partial(_inflate, -15),
    "gz": partial(_inflate, 31),
    "tgz": partial(_inflate, 31),
    "bz2": _bunzip,
    "br": _unbrotli,
    "snappy": _unsnap,
    "zst": _unzstd,
    "zstd": _unzstd,
}
