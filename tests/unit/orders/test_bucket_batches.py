"""`Buckets`: the nearest ratio, batches of one size on any ranks and engines, exact resumption."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fields import boxes_of, make_fields, size_of
from helpers import FORMATS, invoke, jpeg, make_dataset, make_tree
from PIL import Image
from refusals import refused, refuses
from torch.utils.data import ConcatDataset, DataLoader, Subset

from shardkit import Buckets, CenterCrop, EpochBatchSampler, Rank, make_loader, open_dataset
from shardkit.errors import StateMismatch, UsageError
from shardkit.orders.bucket_order import (
    BucketOrder,
    BucketSizes,
    make_buckets,
    order_members,
    parse_buckets,
)

SIZES = [(16, 24), (24, 16), (20, 20)]
BATCH = 4

Seen = list[tuple[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 JPEGs: 11 wide ones, 10 high ones and 9 squares."""
    root = tmp_path_factory.mktemp("buckets") / "photos"
    sides = [(60 + n, 40) if n % 3 == 0 else (40, 60 + n) for n in range(30) if n % 3 < 2]
    sides += [(50 + n, 50) for n in range(9)] + [(64, 42)]
    files = {f"c{n % 2}/{n:02d}.jpg": jpeg(*side, seed=n) for n, side in enumerate(sides)}
    return make_tree(root, dict(files))


@pytest.fixture(scope="module")
def path(photos: Path) -> Path:
    return make_dataset(photos, photos.parent / "lmdb")


def epoch_of(dataset: Any, **options: Any) -> Seen:
    given: dict[str, Any] = {"sampler": Buckets(SIZES), "seed": 1, "num_workers": 0} | options
    loader = make_loader(dataset, given.pop("batch_size", BATCH), with_rows=True, **given)
    return [(tuple(images.shape), rows.tolist()) for images, _, rows in loader]


@pytest.mark.parametrize("to", FORMATS)
def test_each_batch_has_the_size_of_its_images(to: str, photos: Path, tmp_path: Path) -> None:
    dataset = open_dataset(make_dataset(photos, tmp_path / to, to=to))
    sizes = np.array([image.size[::-1] for image, _ in dataset[:]])

    seen = epoch_of(dataset)

    assert len(seen) == 2 + 2 + 2
    for (count, _, height, width), rows in seen:
        assert (count, len(rows)) == (BATCH, BATCH)
        for down, across in sizes[rows].tolist():
            distances = {size: abs(np.log(across / down * size[0] / size[1])) for size in SIZES}
            assert min(distances, key=lambda size: distances[size]) == (height, width)
    assert len({row for _, rows in seen for row in rows}) == 24


def test_center_crops_are_those_of_pillow(path: Path) -> None:
    buckets = Buckets(SIZES, crop="center", oversample=math.inf)
    dataset = open_dataset(path)
    originals = open_dataset(path, decode="pil")
    for images, _, rows in make_loader(dataset, BATCH, sampler=buckets, with_rows=True):
        height, width = images.shape[2:]
        for image, row in zip(images, rows.tolist(), strict=True):
            original = originals[row][0]
            across = min(original.width, round(original.height * width / height))
            down = min(original.height, round(original.width * height / width))
            left, top = (original.width - across) // 2, (original.height - down) // 2
            part = original.crop((left, top, left + across, top + down))
            expected = part.resize((width, height), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(image.permute(1, 2, 0), np.asarray(expected))


def test_crops_are_drawn_anew_in_each_epoch_and_repeatable(path: Path) -> None:
    dataset = open_dataset(path)
    loaders = [make_loader(dataset, BATCH, sampler=Buckets(SIZES), seed=1) for _ in range(2)]
    epochs = [[[images for images, _ in loader] for _ in range(2)] for loader in loaders]
    assert all(a.equal(b) for a, b in zip(epochs[0][0], epochs[1][0], strict=True))
    assert not all(a.equal(b) for a, b in zip(epochs[0][0], epochs[0][1], strict=True))


def test_planes_give_the_same_batches(path: Path, photos: Path, tmp_path: Path) -> None:
    planes = make_dataset(photos, tmp_path / "planes", encode="planes")
    buckets = Buckets(SIZES, oversample=math.inf)  # planes are not decoded at reduced size
    batches = [
        [images for images, _ in make_loader(open_dataset(each), BATCH, sampler=buckets)]
        for each in (path, planes)
    ]
    assert all(a.equal(b) for a, b in zip(*batches, strict=True))


def test_ranks_share_each_step(path: Path) -> None:
    dataset = open_dataset(path)
    whole = epoch_of(dataset)
    ranks = [
        epoch_of(dataset, batch_size=2, rank=Rank(rank=rank, world_size=2)) for rank in range(2)
    ]
    assert [(shape[2:], rows) for shape, rows in whole] == [
        (first[0][2:], first[1] + second[1]) for first, second in zip(*ranks, strict=True)
    ]


@pytest.mark.parametrize(
    "engine", ["thread", "helper", pytest.param("process", marks=pytest.mark.slow)]
)
def test_engines_give_the_same_batches(engine: str, path: Path) -> None:
    dataset = open_dataset(path)
    assert epoch_of(dataset, engine=engine, num_workers=2) == epoch_of(dataset)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_within_an_epoch_on_other_ranks(ranks: int, path: Path) -> None:
    dataset = open_dataset(path)
    whole = [rows for _, rows in epoch_of(dataset)]
    loader = make_loader(dataset, BATCH, sampler=Buckets(SIZES), seed=1, with_rows=True)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))

    rest: list[list[int]] = [[] for _ in whole[3:]]
    for rank in range(ranks):
        resumed = make_loader(
            dataset,
            BATCH // ranks,
            sampler=Buckets(SIZES),
            seed=1,
            with_rows=True,
            rank=Rank(rank=rank, world_size=ranks),
        )
        resumed.load_state_dict(state)
        for step, (_, _, rows) in zip(rest, resumed, strict=True):
            step.extend(rows.tolist())

    assert rest == whole[3:]


