"""Masks, boxes and keypoints follow the changes that a recipe makes to their image."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from refusals import refused

from shardkit import Field
from shardkit.codecs.geometry import VISIBLE
from shardkit.codecs.image import decode_mask, encode_mask
from shardkit.errors import BadImage
from shardkit.pipeline import convert_record
from shardkit.recipe import Recipe
from shardkit.record import Record

SCHEMA = {
    "image": Field("image"),
    "mask": Field("mask"),
    "boxes": Field("boxes", classes=("a", "b", "c")),
    "points": Field("keypoints", classes=("left", "right")),
    "right": Field("image"),
}
MODES = ("shorter", "longer", "crop", "pad", "stretch")


def jpeg(pixels: Any, orientation: int = 1) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "jpeg", quality=95, exif=exif)
    return file.getvalue()


def make(
    mask: Any, boxes: list[list[Any]], orientation: int = 1, points: list[list[Any]] | None = None
) -> Record:
    pixels = np.zeros((*mask.shape, 3), np.uint8)
    return Record(
        "k",
        {
            "jpg": jpeg(pixels, orientation),
            "mask.png": encode_mask(mask),
            "right.jpg": jpeg(pixels, orientation),
            "json": json.dumps({"path": "p", "boxes": boxes, "points": points or []}).encode(),
        },
    )


def turned(x: Fraction, y: Fraction, size: tuple[int, int], orientation: int) -> Any:
    """Return where EXIF's table puts a point of the stored image in the upright one."""
    width, height = size
    row, column = {
        1: (y, x),
        2: (y, width - x),
        3: (height - y, width - x),
        4: (height - y, x),
        5: (x, y),
        6: (x, height - y),
        7: (width - x, height - y),
        8: (width - x, y),
    }[orientation]
    return column, row


def reference(
    box: list[Any], size: tuple[int, int], orientation: int, recipe: Recipe
) -> list[Fraction] | None:
    """Return a box under a recipe, in exact numbers; None if it is dropped."""
    points = [
        turned(Fraction(box[a]), Fraction(box[b]), size, orientation) for a, b in ((0, 1), (2, 3))
    ]
    upright = size if orientation < 5 else size[::-1]
    scaled, canvas = recipe.geometry(*upright)
    placed = []
    for axis in (0, 1):
        shift = round((scaled[axis] - canvas[axis]) / 2)
        low, high = sorted(
            point[axis] * scaled[axis] / Fraction(upright[axis]) - shift for point in points
        )
        placed.append((low, high, canvas[axis]))
    area = (placed[0][1] - placed[0][0]) * (placed[1][1] - placed[1][0])
    if any(high < 0 or low > limit for low, high, limit in placed):
        return None
    clipped = [
        (min(max(low, Fraction(0)), Fraction(limit)), min(max(high, Fraction(0)), Fraction(limit)))
        for low, high, limit in placed
    ]
    seen = (clipped[0][1] - clipped[0][0]) * (clipped[1][1] - clipped[1][0])
    if seen < Fraction(VISIBLE) * area:
        return None
    return [clipped[0][0], clipped[1][0], clipped[0][1], clipped[1][1]]


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.integers(1, 8),
    st.booleans(),
)
def test_boxes_follow_an_independent_reference(  # noqa: PLR0917 - hypothesis
    data: st.DataObject,
    mode: str,
    size: tuple[int, int],
    box: tuple[int, int],
    orientation: int,
    enlarge: bool,
) -> None:
    sides = [st.floats(0, side, width=32) for side in size]
    corners = st.tuples(*sides, *sides).map(
        lambda c: [min(c[0], c[2]), min(c[1], c[3]), max(c[0], c[2]), max(c[1], c[3])]
    )
    boxes = [[*each, n % 3] for n, each in enumerate(data.draw(st.lists(corners, max_size=4)))]
    recipe = Recipe(resize=box, resize_mode=mode, enlarge=enlarge, quality=90, orient=True)
    record = make(np.zeros(size[::-1], np.uint8), boxes, orientation)
    found = convert_record(recipe, record, SCHEMA).record.meta["boxes"]
    expected = [
        [*place, each[4]] for each in boxes if (place := reference(each, size, orientation, recipe))
    ]
    borderline = len(found) != len(expected) and any(_is_borderline(b, size) for b in boxes)
    if borderline:
        return
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[4] == other[4]
        assert one[:4] == pytest.approx([float(place) for place in other[:4]], abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.integers(1, 8),
)
def test_keypoints_follow_an_independent_reference(
    data: st.DataObject,
    mode: str,
    size: tuple[int, int],
    box: tuple[int, int],
    orientation: int,
) -> None:
    place = st.tuples(*(st.floats(0, side, width=32) for side in size), st.integers(0, 2))
    points = [list(data.draw(place)) for _ in range(4)]
    recipe = Recipe(resize=box, resize_mode=mode, enlarge=True, quality=90, orient=True)
    record = make(np.zeros(size[::-1], np.uint8), [], orientation, points)
    made, notes = convert_record(recipe, record, SCHEMA)
    upright = size if orientation < 5 else size[::-1]
    scaled, canvas = recipe.geometry(*upright)
    expected = []
    for x, y, visibility in points:
        both = turned(Fraction(x), Fraction(y), size, orientation)
        at = [
            both[axis] * scaled[axis] / Fraction(upright[axis])
            - round((scaled[axis] - canvas[axis]) / 2)
            for axis in (0, 1)
        ]
        edges = [abs(at[axis] - edge) for axis in (0, 1) for edge in (0, canvas[axis])]
        assume(all(each == 0 or each > 1e-9 for each in edges))  # rounding decides
        if upright == scaled == canvas and orientation == 1:
            expected.append([x, y, visibility])
        elif visibility and all(0 <= at[axis] <= canvas[axis] for axis in (0, 1)):
            expected.append([*map(float, at), visibility])
        else:
            expected.append([0, 0, 0])
    if orientation in (2, 4, 5, 7):  # mirrored: left is right
        expected = [expected[place] for place in (1, 0, 3, 2)]
    found = made.meta["points"]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    seen = sum(point[2] > 0 for point in points) - sum(point[2] > 0 for point in found)
    assert notes.get("dropped", 0) == (seen > 0)


