"""Packed and stored entries: the same entries as in a list, in a fraction of its memory."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Iterator

from shardkit.contracts import Entry, PackedEntries, StoredEntries
from shardkit.record import NO_LABEL

ENTRIES = [
    Entry("cat/größe ★.jpg", "cat/gr%C3%B6%C3%9Fe%20%E2%98%85", 0, 0, 0),
    Entry("cat/\udcff.png", "cat/%FF", 0, 2**33, 2**62, 2**63 - 1),
    Entry("plain", "plain", NO_LABEL, 1, -1, 7, '{"age":1,"name":"ü"}'),
]


def test_entries_survive_a_round_trip() -> None:
    packed = PackedEntries(iter(ENTRIES))
    assert list(packed) == ENTRIES
    assert [packed[row] for row in range(-3, 3)] == ENTRIES * 2
    assert list(PackedEntries(())) == []


def test_take_gives_rows_in_the_requested_order() -> None:
    taken = PackedEntries(ENTRIES).take([2, 0, 2, 1])
    assert list(taken) == [ENTRIES[row] for row in (2, 0, 2, 1)]
    assert list(taken.take(range(1, 3))) == list(taken[1:3]) == [ENTRIES[0], ENTRIES[2]]


def test_a_pickled_copy_holds_only_its_own_entries() -> None:
    packed = PackedEntries(ENTRIES * 1000).take([1, 2])
    assert len(pickle.dumps(packed)) < 500
    assert pickle.loads(pickle.dumps(packed)) == ENTRIES[1:]


def test_slices_of_stored_entries_share_the_piece_in_memory() -> None:
    loads: list[int] = []

    def load(piece: int) -> list[Entry]:
        loads.append(piece)
        return ENTRIES[:2] if piece == 0 else ENTRIES[2:]

    stored = StoredEntries(load, [0, 2, 3])
    assert list(stored[:1]) == ENTRIES[:1]
    assert list(stored[:2][1:]) == ENTRIES[1:2]
    assert loads == [0]
    assert list(stored[1:]) == ENTRIES[1:]
    assert loads == [0, 1]
    assert pickle.loads(pickle.dumps(stored[1:])) == ENTRIES[1:]


def test_memory_is_the_text_and_few_bytes() -> None:
    def entries() -> Iterator[Entry]:
        for number in range(20_000):
            name = f"n01440764/n01440764_{number:05d}"
            yield Entry(f"{name}.JPEG", name, number // 1000, number, 10**18 + number)

    tracemalloc.start()
    packed = PackedEntries(entries())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(packed) < 120  # 55 are text; a list takes over 400