def test_another_size_of_steps_does_not_resume(path: Path) -> None:
    dataset = open_dataset(path)
    state = make_loader(dataset, BATCH, sampler=Buckets(SIZES)).state_dict()
    with pytest.raises(StateMismatch, match=r"batches of 4.*batches of 2"):
        make_loader(dataset, 2, sampler=Buckets(SIZES)).load_state_dict(state)


def test_views_are_crops_of_the_same_images(path: Path) -> None:
    dataset = open_dataset(path)
    loader = make_loader(dataset, BATCH, sampler=Buckets(SIZES), views=2, seed=1, with_rows=True)
    for (first, _, rows), (second, _, again) in loader:
        assert first.shape == second.shape
        assert rows.tolist() == again.tolist()
        assert not first.equal(second)


def test_the_batch_sampler_of_a_dataloader_sets_the_operation(path: Path) -> None:
    dataset = open_dataset(path)
    sampler = EpochBatchSampler(dataset, BATCH, sampler=Buckets(SIZES), seed=1)
    ours = make_loader(dataset, BATCH, sampler=Buckets(SIZES), seed=1)
    for (images, _), (expected, _) in zip(
        DataLoader(dataset, batch_sampler=sampler), ours, strict=True
    ):
        assert images.equal(expected)


def test_parts_of_datasets_are_grouped_too(path: Path) -> None:
    dataset = open_dataset(path)
    parts: ConcatDataset[Any] = ConcatDataset(
        [Subset(dataset, list(range(20))), dataset.select(np.arange(20, 30))]
    )
    assert epoch_of(parts) == epoch_of(dataset)


def test_masks_and_boxes_follow(tmp_path: Path) -> None:
    path = make_fields(tmp_path / "fields", rows=12, whole=True)
    dataset = open_dataset(path, fields=("image", "mask", "boxes"), as_dict=True)
    bucket = Buckets([(12, 16)], crop="center")
    for batch in make_loader(dataset, 2, sampler=bucket, with_rows=True, num_workers=0):
        assert batch["image"].shape == (2, 3, 12, 16)
        assert batch["mask"].shape[-2:] == (12, 16)
        for boxes, row in zip(batch["boxes"], batch["rows"].tolist(), strict=True):
            width, height = size_of(row)
            across = min(width, round(height * 16 / 12))
            down = min(height, round(width * 12 / 16))
            left, top = (width - across) // 2, (height - down) // 2
            scale = np.array([16 / across, 12 / down] * 2)
            whole = (np.array(boxes_of(row)).reshape(-1, 5)[:, :4] - [left, top] * 2) * scale
            expected = whole.clip(0, [16, 12] * 2)
            kept = (expected[:, 2:] > expected[:, :2]).all(axis=1)
            np.testing.assert_allclose(boxes[:, :4], expected[kept], atol=1e-4)


