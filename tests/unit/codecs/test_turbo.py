"""Regions decoded with TurboJPEG 3 equal a full decode and crop, bit for bit."""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import Pixels, encoded, jpeg, make_dataset, make_tree, opened, picture, pixels
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused

from scripts.fuzzing.pieces import compare
from shardkit import CenterCrop, RandomResizedCrop, UsageError, make_loader, open_dataset
from shardkit.codecs import turbo
from shardkit.codecs.image import EXACT
from shardkit.codecs.turbo import Region, decode_region
from shardkit.dataset import decode as decoding
from shardkit.dataset.decode import DecodedPart, decode_part, decode_stored, enclosing
from shardkit.dataset.located import EncodedImage
from shardkit.errors import BadImage
from shardkit.torch.data.ops import Crop, ImageOp

simplejpeg = pytest.importorskip("simplejpeg")

pytestmark = pytest.mark.usefixtures("without_native")

_ENVIRONMENT = Path(__file__).parents[3] / ".venv"
LIBRARIES = [
    *sorted((_ENVIRONMENT / "pylibjxl/pylibjxl").glob(f"_pylibjxl{EXTENSION_SUFFIXES[0]}")),
    *sorted((_ENVIRONMENT / "turbojpeg").glob("*.libs/libturbojpeg*")),
]
"""Libraries that scripts/setup installs for these tests, if there are any for this Python."""

needs_library = pytest.mark.skipif(not LIBRARIES, reason="no TurboJPEG 3 for this Python")

SUBSAMPLINGS = ("444", "422", "420", "gray", "440", "411", "441")
"""In the order of TJSAMP_444 to TJSAMP_441."""
EIGHTHS = (8, 4, 3, 2, 1)
PARAMETERS = {
    "quality": 3,
    "subsampling": 4,
    "optimise": 11,
    "progressive": 12,
    "arithmetic": 14,
    "restart": 18,  # every so many blocks
}
"""Numbers of TJPARAM_..., from turbojpeg.h."""
WIDE = (97, 61)
"""Width and height of an image of several blocks each way, neither of which fill its last."""
REGIONS = (Region(5, 7, 20, 20), Region(40, 40, 57, 21))
"""One inside, and one in the corner of `WIDE`."""


