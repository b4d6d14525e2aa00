"""Costs of hostile images: bounded memory, no warnings, no hang."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import cases
from helpers import (
    encoded,
    execute,
    make_dataset,
    make_folder,
    make_tree,
    picture,
    png,
    python,
    shardkit_command,
)
from hostile.damage import edit
from hostile.folder import NEIGHBOURS, make_source
from hostile.images import CASES
from hostile.page import tables
from PIL import Image
from refusals import refused

from shardkit.codecs import image as codec
from shardkit.codecs import limits
from shardkit.codecs.image import Decoding, decode, inspect
from shardkit.codecs.limits import MAX_PIXELS
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import Record
from shardkit.system.npy import npy_header

ROOT = Path(__file__).parents[2]

ADDRESS_SPACE = 3 << 30
"""Bytes that a conversion of the whole corpus may map, libraries and all."""
GROWTH = 320 << 20
"""Bytes by which its memory may exceed that of a conversion of the neighbours alone: it reads a
file of 60 MB, and unpacks texts of up to 64 MB."""
BYTES_PER_PIXEL = 16
"""What decoding takes at most, for images of some size: under 2.7 GiB at the limit of pixels."""


def peak_of(command: list[str]) -> tuple[int, str]:
    """Run a command under the limit; return the most memory that it had, and what it said."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))

    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="backslashreplace",
        preexec_fn=limit,  # noqa: PLW1509 - the child only runs Python
    ) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, said
    return usage.ru_maxrss * 1024, said


@pytest.mark.measures
def test_the_whole_corpus_takes_bounded_memory_and_gives_no_warning(tmp_path: Path) -> None:
    """As a user with little memory runs it, for whom each warning is an error."""
    healthy = make_tree(tmp_path / "healthy", NEIGHBOURS)
    odd = make_source(tmp_path / "odd")
    peaks = {}
    for source in (healthy, odd):
        command = shardkit_command(
            "convert",
            "imagefolder",
            source,
            tmp_path / f"{source.name}-set",
            "--to",
            "lmdb",
            "--on-error",
            "skip",
        )
        command[1:1] = ["-W", "error"]
        peaks[source.name], said = peak_of([*command, "--workers", "1"])
        assert "Warning" not in said
        assert "Traceback" not in said
    assert peaks["odd"] - peaks["healthy"] < GROWTH


MEASURE = """
import sys
sys.path.insert(0, sys.argv[1])
from PIL import Image
from helpers import encoded, np, pixels, png_file
from shardkit.codecs.image import decode, inspect
import struct

def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024

side = 3600
image = Image.fromarray(np.tile(pixels(60, 60), (side // 60, side // 60, 1)))
deep = struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0)
files = (
    ("jpg", encoded(image, "JPEG", progressive=True, subsampling=0)),
    ("jpg", encoded(image.convert("CMYK"), "JPEG")),
    ("png", encoded(image.convert("RGBA"), "PNG", compress_level=1)),
    ("png", png_file(deep, bytes((8 * side + 1) * side))),
    ("webp", encoded(image, "WEBP", lossless=True, method=0)),
    ("gif", encoded(image.quantize(16), "GIF")),
    ("tiff", encoded(image, "TIFF", compression="tiff_adobe_deflate")),
)
for field, data in files:
    decode(data, field)
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write("5")
    before = peak()
    inspect(data, field)
    inspected = peak()
    decode(data, field)
    print(field, (inspected - before) / side**2, (peak() - before) / side**2)
"""


@pytest.mark.measures
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_decoding_takes_few_bytes_for_each_pixel() -> None:
    done = python(MEASURE, ROOT / "tests/support")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 7
    for field, inspected, decoded in lines:
        assert float(inspected) < 1, f"{field}: a header is read without the pixels"
        assert float(decoded) < BYTES_PER_PIXEL, field
    assert BYTES_PER_PIXEL * MAX_PIXELS < ADDRESS_SPACE


SAMPLES = {
    "jpg": encoded(picture(mode="CMYK"), "JPEG"),
    "png": png(),
    "webp": encoded(kind="WEBP"),
    "gif": encoded(kind="GIF"),
    "bmp": encoded(kind="BMP"),
    "tiff": encoded(kind="TIFF"),
    "ppm": encoded(kind="PPM"),
}


