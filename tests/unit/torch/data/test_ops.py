"""Image operations: torchvision's geometry and values, held to references that are written here.

torchvision itself is not needed: its documented rules are short, and stand below as `centre_crop`,
`resized` and `draw_crop`.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers import FORMATS, Pixels, encoded, make_dataset, make_tree, picture, pixels
from pairwise import pairwise
from PIL import Image
from refusals import refused
from torch.nn import functional

from shardkit import (
    CenterCrop,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ShardDataset,
    collate,
    open_dataset,
)
from shardkit.codecs.geometry import move_mask
from shardkit.codecs.image import Decoding
from shardkit.dataset import decode as decoding
from shardkit.dataset.located import EncodedImage
from shardkit.errors import UsageError
from shardkit.sampling.order import Draws
from shardkit.torch.data import crops, ops
from shardkit.torch.data.images import frame_of
from shardkit.torch.data.ops import Crop, Filter, ImageOp

KINDS = ("jpg", "png", "webp", "raw")
PILLOW = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
EXACT = math.inf
"""As ``oversample``: no JPEG is decoded reduced."""
LEVELS = {"bilinear": 1, "bicubic": 3}
"""How far a value may be from floating point: bytes are rounded after each of two passes, and the
weights of ``bicubic`` are larger."""


def stored(values: Pixels, kind: str = "raw") -> EncodedImage:
    """Return pixels as a record of the given kind."""
    height, width = values.shape[:2]
    names = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}
    data = values.tobytes()
    if kind != "raw":
        data = encoded(Image.fromarray(values), names[kind], quality=90)
    return EncodedImage(data, kind, 0, width, height)


def decoded(image: EncodedImage) -> Pixels:
    """Return all pixels of a record, decoded by Pillow."""
    if image.field == "raw":
        return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
    return np.asarray(Image.open(io.BytesIO(image.data)).convert("RGB"))


def sample(op: ImageOp, image: EncodedImage, row: int = 0) -> Pixels:
    """Return the result of an operation on an image."""
    crop = op.crop(image.width, image.height, Draws(7, row))
    return op.render(image, crop, Decoding())


def interpolate(values: Pixels, size: tuple[int, int], mode: Filter = "bilinear") -> Pixels:
    """Return pixels scaled as torchvision scales tensors: in floating point, then rounded."""
    tensor = torch.from_numpy(values.copy()).permute(2, 0, 1).unsqueeze(0).to(torch.float32)
    scaled = functional.interpolate(tensor, size, mode=mode, antialias=True)[0]
    found: Pixels = scaled.round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
    return found


def centre_crop(values: Pixels, size: tuple[int, int]) -> Pixels:
    """Return the center as torchvision's ``center_crop`` crops it, padded first if needed."""
    lack = [max(0, want - have) for want, have in zip(size, values.shape[:2], strict=True)]
    padding = [(each // 2, (each + 1) // 2) for each in lack]
    values = np.pad(values, (*padding, (0, 0))).astype(np.uint8, copy=False)
    top, left = (round((have - want) / 2.0) for have, want in zip(values.shape, size, strict=False))
    cut: Pixels = values[top : top + size[0], left : left + size[1]]
    return cut


def resized(size: int, width: int, height: int) -> tuple[int, int]:
    """Return height and width as torchvision's ``Resize(size)`` computes them."""
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = size, int(size * long / short)
    return (new_long, new_short) if width <= height else (new_short, new_long)


def difference(one: Pixels, other: Pixels) -> npt.NDArray[np.int64]:
    return np.abs(one.astype(np.int64) - other.astype(np.int64))


def psnr(one: Pixels, other: Pixels) -> float:
    error = float(np.mean(difference(one, other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def photo(width: int, height: int, slope: float = 1.3, seed: int = 1) -> Pixels:
    """Return noise whose spectrum falls as that of photographs does; 1.0 is a harsh one."""
    chance = np.random.default_rng(seed)
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(down, across)
    frequency[0, 0] = math.inf
    shared = chance.normal(size=(height, width))
    planes = []
    for _ in range(3):
        spectrum = np.fft.rfft2(shared + 0.3 * chance.normal(size=(height, width)))
        plane = np.fft.irfft2(spectrum / frequency**slope, (height, width))
        planes.append(127 + 50 * plane / plane.std())
    values: Pixels = np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)
    return values


def ramp(width: int, height: int) -> Pixels:
    """Return an image whose red encodes the column and green the row, from 20 to 235."""
    values = np.full((height, width, 3), 128.0)
    values[:, :, 0] = np.linspace(20, 235, width)
    values[:, :, 1] = np.linspace(20, 235, height)[:, None]
    return values.round().astype(np.uint8)


@functools.cache
def large_photo(width: int = 640, height: int = 480) -> EncodedImage:
    return stored(photo(width, height), "jpg")


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes to which images are decoded."""
    found: list[tuple[int, ...]] = []
    decode: Callable[..., Pixels] = vars(decoding)["decode_stored"]

    def spy(*arguments: Any, **options: Any) -> Pixels:
        values = decode(*arguments, **options)
        found.append(values.shape)
        return values

    monkeypatch.setattr(decoding, "decode_stored", spy)
    return found


# The geometry of torchvision.


def test_a_center_crop_crops_and_pads_like_torchvision() -> None:
    for width in range(1, 9):
        for height in range(1, 9):
            values = pixels(width, height, seed=width)
            for size in ((1, 1), (2, 5), (5, 2), (6, 7), (7, 6), (8, 8), (11, 3), (3, 12), (12, 9)):
                found = sample(CenterCrop(size), stored(values))
                np.testing.assert_array_equal(found, centre_crop(values, size))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_a_center_crop_of_an_encoded_image_is_exact(kind: str) -> None:
    image = stored(pixels(51, 40), kind)
    for size in ((20, 20), (33, 51), (64, 10), (90, 100)):
        found = sample(CenterCrop(size), image)
        np.testing.assert_array_equal(found, centre_crop(decoded(image), size))


def test_resize_computes_torchvisions_size() -> None:
    for width in range(1, 60):
        for height in range(1, 60):
            for size in (1, 2, 7, 32):
                crop = Resize(size).crop(width, height, Draws(0, 0))
                assert crop == Crop(0, 0, width, height, resized(size, width, height))


def test_a_pair_is_height_and_width() -> None:
    image = stored(pixels(40, 30))
    for op in (Resize((9, 21)), CenterCrop((9, 21)), RandomResizedCrop((9, 21))):
        assert sample(op, image).shape == (9, 21, 3)
        assert op.fixed_size == (9, 21)
    assert Resize(9).fixed_size is None
    assert CenterCrop(9).fixed_size == RandomResizedCrop(9).fixed_size == (9, 9)


def draw_crop(
    chance: np.random.Generator, width: int, height: int, op: RandomResizedCrop
) -> tuple[int, int, int, int]:
    """Return left, top, width and height as torchvision's ``get_params`` draws them."""
    for _ in range(10):
        area = width * height * chance.uniform(*op.scale)
        ratio = math.exp(chance.uniform(math.log(op.ratio[0]), math.log(op.ratio[1])))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            top = int(chance.integers(0, height - down, endpoint=True))
            left = int(chance.integers(0, width - across, endpoint=True))
            return left, top, across, down
    across, down = width, height
    if width / height < min(op.ratio):
        down = round(width / min(op.ratio))
    elif width / height > max(op.ratio):
        across = round(height * max(op.ratio))
    return (width - across) // 2, (height - down) // 2, across, down


def chi_square(found: npt.ArrayLike, expected: npt.ArrayLike, bins: int = 12) -> float:
    """Return the chi-square per degree of freedom of two samples in bins of equal weight."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    edges = np.unique(np.quantile(expected, np.linspace(0, 1, bins + 1)[1:-1]))
    one = np.bincount(np.searchsorted(edges, found), minlength=len(edges) + 1)
    other = np.bincount(np.searchsorted(edges, expected), minlength=len(edges) + 1)
    scale = math.sqrt(len(found) / len(expected))
    terms = (one / scale - other * scale) ** 2 / np.maximum(one + other, 1)
    return float(terms.sum()) / len(edges)


@pytest.mark.parametrize(
    ("width", "height", "options"),
    [
        (500, 375, {}),
        (31, 200, {}),  # most attempts fail: often the fallback
        (640, 64, {"scale": (0.02, 0.3), "ratio": (0.5, 3.0)}),
        (60, 60, {"scale": (0.05, 0.2), "ratio": (1.0, 1.0)}),
    ],
)
def test_random_crops_have_torchvisions_distribution(
    width: int, height: int, options: dict[str, Any]
) -> None:
    op = RandomResizedCrop(8, **options)
    chance = np.random.default_rng(5)
    wanted = np.array([draw_crop(chance, width, height, op) for _ in range(12000)], float)
    crops = [op.crop(width, height, Draws(11, row)) for row in range(6000)]
    found = np.array([crop[:4] for crop in crops], float)
    assert (found[:, :2] >= 0).all()
    assert (found[:, 0] + found[:, 2] <= width).all()
    assert (found[:, 1] + found[:, 3] <= height).all()

    def traits(crops: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        left, top, across, down = crops.T
        return {
            "area": across * down,
            "ratio": np.log(across / down),
            "left": left / np.maximum(1, width - across),
            "top": top / np.maximum(1, height - down),
            "left in pixels": left,
            "top in pixels": top,
        }

    for name, expected in traits(wanted).items():
        got = traits(found)[name]
        spread = expected.std() / math.sqrt(len(got)) + 1e-9
        assert abs(got.mean() - expected.mean()) < 5 * spread, name
        assert abs(got.std() - expected.std()) < 0.05 * expected.std() + 1e-9, name
        assert chi_square(got, expected) < 3.2, name
    flips = np.array([crop.flip for crop in crops])
    assert abs(flips.mean() - 0.5) < 4.5 * 0.5 / math.sqrt(len(flips))
    assert abs(np.corrcoef(flips, found[:, 0])[0, 1]) < 0.06  # and by nothing else


def padded_crop(values: Pixels, op: RandomCrop, left: int, top: int) -> Pixels:
    """Return what torchvision's ``RandomCrop`` cuts at a place of the padded image.

    ``pad_if_needed`` adds what the padded image lacks on both sides.
    """
    for axis, side in enumerate(op.fixed_size):
        for width in (op.padding, max(0, side - values.shape[axis] - 2 * op.padding)):
            values = np.pad(values, [(width * (n == axis),) * 2 for n in range(3)])
    height, width = op.fixed_size
    assert top + height <= values.shape[0]
    assert left + width <= values.shape[1]
    return values[top : top + height, left : left + width]


@pytest.mark.parametrize(
    ("kind", "op", "size"),
    pairwise(
        KINDS,
        [
            RandomCrop(32, padding=4),
            RandomCrop((30, 41), padding=3),
            RandomCrop(20),
            RandomCrop(3, padding=50),  # often outside the image
        ],
        [(32, 32), (26, 37), (9, 40), (64, 50)],
    ),
    ids=repr,
)
def test_a_padded_crop_is_torchvisions(kind: str, op: RandomCrop, size: tuple[int, int]) -> None:
    image = stored(photo(*size), kind)
    across, down = op.margins(*size)
    places = set()
    for row in range(30):
        crop = op.crop(*size, Draws(3, row))
        expected = padded_crop(decoded(image), op, crop.left + across, crop.top + down)
        expected = expected[:, ::-1] if crop.flip else expected
        np.testing.assert_array_equal(op.render(image, crop, Decoding()), expected)
        mask = move_mask(decoded(image), frame_of(crop, *size))
        np.testing.assert_array_equal(mask, expected)
        places.add((crop.left, crop.top, crop.flip))
    assert len(places) > 2


def test_all_places_of_a_padded_crop_are_equally_likely() -> None:
    op = RandomCrop(32, padding=4)
    crops = [op.crop(32, 32, Draws(11, row)) for row in range(8100)]
    counts = np.unique([crop[:2] for crop in crops], axis=0, return_counts=True)[1]
    assert len(counts) == 81
    assert ((counts - 100) ** 2 / 100).sum() / 80 < 1.6
    assert abs(np.mean([crop.flip for crop in crops]) - 0.5) < 4.5 * 0.5 / 90


def test_flips_have_the_requested_probability() -> None:
    for rate, count in ((0.0, 500), (0.1, 3000), (1.0, 500)):
        op = RandomResizedCrop(8, flip=rate)
        flips = [op.crop(40, 30, Draws(3, row)).flip for row in range(count)]
        assert abs(np.mean(flips) - rate) <= 4.5 * math.sqrt(rate * (1 - rate) / count)


def test_neighboring_rows_and_epochs_draw_independently() -> None:
    op = RandomResizedCrop(8)
    lefts = np.array([[op.crop(500, 400, Draws(k, r)).left for r in range(600)] for k in range(4)])
    assert abs(np.corrcoef(lefts[0, 1:], lefts[0, :-1])[0, 1]) < 0.15
    for key in (1, 2, 3):
        assert abs(np.corrcoef(lefts[0], lefts[key])[0, 1]) < 0.15


def test_if_no_crop_fits_the_center_is_used() -> None:
    op = RandomResizedCrop(8, scale=(2.0, 2.0))  # larger than the image: every attempt fails
    for size, expected in {
        (10, 100): (0, 43, 10, 13),
        (100, 10): (43, 0, 13, 10),
        (1, 9): (0, 4, 1, 1),
        (30, 29): (0, 0, 30, 29),  # within the ratios: all of it
    }.items():
        assert op.crop(*size, Draws(0, 0))[:4] == expected


@pytest.mark.parametrize("size", [(1, 1), (1, 700), (700, 1), (2, 1)])
def test_the_smallest_and_narrowest_images_have_a_crop(size: tuple[int, int]) -> None:
    image = stored(pixels(*size), "png")
    ratios = ((0.1, 0.2), (5.0, 9.0), (3 / 4, 4 / 3))
    random = [RandomResizedCrop(8, ratio=ratio) for ratio in ratios]
    for op in (*random, CenterCrop(8), CenterCrop(4, resize=5)):
        for row in range(10):
            crop = op.crop(*size, Draws(1, row))
            assert crop.width >= 1
            assert crop.height >= 1
            assert op.render(image, crop, Decoding()).shape[:2] == crop.size
    assert sample(Resize((8, 8)), image).shape == (8, 8, 3)


class Around(ImageOp):
    """The whole image and a frame around it, scaled down: much of the crop lies outside."""

    @property
    def fixed_size(self) -> tuple[int, int]:
        return 32, 32

    def crop(self, width: int, height: int, draws: Draws) -> Crop:
        return Crop(-width // 2, -height // 4, 2 * width, 2 * height, (32, 32))


@pytest.mark.parametrize("kind", KINDS)
def test_the_area_outside_an_image_is_black(kind: str) -> None:
    for width, height in ((40, 40), (640, 480)):
        image = stored(np.full((height, width, 3), 200, np.uint8), kind)
        found = sample(Around(), image)
        assert (found[:3] == 0).all()
        assert (found[:, :7] == 0).all()
        assert abs(found[6:18, 10:22].astype(int) - 200).max() <= 3


# The values.


@pytest.mark.parametrize(
    ("mode", "kind", "size"), pairwise(ops.FILTERS, KINDS, [(37, 37), (64, 20), (150, 190), (1, 1)])
)
def test_scaling_matches_interpolate_and_pillow(
    kind: str, mode: Filter, size: tuple[int, int]
) -> None:
    image = stored(photo(120, 101), kind)
    found = sample(Resize(size, filter=mode, oversample=EXACT), image)
    assert difference(found, interpolate(decoded(image), size, mode)).max() <= LEVELS[mode]
    pillow = Image.fromarray(decoded(image)).resize(size[::-1], PILLOW[mode])
    assert difference(found, np.asarray(pillow)).mean() < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ops.FILTERS)
def test_a_random_crop_is_its_region_scaled_and_flipped(kind: str, mode: Filter) -> None:
    image = stored(photo(120, 101), kind)
    whole = decoded(image)
    op = RandomResizedCrop((40, 30), filter=mode, oversample=EXACT)
    flips = 0
    for row in range(30):
        crop = op.crop(120, 101, Draws(7, row))
        cut = whole[crop.top :, crop.left :][: crop.height, : crop.width]
        expected = interpolate(cut, (40, 30), mode)
        flips += crop.flip
        found = sample(op, image, row)
        assert difference(found, expected[:, ::-1] if crop.flip else expected).max() <= LEVELS[mode]
    assert 5 < flips < 25


def test_a_region_of_the_right_size_is_not_scaled() -> None:
    image = stored(pixels(20, 16))
    for flip in (False, True):
        found = Resize(1).render(image, Crop(3, 2, 9, 8, (8, 9), flip), Decoding())
        cut = decoded(image)[2:10, 3:12]
        np.testing.assert_array_equal(found, cut[:, ::-1] if flip else cut)


def test_resize_and_crop_in_one_step_are_within_48_db_of_two() -> None:
    """Only pixels along the edge see less of their surroundings, if the crop lies as it should."""
    for size in ((512, 512), (500, 375), (333, 500), (300, 301), (1000, 256), (60, 50)):
        image = stored(photo(*size))
        whole = interpolate(decoded(image), resized(256, *size))
        found = sample(CenterCrop(224, resize=256), image)
        assert psnr(found, centre_crop(whole, (224, 224))) > 48


def test_resize_and_crop_in_one_step_pad() -> None:
    image = stored(photo(300, 100))
    whole = interpolate(decoded(image), resized(50, 300, 100))
    expected = centre_crop(whole, (80, 80))
    found = sample(CenterCrop(80, resize=50), image)
    assert not found[:14].any()
    assert not found[-14:].any()
    assert difference(found, expected)[17:-17].mean() < 1.5


# JPEGs decoded at a part of their size.


@pytest.mark.parametrize("oversample", [1.0, 2.0])
def test_a_large_jpeg_is_decoded_reduced_but_large_enough(
    shapes: list[tuple[int, ...]], oversample: float
) -> None:
    image = large_photo()
    needed = round(32 * oversample)
    for side, reduced in ((2 * needed - 1, False), (2 * needed, True), (480, True)):
        crop = Crop(3, 0, side, side, (32, 32))
        Resize(1, oversample=oversample).render(image, crop, Decoding())
        height, width, _ = shapes.pop()
        assert ((width, height) != (640, 480)) == reduced
        assert width / 640 * side >= needed
        assert height / 480 * side >= needed


def test_images_are_decoded_fully_if_reducing_saves_nothing(shapes: list[tuple[int, ...]]) -> None:
    whole = (480, 640, 3)
    for kind in ("png", "webp"):
        sample(Resize(16), stored(photo(640, 480), kind))
    image = large_photo()
    sample(Resize(16, oversample=EXACT), image)
    sample(CenterCrop(240), image)
    sample(CenterCrop(224, resize=256), image)
    assert shapes == [whole] * 5


def random_crops(size: int) -> list[Crop]:
    """Return random crops of an image of 900 x 800, from twice to ten times the target."""
    op = RandomResizedCrop(size, scale=(4 * size**2 / 720000, 1.0))
    return [op.crop(900, 800, Draws(2, row)) for row in range(10)]


@pytest.mark.parametrize(
    ("oversample", "lowest", "mode"),
    [
        (1.0, 38.0, "bilinear"),
        (1.0, 38.0, "bicubic"),
        (2.0, 46.0, "bilinear"),
        (2.0, 46.0, "bicubic"),
        (EXACT, 55.0, "bicubic"),
    ],
)
def test_a_reduced_jpeg_has_nearly_the_pixels_of_the_full_decode(
    oversample: float, lowest: float, mode: Filter, shapes: list[tuple[int, ...]]
) -> None:
    """``lowest`` is the stated tolerance, in dB, for the worst of many crops of a photograph."""
    image = large_photo(900, 800)
    whole = decoded(image)
    op = Resize(1, filter=mode, oversample=oversample)
    for crop in random_crops(72):
        cut = whole[crop.top :, crop.left :][: crop.height, : crop.width]
        expected = interpolate(cut, crop.size, mode)
        found = op.render(image, crop, Decoding())
        assert psnr(found, expected[:, ::-1] if crop.flip else expected) > lowest
    assert (len(set(shapes)) > 1) == (oversample != EXACT)


@pytest.mark.parametrize("oversample", [1.0, 2.0, EXACT])
def test_a_reduced_jpeg_shifts_nothing_by_more_than_a_tenth_of_a_pixel(oversample: float) -> None:
    """Offsets are no multiples of 8, and 900 is not either: nor may the last column be stretched.

    Red tells the column: its mean over the crop tells where the crop lies.
    """
    image = stored(ramp(900, 800), "jpg")
    whole = decoded(image)
    op = Resize(1, oversample=oversample)
    for crop in random_crops(72):
        cut = whole[crop.top :, crop.left :][: crop.height, : crop.width].astype(float)
        found = op.render(image, crop, Decoding()).astype(float)
        for channel, per_level, pixel in (
            (0, 900 / 215, crop.width / 72),
            (1, 800 / 215, crop.height / 72),
        ):
            shift = (found[..., channel].mean() - cut[..., channel].mean()) * per_level
            assert abs(shift) < 0.1 * pixel + 0.15  # the ramp has steps of four pixels


# All kinds of images, through datasets.


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of different kinds and sizes in each format, and ``raw-*``: raw pixels."""
    root = tmp_path_factory.mktemp("ops")
    files: dict[str, bytes | None] = {}
    for number in range(9):
        width, height = 40 + 7 * number, 70 - 5 * number
        kinds = ("JPEG", "PNG", "WEBP")
        name = f"{'ab'[number % 2]}/{number}.{('jpg', 'png', 'webp')[number % 3]}"
        files[name] = encoded(picture(width, height, number), kinds[number % 3])
    make_tree(root / "photos", files)
    raw = {"encode": "raw", "resize": "30x40", "resize_mode": "stretch", "enlarge": True}
    for to in FORMATS:
        make_dataset(root / "photos", root / to, to=to)
        make_dataset(root / "photos", root / f"raw-{to}", to=to, **raw)
    return root


OPERATIONS = [
    CenterCrop(24),
    CenterCrop((20, 33), resize=36),
    CenterCrop(90),
    RandomCrop((20, 33), padding=5),
    RandomCrop(90),
    RandomResizedCrop(24),
    RandomResizedCrop((10, 60), filter="bicubic"),
    Resize((17, 19)),
]


@pytest.mark.parametrize("op", OPERATIONS, ids=repr)
@pytest.mark.parametrize("prefix", ["", "raw-"])
def test_batches_are_blocks_equal_to_single_samples(root: Path, op: ImageOp, prefix: str) -> None:
    rows = [3, 0, -1, 5, 2, 7]  # each once: a row that repeats draws again
    batches = []
    for to in FORMATS:
        dataset = open_dataset(root / f"{prefix}{to}", decode=op)
        dataset.set_epoch(4, seed=2)
        batch = dataset.__getitems__(rows)
        block, labels = collate(batch)
        assert block.dtype == torch.uint8
        assert block.shape == (6, 3, *(op.fixed_size or ()))
        assert block.is_contiguous(memory_format=torch.channels_last)
        assert labels.tolist() == [dataset.targets[row] for row in rows]
        for number, row in enumerate(rows):
            image, _ = batch[number]
            assert image.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
            assert torch.equal(image, block[number])
            single, _ = dataset[row]
            assert torch.equal(single, block[number])
            assert single.permute(1, 2, 0).is_contiguous()
        batches.append(block)
    assert torch.equal(batches[0], batches[1])  # the same from each format
    assert torch.equal(batches[0], batches[2])


def test_random_crops_depend_only_on_epoch_seed_and_row(root: Path) -> None:
    def read(dataset: ShardDataset, epoch: int, seed: int) -> Any:
        dataset.set_epoch(epoch, seed)
        return collate(dataset[:])[0]

    op = RandomResizedCrop(24)
    dataset, again = (open_dataset(root / "lmdb", decode=op) for _ in range(2))
    first = read(dataset, 1, 1)
    assert not torch.equal(first, read(dataset, 2, 1))
    assert not torch.equal(first, read(dataset, 1, 2))
    torch.manual_seed(99)
    assert torch.equal(first, read(pickle.loads(pickle.dumps(again)), 1, 1))


def test_a_transform_gets_its_own_chw_tensors(root: Path) -> None:
    plain = open_dataset(root / "hdf5", decode=CenterCrop(24))
    inverted = open_dataset(root / "hdf5", torch.bitwise_not, decode=CenterCrop(24))
    one, other = collate(plain[:])[0], collate(inverted[:])[0]
    assert torch.equal(255 - one, other)


def test_images_of_different_sizes_are_returned_separately(root: Path) -> None:
    dataset = open_dataset(root / "webdataset", decode=Resize(20))
    batch = dataset[:]
    shapes = {tuple(image.shape) for image, _ in batch}
    assert len(shapes) > 3
    assert all(min(shape[1:]) == 20 for shape in shapes)
    for row, (image, _) in enumerate(batch):
        assert torch.equal(image, dataset[row][0])
    with refused(RuntimeError):
        collate(batch)
    assert collate(dataset[[4, 4]])[0].shape == (2, *dataset[4][0].shape)


WRONG: dict[str, list[Any]] = {
    "scale": [(0, 1), (0.5, 0.2), 0.5, ("a", "b"), (0.1, 0.2, 0.3), (0.1, math.inf)],
    "ratio": [(-1, 1), (math.nan, 1), (0.5, math.inf), None],
    "flip": [1.1, -0.1, math.nan, "x"],
    "filter": ["lanczos", None],
    "oversample": [0.5, math.nan, "2"],
}


def test_wrong_options_are_usage_errors() -> None:
    sizes: list[Any] = [0, -1, 1.5, "8", None, True, (8,), (8, 8, 8), (8, 0), [8, 8]]
    for size, make in itertools.product(sizes, crops.OPERATIONS):
        with refused(UsageError, make.__name__, size):
            make(size)
    for name, values in WRONG.items():
        for value in values:
            with refused(UsageError, name, repr(value)):
                RandomResizedCrop(8, **{name: value})
    paddings: list[Any] = [-1, 1.0, "4", (4, 4), True, 1 << 17]
    for padding in paddings:
        with refused(UsageError, "padding", repr(padding)):
            RandomCrop(32, padding=padding)
    resizes: list[Any] = [0, "256", 1.5]
    for resize in resizes:
        with refused(UsageError, "CenterCrop(resize)", resize):
            CenterCrop(8, resize=resize)