def test_options_that_contradict_buckets_are_refused(path: Path) -> None:
    wrong: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"samples_per_epoch": 8}, ("samples_per_epoch=",)),
        ({"aug_repeats": 2}, ("aug_repeats=",)),
        ({"views": [CenterCrop(8)]}, ("views=2",)),
        ({"shuffle": True}, ("shuffle=", "sampler=")),
        ({"resident": "cpu"}, ("resident=",)),
        ({"sampler": Buckets}, ("Buckets(...)",)),
        ({"sampler": Buckets(SIZES, weights=[1, 2])}, ("2 weights", "30 rows")),
    ]
    for options, facts in wrong:
        with refused(UsageError, *facts):
            make_loader(open_dataset(path), BATCH, **({"sampler": Buckets(SIZES)} | options))
    of_buckets: list[tuple[dict[str, Any], str]] = [
        ({"crop": "edge"}, "crop='edge'"),
        ({"weights": [1, 2], "leftovers": "carry"}, "leftovers='carry'"),
        ({"flip": 2}, "flip=2"),
    ]
    for options, fact in of_buckets:
        with refused(UsageError, fact):
            Buckets(SIZES, **options)


def test_datasets_without_sizes_are_refused(path: Path, photos: Path, tmp_path: Path) -> None:
    raw = make_dataset(photos, tmp_path / "raw", encode="raw", resize="8x8")
    cropped, others = open_dataset(path, decode=CenterCrop(8)), [1, 2, 3]
    wrong: list[tuple[Any, str]] = [
        (open_dataset(raw), "8x8"),
        (cropped, "decode="),
        (others, "list"),
    ]
    for dataset, fact in wrong:
        with refused(UsageError, fact):
            make_loader(dataset, 1, sampler=Buckets(SIZES))


def test_a_bucket_without_a_batch_is_reported_before_the_first_batch(path: Path) -> None:
    with pytest.raises(UsageError, match="20x20 has 9"):
        make_loader(open_dataset(path), 10, sampler=Buckets(SIZES))


def test_info_shows_what_each_bucket_gets(path: Path) -> None:
    counts = Buckets(SIZES).count(open_dataset(path))
    described = json.loads(invoke("info", path, "--buckets", "16x24,24x16,20x20", "--json").output)
    shown = described["datasets"][""]["buckets"]
    assert [(tuple(b["size"]), b["images"], b["cropped"]) for b in shown] == counts
    assert "20x20   9 images" in invoke("info", path, "--buckets", "16x24,24x16,20x20").output
    refuses(2, "info", path, "--buckets", "16by24", facts=("--buckets 16by24", "HEIGHTxWIDTH"))


# Buckets: the nearest aspect ratio, and batches of one bucket each.

OF_IMAGES = make_buckets([(512, 512), (448, 576), (576, 448)])


def make_order(buckets: list[int], step: int, weights: Any = None, **options: Any) -> BucketOrder:
    values = None if weights is None else np.asarray(weights, np.float64)
    counts, members, cumulative = order_members(np.array(buckets), 3, values)
    order = BucketOrder(
        size=len(buckets),
        seed=3,
        sizes=OF_IMAGES,
        counts=counts,
        members=members,
        cumulative=cumulative,
        **options,
    )
    batched = order.in_batches(step)
    assert isinstance(batched, BucketOrder)
    return batched


def order_of(order: BucketOrder, epoch: int) -> list[int]:
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

    epochs = [order_of(order, epoch) for epoch in range(3)]

    for rows in epochs:
        steps = [[buckets[row] for row in rows[at : at + 4]] for at in range(0, len(rows), 4)]
        assert all(len(set(step)) == 1 for step in steps)
        assert Counter(step[0] for step in steps) == {0: 5, 1: 2, 2: 3}
        assert len(set(rows)) == len(rows) == 40
    assert len({tuple(rows) for rows in epochs}) == 3


def test_different_rows_are_left_over_in_each_epoch() -> None:
    order = make_order([0] * 7, 4)
    left = {frozenset(range(7)) - frozenset(order_of(order, epoch)) for epoch in range(8)}
    assert len(left) > 4


def test_carried_rows_come_first_in_the_next_epoch() -> None:
    buckets = [0] * 7 + [1] * 9
    order = make_order(buckets, 4, carries=True)
    counts: Counter[int] = Counter()
    for epoch in range(9):
        counts.update(order_of(order, epoch))
        for bucket in (0, 1):
            seen = [counts[row] for row in range(16) if buckets[row] == bucket]
            assert max(seen) - min(seen) <= 1


def test_rows_are_drawn_by_weight() -> None:
    buckets, weights = [0] * 40 + [1] * 40, [1.0] * 20 + [0.0] * 20 + [3.0] * 40
    order = make_order(buckets, 8, weights)

    rows = [row for epoch in range(50) for row in order_of(order, epoch)]
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
