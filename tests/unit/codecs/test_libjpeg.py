"""JPEGs that the compiled module decodes equal those of simplejpeg; it reports the same damage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import encoded, jpeg, jpeg_stating, picture
from table import for_each

from shardkit.codecs import libjpeg
from shardkit.codecs.image import decode
from shardkit.codecs.libjpeg import JpegError, decode_jpeg, is_warning, read_header
from shardkit.errors import BadImage
from shardkit.system import compiled, native

SIZES = ((1, 1), (7, 5), (8, 8), (23, 17), (129, 65))

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "color": ("RGB", {}),
    "4:4:4": ("RGB", {"subsampling": 0}),
    "4:2:2": ("RGB", {"subsampling": 1}),
    "progressive": ("RGB", {"progressive": True}),
    "restarts": ("RGB", {"restart_marker_blocks": 2}),
    "gray": ("L", {"optimize": True}),
    "CMYK": ("CMYK", {}),
}


@pytest.fixture(autouse=True)
def _both() -> None:
    pytest.importorskip("simplejpeg")
    if not compiled.is_available():
        pytest.skip("no compiled module")


@pytest.fixture
def module_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libjpeg, "simplejpeg", None)


def file_of(kind: str, width: int = 129, height: int = 65) -> bytes:
    mode, options = KINDS[kind]
    return encoded(picture(width, height, mode=mode), "JPEG", **options)


def of_both(monkeypatch: pytest.MonkeyPatch, data: bytes, *colors: str, **options: Any) -> Any:
    """Return what simplejpeg and the compiled module make of an image: pixels, or a message."""

    def outcome() -> Any:
        try:
            return decode_jpeg(data, *colors, **options)
        except JpegError as error:
            return str(error)

    theirs = outcome()
    with monkeypatch.context() as patch:
        patch.setattr(libjpeg, "simplejpeg", None)
        return theirs, outcome()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_equal_those_of_simplejpeg(
    kind: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file_of(kind, *size)
    for colors in ("CMYK",) if kind == "CMYK" else ("RGB", "GRAY"):
        for options in ({}, {"at_least": (4, 4)}, {"at_least": (10, 9)}):
            theirs, ours = of_both(monkeypatch, data, colors, **options)
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_headers_equal_those_of_simplejpeg(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(kind, 23, 17)
    theirs = read_header(data)
    monkeypatch.setattr(libjpeg, "simplejpeg", None)
    assert read_header(data) == read_header(memoryview(data)) == theirs


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda data: data[: len(data) // 2],
    "no end": lambda data: data[:-2],
    "a bad color profile": lambda data: (
        data[:2] + b"\xff\xe2\0\x12ICC_PROFILE\0\x02\x01xx" + data[2:]
    ),
    "changed in the middle": lambda data: (
        data[: 2 * len(data) // 3] + b"\xff\xd9" + data[2 * len(data) // 3 + 2 :]
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", ["color", "progressive", "restarts", "gray"])
def test_warnings_equal_those_of_simplejpeg(
    kind: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = of_both(monkeypatch, DAMAGE[damage](file_of(kind)))
    assert ours == theirs
    assert is_warning(ours)


@pytest.mark.usefixtures("module_only")
def test_what_is_no_jpeg_is_an_error() -> None:
    for data in (b"", b"\xff", b"no image at all", jpeg()[:20], jpeg_stating(0, 0)):
        for function in (read_header, decode_jpeg):
            with pytest.raises(JpegError):
                function(data)


@pytest.mark.usefixtures("module_only")
def test_pixels_are_put_into_memory_of_the_same_shape_only() -> None:
    data, out = jpeg(24, 16), np.zeros((16, 24, 3), np.uint8)
    assert decode_jpeg(data, out=out) is out
    np.testing.assert_array_equal(out, decode(data, "jpg"))
    with pytest.raises(JpegError, match=r"\(16, 24, 3\), not \(24, 16, 3\)"):
        decode_jpeg(data, out=np.zeros((24, 16, 3), np.uint8))


@pytest.mark.usefixtures("module_only")
def test_damage_that_pillow_hides_is_refused() -> None:
    with pytest.raises(BadImage, match="damaged"):
        decode(DAMAGE["cut in the middle"](file_of("color")), "jpg")


@for_each(
    ("wrong", "message"),
    [
        ((4, 4, 2, 8), "channels are 1, 3 or 4"),
        ((4, 4, 3, 0), "eighths are from 1 to 8"),
        ((4, 4, 3, 9), "eighths are from 1 to 8"),
        ((0, 4, 3, 8), "out of range"),
        ((1 << 16, 1 << 16, 3, 8), "out of range"),
        ((4, 5, 3, 8), "out does not hold 60 values"),
    ],
)
def test_the_module_checks_its_arguments(wrong: tuple[int, ...], message: str) -> None:
    module: Any = native.module()
    with pytest.raises(ValueError, match=message):
        module.decode_jpeg(jpeg(4, 4), bytearray(48), *wrong)
    assert module.decode_jpeg(jpeg(4, 4), bytearray(48), 4, 4, 3, 8) is None
    assert module.decode_jpeg(jpeg(5, 4), bytearray(48), 4, 4, 3, 8)
