"""The walk over LMDB's pages equals the lmdb library, or refuses the file."""

from __future__ import annotations

import os
import random
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats.lmdb import FORMAT_OPTIONS
from shardkit.formats.lmdb_pages import MalformedLmdbError, walk

VALUES = st.binary(max_size=60) | st.sampled_from(
    [b"", b"x" * 1990, b"y" * 2030, b"z" * 2040, b"o" * 4080, b"p" * 4081, b"q" * 20_000]
)
"""LMDB puts values of about 2 KB and more on pages of their own; 4080 bytes fill one."""

KEYS = st.binary(min_size=1, max_size=40) | st.binary(min_size=505, max_size=511)


def fill(path: Path, *transactions: Mapping[bytes, bytes | None]) -> None:
    """Write a file with the lmdb library; None deletes a key."""
    with lmdb.open(
        str(path), subdir=False, lock=False, sync=False, map_size=1 << 28, **FORMAT_OPTIONS
    ) as environment:
        for changes in transactions:
            with environment.begin(write=True) as transaction:
                for key, value in changes.items():
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)


def library(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the content that the lmdb library reads."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment,
        environment.begin() as transaction,
    ):
        return [(bytes(key), bytes(value)) for key, value in transaction.cursor()]


def walked(path: Path) -> list[tuple[bytes, bytes]]:
    """Return the content that the walk finds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        entries = list(walk(descriptor, os.fstat(descriptor).st_size))
        return [(e.key, os.pread(descriptor, e.length, e.offset)) for e in entries]
    finally:
        os.close(descriptor)


@given(st.dictionaries(KEYS, VALUES, max_size=40))
def test_the_walk_equals_the_library(content: dict[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        fill(path, content)
        assert walked(path) == library(path) == sorted(content.items())


@settings(max_examples=30)
@given(st.lists(st.dictionaries(KEYS, st.none() | VALUES, max_size=15), max_size=4))
def test_the_newest_state_of_a_changed_file_is_read(
    transactions: list[dict[bytes, bytes | None]],
) -> None:
    expected: dict[bytes, bytes | None] = {}
    for changes in transactions:
        expected |= changes
    left = sorted((key, value) for key, value in expected.items() if value is not None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        fill(path, *transactions)
        assert walked(path) == library(path) == left


def test_trees_of_several_levels_are_read(tmp_path: Path) -> None:
    rng = random.Random(0)
    content = {rng.randbytes(rng.randint(100, 511)): rng.randbytes(20) for _ in range(4000)}
    path = tmp_path / "file"
    fill(path, content)
    with lmdb.open(str(path), subdir=False, lock=False, readonly=True) as environment:
        assert environment.stat()["depth"] >= 4
    assert walked(path) == library(path) == sorted(content.items())


def test_a_file_with_named_databases_is_refused(tmp_path: Path) -> None:
    with lmdb.open(
        str(tmp_path / "file"), subdir=False, lock=False, max_dbs=1, **FORMAT_OPTIONS
    ) as environment:
        environment.open_db(b"other")
    with pytest.raises(MalformedLmdbError, match="other"):
        walked(tmp_path / "file")


def test_a_database_with_duplicate_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fill(path, {b"a": b"1"})
    data = bytearray(path.read_bytes())
    for meta in (0, 4096):
        flags = meta + 16 + 24 + 48 + 4  # after the page's header, the meta and the first database
        data[flags] |= 0x04
    path.write_bytes(data)
    with pytest.raises(MalformedLmdbError, match="duplicates"):
        walked(path)


@pytest.mark.skipif(int(lmdb.__version__.split(".")[0]) < 3, reason="this lmdb has no 1.0 format")
def test_a_file_of_lmdb_1_0_is_refused(tmp_path: Path) -> None:
    with (
        lmdb.open(str(tmp_path / "file"), subdir=False, lock=False, lib_version=1) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"a", b"1")
    with pytest.raises(MalformedLmdbError):
        walked(tmp_path / "file")


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 8192, b"junk" * 5000])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(MalformedLmdbError):
        walked(tmp_path / "file")


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of several levels with small and large values; and its bytes."""
    path = tmp_path_factory.mktemp("rich") / "file"
    rng = random.Random(1)
    sizes = [0, 5, 100, 3000, 9000]
    content = {b"%05d" % row * 30: rng.randbytes(sizes[row % 5]) for row in range(150)}
    fill(path, content)
    return path, path.read_bytes()


