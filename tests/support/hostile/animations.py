"""GIF and WebP files: of many frames, of false frames, truncated and damaged."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from helpers import Pixels, encoded, exif, picture, pixels

from hostile.cases import Case, Rejected, Stored, gray, over_white, pillow, simple

_gif = functools.partial(simple, "GIF", file="odd.gif")
_webp = functools.partial(simple, "WebP", file="odd.webp")

WIDTH, HEIGHT = 20, 18
PLANE: Pixels = pixels(WIDTH, HEIGHT, 60, 1)[:, :, 0]
CUT = Rejected(words="it cannot be decoded", kind="gif", header_passes=True)
UNREADABLE = Rejected(words="it cannot be identified: ", kind="gif")


def gif(frames: Sequence[bytes], width: int = WIDTH, height: int = HEIGHT) -> bytes:
    """Return a GIF of 256 greys."""
    palette = bytes(value for value in range(256) for _ in range(3))
    screen = struct.pack("<HHBBB", width, height, 0xF7, 0, 0)
    return b"".join((b"GIF89a", screen, palette, *frames, b";"))


def frame(
    values: Pixels, left: int = 0, top: int = 0, size: tuple[int, int] | None = None
) -> bytes:
    """Return a frame with its pixels packed as codes of nine bits, without any compression."""
    width, height = size or values.shape[::-1]
    codes: list[int] = []
    for number, value in enumerate(values.reshape(-1).tolist()):
        codes += [256, value] if number % 200 == 0 else [value]
    bits = "".join(f"{code:09b}"[::-1] for code in [*codes, 257])
    packed = b"".join(
        int(bits[at : at + 8][::-1], 2).to_bytes(1, "little") for at in range(0, len(bits), 8)
    )
    return b"".join(
        (
            b",",
            struct.pack("<HHHHB", left, top, width, height, 0),
            b"\x08",
            *(
                bytes((len(packed[at : at + 255]),)) + packed[at : at + 255]
                for at in range(0, len(packed), 255)
            ),
            b"\0",
        )
    )


FRAME = frame(PLANE)
BASE = gif([FRAME])


def gif_cases() -> Iterator[Case]:
    def good(**notes: int) -> Stored:
        return Stored(kind="gif", pixels=lambda: gray(PLANE), notes=notes)

    yield _gif("of one frame", lambda: BASE, good())
    yield _gif("animated", lambda: gif([FRAME, frame(255 - PLANE)]), good(frames=2))
    yield _gif(
        "of 10,000 frames",
        lambda: gif([FRAME, frame(np.zeros((1, 1), np.uint8)) * 9_999]),
        good(frames=10_000),
    )
    yield _gif(
        "whose second frame states 65000 x 65000 pixels",
        lambda: gif([FRAME, frame(PLANE, size=(65_000, 65_000))]),
        good(frames=2),
    )
    yield _gif("without its end", lambda: BASE[:-1], good())
    yield _gif(
        "with a comment of 2 MB",
        lambda: gif([b"!\xfe" + (b"\xff" + bytes(255)) * 8192 + b"\0", FRAME]),
        good(),
    )
    yield _gif("truncated in its first frame", lambda: BASE[:-60], CUT)
    yield _gif(
        "whose packed data lack a row", lambda: gif([frame(PLANE[:-1], size=(WIDTH, HEIGHT))]), CUT
    )
    yield _gif("with damaged packed data", lambda: BASE[:-60] + b"\xff" * 40 + BASE[-20:], CUT)
    two = gif([FRAME, FRAME])
    second = len(BASE) - 1
    yield _gif(
        "truncated in the header of its second frame",
        lambda: two[: second + 4],
        Rejected(words="its frames cannot be counted", kind="gif"),
    )
    yield _gif("truncated in the pixels of its second frame", lambda: two[:-40], good(frames=2))
    yield _gif("without a frame", lambda: gif([]), UNREADABLE)
    yield _gif("with a frame of no pixels", lambda: gif([frame(PLANE[:0])]), CUT)
    yield _gif("truncated in its palette", lambda: BASE[:100], UNREADABLE)
    moved = np.zeros((HEIGHT + 100, WIDTH + 100), np.uint8)
    moved[100:, 100:] = PLANE
    yield _gif(
        "with a frame outside of its screen, which grows",
        lambda: gif([frame(PLANE, 100, 100)]),
        Stored(kind="gif", pixels=lambda: gray(moved)),
    )
    for said, data in (
        ("stating a screen of 65000 x 65000 pixels", gif([FRAME], 65_000, 65_000)),
        ("stating a frame of 65000 x 65000 pixels", gif([frame(PLANE, size=(65_000, 65_000))])),
    ):
        yield _gif(
            said,
            lambda d=data: d,  # type: ignore[misc]
            Rejected(words="limit of 178956970", kind="gif"),
        )
    control = b"!\xf9\x04\x01\0\0" + bytes((int(PLANE[0, 0]), 0))
    opaque = np.where(PLANE[0, 0] == PLANE, 0, 255).astype(np.uint8)
    yield _gif(
        "with a transparent color",
        lambda: gif([control + FRAME]),
        Stored(kind="gif", pixels=lambda: over_white(np.dstack([gray(PLANE), opaque]))),
    )


def chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def webp(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def canvas(width: int, height: int, flags: int) -> bytes:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return chunk(b"VP8X", bytes((flags, 0, 0, 0)) + sides)


def webp_frame(image: bytes, left: int = 0) -> bytes:
    place = (left // 2).to_bytes(3, "little") + bytes(3)
    size = (WIDTH - 1).to_bytes(3, "little") + (HEIGHT - 1).to_bytes(3, "little")
    return chunk(b"ANMF", place + size + bytes(4) + image)


ANIMATED, HAS_EXIF, HAS_PROFILE = 2, 8, 32
LOOP = chunk(b"ANIM", bytes(6))
LOSSLESS = encoded(picture(WIDTH, HEIGHT, 61), "WEBP", lossless=True)
LOSSY = encoded(picture(WIDTH, HEIGHT, 62), "WEBP", quality=80)
IMAGE = LOSSLESS[12:]
BAD = Rejected(words="it cannot be identified: ", kind="webp")


def webp_cases() -> Iterator[Case]:
    def shown(**notes: int) -> Stored:
        return Stored(kind="webp", pixels=lambda: pixels(WIDTH, HEIGHT, 61), notes=notes)

    yield _webp("lossless", lambda: LOSSLESS, shown())
    yield _webp("lossy", lambda: LOSSY, Stored(kind="webp", pixels=pillow(lambda: LOSSY)))
    clear = picture(WIDTH, HEIGHT, 63, "RGBA")
    yield _webp(
        "with opacity",
        lambda: encoded(clear, "WEBP", lossless=True, exact=True),
        Stored(kind="webp", pixels=lambda: over_white(np.asarray(clear)), near=1),
    )
    yield _webp(
        "animated",
        lambda: webp(
            canvas(WIDTH, HEIGHT, ANIMATED), LOOP, webp_frame(IMAGE), webp_frame(LOSSY[12:])
        ),
        shown(frames=2),
    )
    turned = chunk(b"EXIF", exif(6).tobytes()[6:])
    yield _webp(
        "with EXIF orientation 6",
        lambda: webp(canvas(WIDTH, HEIGHT, HAS_EXIF), IMAGE, turned),
        shown(orientation=6),
    )
    changed = LOSSLESS[:-60] + b"\x55" * 20 + LOSSLESS[-40:]
    yield _webp(
        "damaged in its pixels, of which it has no checksum",
        lambda: changed,
        Stored(kind="webp", pixels=pillow(lambda: changed)),
    )
    extras: tuple[tuple[str, Callable[[], bytes]], ...] = (
        (
            "with EXIF data of rubbish",
            lambda: webp(canvas(WIDTH, HEIGHT, HAS_EXIF), IMAGE, chunk(b"EXIF", b"rubbish")),
        ),
        (
            "with a broken profile",
            lambda: webp(canvas(WIDTH, HEIGHT, HAS_PROFILE), chunk(b"ICCP", b"rubbish"), IMAGE),
        ),
        ("with data behind its end", lambda: LOSSLESS + b"more"),
    )
    for said, content in extras:
        yield _webp(said, content, shown())
    for said, data in (
        ("truncated in the middle", LOSSY[: len(LOSSY) // 2]),
        ("without its last bytes", LOSSLESS[:-2]),
        ("of nothing but its first twelve bytes", LOSSY[:12]),
        ("stating more bytes than it has", LOSSY[:4] + b"\xf0\xff\xff\x7f" + LOSSY[8:]),
        ("stating fewer bytes than it has", LOSSY[:4] + b"\x10\0\0\0" + LOSSY[8:]),
        (
            "whose chunk states more bytes than there are",
            LOSSY[:16] + b"\xff\xff\xff\x7f" + LOSSY[20:],
        ),
        ("whose canvas is smaller than its image", webp(canvas(8, 8, 0), IMAGE)),
        (
            "with a frame outside of its canvas",
            webp(canvas(WIDTH, HEIGHT, ANIMATED), LOOP, webp_frame(IMAGE, 50)),
        ),
    ):
        yield _webp(said, lambda d=data: d, BAD)  # type: ignore[misc]
    for side in (65_000, 16_000):
        yield _webp(
            f"stating a canvas of {side} x {side} pixels",
            lambda s=side: webp(canvas(s, s, ANIMATED), LOOP, webp_frame(IMAGE)),  # type: ignore[misc]
            Rejected(words=f"{side} x {side} pixels, over the limit", kind="webp"),
        )


CASES = (*gif_cases(), *webp_cases())
