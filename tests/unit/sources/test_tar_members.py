"""Tar archives by many programs: the same members as `tarfile` and webdataset find."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from refusals import refused
from tars import LONG, PRODUCERS, SHORT_NAMES, NotInstalledError

from shardkit.errors import BadImage
from shardkit.sources.inputs import OpenedFile
from shardkit.sources.tar_members import content, members

HOLES = b"".join(bytes(50_000) + b"%d" % number for number in range(40)) + bytes(60_000)
"""The content of a file that programs may store as sparse."""


def files_for(producer: str) -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    names = [
        "cat/1.png",
        "cat/1.cls",
        "dog/größe.png",
        "dog/größe.cls",
        "a.b/c d.left.png",
        "e.bin",
    ]
    if not any(word in producer for word in SHORT_NAMES):
        names.append(LONG)
    return {
        name: HOLES if name == "e.bin" else rng.bytes(int(rng.integers(0, 2000))) for name in names
    }


def found_in(path: Path) -> list[tuple[str, bytes]]:
    with OpenedFile(str(path), ahead=1 << 14) as view:
        return [(member.name, content(view, member)) for member in members(view) if not member.what]


def by_webdataset(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        members = webdataset.tariterators.tar_file_expander([{"url": "", "stream": file}])
        return {
            f"{sample['__key__']}.{suffix}": data
            for sample in webdataset.tariterators.group_by_keys(members)
            for suffix, data in sample.items()
            if not suffix.startswith("__")
        }


@pytest.mark.parametrize("producer", PRODUCERS)
def test_all_members_are_found(producer: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    files = files_for(producer)
    try:
        PRODUCERS[producer](path, files)
    except NotInstalledError as error:
        pytest.skip(f"{error} is not installed")
    found = found_in(path)
    with tarfile.open(path) as archive:
        regular = [member for member in archive if member.isreg()]
        expected = [(each.name, archive.extractfile(each).read()) for each in regular]  # type: ignore[union-attr]
    assert sorted({name.removeprefix("./"): data for name, data in found}.items()) == sorted(
        files.items()
    )
    if producer != "cpio, tar":
        assert found == expected
    if "sparse" in producer or producer == "bsdtar, pax":
        assert path.stat().st_size < len(HOLES) / 2
    assert by_webdataset(path) == dict(found)


@pytest.mark.parametrize("end", [0, 512, 700, 1500, 2048, 2100, 3072])
def test_a_truncated_archive_is_reported_after_its_good_members(end: int, tmp_path: Path) -> None:
    PRODUCERS["Python, ustar"](tmp_path / "x.tar", {"a.jpg": b"1" * 600, "b.jpg": b"2"})
    data = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(data[:end])
    names: list[str] = []
    with OpenedFile(str(tmp_path / "x.tar")) as view, pytest.raises(BadImage, match="truncated"):
        names.extend(member.name for member in members(view))
    good = [
        name for name, stop in (("folder/", 512), ("a.jpg", 2048), ("b.jpg", 3072)) if end >= stop
    ]
    assert names == good


def test_joined_and_damaged_archives_are_reported(tmp_path: Path) -> None:
    PRODUCERS["Python, ustar"](tmp_path / "x.tar", {"a.jpg": b"1", "b.jpg": b"2"})
    data = (tmp_path / "x.tar").read_bytes()
    (tmp_path / "x.tar").write_bytes(data * 2)
    with OpenedFile(str(tmp_path / "x.tar")) as view, pytest.raises(BadImage, match="joined"):
        list(members(view))
    (tmp_path / "x.tar").write_bytes(data[:512] + b"?" + data[513:])
    with OpenedFile(str(tmp_path / "x.tar")) as view, pytest.raises(BadImage, match="damaged"):
        list(members(view))


@pytest.mark.parametrize("field", [slice(124, 136), slice(386, 398), slice(483, 495)])
def test_a_number_of_88_bits_is_damage(field: slice, tmp_path: Path) -> None:
    """It fitted in no column of the list of images."""
    header = bytearray(tarfile.TarInfo("a.png").tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[field] = b"\x80" + b"\xff" * 11
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "x.tar"
    path.write_bytes(bytes(header) + bytes(1024))
    with refused(BadImage):
        found_in(path)
