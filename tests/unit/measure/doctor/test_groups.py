"""A few images that take most of the time are named by the most specific property."""

from __future__ import annotations

from shardkit.measure.doctor.groups import Group, slowest_group
from shardkit.measure.doctor.stored import Header

USUAL = [Header("jpg", 400, 300, 9000, n % 4) for n in range(90)]


def slowest(slow: list[Header], seconds: float = 0.1) -> Group | None:
    times = [0.001] * len(USUAL) + [seconds] * len(slow)
    return slowest_group(times, [*USUAL, *slow], ["a", "b", "c", "d", "maps"])


def test_a_class_is_named_before_its_encoding_and_size() -> None:
    found = slowest([Header("png", 4000, 3000, 9, 4)] * 10)

    assert found is not None
    assert (found.by, found.name, found.kind, found.images) == ("class", "maps", "png", 0.1)
    assert round(found.time, 2) == 0.92
    assert found.megapixels == 12


def test_an_encoding_is_named_before_the_size() -> None:
    found = slowest([Header("png", 4000, 3000, 9, n % 4) for n in range(10)])

    assert found is not None
    assert (found.by, found.name) == ("encoding", "png")


def test_the_largest_images_are_named() -> None:
    found = slowest([Header("jpg", 4000, 3000, 9, n % 4) for n in range(10)])

    assert found is not None
    assert (found.by, found.name, found.kind) == ("size", "", "jpg")


def test_one_outlier_is_not_a_group() -> None:
    assert slowest([Header("jpg", 400, 300, 9, n % 4) for n in range(9)], 0.0015) is None
    times = [0.001] * 89 + [5.0]
    assert slowest_group(times, USUAL, None) is None