@pytest.mark.parametrize("mode", ["shorter", "crop"])
def test_a_strip_is_not_enlarged_beyond_the_limit(mode: str) -> None:
    """A strip of 60,000 x 1 pixels would become four billion of them at 256 rows."""
    strip = Record("a", {"png": encoded(Image.new("L", (60_000, 1)), "PNG")})
    recipe = Recipe(resize=(256, 256), resize_mode=mode, enlarge=True)
    with refused(BadImage, "15360000", "256"):
        convert_record(recipe, strip)
    convert_record(Recipe(resize=(256, 256), resize_mode=mode), strip)


@pytest.mark.usefixtures("without_native")  # whose limits are lower, and constants
def test_the_limit_of_pixels_counts_for_all_kinds() -> None:
    """Real bombs, small enough to be unpacked if the limit failed; just below it they are good."""
    for field, data in SAMPLES.items():
        with limits.pixels_up_to(24 * 16 - 1):
            for function in (inspect, decode):
                with refused(BadImage, "24", "16", "383"):
                    function(data, field)
        with limits.pixels_up_to(24 * 16):
            assert inspect(data, field).upright == (24, 16)
            assert decode(data, field).shape == (16, 24, 3)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "CMYK", "I;16", "1"])
def test_a_large_image_has_the_pixels_that_it_would_have_if_it_were_small(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """It is turned into RGB a few rows at a time."""
    kind, field = ("TIFF", "tiff") if mode == "CMYK" else ("PNG", "png")
    image = picture(40, 37, mode=mode)
    options = {"transparency": 3} if mode == "P" else {}
    data = encoded(image, kind, **options)
    whole = decode(data, field, Decoding((9, 99, 199)))
    for band in (1, 40, 41, 120, 40 * 36, 40 * 37):
        monkeypatch.setattr(codec, "_BAND", band)
        assert np.array_equal(decode(data, field, Decoding((9, 99, 199))), whole)


def test_the_site_shows_each_case() -> None:
    shown = tables()
    assert f"{len(CASES)} cases" in shown
    assert [case.name for case in CASES if case.name.replace("|", "\\|") not in shown] == []


def grow(place: Path, rows: int) -> None:
    """Let a dataset state many rows, which take no space: the files of its index are sparse."""
    sizes = {}
    for path in sorted((place / "index").iterdir()):
        values = np.load(path)
        count = rows if path.name.endswith(("rows.npy", "ends.npy")) else rows * 8
        header = npy_header((count,), values.dtype)
        path.write_bytes(header + values.tobytes())
        os.truncate(path, len(header) + count * values.dtype.itemsize)
        if path.name.endswith("ends.npy"):  # the last text has all bytes
            with path.open("rb+") as file:
                file.seek(-8, os.SEEK_END)
                file.write(np.array(rows * 8, values.dtype).tobytes())
        sizes[f"index/{path.name}"] = path.stat().st_size

    def state(value: dict[str, Any]) -> None:
        value["rows"] = value["shards"][0]["rows"] = rows
        value["class_counts"] = [rows - 1, 1]
        for each in value["schema"]:
            each["rows"] = rows
        value["fields"] = dict.fromkeys(value["fields"], rows)
        for entry in value["files"]:
            entry["bytes"] = sizes[entry["name"]]

    edit(place, state)


@pytest.mark.parametrize(
    "command",
    cases(
        [
            *(("show", "{}"), ("show", "{}", "--class", "cat"), ("show", "{}", "--class", "dog")),
            *(("show", "{}", "5"), ("show", "{}", "nothing"), ("report", "{}")),
        ],
        3,
    ),
    ids=" ".join,
)
def test_a_forged_number_of_rows_takes_no_memory(tmp_path: Path, command: tuple[str, ...]) -> None:
    place = make_dataset(make_folder(tmp_path / "photos", each=2), tmp_path / "out")
    grow(place, 10**9)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))

    done = execute(*shardkit_command(*(word.format(place) for word in command)), preexec_fn=limit)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 1
