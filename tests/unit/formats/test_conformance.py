"""Every registered storage format passes the conformance suite; old libraries read its files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import FORMATS, python
from stated import done

from shardkit import convert, open_dataset
from shardkit.testing import FormatConformance


class TestHdf5(FormatConformance):
    name = "hdf5"


class TestLmdb(FormatConformance):
    name = "lmdb"


class TestWebdataset(FormatConformance):
    name = "webdataset"


def test_these_are_all_formats() -> None:
    (offered,) = re.findall(r"--to \[([\w|]+)\]", done("convert", "imagefolder", "--help"))
    assert tuple(offered.split("|")) == FORMATS


# Our files open with old versions of lmdb and h5py, which scripts/setup installs.

ROOT = Path(__file__).parents[3]
OLD = ROOT / ".venv" / "old-readers"

LMDB = """
import json, sys, lmdb
with lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False) as environment:
    with environment.begin() as transaction:
        rows = range(transaction.stat()["entries"] // 4)
        get = transaction.get
        read = [[int(get(b"%09d.cls" % row)),
                 len(get(b"%09d.jpg" % row) or get(b"%09d.png" % row) or b"")]
                for row in rows]
print(json.dumps([lmdb.__version__, read]))
"""

HDF5 = """
import json, sys, h5py
with h5py.File(sys.argv[1], "r") as file:
    sizes = sum(file[name]["offsets"][1:] - file[name]["offsets"][:-1] for name in ("jpg", "png"))
    read = list(map(list, zip(file["cls/data"][:].tolist(), sizes.tolist())))
print(json.dumps([h5py.__version__, read]))
"""


@pytest.mark.skipif(not OLD.exists(), reason="no old lmdb and h5py for this Python")
@pytest.mark.parametrize(
    ("name", "code", "newest"), [("lmdb", LMDB, (1, 4)), ("hdf5", HDF5, (3, 10))]
)
@pytest.mark.slow
def test_old_library_versions_open_our_shards(
    name: Any, code: str, newest: tuple[int, int], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    for label in ("circle", "square"):
        (source / label).mkdir(parents=True)
        for path in (ROOT / "sample_data" / label).iterdir():
            (source / label / path.name).write_bytes(path.read_bytes())
    convert(source, tmp_path / "out", to=name)
    dataset = open_dataset(tmp_path / "out", decode="bytes")
    (shard,) = (tmp_path / "out").glob("shard-*")

    done = python(code, shard, env={"PYTHONPATH": str(OLD)}, timeout=240)
    assert done.returncode == 0, done.stderr
    version, read = json.loads(done.stdout)

    assert tuple(map(int, version.split(".")[:2])) <= newest
    assert read == [[label, len(data)] for data, label in dataset[:]]
