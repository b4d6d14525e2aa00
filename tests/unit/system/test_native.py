"""The compiled module computes what zlib, Pillow and the index do, and is never required."""

from __future__ import annotations

import os
import platform
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from filled import Located, Stored
from helpers import jpeg, pixels, run
from PIL import Image
from refusals import refused

from shardkit.codecs.measures import MEASURES, WAVES
from shardkit.dataset.index import ROW, damaged_rows, pack_row
from shardkit.errors import UsageError
from shardkit.system import compiled, native
from shardkit.system.compiled import resize


@pytest.fixture
def module() -> ModuleType:
    found = native.module()
    if found is None:
        pytest.skip(f"no compiled module: {native.describe()}")
    return found


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def test_the_processors_instructions_are_found(module: ModuleType) -> None:
    """Wheels once had none: they scaled images at a third of the speed."""
    try:
        flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    except FileNotFoundError:
        pytest.skip("no /proc/cpuinfo: not Linux")
    has_avx2 = platform.machine() == "x86_64" and "avx2" in flags
    assert bool(module.AVX2) == has_avx2


def test_the_checksum_is_that_of_zlib(module: ModuleType) -> None:
    data = np.random.default_rng(0).bytes(5000)

    for length in (*range(300), 511, 512, 527, 768, 1023, 1024, 1025, 5000):
        for start in (0, 1):  # not aligned, too
            part = data[start:length]
            for value in (0, 0xFFFFFFFF, 12345):
                assert module.crc32(part, value) == zlib.crc32(part, value)


@pytest.mark.parametrize("filter_", ["bilinear", "bicubic"])
def test_scaling_is_that_of_pillow(module: ModuleType, filter_: str) -> None:
    method = Image.Resampling[filter_.upper()]
    random = np.random.default_rng(1)
    for number in range(150):
        width, height, across, down = map(int, random.integers(1, 200, 4))
        image = pixels(width, height, seed=number)
        if number % 3 == 0:
            image = np.where(image > 127, 255, 0).astype(np.uint8)  # sums go beyond a byte
        xs, ys = sorted(random.uniform(0, width, 2)), sorted(random.uniform(0, height, 2))
        box = (0.0, 0.0, float(width), float(height))
        if number % 2 and xs[1] - xs[0] > 0.1 and ys[1] - ys[0] > 0.1:
            box = xs[0], ys[0], xs[1], ys[1]

        found = resize(image, box, (down, across), filter_)

        expected = Image.fromarray(image).resize((across, down), method, box)
        np.testing.assert_array_equal(found, np.asarray(expected), str((image.shape, box)))


