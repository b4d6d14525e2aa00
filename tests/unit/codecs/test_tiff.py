"""TIFF files of any type have the arrays that tifffile was given; bombs and lies are refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tifffile
from PIL import Image
from refusals import refused
from table import for_each

from shardkit import convert, open_dataset, verify
from shardkit.codecs import limits, tiff
from shardkit.codecs.image_type import ImageType
from shardkit.codecs.tiff_structure import MAX_PAGES, TiffPage, tiff_pages
from shardkit.codecs.typed import decode_typed, inspect_typed
from shardkit.errors import BadImage


def values(dtype: str, *shape: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(1000, 900, shape).astype(dtype)


def written(pixels: npt.NDArray[Any], **options: Any) -> bytes:
    """Return a TIFF file; its last axis are the channels unless options say otherwise."""
    file = io.BytesIO()
    options.setdefault("photometric", "minisblack")
    options.setdefault("planarconfig", "contig")
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "float32", "float64"])
@pytest.mark.parametrize("channels", [2, 3, 7])
def test_channels_and_dtype_are_those_of_the_file(
    dtype: str, channels: int, capfd: pytest.CaptureFixture[str]
) -> None:
    pixels = values(dtype, 48, 64, channels)
    decoded = decode_typed(written(pixels), "tiff")
    assert capfd.readouterr().err == ""
    assert decoded.dtype == pixels.dtype
    np.testing.assert_array_equal(decoded, pixels)


@for_each("dtype", ["uint8", "int16", "uint16", "int32", "float32", "float64"])
def test_one_channel_keeps_its_dtype(dtype: str) -> None:
    pixels = values(dtype, 48, 64)
    decoded = decode_typed(written(pixels, planarconfig=None), "tiff")
    assert decoded.dtype == pixels.dtype
    np.testing.assert_array_equal(decoded[:, :, 0], pixels)


@for_each(
    "options",
    [
        *({"compression": name} for name in ("zlib", "lzw", "zstd", "packbits", "lzma")),
        {"compression": "zlib", "predictor": True},
        {"tile": (16, 32)},
        {"tile": (16, 32), "compression": "zlib"},
        {"rowsperstrip": 5},
        {"bigtiff": True},
        {"byteorder": ">"},
    ],
)
def test_each_layout_is_decoded(options: dict[str, Any]) -> None:
    pixels = values("uint16", 48, 64, 5)
    np.testing.assert_array_equal(decode_typed(written(pixels, **options), "tiff"), pixels)


def test_separate_planes_are_channels() -> None:
    planes = values("uint16", 5, 48, 64)
    data = written(planes, planarconfig="separate")
    np.testing.assert_array_equal(decode_typed(data, "tiff"), np.moveaxis(planes, 0, 2))


def test_pages_are_channels() -> None:
    pages = values("uint16", 6, 48, 64)
    data = written(pages, planarconfig=None)
    np.testing.assert_array_equal(decode_typed(data, "tiff"), np.moveaxis(pages, 0, 2))
    info = inspect_typed(data, "tiff")
    assert (info.width, info.height, info.pixels) == (64, 48, ImageType(6, "uint16"))


def test_reduced_versions_are_not_read() -> None:
    whole, half = values("uint16", 32, 32, 5), values("uint16", 16, 16, 5)
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(whole, photometric="minisblack", planarconfig="contig")
        writer.write(half, photometric="minisblack", planarconfig="contig", subfiletype=1)
    np.testing.assert_array_equal(decode_typed(file.getvalue(), "tiff"), whole)


def test_pages_that_differ_are_refused() -> None:
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        for side in (32, 16):
            writer.write(values("uint8", side, side), photometric="minisblack")
    with refused(BadImage, "2"):
        decode_typed(file.getvalue(), "tiff")


@for_each(("mode", "channels"), [("P", 3), ("1", 1), ("CMYK", 3)])
def test_pillow_converts_palettes_bits_and_cmyk(mode: str, channels: int) -> None:
    file = io.BytesIO()
    image = Image.fromarray(values("uint8", 20, 30, 3)).convert(mode)
    image.save(file, "TIFF")
    decoded = decode_typed(file.getvalue(), "tiff")
    expected = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    np.testing.assert_array_equal(decoded, expected.reshape(20, 30, channels))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(values("uint16", 8, 8, 5))
    monkeypatch.setattr(tiff, "find_spec", lambda _: None)
    with pytest.raises(BadImage, match=r"pip install 'shardkit\[tiff\]'"):
        decode_typed(data, "tiff")


@for_each("compression", [None, "zlib", "lzw", "zstd"])
def test_a_truncated_or_damaged_file_is_refused(compression: str | None) -> None:
    pixels = values("uint16", 24, 16, 5)
    data = written(pixels, compression=compression)
    for length in range(0, len(data), 97):
        with pytest.raises(BadImage):
            decode_typed(data[:length], "tiff")
    rng = np.random.default_rng(0)
    for _ in range(60):
        damaged = np.frombuffer(bytearray(data), np.uint8)
        damaged[rng.integers(len(data), size=3)] ^= rng.integers(1, 256, 3, np.uint8)
        try:
            decoded = decode_typed(damaged.tobytes(), "tiff")
        except BadImage:
            continue
        assert decoded.size <= 1 << 24


def test_a_bomb_is_refused() -> None:
    """A strip of an image of 16 x 16 pixels that unpacks to 64 MB."""
    data = written(values("uint16", 16, 16, 5), compression="zlib")
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages[0]
        assert isinstance(page, tifffile.TiffPage)
        tags = [page.tags[name].offset for name in ("StripOffsets", "StripByteCounts")]
    packer = zlib.compressobj(1)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    changed = bytearray(data)
    for tag, value in zip(tags, (len(data), len(bomb)), strict=True):
        changed[tag + 2 : tag + 4] = (4).to_bytes(2, "little")  # a number of 32 bits
        changed[tag + 8 : tag + 12] = value.to_bytes(4, "little")
    with refused(BadImage):
        decode_typed(bytes(changed) + bomb, "tiff")


def forged(data: bytes, **tags: int) -> bytes:
    """Return a TIFF file with other numbers in tags of its first page."""
    changed = bytearray(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        for name, value in tags.items():
            at = file.pages[0].tags[name].offset  # type: ignore[union-attr]
            changed[at + 2 : at + 4] = (4).to_bytes(2, "little")  # a number of 32 bits
            changed[at + 8 : at + 12] = value.to_bytes(4, "little")
    return bytes(changed)


@for_each(
    ("shape", "compression", "said"),
    [
        ((13_000, 14_000, 2), "zlib", "178956970"),  # over the limit of pixels
        ((10_000, 10_000, 9), None, "894784850"),  # and of bytes
        ((1000, 1100, 2), None, "damaged"),
        ((1000, 1100, 2), "zlib", "damaged"),
        ((1000, 1000, 300), "lzw", "damaged"),
    ],
)
def test_a_size_that_the_file_cannot_have_is_refused_before_decoding(
    shape: tuple[int, int, int], compression: str | None, said: str
) -> None:
    # One strip, whose data are those of 2 x 2 pixels.
    data = written(np.zeros((2, 2, shape[2]), np.uint8), compression=compression)
    data = forged(data, ImageLength=shape[0], ImageWidth=shape[1], RowsPerStrip=shape[0])
    with pytest.MonkeyPatch.context() as patch:
        for decoder in ("opened", "loaded", "call"):
            patch.delattr(tiff, decoder)
        for read in (decode_typed, inspect_typed):
            with refused(BadImage, said):
                read(data, "tiff")


def test_strips_that_share_bytes_count_once() -> None:
    """500 strips of one row, each of which has all bytes of the file."""
    data = written(np.zeros((500, 4, 5), np.uint8), compression="zlib", rowsperstrip=1)
    changed = bytearray(data)
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        for name, value in (("StripOffsets", 0), ("StripByteCounts", len(data))):
            tag = file.pages[0].tags[name]  # type: ignore[union-attr]
            kind = {3: "<u2", 4: "<u4"}[int(tag.dtype)]
            values = np.full(500, value, kind).tobytes()
            changed[tag.valueoffset : tag.valueoffset + len(values)] = values
    with refused(BadImage, "share"):
        decode_typed(bytes(changed), "tiff")


@for_each("pages", [1, 5])
def test_large_images_are_decoded_by_one_process_at_a_time(
    monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """Their child, too, has the memory for one image."""
    turns = []

    @contextmanager
    def turn() -> Iterator[None]:
        turns.append("waits")
        yield
        turns.append("ends")

    monkeypatch.setattr(limits, "in_turn", turn)
    monkeypatch.setattr(limits, "_LARGE_BYTES", pages * 40 * 40 * 8 - 1)
    pixels = values("float64", pages, 40, 40)
    data = written(pixels, planarconfig=None)
    decode_typed(data, "tiff")
    assert turns == ["waits", "ends"]
    monkeypatch.setattr(limits, "_LARGE_BYTES", pages * 40 * 40 * 8)
    decode_typed(data, "tiff")
    assert len(turns) == 2


@pytest.mark.parametrize("to", ["lmdb", "webdataset"])
def test_a_folder_of_them_is_converted_and_verified(tmp_path: Path, to: Any) -> None:
    pixels = [values("uint16", 20 + row, 24, 6) + row for row in range(3)]
    for row, array in enumerate(pixels):
        path = tmp_path / "source" / "field" / f"{row}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(written(array.astype(np.uint16), compression="zlib"))
    made = tmp_path / "made"
    convert(tmp_path / "source", made, to=to, pixels="keep", shuffle=False)
    assert verify(made, against=tmp_path / "source", level="decode").ok
    for (image, _), array in zip(open_dataset(made, decode="numpy")[:], pixels, strict=True):
        np.testing.assert_array_equal(image, array)


# The structure of TIFF files is read without decoding; bombs and lies are refused.

Tag = tuple[int, int, int]
"""Number, type and value of a tag."""


def of_pillow(mode: str = "RGB", **options: Any) -> bytes:
    """Return a TIFF file of 40 x 30 pixels as Pillow writes it."""
    file = io.BytesIO()
    Image.new(mode, (40, 30)).save(file, "TIFF", **options)
    return file.getvalue()


def page(*changes: Tag, following: int = 0) -> bytes:
    """Return a little-endian file with one gray page of 4 x 4 pixels at offset 8."""
    tags = {256: (4, 4), 257: (4, 4), 258: (3, 8), 273: (4, 0), 279: (4, 16), 278: (4, 4)}
    tags |= {tag: (kind, value) for tag, kind, value in changes}
    entries = b"".join(
        struct.pack("<HHII", tag, kind, 1, value) for tag, (kind, value) in sorted(tags.items())
    )
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + struct.pack("<I", following)


@for_each(
    ("mode", "samples", "bits"),
    [("1", 1, 1), ("L", 1, 8), ("RGB", 3, 8), ("RGBA", 4, 8), ("I;16", 1, 16), ("F", 1, 32)],
)
def test_pages_have_the_size_and_values_of_pillow(mode: str, samples: int, bits: int) -> None:
    (page,) = tiff_pages(of_pillow(mode))
    assert page[:4] == (40, 30, samples, bits)
    assert page.dtype == ("float32" if mode == "F" else f"uint{bits}")


@for_each("options", [{"big_tiff": True}, {"compression": "tiff_deflate"}])
def test_other_layouts_are_read(options: dict[str, Any]) -> None:
    compression = 8 if "compression" in options else 1
    expected = TiffPage(40, 30, 3, 8, photometric=2, compression=compression)
    assert tiff_pages(of_pillow(**options)) == [expected]


def test_all_pages_are_listed() -> None:
    more = [Image.new("L", (7, 5)), Image.new("L", (9, 2))]
    data = of_pillow("L", save_all=True, append_images=more)
    assert [entry[:2] for entry in tiff_pages(data)] == [(40, 30), (7, 5), (9, 2)]


@for_each(
    ("data", "message"),
    [
        (b"", "not a TIFF"),
        (page(following=8), "cycle"),
        (page(following=4000), "outside the file"),
        (page((256, 4, 1 << 31), (257, 4, 1 << 31)), "over the limit"),
        (page((256, 4, 0)), "0 x 4 pixels"),
        (page((273, 4, 1 << 30)), "pixels are outside the file"),
        (page((279, 4, 1 << 30)), "pixels are outside the file"),
        (page((278, 4, 1)), "needs 4"),
        (page((322, 4, 1 << 20), (323, 4, 16)), "1048576-pixel tiles"),
        (page((258, 3, 999)), "999 bits"),
        (page((256, 2, 4)), "not an integer"),
        (b"II*\0\x08\0\0\0\xff\xff" + bytes(99), "65535 tags"),
    ],
)
def test_bombs_and_lies_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        tiff_pages(data)


def test_a_tag_larger_than_the_file_is_refused_before_it_is_read() -> None:
    data = bytearray(page())
    entry = data.index(struct.pack("<HH", 273, 4))
    struct.pack_into("<I", data, entry + 4, 0xFFFFFFFF)
    with refused(BadImage, "273"):
        tiff_pages(bytes(data))


def test_pages_that_share_a_long_tag_are_refused() -> None:
    first = page(following=len(page()))
    data = bytearray(first + page()[8:] + bytes(1 << 20))
    for start in (8, len(first)):
        entry = data.index(struct.pack("<HH", 273, 4), start)
        struct.pack_into("<HHII", data, entry, 273, 1, 1 << 20, len(data) - (1 << 20))
    with pytest.raises(BadImage, match="more than 1048576 numbers"):
        tiff_pages(bytes(data))


def test_too_many_pages_are_refused() -> None:
    size = len(page())
    data = bytearray(page())
    for number in range(MAX_PAGES):
        struct.pack_into("<I", data, len(data) - 4, size + number * (size - 8))
        data += page()[8:]
    with pytest.raises(BadImage, match=f"more than {MAX_PAGES} pages"):
        tiff_pages(bytes(data))


def test_every_truncation_is_refused_or_has_all_pixels() -> None:
    data = of_pillow("L", compression="tiff_deflate")
    expected = tiff_pages(data)
    for length in range(len(data)):
        try:
            assert tiff_pages(data[:length]) == expected
        except BadImage:
            continue


def test_random_damage_raises_only_bad_images() -> None:
    data, rng = np.frombuffer(of_pillow("L"), np.uint8), np.random.default_rng(0)
    for _ in range(300):
        damaged = data.copy()
        damaged[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        try:
            tiff_pages(damaged.tobytes())
        except BadImage:
            continue
