"""Masks, boxes and keypoints follow the geometry of their image."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from helpers import encoded
from PIL import Image
from refusals import refused
from table import for_each

from shardkit.codecs.geometry import (
    VISIBLE,
    Boxes,
    Frame,
    move_boxes,
    move_mask,
    move_points,
    swap_sides,
)
from shardkit.codecs.image import decode_mask, encode_mask
from shardkit.errors import BadImage

Corner = tuple[Fraction, Fraction]


def frames(count: int) -> list[Frame]:
    """Return random views, with pieces inside an image and beyond it."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        image = rng.randint(1, 60), rng.randint(1, 60)
        whole = rng.choice([image, (rng.randint(1, 90), rng.randint(1, 90))])
        width, height = rng.randint(1, 70), rng.randint(1, 70)
        piece = rng.randint(-9, whole[0]), rng.randint(-9, whole[1]), width, height
        size = rng.choice([(width, height), (rng.randint(1, 50), rng.randint(1, 50))])
        found.append(Frame(image, whole, piece, size, rng.random() < 0.5))
    return found


def seen(frame: Frame, x: Fraction, y: Fraction) -> Corner:
    """Return where a point of the image is in the frame, in exact arithmetic."""
    left, top, width, height = frame.crop
    across = (x * frame.scaled[0] / frame.image[0] - left) * frame.size[0] / width
    down = (y * frame.scaled[1] / frame.image[1] - top) * frame.size[1] / height
    return (frame.size[0] - across if frame.flip else across), down


def moved_exactly(frame: Frame, box: list[float]) -> list[Fraction] | None:
    """Return the reference for `move_boxes`; None if the box is dropped or nearly so."""
    corners = [seen(frame, Fraction(x), Fraction(y)) for x in box[::2] for y in box[1::2]]
    spans = [(min(c[axis] for c in corners), max(c[axis] for c in corners)) for axis in (0, 1)]
    clipped = [
        [min(max(place, Fraction(0)), Fraction(side)) for place in span]
        for span, side in zip(spans, frame.size, strict=True)
    ]
    area = (spans[0][1] - spans[0][0]) * (spans[1][1] - spans[1][0])
    visible = (clipped[0][1] - clipped[0][0]) * (clipped[1][1] - clipped[1][0])
    if visible < Fraction(VISIBLE) * area:
        return None
    return [clipped[0][0], clipped[1][0], clipped[0][1], clipped[1][1]]


def test_boxes_equal_exact_arithmetic() -> None:
    rng = np.random.default_rng(1)
    count = 0
    for frame in frames(300):
        corners = np.sort(rng.uniform(0, 1, (8, 2, 2)) * frame.image, axis=1)
        boxes: Boxes = corners.reshape(8, 4)
        expected = [moved_exactly(frame, box.tolist()) for box in boxes]

        moved, kept = move_boxes(boxes, frame)

        assert kept.tolist() == [box is not None for box in expected]
        rest = np.array([box for box in expected if box is not None], float).reshape(-1, 4)
        assert np.abs(moved - rest).max(initial=0) < 1e-9
        count += len(moved)
    assert count > 500


def test_a_box_of_no_area_stays_while_it_touches_the_crop() -> None:
    boxes = np.array([[5.0, 5, 5, 5], [40, 5, 40, 5], [0, 3, 0, 8]])
    crop = Frame((50, 50), (50, 50), (0, 0, 10, 10), (10, 10))

    moved, kept = move_boxes(boxes, crop)

    assert kept.tolist() == [True, False, True]
    assert moved.tolist() == [[5, 5, 5, 5], [0, 3, 0, 8]]


def test_no_boxes() -> None:
    moved, kept = move_boxes(np.zeros((0, 4)), frames(1)[0])

    assert moved.shape == (0, 4)
    assert kept.shape == (0,)