def test_views_are_scaled(module: ModuleType) -> None:
    image = pixels(90, 70)
    view = image[10:50, 20:61]

    found = resize(view, (0.0, 0.0, 41.0, 40.0), (16, 17), "bicubic")

    expected = Image.fromarray(view).resize((17, 16), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(found, np.asarray(expected))


@pytest.mark.parametrize(
    "box",
    [(-1.0, 0.0, 5.0, 5.0), (0.0, 0.0, 25.0, 5.0), (3.0, 0.0, 3.0, 5.0), (0.0, 5.0, 5.0, 1.0)],
)
def test_a_box_outside_the_image_is_refused(
    module: ModuleType, box: tuple[float, float, float, float]
) -> None:
    assert resize(pixels(24, 16), box, (4, 4), "bilinear") is None


def test_damaged_entries_are_those_that_python_finds(
    module: ModuleType, without_native: None
) -> None:
    packed = pack_row(offset=7, image=b"abc", label=3, size=(4, 5), field="jpg")
    entries = [packed]
    for bit in range(8 * ROW.itemsize):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        entries.append(bytes(damaged))
    rows = np.frombuffer(b"".join(entries), ROW)
    found = np.empty(len(rows), np.bool_)

    module.check_entries(rows.tobytes(), 8, found)

    assert found.tolist() == damaged_rows(rows).tolist() == [False] + [True] * 256


def test_buffers_of_a_wrong_size_are_refused(module: ModuleType) -> None:
    def call(**changed: object) -> None:
        given: dict[str, object] = {
            "out": bytearray(2 * 12),
            "height": 2,
            "width": 2,
            "entries": bytes(64),
            "files": np.zeros(2, np.int32),
            "maps": None,
            "pieces": None,
            "rows": None,
            "mark": None,
            "options": (True, True, (255, 255, 255), False, False, 1.0),
            "codes": bytearray(2),
        }
        given.update(changed)
        options = given.pop("options")
        codes = given.pop("codes")
        assert isinstance(options, tuple)
        module.fill(*given.values(), *options, codes)

    call()
    wrong: list[dict[str, object]] = [
        {"out": bytearray(23)},
        {"out": bytearray(36)},
        {"height": 0},
        {"height": 65536},
        {"width": -2},
        {"entries": bytes(63)},
        {"files": np.zeros(3, np.int32)},
        {"pieces": np.zeros((2, 6), np.int32)},
        {"mark": np.zeros(1, np.int64)},
        {"mark": np.zeros(1, np.int64), "rows": np.zeros(1, np.int64)},
        {"mark": bytes(8), "rows": np.zeros(2, np.int64)},
        {"codes": bytearray(1)},
    ]
    for changed in wrong:
        with pytest.raises(ValueError, match=r"size|bytes|height|read-only"):
            call(**changed)
    shared = ((2, 2), (bytes(64), np.zeros(2, np.int32), None, None, None, None))
    options = (True, True, (255, 255, 255), False, False, 1.0)
    one, other = (
        (bytearray(24), *shared[0], entries, *shared[1][1:], *options, bytearray(2))
        for entries in (shared[1][0], bytes([*bytes(63), 1]))
    )
    assert module.fill_views(one, one) == 0
    for views in ((one, other), (one, (*one[:-1], bytearray(1))), ()):
        with pytest.raises(ValueError, match=r"entries|size"):
            module.fill_views(*views)
    with pytest.raises(TypeError):
        module.fill_views(one, list(one))
    with pytest.raises(ValueError, match="one byte"):
        module.check_entries(bytes(33), 8, bytearray(1))
    for unwritable in ({"out": bytes(24)}, {"codes": bytes(2)}):
        with pytest.raises((TypeError, BufferError)):
            call(**unwritable)


def test_heads_are_those_of_regular_files_that_are_long_enough(
    module: ModuleType, tmp_path: Path
) -> None:
    files = {"long": b"abcdef", "exact": b"ghij", "short": b"abc"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, ns=(7, 1_234_567_890_123))
    os.mkfifo(tmp_path / "pipe")
    names = [*files, "pipe", "missing", "."]
    found = [*compiled.read_heads([os.fsencode(tmp_path / name) for name in names], 4)]
    assert found[:2] == [(6, 1_234_567_890_123, b"abcd"), (4, 1_234_567_890_123, b"ghij")]
    assert [size for size, *_ in found[2:]] == [-1] * 4
    numbers = np.zeros(1, np.int64)
    for length, heads in ((0, b""), (-1, b""), (4, bytes(3)), (1 << 20, bytes(1 << 20))):
        with pytest.raises(ValueError, match=r"length|heads"):
            module.read_heads([b"a"], length, bytearray(heads), numbers, numbers.copy())


def test_a_file_is_read_behind_its_head(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"headvalues")
    path = os.fsencode(tmp_path / "file")
    stats = np.array([10]), np.array([(tmp_path / "file").stat().st_mtime_ns])
    heads = (b"", b"head", b"heat", b"headvalues", b"headvalues and more", bytes(5000))
    contents = [compiled.read_files([path], stats, head)[0] for head in heads]
    assert contents == [b"headvalues", b"values", None, None, None, None]


def test_crops_are_copied_from_images_in_memory_only(module: ModuleType) -> None:
    """A line has 2 + 5 pixels, and an image 1 + 4 lines."""
    images = np.random.default_rng(0).integers(0, 256, 3 * (7 * (5 * 3 + 1) + 2), np.uint8)
    layout = 7, 5, 2, 1
    draws = 1, np.zeros(2, np.uint64)
    out = np.zeros((2, 6, 9, 3), np.uint8)  # all of an image and its margins

    assert compiled.copy_crops(out, (images, *layout), np.array([0, 2]), draws, 0.0)
    for found, position in zip(out, (0, 2), strict=True):
        lines = [3 * 7 * (5 * position + line) for line in range(6)]
        assert found.tobytes() == b"".join(images[at : at + 27].tobytes() for at in lines)
    for position in (-1, 3, 2**62):
        assert not compiled.copy_crops(out, (images, *layout), np.array([0, position]), draws, 0.0)
    assert not compiled.copy_crops(out, (images[:-1], *layout), np.array([0, 2]), draws, 0.0)
    assert not compiled.copy_crops(out, (images[:9], *layout), np.array([0, 0]), draws, 0.0)
    for wrong in ((6, 5, 2, 1), (7, 4, 2, 1), (7, 5, -1, 1), (7, 5, 7, 1), (2**30, 5, 2, 1)):
        with pytest.raises(ValueError, match="margins"):
            compiled.copy_crops(out, (images, *wrong), np.array([0, 2]), draws, 0.0)
    with pytest.raises(ValueError, match="samples"):
        compiled.copy_crops(out, (images, *layout), np.array([0, 2]), (1, draws[1][:1]), 0.0)
    with pytest.raises(ValueError, match="out"):
        compiled.copy_crops(out[:1], (images, *layout), np.array([0, 2]), draws, 0.0)


# With and without the module.


def test_off_means_none(without_native: None) -> None:
    assert native.module() is None
    assert native.describe() == f"off ({native.VARIABLE})"
    assert resize(pixels(), (0.0, 0.0, 24.0, 16.0), (4, 4), "bilinear") is None


def test_every_operation_is_offered(module: ModuleType) -> None:
    operations = {name for name in vars(module) if callable(getattr(module, name))}

    assert operations <= vars(compiled).keys()


def test_without_the_module_all_is_left_to_python(without_native: None) -> None:
    rows = Located([Stored(jpeg(30, 28), 30, 28)] * 2)
    entries, number = np.frombuffer(rows.entries, ROW), np.zeros(2, np.int64)
    image, measures = pixels(), np.zeros(1, MEASURES)

    left = (
        compiled.fill(rows, np.empty((2, 28, 30, 3), np.uint8)),
        compiled.fill_values(rows, np.empty((2, 9), np.uint8)),
        compiled.read_stored(rows)[1],
    )
    assert [*map(list, left)] == [[0, 1]] * 3
    assert [*compiled.read_heads([b"a"], 4)] == [(-1, -1, bytes(4))]
    assert compiled.read_files([b"a"], (number, number), b"head") == [None]
    assert compiled.crc32(b"abc") == zlib.crc32(b"abc")
    memory = image, 7, 5, 2, 1
    assert not compiled.copy_crops(image[None], memory, number, (1, number.view(np.uint64)), 0.5)
    assert not compiled.measure(image, (8 * 30, 8 * 28), WAVES, measures)
    assert not compiled.measure_jpeg(jpeg(30, 28), (30, 28), WAVES, measures)
    assert not compiled.measure_png(bytes(10), (3, 1, 3), WAVES, measures)
    table = number[:, None], number[:, None], None, b"", number, 0
    nothing = (
        compiled.check_entries(entries, 8),
        compiled.crc32_contribution(b"abc", 3),
        compiled.draw_crops(
            (1, np.array([2, 3], np.uint64)), (number, number), (0.1, 1.0), (0.7, 1.4), 0.5
        ),
        compiled.index_records(0, {"jpg": 0}, table, (b"", 0), (np.zeros(64, np.uint8), None)),
        compiled.inspect_jpeg(jpeg(30, 28)),
        compiled.jpeg_decodes(jpeg(30, 28)) or None,
        compiled.map_file(0, 100),
        compiled.read_images([b"a"], (number, number), decode=True, measuring=None),
        compiled.record_checksums([]),
        compiled.resize(image, (0.0, 0.0, 24.0, 16.0), (4, 4), "bilinear"),
        compiled.encode_jpeg(image, 90),
        compiled.scale_jpeg(jpeg(30, 28), (30, 28), 8, (4, 4), "bilinear"),
        compiled.survey(rows.entries, number, 8, (0, 0), 100),
        compiled.tar_members([], 100, {}),
        compiled.lmdb_items([], 0, {}),
        compiled.walk_lmdb(0, 100),
        compiled.walk_tar(0, 100, 0, 100),
    )
    assert nothing == (None,) * 17


def test_a_wrong_setting_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "yes")

    with refused(UsageError, "on or off"):
        native.module()
    assert "'yes'" in native.describe()


@pytest.mark.parametrize(
    ("found", "text"), [(None, "not built"), (ModuleType("_native"), "built from other sources")]
)
def test_a_module_that_is_not_built_from_these_sources_is_not_used(
    monkeypatch: pytest.MonkeyPatch, found: ModuleType | None, text: str
) -> None:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "shardkit._native", found)

    assert native.module() is None
    assert native.describe() == text
    monkeypatch.setenv(native.VARIABLE, "on")
    native._load.cache_clear()
    with refused(UsageError, "install"):
        native.module()


@pytest.mark.parametrize("wish", ["", "off"])
def test_the_version_names_the_module(wish: str) -> None:
    done = run("--version", env={native.VARIABLE: wish})

    assert done.stdout.startswith("shardkit ")
    assert "compiled module: " in done.stdout
    assert ("off" in done.stdout) == (wish == "off")
