"""Scaling with torch: Pillow's sizes, and its pixels up to rounding, with any number of workers."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Pixels, encoded, exif, jpeg, make_tree, picture, pixels, png, python, tree
from PIL import Image
from refusals import refused
from table import for_each

from shardkit import UsageError
from shardkit.codecs import scaling
from shardkit.codecs.image import FILTERS, sniff
from shardkit.conversion.assemble import Assembly
from shardkit.conversion.build_all import Builder
from shardkit.conversion.convert import convert_scan
from shardkit.conversion.plan import ConvertOptions, make_plan
from shardkit.dataset.manifest import load_manifest
from shardkit.pipeline import at_work, convert_record
from shardkit.recipe import RESIZE_MODES, Recipe
from shardkit.record import Record
from shardkit.sources.imagefolder import scan_imagefolder

NAMES = ("bicubic", "bilinear")


def both(data: bytes, **options: Any) -> tuple[Pixels, Pixels]:
    """Return the stored pixels by torch and by Pillow; the metadata must be equal."""
    kind = sniff(data[:32])
    assert kind is not None
    record = Record("a", {kind: data, "json": b"{}"})
    stored = [
        convert_record(Recipe(resizer=name, **{"encode": "png", **options}), record).record
        for name in ("torch", "pillow")
    ]
    assert stored[0].meta == stored[1].meta
    ours, theirs = (np.asarray(Image.open(io.BytesIO(one.fields["png"]))) for one in stored)
    assert ours.shape == theirs.shape
    return ours, theirs


def steps(ours: Pixels, theirs: Pixels) -> Any:
    """Return by how much each value differs."""
    return np.abs(ours.astype(int) - theirs.astype(int))


# The pixels.


@for_each("name", NAMES)
# Pillow 13 scales vertically first to 150 x 5, 160 x 5 and 130 x 54, but not to 130 x 55.
@for_each(
    "size",
    [(53, 41), (40, 100), (300, 200), (97, 3), (1, 1), (150, 5), (160, 5), (130, 54), (130, 55)],
)
def test_pixels_equal_pillows_up_to_rounding(name: str, size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (97, 151, 3), dtype=np.uint8)
    for source in (pixels(151, 97), noise):
        before = source.copy()
        expected = np.asarray(Image.fromarray(source).resize(size, FILTERS[name]))
        off = steps(scaling.scale(source, size, name), expected)
        assert off.max() <= (2 if name == "bicubic" else 1)
        assert np.mean(off > 0) < 0.02
        np.testing.assert_array_equal(source, before)


def test_pixels_of_the_right_size_are_unchanged() -> None:
    source = pixels(15, 9)
    assert scaling.scale(source, (15, 9), "bicubic") is source


@for_each("name", NAMES)
def test_a_jpeg_is_reduced_by_the_same_rule(name: str) -> None:
    """A full decode would differ from the reduced one by far more than rounding."""
    for orientation in (1, 6):
        data = jpeg(400, 300, quality=95, exif=exif(orientation))
        assert steps(*both(data, resize=(48, 48), filter=name)).max() <= 2


@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_each_mode_and_orientation_gives_the_same_picture(mode: str, orientation: int) -> None:
    upright = encoded(picture(60, 40), "PNG", exif=exif(orientation))
    for box, enlarge in itertools.product([(20, 20), (17, 31), (50, 45), (80, 90)], (False, True)):
        ours, theirs = both(
            upright, resize=box, resize_mode=mode, enlarge=enlarge, background=(0, 200, 0)
        )
        assert steps(ours, theirs).max() <= 2, (box, enlarge)


@for_each("mode", ["L", "P", "RGBA", "CMYK", "I;16"])
def test_each_kind_of_pixels_is_scaled(mode: str) -> None:
    data = encoded(picture(41, 29, mode=mode), "TIFF" if mode == "CMYK" else "PNG")
    assert steps(*both(data, resize=(16, 16), background=(0, 200, 0))).max() <= 2


def test_pixels_that_are_not_scaled_are_equal() -> None:
    for options in ({"resize": 16}, {"resize": 90, "orient": True}):
        ours, theirs = both(jpeg(24, 16, exif=exif(6)), **options)
        np.testing.assert_array_equal(ours, theirs)


# The same result, whoever makes it.


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of 24 images large enough for torch to be tempted to divide the work."""
    files: dict[str, bytes | None] = {
        f"{'cat' if number % 2 else 'dog'}/{number:02d}.jpg": jpeg(400, 300 + number, seed=number)
        for number in range(23)
    }
    return make_tree(tmp_path / "photos", {**files, "dog/big.png": png(500, 400)})


