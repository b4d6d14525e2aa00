from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable, Mapping
from pathlib import Path

import lmdb
import pytest
from refusals import refused

import shardkit.formats.lmdb as module
from shardkit.contracts import ShardSpec
from shardkit.errors import ConversionFailed, CorruptShard
from shardkit.formats.lmdb import FORMAT, FORMAT_OPTIONS, LmdbReader, LmdbWriter
from shardkit.record import Record
from shardkit.system.npy import npy_header
from shardkit.testing import read_shard, write_shard
from shardkit.testing.tools import call_in


def fill(path: Path, content: Mapping[bytes, bytes]) -> Path:
    """Write a file with only the lmdb library."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, **FORMAT_OPTIONS) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in content.items():
            transaction.put(key, value)
    return path


ROWS = {
    b"000000000.__key__": b"a",
    b"000000000.jpg": b"A",
    b"000000001.__key__": b"b",
    b"000000001.jpg": b"B",
}
"""What our reader accepts, without a description."""


def test_keys_and_values_follow_the_documented_layout(tmp_path: Path) -> None:
    content = [
        Record("k/0", {"cls": b"3", "jpg": b"J", "json": b"{}"}),
        Record("k/1", {"raw": bytes(12), "zzz": b""}),
    ]
    path = write_shard(FORMAT, tmp_path / "s", content, meta={"b": 1, "a": 2}, raw_shape=(2, 2, 3))
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment,
        environment.begin() as transaction,
    ):
        found = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
    assert found == [
        (b"000000000.__key__", b"k/0"),
        (b"000000000.cls", b"3"),
        (b"000000000.jpg", b"J"),
        (b"000000000.json", b"{}"),
        (b"000000001.__key__", b"k/1"),
        (b"000000001.raw.npy", npy_header((2, 2, 3)) + bytes(12)),
        (b"000000001.zzz", b""),
        (b"__shardkit__", b'{"a":2,"b":1}'),
    ]


def test_the_file_has_the_0_9_format_in_any_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMDB_DEFAULT_LIB_VERSION", "1")
    path = write_shard(FORMAT, tmp_path / "s", [Record("a", {"txt": b"A"})])
    assert path.read_bytes()[16:24] == b"\xde\xc0\xef\xbe\x01\0\0\0"  # magic and version


def test_a_full_map_is_doubled_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    content = [Record(f"k{row}", {"bin": rng.randbytes(3000)}) for row in range(2500)]
    content.insert(1200, Record("large", {"bin": rng.randbytes(3 << 20)}))
    monkeypatch.setattr(module, "FIRST_MAP_SIZE", 64 << 10)
    path = write_shard(FORMAT, tmp_path / "small", content)
    assert read_shard(FORMAT, path) == content
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment,
        environment.begin() as transaction,
    ):
        assert transaction.stat()["entries"] == 2 * len(content) + 1
    again = write_shard(FORMAT, tmp_path / "again", content)
    assert again.read_bytes() == path.read_bytes()


def test_an_error_of_lmdb_is_an_os_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LmdbWriter(tmp_path / "s", ShardSpec())
    writer.write(Record("a", {"txt": b"A"}))

    def fail(_: object) -> None:
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(writer, "_put", fail)
    with pytest.raises(OSError, match="Input/output") as caught:
        writer.close()
    assert caught.value.errno == errno.EIO
    assert caught.value.filename == str(tmp_path / "s")
    monkeypatch.setattr(module, "free_bytes", lambda path: 0)
    with pytest.raises(OSError, match="No space") as caught:
        writer.close()
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    monkeypatch.setattr(writer, "_put", fail)
    reason = call_in("fork", error_of_closing, writer)
    assert os.strerror(errno.EFBIG) in reason  # although a part can be written
    writer.abort()


def test_a_map_that_exceeds_the_memory_is_not_blamed_on_the_disk(tmp_path: Path) -> None:
    for write in (LmdbWriter, write_beyond_the_map):
        reason = call_in("fork", error_of_writing, write, tmp_path / write.__name__)
        assert "memory ran out" in reason
        assert "ulimit -v" in reason
        assert str(tmp_path / write.__name__) in reason


def error_of_writing(write: Callable[[Path, ShardSpec], object], path: Path) -> str:
    """Write where the address space has no room for a map; return the error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (128 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with pytest.raises(ConversionFailed) as failed:
        write(path, ShardSpec())
    return str(failed.value)


def write_beyond_the_map(path: Path, spec: ShardSpec) -> None:
    """Double a map that would fit, again and again."""
    module.FIRST_MAP_SIZE = 1 << 16
    writer = LmdbWriter(path, spec)
    writer._map_size = 1 << 40
    writer.write(Record("a", {"bin": bytes(1 << 20)}))
    writer.close()


def error_of_closing(writer: LmdbWriter) -> str:
    """Close a writer where no file may be as large as its trial; return the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (module._TRIAL_BYTES - 1, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="large") as failed:
        writer.close()
    return str(failed.value)


def test_a_record_that_lmdb_does_not_append_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB raises nothing itself: the record would be lost."""
    monkeypatch.setattr(module, "_BATCH_ROWS", 1)
    writer = LmdbWriter(tmp_path / "s", ShardSpec())
    writer.write(Record("a", {"txt": b"A"}))
    writer._rows = 0
    with refused(ValueError, "LMDB"):
        writer.write(Record("b", {"txt": b"B"}))
    writer.abort()


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        LmdbWriter(tmp_path / "missing" / "s", ShardSpec())


def test_a_file_of_the_same_layout_is_read(tmp_path: Path) -> None:
    path = fill(tmp_path / "f", ROWS)
    assert read_shard(FORMAT, path) == [Record("a", {"jpg": b"A"}), Record("b", {"jpg": b"B"})]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({b"000000000.__key__": None}, ()),
        ({b"000000001.__key__": None}, ()),
        ({b"000000000.__key__": b"\xff"}, ("UTF", "-8")),
        ({b"000000000.__key__": b""}, ()),
        ({b"000000000.": b"x"}, ()),
        ({b"000000000": b"x"}, ()),
        ({b"000000000.JPG": b"x"}, ()),
        ({b"000000000.a.b.c": b"x"}, ()),
        ({b"000000000.raw.npy": b"x"}, ()),
        ({b"000000000.raw.npy": b""}, ()),
        ({b"000000000.raw.npy": npy_header((1,) * 26) + b"x"}, ()),
        ({b"000000000.raw.npy": npy_header((2, 2, 3)) + bytes(11)}, ()),
        (
            {
                b"000000000.raw.npy": npy_header((2, 2, 3)) + bytes(12),
                b"000000001.raw.npy": npy_header((2, 2, 3)) + bytes(7),
            },
            (),
        ),
        ({b"000000003.__key__": b"d"}, ("2",)),
        ({b"00000000": b"x"}, ()),
        ({b"0000000000.jpg": b"x"}, ()),
        ({b"\xff": b"x"}, ()),
        ({b"a": b"x"}, ()),
        ({b"__shardkit__": b"{"}, ("JSON",)),
        ({b"__shardkit__": b"[1]"}, ("JSON",)),
        ({b"__shardkit__": b"7"}, ("JSON",)),
        ({b"__shardkit__": b"\xff"}, ("JSON",)),
        ({b"__shardkit__": b"[" * 100_000}, ("JSON",)),
        ({b"__shardkit__": b'["ab","cd"]'}, ("JSON",)),
    ],
)
def test_another_layout_is_a_corrupt_shard(
    change: dict[bytes, bytes | None], reason: tuple[str, ...], tmp_path: Path
) -> None:
    content = {key: value for key, value in (ROWS | change).items() if value is not None}
    with refused(CorruptShard, *reason):
        read_shard(FORMAT, fill(tmp_path / "f", content))


def test_a_file_truncated_after_opening_is_a_corrupt_shard(tmp_path: Path) -> None:
    path = write_shard(FORMAT, tmp_path / "s", [Record("a", {"bin": bytes(20_000)})])
    reader = LmdbReader(path)
    with path.open("r+b") as file:
        file.truncate(12_000)
    with refused(CorruptShard):
        reader.read([0])
    reader.close()
