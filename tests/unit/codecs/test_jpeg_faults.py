"""JPEGs that libjpeg warns about: harmless faults are stored, lost data is refused or tolerated."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FORMATS, Pixels, encoded, invoke, jpeg, make_tree, picture
from PIL import Image
from table import for_each

from shardkit import CenterCrop, convert, open_dataset, repair, verify
from shardkit.codecs import libjpeg
from shardkit.codecs.image import decode
from shardkit.codecs.libjpeg import jpeg_loss
from shardkit.errors import BadImages
from shardkit.torch.data.images import DecodeName

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about metadata

BASE = jpeg(96, 80, 3, quality=90)
PROGRESSIVE = jpeg(96, 80, 4, progressive=True)
RESTARTS = jpeg(96, 80, 5, restart_marker_blocks=4)
CMYK = encoded(picture(96, 80, 6, "CMYK"), "JPEG")
JUNK = bytes(range(1, 61))


def at(data: bytes, marker: int, start: int = 0) -> int:
    return data.index(bytes((0xFF, marker)), start)


def inserted(data: bytes, where: int, content: bytes) -> bytes:
    return data[:where] + content + data[where:]


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


def cut(data: bytes, end: bytes = b"\xff\xd9") -> bytes:
    """Return a JPEG that ends in the middle of its first scan."""
    return data[: (at(data, 0xDA) + len(data)) // 2] + end


def repeated(data: bytes, size: int) -> bytes:
    """Return a JPEG with some bytes in the middle of its scan twice, or fewer if negative."""
    half = (at(data, 0xDA) + len(data)) // 2
    return data[:half] + data[half - size :]


def ends_in_ones() -> bytes:
    """Return a JPEG whose scan ends in a byte of ones, which is followed by a zero."""
    for seed in range(1000):
        noise = Image.frombytes("L", (40, 40), random.Random(seed).randbytes(1600))
        data = encoded(noise, quality=100)
        if data.endswith(b"\xff\0\xff\xd9"):
            return data
    raise AssertionError("no such JPEG")


BAD_ICC = segment(0xE2, b"ICC_PROFILE\0\x05\x01abc")
ADOBE = segment(0xEE, b"Adobe\0\x64\0\0\0\0\x07")
SECOND = at(PROGRESSIVE, 0xC4, at(PROGRESSIVE, 0xDA))
SCAN = at(BASE, 0xDA)

HARMLESS = {
    "bytes before the end": inserted(BASE, -2, JUNK),
    "stuffed ones before the end": inserted(BASE, -2, b"\xff\0" * 30),
    "bytes after a scan that ends in ones": inserted(ends_in_ones(), -2, JUNK),
    "one byte, often, before the end": inserted(BASE, -2, b"\0" * 20),
    "bytes between segments": inserted(BASE, 20, b"\x11\x22"),
    "bytes before the scan": inserted(BASE, SCAN, b"\x11\x22"),
    "bytes between scans": inserted(PROGRESSIVE, SECOND, JUNK),
    "a bad ICC marker": inserted(BASE, 2, BAD_ICC),
    "an unknown Adobe transform": BASE[:2] + ADOBE + BASE[20:],
    "an unknown JFIF version": BASE.replace(b"JFIF\0\1\1", b"JFIF\0\2\0"),
    "parameters of another scan": BASE[:SCAN] + BASE[SCAN:].replace(b"\0\x3f\0", b"\1\x3e\0", 1),
    "two at a time": inserted(inserted(BASE, -2, JUNK), 2, BAD_ICC),
    "a bad ICC marker, CMYK": inserted(CMYK, 2, BAD_ICC),
    "a bad ICC marker, YCCK": inserted(
        CMYK.replace(b"Adobe\0\x64\0\0\0\0\0", b"Adobe\0\x64\0\0\0\0\2"), 2, BAD_ICC
    ),
    "a bad ICC marker, restart markers": inserted(RESTARTS, 2, BAD_ICC),
}
"""Faults that leave data for each pixel. libjpeg warns about each."""

SILENT = {
    "bad EXIF data": inserted(BASE, 2, segment(0xE1, b"Exif\0\0MM\0*garbage")),
    "bytes behind the end": BASE + JUNK,
}
"""Faults that libjpeg does not mention."""

LOST = {
    "a premature end of the scan": cut(BASE),
    "a premature end, progressive": cut(PROGRESSIVE),
    "a premature end, CMYK": cut(CMYK),
    "a restart marker lost": RESTARTS.replace(b"\xff\xd3", b"", 1),
    "a restart marker out of order": RESTARTS.replace(b"\xff\xd3", b"\xff\xd5", 1),
    "bytes before a restart marker": RESTARTS.replace(b"\xff\xd3", JUNK + b"\xff\xd3", 1),
    "bad Huffman codes": repeated(BASE, -8),
    "a scan that ends too early": repeated(BASE, 40),
    "a premature end behind a bad ICC marker": inserted(cut(BASE), 2, BAD_ICC),
    "Huffman codes read as arithmetic codes": BASE.replace(b"\xff\xc0", b"\xff\xc9", 1),
    "no first scan": PROGRESSIVE[: at(PROGRESSIVE, 0xDA)] + PROGRESSIVE[SECOND:],
}
"""Damage that Pillow decodes without a word."""

ENDLESS = {"no end": BASE[:-2], "cut": cut(BASE, b"")}
"""Damage that Pillow refuses at its default settings."""


def oracle(data: bytes) -> Pixels:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    make_tree(root, {f"a/{name}.jpg": data for name, data in files.items()})
    return root


def made(root: Path, files: dict[str, bytes], to: Any = "lmdb", **recipe: Any) -> Path:
    convert(folder_of(root / "photos", files), root / "made", to=to, workers=1, **recipe)
    return root / "made"


def require_pillows_pixels(place: Path, files: dict[str, bytes]) -> None:
    """Compare every way to decode with Pillow."""
    ways: dict[DecodeName, Callable[[Any], Pixels]] = {
        "pil": lambda image: np.asarray(image.convert("RGB")),
        "numpy": np.asarray,
        "torch": lambda image: image.permute(1, 2, 0).numpy(),
    }
    for way, as_array in ways.items():
        dataset = open_dataset(place, decode=way)
        for row, path in enumerate(dataset.paths):
            name = path.removeprefix("a/").removesuffix(".jpg")
            found = as_array(dataset[row][0])
            assert np.array_equal(found, oracle(files[name])), (way, name)
    cropped = open_dataset(place, decode=CenterCrop(32))
    for row, path in enumerate(cropped.paths):
        whole = oracle(files[path.removeprefix("a/").removesuffix(".jpg")])
        top, left = (whole.shape[0] - 32) // 2, (whole.shape[1] - 32) // 2
        found = cropped[row][0].permute(1, 2, 0).numpy()
        assert np.array_equal(found, whole[top : top + 32, left : left + 32]), path


@for_each("name", HARMLESS)
def test_a_harmless_warning_is_not_data_loss(name: str) -> None:
    warnings: list[str] = []
    pixels = decode(HARMLESS[name], "jpg", warnings=warnings)
    assert np.array_equal(pixels, oracle(HARMLESS[name]))
    assert warnings
    assert jpeg_loss(HARMLESS[name], warnings[0]) == ""


@for_each("name", LOST)
def test_data_loss_is_found_after_any_harmless_warning(name: str) -> None:
    warnings: list[str] = []
    pixels = decode(LOST[name], "jpg", warnings=warnings)
    assert np.array_equal(pixels, oracle(LOST[name]))
    assert jpeg_loss(LOST[name], warnings[0])


@pytest.mark.parametrize("most", [64, 2])
def test_extra_bytes_that_cannot_be_located_count_as_lost_data(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Without those after one scan, libjpeg gives the same warning about the next."""
    monkeypatch.setattr(libjpeg, "_MOST_TRIES", most)
    flat = encoded(Image.new("L", (32, 32), 77), progressive=True)
    scan = at(flat, 0xDA)
    data = flat[:scan] + flat[scan:].replace(b"\xff\xc4", JUNK + b"\xff\xc4")
    warnings: list[str] = []
    assert np.array_equal(decode(data, "jpg", warnings=warnings), oracle(data))
    assert "extraneous bytes before marker 0xc4" in jpeg_loss(data, warnings[0])


