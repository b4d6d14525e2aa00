"""No behavior depends on ``assert``: everything works the same under ``python -O``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import FORMATS, execute, make_folder

ROUND_TRIP = """
import sys
from pathlib import Path
from shardkit import convert, repair, verify
from shardkit.errors import CorruptRecord
from shardkit.dataset.shardset import open_shards

assert False, "this is not python -O"


def outcome(shards, row):
    try:
        image = shards.find(shards.resolve_rows([row])).read(0, memoryview(bytearray(4096)))
    except CorruptRecord:
        return "refused"
    return bytes(image.data)


source, *places = map(Path, sys.argv[1:])
for place in places:
    convert(source, place, to=place.name, shard_samples=4)
    print(verify(place, against=source).ok)
    shards = open_shards(place)
    images = [(source / path).read_bytes() for path in shards.paths]
    print([outcome(shards, row) for row in range(6)] == images)

    path = shards.files.path(0)
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[before.index(images[1]) + 9] ^= 1
    path.write_bytes(damaged)
    print({finding.path for finding in verify(place).findings} == {None, shards.paths[1]})
    found = [outcome(open_shards(place), row) for row in range(6)]
    print(found == [images[0], "refused", *images[2:]])
    repair(place, source)
    print(path.read_bytes() == before)
"""
"""In one process and without torch: Python may have no optimized bytecode, and compile it all."""


@pytest.mark.slow
def test_everything_works_without_assertions(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "photos")
    places = [tmp_path / to for to in FORMATS]
    done = execute(sys.executable, "-O", "-c", ROUND_TRIP, source, *places)
    assert (done.stdout.split(), done.stderr) == (["True"] * 5 * len(FORMATS), "")
