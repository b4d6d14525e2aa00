"""The cache fetches each file once, keeps its limit, and removes only what it created."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest
from helpers import python, wait_until

from shardkit.errors import CorruptDataset, CorruptShard, ShardkitError, UsageError
from shardkit.stores.cache import Cache, Fill, RemoteFile, open_cache, pin

SIZE = 1000


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def remote(number: int) -> RemoteFile:
    digest = hashlib.sha256(content(number)).hexdigest()
    return RemoteFile("s3://bucket", f"shard-{number}", SIZE, digest)


def filling(data: bytes) -> Fill:
    return lambda descriptor: void(os.pwrite(descriptor, data, 0))


def void(_: object) -> None:
    """Return nothing."""


def fetch(cache: Cache, number: int) -> Path:
    file = remote(number)
    path = cache.shard(file.sha256)
    cache.fetch(file, path, filling(content(number)))
    return path


def names(cache: Cache) -> set[str]:
    return {path.name for path in (cache.folder / "shards").iterdir()}


def test_a_file_is_fetched_once(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)
    path, calls = cache.shard(remote(1).sha256), []

    def fill(descriptor: int) -> None:
        calls.append(1)
        time.sleep(0.05)
        os.pwrite(descriptor, content(1), 0)

    threads = [threading.Thread(target=cache.fetch, args=(remote(1), path, fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert calls == [1]
    assert path.read_bytes() == content(1)
    assert names(cache) == {path.name}


def test_other_content_is_fetched_again_then_refused(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)
    path = cache.shard(remote(1).sha256)
    answers = [content(2), content(1)]
    cache.fetch(remote(1), path, lambda d: void(os.pwrite(d, answers.pop(0), 0)))
    assert path.read_bytes() == content(1)
    path.unlink()

    with pytest.raises(CorruptShard, match=r"s3://bucket/shard-1 differs from the manifest"):
        cache.fetch(remote(1), path, filling(content(2)))

    assert not names(cache)


def test_a_failed_fetch_leaves_nothing(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)

    def fail(_: int) -> None:
        raise ShardkitError("no")

    with pytest.raises(ShardkitError, match="no"):
        cache.fetch(remote(1), cache.shard(remote(1).sha256), fail)

    assert not names(cache)


def test_the_shards_used_last_stay(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", 2 * SIZE)
    (tmp_path / "cache" / "shards" / "mine").write_bytes(content(0) * 9)
    (tmp_path / "cache" / "shards" / "link").symlink_to(tmp_path)
    first, second = fetch(cache, 1), fetch(cache, 2)
    os.utime(second, ns=(0, 0))

    third = fetch(cache, 3)

    assert names(cache) == {first.name, third.name, "mine", "link"}


def test_a_shard_that_is_handed_over_stays(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", SIZE)
    first = fetch(cache, 1)
    pinned = pin(first)
    assert pinned is not None

    second = fetch(cache, 2)  # one shard beyond the limit
    assert names(cache) == {first.name, second.name}
    os.close(pinned)
    third = fetch(cache, 3)

    assert names(cache) == {third.name}
    assert pin(first) is None


def test_a_killed_fetch_leaves_a_part_that_the_next_one_replaces(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", SIZE)
    code = (
        "import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from shardkit.stores.cache import *\n"
        f"cache = open_cache(Path(sys.argv[1]), {SIZE})\n"
        "def fill(descriptor):\n"
        "    os.pwrite(descriptor, b'part', 0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"for digest in ({remote(1).sha256!r}, {remote(2).sha256!r}):\n"
        "    if not os.fork():\n"
        f"        file = RemoteFile('s3://bucket', 'shard', {SIZE}, digest)\n"
        "        cache.fetch(file, cache.shard(digest), fill)\n"
        "    os.wait()\n"
    )
    assert python(code, cache.folder).returncode == 0
    part = cache.shard(remote(2).sha256).with_suffix(".part")
    assert names(cache) == {part.name}  # that of the first was evicted

    path = fetch(cache, 2)

    assert names(cache) == {path.name}
    assert path.read_bytes() == content(2)


def test_a_process_that_makes_no_progress_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkit.stores.cache._STALLED_SECONDS", 0.1)
    cache = open_cache(tmp_path / "cache", None)
    path, stop = cache.shard(remote(1).sha256), threading.Event()
    holder = threading.Thread(
        target=cache.fetch,
        args=(remote(1), path, lambda d: stop.wait(20) and filling(content(1))(d)),
    )
    holder.start()
    wait_until(lambda: names(cache), "the fetch")

    with pytest.raises(ShardkitError, match="makes no progress"):
        fetch(cache, 1)

    stop.set()
    holder.join(20)
    assert path.read_bytes() == content(1)


def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)

    for sha256 in ("/etc/passwd", "../../photos", "", "A" * 64, f"{'a' * 64}\n"):
        with pytest.raises(CorruptDataset, match="is not a SHA-256"):
            cache.shard(sha256)


def test_only_an_empty_folder_becomes_a_cache(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")

    with pytest.raises(UsageError, match=r"holds other files \(cat.jpg\)"):
        open_cache(tmp_path / "photos", None)
    with pytest.raises(UsageError, match="cannot be used"):
        open_cache(tmp_path / "photos" / "cat.jpg", None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "CACHEDIR.TAG").write_bytes(b"Signature: of another program")
    with pytest.raises(UsageError, match="another program"):
        open_cache(tmp_path / "other", None)

    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert open_cache(tmp_path / "new" / "cache", 5) == open_cache(tmp_path / "new" / "cache", 5)