def test_a_truncation_at_any_page_is_found(rich: tuple[Path, bytes], tmp_path: Path) -> None:
    _, data = rich
    path = tmp_path / "file"
    for cut in [*range(0, len(data), 4096), *range(0, 8192, 101), len(data) - 1]:
        path.write_bytes(data[:cut])
        with pytest.raises(MalformedLmdbError):
            walked(path)


def test_trailing_bytes_are_ignored(rich: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = rich
    (tmp_path / "longer").write_bytes(data + b"more")
    assert walked(tmp_path / "longer") == walked(path)


@pytest.mark.parametrize("seed", range(4))
def test_damage_is_refused_or_gives_entries_and_nothing_else(
    seed: int, rich: tuple[Path, bytes], tmp_path: Path
) -> None:
    _, data = rich
    rng = random.Random(seed)
    structure = structural_positions(data)
    path = tmp_path / "file"
    refused = 0
    for _ in range(250):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 2, 8])):
            position = rng.choice(structure) if rng.random() < 0.9 else rng.randrange(len(data))
            damaged[position] = rng.choice([0, 1, 255, damaged[position] ^ 1 << rng.randrange(8)])
        path.write_bytes(damaged)
        try:
            found = walked(path)
        except MalformedLmdbError:
            refused += 1
        else:
            assert sum(len(value) for _, value in found) <= len(found) * len(data)
    assert refused > 20


def structural_positions(data: bytes) -> list[int]:
    """Return the offsets of headers and pointers of tree pages, and of both meta pages."""
    found = list(range(160)) + list(range(4096, 4256))
    for page in range(8192, len(data), 4096):
        number, flags = (
            int.from_bytes(data[page + a : page + b], "little") for a, b in ((0, 8), (10, 12))
        )
        if number == page // 4096 and flags in (1, 2):  # a branch or a leaf
            lower = int.from_bytes(data[page + 12 : page + 14], "little")
            found += range(page, page + lower)
            for at in range(page + 16, page + lower, 2):
                node = page + int.from_bytes(data[at : at + 2], "little")
                found += range(node, node + 8)
    return found


def test_a_tree_that_shares_its_pages_ends(rich: tuple[Path, bytes], tmp_path: Path) -> None:
    """With two levels that both point 50 times to the level below, a walk would take very long."""
    _, data = rich
    root = int.from_bytes(data[4096 + 16 + 24 + 48 + 40 :][:8], "little") * 4096
    count = (int.from_bytes(data[root + 12 : root + 14], "little") - 16) // 2
    pointers = [
        int.from_bytes(data[root + 16 + 2 * n :][:2], "little") + root for n in range(count)
    ]
    damaged = bytearray(data)
    for pointer in pointers:
        damaged[pointer : pointer + 6] = data[pointers[0] : pointers[0] + 6]
    (tmp_path / "file").write_bytes(damaged)
    with pytest.raises(MalformedLmdbError, match="used twice"):
        walked(tmp_path / "file")


def test_a_tree_deeper_than_any_of_lmdb_is_refused(tmp_path: Path) -> None:
    """A chain of branches with one child each, as long as the file, would exhaust the stack."""
    fill(tmp_path / "file", {b"a": b"1"})
    data = bytearray((tmp_path / "file").read_bytes())
    first = len(data) // 4096
    last = first + 40
    for page in range(first, last + 1):
        header = struct.pack("<QHHHH", page, 0, 1, 18, 20)
        node = struct.pack("<HHHHHH", 20, 0, page + 1, 0, 0, 0)
        data += (header + node).ljust(4096, b"\0")
    for meta in (0, 4096):
        root = meta + 16 + 24 + 48 + 40
        data[root : root + 16] = struct.pack("<QQ", first, last)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(MalformedLmdbError, match="more than 32 levels"):
        walked(tmp_path / "file")
