"""Requests fill the link: files come one after another, and blocks without pauses between them."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import DEADLINE, wait_until

from shardkit.stores import fetch
from shardkit.stores.cache import BLOCK, Cache, RemoteFile, open_cache

SIZE = 12 * BLOCK


class Gate:
    """A store whose reads wait until the gate opens."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.open = threading.Event()

    def read(self, name: str, start: int, end: int) -> memoryview:
        self.asked.append((name, start // BLOCK))
        assert self.open.wait(DEADLINE)
        return memoryview(bytes(end - start))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(fetch, "open_store", lambda _: made)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(tmp_path / "cache", None)


def test_one_file_after_another_is_requested(gate: Gate, cache: Cache) -> None:
    digest = hashlib.sha256(bytes(SIZE)).hexdigest()
    files = [RemoteFile("s3://bucket", name, SIZE, digest) for name in "ab"]
    with ThreadPoolExecutor(2) as threads:
        done = [
            threads.submit(fetch.fetch_file, cache, file, cache.folder / "shards" / file.name)
            for file in files
        ]
        wait_until(lambda: len(gate.asked) == 8, "requests")
        gate.open.set()
        for each in done:
            each.result(DEADLINE)

    names = "".join(name for name, _ in gate.asked)
    assert names in (12 * "a" + 12 * "b", 12 * "b" + 12 * "a")


def test_blocks_join_those_that_are_being_fetched(gate: Gate, cache: Cache) -> None:
    file = RemoteFile("s3://bucket", "shard", SIZE, "a" * 64)
    with ThreadPoolExecutor(2) as threads:
        ahead = threads.submit(fetch.blocks_ahead, cache, file, [0, 1])
        wait_until(lambda: len(gate.asked) == 2, "requests")
        fetch.blocks_ahead(cache, file, [5, 7, 6])  # returns at once
        urgent = threads.submit(fetch.blocks, cache, file, [3])
        wait_until(lambda: 3 in fetch._pending[file], "the note")
        gate.open.set()
        for each in (ahead, urgent):
            each.result(DEADLINE)

    assert sorted(gate.asked) == [("shard", number) for number in (0, 1, 3, 5, 6, 7)]
    assert cache.has_blocks(file, [0, 1, 3, 5, 6, 7])
    assert not cache.has_blocks(file, [2])
    assert not fetch._pending
