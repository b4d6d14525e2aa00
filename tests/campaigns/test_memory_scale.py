"""Attach, merge and what reads datasets take as much memory for many rows as for few."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from helpers import png, python

from shardkit import attach, convert, open_source

pytestmark = [pytest.mark.measures, pytest.mark.timeout(1200)]

COUNTS = 50_000, 200_000
"""Numbers of rows. Lists of fewer rows are in memory: writing them to a file would take longer."""

_OF_ARCHIVE = 5000
"""Images of an archive, and of a shard: those of one are in memory while it is listed or built."""

MOST = 1.1
"""Maximum memory for four times the rows; a list of their keys would take a third more."""

MEASURED = """
import resource, sys
from shardkit import attach, diff, merge, verify
from shardkit.dataset import index_reader
from shardkit.exporting.export import export
from shardkit.reporting.describe import describe
from shardkit.verification.reindex import reindex

index_reader._HELD = 0  # random reads hold the rows of small datasets, and no others
verbs = {
    "attach": lambda tar, target: attach(tar, target),
    "diff": lambda one, other: diff(one, other).equal,
    "export": lambda dataset, target: export(dataset, target, layout="webdataset"),
    "index": lambda dataset: reindex(dataset),
    "info": lambda dataset: describe(dataset),
    "merge": lambda *paths: merge(paths[:-1], paths[-1]),
    "verify": lambda dataset: verify(dataset).ok,
}
assert verbs[sys.argv[1]](*sys.argv[2:])
print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return a folder for each count, with archives of so many rows, and datasets of them."""
    folders = {}
    for count in COUNTS:
        folder = folders[count] = tmp_path_factory.mktemp(f"rows-{count}")
        for name, rows in (("a", count), ("b", 1000)):
            make_archives(folder / f"archives {name}", rows, name)
            source = open_source("webdataset", folder / f"archives {name}")
            convert(source, folder / name, to="lmdb", check="none", shard_samples=_OF_ARCHIVE)
        attach(folder / "archives a", folder / "attached")
    return folders


def make_archives(folder: Path, count: int, prefix: str) -> None:
    """Write tar archives of tiny images."""
    folder.mkdir()
    image = png(2, 2)
    member = tarfile.TarInfo()
    member.size = len(image)
    for start in range(0, count, _OF_ARCHIVE):
        with (folder / f"{start:08d}.tar").open("wb") as file:
            for number in range(start, min(start + _OF_ARCHIVE, count)):
                member.name = f"{prefix}{number:08d}.png"
                file.write(member.tobuf(tarfile.USTAR_FORMAT) + image + bytes(-len(image) % 512))
            file.write(bytes(1024))


def peaks(places: dict[int, Path], verb: str, *names: str) -> list[int]:
    """Return the most memory, in KiB, that a process of a verb has used, for each count."""
    measured = []
    for folder in places.values():
        settings: dict[str, Any] = {"env": {"OPENBLAS_NUM_THREADS": "1"}, "timeout": 1000}
        done = python(MEASURED, verb, *(folder / n for n in names), check=True, **settings)
        measured.append(max(map(int, done.stdout.split())))
    return measured


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        ("attach", ("archives a", "new index")),
        ("attach", ("archives a", "attached")),  # a rerun
        ("export", ("a", "exported")),
        ("index", ("a",)),
        ("info", ("a",)),
        ("merge", ("a", "b", "merged")),
        ("verify", ("a",)),
        ("verify", ("attached",)),
    ],
)
def test_four_times_the_rows_take_no_more_memory(
    places: dict[int, Path], verb: str, names: tuple[str, ...]
) -> None:
    few, many = peaks(places, verb, *names)
    assert many < MOST * few, (few, many)


def test_diff_holds_no_keys(places: dict[int, Path]) -> None:
    """It holds the entries of both indexes of this size, 32 bytes a row, but no key."""
    few, many = peaks(places, "diff", "a", "a")
    assert many - few < 96 * (COUNTS[1] - COUNTS[0]) / 1024, (few, many)
