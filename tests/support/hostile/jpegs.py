"""JPEG files: truncated, damaged, of rare kinds, or with much metadata."""

from __future__ import annotations

import functools
import io
import struct
import zipfile
from collections.abc import Callable, Iterator

from helpers import encoded, exif, jpeg, jpeg_of_scans, jpeg_stating, picture, png
from PIL import Image

from hostile.cases import Case, Outcome, Rejected, Stored, pillow, simple

_simple = functools.partial(simple, "JPEG")

BASE = jpeg(24, 20, 3)
GREY = encoded(picture(24, 20, 4, "L"), "JPEG")
PROGRESSIVE = jpeg(24, 20, 5, progressive=True)
CMYK = encoded(picture(24, 20, 6, "CMYK"), "JPEG")
RESTARTS = jpeg(30, 30, 7, restart_marker_blocks=1)

IN_HEADER = Rejected(words="truncated or damaged in its header", kind="jpg")
DAMAGED = Rejected(words="it is damaged: ", kind="jpg", header_passes=True)
UNKNOWN = Rejected(words="it cannot be ", kind="jpg", header_passes=True)


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


def with_segments(*segments: bytes, base: bytes = BASE) -> bytes:
    """Return a JPEG with more segments at its beginning."""
    return base[:2] + b"".join(segments) + base[2:]


def marker(name: int, data: bytes = BASE) -> int:
    """Return the offset of a marker."""
    return data.index(bytes((0xFF, name)))


def patched(data: bytes, at: int, content: bytes) -> bytes:
    return data[:at] + content + data[at + len(content) :]


def without(name: int, data: bytes = BASE) -> bytes:
    """Return a JPEG without its segments of one marker."""
    while (at := data.find(bytes((0xFF, name)), 0, marker(0xDA, data))) >= 0:
        data = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    return data


def stored(data: bytes, **notes: int) -> Stored:
    return Stored(kind="jpg", pixels=pillow(lambda: data), notes=notes)


def as_it_is(name: str, content: Callable[[], bytes], **notes: int) -> Case:
    """Return a case that is stored with the pixels that Pillow finds."""
    return _simple(name, content, Stored(kind="jpg", pixels=pillow(content), notes=notes))


