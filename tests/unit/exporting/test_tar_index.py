"""Indexes of other tools, compared with what tarfile finds in the archives."""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
import struct
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from helpers import jpeg
from refusals import refuses
from stated import done

from shardkit import attach, convert


def tar(path: Path, *files: tuple[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number in range(2):
        files = [
            (f"d/s{number}{row}.{suffix}", data)
            for row in range(3)
            for suffix, data in (("jpg", jpeg(8, 8, row)), ("cls", b"%d" % row))
        ]
        tar(tmp_path / "tars" / f"x-{number}.tar", *files)
    attach(tmp_path / "tars", tmp_path / "index")
    return tmp_path / "tars"


def members(path: Path) -> list[tuple[str, int, int, int]]:
    """Return name, header, content and size of each member, and the end, as tarfile finds them."""
    with tarfile.open(path) as archive:
        found = [(each.name, each.offset, each.offset_data, each.size) for each in archive]
        return [*found, ("", archive.offset, 0, 0)]


def exported(tars: Path, tool: str) -> Path:
    shown = done("index-export", tars.parent / "index", tars.parent / tool, "--as", tool)
    assert f"index of 6 samples for {tool}" in shown
    return tars.parent / tool


def test_energon(tars: Path) -> None:
    made = exported(tars, "energon")
    for path in tars.iterdir():
        found = members(path)
        starts = [each[1] for each in found[::2]]  # two members each, then the end
        content = (made / f"{path.name}.idx").read_bytes()
        assert struct.unpack("4Q", content) == tuple(starts)
    info = json.loads((made / ".nv-meta" / ".info.json").read_text())
    assert info == {"shard_counts": {"x-0.tar": 3, "x-1.tar": 3}}
    with closing(sqlite3.connect(made / ".nv-meta" / "index.sqlite")) as database:
        parts = database.execute(
            "SELECT * FROM sample_parts WHERE tar_file_id = 1 ORDER BY content_byte_offset"
        ).fetchall()
        samples = database.execute(
            "SELECT * FROM samples WHERE tar_file_id = 1 ORDER BY sample_index"
        ).fetchall()
    found = members(tars / "x-1.tar")
    assert parts == [
        (1, row // 2, name.partition(".")[2], offset, size)
        for row, (name, _, offset, size) in enumerate(found[:-1])
    ]
    assert samples == [
        (1, f"d/s1{row}", row, found[2 * row][1], found[2 * row + 2][1] - found[2 * row][1])
        for row in range(3)
    ]


def test_dali(tars: Path) -> None:
    lines = (exported(tars, "dali") / "x-1.idx").read_text().splitlines()
    found = [
        f"{name.partition('.')[2]} {offset} {size} {name}"
        for name, _, offset, size in members(tars / "x-1.tar")[:-1]
    ]
    assert lines == ["v1.2 3", *map(" ".join, zip(found[::2], found[1::2], strict=True))]


def test_wids_and_webshart(tars: Path) -> None:
    index = json.loads((exported(tars, "wids") / "index.json").read_text())
    path = tars / "x-0.tar"
    assert index["shardlist"][0] == {
        "url": str(path),
        "md5sum": hashlib.md5(path.read_bytes()).hexdigest(),
        "nsamples": 3,
        "filesize": path.stat().st_size,
    }
    value = json.loads((exported(tars, "webshart") / "x-0.json").read_text())
    assert value["files"] == {
        name: {"offset": offset, "length": size} for name, _, offset, size in members(path)[:-1]
    }


def test_wids_reads_the_tars_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset", reason="needs the extra dev")
    (tmp_path / "tars").mkdir()
    with webdataset.TarWriter(str(tmp_path / "tars" / "x.tar")) as writer:
        writer.write({"__key__": "a", "jpg": jpeg(8, 8), "cls": 1})
    assert b"mtime=" in (tmp_path / "tars" / "x.tar").read_bytes()  # an extended header
    attach(tmp_path / "tars", tmp_path / "index")

    shown = done("index-export", tmp_path / "index", tmp_path / "out", "--as", "wids")
    assert "index of 1 sample for wids" in shown


@pytest.mark.parametrize(
    ("name", "form", "size"),
    [
        ("\u00e9.jpg", tarfile.PAX_FORMAT, None),
        (f"{'x' * 120}.jpg", tarfile.PAX_FORMAT, None),
        (f"{'d' * 60}/{'x' * 60}.jpg", tarfile.USTAR_FORMAT, None),
        ("a.jpg", tarfile.PAX_FORMAT, "size"),
    ],
)
def test_what_wids_would_misread_is_refused(
    tmp_path: Path, name: str, form: int, size: str | None
) -> None:
    image = jpeg(8, 8)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "x.tar", "w", format=form) as archive:
        info = tarfile.TarInfo(name)
        info.size, info.mtime = len(image), 1.5
        if size:
            info.pax_headers = {"size": str(len(image))}
        archive.addfile(info, io.BytesIO(image))
    if size:  # the header itself states another one, and its sum fits
        content = bytearray((tmp_path / "tars" / "x.tar").read_bytes())
        place = content.index(image) - 512
        content[place + 124 : place + 136] = b"00000000001\0"
        content[place + 148 : place + 156] = b" " * 8
        content[place + 148 : place + 156] = b"%06o\0 " % sum(content[place : place + 512])
        (tmp_path / "tars" / "x.tar").write_bytes(content)
    attach(tmp_path / "tars", tmp_path / "index")

    words = ("index-export", tmp_path / "index", tmp_path / "out", "--as", "wids")
    refuses(2, *words, facts=("wids",))


def test_what_a_tool_cannot_read_is_refused(tars: Path, tmp_path: Path) -> None:
    image = jpeg(8, 8)
    cases = {
        "dali": ([("a b.jpg", image)], "'a b.jpg'"),
        "wids": ([(f"{'x' * 120}.jpg", image)], "100 bytes"),
        "webshart": ([("a.jpg", image), ("b.jpg", image), ("a.txt", b"")], "'a'"),
        "energon": ([("a.jpg", image)], "'a'"),
    }

    def refused(folder: Path, tool: str, *facts: object, to: str = "out") -> None:
        words = ("index-export", folder / "index", folder / to, "--as", tool)
        refuses(2, *words, facts=facts)

    for tool, (files, fact) in cases.items():
        folder = tmp_path / f"of {tool}"
        folder.mkdir()
        for name in ("x.tar", "y.tar")[: 1 + (tool == "energon")]:
            tar(folder / "tars" / name, *files)
        attach(folder / "tars", folder / "index")
        refused(folder, tool, fact)
        assert not (folder / "out").exists()
    exported(tars, "dali")
    refused(tmp_path, "ffcv", *cases, to="new")
    refused(tmp_path, "wids", tmp_path / "dali", to="dali")
    convert([{"image": image}], tmp_path / "made" / "index", to="lmdb")
    refused(tmp_path / "made", "wids", tmp_path / "made")
