"""Epochs of any length are cut from one sequence of passes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from shardkit import BlockShuffle, UsageError
from shardkit.sampling.epochs import Epochs
from shardkit.sampling.order import Order, Positions

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
