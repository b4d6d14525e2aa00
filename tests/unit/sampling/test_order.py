"""The order of an epoch of any length: a permutation, frozen, and statistically random."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from refusals import refused

from shardkit import BlockShuffle, EpochBatchSampler
from shardkit.errors import UsageError
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import Draws, Order, Positions, derive_key, mix, permute

GOLDEN = 0x9E3779B97F4A7C15
MASK = 2**64 - 1

SIZES = st.sampled_from([0, 1, 2, 3, 4095, 4096, 4097, 4098, 4160]) | st.integers(0, 6000)
SEEDS = st.integers(-(2**63), 2**63 - 1)
EPOCHS = st.integers(0, 10**6)


@st.composite
def shuffles(draw: st.DrawFn) -> bool | BlockShuffle:
    if draw(st.booleans()):
        return draw(st.booleans())
    rows = draw(st.integers(1, 70) | st.sampled_from([4096, 4097, 7000]))
    return BlockShuffle(rows=rows, buffer=rows + draw(st.integers(0, 300) | st.integers(0, 9000)))


def whole(order: Order, epoch: int = 0) -> Positions:
    return order.rows(epoch, np.arange(order.size))


def chi_square(counts: npt.NDArray[Any]) -> float:
    """Return the deviation of counts from uniform ones, in standard deviations."""
    expected = counts.sum() / counts.size
    free = np.prod([length - 1 for length in counts.shape])
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


def assert_even(counts: npt.NDArray[Any]) -> None:
    """Fail if counts are less uniform than random ones, or more; seeds are fixed."""
    assert -3.5 < chi_square(counts) < 5


def bins(values: npt.NDArray[Any], size: int, number: int) -> npt.NDArray[np.int64]:
    """Return the bin of each value below ``size``."""
    found: npt.NDArray[np.int64] = np.asarray(values, np.int64) * number // size
    return found


def test_the_statistic_of_these_tests_detects_bias() -> None:
    chance = np.random.default_rng(1)
    assert_even(np.bincount(chance.integers(0, 32, 32_000), minlength=32))
    slightly = np.where(np.arange(32) < 16, 1050, 950)
    for counts in (slightly, np.full(32, 1000)):
        with pytest.raises(AssertionError):
            assert_even(counts)


@given(SIZES, shuffles(), SEEDS, EPOCHS)
def test_an_epoch_holds_every_row_once(
    size: int, shuffle: bool | BlockShuffle, seed: int, epoch: int
) -> None:
    rows = whole(Order(size=size, shuffle=shuffle, seed=seed), epoch)
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(size))


@given(SIZES.filter(bool), shuffles(), SEEDS, EPOCHS, st.data())
def test_any_positions_give_the_rows_of_the_full_epoch(
    size: int, shuffle: bool | BlockShuffle, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = Order(size=size, shuffle=shuffle, seed=seed)
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=40)), np.int64)
    found = order.rows(epoch, positions)  # before the whole: nothing may be kept from there
    assert found.dtype == np.int64
    assert np.array_equal(found, whole(order, epoch)[positions])


def test_positions_are_not_modified() -> None:
    positions = np.arange(5000)[::-3]
    before = positions.copy()
    for shuffle in (False, True, BlockShuffle(), BlockShuffle(rows=1, buffer=1)):
        Order(size=5000, shuffle=shuffle).rows(3, positions)
        Order(size=5000, shuffle=shuffle).ahead(3, positions)
        assert np.array_equal(positions, before)


def _mixed(value: int) -> int:
    value &= MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def _key(purpose: str, seed: int, epoch: int) -> int:
    text = f"shardkit {purpose} {seed} {epoch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _permutation(size: int, key: int) -> list[int]:
    if size <= 4096:
        return sorted(range(size), key=lambda j: _mixed(key + (j + 1) * GOLDEN))
    return [_sent(number, size, key) for number in range(size)]


def _sent(number: int, size: int, key: int) -> int:
    a = next(a for a in range(math.isqrt(size), size) if a * a >= size)
    b = -(-size // a)
    while True:
        left, right = divmod(number, b)
        for turn in range(8):
            step = _mixed(key + turn * GOLDEN)
            if turn % 2:
                right = (right + _mixed(left + step) % b) % b
            else:
                left = (left + _mixed(right + step) % a) % a
        number = left * b + right
        if number < size:
            return number


def by_the_book(size: int, shuffle: bool | BlockShuffle, seed: int, epoch: int) -> list[int]:
    """Return an epoch as specified in docs/order.md, in Python integers."""
    if isinstance(shuffle, bool):
        key = _key("rows", seed, epoch)
        return _permutation(size, key) if shuffle else list(range(size))
    r, window = shuffle.rows, shuffle.buffer // shuffle.rows * shuffle.rows
    places: list[int] = []
    for number, start in enumerate(range(0, size, window)):
        key = _mixed(_key("window", seed, epoch) + number * GOLDEN)
        places += [start + to for to in _permutation(min(window, size - start), key)]
    key = _key("blocks", seed, epoch)
    slots = [*_permutation(size // r, key), size // r]
    return [(slots[q // r] * r + q % r + _mixed(key)) % size for q in places]


@settings(max_examples=25)
@given(SIZES, shuffles(), SEEDS, EPOCHS)
def test_the_order_is_the_documented_one(
    size: int, shuffle: bool | BlockShuffle, seed: int, epoch: int
) -> None:
    order = Order(size=size, shuffle=shuffle, seed=seed)
    assert whole(order, epoch).tolist() == by_the_book(size, shuffle, seed, epoch)


@pytest.mark.parametrize(
    ("order", "epoch", "rows"),
    [
        (Order(size=10, shuffle=True), 0, [8, 7, 6, 4, 5, 1, 2, 9, 0, 3]),
        (Order(size=10, shuffle=True), 1, [2, 3, 0, 4, 5, 8, 6, 7, 9, 1]),
        (Order(size=4096, shuffle=True, seed=7), 3, [2073, 2981, 2668, 824, 2412, 553]),
        (Order(size=4097, shuffle=True, seed=7), 3, [1299, 3118, 63, 1885, 2374, 2024]),
        (Order(size=1_281_167, shuffle=True, seed=42), 89, [260352, 1179761, 387249, 1143314]),
        (Order(size=10**12, shuffle=True, seed=1), 0, [499670255046, 740381221865, 190970549042]),
        (
            Order(size=10, shuffle=BlockShuffle(rows=3, buffer=6)),
            0,
            [9, 7, 8, 5, 3, 4, 0, 1, 2, 6],
        ),
        (
            Order(size=50_000, shuffle=BlockShuffle(), seed=7),
            3,
            {0: 45779, 1: 9048, 16383: 29890, 16384: 43235, 32768: 18757, 49999: 24310},
        ),
        (
            Order(size=1_281_167, shuffle=BlockShuffle(rows=64, buffer=100_000), seed=-5),
            2,
            {0: 1218303, 99967: 188936, 99968: 1140260, 640_000: 404824, 1_281_166: 365216},
        ),
    ],
)
def test_the_order_is_frozen(order: Order, epoch: int, rows: list[int] | dict[int, int]) -> None:
    # A change of these numbers spoils the state of every run that is to go on.
    expected = rows if isinstance(rows, dict) else dict(enumerate(rows))
    found = order.rows(epoch, np.array(list(expected)))
    assert found.tolist() == list(expected.values())


def test_keys_and_hashes_are_frozen() -> None:
    assert derive_key("rows", 0, 0) == 13148866796536914498
    assert derive_key("draws", -3, 12) == 1783303985323626662
    # The first outputs of SplitMix64 from state 0, as its authors' program prints them.
    states = np.arange(1, 5, dtype=np.uint64) * np.uint64(GOLDEN)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert mix(states).tolist() == published
    assert mix(np.array([0, 1, MASK], np.uint64)).tolist() == [0, _mixed(1), _mixed(MASK)]


def test_purposes_seeds_and_epochs_have_different_keys() -> None:
    parts = itertools.product(("rows", "window", "draws"), (-1, 0, 1, 11, 2**62), (0, 1, 11, 111))
    keys = [derive_key(*part) for part in parts]
    assert len(set(keys)) == len(keys)


def test_the_stored_order_is_that_of_each_epoch() -> None:
    order = Order(size=10)
    assert whole(order, 0).tolist() == whole(order, 7).tolist() == list(range(10))


@pytest.mark.parametrize("size", [1000, 4096, 4097, 6000])
def test_each_row_is_as_likely_at_each_position(size: int) -> None:
    order = Order(size=size, shuffle=True, seed=2)
    counts = np.zeros((16, 16), np.int64)
    for epoch in range(100):
        np.add.at(counts, (bins(np.arange(size), size, 16), bins(whole(order, epoch), size, 16)), 1)
    assert_even(counts)


def distinct_classes(order: Order, epoch: int) -> float:
    """Return the mean number of classes in batches of 64 of 100 classes, 300 of each, sorted."""
    labels = whole(order, epoch) // 300
    batches = [labels[start : start + 64] for start in range(0, order.size - 63, 64)]
    return float(np.mean([len(set(batch.tolist())) for batch in batches]))


@pytest.mark.parametrize("shuffle", [True, BlockShuffle()])
def test_batches_of_sorted_data_are_as_varied_as_promised(shuffle: bool | BlockShuffle) -> None:
    for seed, epoch in ((0, 0), (1, 1), (2, 0)):
        order = Order(size=30_000, shuffle=shuffle, seed=seed)
        assert 45 <= distinct_classes(order, epoch) <= 49  # 47.4 is ideal


@pytest.mark.parametrize(("rows", "buffer"), [(1, 1), (16, 64), (7, 30), (16, 2048)])
def test_a_window_mixes_full_blocks_of_neighbors(rows: int, buffer: int) -> None:
    size = 5000
    blocks = BlockShuffle(rows=rows, buffer=buffer)
    order = Order(size=size, shuffle=blocks, seed=8)
    found = whole(order, 5)
    for start in range(0, size - blocks.window, blocks.window):
        # A block is a run of neighbours, round the end; a window of them has so many beginnings.
        members = set(found[start : start + blocks.window].tolist())
        begin = [row for row in members if (row - 1) % size not in members]
        assert len(members) == blocks.window
        assert len(begin) <= blocks.window // rows


@pytest.mark.parametrize(
    ("size", "blocks", "batch"),
    pairwise(
        [0, 1, 63, 65, 200, 1001],
        [BlockShuffle(rows=16, buffer=64), BlockShuffle(rows=5, buffer=17)],
        [1, 10, 80, 999],
    ),
)
def test_readahead_covers_every_row_of_later_windows_in_time(
    size: int, blocks: BlockShuffle, batch: int
) -> None:
    order = Order(size=size, shuffle=blocks, seed=9)
    rows = whole(order, 2)
    times: Counter[int] = Counter()
    for start in range(0, size, batch):
        ahead = order.ahead(2, np.arange(start, min(start + batch, size))).tolist()
        assert len(set(ahead)) == len(ahead)
        times.update(ahead)
        # What is read next, in the window after this batch's first position, is announced.
        late = set(rows[blocks.window : (start // blocks.window + 1) * blocks.window].tolist())
        assert late <= times.keys()
    assert times.keys() == set(rows[blocks.window :].tolist())
    if batch % blocks.rows == 0:
        assert set(times.values()) <= {1}  # and once, where batches hold whole blocks


def test_a_batch_reads_ahead_about_as_much_as_it_reads() -> None:
    order = Order(size=100_000, shuffle=BlockShuffle(), seed=1)
    assert len(order.ahead(0, np.arange(64))) == 64
    assert len(order.ahead(0, np.arange(10, 74))) == 80
    assert len(order.ahead(0, np.arange(100_000 - 64, 100_000))) == 0


def test_without_blocks_there_is_no_readahead() -> None:
    for shuffle in (False, True):
        assert len(Order(size=100_000, shuffle=shuffle).ahead(0, np.arange(64))) == 0
    assert len(Order(size=100_000, shuffle=BlockShuffle()).ahead(0, np.arange(0))) == 0


def draw(key: int, row: int, number: int, how: Callable[[Draws], float]) -> list[float]:
    draws = Draws(key, row)
    return [how(draws) for _ in range(number)]


def test_draws_are_frozen() -> None:
    assert draw(0, 0, 3, Draws.bits) == [
        4720248854425330031,
        1629287585893752162,
        5358695149628781184,
    ]
    draws = Draws(derive_key("draws", 7, 3), 12345)
    assert [draws.bits() for _ in range(3)] == [
        10662253368702702175,
        15305364129499369895,
        3672571554753870278,
    ]
    assert (draws.uniform(), draws.uniform(-1, 3)) == (0.016864269222590877, 1.1881242586990566)
    assert (draws.below(10), draws.below(1000)) == (5, 753)


@given(st.integers(0, MASK), st.integers(0, 2**62))
def test_draws_are_a_function_of_key_and_row(key: int, row: int) -> None:
    found = draw(key, row, 5, Draws.bits)
    assert found == draw(key, row, 5, Draws.bits)
    assert len(set(found)) == 5
    assert not set(found) & set(draw(key, row + 1, 5, Draws.bits))
    assert not set(found) & set(draw(key ^ 1, row, 5, Draws.bits))


@pytest.mark.parametrize("number", [0, 1, 7])
def test_draws_of_neighboring_rows_are_even_and_independent(number: int) -> None:
    key = derive_key("draws", 0, 0)
    found = np.array([draw(key, row, number + 1, Draws.uniform)[-1] for row in range(16_000)])
    assert found.min() >= 0
    assert found.max() < 1
    assert abs(found.mean() - 0.5) < 5 / math.sqrt(12 * len(found))
    assert_even(np.bincount((found * 32).astype(int), minlength=32))
    pairs = np.zeros((8, 8), np.int64)
    np.add.at(pairs, tuple((found.reshape(-1, 2).T * 8).astype(int)), 1)
    assert_even(pairs)


def test_integers_below_a_limit_are_even() -> None:
    for limit in (1, 2, 7, 10, 1000):
        draws = Draws(3, 4)
        found = [draws.below(limit) for _ in range(max(4000, 20 * limit))]
        assert set(found) <= set(range(limit))
        if limit > 1:
            assert_even(np.bincount(found, minlength=limit))


def test_draws_stay_in_their_range() -> None:
    draws = Draws(5, 6)
    found = [draws.uniform(-2.0, 3.0) for _ in range(4000)]
    assert -2 <= min(found) < -1.98
    assert 2.98 < max(found) < 3
    assert Draws(5, 6).uniform(4.0, 4.0) == 4


def test_the_largest_bits_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draws, "bits", lambda _: MASK)
    assert Draws(0, 0).uniform() < 1
    assert [Draws(0, 0).below(limit) for limit in (1, 3, 10**9, 2**63)] == [
        0,
        2,
        10**9 - 1,
        2**63 - 1,
    ]


def test_global_generators_do_not_affect_an_order() -> None:
    def everything() -> list[Any]:
        orders = [Order(size=5000, shuffle=shuffle) for shuffle in (True, BlockShuffle())]
        return [
            *(whole(order, 1).tolist() for order in orders),
            *(order.ahead(1, np.arange(64)).tolist() for order in orders),
            permute(9, 1, np.arange(9)).tolist(),
            draw(1, 2, 3, Draws.uniform),
        ]

    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state(legacy=False)
    expected = everything()
    after = random.getstate(), np.random.get_state(legacy=False)
    np.testing.assert_equal(after, before)
    random.seed(2)
    np.random.seed(2)
    assert everything() == expected


def test_a_seed_may_be_any_integer_type() -> None:
    expected = Order(size=9, shuffle=True, seed=3)
    for seed in (np.int64(3), np.uint8(3)):
        found = Order(size=9, shuffle=True, seed=seed)  # type: ignore[arg-type]
        assert (type(found.seed), found) == (int, expected)
        assert whole(found).tolist() == whole(expected).tolist()


def test_invalid_options_are_usage_errors() -> None:
    seeds: list[Any] = [True, 1.0, "1", None, np.float64(2), 2**63, -(2**63) - 1]
    for seed in seeds:
        with refused(UsageError, f"seed={seed!r}"):
            Order(size=5, seed=seed)
    shuffles: list[Any] = [1, 0, "True", (16, 64)]
    for shuffle in shuffles:
        with refused(UsageError, f"shuffle={shuffle!r}"):
            EpochBatchSampler(range(5), 1, shuffle=shuffle)
    sizes: list[tuple[str, Any]] = [("rows", 0), ("rows", -4), ("rows", 1.5)]
    for name, value in [*sizes, ("buffer", 0), ("buffer", "64")]:
        with refused(UsageError, f"{name}={value!r}"):
            BlockShuffle(**{name: value})
    with refused(UsageError, "65", "64"):
        BlockShuffle(rows=65, buffer=64)


def test_a_window_is_the_full_blocks_of_a_buffer() -> None:
    assert [BlockShuffle(rows=r, buffer=w).window for r, w in ((16, 64), (16, 79), (7, 7))] == [
        64,
        64,
        7,
    ]


# Epochs of any length are cut from one sequence of passes.

SHUFFLES = st.sampled_from([False, True, BlockShuffle(rows=2, buffer=6)])


def epoch(epochs: Epochs, order: Order, number: int) -> Positions:
    return epochs.rows(order, number, np.arange(epochs.size(order)))


@given(
    st.integers(1, 30),
    SHUFFLES,
    st.none() | st.integers(1, 70),
    st.integers(1, 4),
    st.lists(st.integers(0, 200), max_size=9),
)
def test_epochs_follow_each_other_in_the_sequence_of_passes(
    size: int,
    shuffle: bool | BlockShuffle,
    samples: int | None,
    repeats: int,
    chosen: list[int],
) -> None:
    order = Order(size=size, shuffle=shuffle, seed=1)
    epochs = Epochs(samples_per_epoch=samples, aug_repeats=repeats)
    found = np.concatenate([epoch(epochs, order, number) for number in range(4)])
    passes = -(-len(found) // (size * repeats))
    expected = [order.rows(number, np.arange(size)).repeat(repeats) for number in range(passes)]
    assert found.tolist() == np.concatenate(expected)[: len(found)].tolist()
    length = epochs.size(order)
    positions = np.array(chosen, np.int64) % length
    picked = epochs.rows(order, 3, positions)
    assert picked.tolist() == found[3 * length :][positions].tolist()


def test_the_default_is_the_order_itself() -> None:
    order = Order(size=9, shuffle=True)
    assert epoch(Epochs(), order, 2).tolist() == order.rows(2, np.arange(9)).tolist()
    assert not Epochs().recurs
    assert Epochs(views=2).recurs
    assert Epochs(views=2).size(order) == 9


def test_late_epochs_do_not_overflow() -> None:
    order = Order(size=5, shuffle=True)
    epochs = Epochs(samples_per_epoch=2**40)
    late = epochs.rows(order, 2**60, np.array([2**40 - 1]))
    assert 0 <= late.item() < 5


def test_readahead_is_for_the_pass_of_the_last_position() -> None:
    order = Order(size=40, shuffle=BlockShuffle(rows=2, buffer=8), seed=3)
    epochs = Epochs(samples_per_epoch=30, aug_repeats=2)
    for start in range(0, 30, 3):
        at = np.arange(start, start + 3)
        ahead = set(epochs.ahead(order, 1, at).tolist())
        first, place = divmod(30 + start, 80)
        inside = np.arange(place, min(place + 3, 80)) // 2
        assert ahead == set(order.ahead(first, inside).tolist())
    assert len(epochs.ahead(order, 0, np.empty(0, np.int64))) == 0


def test_an_empty_order_has_empty_epochs_of_its_own_length_only() -> None:
    empty = Order(size=0)
    assert epoch(Epochs(aug_repeats=3), empty, 1).tolist() == []
    with pytest.raises(UsageError, match="not empty"):
        Epochs(samples_per_epoch=1).size(empty)


def test_wrong_numbers_are_refused() -> None:
    values: list[Any] = [0, -1, 1.5, True, "2"]
    for name, value in itertools.product(("samples_per_epoch", "aug_repeats", "views"), values):
        with refused(UsageError, f"{name}={value!r}"):
            Epochs(**{name: value})
