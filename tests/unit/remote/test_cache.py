"""The cache fetches each file once, keeps its limit, and removes only what it created."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import python, wait_until
from refusals import refused

from shardkit import ShardkitError
from shardkit.errors import CorruptDataset, CorruptShard, UsageError
from shardkit.remote import cache as cache_module
from shardkit.remote.cache import Cache, Fill, RemoteFile, open_cache, pin

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
    path, calls = cache.shard(remote(1).sha256), list[int]()
    begun = list[int]()

    def fill(descriptor: int) -> None:
        calls.append(1)
        wait_until(lambda: len(begun) == 4, "the other threads")
        os.pwrite(descriptor, content(1), 0)

    def fetch_too(number: int) -> None:
        begun.append(number)
        cache.fetch(remote(1), path, fill)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch_too, range(4)))

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

    with refused(CorruptShard, "s3://bucket/shard-1"):
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
        "from pathlib import Path; from shardkit.remote.cache import *\n"
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
    monkeypatch.setattr("shardkit.remote.cache._STALLED_SECONDS", 0.1)
    cache = open_cache(tmp_path / "cache", None)
    path = cache.shard(remote(1).sha256)
    started, stop = threading.Event(), threading.Event()

    def hold(descriptor: int) -> None:
        started.set()
        stop.wait()
        filling(content(1))(descriptor)

    holder = threading.Thread(target=cache.fetch, args=(remote(1), path, hold), daemon=True)
    holder.start()
    assert started.wait(60)

    with refused(ShardkitError):
        fetch(cache, 1)

    stop.set()
    holder.join()
    assert path.read_bytes() == content(1)


def test_a_manifest_cannot_name_a_file_outside(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)

    for sha256 in ("/etc/passwd", "../../photos", "", "A" * 64, f"{'a' * 64}\n"):
        with refused(CorruptDataset, "SHA", "-256"):
            cache.shard(sha256)


def test_only_an_empty_folder_becomes_a_cache(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")

    with refused(UsageError):
        open_cache(tmp_path / "photos", None)
    with refused(UsageError):
        open_cache(tmp_path / "photos" / "cat.jpg", None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "CACHEDIR.TAG").write_bytes(b"Signature: of another program")
    with pytest.raises(UsageError, match="another program"):
        open_cache(tmp_path / "other", None)

    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    assert open_cache(tmp_path / "new" / "cache", 5) == open_cache(tmp_path / "new" / "cache", 5)


@pytest.mark.parametrize("name", ["", "shards", "datasets"])
def test_a_cache_that_others_can_write_needs_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    previous = os.umask(0)
    try:
        cache = open_cache(tmp_path / "cache", None)
        path = fetch(cache, 1)
    finally:
        os.umask(previous)
    for created in (cache.folder, path.parent, path):
        assert not created.stat().st_mode & 0o022
    (cache.folder / name).chmod(0o775)

    with pytest.raises(UsageError, match=r"can write .*; or set SHARDKIT_STORE_SHARED_CACHE=1 if"):
        open_cache(cache.folder, None)

    monkeypatch.setenv("SHARDKIT_STORE_SHARED_CACHE", "1")
    assert fetch(open_cache(cache.folder, None), 1) == path


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: it changes a folder's owner")
def test_a_cache_of_another_user_needs_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(tmp_path / "cache", None)
    os.chown(cache.folder, 12345, -1)
    with refused(UsageError):
        open_cache(cache.folder, None)
    monkeypatch.setenv("SHARDKIT_STORE_SHARED_CACHE", "1")
    open_cache(cache.folder, None)


@pytest.mark.parametrize("name", ["shards", "datasets"])
def test_a_planted_link_removes_nothing(tmp_path: Path, name: str) -> None:
    cache = open_cache(tmp_path / "cache", 0)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / ("a" * 64)).write_bytes(b"mine")
    (cache.folder / name).rmdir()
    (cache.folder / name).symlink_to(foreign)

    with pytest.raises(UsageError, match="symbolic link"):
        open_cache(cache.folder, 0)
    if name == "shards":  # planted after it was opened
        with pytest.raises(OSError, match="symbolic link"):
            cache._make_room(SIZE, cache.shard("b" * 64), lambda: None)
    assert (foreign / ("a" * 64)).read_bytes() == b"mine"


def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    cache, file = open_cache(tmp_path / "cache", None), remote(1)
    (tmp_path / "thesis").write_bytes(b"years of work")
    os.link(tmp_path / "thesis", cache.shard(file.sha256).with_suffix(".part"))

    assert fetch(cache, 1).read_bytes() == content(1)

    assert (tmp_path / "thesis").read_bytes() == b"years of work"
    assert (tmp_path / "thesis").stat().st_nlink == 1


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_a_pipe_does_not_hang(tmp_path: Path, suffix: str) -> None:
    cache, file = open_cache(tmp_path / "cache", None), remote(1)
    os.mkfifo(cache.folder / "shards" / f"{file.sha256}{suffix}")
    if not suffix:
        assert fetch(cache, 1).read_bytes() == content(1)
    else:
        with refused(OSError):
            fetch(cache, 1)


def test_a_planted_shard_is_replaced(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "cache", None)
    path = cache.shard(remote(1).sha256)
    path.write_bytes(content(2))

    assert fetch(cache, 1).read_bytes() == content(1)

    path.unlink()  # and then by a file of the same inode, most likely
    path.write_bytes(content(2))
    assert fetch(cache, 1).read_bytes() == content(1)


def test_a_shard_is_compared_once_for_each_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, compared = open_cache(tmp_path / "cache", None), []

    def has_sha256(path: Path, *_: object) -> bool:
        compared.append(path)
        return True

    def later() -> None:
        """Fetch in a new process of this user."""
        cache_module._compared.clear()
        cache.fetch(remote(1), path, filling(b""))

    monkeypatch.setattr(cache_module, "has_sha256", has_sha256)
    path = fetch(cache, 1)
    later()
    assert not compared  # what this user has fetched
    os.utime(path, ns=(0, path.stat().st_mtime_ns))  # as readers note that it is used
    later()
    assert not compared
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other-user"))
    later()
    later()
    assert compared == [path]
    path.chmod(0o666)  # now anybody may have changed it
    path.write_bytes(content(2))
    cache_module._compared.clear()
    assert fetch(cache, 1).read_bytes() == content(1)
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")  # cannot be written: once for each process
    cache_module._compared.clear()
    fetch(cache, 1)
    fetch(cache, 1)
    assert compared == [path, path]
