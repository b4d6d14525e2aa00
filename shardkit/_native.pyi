"""Types of the compiled module; its source is in ``native/``."""

from typing_extensions import Buffer

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
) -> None: ...
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
