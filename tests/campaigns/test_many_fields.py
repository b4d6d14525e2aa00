"""Kill, damage and repair datasets with fields of all kinds."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign import cases, draw, points
from kinds import SAMPLES, SCHEMA, content, contents, same

from shardkit import ShardkitError, convert, repair, verify
from shardkit.dataset.shardset import ShardSet, open_shards
from shardkit.record import ABSENT
from shardkit.verification.reindex import reindex

FORMATS = ("hdf5", "lmdb", "webdataset")
SECONDS = 240


def make(path: Path, to: Any) -> None:
    convert(SAMPLES, path, to=to, schema=SCHEMA, shard_samples=2)


def make_and_die(path: Path, to: str, calls: int) -> None:
    """Convert, and kill this process before the given call that syncs a file or folder."""
    left, sync = calls, os.fsync

    def fsync(fd: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(fd)

    os.fsync = fsync
    make(path, to)


@pytest.fixture(scope="module", params=cases(FORMATS, 1))
def intact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / str(request.param)
    make(path, request.param)
    return path


def test_a_killed_conversion_resumes_to_the_same_bytes(intact: Path, tmp_path: Path) -> None:
    to, expected, ended = intact.name, contents(intact), 0
    context = multiprocessing.get_context("forkserver")
    for calls in range(draw(to).randint(1, 6), 400, points(7, 1)):
        place = tmp_path / str(calls)
        child: Any = context.Process(target=make_and_die, args=(place, to, calls))
        child.start()
        child.join(SECONDS)
        assert child.exitcode in {0, -signal.SIGKILL}
        ended += child.exitcode == 0
        if child.exitcode == 0:
            assert contents(place) == expected
            break
        assert not (place / "shardkit.json").exists() or verify(place).ok
        make(place, to)
        assert contents(place) == expected
        shutil.rmtree(place)
    assert ended
    assert calls > 20


def test_no_damage_is_missed_and_no_wrong_value_is_returned(intact: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(intact, tmp_path / "copy"))
    rng = draw(intact.name)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    for _ in range(points(30, 2000)):
        path = rng.choice(files)
        before = path.read_bytes()
        path.write_bytes(damaged(before, rng))
        if path.read_bytes() != before:
            assert not verify(place).ok, path
            require_right_or_refused(place)
        path.write_bytes(before)
    assert verify(place, "decode").ok


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file with a flipped bit, a block of zeros, without its end, or with more."""
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        size = min(rng.randrange(1, 64), len(data) - at)
        return data[:at] + bytes(size) + data[at + size :]
    return data[:at] if kind == 2 else data + bytes(rng.randrange(1, 700))


def require_right_or_refused(place: Path) -> None:
    """Read all values of a damaged dataset: each is right, or an error."""
    try:
        dataset = open_shards(place, verify=True)
        order = [int(path) for path in dataset.paths]
    except ShardkitError:
        return
    for name, values in columns(dataset):
        for row, number in enumerate(order):
            value = SAMPLES[number].get(name)
            assert same(dataset.schema[name], values[row], value), name
    for name, field in dataset.schema.items():
        if field.kind not in ("image", "mask", "array", "bytes"):
            continue
        for row, number in enumerate(order):
            try:
                entry = dataset.find(np.array([row]), name)
                data = bytes(entry.read(0, memoryview(bytearray(1 << 16))).data)
            except ShardkitError:
                continue
            value = SAMPLES[number].get(name)
            assert data == content(field, value), name
            assert (entry.fields[0] == ABSENT) == (value is None)


def columns(dataset: ShardSet) -> Iterator[tuple[str, Any]]:
    """Yield the columns that can be read."""
    for name, field in dataset.schema.items():
        if field.kind in ("image", "mask", "array", "bytes"):
            continue
        try:
            yield name, dataset.column(name)
        except ShardkitError:
            continue


def test_every_file_can_be_rebuilt(intact: Path, tmp_path: Path) -> None:
    expected = contents(intact)
    rng = draw(intact.name)
    for name in sorted(expected.keys() - {"shardkit.json"}):
        for lost in (True, False):
            place = Path(shutil.copytree(intact, tmp_path / "copy"))
            (place / name).unlink()
            if not lost:
                (place / name).write_bytes(damaged(expected[name], rng))
            repaired = repair(place, SAMPLES)
            assert repaired.findings == []
            assert contents(place) == expected
            if name.startswith("index/"):
                (place / name).unlink()
                reindex(place)
                assert contents(place) == expected
            shutil.rmtree(place)
