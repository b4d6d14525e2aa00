from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from helpers import Pixels, encoded, exif, jpeg, opened, picture, pixels, png
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from PIL import Image, ImageCms, ImageOps
from refusals import refused
from table import for_each

from shardkit import Field
from shardkit.codecs import planes
from shardkit.codecs.image import FILTERS, decode, sniff
from shardkit.errors import BadImage, UsageError
from shardkit.pipeline import convert_record
from shardkit.recipe import RESIZE_MODES, Recipe, parse_size
from shardkit.record import Record

GREEN = (0, 200, 0)


def record(data: bytes, path: str = "cat/a.jpg") -> Record:
    kind = sniff(data[:32])
    assert kind is not None
    meta = json.dumps({"path": path}).encode()
    return Record("cat/a", {kind: data, "cls": b"3", "json": meta})


def applied(data: bytes, **options: Any) -> Record:
    return convert_record(Recipe(**options), record(data)).record


def stored_size(data: bytes, **options: Any) -> tuple[int, int]:
    """Return width and height as stored; the metadata must agree with the pixels."""
    result = applied(data, **options)
    width, height = result.meta["width"], result.meta["height"]
    field = result.image_field
    assert field is not None
    if field == "raw":
        assert len(result.fields[field]) == width * height * 3
    else:
        assert opened(result.fields[field]).size == (width, height)
    return width, height


def stored_pixels(data: bytes, **options: Any) -> Pixels:
    result = applied(data, **options)
    field = result.image_field
    assert field is not None
    if field == "raw":
        shape = (result.meta["height"], result.meta["width"], 3)
        return np.frombuffer(result.fields["raw"], np.uint8).reshape(shape)
    return np.asarray(opened(result.fields[field]))


# Nothing at all.