def _is_borderline(box: list[Any], size: tuple[int, int]) -> bool:
    """Return whether rounding can decide: boxes without area, or that touch the edge."""
    return bool(box[0] == box[2] or box[1] == box[3] or box[0] == size[0] or box[1] == size[1])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MODES),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_masks_follow_their_image_and_get_no_new_value(  # noqa: PLR0917
    mode: str,
    size: tuple[int, int],
    box: tuple[int, int],
    orientation: int,
    deep: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    high, dtype = (65536, np.uint16) if deep else (256, np.uint8)
    mask = rng.integers(1, high, size[::-1]).astype(dtype)
    recipe = Recipe(resize=box, resize_mode=mode, enlarge=True, orient=True)
    found = convert_record(recipe, make(mask, [], orientation), SCHEMA).record
    values = decode_mask(found.fields["mask.png"], "png")
    meta = found.meta
    assert (meta["mask"]["width"], meta["mask"]["height"]) == (meta["width"], meta["height"])
    assert values.shape == (meta["height"], meta["width"])
    assert {*values.flat} <= {*mask.flat, 0}
    if mode != "pad":
        assert 0 not in values
    # The pixel of the mask at the center of each pixel of the result.
    upright = size if orientation < 5 else size[::-1]
    scaled, canvas = recipe.geometry(*upright)
    left, top = (round((a - b) / 2) for a, b in zip(scaled, canvas, strict=True))
    back = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
    for y, x in np.ndindex(values.shape):
        place = (
            (Fraction(2 * x + 1, 2) + left) * upright[0] / scaled[0],
            (Fraction(2 * y + 1, 2) + top) * upright[1] / scaled[1],
        )
        inside = all(0 <= at < side for at, side in zip(place, upright, strict=True))
        if not inside:
            assert values[y, x] == 0
            continue
        column, row = turned(
            Fraction(2 * int(place[0]) + 1, 2), Fraction(2 * int(place[1]) + 1, 2), upright, back
        )
        assert values[y, x] == mask[int(row), int(column)]


def test_nothing_moves_without_a_change() -> None:
    record = make(np.full((4, 5), 7, np.uint8), [[0, 0, 1, 1, 2]])
    found = convert_record(Recipe(), record, SCHEMA).record
    for name in ("jpg", "mask.png", "right.jpg"):
        assert found.fields[name] == record.fields[name]
    assert found.meta["boxes"] == [[0, 0, 1, 1, 2]]
    assert found.meta["right"] == found.meta["mask"] == {"width": 5, "height": 4}


def test_a_mask_is_never_lossy_or_re_encoded_as_the_image() -> None:
    record = make(np.full((4, 5), 7, np.uint8), [])
    found = convert_record(Recipe(encode="jpeg", quality=80), record, SCHEMA).record
    assert found.fields["mask.png"] == record.fields["mask.png"]
    assert "right.jpg" in found.fields
    lossy = Record("k", {**record.fields, "mask.jpg": jpeg(np.zeros((4, 5, 3), np.uint8))})
    del lossy.fields["mask.png"]  # type: ignore[attr-defined]
    with refused(BadImage):
        convert_record(Recipe(), lossy, SCHEMA)


def test_a_mask_of_another_size_is_refused() -> None:
    record = make(np.full((4, 5), 7, np.uint8), [])
    other = Record("k", {**record.fields, "mask.png": encode_mask(np.zeros((5, 5), np.uint8))})
    for recipe in (Recipe(), Recipe(resize=2)):
        with refused(BadImage, "5 x 5", "5 x 4"):
            convert_record(recipe, other, SCHEMA)


def test_dropped_boxes_are_noted() -> None:
    record = make(np.zeros((10, 30), np.uint8), [[0, 0, 2, 2, 0], [12, 0, 16, 5, 1]])
    found, notes = convert_record(Recipe(resize=(10, 10), resize_mode="crop"), record, SCHEMA)
    assert found.meta["boxes"] == [[2, 0, 6, 5, 1]]
    assert notes == {"dropped": 1}


def test_a_damaged_mask_is_a_bad_image() -> None:
    record = make(np.zeros((10, 30), np.uint8), [])
    content = record.fields["mask.png"][:-20]
    for recipe in (Recipe(), Recipe(resize=4)):
        with pytest.raises(BadImage, match="mask: "):
            convert_record(recipe, Record("k", {**record.fields, "mask.png": content}), SCHEMA)


def test_raw_pixels_apply_to_images_but_not_to_masks() -> None:
    recipe = Recipe(encode="raw", resize=(3, 4), resize_mode="stretch")
    found = convert_record(recipe, make(np.full((6, 8), 9, np.uint8), []), SCHEMA).record
    assert len(found.fields["raw"]) == len(found.fields["right.raw"]) == 36
    assert (decode_mask(found.fields["mask.png"], "png") == 9).all()