def use(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    """Choose the library again, as in a new process with this environment variable."""
    if named is None:
        monkeypatch.delenv(turbo.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(turbo.VARIABLE, named)
    turbo._library.cache_clear()


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Names a library, or ``off``, or has it searched for."""
    yield functools.partial(use, monkeypatch)
    turbo._library.cache_clear()


@pytest.fixture
def library(choose: Callable[[str | None], None]) -> str:
    """The library's file, which shardkit uses."""
    if not LIBRARIES:
        pytest.skip("no TurboJPEG 3 for this Python")
    choose(str(LIBRARIES[0]))
    return str(LIBRARIES[0])


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_mutated_jpegs_give_the_full_decodes_pixels_or_none(
    choose: Callable[[str | None], None], path: Path
) -> None:
    choose(str(path))
    found = compare(range(600))
    assert found["equal"] > 100
    assert found["refused"] > 20
    assert not found["different"]


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Counts regions that the library decoded, also in processes, so the fast path is not lost."""
    count = torch.zeros(1, dtype=torch.int64)
    count.share_memory_()  # type: ignore[no-untyped-call]

    def spy(*arguments: Any, **options: Any) -> Pixels | None:
        found = decode_region(*arguments, **options)
        if found is not None:
            count.add_(1)
        return found

    monkeypatch.setattr(decoding, "decode_region", spy)
    return count


@functools.cache
def made(width: int, height: int, subsampling: str = "420", **parameters: int) -> bytes:
    """Return a JPEG as the library encodes it; the keywords are those of `PARAMETERS`."""
    encoder = ctypes.CDLL(str(LIBRARIES[0]))
    number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    encoder.tj3Init.restype = pointer
    encoder.tj3Set.argtypes = (pointer, number, number)
    encoder.tj3Compress8.argtypes = (pointer, pointer, *[number] * 4, pointer, pointer)
    encoder.tj3Free.argtypes = encoder.tj3Destroy.argtypes = (pointer,)
    handle, found, length = encoder.tj3Init(0), pointer(), size()
    given = {"quality": 85, "subsampling": SUBSAMPLINGS.index(subsampling), **parameters}
    for name, value in given.items():
        assert encoder.tj3Set(handle, PARAMETERS[name], value) == 0
    values = pixels(width, height, seed=width)
    source = values.ctypes.data, width, 3 * width, height, 0
    failed = encoder.tj3Compress8(handle, *source, ctypes.byref(found), ctypes.byref(length))
    data = ctypes.string_at(found, length.value)
    encoder.tj3Free(found)
    encoder.tj3Destroy(handle)
    assert failed == 0
    return data


def reduced(side: int, eighths: int) -> int:
    return -(-side * eighths // 8)


@functools.lru_cache(64)
def whole(data: bytes, size: tuple[int, int], eighths: int = 8) -> Pixels:
    """Return all pixels of a JPEG, by simplejpeg."""
    width, height = (reduced(side, eighths) for side in size)
    enough = {"min_width": width, "min_height": height, "min_factor": 2}
    found: Pixels = simplejpeg.decode_jpeg(data, **({} if eighths == 8 else enough))
    assert found.shape == (height, width, 3)
    return found


def wrong(data: bytes, size: tuple[int, int], eighths: int, region: Region) -> str:
    """Return the problem with a region that the library decodes, or None."""
    found = decode_region(data, size, eighths, region)
    if found is None:
        return f"{region} at {eighths}/8 is not decoded"
    expected = cut(whole(data, size, eighths), region)
    return "" if np.array_equal(found, expected) else f"{region} at {eighths}/8 differs"


def cut(values: Pixels, region: Region) -> Pixels:
    left, top, width, height = region
    return values[top : top + height, left : left + width]


def spans(side: int) -> Iterator[tuple[int, int]]:
    """Yield start and length of all crops of a side."""
    return ((begin, end - begin) for begin in range(side) for end in range(begin + 1, side + 1))


# Pixels.


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
def test_every_width_and_height_is_cropped_exactly(library: str, subsampling: str) -> None:
    size = 35, 19
    data = made(*size, subsampling)
    for eighths in EIGHTHS:
        width, height = (reduced(side, eighths) for side in size)
        rows = (0, height), (height // 2, 1), (height - 1, 1)
        columns = (0, width), (width // 2, 1), (width - 1, 1)
        across = itertools.product(spans(width), rows)
        down = itertools.product(columns, spans(height))
        for (left, wide), (top, high) in itertools.chain(across, down):
            region = Region(left, top, wide, high)
            assert not wrong(data, size, eighths, region)


@pytest.mark.parametrize(
    "kind",
    [
        {"optimise": 1},
        {"restart": 1},
        {"arithmetic": 1},
        {"quality": 100},
        {"quality": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("subsampling", ["444", "420", "gray"])
def test_every_kind_of_jpeg_is_cropped_exactly(
    library: str, subsampling: str, kind: dict[str, int]
) -> None:
    data = made(*WIDE, subsampling, **kind)
    for eighths, region in itertools.product(EIGHTHS, REGIONS):
        assert not wrong(data, WIDE, eighths, _scaled(region, eighths))


@pytest.mark.parametrize("arithmetic", [0, 1])
def test_a_progressive_jpeg_is_not_decoded(library: str, arithmetic: int) -> None:
    """If the last scans are missing, a region is smoothed differently from the full image."""
    data = made(*WIDE, progressive=1, arithmetic=arithmetic)
    assert decode_region(data, WIDE, 8, REGIONS[0]) is None


def _scaled(region: Region, eighths: int) -> Region:
    width, height = (reduced(side, eighths) for side in WIDE)
    return enclosing(region, (width, height), eighths / 8)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_any_region_of_any_size_is_cropped_exactly(library: str, data: st.DataObject) -> None:
    size = data.draw(st.tuples(*[st.integers(1, 70)] * 2), "size")
    eighths = data.draw(st.sampled_from(EIGHTHS), "eighths")
    width, height = (reduced(side, eighths) for side in size)
    if eighths < 8:  # what simplejpeg can be asked for: it takes the largest scale of that shape
        same = (reduced(side, eighths + 1) for side in size)
        eighths = 8 if tuple(same) == (width, height) else eighths
        width, height = (reduced(side, eighths) for side in size)
    left, top = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    across = data.draw(st.integers(1, width - left))
    down = data.draw(st.integers(1, height - top))
    image = made(*size, data.draw(st.sampled_from(SUBSAMPLINGS), "subsampling"))
    region = Region(left, top, across, down)
    assert not wrong(image, size, eighths, region)


def test_bytes_may_be_a_view(library: str) -> None:
    data = made(*WIDE)
    buffer = bytearray(b"before" + data + b"after")
    view = memoryview(buffer)[6 : 6 + len(data)]
    for source in (view, view.toreadonly()):
        found = decode_region(source, WIDE, 8, REGIONS[0])
        np.testing.assert_array_equal(found, cut(whole(data, WIDE), REGIONS[0]))


# With and without the library.


def outcomes(
    monkeypatch: pytest.MonkeyPatch, image: EncodedImage, region: Region
) -> tuple[DecodedPart | str, DecodedPart | str]:
    """Return a part of an image with the library and without, or why there is none."""
    found: list[DecodedPart | str] = []
    for function in (decode_region, lambda *_, **__: None):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "decode_region", function)
            try:
                found.append(decode_part(image, region, EXACT))
            except BadImage as error:
                found.append(str(error))
    return found[0], found[1]


def equal(one: DecodedPart, other: DecodedPart, region: Region) -> bool:
    """Return whether two parts of an image, not reduced, are equal in a region."""
    first, second = (
        cut(part.pixels, region._replace(left=region.left - part.left, top=region.top - part.top))
        for part in (one, other)
    )
    return one.scale == other.scale == 1 and np.array_equal(first, second)


@pytest.mark.parametrize("progressive", [0, 1])
def test_a_truncated_image_is_bad_whatever_the_region(
    library: str, monkeypatch: pytest.MonkeyPatch, progressive: int
) -> None:
    data = made(*WIDE, progressive=progressive)
    for length, region in itertools.product([*range(700), *range(700, len(data), 9)], REGIONS):
        image = EncodedImage(data[:length], "jpg", 0, *WIDE)
        found, without = outcomes(monkeypatch, image, region)
        assert isinstance(without, str)
        assert found == without


@pytest.mark.parametrize("progressive", [0, 1])
def test_a_damaged_image_gives_the_same_pixels_without_the_library(
    library: str, monkeypatch: pytest.MonkeyPatch, progressive: int
) -> None:
    data, accepted = made(*WIDE, progressive=progressive), 0
    for place, region in itertools.product(range(2, len(data), 5), REGIONS):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        found, without = outcomes(
            monkeypatch, EncodedImage(bytes(damaged), "jpg", 0, *WIDE), region
        )
        if isinstance(without, DecodedPart):
            assert isinstance(found, DecodedPart)
            assert equal(found, without, region)
            accepted += 1
        else:
            assert found == without
    assert accepted


@pytest.mark.parametrize("filling", [b"\xff" * 7, bytes(9), b"\0\1\2", b"\xff\0" * 3])
@pytest.mark.parametrize("after", [False, True])
def test_padding_does_not_change_pixels(
    library: str, monkeypatch: pytest.MonkeyPatch, filling: bytes, after: bool
) -> None:
    data = made(*WIDE)
    padded = data + filling if after else data[:-2] + filling + data[-2:]
    for region in REGIONS:
        found, without = outcomes(monkeypatch, EncodedImage(padded, "jpg", 0, *WIDE), region)
        assert isinstance(found, DecodedPart)
        assert isinstance(without, DecodedPart)
        assert equal(found, without, region)


@pytest.mark.parametrize("eighths", [8, 4])
def test_a_damaged_image_leaves_the_library_able_to_decode_the_next(
    library: str, eighths: int
) -> None:
    data, region = made(*WIDE), Region(3, 4, 20, 10)
    ends = [data[:length] for length in [*range(0, 700, 3), *range(700, len(data), 50)]]
    for damaged in (*ends, b"junk", bytes(64), data[2:], data[:2] + data):
        decode_region(damaged, WIDE, eighths, region)
        assert not wrong(data, WIDE, eighths, region)


@pytest.mark.parametrize("missing", [0xDB, 0xC4], ids=["quantization", "Huffman"])
def test_missing_tables_are_not_taken_from_the_previous_image(
    library: str, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    image = EncodedImage(without_segments(jpeg(*WIDE), missing), "jpg", 0, *WIDE)
    for before in (made(*WIDE, quality=20), made(*WIDE, optimise=1)):
        assert not wrong(before, WIDE, 8, REGIONS[0])
        found, without = outcomes(monkeypatch, image, REGIONS[0])
        assert type(found) is type(without)
        if isinstance(found, DecodedPart) and isinstance(without, DecodedPart):
            assert equal(found, without, REGIONS[0])


def without_segments(data: bytes, marker: int) -> bytes:
    """Return a JPEG without the segments of one kind from its header."""
    kept, at = bytearray(data[:2]), 2
    while data[at + 1] != 0xDA:
        after = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        kept += data[at:after] if data[at + 1] != marker else b""
        at = after
    return bytes(kept + data[at:])


def ycck() -> bytes:
    """Return a CMYK JPEG whose Adobe segment says that it is YCCK."""
    data = bytearray(encoded(picture(*WIDE, mode="CMYK")))
    data[data.index(b"Adobe") + 11] = 2
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "decoded"),
    [
        (encoded(picture(*WIDE, mode="CMYK")), False),
        (ycck(), False),
        (encoded(picture(*WIDE), keep_rgb=True), True),
        (encoded(picture(*WIDE, mode="L")), True),
        (jpeg(*WIDE, restart_marker_rows=1), True),
    ],
    ids=["CMYK", "YCCK", "Adobe RGB", "grey", "restart markers"],
)
def test_colors_equal_those_without_the_library(
    library: str, monkeypatch: pytest.MonkeyPatch, data: bytes, decoded: bool
) -> None:
    for region in REGIONS:
        assert (decode_region(data, WIDE, 8, region) is not None) == decoded
        found, without = outcomes(monkeypatch, EncodedImage(data, "jpg", 0, *WIDE), region)
        assert isinstance(found, DecodedPart)
        assert isinstance(without, DecodedPart)
        assert equal(found, without, region)
        np.testing.assert_array_equal(
            cut(without.pixels, region), cut(np.asarray(opened(data).convert("RGB")), region)
        )


@needs_library
def test_a_rare_subsampling_is_decoded_without_the_library_too() -> None:
    image = EncodedImage(made(*WIDE, "441"), "jpg", 0, *WIDE)
    np.testing.assert_array_equal(decode_stored(image), whole(bytes(image.data), WIDE))


@pytest.mark.usefixtures("library")
def test_a_subsampling_unknown_to_the_library_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of a block, to which a region must be aligned, is unknown too."""
    data = bytearray(jpeg(*WIDE))
    data[data.index(b"\xff\xc0") + 11] = 0x42  # the first component, 4 x 2
    region = Mock(return_value=-1)
    monkeypatch.setattr(turbo._library(), "tj3SetCroppingRegion", region)
    assert decode_region(bytes(data), WIDE, 8, REGIONS[0]) is None
    region.assert_not_called()


@pytest.mark.parametrize("size", [(98, 61), (97, 60), (61, 97), (96, 64), (194, 122)])
def test_a_size_other_than_the_indexs_is_refused(library: str, size: tuple[int, int]) -> None:
    data = made(*WIDE)
    assert decode_region(data, size, 8, REGIONS[0]) is None
    with refused(BadImage):
        decode_part(EncodedImage(data, "jpg", 0, *size), REGIONS[0], EXACT)


# Threads and processes.


def test_threads_decode_independently(library: str) -> None:
    sizes = [(60 + 7 * n, 40 + 5 * n) for n in range(6)]
    faults: list[str] = []
    together = threading.Barrier(4)

    def work(step: int) -> None:
        together.wait(30)
        for n in range(200):
            size, eighths = sizes[(n * step) % len(sizes)], EIGHTHS[n % 2]
            fault = wrong(made(*size), size, eighths, Region(n % 17, n % 11, 9, 7))
            faults.extend([fault] if fault else [])

    for size in sizes:
        made(*size)
    threads = [threading.Thread(target=work, args=(step,)) for step in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_decodes_after_its_parent(library: str) -> None:
    data = made(*WIDE)
    assert not wrong(data, WIDE, 8, REGIONS[0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 2 if any(wrong(data, WIDE, 8, region) for region in REGIONS) else 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not wrong(data, WIDE, 8, REGIONS[1])


# Which library.


def test_off_disables_the_library(library: str, choose: Callable[[str | None], None]) -> None:
    data = made(*WIDE)
    assert decode_region(data, WIDE, 8, REGIONS[0]) is not None
    choose("off")
    assert decode_region(data, WIDE, 8, REGIONS[0]) is None


NO_LIBRARIES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda folder: folder / "missing.so",
    "empty": lambda folder: make_tree(folder, {"empty.so": b""}) / "empty.so",
    "text": lambda folder: make_tree(folder, {"text.so": b"no library"}) / "text.so",
    "folder": lambda folder: folder,
    "another": lambda _: importlib.import_module("_struct").__file__,
    "old": lambda _: "libturbojpeg.so.0",
}


@pytest.fixture(params=NO_LIBRARIES)
def no_library(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A path without a library of version 3."""
    path = str(NO_LIBRARIES[request.param](tmp_path))
    if request.param == "old":
        try:
            new = hasattr(ctypes.CDLL(path), "tj3Init")
        except OSError:
            pytest.skip("this system has no libturbojpeg")
        if new:
            pytest.skip("the libturbojpeg of this system is a new one")
    return path


def test_a_named_file_that_is_not_a_library_is_an_error(
    choose: Callable[[str | None], None], no_library: str
) -> None:
    choose(no_library)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(UsageError, match=turbo.VARIABLE) as caught:
            decode_region(jpeg(*WIDE), WIDE, 8, REGIONS[0])
        assert no_library in str(caught.value)


def test_found_files_that_are_not_the_library_are_ignored(
    choose: Callable[[str | None], None], no_library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turbo, "_candidates", lambda: iter([no_library]))
    choose(None)
    assert decode_region(jpeg(*WIDE), WIDE, 8, REGIONS[0]) is None
    if LIBRARIES:
        monkeypatch.setattr(turbo, "_candidates", lambda: iter([no_library, str(LIBRARIES[0])]))
        choose(None)
        assert decode_region(jpeg(*WIDE), WIDE, 8, REGIONS[0]) is not None


def test_the_library_is_searched_next_to_python_and_in_a_wheel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("pylibjxl")]:
        monkeypatch.delitem(sys.modules, name)  # another test reads JPEG XL with it
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    without = list(turbo._candidates())
    assert str(Path(sys.prefix, "lib", turbo._FILE)) in without
    extension = f"pylibjxl/_pylibjxl{EXTENSION_SUFFIXES[0]}"
    files = {"pylibjxl/__init__.py": b"raise 0", extension: b"", "turbojpeg.py": b"raise 0"}
    bundled = "turbojpeg.libs/libturbojpeg-1.so.0"
    make_tree(tmp_path, {**files, "pylibjxl/_pylibjxl.other.so": b"", bundled: b""})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.path_importer_cache.pop(str(tmp_path), None)
    added = [*turbo._candidates()][len(without) :]
    assert added == [str(tmp_path / name) for name in (extension, bundled)]
    assert "pylibjxl" not in sys.modules


# Datasets.

SIZES = ((97, 61), (40, 90), (64, 64), (150, 110), (33, 200), (20, 21), (181, 75))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of JPEGs of many sizes and kinds."""
    root = tmp_path_factory.mktemp("turbo")
    files: dict[str, bytes | None] = {
        f"{'ab'[n % 2]}/{n:02d}.jpg": jpeg(*size, n, subsampling=n % 3, progressive=n % 4 == 3)
        for n, size in enumerate(SIZES * 2)
    }
    return make_dataset(make_tree(root / "photos", files), root / "made")


OPS: dict[str, Callable[..., ImageOp]] = {
    "centre": functools.partial(CenterCrop, 24),
    "random": functools.partial(RandomResizedCrop, 16),
    "small": functools.partial(RandomResizedCrop, (5, 7), scale=(0.3, 0.9)),
}


@pytest.mark.parametrize("op", OPS)
def test_batches_are_equal_with_and_without_the_library(
    choose: Callable[[str | None], None],
    library: str,
    decodes: torch.Tensor,
    photos: Path,
    op: str,
) -> None:
    for name, oversample in itertools.product(("bilinear", "bicubic"), (1.0, 2.0, math.inf)):
        dataset = open_dataset(photos, decode=OPS[op](oversample=oversample, filter=name))
        choose(library)
        decodes.zero_()
        found = epochs(dataset)
        assert int(decodes) > len(dataset)
        choose("off")
        decodes.zero_()
        assert torch.equal(found, epochs(dataset))
        assert not int(decodes)


def epochs(dataset: Any) -> torch.Tensor:
    """Return all images of three epochs."""
    images: list[torch.Tensor] = []
    for epoch in range(3):
        dataset.set_epoch(epoch, seed=3)
        images.extend(image for image, _ in dataset[:])
    return torch.stack(images)


@pytest.mark.parametrize(
    ("width", "height"), [(2, 2), (3, 3), (2, 5), (5, 3), (5, 5), (6, 6), (7, 7)]
)
@pytest.mark.parametrize("side", [1, 2])
def test_a_tiny_image_is_reduced_as_without_the_library(
    library: str, choose: Callable[[str | None], None], width: int, height: int, side: int
) -> None:
    """Where several scales give the same shape."""
    image = EncodedImage(made(width, height), "jpg", 0, width, height)
    op = RandomResizedCrop(side)
    for left, top in itertools.product(range(width), range(height)):
        region = Region(left, top, width - left, height - top)
        piece = Crop(*region, size=(side, side))
        choose(library)
        found = op.render(image, piece, EXACT)
        choose("off")
        np.testing.assert_array_equal(found, op.render(image, piece, EXACT))


@pytest.mark.parametrize("engine", ["thread", "helper", "process"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loaders_give_the_same_with_the_library(
    library: str,
    choose: Callable[[str | None], None],
    decodes: torch.Tensor,
    photos: Path,
    engine: str,
) -> None:
    options: dict[str, Any] = {
        "engine": engine,
        "num_workers": 2,
        "start_method": "fork",
        "timeout": 60.0,
    }

    def epoch() -> list[torch.Tensor]:
        dataset = open_dataset(photos, decode=RandomResizedCrop(16))
        with closing(make_loader(dataset, 4, shuffle=True, seed=2, **options)) as loader:
            return [images.clone() for images, _ in loader]

    found = epoch()
    assert int(decodes)
    choose("off")
    decodes.zero_()
    expected = epoch()
    assert not int(decodes)
    assert len(found) == len(expected)
    assert all(itertools.starmap(torch.equal, zip(found, expected, strict=True)))
