"""Buckets: the nearest aspect ratio, and batches of one bucket each."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from refusals import refused

from shardkit import UsageError
from shardkit.orders.bucket_order import (
    BucketOrder,
    BucketSizes,
    make_buckets,
    order_members,
    parse_buckets,
)

SIZES = make_buckets([(512, 512), (448, 576), (576, 448)])


def make_order(buckets: list[int], step: int, weights: Any = None, **options: Any) -> BucketOrder:
    values = None if weights is None else np.asarray(weights, np.float64)
    counts, members, cumulative = order_members(np.array(buckets), 3, values)
    order = BucketOrder(
        size=len(buckets),
        seed=3,
        sizes=SIZES,
        counts=counts,
        members=members,
        cumulative=cumulative,
        **options,
    )
    batched = order.in_batches(step)
    assert isinstance(batched, BucketOrder)
    return batched


def epoch_of(order: BucketOrder, epoch: int) -> list[int]:
    rows: list[int] = order.rows(epoch, np.arange(order.size)).tolist()
    return rows


def test_an_image_belongs_to_the_nearest_aspect_ratio() -> None:
    sizes = BucketSizes.by_area(512 * 512, step=64, ratio=3)
    random = np.random.default_rng(0)
    widths, heights = random.integers(1, 3000, (2, 500))

    buckets = sizes.nearest_of(widths, heights).tolist()

    for width, height, bucket in zip(widths.tolist(), heights.tolist(), buckets, strict=True):
        distances = [abs(math.log(width / height) - math.log(w / h)) for h, w in sizes.sizes]
        assert distances[bucket] == pytest.approx(min(distances))
        assert sizes.nearest(width, height) == bucket


def test_sizes_by_area_are_the_largest_of_their_width() -> None:
    sizes = BucketSizes.by_area(512 * 512, step=64, ratio=2).sizes

    assert set(sizes) >= {(512, 512), (448, 576), (576, 448), (384, 640), (640, 384)}
    for height, width in sizes:
        assert height % 64 == width % 64 == 0
        assert height * width <= 512 * 512
        assert 0.5 <= width / height <= 2
        assert min((height + 64) * width, (width + 64) * height) > 512 * 512 or height == width


WRONG: list[tuple[Any, str]] = [
    ([], "0 buckets"),
    ([(0, 5)], "(0, 5)"),
    ([(5, 5.0)], "(5, 5.0)"),
    ([(4, 4), (2, 2)], "4x4"),
    ([5, 6], "[5, 6]"),
    ([(1, 1 << 20)], "(1, 1048576)"),
]


def test_sizes_that_are_none_are_refused() -> None:
    for sizes, fact in WRONG:
        with refused(UsageError, fact):
            make_buckets(sizes)
    for text in ("", "512x", "512,512", "0", "1x1,,2x3"):
        with refused(UsageError, text):
            parse_buckets(text)


def test_a_text_names_buckets() -> None:
    assert len(parse_buckets("512").sizes) == 5
    assert len(parse_buckets("512x512,448x576").sizes) == 2


def test_each_step_has_one_bucket_and_no_row_comes_twice() -> None:
    buckets = [0] * 21 + [1] * 8 + [2] * 14
    order = make_order(buckets, 4)

    epochs = [epoch_of(order, epoch) for epoch in range(3)]

    for rows in epochs:
        steps = [[buckets[row] for row in rows[at : at + 4]] for at in range(0, len(rows), 4)]
        assert all(len(set(step)) == 1 for step in steps)
        assert Counter(step[0] for step in steps) == {0: 5, 1: 2, 2: 3}
        assert len(set(rows)) == len(rows) == 40
    assert len({tuple(rows) for rows in epochs}) == 3


def test_different_rows_are_left_over_in_each_epoch() -> None:
    order = make_order([0] * 7, 4)
    left = {frozenset(range(7)) - frozenset(epoch_of(order, epoch)) for epoch in range(8)}
    assert len(left) > 4


def test_carried_rows_come_first_in_the_next_epoch() -> None:
    buckets = [0] * 7 + [1] * 9
    order = make_order(buckets, 4, carries=True)
    counts: Counter[int] = Counter()
    for epoch in range(9):
        counts.update(epoch_of(order, epoch))
        for bucket in (0, 1):
            seen = [counts[row] for row in range(16) if buckets[row] == bucket]
            assert max(seen) - min(seen) <= 1


def test_rows_are_drawn_by_weight() -> None:
    buckets, weights = [0] * 40 + [1] * 40, [1.0] * 20 + [0.0] * 20 + [3.0] * 40
    order = make_order(buckets, 8, weights)

    rows = [row for epoch in range(50) for row in epoch_of(order, epoch)]
    counts = Counter(rows)

    assert not any(counts[row] for row in range(20, 40))
    assert sum(counts[row] for row in range(40, 80)) == 50 * 64  # 120/140 of 10 batches, in full
    expected = 50 * 8 / 20
    assert all(abs(counts[row] - expected) < 6 * expected**0.5 for row in range(20))


def test_a_bucket_that_fills_no_batch_is_named() -> None:
    with pytest.raises(UsageError, match=r"1 of 3 buckets .* batch of 4 .*448x576 has 3"):
        make_order([0] * 8 + [1] * 8 + [2] * 3, 4)


def test_an_empty_bucket_is_left_out() -> None:
    assert make_order([0] * 8, 4).size == 8


def test_the_state_names_batches_and_rows() -> None:
    texts = {
        make_order([0] * 8, 4).describe(),
        make_order([0] * 8, 2).describe(),
        make_order([0] * 8, 2, carries=True).describe(),
        make_order([0] * 4 + [1] * 4, 2).describe(),
        make_order([0] * 8, 2, [1] * 8).describe(),
    }
    assert len(texts) == 5


def test_cropped_pixels_are_counted() -> None:
    sizes = make_buckets([(100, 100), (100, 200)])
    square, wide = sizes.count([(np.array([100, 120, 200]), np.array([100, 100, 100]))])
    assert (square.size, square.images, square.cropped) == ((100, 100), 2, 1 - 20_000 / 22_000)
    assert (wide.size, wide.images, wide.cropped) == ((100, 200), 1, 0.0)
