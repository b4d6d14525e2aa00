"""Tar archives by many programs as a source: grouping, labels, and all that is reported."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from foreign import problems
from helpers import encoded, png, run_main
from PIL import Image
from refusals import refused
from tars import LONG, PRODUCERS, SHORT_NAMES, NotInstalledError

from shardkit import convert, open_dataset, open_source, verify
from shardkit.errors import BadImage, BadImages, UsageError
from shardkit.sources.inputs import OpenedFile
from shardkit.sources.tar_members import content, members

A, B, C = (png(8, 6, seed) for seed in range(3))


def tar(path: Path, *files: tuple[str, bytes]) -> Path:
    """Write files in this order; names may repeat."""
    with tarfile.open(path, "w") as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def scan(path: str | Path, **options: Any) -> Any:
    return open_source("webdataset", path, **options).scan()


def rows(found: Any) -> list[tuple[str, bytes, str | None]]:
    """Return path, image and class of each sample."""
    records = found.splits[""].read(range(len(found.splits[""])))
    names = found.classes or ()
    return [
        (r.meta["path"], r.fields["png"], names[r.label] if r.label >= 0 else None) for r in records
    ]


def test_folders_of_an_archive_may_be_classes(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", ("p/a/1.png", A), ("p/a/2.png", B), ("p/b/1.png", C))
    (note,) = scan(path).notes
    assert "p/a" in note
    assert "label='folder'" in note
    assert scan(path, label="none").notes == []
    assert [name for *_, name in rows(scan(path, label="folder"))] == ["p/a", "p/a", "p/b"]


def test_members_of_a_sample_need_not_be_adjacent(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        ("b.png", B),
        ("a.png", A),
        ("./a.cls", b"x"),
        ("a.cls", b"7\n"),
        ("b.cls", b"3"),
    )
    found = scan(path)
    assert rows(found) == [("b.png", B, "3"), ("a.png", A, "7")]
    assert found.classes == tuple("01234567")
    assert problems(found) == {"x.tar:./a": "its sample has no image; it has cls"}


def test_each_grouping_divides_names_by_its_rule(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        ("v1.0/img.001.png", A),
        ("v1.0/img.001.cls", b"1"),
        ("v1.0/img.002.PNG", B),
        ("v1.0/img.002.cls", b"0"),
    )
    assert [row[0] for row in rows(scan(path, grouping="basename"))] == [
        "v1.0/img.001.png",
        "v1.0/img.002.PNG",
    ]
    (reason,) = problems(scan(path, label="none")).values()
    assert reason.startswith(
        "its sample has 2 images (001.png, 002.png): choose one with the option image"
    )
    chosen = scan(path, grouping="huggingface", image="002.PNG", label="001.cls")
    assert rows(chosen) == [("v1.0/img.002.PNG", B, "1")]
    with refused(UsageError):
        scan(path, grouping="other")


def test_labels_come_from_members_json_or_folders(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        ("cat/1.png", A),
        ("cat/1.json", b'{"info": {"ids": [4, 2]}, "name": "tiger"}'),
        ("dog/2.png", B),
        ("dog/2.json", b'{"info": {"ids": [1]}, "name": 1.5}'),
    )
    assert rows(scan(path)) == [("cat/1.png", A, None), ("dog/2.png", B, None)]
    assert scan(path).understood["unused"] == "json (2)"
    assert rows(scan(path, label="folder")) == [("cat/1.png", A, "cat"), ("dog/2.png", B, "dog")]
    assert [row[2] for row in rows(scan(path, label="json:/info/ids/0"))] == ["4", "1"]
    with refused(UsageError, "tiger", "classes="):
        scan(path, label="json:/name")
    assert "neither an integer nor text" in problems(scan(path, label="json:/info"))["x.tar:dog/2"]
    assert (
        "no label at json:/info/ids/1"
        in problems(scan(path, label="json:/info/ids/1"))["x.tar:dog/2"]
    )
    (tmp_path / "names.txt").write_text("zero\none\ntwo\nthree\nfour\n")
    named = scan(path, label="json:/info/ids/0", classes=str(tmp_path / "names.txt"))
    assert named.classes == ("zero", "one", "two", "three", "four")
    assert [row[2] for row in rows(named)] == ["four", "one"]
    (tmp_path / "names.txt").write_text("zero\none\n")
    with refused(UsageError, "4", "classes=", "2"):
        scan(path, label="json:/info/ids/0", classes=str(tmp_path / "names.txt"))


def test_labels_of_a_usual_name_are_used_or_noted(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", ("a.png", A), ("a.txt", b"a cat"), ("a.label", b"7"))
    assert rows(scan(path))[0][2] == "7"
    path = tar(tmp_path / "y.tar", ("a.png", A), ("a.json", b'{"label": 7, "caption": "a cat"}'))
    found = scan(path)
    assert rows(found)[0][2] is None
    (note,) = found.notes
    assert "json:/label" in note
    for options in {"label": "json:/label"}, {"label": "none"}, {"keep": "n=json:/label:int64"}:
        assert scan(path, **options).notes == []


def test_everything_that_is_left_out_is_named(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        ("a.png", A),
        ("a.cls", b"0"),
        ("a.png", B),
        ("b.png", B),
        ("README", b"read me"),
        ("__info__", b"{}"),
        ("c.txt", b"caption"),
        ("d.png", C),
        ("d.cls", b"['0']"),
    )
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("e.png")
        link.type, link.linkname = tarfile.LNKTYPE, "a.png"
        archive.addfile(link)
    found = scan(path)
    assert rows(found) == [("a.png", A, "0")]
    assert problems(found) == {
        "x.tar:a.png (again)": "the archive has two members with this name",
        "x.tar:b": "its sample has no member cls",
        "x.tar:c": "its sample has no image; it has txt",
        "x.tar:d": "its label at cls is a list, \"['0']\"; for several labels, use the option "
        "labels",
    }
    ignored = {problem.path: problem.reason for problem in found.ignored[""]}
    assert ignored == {
        "x.tar:README": "not part of a sample",
        "x.tar:__info__": "not part of a sample",
        "x.tar:e.png": "a hard link",
    }
    with pytest.raises(BadImages, match="4 bad files"):
        convert(found.source, tmp_path / "made", to="lmdb")
    convert(found.source, tmp_path / "made", to="lmdb", on_error="skip")
    assert verify(tmp_path / "made", against=path).findings == []
    assert len(open_dataset(tmp_path / "made")) == 1


def test_several_archives_are_one_dataset(tmp_path: Path) -> None:
    for number, data in enumerate((A, B, C)):
        tar(tmp_path / f"x-{number:03d}.tar", ("000.png", data), ("000.cls", b"%d" % number))
    (tmp_path / "sizes.json").write_text("{}")
    expected = [(f"x-{n:03d}/000.png", data, str(n)) for n, data in enumerate((A, B, C))]
    for pattern in ("x-{000..002}.tar", "x-*.tar", "x-00[0-2].tar", "x-{000,001,002}.tar", ""):
        assert rows(scan(tmp_path / pattern)) == expected
    assert [p.path for p in scan(tmp_path).ignored[""]] == ["sizes.json"]
    (tmp_path / "x-001.tar").unlink()
    with pytest.raises(UsageError, match=r"1 files of .* are missing: .*x-001\.tar"):
        scan(tmp_path / "x-{000..002}.tar")
    with refused(UsageError):
        scan(tmp_path / "y.tar")
    with pytest.raises(UsageError, match="twice"):
        scan(tmp_path / "x-{000,000}.tar")


def test_a_truncated_archive_keeps_its_good_samples(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", ("a.png", A), ("b.png", B), ("c.png", C))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(C) + 10])
    found = scan(path)
    assert [row[0] for row in rows(found)] == ["a.png", "b.png"]
    assert problems(found) == {"x.tar (rest)": "the archive is truncated in the member 'c.png'"}
    convert(found.source, tmp_path / "made", to="hdf5", on_error="skip")
    assert verify(tmp_path / "made", against=path).findings == []


def test_compressed_and_sparse_archives_are_read(tmp_path: Path) -> None:
    plain = tar(tmp_path / "x.tar", ("a.png", A), ("b.png", B))
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert rows(scan(tmp_path / "y.tar.gz")) == rows(scan(plain))
    bmp = b"BM" + bytes(8) + bytes([54, 0, 0, 0, 40]) + bytes(300_000)
    PRODUCERS["GNU tar, sparse 1.0"](tmp_path / "z.tar", {"a.bmp": bmp})
    assert (tmp_path / "z.tar").stat().st_size < 50_000
    (record,) = scan(tmp_path / "z.tar").splits[""].read([0])
    assert record.fields["bmp"] == bmp
    (tmp_path / "y.tar.gz").write_bytes(gzip.compress(plain.read_bytes())[:-20])
    assert "truncated" in problems(scan(tmp_path / "y.tar.gz"))["y.tar.gz (rest)"]


def test_the_command_shows_how_archives_are_understood(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", ("a.png", A), ("a.cls", b"1"), ("a.txt", b"hello"))
    done = run_main("convert", "webdataset", path, tmp_path / "made", "--to", "lmdb", "--dry-run")
    assert done.returncode == 0
    for line in (
        "  archives  1, containing 1 samples grouped by the webdataset rule",
        "  image     png (1)",
        "  label     cls: 1 integer from 1 to 1",
        "  unused    txt (1)",
        "  first     a.png, 1",
    ):
        assert line in done.stdout.splitlines()
    done = run_main(
        "convert", "webdataset", tmp_path / "no-{0..3}.tar", tmp_path / "m", "--to", "lmdb"
    )
    assert done.returncode == 2
    assert "4 files of" in done.stderr
    done = run_main("convert", "webdataset", path, tmp_path / "m", "--to=lmdb", "--label=json:/x")
    assert done.returncode == 1
    assert "its sample has no member json" in done.stderr


def npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_more_fields_are_kept(tmp_path: Path) -> None:
    mask = encoded(Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8)), "PNG")
    latent = np.arange(6, dtype=np.float16).reshape(2, 3)
    path = tar(
        tmp_path / "x.tar",
        ("a.txt", "größe".encode()),
        ("a.png", A),
        ("a.json", b'{"age": 7, "boxes": [[0, 0, 4, 3]], "who": {"name": "x"}}'),
        ("a.npy", npy(latent)),
        ("a.mask.png", mask),
        ("a.score", b"1.5\n"),
        ("b.png", B),
        ("b.txt", b"b"),
        ("b.json", b'{"age": -1, "boxes": [], "who": {"name": "y"}}'),
        ("b.npy", npy(latent)),
        ("b.score", b"2"),
        ("c.png", C),
    )
    keep = "caption=txt,info=json,age=json:/age:int64,name=json:/who/name:text,"
    keep += "boxes=json:/boxes:boxes,latent=npy,mask=mask.png:mask?,score=score:float64"
    found = scan(path, keep=keep)
    assert problems(found) == {"x.tar:c": "its sample has no member txt; to allow this, write txt?"}
    assert found.understood["caption"] == "txt: text"
    assert found.understood["unused"] == "no member"
    convert(found.source, tmp_path / "made", to="lmdb", shuffle=False, on_error="skip")
    assert verify(tmp_path / "made", against=path).findings == []
    shards = open_dataset(tmp_path / "made")
    assert shards.column("caption").tolist() == ["größe", "b"]
    assert shards.column("age").tolist() == [7, -1]
    assert shards.column("name").tolist() == ["x", "y"]
    assert shards.column("score").tolist() == [1.5, 2.0]
    assert shards.column("info")[0]["who"] == {"name": "x"}
    assert shards.column("boxes")[0].tolist() == [[0, 0, 4, 3]]
    first, second = found.splits[""].read([0, 1])
    assert first.fields["mask.png"] == mask
    assert "mask.png" not in second.fields
    assert np.load(io.BytesIO(first.fields["latent.npy"])).tolist() == latent.tolist()


def test_fields_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "x.tar",
        ("a.png", A),
        ("a.json", b"{1}"),
        ("a.more.json", b'{"a": {}}'),
        ("a.npy", b"x"),
        ("a.txt", b"\xff"),
    )
    for keep, reason in (
        ("Caption=txt", r"is not \[NAME=\]SOURCE"),
        ("caption=txt:story", "kinds are image, mask, array"),
        ("label=txt", "only the label of a record can be named 'label'"),
        ("a=txt,a=json", "names a field twice"),
        ("width=txt", "a field cannot be named 'width'"),
    ):
        with pytest.raises(UsageError, match=reason):
            scan(path, keep=keep)
    for keep, reason in (
        ("info=json", "info: json is not a valid json value"),
        ("n=more.json:/a/b", "n: more.json has no value at /a/b"),
        ("latent=npy", "latent: npy is not a valid array value: not an .npy file"),
        ("caption=txt", "caption: txt is not a valid text value"),
        ("age=txt:int64", "age: txt is not a valid number value"),
        ("boxes=txt:boxes", "boxes: txt is not a valid boxes value"),
    ):
        with pytest.raises(ValueError, match=reason):
            rows(scan(path, keep=keep))


# Tar archives by many programs: the same members as `tarfile` and webdataset find.

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
        return [(member.name, content(view, member)) for member in members(view) if not member.kind]


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
    with OpenedFile(str(tmp_path / "x.tar")) as view, pytest.raises(BadImage, match="concatenated"):
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