@pytest.mark.parametrize("to", FORMATS)
def test_harmless_faults_are_stored_noted_and_read_as_pillow_reads_them(
    to: str, tmp_path: Path
) -> None:
    files = {**HARMLESS, **SILENT}
    place = made(tmp_path, files, to)
    manifest = open_dataset(place).manifest
    assert manifest.rows == len(files)
    assert manifest.notes == {"odd": len(HARMLESS)}
    require_pillows_pixels(place, files)
    assert verify(place, "decode", against=tmp_path / "photos").findings == []


def test_data_loss_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(BadImages) as caught:
        made(tmp_path, {**LOST, **ENDLESS})
    reasons = {problem.path: problem.reason for problem in caught.value.problems}
    assert len(reasons) == len(LOST) + len(ENDLESS)
    assert all("damaged" in reason for reason in reasons.values())
    helped = [path for path, reason in reasons.items() if "tolerate_damage=True" in reason]
    assert len(helped) == len(LOST)


@pytest.mark.parametrize("to", FORMATS)
def test_tolerated_damage_is_noted_and_read_as_pillow_reads_it(to: str, tmp_path: Path) -> None:
    place = made(tmp_path, LOST, to, tolerate_damage=True)
    assert open_dataset(place).manifest.notes == {"damaged": len(LOST)}
    require_pillows_pixels(place, LOST)
    assert verify(place, "decode", against=tmp_path / "photos").findings == []
    assert repair(place, tmp_path / "photos").ok


def test_images_that_pillow_refuses_are_never_tolerated(tmp_path: Path) -> None:
    with pytest.raises(BadImages) as caught:
        made(tmp_path, ENDLESS, tolerate_damage=True)
    assert len(caught.value.problems) == len(ENDLESS)


def test_an_unchecked_image_is_read_as_pillow_reads_it(tmp_path: Path) -> None:
    place = made(tmp_path, {**LOST, **HARMLESS}, check="none")
    assert open_dataset(place).manifest.notes == {}
    require_pillows_pixels(place, {**LOST, **HARMLESS})


def test_verify_and_repair_agree_about_bad_images(tmp_path: Path) -> None:
    """`verify` reports images that were stored damaged, without recommending `repair`."""
    place = made(tmp_path, {**LOST, **ENDLESS, **HARMLESS}, check="none")
    findings = verify(place, "decode").findings
    assert len(findings) == len(LOST) + len(ENDLESS)
    assert all(finding.as_stored and not finding.source for finding in findings)
    shown = invoke("verify", place, "--level", "decode", "--workers", 1)
    assert shown.exit_code == 1
    assert shown.stderr.count("  bad image: ") == len(findings)
    assert "shardkit repair" not in shown.stdout
    assert "`repair` cannot fix it" in shown.stdout
    mended = invoke("repair", place, "--from", tmp_path / "photos", "--workers", 1)
    assert mended.exit_code == 0
    assert "nothing to repair: 6 files as the conversion wrote them" in mended.stdout