@for_each("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
@for_each("check", ["decode", "header", "none"])
def test_bytes_are_stored_unchanged(kind: str, check: str) -> None:
    data = encoded(kind=kind)
    result = applied(data, check=check)
    field = result.image_field
    assert field is not None
    assert result.fields[field] == data
    assert result.meta == {"path": "cat/a.jpg", "width": 24, "height": 16}
    assert result.label == 3
    assert result.key == "cat/a"


@for_each(
    "options",
    [
        {"resize": 16},  # the shorter side is 16 already
        {"resize": (16, 24), "resize_mode": "crop"},
        {"resize": (16, 24), "resize_mode": "stretch"},
        {"resize": (16, 24), "resize_mode": "pad"},
        {"resize": (24, 24), "resize_mode": "longer"},
        {"resize": 500},  # would enlarge
        {"resize": (500, 500), "resize_mode": "crop"},
        {"resize": (500, 500), "resize_mode": "longer"},
        {"resize": (500, 500), "resize_mode": "stretch"},
        {"encode": "jpeg"},
        {"orient": True},
    ],
)
def test_bytes_are_stored_unchanged_if_no_pixel_must_change(options: dict[str, Any]) -> None:
    data = jpeg(24, 16)
    assert applied(data, **options).fields["jpg"] == data


@for_each("field", ["jpg", "png"])
def test_quality_re_encodes(field: str) -> None:
    data = jpeg(24, 16, quality=95) if field == "jpg" else png(24, 16)
    result = applied(data, quality=50)
    assert result.fields[field] != data or field == "png"
    assert stored_size(data, quality=50) == (24, 16)


def test_existing_metadata_is_kept() -> None:
    given = Record("k", {"png": png(), "json": b'{"path":"p","more":[1]}', "txt": b"caption"})
    result = convert_record(Recipe(resize=8), given).record
    assert result.meta["more"] == [1]
    assert result.fields["txt"] == b"caption"
    assert "cls" not in result.fields


# The size, by formulas of their own.


def torchvision_resize(width: int, height: int, short: int) -> tuple[int, int]:
    """Return the size that torchvision.transforms.Resize(short) gives."""
    if width <= height:
        return short, int(short * height / width)
    return int(short * width / height), short


SIDES = st.integers(1, 400)


@given(SIDES, SIDES, st.integers(1, 300))
def test_shorter_equals_torchvisions_resize(width: int, height: int, short: int) -> None:
    change = Recipe(resize=short, enlarge=True).geometry(width, height)
    assert change.size == change.canvas == torchvision_resize(width, height, short)
    small = Recipe(resize=short).geometry(width, height)
    expected = change.size if min(width, height) >= short else (width, height)
    assert small.size == small.canvas == expected


@given(SIDES, SIDES, SIDES, SIDES)
def test_each_mode_gives_the_documented_size(
    width: int, height: int, box_width: int, box_height: int
) -> None:
    for enlarge in (False, True):
        changes = {
            mode: Recipe(
                resize=(box_height, box_width), resize_mode=mode, enlarge=enlarge
            ).geometry(width, height)
            for mode in RESIZE_MODES
        }
        cover = max(box_width / width, box_height / height)
        fit = min(box_width / width, box_height / height)
        for mode, change in changes.items():
            assert min(change.size) >= 1
            if not enlarge:
                assert change.size[0] <= width
                assert change.size[1] <= height
            if mode in ("shorter", "crop") and (enlarge or cover <= 1):
                assert change.size[0] >= box_width
                assert change.size[1] >= box_height
                assert close(change.size, width * cover, height * cover)
            if mode in ("longer", "pad") and (enlarge or fit <= 1):
                assert change.size[0] <= box_width
                assert change.size[1] <= box_height
                assert close(change.size, width * fit, height * fit)
            if mode in ("shorter", "longer", "stretch"):
                assert change.canvas == change.size
        assert changes["pad"].canvas == (box_width, box_height)
        if enlarge:
            assert changes["crop"].canvas == changes["stretch"].size == (box_width, box_height)
        if not enlarge and cover > 1:
            assert changes["crop"].size == changes["shorter"].size == (width, height)


def close(size: tuple[int, int], width: float, height: float) -> bool:
    """Return whether a size is the given one, rounded down, but at least one pixel."""
    return all(
        got == max(1, int(want + 1e-6)) or abs(got - want) < 1e-6
        for got, want in zip(size, (width, height), strict=True)
    )


# The pixels, as Pillow alone makes them.


@for_each("name", FILTERS)
@for_each("mode", ["RGB", "L", "P", "CMYK", "1"])
def test_pixels_are_those_of_a_plain_resize(name: str, mode: str) -> None:
    kind = {"1": "PPM", "CMYK": "TIFF"}.get(mode, "PNG")
    options = {"exif": exif(6)} if kind == "PNG" else {}
    data = encoded(picture(41, 29, mode=mode), kind, **options)
    upright = ImageOps.exif_transpose(opened(data)).convert("RGB")
    size = torchvision_resize(*upright.size, 16)
    expected = np.asarray(upright.resize(size, FILTERS[name]))
    got = stored_pixels(data, resize=16, filter=name)
    np.testing.assert_array_equal(got, expected)


def plain(
    data: bytes,
    mode: str,
    name: str = "bicubic",
    *,
    box: tuple[int, int] = (48, 40),
    enlarge: bool = True,
    color: str | tuple[int, int, int] = "white",
) -> Pixels:
    """Return an image decoded, rotated, resized to a box and cropped or padded by Pillow."""
    image = ImageOps.exif_transpose(opened(data)).convert("RGB")
    sides = zip(box, image.size, strict=True)
    scale = (max if mode in ("shorter", "crop") else min)(new / old for new, old in sides)
    width, height = (max(1, int(side * scale + 1e-6)) for side in image.size)
    if mode == "stretch":
        width, height = box if enlarge else map(min, box, image.size)
    elif scale > 1 and not enlarge:
        width, height = image.size
    image = image.resize((width, height), FILTERS[name])
    canvas = {"pad": box, "crop": (min(width, box[0]), min(height, box[1]))}.get(mode, image.size)
    drawn = Image.new("RGB", canvas, color)
    left, top = (round((want - have) / 2) for have, want in zip(image.size, canvas, strict=True))
    drawn.paste(image, (left, top))
    return np.asarray(drawn)


NEAR = [(12 + wider, 10 + higher) for wider in range(-2, 3) for higher in range(-2, 3)]
"""Sizes that differ from 12 x 10 by 0, 1 and 2."""


@for_each("mode", RESIZE_MODES)
@for_each("enlarge", [False, True])
@for_each(("size", "box"), [*((size, (12, 10)) for size in NEAR), ((72, 22), (50, 16))])
def test_sizes_near_the_target_are_resized_as_by_pillow(
    mode: str, enlarge: bool, size: tuple[int, int], box: tuple[int, int]
) -> None:
    data = png(*size)
    options = {"resize": box[::-1], "resize_mode": mode, "enlarge": enlarge}
    got = stored_pixels(data, background=GREEN, **options)
    expected = plain(data, mode, box=box, enlarge=enlarge, color=GREEN)
    np.testing.assert_array_equal(got, expected)


@for_each("size", NEAR)
def test_padding_of_gray_images_is_the_background(size: tuple[int, int]) -> None:
    recipe = Recipe(pixels="gray", resize=(12, 14), resize_mode="pad", background=(50, 50, 50))
    gray = encoded(opened(png(*size)).convert("L"), "PNG")
    result = convert_record(recipe, record(gray), {"image": Field("image", "uint8", (1,))}).record
    expected = Image.new("L", (14, 12), 50)
    left, top = (round((have - want) / 2) for have, want in zip((14, 12), size, strict=True))
    expected.paste(opened(gray), (left, top))
    np.testing.assert_array_equal(opened(result.fields["png"]), expected)


@for_each(
    ("mode", "orientation", "kind", "subsampling", "name"),
    pairwise(RESIZE_MODES, [1, 3, 6], ["RGB", "L", "CMYK"], [0, 1, 2], FILTERS),
)
def test_a_large_jpeg_is_resized_as_by_pillow(
    mode: str, orientation: int, kind: str, subsampling: int, name: str
) -> None:
    options = {} if kind == "L" else {"subsampling": subsampling}
    data = encoded(picture(349, 261, mode=kind), "JPEG", exif=exif(orientation), **options)
    got = stored_pixels(data, resize=(40, 48), resize_mode=mode, encode="png", filter=name)
    np.testing.assert_array_equal(got, plain(data, mode, name))


def psnr(got: Pixels, expected: Pixels) -> float:
    error = float(np.mean((got.astype(float) - expected) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@for_each("mode", RESIZE_MODES)
@for_each("orientation", range(1, 9))
def test_dct_scaling_resizes_the_exact_box(mode: str, orientation: int) -> None:
    """At 3/8, 349 x 261 pixels become 131 x 98; taken for the whole image, they are 33 dB off."""
    ramp = np.add.outer(np.arange(261) % 87, np.arange(349) % 116).astype(np.uint8)
    data = encoded(Image.fromarray(ramp), "JPEG", quality=98, exif=exif(orientation))
    options = {"resize": (40, 48), "resize_mode": mode, "encode": "png"}
    got = stored_pixels(data, dct_scaling=True, **options)
    exact = stored_pixels(data, **options)
    assert not np.array_equal(got, exact)
    assert psnr(got, exact) > 38


def test_dct_scaling_affects_only_images_of_twice_the_target() -> None:
    for data in (jpeg(90, 70), png(349, 261), jpeg(7, 5)):
        options: dict[str, Any] = {"resize": 36, "encode": "png", "enlarge": True}
        np.testing.assert_array_equal(
            stored_pixels(data, dct_scaling=True, **options), stored_pixels(data, **options)
        )


def test_dct_scaling_requires_a_resize() -> None:
    with pytest.raises(UsageError, match=r"dct_scaling=? requires"):
        Recipe(dct_scaling=True)


def test_only_a_recipe_with_dct_scaling_mentions_it() -> None:
    for recipe in (Recipe(resize=8), Recipe(resize=8, dct_scaling=True)):
        assert recipe.describe().get("dct_scaling", False) == recipe.dct_scaling
        assert Recipe.restored(recipe.describe()) == recipe


# The encoding.


ENCODINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}


@for_each("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_any_type_is_encoded_as_requested_or_else_keeps_its_type_or_becomes_png(kind: str) -> None:
    data = encoded(kind=kind)
    kept = applied(data, resize=8)
    assert kept.image_field == ENCODINGS.get(kind, "png")
    assert kept.fields.keys() - {"cls", "json"} == {kept.image_field}
    for name, field in ENCODINGS.items():
        result = applied(data, encode=name.lower())
        assert sniff(result.fields[field][:32]) == result.image_field == field
        if kind == name:
            assert result.fields[field] == data


WEBP: dict[str, tuple[dict[str, Any], bytes]] = {
    "plain": ({"lossless": True}, b"VP8L"),
    "metadata": ({"lossless": True, "exif": exif(1), "icc_profile": b"profile"}, b"VP8X"),
    "animated": ({"lossless": True, "save_all": True}, b"VP8X"),
    "lossy": ({"quality": 90}, b"VP8 "),
    "lossy, animated": ({"quality": 90, "save_all": True}, b"VP8X"),
}
"""Files of WebP: options of Pillow, and the type of the first chunk."""


@for_each("name", WEBP)
def test_a_changed_webp_is_lossless_if_it_was(name: str) -> None:
    options, chunk = WEBP[name]
    image = picture(60, 40)
    if "save_all" in options:
        options = {**options, "append_images": [image.transpose(Image.Transpose.ROTATE_180)]}
    data = encoded(image, "WEBP", **options)
    assert data[12:16] == chunk
    content = applied(data, resize=20).fields["webp"]
    assert (content[12:16] == b"VP8L") is not name.startswith("lossy")
    expected = plain(data, "shorter", box=(20, 20))
    exact = np.array_equal(np.asarray(opened(content).convert("RGB")), expected)
    assert exact is not name.startswith("lossy")
    for lossy in ({"quality": 90}, {"encode": "webp"}):
        assert applied(data, resize=20, **lossy).fields["webp"][12:16] == b"VP8 "


def test_raw_holds_the_pixels() -> None:
    options: dict[str, Any] = {"encode": "raw", "resize": (16, 24), "resize_mode": "crop"}
    result = applied(png(24, 16), **options)
    assert result.fields["raw"] == pixels(24, 16).tobytes()
    assert Recipe(**options).raw_shape == (16, 24, 3)
    options["resize"] = (32, 32)
    assert stored_size(png(24, 16), **{**options, "resize_mode": "pad"}) == (32, 32)
    assert stored_size(png(60, 40), **options) == (32, 32)


@for_each("mode", ["crop", "stretch"])
def test_an_image_too_small_for_raw_is_bad(mode: str) -> None:
    options = {"encode": "raw", "resize": (32, 32), "resize_mode": mode}
    with pytest.raises(BadImage, match=r"24 x 16 pixels, .*enlarge=True"):
        applied(png(24, 16), **options)
    assert stored_size(png(24, 16), enlarge=True, **options) == (32, 32)


# The orientation.


@for_each("orientation", range(1, 9))
def test_the_orientation_is_noted_if_bytes_are_unchanged(orientation: int) -> None:
    data = jpeg(24, 16, exif=exif(orientation))
    result = applied(data)
    assert result.fields["jpg"] == data
    assert result.meta["width"], result.meta["height"] == (24, 16)
    assert result.meta.get("orientation", 1) == orientation
    assert ("orientation" in result.meta) == (orientation != 1)


@for_each("orientation", range(2, 9))
@for_each("options", [{"orient": True}, {"encode": "png"}, {"quality": 95}])
def test_the_orientation_is_applied_if_pixels_change(
    orientation: int, options: dict[str, Any]
) -> None:
    data = encoded(picture(24, 16), "PNG", exif=exif(orientation))
    if options == {"encode": "png"}:
        data = encoded(picture(24, 16), "WEBP", lossless=True, exif=exif(orientation))
    result = applied(data, **options)
    expected = ImageOps.exif_transpose(opened(data)).convert("RGB")
    np.testing.assert_array_equal(stored_pixels(data, **options), np.asarray(expected))
    assert "orientation" not in result.meta
    assert stored_size(data, **options) == expected.size


def test_the_box_refers_to_the_upright_image() -> None:
    data = jpeg(40, 20, exif=exif(6))  # upright: 20 wide, 40 high
    assert stored_size(data, resize=10) == (10, 20)
    assert stored_size(data, resize=(30, 10), resize_mode="crop") == (10, 30)


def test_frames_are_noted() -> None:
    frames = [picture(24, 16, seed) for seed in range(2)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert applied(data).meta["frames"] == 2
    assert "frames" not in applied(encoded(frames[0], "GIF")).meta


# Checks.

CUT = jpeg(64, 64)[:-200]


def test_each_check_finds_its_kind_of_damage() -> None:
    with pytest.raises(BadImage):
        applied(CUT, check="decode")
    assert applied(CUT, check="header").fields["jpg"] == CUT
    assert applied(CUT, check="none").fields["jpg"] == CUT
    headless = b"\xff\xd8\xff\xe0" + bytes(20)
    for check in ("decode", "header"):
        with pytest.raises(BadImage):
            applied(headless, check=check)
    result = applied(headless, check="none")
    assert (result.fields["jpg"], result.meta["width"]) == (headless, 0)


@for_each("check", ["decode", "header", "none"])
def test_an_image_that_must_change_must_be_intact(check: str) -> None:
    with pytest.raises(BadImage):
        applied(CUT, check=check, resize=8)


# Planes.

PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def planes_pixels(result: Record) -> Pixels:
    return decode(result.fields["y4m"], "y4m")


@for_each("check", ["decode", "header", "none"])
@for_each(
    "options",
    [{}, {"subsampling": 0}, {"progressive": True}, {"exif": exif(6)}, {"icc_profile": PROFILE}],
)
def test_a_jpeg_is_stored_as_its_planes(options: dict[str, Any], check: str) -> None:
    data = jpeg(31, 17, **options)
    result = applied(data, encode="planes", check=check)
    assert result.image_field == "y4m"
    np.testing.assert_array_equal(planes_pixels(result), np.asarray(opened(data)))
    assert PROFILE not in result.fields["y4m"]
    assert (result.meta["width"], result.meta["height"]) == (31, 17)
    assert result.meta.get("orientation") == (6 if "exif" in options else None)


@for_each(
    "data",
    [
        png(),
        encoded(picture(), "WEBP"),
        encoded(picture(mode="CMYK")),
        jpeg(keep_rgb=True),
        encoded(picture(), "BMP"),
    ],
)
def test_images_without_planes_keep_their_bytes(data: bytes) -> None:
    assert applied(data, encode="planes") == applied(data)


def test_tolerated_damage_keeps_its_bytes() -> None:
    scan = CUT.index(b"\xff\xda")
    damaged = CUT[: scan + 20] + b"\xff\xd9"
    result = applied(damaged, encode="planes", tolerate_damage=True)
    assert result == applied(damaged, tolerate_damage=True)
    assert "damaged" in result.meta
    with refused(BadImage):
        applied(damaged, encode="planes")


def test_planes_that_give_other_pixels_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    other = planes.from_rgb(pixels(24, 16, seed=9), "420")
    coding = planes.CODING._replace(from_jpeg=lambda data: other)
    monkeypatch.setattr(planes, "CODING", coding)
    assert applied(jpeg(), encode="planes") == applied(jpeg())


@for_each("data", [jpeg(50, 40), png(50, 40)])
def test_changed_pixels_become_planes(data: bytes) -> None:
    options: dict[str, Any] = {"resize": (20, 25), "resize_mode": "stretch"}
    result = applied(data, encode="planes", **options)
    expected = stored_pixels(data, encode="png", **options)
    assert result.fields["y4m"] == planes.from_rgb(expected, "420")
    assert (result.meta["width"], result.meta["height"]) == (25, 20)


@for_each("orientation", range(2, 9))
def test_an_applied_orientation_becomes_planes(orientation: int) -> None:
    data = jpeg(31, 17, exif=exif(orientation))
    result = applied(data, encode="planes", orient=True)
    upright = np.asarray(ImageOps.exif_transpose(opened(data)))
    assert result.fields["y4m"] == planes.from_rgb(upright, "420")
    upright_already = applied(jpeg(31, 17), encode="planes", orient=True)
    assert upright_already == applied(jpeg(31, 17), encode="planes")


def test_planes_are_images_of_other_recipes() -> None:
    stored = applied(jpeg(31, 17), encode="planes")
    assert convert_record(Recipe(encode="planes"), stored).record == stored
    assert convert_record(Recipe(), stored).record == stored
    expected = stored_pixels(jpeg(31, 17), resize=8, encode="png")
    resized = convert_record(Recipe(resize=8), stored).record
    np.testing.assert_array_equal(np.asarray(opened(resized.fields["png"])), expected)
    cut = Record("a", {**stored.fields, "y4m": stored.fields["y4m"][:-1]})
    with refused(BadImage, "31", "17", "420jpeg"):
        convert_record(Recipe(), cut)


@for_each("options", [{}, {"resize": 16}])
def test_other_fields_go_with_planes(options: dict[str, Any]) -> None:
    schema = {"image": Field("image"), "mask": Field("mask"), "depth": Field("image")}
    fields = {"jpg": jpeg(31, 17), "mask.png": png(31, 17, mode="L"), "depth.jpg": jpeg(9, 8, 3)}
    both = Record("a", {**fields, "json": b'{"path":"a.jpg"}'})
    stored = convert_record(Recipe(encode="planes", **options), both, schema).record
    others = convert_record(Recipe(encode="jpeg", **options), both, schema).record
    assert stored.fields.keys() == {"y4m", "mask.png", "depth.y4m", "json"}
    assert stored.fields["mask.png"] == others.fields["mask.png"]
    assert stored.meta == others.meta


# What is refused.


@for_each(
    ("options", "message"),
    [
        ({"encode": "gif"}, "encode='gif' is unknown; choose from keep, jpeg"),
        ({"resize_mode": "cover"}, "resize_mode='cover' is unknown"),
        ({"filter": "nearest"}, "filter='nearest' is unknown"),
        ({"check": "all"}, "check='all' is unknown"),
        ({"quality": 101}, "quality=101"),
        (
            {"quality": 90, "encode": "raw", "resize": (8, 8), "resize_mode": "crop"},
            "quality has no effect with the raw encoding",
        ),
        ({"quality": 90, "encode": "planes"}, "quality has no effect with the planes encoding"),
        ({"resize": (0, 8)}, "resize"),
        ({"resize": (8, 70_000)}, "resize"),
        ({"background": (0, 0, 256)}, "background"),
        ({"background": (-1, 0, 0)}, "background"),
        (
            {"encode": "raw", "resize": (65_535, 65_535), "resize_mode": "crop"},
            "resize would produce raw images of over 4 GiB each",
        ),
        ({"encode": "raw", "resize": (8, 8), "resize_mode": "longer"}, "the raw encoding requires"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe(**options)


def test_the_description_is_complete_json() -> None:
    recipe = Recipe(resize=(8, 9), resize_mode="pad", background=GREEN, quality=80)
    described = json.loads(json.dumps(recipe.describe()))
    assert described == {
        "encode": "keep",
        "quality": 80,
        "resize": [8, 9],
        "resize_mode": "pad",
        "filter": "bicubic",
        "enlarge": False,
        "background": [0, 200, 0],
        "orient": False,
        "check": "decode",
    }


@for_each(
    ("options", "keeps"),
    [
        ({}, True),
        ({"check": "none"}, True),
        ({"encode": "jpeg"}, False),
        ({"orient": True}, False),
        ({"quality": 90}, False),
        ({"resize": 8}, False),
    ],
)
def test_keeps_bytes_is_exact(options: dict[str, Any], keeps: bool) -> None:
    assert Recipe(**options).keeps_bytes is keeps


@for_each(
    ("mode", "enlarge", "noted"),
    [
        ("shorter", False, True),
        ("crop", False, True),
        ("stretch", False, True),
        ("longer", False, False),
        ("pad", False, False),
        ("crop", True, False),
    ],
)
def test_an_image_that_is_too_small_for_the_box_is_noted(
    mode: str, enlarge: bool, noted: bool
) -> None:
    record = Record("a", {"png": png(40, 12), "json": b"{}"})
    stored = convert_record(
        Recipe(resize=(20, 30), resize_mode=mode, enlarge=enlarge), record
    ).record
    assert ("small" in stored.meta) == noted


def test_one_number_is_a_square() -> None:
    assert Recipe(resize=224).resize == (224, 224)
    assert Recipe(resize=224) == Recipe(resize=(224, 224), resize_mode="shorter")
    assert Recipe(resize=(224, 224)).resize_mode == "crop"
    assert Recipe(resize=parse_size("224X320")) == Recipe(resize=(224, 320))


def test_an_image_is_not_enlarged_beyond_the_limit() -> None:
    strip = encoded(Image.new("L", (60_000, 1)), "PNG")
    with refused(BadImage, "15360000", "256"):
        applied(strip, resize=256, enlarge=True)
