"""Image types that cannot be stored unchanged: reported as bad, with a working remedy."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import Pixels, encoded, jpeg, make_tree, picture
from PIL import Image
from table import for_each

from shardkit import convert, open_dataset, open_source, verify
from shardkit.codecs.foreign import FORMATS, identify
from shardkit.codecs.image import inspect
from shardkit.errors import BadImage, BadImages
from shardkit.record import FOREIGN_FIELD

SAVED = {
    "avif": ("AVIF", "RGB"),
    "blp": ("BLP", "P"),
    "dds": ("DDS", "RGBA"),
    "dib": ("DIB", "RGB"),
    "icns": ("ICNS", "RGBA"),
    "ico": ("ICO", "RGBA"),
    "jp2": ("JPEG2000", "RGB"),
    "msp": ("MSP", "1"),
    "pcx": ("PCX", "RGB"),
    "qoi": ("QOI", "RGB"),
    "sgi": ("SGI", "RGB"),
    "tga": ("TGA", "RGB"),
    "xbm": ("XBM", "1"),
}
"""Suffix to Pillow's name of the format and a mode that it saves."""


def psd() -> bytes:
    """Return a Photoshop file of 4 x 3 pixels, without layers."""
    head = b"8BPS" + struct.pack(">H6xHIIHH", 1, 3, 3, 4, 8, 3)
    return head + bytes(12) + b"\0\0" + bytes(range(36))


FILES = {suffix: encoded(picture(32, 32, 1, mode), kind) for suffix, (kind, mode) in SAVED.items()}
FILES["psd"] = psd()
TEXTS = {
    "notes.txt": b"width 10\nheight 10\n" * 20,
    "data.json": b'{"a": 1}',
    "table.csv": b"1,2,3\n",
    "zeros.bin": bytes(4096),
    "numbers.idx": b"\0\0\x08\x03" + bytes(60),
}


def shown(data: bytes) -> Pixels:
    """Return the pixels that Pillow decodes, over white."""
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        layer = image.convert("RGBA")
    ground = Image.new("RGBA", layer.size, "white")
    return np.asarray(Image.alpha_composite(ground, layer).convert("RGB"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    make_tree(root, {f"a/image.{suffix}": data for suffix, data in FILES.items()})
    make_tree(root, {f"a/{name}": data for name, data in TEXTS.items()})
    make_tree(root, {"b/usual.jpg": jpeg(), "b/an avif, really.jpg": FILES["avif"]})
    return root


def foreign_paths() -> set[str]:
    return {f"a/image.{suffix}" for suffix in FILES} | {"b/an avif, really.jpg"}


def test_files_that_pillow_opens_are_images_and_the_rest_is_listed(folder: Path) -> None:
    scan = open_source("imagefolder", folder).scan()
    assert {entry.path for entry in scan.splits[""].entries} == {*foreign_paths(), "b/usual.jpg"}
    ignored = {problem.path: problem.reason for problem in scan.ignored[""]}
    assert ignored == {f"a/{name}": "not an image" for name in TEXTS}


def test_a_plain_copy_lists_each_file_and_the_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadImages) as caught:
        convert(folder, tmp_path / "made", to="lmdb")
    reasons = {problem.path: problem.reason for problem in caught.value.problems}
    assert reasons.keys() == foreign_paths()
    assert all("the option encode=jpeg, png or webp" in reason for reason in reasons.values())
    assert "TGA" in reasons["a/image.tga"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"encode": "png"},
        {"encode": "jpeg"},
        {"encode": "webp"},
        {"encode": "raw", "resize": (8, 8), "resize_mode": "stretch", "enlarge": True},
        {"resize": 32},
    ],
    ids=str,
)
def test_re_encoding_works_for_all(options: Any, folder: Path, tmp_path: Path) -> None:
    convert(folder, tmp_path / "made", to="webdataset", workers=1, **options)
    dataset = open_dataset(tmp_path / "made", decode="numpy")
    assert {*dataset.paths} == {*foreign_paths(), "b/usual.jpg"}
    assert verify(tmp_path / "made", "decode", against=folder).findings == []
    if options.get("encode") != "png":
        return
    for row, path in enumerate(dataset.paths):
        assert np.array_equal(dataset[row][0], shown((folder / path).read_bytes())), path


