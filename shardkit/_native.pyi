"""Types of the compiled module; its source is in ``native/``."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

_Walked = tuple[tuple[int, int, list[bytes], bytes, bytes, bytes, bytes], bytes]

API: int
"""Version of the interface."""

LIBJPEG_TURBO: str
"""Version of the libjpeg-turbo that it was compiled with."""

def fill(
    out: Buffer,
    height: int,
    width: int,
    entries: Buffer,
    files: Buffer,
    maps: list[Any] | None,
    pieces: Buffer | None,
    rows: Buffer | None,
    mark: Buffer | None,
    verify_encoded: bool,
    verify_raw: bool,
    fast: bool,
    bicubic: bool,
    tall_first: bool,
    oversample: float,
    codes: Buffer,
) -> int: ...
def fill_values(
    out: Buffer,
    size: int,
    entries: Buffer,
    files: Buffer,
    maps: list[Any] | None,
    rows: Buffer | None,
    mark: Buffer | None,
    verify: bool,
    codes: Buffer,
) -> int: ...
def map_file(descriptor: int, size: int) -> Any | None: ...
def survey(
    entries: Buffer, sizes: Buffer, kinds: int, width: int, height: int, most_pixels: int
) -> tuple[int, int, int, int] | None: ...
def check_entries(entries: Buffer, kinds: int, wrong: Buffer) -> None: ...
def crc32(data: Buffer, value: int) -> int: ...
def resize(
    pixels: Buffer,
    width: int,
    height: int,
    box: tuple[float, float, float, float],
    out: Buffer,
    out_width: int,
    out_height: int,
    bicubic: bool,
    tall_first: bool,
) -> bool: ...
def read_images(
    paths: Sequence[bytes],
    sizes: Buffer,
    stamps: Buffer,
    decode: bool,
    images: Buffer,
    codes: Buffer,
    waves: Buffer | None,
    measures: Buffer,
) -> list[bytes | None]: ...
def measure(pixels: Buffer, width: int, height: int, waves: Buffer, measures: Buffer) -> bool: ...
def measure_png(
    rows: Buffer, width: int, height: int, channels: int, waves: Buffer, measures: Buffer
) -> bool: ...
def measure_jpeg(
    data: Buffer, width: int, height: int, waves: Buffer, measures: Buffer
) -> bool: ...
def inspect_jpeg(data: bytes) -> tuple[int, int] | None: ...
def walk_tar(file: int, size: int, start: int, stop: int) -> _Walked | None: ...
def walk_lmdb(file: int, size: int) -> _Walked | None: ...
def index_records(
    file: int,
    names: tuple[bytes, ...],
    kinds: Buffer,
    offsets: Buffer,
    lengths: Buffer,
    labels: Buffer | None,
    keys: Buffer,
    ends: Buffer,
    keys_start: int,
    known: Buffer,
    known_start: int,
    rows: Buffer,
    checksums: Buffer | None,
    codes: Buffer,
) -> list[str]: ...
def record_checksums(records: Sequence[object]) -> list[int] | None: ...
def tar_members(records: Sequence[object], small: int) -> list[bytes] | None: ...