def test_keypoints_equal_exact_arithmetic() -> None:
    """A point keeps its place among the others; outside of the frame it is (0, 0, 0)."""
    rng = np.random.default_rng(5)
    names, inside = ("nose", "left_eye", "right_eye", "Rear"), 0
    for frame in frames(300):
        points = rng.uniform(0, 1, (2, 4, 3)) * (*frame.image, 1)
        points[..., 2] = rng.integers(0, 3, (2, 4))
        expected = np.zeros((2, 4, 3))
        for person, place in np.ndindex(2, 4):
            x, y, visibility = points[person, place]
            exact = seen(frame, Fraction(x), Fraction(y))
            if visibility and all(0 <= a <= b for a, b in zip(exact, frame.size, strict=True)):
                other = {1: 2, 2: 1}.get(place, place) if frame.flip else place
                expected[person, other] = *map(float, exact), visibility
                inside += 1
        assert np.abs(move_points(points, frame, names) - expected).max() < 1e-9
        flat = move_points(points.reshape(-1, 3), frame._replace(flip=False))
        assert np.array_equal(flat, move_points(points, frame._replace(flip=False)).reshape(-1, 3))
    assert inside > 300


def test_left_and_right_change_places_in_any_spelling() -> None:
    names = ("Left hand", "tail", "handRIGHT", "Right hand", "bright", "handLEFT", "left_only")
    points = np.arange(21.0).reshape(7, 3)
    assert swap_sides(points, names)[:, 0].tolist() == [9, 3, 15, 0, 12, 6, 18]


def test_masks_equal_pillows_nearest_neighbor() -> None:
    rng = np.random.default_rng(2)
    for frame in frames(200):
        if frame.scaled != frame.image:
            continue
        left, top, width, height = frame.crop
        mask = rng.integers(1, 256, frame.image[::-1], np.uint8)
        image = Image.fromarray(mask).crop((left, top, left + width, top + height))
        image = image.resize(frame.size, Image.Resampling.NEAREST)
        across, down = sure(width, frame.size[0]), sure(height, frame.size[1])

        moved = move_mask(mask, frame)[:, :: -1 if frame.flip else 1]

        assert np.array_equal(moved[np.ix_(down, across)], np.asarray(image)[np.ix_(down, across)])


def sure(length: int, size: int) -> list[int]:
    """Return the pixels whose center is not on an edge, where Pillow's fractions round either way.

    Without scaling, all are.
    """
    return [n for n in range(size) if length == size or (2 * n + 1) * length % (2 * size)]


def test_a_scaled_whole_equals_scaling_and_cropping() -> None:
    rng = np.random.default_rng(3)
    mask = rng.integers(0, 9, (30, 40, 3), np.uint8)
    whole = np.asarray(Image.fromarray(mask).resize((20, 16), Image.Resampling.NEAREST))

    moved = move_mask(mask, Frame((40, 30), (20, 16), (3, -2, 10, 12), (10, 12)))

    assert np.array_equal(moved[2:], whole[:10, 3:13])
    assert not moved[:2].any()


@for_each("mode", ["1", "L", "P", "I;16", "RGB"])
def test_a_mask_keeps_its_values(mode: str) -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 2 if mode == "1" else 256, (7, 5), np.uint8)
    image = Image.fromarray(values)
    if mode == "1":
        image = Image.fromarray(values.astype(bool))
    elif mode == "P":
        image.putpalette(bytes(range(256)) * 3)
    elif mode == "I;16":
        values = rng.integers(0, 65536, (7, 5), np.uint16)
        image = Image.fromarray(values)
    elif mode == "RGB":
        values = rng.integers(0, 256, (7, 5, 3), np.uint8)
        image = Image.fromarray(values)

    decoded = decode_mask(encoded(image, "PNG"), "png")

    assert decoded.dtype == values.dtype
    assert np.array_equal(decoded, values)
    assert np.array_equal(decode_mask(encode_mask(decoded), "png"), values)


def test_a_mask_of_fractions_or_32_bits_is_refused() -> None:
    for values in (np.full((2, 2), 0.5, np.float32), np.full((2, 2), 70000, np.int32)):
        with refused(BadImage):
            decode_mask(encoded(Image.fromarray(values), "TIFF"), "tiff")


def test_values_that_no_png_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 of shape \(2, 2\)"):
        encode_mask(np.zeros((2, 2), np.float32))