@pytest.mark.parametrize("suffix", FILES)
def test_a_truncated_file_is_bad_or_not_an_image(suffix: str, tmp_path: Path) -> None:
    data = FILES[suffix]
    for part in (0.02, 0.3, 0.6, 0.95):
        content = data[: int(part * len(data))]
        if identify(io.BytesIO(content)):
            with contextlib.suppress(BadImage):
                assert inspect(content, FOREIGN_FIELD).width > 0


@for_each(
    ("content", "words"),
    [
        (b"qoif" + struct.pack(">IIBB", 8000, 8000, 3, 0) + bytes(64), "over the limit"),
        (b"qoif" + struct.pack(">IIBB", 60000, 60000, 3, 0) + bytes(64), "exceeds limit"),
        (struct.pack("<BBB5xHHHHBB", 0, 0, 2, 0, 0, 65535, 65535, 24, 0), "exceeds limit"),
    ],
)
def test_a_bomb_is_refused_by_its_header(content: bytes, words: str) -> None:
    assert identify(io.BytesIO(content))
    with pytest.raises(BadImage, match=words):
        inspect(content, FOREIGN_FIELD)


@for_each("error", [OSError(errno.EIO, os.strerror(errno.EIO)), MemoryError()])
def test_a_failure_to_read_does_not_mean_another_type(error: Exception) -> None:
    with pytest.raises(type(error)):
        identify(Mock(spec=io.BytesIO, read=Mock(side_effect=error)))


def fits(*cards: tuple[str, int | str]) -> bytes:
    """Return a header of a FITS file."""
    lines = [f"{name:8}= {value:>20}".ljust(80) for name, value in cards]
    return "".join((*lines, "END")).ljust(2880).encode()


def test_a_compressed_fits_image_is_refused() -> None:
    plain = fits(("SIMPLE", "T"), ("BITPIX", 8), ("NAXIS", 0))
    table = (("XTENSION", "'BINTABLE'"), ("BITPIX", 8), ("NAXIS", 2), ("NAXIS1", 8), ("NAXIS2", 1))
    packed = (("ZIMAGE", "T"), ("ZCMPTYPE", "'GZIP_1  '"), ("ZBITPIX", 8), ("ZNAXIS", 2))
    data = plain + fits(*table, *packed, ("ZNAXIS1", 4), ("ZNAXIS2", 3)) + bytes(2880)
    assert identify(io.BytesIO(data)) == "FITS"
    with pytest.raises(BadImage, match="a compressed FITS image"):
        inspect(data, FOREIGN_FIELD)


def test_no_plugin_that_runs_programs_or_opens_other_files_is_used() -> None:
    left_out = {"EPS", "WMF", "BUFR", "GRIB", "HDF5", "MPEG", "IPTC", "FPX", "MIC"}
    assert not left_out & set(FORMATS)
    Image.init()
    known = set(Image.OPEN) - left_out
    assert known - set(FORMATS) == {"BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}


def test_a_scan_opens_a_file_at_most_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    plain_open = open

    def counted(path: Any, *rest: Any, **options: Any) -> Any:
        opened.append(path)
        return plain_open(path, *rest, **options)

    monkeypatch.setattr("builtins.open", counted)
    open_source("imagefolder", folder).scan()
    inside = [path for path in map(str, opened) if path.startswith(str(folder))]
    inside = [path for path in inside if not path.endswith(".json")]  # which may list labels
    assert len(inside) == len(set(inside)) > 10
    assert not any(path.endswith((".jpg", ".avif", ".tga")) for path in inside)
