"""HEIC and JPEG XL, compared with the pixels that the files were made of.

The files in ``heif/`` are of pillow-heif 1.8 at quality 90, from `gradient`: ``turned.heic`` states
the orientation 6 twice, as phones do; ``second.heic`` has a further image before its primary one,
which is scaled to 32 x 24 and mirrored; ``deep.heic`` has 10 bits.
"""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Pixels, jpeg, make_tree, run_main
from PIL import Image
from refusals import ROOT, refused

from shardkit import convert, open_dataset, open_source, verify
from shardkit.codecs import extras, foreign
from shardkit.errors import BadImage, BadImages, UsageError

FOLDER = Path(__file__).parent / "heif"
JXL = ROOT / ".venv/pylibjxl"
needs_heif = pytest.mark.skipif(not find_spec("pi_heif"), reason="no pi-heif")


def gradient() -> Pixels:
    y, x = np.mgrid[:48, :64]
    return np.stack([x * 4, y * 5, (x + y) * 2], -1).astype(np.uint8)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    names = ("turned.heic", "second.heic", "deep.heic")
    files = {f"cat/{name}": (FOLDER / name).read_bytes() for name in names}
    return make_tree(tmp_path / "photos", {**files, "dog/a phone.jpg": files["cat/turned.heic"]})


def is_near(pixels: Any, expected: Pixels) -> bool:
    return bool(np.abs(pixels.astype(int) - expected).mean() < 4)


@needs_heif
def test_photographs_of_phones_are_upright_once(photos: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    words = ("convert", "imagefolder", photos, made, "--to", "lmdb", "--encode", "png")
    done = run_main(*words, "--workers", 1)
    assert "1 image with several frames" in done.stdout
    dataset = open_dataset(made, decode="numpy")
    images = {path: dataset[row][0] for row, path in enumerate(dataset.paths)}
    upright = np.rot90(gradient(), -1)  # to the right, as 6 means
    assert is_near(images["cat/turned.heic"], upright)
    assert is_near(images["dog/a phone.jpg"], upright)
    assert is_near(images["cat/deep.heic"], gradient())
    second = Image.fromarray(gradient()).resize((32, 24)).transpose(Image.Transpose(0))
    assert is_near(images["cat/second.heic"], np.asarray(second))
    assert verify(made, "decode", against=photos).findings == []


@needs_heif
def test_a_plain_copy_is_refused(photos: Path, tmp_path: Path) -> None:
    with refused(BadImages, "deep.heic", "HEIF", "encode='jpeg', png or webp"):
        convert(photos, tmp_path / "made", to="lmdb", workers=1)


@needs_heif
def test_ten_bits_are_not_cut_to_eight_where_all_are_to_be_kept(tmp_path: Path) -> None:
    photos = make_tree(tmp_path / "photos", {"a.heic": (FOLDER / "deep.heic").read_bytes()})
    with refused(UsageError, "10 bits", "pixels='rgb'"):
        convert(photos, tmp_path / "made", to="lmdb", pixels="keep", encode="png", workers=1)


@needs_heif
def test_damaged_files_are_bad_and_the_process_lives(tmp_path: Path) -> None:
    whole = (FOLDER / "turned.heic").read_bytes()
    crash = whole.replace(b"Exif", b"\xc5xif", 1)  # at this type of an item, pi-heif 1.4 crashes
    files = {"crash.heic": crash, "cut.heic": whole[:-99], "head.heic": whole[:40]}
    photos = make_tree(tmp_path / "photos", {**files, "good.jpg": jpeg()})
    made = tmp_path / "made"
    convert(photos, made, to="lmdb", encode="png", on_error="skip", workers=1)
    assert open_dataset(made).paths[:] == ["good.jpg"]


@needs_heif
def test_a_size_over_the_limit_is_refused_before_decoding(tmp_path: Path) -> None:
    data = (FOLDER / "turned.heic").read_bytes()
    at = data.index(b"ispe") + 8
    forged = data[:at] + struct.pack(">II", 30000, 30000) + data[at + 8 :]
    at = data.index(b"clap") + 4  # what is visible of it: two fractions
    forged = forged[:at] + struct.pack(">IIII", 30000, 1, 30000, 1) + forged[at + 16 :]
    photos = make_tree(tmp_path / "photos", {"a.heic": forged})
    with refused(BadImages, "30000 x 30000"):
        convert(photos, tmp_path / "made", to="lmdb", encode="png", workers=1)


@pytest.mark.parametrize("name", ["heif", "jxl"])
def test_without_the_extra_it_is_named(
    photos: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "find_spec", lambda _: None)
    if name == "jxl":
        photos = make_tree(tmp_path / "jxl", {"a.png": b"\xff\x0a\xfa\x1f\x41\x90"})
    source = open_source("imagefolder", photos)
    with refused(BadImage, f"pip install 'shardkit[{name}]'"):
        source.scan().splits[""].read([0])


@pytest.fixture
def jxl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let this process import the library, and not a child, which is older than the test."""
    monkeypatch.syspath_prepend(JXL)
    monkeypatch.setattr(extras, "call", lambda function, *given: function(*given))
    return pytest.importorskip("pylibjxl")


def test_jpeg_xl_is_exact(jxl: Any, tmp_path: Path) -> None:
    clear = np.dstack([gradient(), np.full((48, 64), 128, np.uint8)])
    turned = Image.Exif()
    turned[0x112] = 6  # void: the file states that it is upright
    files = {
        "rgb.jxl": jxl.encode(gradient(), lossless=True, exif=turned.tobytes()),
        "clear.jxl": jxl.encode(clear, lossless=True),
        "gray.png": jxl.encode(gradient()[:, :, 0].copy(), lossless=True),
    }
    photos = make_tree(tmp_path / "photos", files)
    made = tmp_path / "made"
    convert(photos, made, to="lmdb", encode="png", workers=1)
    dataset = open_dataset(made, decode="numpy")
    images = {path: dataset[row][0] for row, path in enumerate(dataset.paths)}
    assert np.array_equal(images["rgb.jxl"], gradient())
    over_white = gradient() * (128 / 255) + 127
    assert np.abs(images["clear.jxl"] - over_white).max() <= 1
    assert np.array_equal(images["gray.png"], gradient()[:, :, [0, 0, 0]])
    assert verify(made, "decode", against=photos).findings == []


def test_damaged_jpeg_xl_is_bad(jxl: Any, tmp_path: Path) -> None:
    whole = jxl.encode(gradient(), lossless=True)
    files = {"cut.jxl": whole[:-20], "noise": b"\xff\x0a" + bytes(99), "good.jpg": jpeg()}
    photos = make_tree(tmp_path / "photos", files)
    convert(photos, tmp_path / "made", to="lmdb", encode="png", on_error="skip", workers=1)
    assert open_dataset(tmp_path / "made").paths[:] == ["good.jpg"]
