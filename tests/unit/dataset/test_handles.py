"""The pool of open shards: bounded, safe across forks and threads, and never stale."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE, in_fork
from refusals import refused

from shardkit import ShardkitError
from shardkit.contracts import Range
from shardkit.dataset import handles
from shardkit.dataset.handles import ShardFile, shard_file, shard_reader
from shardkit.errors import CorruptShard
from shardkit.record import Record

MAX_OPEN = 16


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test with nothing open and few allowed."""
    monkeypatch.setattr(handles, "MAX_OPEN", MAX_OPEN)
    handles._POOL.reset()


def make_file(path: Path, content: bytes = b"0123456789") -> Path:
    path.write_bytes(content)
    return path


def open_below(folder: Path) -> list[str]:
    """Return the files below ``folder`` that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found


def test_a_shard_gives_the_bytes_of_a_range(tmp_path: Path) -> None:
    file = shard_file(make_file(tmp_path / "a"), 10, "id")
    assert file.read(0, 10) == b"0123456789"
    assert file.read(3, 2) == b"34"
    assert file.read(10, 0) == b""
    for offset, length in ((0, 10), (5, 0), (9, 100), (2**62, 2**32 - 1), (-1, 5)):
        file.announce(offset, length)


def test_a_range_outside_of_the_file_is_damage(tmp_path: Path) -> None:
    file = shard_file(make_file(tmp_path / "a"), 10, "id")
    ranges = [(0, 11), (10, 1), (9, 2), (2**62, 1), (0, 2**62), (-1, 5), (-(2**63), 1)]
    for offset, length in ranges:
        with pytest.raises(CorruptShard, match=str(tmp_path / "a")):
            file.read(offset, length)


def test_a_file_truncated_while_open_is_damage(tmp_path: Path) -> None:
    file = shard_file(make_file(tmp_path / "a"), 10, "id")
    os.truncate(tmp_path / "a", 5)
    with pytest.raises(CorruptShard, match="byte 5"):
        file.read(3, 4)


def test_a_size_other_than_the_manifests_is_damage(tmp_path: Path) -> None:
    make_file(tmp_path / "a")
    for size in (0, 9, 11):
        with pytest.raises(CorruptShard, match=f"{tmp_path}/a .*10 bytes.* {size}"):
            shard_file(tmp_path / "a", size, "id")
    assert open_below(tmp_path) == []


def test_a_missing_shard_is_damage_until_restored(tmp_path: Path) -> None:
    with refused(CorruptShard, tmp_path / "a"):
        shard_file(tmp_path / "a", 10, "id")
    make_file(tmp_path / "a")
    assert shard_file(tmp_path / "a", 10, "id").read(0, 1) == b"0"


def test_the_same_shard_is_opened_once(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a")
    assert shard_file(path, 10, "id") is shard_file(path, 10, "id")
    assert len(open_below(tmp_path)) == 1


def test_the_number_of_open_files_is_limited(tmp_path: Path) -> None:
    for number in range(MAX_OPEN + 40):
        path = make_file(tmp_path / str(number))
        assert shard_file(path, 10, "id").read(0, 1) == b"0"
    assert len(open_below(tmp_path)) == MAX_OPEN


def test_the_least_recently_used_is_closed_first(tmp_path: Path) -> None:
    paths = [make_file(tmp_path / str(number)) for number in range(MAX_OPEN + 1)]
    for path in paths[:-1]:
        shard_file(path, 10, "id")
    shard_file(paths[0], 10, "id")
    shard_file(paths[-1], 10, "id")
    assert set(open_below(tmp_path)) == set(map(str, paths)) - {str(paths[1])}


def test_an_evicted_handle_is_readable_until_released(tmp_path: Path) -> None:
    held = shard_file(make_file(tmp_path / "held", b"abcdefghij"), 10, "id")
    for number in range(MAX_OPEN + 5):
        shard_file(make_file(tmp_path / str(number)), 10, "id")
    assert held.read(2, 3) == b"cde"
    assert str(tmp_path / "held") in open_below(tmp_path)
    del held
    assert str(tmp_path / "held") not in open_below(tmp_path)


def test_a_rewritten_shard_gets_a_new_handle(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a")
    assert shard_file(path, 10, "old").read(0, 3) == b"012"
    make_file(tmp_path / "b", b"abcdefghij").replace(path)
    assert shard_file(path, 10, "new").read(0, 3) == b"abc"


class FakeReader:
    """A format's reader that counts its callers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = 0
        self.meta: Mapping[str, Any] = {}
        self.inside = 0
        self.crowded = False

    def __len__(self) -> int:
        return 1000

    def read(self, rows: Sequence[int]) -> list[Record]:
        self.inside += 1
        self.crowded |= self.inside > 1
        records = [Record(str(row), {}) for row in rows for _ in range(50)][::50]
        self.inside -= 1
        return records

    def ranges(self) -> Sequence[Mapping[str, Range]]:
        return []

    def close(self) -> None:
        self.closed += 1