def cut_cases() -> Iterator[Case]:
    scan = marker(0xDA)
    places: list[tuple[str, bytes, Outcome]] = [
        ("after two bytes", BASE[:2], Rejected(words="its content is not an image")),
        ("after three bytes", BASE[:3], IN_HEADER),
        ("in its first segment", BASE[:9], IN_HEADER),
        ("in a quantization table", BASE[: marker(0xDB) + 30], IN_HEADER),
        ("in a Huffman table", BASE[: marker(0xC4) + 9], IN_HEADER),
        ("in the head of its scan", BASE[: scan + 6], IN_HEADER),
        ("right after the head of its scan", BASE[: scan + 14], DAMAGED),
        ("in the middle of its scan", BASE[: (scan + len(BASE)) // 2], DAMAGED),
        ("before the marker of its end", BASE[:-2], DAMAGED),
        ("before its last byte", BASE[:-1], DAMAGED),
        ("gray and truncated", GREY[:-40], DAMAGED),
        ("CMYK and truncated", CMYK[:-40], DAMAGED),
        (
            "progressive and truncated between two scans",
            PROGRESSIVE[: PROGRESSIVE.rindex(b"\xff\xda")],
            DAMAGED,
        ),
    ]
    for where, data, outcome in places:
        name = where if "truncated" in where else f"truncated {where}"
        yield _simple(name, lambda d=data: d, outcome)  # type: ignore[misc]
    early = PROGRESSIVE[: PROGRESSIVE.rindex(b"\xff\xda")] + b"\xff\xd9"
    yield as_it_is("progressive, ended by its marker before the last scan", lambda: early)


def damage_cases() -> Iterator[Case]:
    middle = (marker(0xDA) + 14 + len(BASE)) // 2
    yield _simple("damaged in the middle", lambda: patched(BASE, middle, b"\xff\xd9" * 8), DAMAGED)
    yield _simple("CMYK and damaged in the middle", _cmyk_damaged, DAMAGED)
    restart = RESTARTS.index(b"\xff\xd1")
    yield as_it_is("with restart markers", lambda: RESTARTS)
    yield _simple(
        "with a restart marker out of order",
        lambda: patched(RESTARTS, restart, b"\xff\xd6"),
        DAMAGED,
    )
    yield _simple(
        "with a restart marker overwritten",
        lambda: patched(RESTARTS, restart, b"\x12\x34"),
        DAMAGED,
    )
    yield _simple("without quantization tables", lambda: without(0xDB), UNKNOWN)
    yield as_it_is("without Huffman tables, as in a film", lambda: without(0xC4))
    frame = marker(0xC0)
    yield _simple(
        "with height zero",
        lambda: patched(BASE, frame + 5, b"\0\0"),
        Rejected(words="it cannot be identified", kind="jpg"),
    )
    yield _simple(
        "of two values in a pixel",
        lambda: patched(BASE, frame + 9, b"\x02"),
        Rejected(words="it cannot be identified", kind="jpg"),
    )
    yield _simple(
        "stating 65000 x 65000 pixels",
        lambda: jpeg_stating(65_000, 65_000),
        Rejected(words="65000 x 65000 pixels, over the limit", kind="jpg"),
    )
    yield _simple("stating more pixels than it has", lambda: jpeg_stating(400, 300), DAMAGED)
    yield _simple(
        "of 600 scans",
        lambda: PROGRESSIVE[:-2] + PROGRESSIVE[PROGRESSIVE.rindex(b"\xff\xda") : -2] * 600,
        Rejected(words="scans, more than 500", kind="jpg"),
    )
    yield _simple(
        "of 600 scans, not progressive",
        lambda: jpeg_of_scans(600),
        Rejected(words="scans, more than 500", kind="jpg"),
    )


def _cmyk_damaged() -> bytes:
    return patched(CMYK, len(CMYK) - 60, b"\xff\xd9" * 5)


def coding_cases() -> Iterator[Case]:
    yield as_it_is("gray", lambda: GREY)
    yield as_it_is("progressive", lambda: PROGRESSIVE)
    yield as_it_is("CMYK", lambda: CMYK)
    adobe = CMYK.index(b"Adobe") + 11
    yield as_it_is("YCCK", lambda: patched(CMYK, adobe, b"\x02"))
    yield as_it_is("RGB, not YCbCr", lambda: jpeg(24, 20, 8, keep_rgb=True))
    for subsampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1"):
        yield as_it_is(
            f"with subsampling {subsampling}",
            lambda s=subsampling: jpeg(32, 24, 9, subsampling=s),  # type: ignore[misc]
        )
    yield as_it_is("with subsampling that has no name", lambda: _sampled(0x41))
    for first, bits, words in (
        (0xC1, 12, "12 bits, sequential"),
        (0xC3, 8, "8 bits, lossless"),
        (0xC5, 8, "8 bits, hierarchical sequential"),
        (0xC9, 8, "damaged"),
        (0xCB, 8, "8 bits, arithmetic lossless"),
    ):
        said = "arithmetic-coded by its header" if first == 0xC9 else f"of {words}"
        yield _simple(
            f"{said} coding" if first != 0xC9 else said,
            lambda f=first, b=bits: _coded(f, b),  # type: ignore[misc]
            Rejected(words=words, kind="jpg", header_passes=True),
        )


def _sampled(factors: int) -> bytes:
    data = bytearray(jpeg(30, 30, 10))
    data[marker(0xC0, bytes(data)) + 11] = factors
    return bytes(data)


def _coded(first: int, bits: int) -> bytes:
    data = bytearray(BASE)
    start = marker(0xC0)
    data[start + 1], data[start + 4] = first, bits
    return bytes(data)


def exif_cases() -> Iterator[Case]:
    for turned in range(1, 9):
        notes = {"orientation": turned} if turned > 1 else {}
        yield as_it_is(
            f"with EXIF orientation {turned}",
            lambda t=turned: jpeg(30, 20, 20 + t, exif=exif(t)),  # type: ignore[misc]
            **notes,
        )
    for turned in (0, 9):
        yield as_it_is(
            f"with EXIF orientation {turned}, which is none",
            lambda t=turned: jpeg(30, 20, 30 + t, exif=exif(t)),  # type: ignore[misc]
        )
    head = b"Exif\0\0II*\0"
    broken = {
        "truncated": exif(6).tobytes()[:-9],
        "of rubbish": b"Exif\0\0" + b"rubbish" * 9,
        "that refer to themselves": head + struct.pack("<IHHHIII", 8, 1, 0x8769, 4, 1, 8, 8),
        "of wrong types": head + struct.pack("<IHHHIII", 8, 1, 0x0112, 250, 1, 6, 0),
        "stating four billion values": head
        + struct.pack("<IHHHIII", 8, 1, 0x0112, 3, 2**32 - 1, 8, 0),
        "stating 65535 entries": head + struct.pack("<IH", 8, 65_535),
        "with an offset beyond them": head + struct.pack("<I", 2**31),
    }
    for said, content in broken.items():
        yield as_it_is(
            f"with EXIF data {said}",
            lambda c=content: with_segments(segment(0xE1, c)),  # type: ignore[misc]
        )
    yield as_it_is(
        "with EXIF data twice: the first counts",
        lambda: with_segments(segment(0xE1, exif(6).tobytes()), segment(0xE1, exif(3).tobytes())),
        orientation=6,
    )
    yield as_it_is(
        "with 20,000 segments of EXIF data",
        lambda: with_segments(segment(0xE1, b"Exif\0\0" + b"x" * 14) * 20_000),
    )
    packet = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="8"/>'
    yield as_it_is(
        "with its orientation in XMP data",
        lambda: with_segments(segment(0xE1, packet)),
        orientation=8,
    )


def extra_cases() -> Iterator[Case]:
    profile = segment(0xE2, b"ICC_PROFILE\0\1\1" + b"no profile")
    huge = b"".join(
        segment(0xE2, b"ICC_PROFILE\0" + bytes((number, 40)) + bytes(60_000))
        for number in range(1, 41)
    )
    yield as_it_is("with a broken ICC profile", lambda: with_segments(profile))
    yield as_it_is("with an ICC profile of 2 MB", lambda: with_segments(huge))
    yield as_it_is("with a comment of 64 KB", lambda: with_segments(segment(0xFE, bytes(65_533))))
    yield as_it_is("with 100,000 segments", lambda: with_segments(segment(0xFE, b"") * 100_000))
    yield as_it_is("with a megabyte of padding", lambda: with_segments(b"\xff" * (1 << 20)))
    yield as_it_is("with text behind its end", lambda: BASE + b"and so on\n" * 100)
    yield as_it_is("with another JPEG behind its end", lambda: BASE + jpeg(40, 40, 99))
    yield as_it_is("that is a zip archive too", lambda: BASE + _archive())
    yield as_it_is("with a thumbnail", lambda: with_segments(_thumbnail()))
    yield as_it_is("of two images, as from a 3D camera", _mpo, frames=2)
    yield as_it_is(
        "whose index of images is truncated", lambda: _mpo().replace(b"MPF\0", b"MPF\1", 1)
    )


def warned_cases() -> Iterator[Case]:
    """Yield files that libjpeg warns about, with and without data loss."""
    scan, second = marker(0xDA), PROGRESSIVE.index(b"\xff\xc4", marker(0xDA, PROGRESSIVE))
    bad_icc = segment(0xE2, b"ICC_PROFILE\0\5\1abc")
    adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0\7")
    junk = bytes(range(1, 41))
    yield as_it_is("with other bytes before its end", lambda: BASE[:-2] + junk + BASE[-2:])
    yield as_it_is("with zeros before its end", lambda: BASE[:-2] + bytes(40) + BASE[-2:])
    yield as_it_is("with other bytes between segments", lambda: BASE[:20] + junk + BASE[20:])
    yield as_it_is("with other bytes before its scan", lambda: BASE[:scan] + junk + BASE[scan:])
    yield as_it_is(
        "progressive, with other bytes between scans",
        lambda: PROGRESSIVE[:second] + junk + PROGRESSIVE[second:],
    )
    yield as_it_is("with a bad ICC marker", lambda: with_segments(bad_icc))
    yield as_it_is("CMYK with a bad ICC marker", lambda: with_segments(bad_icc, base=CMYK))
    yield as_it_is("with an unknown Adobe transform", lambda: BASE[:2] + adobe + BASE[20:])
    yield as_it_is("of an unknown JFIF version", lambda: BASE.replace(b"JFIF\0\1\1", b"JFIF\0\2\0"))
    yield as_it_is(
        "with the parameters of a progressive scan",
        lambda: BASE[:scan] + BASE[scan:].replace(b"\0\x3f\0", b"\1\x3e\0", 1),
    )
    half = (scan + 14 + len(BASE)) // 2
    yield _simple("ended by its marker in mid-scan", lambda: BASE[:half] + b"\xff\xd9", DAMAGED)
    yield _simple(
        "with a bad ICC marker, and ended in mid-scan",
        lambda: with_segments(bad_icc, base=BASE[:half] + b"\xff\xd9"),
        DAMAGED,
    )


def _archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other.png", png(9, 9, 5))
    return buffer.getvalue()


def _thumbnail() -> bytes:
    return segment(0xE0, b"JFXX\0\x10" + jpeg(16, 12, 77))


def _mpo() -> bytes:
    second: list[Image.Image] = [picture(24, 20, 12)]
    return encoded(picture(24, 20, 11), "MPO", save_all=True, append_images=second)


CASES = (
    *cut_cases(),
    *damage_cases(),
    *coding_cases(),
    *exif_cases(),
    *extra_cases(),
    *warned_cases(),
)
