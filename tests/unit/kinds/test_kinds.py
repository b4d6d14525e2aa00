"""A kind of field is one module; each form of an image in Python is stored with its pixels."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from refusals import refused
from table import for_each

from shardkit import Field, convert, export, open_dataset, verify
from shardkit.dataset.shardset import open_shards
from shardkit.errors import BadImages, UsageError
from shardkit.kinds import field as fields
from shardkit.kinds.field import KINDS, Kind, Packed, Stack, all_kinds, get_kind
from shardkit.reporting.records import describe_record

PACKAGE = Path(fields.__file__).parents[1]


class Interval(Kind):
    """Start and length, given as a pair."""

    name = "interval"
    is_named_so = True
    column_type = np.dtype("<f8")
    is_variable = True

    def pack(self, name: str, field: Field, value: Any) -> tuple[None, Any]:
        start, stop = value
        if stop < start:
            raise ValueError(f"it stops at {stop}, before {start}")
        return None, [float(start), float(stop)]

    def width(self, field: Field) -> int:
        return 2

    def pack_column(self, field: Field, value: Any) -> Packed:
        return Packed(np.array(value, "<f8").tobytes())

    def is_listed(self, field: Field) -> bool:
        return False

    def stack(
        self, field: Field, values: npt.NDArray[Any], ends: npt.NDArray[np.int64] | None
    ) -> Stack:
        return Stack(np.array(values.reshape(-1, 2)))


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "KINDS", (*KINDS, Interval.name))
    known = get_kind
    monkeypatch.setattr(
        fields, "get_kind", lambda name: Interval() if name == Interval.name else known(name)
    )


@pytest.mark.usefixtures("interval")
@pytest.mark.parametrize("to", ["lmdb", "hdf5", "webdataset"])
def test_a_new_kind_is_converted_verified_read_and_exported(tmp_path: Path, to: Any) -> None:
    samples = [{"key": f"r{n}", "interval": (n, n + 0.5), "number": n} for n in range(5)]

    convert(samples, tmp_path / "out", to=to, schema={"interval": Field("interval")}, workers=1)

    assert verify(tmp_path / "out", level="decode").ok
    dataset = open_dataset(tmp_path / "out", fields=("interval", "number"))
    (found, numbers) = dataset.__getitems__([0, 1, 2, 3, 4]).batch
    assert torch.equal(found[:, 0], numbers.double())
    assert torch.equal(found[:, 1], numbers + 0.5)
    shards = open_shards(tmp_path / "out")
    row = [*shards.keys].index("r3")
    assert describe_record(shards, row)["fields"]["interval"] == [3.0, 3.5]
    export(tmp_path / "out", tmp_path / "table", layout="parquet")


@pytest.mark.usefixtures("interval")
def test_a_bad_value_of_a_new_kind_is_named(tmp_path: Path) -> None:
    with refused(Exception, "1", "2"):
        convert([{"interval": (2, 1)}], tmp_path / "out", to="lmdb")


def test_each_module_has_a_kind_of_its_name() -> None:
    for name, kind in zip(KINDS, all_kinds(), strict=True):
        assert kind.name == name
        assert kind.stored_apart == (kind.suffix in ("npy", "bin") or kind.is_picture)


def test_few_lines_outside_of_kinds_compare_a_kind() -> None:
    """A kind is asked what it does; its name is compared only to show it."""
    places = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "kinds":
            continue
        source = path.read_text("utf-8")
        if not re.search(r"\.kind\b.* (==|!=|in) ", source):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Compare):
                names = {
                    part.value
                    for side in node.comparators
                    for part in ast.walk(side)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                if ".kind" in ast.unparse(node.left) and names & set(KINDS):
                    places.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(places) <= 25, "\n".join(places)


# Each form in which Python gives an image is stored with the pixels that NumPy says it has.

Array = npt.NDArray[Any]
HEIGHT, WIDTH = 5, 7


def drawn(*shape: int, dtype: str = "uint8") -> Array:
    """Random values over the whole range of a dtype, or of floats from 0 to 1."""
    random = np.random.default_rng(sum(shape))
    if np.dtype(dtype).kind == "f":
        return random.random(shape).astype(dtype)
    limits = np.iinfo(dtype)
    native = np.dtype(dtype).newbyteorder("=")
    return random.integers(limits.min, limits.max, shape, native, endpoint=True).astype(dtype)


def frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


def tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(array, -1, 0)))


def drawn_as(mode: str) -> Image.Image:
    """An image of a mode of Pillow, with random bytes."""
    size = len(Image.new(mode, (WIDTH, HEIGHT)).tobytes())
    image = Image.frombytes(mode, (WIDTH, HEIGHT), drawn(size).tobytes())
    if mode in ("P", "PA"):
        image.putpalette(drawn(768).tobytes())
    return image


def transparent(mode: str, color: Any) -> Image.Image:
    image = drawn_as(mode)
    image.info["transparency"] = color
    return image


FLAT = drawn(HEIGHT, WIDTH)
COLOR = drawn(HEIGHT, WIDTH, 3)
FORMS: list[tuple[Any, Array]] = [
    (FLAT, FLAT),
    (FLAT[:, :1], FLAT[:, :1]),
    (FLAT[:1], FLAT[:1]),
    (FLAT.T, FLAT.T),
    (FLAT[::-1, ::-2], FLAT[::-1, ::-2]),
    (frozen(FLAT.copy()), FLAT),
    (np.asfortranarray(COLOR), COLOR),
    (COLOR[::-1, ::2], COLOR[::-1, ::2]),
    (frozen(COLOR.copy()), COLOR),
    *((drawn(HEIGHT, WIDTH, channels),) * 2 for channels in (1, 2, 3, 4)),
    *((drawn(2, 1, channels),) * 2 for channels in (1, 2, 3, 4)),
    (torch.from_numpy(FLAT), FLAT),
    (torch.from_numpy(FLAT.T.copy()).T, FLAT),
    *((tensor(array), array) for array in (drawn(HEIGHT, WIDTH, n) for n in (1, 2, 3, 4))),
    (torch.from_numpy(COLOR).permute(2, 0, 1), COLOR),
    (
        tensor(drawn(2 * HEIGHT, 3 * WIDTH, 3))[:, ::2, ::3],
        drawn(2 * HEIGHT, 3 * WIDTH, 3)[::2, ::3],
    ),
    *((image, np.asarray(image)) for image in map(drawn_as, ("L", "LA", "RGB", "RGBA"))),
]
"""Images of uint8, and their pixels with channels last."""

SHOWN = [
    *map(drawn_as, ("1", "P", "PA", "La", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")),
    transparent("L", 7),
    transparent("RGB", (1, 2, 3)),
    transparent("P", 3),
    transparent("P", bytes(range(256))),
]
"""Images of Pillow whose pixels are not the values that NumPy shows of them."""


def rgba(array: Array) -> Image.Image:
    """Return pixels with channels last as Pillow shows them."""
    squeezed = array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(squeezed)).convert("RGBA")


def on_white(image: Image.Image) -> Array:
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return np.asarray(Image.alpha_composite(ground, image).convert("RGB"))


def luma(image: Image.Image) -> Array:
    return np.asarray(Image.fromarray(on_white(image)).convert("L"))[..., None]


def stored(samples: list[dict[str, Any]], path: Path, **options: Any) -> list[tuple[Any, ...]]:
    """Return the images of each sample as a dataset returns them; verify it, too."""
    schema = {name: Field("image") for name in samples[0]}
    convert(samples, path, to="lmdb", schema=schema, workers=1, **options)
    assert verify(path, against=samples).findings == []
    dataset = open_dataset(path, decode="numpy", fields=[*schema])
    by_sample = sorted(range(len(dataset)), key=lambda row: int(dataset.paths[row]))
    return [dataset[row] for row in by_sample]


def assert_pixels(image: Array, expected: Array) -> None:
    assert image.dtype == expected.dtype.newbyteorder("=")
    np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize(("pixels", "shown"), [("rgb", on_white), ("gray", luma)])
def test_images_of_8_bits_become_rgb_or_gray(
    tmp_path: Path, pixels: str, shown: Callable[[Image.Image], Array]
) -> None:
    images = [*((value, shown(rgba(array))) for value, array in FORMS)]
    images += [(image, shown(image)) for image in SHOWN]
    samples = [{"image": value, "second": value} for value, _ in images]
    made = stored(samples, tmp_path / "out", pixels=pixels)
    for (first, second), (_, expected) in zip(made, images, strict=True):
        assert_pixels(first, expected)
        assert_pixels(second, expected)


def test_images_of_8_bits_keep_their_channels(tmp_path: Path) -> None:
    for channels in (1, 2, 3, 4):
        arrays = [(value, array.reshape(*array.shape[:2], -1)) for value, array in FORMS]
        images = [(value, array) for value, array in arrays if array.shape[2] == channels]
        samples = [{"image": value, "second": value} for value, _ in images]
        made = stored(samples, tmp_path / str(channels), pixels="keep")
        for (first, second), (_, expected) in zip(made, images, strict=True):
            assert_pixels(first, expected)
            assert_pixels(second, expected)


def test_transparency_is_kept(tmp_path: Path) -> None:
    images = [image for image in SHOWN if image.mode in ("PA", "RGBa", "RGB", "P")][1:]
    made = stored([{"image": image} for image in images], tmp_path / "out", pixels="keep")
    for (image,), given in zip(made, images, strict=True):
        assert_pixels(image, np.asarray(given.convert("RGBA")))


def test_a_transparent_color_of_16_bits_is_kept(tmp_path: Path) -> None:
    image = transparent("I;16", int(np.asarray(drawn_as("I;16"))[0, 0]))
    ((made,),) = stored([{"image": image}], tmp_path / "out", pixels="keep")
    values = np.asarray(image)
    opaque = np.where(values == values[0, 0], 0, 65535)
    assert_pixels(made, np.stack([values, opaque], -1).astype(np.uint16))


def test_a_profile_of_another_mode_is_not_stored(tmp_path: Path) -> None:
    """That of CMYK is wrong for RGB, and the one that Pillow makes for LAB has the time."""
    for mode, profiles in (("RGB", 1), ("CMYK", 0), ("LAB", 0)):
        image = drawn_as(mode)
        image.info["icc_profile"] = b"profile"
        convert([{"image": image}], tmp_path / mode, to="lmdb", workers=1)
        (content,) = open_dataset(tmp_path / mode, decode="bytes", fields=["image"])[0]
        assert content.count(b"iCCP") == profiles


WIDE: list[tuple[Any, Array]] = [
    *(
        (array, array)
        for dtype in ("int8", "uint16", ">u2", "int16", "uint32", "int32", ">f4", "f2", "f8")
        for array in (drawn(HEIGHT, WIDTH, dtype=dtype), drawn(HEIGHT, WIDTH, 6, dtype=dtype))
    ),
    (tensor(drawn(HEIGHT, WIDTH, 3, dtype="float32")), drawn(HEIGHT, WIDTH, 3, dtype="float32")),
    (torch.tensor([[1.5, -2.0]]).bfloat16(), np.array([[1.5, -2.0]], np.float32)),
    (torch.ones(3, 2, 2, requires_grad=True), np.ones((2, 2, 3), np.float32)),
    *((image, np.asarray(image)) for image in map(drawn_as, ("I", "F", "I;16", "I;16B"))),
]
"""Images of other dtypes, and their values with channels last."""


def test_images_of_other_dtypes_keep_their_values(tmp_path: Path) -> None:
    sample = {f"image{number}": value for number, (value, _) in enumerate(WIDE)}
    sample["image"] = sample.pop("image0")
    ((*images, first),) = stored([sample], tmp_path / "out", pixels="keep")
    for image, (_, expected) in zip([first, *images], WIDE, strict=True):
        assert_pixels(image, expected.reshape(*expected.shape[:2], -1))


@for_each(
    ("value", "facts"),
    [
        (np.zeros((HEIGHT, WIDTH), bool), ("bool", "uint8")),
        (np.zeros((HEIGHT, WIDTH), np.int64), ("int64", "uint8")),
        (np.zeros((0, WIDTH, 3), np.uint8), ("(0, 7, 3)",)),
        (np.zeros((HEIGHT, WIDTH, 0), np.uint8), ("(5, 7, 0)",)),
        (np.zeros(WIDTH, np.uint8), ("(7,)",)),
        (np.zeros((1, 3, HEIGHT, WIDTH), np.uint8), ("(1, 3, 5, 7)",)),
        (Image.new("RGB", (0, 5)), ("empty",)),
    ],
)
def test_what_is_no_image_is_refused(tmp_path: Path, value: Any, facts: tuple[str, ...]) -> None:
    for pixels in ("rgb", "gray"):
        with refused(BadImages, "000000000: image", *facts):
            convert([{"image": value}], tmp_path / "out", to="lmdb", pixels=pixels)
    with refused(UsageError, "sample 0", "keep", *facts):
        convert([{"image": value}], tmp_path / "out", to="lmdb", pixels="keep")


@for_each(
    ("value", "remedy"),
    [
        (np.zeros((2, 40, 50), np.uint8), "numpy.moveaxis(array, 0, -1)"),
        (np.zeros((2, 40, 50), np.float32), "numpy.moveaxis(array, 0, -1)"),
        (torch.zeros(40, 50, 2, dtype=torch.uint8), "tensor.permute(2, 0, 1)"),
        (np.zeros((40, 50, 3), np.float32), "(255 * x).round()"),
        (np.zeros((40, 50), np.uint16), "uint16"),
        (np.zeros((40, 50, 5), np.uint8), "pixels='keep'"),
    ],
)
def test_arrays_that_are_no_rgb_have_a_remedy(tmp_path: Path, value: Any, remedy: str) -> None:
    for pixels in ("rgb", "gray"):
        with refused(BadImages, remedy):
            convert([{"image": value}], tmp_path / "out", to="lmdb", pixels=pixels)


def test_kept_arrays_of_channels_first_are_noticed(tmp_path: Path) -> None:
    samples = [{"image": np.zeros((2, 20, 24), np.float32)}]
    with pytest.warns(UserWarning, match="moveaxis"):
        convert(samples, tmp_path / "out", to="lmdb", pixels="keep")


@for_each(
    ("name", "pixels"), [("image", "rgb"), ("image", "gray"), ("image", "keep"), ("mask", "rgb")]
)
def test_verify_does_not_trust_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, pixels: Any
) -> None:
    """A wrong encoder makes the same wrong file of a sample each time."""
    samples = [{name: FLAT}, {name: FLAT[::-1]}]
    place = tmp_path / name / pixels
    with monkeypatch.context() as patch:
        right = Image.fromarray
        patch.setattr(Image, "fromarray", lambda array, *rest: right(array[:, :1], *rest))
        convert(samples, place, to="lmdb", pixels=pixels, workers=1)
        reasons = [finding.reason for finding in verify(place, against=samples).findings]
    assert len(reasons) == 2
    assert all(f"pixels of its {name}" in reason for reason in reasons)