def test_a_format_reader_serves_one_thread_at_a_time(tmp_path: Path) -> None:
    made: list[FakeReader] = []

    def read(path: Path) -> FakeReader:
        made.append(FakeReader(path))
        return made[-1]

    wrong: list[int] = []

    def work(first: int) -> None:
        for row in range(first, first + 200):
            (record,) = shard_reader(tmp_path / "a", "id", read).read([row])
            if record.key != str(row):
                wrong.append(row)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (0, 200, 400, 600)))
    assert wrong == []
    assert len(made) == 1
    assert not made[0].crowded


def test_a_format_reader_is_closed_on_eviction(tmp_path: Path) -> None:
    made: list[FakeReader] = []

    def read(path: Path) -> FakeReader:
        made.append(FakeReader(path))
        return made[-1]

    held = shard_reader(tmp_path / "held", "id", read)
    shard_reader(tmp_path / "a", "id", read)
    for number in range(MAX_OPEN):
        shard_file(make_file(tmp_path / str(number)), 10, "id")
    assert [reader.closed for reader in made] == [0, 1]
    assert held.read([7])[0].key == "7"
    del held
    assert [reader.closed for reader in made] == [1, 1]


def test_threads_read_the_right_bytes_while_handles_come_and_go(tmp_path: Path) -> None:
    paths = [make_file(tmp_path / str(number), f"{number:010d}".encode()) for number in range(23)]
    wrong: list[int] = []

    def work(step: int) -> None:
        for turn in range(500):
            number = turn * step % len(paths)
            if shard_file(paths[number], 10, "id").read(0, 10) != f"{number:010d}".encode():
                wrong.append(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, (1, 7, 11, 13)))
    assert wrong == []
    assert len(open_below(tmp_path)) == MAX_OPEN


def test_a_child_reads_even_if_a_parents_thread_held_the_lock(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a")
    inside, leave = threading.Event(), threading.Event()

    def slow(path: Path) -> FakeReader:
        inside.set()
        leave.wait(DEADLINE)
        return FakeReader(path)

    thread = threading.Thread(target=shard_reader, args=(tmp_path / "slow", "id", slow))
    thread.start()
    assert inside.wait(DEADLINE)

    def read() -> bool:
        reader = threading.Thread(target=shard_file, args=(path, 10, "id"), daemon=True)
        reader.start()
        reader.join(DEADLINE / 2)  # a lock that is never released would hold it for ever
        return not reader.is_alive() and shard_file(path, 10, "id").read(0, 1) == b"0"

    try:
        assert in_fork(read) == 0
    finally:
        leave.set()
        thread.join()


def test_a_child_does_not_keep_the_files_of_its_parent_open(tmp_path: Path) -> None:
    path = make_file(tmp_path / "a")
    shard_file(path, 10, "id")

    def read() -> bool:
        before = open_below(tmp_path)
        return (before, shard_file(path, 10, "id").read(0, 10)) == ([], b"0123456789")

    assert in_fork(read) == 0
    assert shard_file(path, 10, "id").read(0, 10) == b"0123456789"


def test_files_are_not_inherited_by_programs(tmp_path: Path) -> None:
    file = ShardFile(make_file(tmp_path / "a"), 10)
    assert not os.get_inheritable(file.descriptor)


def refuse(*_: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_what_the_device_cannot_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shard_file(make_file(tmp_path / "a"), 10, "id")
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(os, "pread", refuse)
    assert not file.read_cached(0, memoryview(bytearray(5)))
    reads: list[Callable[[], object]] = [
        lambda: file.read(2, 5),
        lambda: file.read_ranges(2, [0, 4]),
    ]
    for read in reads:
        with refused(OSError, tmp_path / "a", os.strerror(errno.EIO)):
            read()


def test_ranges_of_a_file_come_in_order_or_are_damage(tmp_path: Path) -> None:
    file = shard_file(make_file(tmp_path / "a"), 10, "id")
    assert file.read_ranges(2, [4, 0]) == b"4501"
    os.truncate(tmp_path / "a", 5)
    with pytest.raises(CorruptShard, match="byte 6"):
        file.read_ranges(2, [4, 0])


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    make_file(tmp_path / "a")

    def refuses() -> bool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        try:
            shard_file(tmp_path / "a", 10, "id")
        except ShardkitError as error:
            return not isinstance(error, CorruptShard) and "too many files" in str(error)
        return False

    assert in_fork(refuses) == 0


def maps_of(folder: Path) -> int:
    """Return how many files below ``folder`` this process has mapped."""
    return Path("/proc/self/maps").read_text("utf-8").count(f" {folder}/")


def test_a_shard_is_mapped_once_and_until_it_is_closed(tmp_path: Path) -> None:
    file = ShardFile(make_file(tmp_path / "a"), 10)
    if file.map is None:
        pytest.skip("nothing is copied from maps here")
    assert file.map is file.map
    assert maps_of(tmp_path) == 1

    del file

    assert maps_of(tmp_path) == 0


def test_nothing_is_mapped_where_address_space_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 34, resource.RLIM_INFINITY))

    assert ShardFile(make_file(tmp_path / "a"), 10).map is None
