"""Requests fill the link: files come one after another."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import DEADLINE, wait_until

from shardkit.remote import fetch
from shardkit.remote.cache import BLOCK, Cache, RemoteFile, open_cache

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