@pytest.fixture
def three_threads() -> Iterator[None]:
    """A caller that has chosen a number of threads for its own work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def options_of(**more: Any) -> ConvertOptions:
    recipe = Recipe(resize=250, resizer="torch")
    return ConvertOptions(**{"to": "webdataset", "recipe": recipe, **more})


@pytest.mark.usefixtures("three_threads")
@pytest.mark.slow
def test_processes_and_threads_make_the_same_files(photos: Path, tmp_path: Path) -> None:
    scan = scan_imagefolder(photos)
    for workers in (1, 2):
        convert_scan(
            scan, tmp_path / f"{workers}", options_of(shard_samples=6), Builder(workers=workers)
        )
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    for workers in (1, 4):  # one shard: threads instead
        convert_scan(scan, tmp_path / f"one {workers}", options_of(), Builder(workers=workers))
    assert tree(tmp_path / "one 1") == tree(tmp_path / "one 4")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.usefixtures("three_threads")
def test_torch_uses_one_thread_within_the_context(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    seen: set[int] = set()
    scale = scaling.scale

    def watched(pixels: Pixels, size: tuple[int, int], filter_: str) -> Pixels:
        seen.add(torch.get_num_threads())
        return scale(pixels, size, filter_)

    monkeypatch.setattr(scaling, "scale", watched)
    convert_scan(scan_imagefolder(photos), tmp_path / "out", options_of(), Builder(workers=workers))
    assert seen == {1} or (workers == 3 and not seen)  # its other processes may take all images
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_the_callers_threads_are_restored_after_an_error() -> None:
    def fail() -> None:
        with at_work(Recipe(resize=8, resizer="torch")):
            assert torch.get_num_threads() == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.get_num_threads() == 3
    with at_work(Recipe(resize=8)):
        assert torch.get_num_threads() == 3


# What loads torch, and what is recorded.


@pytest.mark.parametrize("resizer", ["pillow", "torch"])
@pytest.mark.slow
def test_only_the_option_loads_torch(folder: Path, tmp_path: Path, resizer: str) -> None:
    code = (
        "import sys\n"
        "from shardkit import convert\n"
        "source, target, resizer = sys.argv[1:]\n"
        "convert(source, target, to='lmdb', resize=8, resizer=resizer)\n"
        "print('torch' in sys.modules)"
    )
    done = python(code, folder, tmp_path / "out", resizer)
    assert (done.stdout.strip(), done.stderr) == (str(resizer == "torch"), "")


def test_a_plan_needs_no_torch(folder: Path) -> None:
    """The process that waits for others would load it for a few trials alone."""
    code = (
        "import sys\n"
        "from shardkit.conversion.convert import plan_conversion\n"
        "options = {'to': 'lmdb', 'resize': 8, 'resizer': 'torch'}\n"
        "plan = plan_conversion(sys.argv[1], sys.argv[1] + '.out', **options)\n"
        "print(plan.splits[0].meta['recipe']['resizer'], 'torch' in sys.modules)"
    )
    done = python(code, folder)
    assert (done.stdout.split(), done.stderr) == (["torch", "False"], "")


@pytest.mark.slow
def test_the_manifest_lists_torch_if_used(folder: Path, tmp_path: Path) -> None:
    scan = scan_imagefolder(folder)
    recipes = {"torch": Recipe(resize=8, resizer="torch"), "pillow": Recipe(resize=8)}
    for name, recipe in recipes.items():
        convert_scan(scan, tmp_path / name, options_of(recipe=recipe))
    ours, theirs = (load_manifest(tmp_path / name) for name in recipes)
    assert ours.recipe == {**theirs.recipe, "resizer": "torch"}
    assert ours.software == {**theirs.software, "torch": version("torch")}
    assert not {"resizer", "torch"} & (theirs.recipe.keys() | theirs.software.keys())


@pytest.mark.slow
def test_another_resizer_is_another_plan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = scan_imagefolder(folder)
    other = options_of(recipe=Recipe(resize=250))
    assert (
        make_plan(scan, options_of()).fingerprint().digest
        != make_plan(scan, other).fingerprint().digest
    )

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Assembly, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert_scan(scan, tmp_path / "out", options_of())
    with refused(UsageError, "resizer="):
        convert_scan(scan, tmp_path / "out", other)
    assert convert_scan(scan, tmp_path / "out", options_of()).reused_shards == 1


# What is refused.


@for_each(
    ("options", "message"),
    [
        ({"resizer": "opencv"}, "resizer='opencv' is unknown; choose from pillow, torch"),
        ({"filter": "lanczos"}, "torch has no filter lanczos: use bicubic or bilinear"),
        ({"filter": "box"}, "torch has no filter box"),
        ({"resize": None}, "resizer= requires resize="),
    ],
)
def test_options_that_torch_lacks_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(**{"resize": 8, "resizer": "torch", **options})
